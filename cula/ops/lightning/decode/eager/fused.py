"""decode and verify, eager on a CPU with Numba: each state row is read once and written once, in place."""

from __future__ import annotations

import numpy as np
import torch

from cula.ops.common.drafts import accepted_column, find_work
from cula.ops.common.pools import scatter_rows
from cula.ops.common.row_walk import REAL, launch, plain, reach, reachable, splits, walkable
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands) -> Tensor:
    """The outputs; states go where the call says."""
    memo = x.memo
    if "in place" not in memo:
        memo["in place"] = bool(
            x.update_state and x.write_indices is None and x.states_out is None and p.N and walkable(x.state_pool)
        )
    if memo["in place"]:
        return _walk(p, x, x.state_pool, accepted_column(x))
    return _on_copies(p, x)


def _on_copies(p: LightningProblem, x: Operands) -> Tensor:
    """States that stay, or go elsewhere than they came from: all are read before any is written."""
    work, pool = find_work(p, x), x.state_pool
    copies = torch.zeros(p.N, p.HV, p.V, p.K, dtype=pool.dtype)
    if pool.shape[0]:
        copies.copy_(pool.index_select(0, work.read.clamp(min=0)))
    rows = torch.where(work.read >= 0, torch.arange(p.N), -1)
    beside = wanted = made = None
    if work.out_ids is not None:
        made = torch.full((p.B * p.T,), -1, dtype=torch.int64)  # of the tokens whose sequence reads a slot
        live = torch.repeat_interleave(work.read >= 0, work.count)
        made[: live.numel()] = torch.where(live, work.out_ids[: live.numel()], -1)
        wanted = torch.where(made >= 0, torch.arange(p.B * p.T), -1)
        beside = pool.new_empty(p.B * p.T, p.HV, p.V, p.K)
    x.null_index, memo, x.memo = -1, x.memo, {}
    out = _walk(p, x, copies, rows, beside, wanted)
    x.memo = memo
    if beside is not None:
        scatter_rows(x.states_out, made, beside)
    scatter_rows(pool, work.write, copies)
    return out


def _walk(
    p: LightningProblem, x: Operands, pool: Tensor, read: Tensor, captured: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Walk the slots `read` of `pool` in place; returns o, in `x.out` where it is given."""
    from cula.ops.lightning.decode.eager import row_loops as loops

    dtype, memo = pool.dtype, x.memo
    inputs = [x.q, x.k, x.v]
    if not reachable(inputs, dtype):
        inputs = [reach(t, dtype) for t in inputs]
    strides = [t.stride() for t in inputs]
    known = memo.get("walk")  # one entry, replaced whole: calls of one form may run in several threads
    if known is None or known[0] != strides:
        known = memo["walk"] = (strides, _sizes(p, x, pool, strides, captured is not None))
    out, direct = x.out, True
    if out is None or out.dtype != dtype or not out.is_contiguous():
        out, direct = torch.empty(x.v.shape, dtype=dtype), x.out is None and x.v.dtype == dtype
    bounds = None
    if p.packed:
        out[:, x.boundaries[-1] :] = 0.0
        bounds = torch.tensor(x.boundaries, dtype=torch.int64)
    if not plain([read], torch.int64):
        read = read.to(torch.int64).contiguous()
    slopes = x.slopes.to(torch.float64).contiguous()
    tensors = (*inputs, pool, out, captured, slopes, bounds, read, wanted)  # alive until the loops are done
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)
    launch(loops.walk, REAL[dtype], p.scale, known[1], addresses)
    if direct:
        return out
    return out.to(x.v.dtype) if x.out is None else x.out.copy_(out)


def _sizes(p: LightningProblem, x: Operands, pool: Tensor, strides: list[tuple[int, ...]], capture: bool) -> np.ndarray:
    """The integers that the loops need, by the names in `row_loops`."""
    from cula.ops.lightning.decode.eager import row_loops as loops

    sizes = np.zeros(loops.COUNT, np.int64)
    tokens = p.T if p.N == p.B and not p.packed else 1
    parts = splits(p.N * p.HV, p.V // loops.ROWS, torch.get_num_threads())
    sizes[: loops.Q_STRIDES] = (
        p.H, p.HV, p.K, p.V, p.N, tokens, p.packed, parts, pool.shape[0], x.null_index, True, capture,
    )  # fmt: skip
    across = 0 if p.packed or p.N == p.B else 1  # [1, N, ...]: the sequences lie along dim 1
    for i, stride in enumerate(strides):
        at = loops.Q_STRIDES + 3 * i
        sizes[at : at + 3] = stride[across], stride[1], stride[2]
    sizes[loops.POOL_STRIDES : loops.POOL_STRIDES + 3] = pool.stride()[:3]
    return sizes
