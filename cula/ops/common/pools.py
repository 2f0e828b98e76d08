"""Slots of state pools in plain torch: the null rule and a scatter that never reads indices back from a device."""

from __future__ import annotations

from typing import Any

import torch

from cula.ops.common.problem import SequenceProblem

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


def read_slots(p: SequenceProblem, x: Any, members: tuple[int, ...], states: Tensor) -> None:
    """Fill V-first `states` `[sequences, HV, V, K]` from the pool; null slots and absent states become zero."""
    ids = slot_ids(x.read_indices, p.N, x.state_pool.shape[0], x.null_index, states.device)
    live = ids >= 0
    if x.has_initial_state is not None:
        live &= x.has_initial_state.to(states.device)
    if members != tuple(range(p.N)):
        chosen = torch.tensor(members, device=states.device)
        ids, live = ids[chosen], live[chosen]
    if x.state_pool.shape[0]:
        found = x.state_pool.index_select(0, ids.clamp(min=0)).to(states.dtype)
        states.copy_(torch.where(live[:, None, None, None], found, 0.0))


def write_slots(p: SequenceProblem, x: Any, members: tuple[int, ...], states: Tensor) -> None:
    """Write V-first `states` `[sequences, HV, V, K]` to the sequences' slots; null is skipped."""
    source = x.write_indices if x.write_indices is not None else x.read_indices
    ids = slot_ids(source, p.N, x.state_pool.shape[0], x.null_index, states.device)
    scatter_rows(x.state_pool, ids[torch.tensor(members, dtype=torch.int64, device=states.device)], states)


def checkpoint_plan(p: SequenceProblem, x: Any) -> list[list[tuple[int, int]]]:
    """Per sequence, (tokens done, row of `checkpoints`) of each boundary that is kept."""
    lengths = p.lengths if p.packed else (p.T,) * p.N
    offsets = x.checkpoint_offsets.tolist()
    positions = [0] * p.N if x.position_offsets is None else x.position_offsets.tolist()
    rows, every, plan = x.checkpoints.shape[0], p.checkpoint_every, []
    for n, length in enumerate(lengths):
        last = min(offsets[n + 1], rows)
        boundaries = range(every - positions[n] % every, length + 1, every)
        plan.append([(done, offsets[n] + i) for i, done in enumerate(boundaries) if 0 <= offsets[n] + i < last])
    return plan
