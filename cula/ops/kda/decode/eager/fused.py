"""recurrent, decode and verify, eager on a CPU with Numba: each state row is read once and written once.

The rows of a V-first state are independent, so one pass takes them through all tokens of a block while they lie
in the first-level cache. One compiled function serves one and many tokens, hence the equal bits.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
import torch

from cula.ops.kda.decode.eager import loops, stepwise
from cula.ops.kda.decode.eager.work import final_state, initial_state
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

_GATES = {"finished": 0, "softplus": 1, "lower_bound": 2}
_REAL = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
_INTEGER = {torch.float32: np.empty(0, np.int32), torch.float64: np.empty(0, np.int64)}
_one_at_a_time = threading.Lock()  # Numba's default thread pool takes one parallel region at a time


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if not p.pool:
        state = initial_state(p, x)
        o = _walk(p, x, state, None, None)
        return o, final_state(p, state)
    if "walkable" not in x.memo:
        x.memo["walkable"] = _walkable(p, x)
    if not x.memo["walkable"]:
        return stepwise.run(p, x)
    read = x.read_indices
    if x.num_accepted_tokens is not None:
        columns = (x.num_accepted_tokens.to(torch.int64) - 1).clamp_(0, read.shape[1] - 1)
        read = read.gather(1, columns.unsqueeze(1)).squeeze(1)
    return _walk(p, x, x.state_pool, read, x.write_indices)


def _walkable(p: KDAProblem, x: Operands) -> bool:
    """The states lie in memory as the loops need them: rows of K contiguous, all of one dtype."""
    pools = [t for t in (x.state_pool, x.states_out) if t is not None]
    return p.N > 0 and all(t.numel() and t.stride(3) == 1 and t.dtype == pools[0].dtype for t in pools)


def _walk(p: KDAProblem, x: Operands, pool: Tensor, read: Tensor | None, write: Tensor | None) -> Tensor:
    dtype, memo = pool.dtype, x.memo
    if "sizes" not in memo:
        memo["numbers"] = np.array([p.scale, p.lower_bound or 0.0], np.float64)
        memo["sizes"] = _sizes(p, x, pool)
    out, direct = x.out, True
    if out is None or out.dtype != dtype or not out.is_contiguous():
        out, direct = torch.empty(x.v.shape, dtype=dtype), x.out is None and x.v.dtype == dtype
    bounds = None
    if p.packed:
        out.zero_()
        bounds = torch.tensor(x.boundaries, dtype=torch.int64)
    reals = [x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias]
    integers = [bounds, read, write, x.states_out_indices]
    if not _plain(reals, dtype) or not _plain(integers, torch.int64):
        reals = [None if t is None else t.detach().to(dtype).contiguous() for t in reals]
        integers = [None if t is None else t.to(torch.int64).contiguous() for t in integers]
    tensors = (*reals, pool, x.states_out, out, *integers)  # alive until the loops are done
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)
    _launch(_REAL[dtype], _INTEGER[dtype], memo["numbers"], memo["sizes"], addresses)
    if direct:
        return out
    return out.to(x.v.dtype) if x.out is None else x.out.copy_(out)


def _plain(tensors: list[Tensor | None], dtype: torch.dtype) -> bool:
    return all(t is None or (t.dtype is dtype and t.is_contiguous()) for t in tensors)


def _sizes(p: KDAProblem, x: Operands, pool: Tensor) -> np.ndarray:
    """The integers that the loops need, by the names in `loops`."""
    states_out = pool if x.states_out is None else x.states_out
    sizes = np.zeros(loops.COUNT, np.int64)
    sizes[: loops.POOL_STRIDES] = (
        p.H, p.HV, p.K, p.V, _GATES[p.gate], p.beta_sigmoid * (1 + p.neg_eigval), p.l2norm, p.has_A_log, p.has_dt_bias,
    )  # fmt: skip
    sizes[loops.POOL_STRIDES : loops.OUT_STRIDES] = pool.stride()[:3]
    sizes[loops.OUT_STRIDES : loops.SPLITS] = states_out.stride()[:3]
    # Few heads still fill the cores: V is cut into parts, never through a group of rows.
    parts = -(-4 * torch.get_num_threads() // max(1, p.N * p.HV))
    sizes[loops.SPLITS] = max(1, min(p.V // (4 * loops.ROWS), parts))
    sizes[loops.N] = p.N
    sizes[loops.TOKENS] = p.T if p.N == p.B and not p.packed else 1
    sizes[loops.SLOTS], sizes[loops.OUT_SLOTS] = pool.shape[0], states_out.shape[0]
    sizes[loops.NULL] = x.null_index
    sizes[loops.WRITE] = loops.WRITE_NONE
    if not p.pool or (x.update_state and x.write_indices is None):
        sizes[loops.WRITE] = loops.WRITE_READ
    elif x.update_state:
        sizes[loops.WRITE] = loops.WRITE_GIVEN
    sizes[loops.PACKED], sizes[loops.INDEXED], sizes[loops.STATES_OUT] = p.packed, p.pool, x.states_out is not None
    return sizes


def _launch(*arguments: Any) -> None:
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with _one_at_a_time:
        before = numba.get_num_threads()
        if before != threads:
            numba.set_num_threads(threads)
        try:
            loops.walk(*arguments)
        finally:
            if before != threads:
                numba.set_num_threads(before)
