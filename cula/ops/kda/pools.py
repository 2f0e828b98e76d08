"""Slots of state pools in plain torch: the null rule and a scatter that never reads indices back from a device."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def slot_ids(indices: Tensor | None, count: int, slots: int, null_index: int, device: torch.device) -> Tensor:
    """int64 slot of each row, -1 where it is null or out of range. No indices: row n uses slot n."""
    if indices is None:
        return torch.arange(count, device=device)
    ids = indices.to(device=device, dtype=torch.int64)
    return torch.where((ids == null_index) | (ids < 0) | (ids >= slots), -1, ids)


def scatter_rows(pool: Tensor, ids: Tensor, values: Tensor) -> None:
    """pool[ids[r]] = values[r] for every ids[r] >= 0, without reading ids on the host of a device tensor."""
    if pool.device.type == "cpu":
        keep = ids >= 0
        pool.index_copy_(0, ids[keep], values[keep].to(pool.dtype))
        return
    if pool.shape[0] == 0 or ids.shape[0] == 0:
        return
    # Null rows repeat what the first live row writes; where no row is live, slot 0 gets its own values.
    live = ids >= 0
    first = live.to(torch.int8).argmax()
    target = torch.where(live, ids, ids[first].clamp(min=0))
    spare = torch.where(live[first], values[first].to(pool.dtype), pool.select(0, 0))
    rows = torch.where(live.view(-1, *[1] * (values.dim() - 1)), values.to(pool.dtype), spare)
    pool.index_copy_(0, target, rows)
