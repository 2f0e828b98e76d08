"""Checks of arguments that every algorithm's door makes: shapes, dtypes, devices, host-visible values.

Each raises a typed error of one sentence before anything is touched.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from cula.host.errors import DeviceError, DtypeError, RangeError, ShapeError
from cula.host.varlen import check_boundaries, check_cu_seqlens, to_host

Tensor = torch.Tensor

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
CHUNK_SIZES = (16, 32, 64)


def dtype_name(x: Tensor) -> str:
    """ "bf16", "fp16", "fp32", "fp64" or the torch name of another dtype."""
    return DTYPE_NAMES.get(x.dtype, str(x.dtype))


def check_tensor(name: str, x: Any, shape: tuple[int, ...], device: Any, axes: str) -> None:
    """Check that `x` is a floating tensor of this shape on this device; `axes` names the shape in messages."""
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor {axes}; got {type(x).__name__}")
    if x.shape != shape:
        raise ShapeError(f"{name} must be {axes} = {list(shape)}; got {list(x.shape)}")
    if x.dtype not in DTYPE_NAMES:
        raise DtypeError(f"{name} must be bf16, fp16, fp32 or fp64; got {x.dtype}")
    if x.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {x.device}")


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    """Check q, k and v, which every call has, and return (B, T, H, HV, K, V)."""
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        got = list(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
        raise ShapeError(f"q must be a tensor [B, T, H, K]; got {got}")
    B, T, H, K = q.shape
    if not isinstance(v, torch.Tensor) or v.dim() != 4:
        got = list(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__
        raise ShapeError(f"v must be a tensor [B, T, HV, V]; got {got}")
    HV, V = v.shape[2:]
    device = q.device
    check_tensor("q", q, (B, T, H, K), device, "[B, T, H, K]")
    check_tensor("k", k, (B, T, H, K), device, "[B, T, H, K] like q")
    check_tensor("v", v, (B, T, HV, V), device, "[B, T, HV, V]")
    if H < 1 or HV < 1 or K < 1 or V < 1:
        raise ShapeError(f"H, HV, K and V must be at least 1; got H={H}, HV={HV}, K={K}, V={V}")
    if HV % H:
        raise ShapeError(f"v must have HV heads, a multiple of q's H={H}; got HV={HV}")
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"q, k and v must share one dtype; got {dtype_name(q)}, {dtype_name(k)} and {dtype_name(v)}")
    return B, T, H, HV, K, V


def parse_scale(scale: Any, K: int) -> float:
    """`scale` as a float, K**-0.5 for None."""
    if scale is None:
        return K**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise DtypeError(f"scale must be None or a number; got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise RangeError(f"scale must be finite; got {scale}")
    return float(scale)


def parse_sequences(
    B: int, T: int, device: Any, cu_seqlens: Any, cu_seqlens_cpu: Any, *, host_copy: bool, traced: bool = False
) -> tuple[int, tuple[int, ...] | None]:
    """(N, boundaries on the host or None). The one place that copies `cu_seqlens` from a device.

    A host copy that the caller gives is trusted to equal the device's, but its values are checked.
    traced: the tensors have no values yet.
    """
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ShapeError("cu_seqlens_cpu is the host copy of cu_seqlens, which must be given too; got None")
        return B, None
    if B != 1:
        raise ShapeError(f"cu_seqlens packs all sequences into dim 1, so the batch size must be 1; got B={B}")
    N = check_cu_seqlens("cu_seqlens", cu_seqlens, device, host_ok=True)
    name, source = "cu_seqlens", cu_seqlens
    if cu_seqlens_cpu is not None:
        name, source = "cu_seqlens_cpu", cu_seqlens_cpu
        if isinstance(source, torch.Tensor) and source.device.type != "cpu":
            raise DeviceError(f"cu_seqlens_cpu must be on the CPU; got {source.device}")
        if check_cu_seqlens(name, source, torch.device("cpu"), host_ok=True) != N:
            raise ShapeError(f"cu_seqlens_cpu must have the {N + 1} entries of cu_seqlens; got {source.numel()}")
    elif source.device.type == "meta":
        raise DeviceError("cu_seqlens must be on the CPU or the device of q; got meta")
    elif source.device.type != "cpu" and not host_copy:
        return N, None
    if traced:
        return N, None
    boundaries = to_host(source)
    check_boundaries(name, boundaries, T)
    return N, boundaries


def parse_state(name: str, state: Any, shape: tuple[int, ...], axes: str, dtype: str, device: Any) -> None:
    """Check an initial state: fp32 in every call but fp64 ones, where it is fp64."""
    if not isinstance(state, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor {axes}; got {type(state).__name__}")
    need = "fp64" if dtype == "fp64" else "fp32"
    if DTYPE_NAMES.get(state.dtype) != need:
        raise DtypeError(f"{name} must be {need} for {dtype} inputs; got {dtype_name(state)}")
    if tuple(state.shape) != shape:
        other = (*shape[:2], shape[3], shape[2])
        hint = "; it looks like the other layout, see state_v_first" if tuple(state.shape) == other else ""
        raise ShapeError(f"{name} must be {axes} = {list(shape)}; got {list(state.shape)}{hint}")
    if state.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {state.device}")


def wants_grad(*tensors: Tensor | None) -> bool:
    """Autograd will be asked for the gradient of at least one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def capturing(device: Any) -> bool:
    """A CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_chunk_size(value: Any) -> int:
    """`value` if it is one of the integers 16, 32 and 64; RangeError otherwise."""
    if type(value) is not int or value not in CHUNK_SIZES:
        raise RangeError(f"chunk_size must be 16, 32 or 64; got {value!r}")
    return value


def has_wide_rows(*tensors: Tensor) -> bool:
    """Whether 64 tokens of one head span 2^31 elements in any of these `[B, T, heads, ...]` tensors."""
    return any(
        64 * x.stride(1) + (x.shape[3] * x.stride(3) if x.dim() == 4 else 0) >= 1 << 31
        for x in tensors
        if x.shape[1] > 1
    )


def has_aligned_rows(*tensors: Tensor | None) -> bool:
    """Whether the last axis of each is contiguous and begins at a multiple of 16 bytes wherever it begins."""
    for x in tensors:
        if x is None or x.numel() == 0:
            continue
        step = 16 // x.element_size()
        if x.stride(-1) != 1 or x.data_ptr() % 16:
            return False
        if any(n > 1 and s % step for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)):
            return False
    return True


def lengths_of(bounds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Tokens of each sequence from boundaries on the host."""
    return None if bounds is None else tuple(b - a for a, b in pairwise(bounds))


