"""The pool and the checkpoints of a prefill call, whatever the algorithm: checked, then filled into its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from cula.host.errors import DeviceError, DtypeError, RangeError, ShapeError
from cula.host.varlen import check_index_tensor
from cula.ops.common.arguments import check_pool, dtype_name
from cula.ops.common.problem import SequenceProblem

P = TypeVar("P", bound=SequenceProblem)


def parse_pool(
    p: P, x: Any, pool: Any, read: Any, write: Any, has_initial_state: Any, null_index: int
) -> tuple[P, Any]:
    """Check the pool and its indices."""
    device = x.q.device
    if pool is None:
        given = {"read_indices": read, "write_indices": write, "has_initial_state": has_initial_state}
        for name, value in given.items():
            if value is not None:
                raise ShapeError(f"{name} needs state_pool; got state_pool=None")
        return p, x
    check_pool("state_pool", pool, (p.HV, p.V, p.K), p.dtype, device)
    if read is None and pool.shape[0] < p.N:
        raise ShapeError(f"state_pool needs a slot for each of N={p.N} sequences; got {pool.shape[0]} slots")
    for name, value in (("read_indices", read), ("write_indices", write)):
        if value is not None:
            check_index_tensor(name, value, (p.N,), device)
    if has_initial_state is not None:
        if not isinstance(has_initial_state, torch.Tensor) or has_initial_state.dtype != torch.bool:
            got = getattr(has_initial_state, "dtype", type(has_initial_state).__name__)
            raise DtypeError(f"has_initial_state must be a bool tensor [N]; got {got}")
        if tuple(has_initial_state.shape) != (p.N,):
            raise ShapeError(f"has_initial_state must be [N] = [{p.N}]; got {list(has_initial_state.shape)}")
        if has_initial_state.device != device:
            raise DeviceError(f"has_initial_state must be on {device} as q is; got {has_initial_state.device}")
    x.state_pool, x.read_indices, x.write_indices = pool, read, write
    x.has_initial_state, x.null_index = has_initial_state, null_index
    return replace(p, pool=True, state_dtype=dtype_name(pool)), x


def parse_checkpoints(p: P, x: Any, checkpoints: Any, every: Any, offsets: Any, positions: Any) -> tuple[P, Any]:
    """Check the checkpoint tensors."""
    device = x.q.device
    if checkpoints is None:
        for name, value in (("checkpoint_offsets", offsets), ("position_offsets", positions)):
            if value is not None:
                raise ShapeError(f"{name} needs checkpoints; got checkpoints=None")
        return p, x
    if isinstance(every, bool) or not isinstance(every, int) or every < 16 or every % 16:
        raise RangeError(f"checkpoint_every must be a positive multiple of 16 tokens; got {every!r}")
    if offsets is None:
        raise ShapeError("checkpoint_offsets [N+1] is required with checkpoints; got None")
    check_pool("checkpoints", checkpoints, (p.HV, p.V, p.K), p.dtype, device)
    need = p.state_dtype if p.pool else ("fp64" if p.dtype == "fp64" else "fp32")
    if dtype_name(checkpoints) != need:
        raise DtypeError(f"checkpoints must be {need} as the states are; got {dtype_name(checkpoints)}")
    check_index_tensor("checkpoint_offsets", offsets, (p.N + 1,), device, host_ok=True)
    on_host = offsets.device.type == "cpu"
    if positions is not None:
        check_index_tensor("position_offsets", positions, (p.N,), device, host_ok=True)
        on_host = on_host and positions.device.type == "cpu"
    x.checkpoints, x.checkpoint_offsets, x.position_offsets = checkpoints, offsets, positions
    return replace(p, checkpoint_every=every, position_offsets=positions is not None, host_offsets=on_host), x
