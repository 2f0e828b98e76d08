"""KDA on a CPU with Numba: V-first state rows walk through the tokens, each read once and written once.

The rows of a V-first state are independent, so a few of them go through a block of tokens while they lie in the
first-level cache. Serves the eager rows of every stage: whole sequences, one token, and drafts are one function.
"""

from __future__ import annotations

import numpy as np
import torch

from cula.ops.common.row_walk import INTEGER, REAL, States, launch, plain, reach, reachable, splits, walkable
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

__all__ = ["States", "walk_rows", "walkable"]

_GATES = {"finished": 0, "softplus": 1, "lower_bound": 2}


def walk_rows(p: KDAProblem, x: Operands, s: States) -> Tensor:
    """All tokens of the call; returns o, in `x.out` where it is given. Rows after the last sequence are zero."""
    dtype, memo = s.pool.dtype, s.memo
    inputs = [x.q, x.k, x.v, x.g, x.beta]
    if not reachable(inputs, dtype):
        inputs = [reach(t, dtype) for t in inputs]
    strides = [t.stride() for t in inputs]
    known = memo.get("walk")  # one entry, replaced whole: calls of one form may run in several threads
    if known is None or known[0] != strides:
        numbers = np.array([p.scale, p.lower_bound or 0.0], np.float64)
        known = memo["walk"] = (strides, numbers, _with_strides(p, _sizes(p, s), strides))
    _, numbers, sizes = known
    out, direct = x.out, True
    if out is None or out.dtype != dtype or not out.is_contiguous():
        out, direct = torch.empty(x.v.shape, dtype=dtype), x.out is None and x.v.dtype == dtype
    bounds = None
    if p.packed:
        out[:, x.boundaries[-1] :] = 0.0
        bounds = torch.tensor(x.boundaries, dtype=torch.int64)
    constants = [x.A_log, x.dt_bias]
    integers = [bounds, s.read, s.write if isinstance(s.write, Tensor) else None, s.out_ids]
    if not plain(constants, dtype) or not plain(integers, torch.int64):
        constants = [None if t is None else t.detach().to(dtype).contiguous() for t in constants]
        integers = [None if t is None else t.to(torch.int64).contiguous() for t in integers]
    tensors = (*inputs, *constants, s.pool, s.states_out, out, *integers)  # alive until the loops are done
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)
    from cula.ops.kda import row_loops as loops

    launch(loops.walk, REAL[dtype], INTEGER[dtype], numbers, sizes, addresses)
    if direct:
        return out
    return out.to(x.v.dtype) if x.out is None else x.out.copy_(out)


def _with_strides(p: KDAProblem, sizes: np.ndarray, strides: list[tuple[int, ...]]) -> np.ndarray:
    """`sizes` with the strides of q, k, v, g, beta filled in."""
    from cula.ops.kda import row_loops as loops

    across = 0 if p.packed or p.N == p.B else 1  # [1, N, ...]: the sequences lie along dim 1
    for i, stride in enumerate(strides):
        at = loops.Q_STRIDES + 3 * i
        sizes[at : at + 3] = stride[across], stride[1], stride[2]
    return sizes


def _sizes(p: KDAProblem, s: States) -> np.ndarray:
    """The integers that the loops need, by the names in `row_loops`."""
    from cula.ops.kda import row_loops as loops

    states_out = s.pool if s.states_out is None else s.states_out
    sizes = np.zeros(loops.COUNT, np.int64)
    sizes[: loops.POOL_STRIDES] = (
        p.H, p.HV, p.K, p.V, _GATES[p.gate], p.beta_sigmoid * (1 + p.neg_eigval), p.l2norm, p.has_A_log, p.has_dt_bias,
    )  # fmt: skip
    sizes[loops.POOL_STRIDES : loops.OUT_STRIDES] = s.pool.stride()[:3]
    sizes[loops.OUT_STRIDES : loops.SPLITS] = states_out.stride()[:3]
    sizes[loops.SPLITS] = splits(p.N * p.HV, p.V // loops.ROWS, torch.get_num_threads())
    sizes[loops.N] = p.N
    sizes[loops.TOKENS] = p.T if p.N == p.B and not p.packed else 1
    sizes[loops.SLOTS], sizes[loops.OUT_SLOTS] = s.pool.shape[0], states_out.shape[0]
    sizes[loops.NULL] = s.null_index
    sizes[loops.WRITE] = {"none": loops.WRITE_NONE, "read": loops.WRITE_READ}.get(
        s.write if isinstance(s.write, str) else "", loops.WRITE_GIVEN
    )
    sizes[loops.PACKED], sizes[loops.INDEXED], sizes[loops.STATES_OUT] = (
        p.packed, s.read is not None, s.states_out is not None,
    )  # fmt: skip
    return sizes