def check_pool(name: str, pool: Any, tail: tuple[int, int, int], dtype: str, device: Any) -> None:
    """Check a pool `[slots, HV, V, K]`: fp32 or bf16 (fp64 calls: fp64 too), any slot stride, rows not overlapping."""
    if not isinstance(pool, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor [slots, HV, V, K]; got {type(pool).__name__}")
    if pool.dim() != 4 or tuple(pool.shape[1:]) != tail:
        raise ShapeError(f"{name} must be [slots, HV, V, K] = [slots, {', '.join(map(str, tail))}]; "
                         f"got {list(pool.shape)}")  # fmt: skip
    allowed = ("fp32", "bf16", "fp64") if dtype == "fp64" else ("fp32", "bf16")
    if dtype_name(pool) not in allowed:
        raise DtypeError(f"{name} must be {' or '.join(allowed)} for {dtype} inputs; got {dtype_name(pool)}")
    if pool.device != device:
        raise DeviceError(f"{name} must be on {device} as q is; got {pool.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(pool.shape, pool.stride(), strict=True)):
        raise ShapeError(f"{name} is written in place: no dimension may be expanded (stride 0); got {pool.stride()}")


def check_out(out: Any, like: Tensor) -> Tensor | None:
    """Check a caller's output tensor: shape, dtype and device of `like` (v)."""
    if out is None:
        return None
    if not isinstance(out, torch.Tensor):
        raise DtypeError(f"out must be a tensor like v; got {type(out).__name__}")
    if out.shape != like.shape:
        raise ShapeError(f"out must be shaped as v, {list(like.shape)}; got {list(out.shape)}")
    if out.dtype != like.dtype:
        raise DtypeError(f"out must be {dtype_name(like)} as v is; got {dtype_name(out)}")
    if out.device != like.device:
        raise DeviceError(f"out must be on {like.device} as v is; got {out.device}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ShapeError(f"out is written in place: no dimension may be expanded (stride 0); got {out.stride()}")
    return out


def parse_null_index(null_index: Any) -> int:
    """`null_index` as an int."""
    if isinstance(null_index, bool) or not isinstance(null_index, int):
        raise DtypeError(f"null_index must be an int; got {type(null_index).__name__}")
    return null_index
