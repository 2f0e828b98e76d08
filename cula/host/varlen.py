"""Facts about packed sequences: `cu_seqlens` is checked here and reaches the host at most once per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cula.host.errors import DeviceError, DtypeError, RangeError, ShapeError


def check_index_tensor(name: str, x: Any, shape: tuple[int, ...], device: Any, *, host_ok: bool = False) -> None:
    """Check an int32/int64 tensor of any stride: its type, shape and device (`host_ok`: the CPU will do)."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} must be an int32 or int64 tensor; got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} must be int32 or int64; got {x.dtype}")
    if tuple(x.shape) != shape:
        raise ShapeError(f"{name} must have shape {list(shape)}; got {list(x.shape)}")
    if x.device != device and not (host_ok and x.device.type == "cpu"):
        raise DeviceError(f"{name} must be on {device} as the inputs are; got {x.device}")


def check_cu_seqlens(name: str, x: Any, device: Any, *, host_ok: bool) -> int:
    """Check type, shape and device of `cu_seqlens [N+1]`; return N."""
    import torch

    if isinstance(x, torch.Tensor) and (x.dim() != 1 or x.numel() < 1):
        raise ShapeError(f"{name} must have shape [N+1] with at least one entry; got {list(x.shape)}")
    count = x.numel() if isinstance(x, torch.Tensor) else 0
    check_index_tensor(name, x, (count,), device, host_ok=host_ok)
    return count - 1


def check_boundaries(name: str, boundaries: Sequence[int], total: int) -> None:
    """RangeError unless the boundaries start at 0, never decrease and end at or before `total` tokens."""
    if boundaries[0] != 0:
        raise RangeError(f"{name} must start at 0; got {boundaries[0]}")
    for i in range(1, len(boundaries)):
        if boundaries[i] < boundaries[i - 1]:
            raise RangeError(f"{name} must not decrease; got {boundaries[i - 1]} then {boundaries[i]} at position {i}")
    if boundaries[-1] > total:
        raise RangeError(f"{name} must end at or before T={total}; got {boundaries[-1]}")


def clamp_boundaries(cu_seqlens: Any, total: int) -> Any:
    """Each boundary clamped between its predecessor and `total`, the first to 0; stays on its device."""
    import torch

    if cu_seqlens.numel() == 0:
        return cu_seqlens
    clamped = torch.cummax(cu_seqlens.clamp(0, total), 0).values
    clamped[0] = 0
    return clamped


def to_host(x: Any) -> tuple[int, ...]:
    """The values of a small integer tensor on the host: one device sync where it lives on a device."""
    return tuple(x.tolist())
