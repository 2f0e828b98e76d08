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
_NOTHING = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
_BITS = {torch.float32: np.empty(0, np.int32), torch.float64: np.empty(0, np.int64)}
_NO_INDEX = np.empty(0, np.int64)
_one_at_a_time = threading.Lock()  # Numba's default thread pool takes one parallel region at a time


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if not p.pool:
        state = initial_state(p, x)
        o = _walk(p, x, state, _NO_INDEX, _NO_INDEX, loops.WRITE_READ)
        return o, final_state(p, state)
    if not _walkable(p, x):
        return stepwise.run(p, x)
    read, write = _index(x.read_indices), _NO_INDEX
    if x.num_accepted_tokens is not None:
        columns = np.clip(_index(x.num_accepted_tokens) - 1, 0, read.shape[1] - 1)
        read = np.ascontiguousarray(np.take_along_axis(read, columns[:, None], 1)[:, 0])
    mode = loops.WRITE_READ if x.update_state else loops.WRITE_NONE
    if x.write_indices is not None:
        write, mode = _index(x.write_indices), loops.WRITE_GIVEN
    return _walk(p, x, x.state_pool, read, write, mode)


def _walkable(p: KDAProblem, x: Operands) -> bool:
    """The states lie in memory as the loops need them: rows of K contiguous, all of one dtype."""
    pools = [t for t in (x.state_pool, x.states_out) if t is not None]
    return p.N > 0 and all(t.numel() and t.stride(3) == 1 and t.dtype == pools[0].dtype for t in pools)


def _walk(p: KDAProblem, x: Operands, pool: Tensor, read: np.ndarray, write: np.ndarray, mode: int) -> Tensor:
    dtype, memo = pool.dtype, x.memo
    if "sizes" not in memo:
        memo["numbers"] = np.array([p.scale, p.lower_bound or 0.0], np.float64)
        memo["sizes"] = _sizes(p, x, pool, pool if x.states_out is None else x.states_out, mode)
    out, direct = x.out, True
    if out is None or out.dtype != dtype or not out.is_contiguous():
        out, direct = torch.empty(x.v.shape, dtype=dtype), x.out is None and x.v.dtype == dtype
    bounds = _NO_INDEX
    if p.packed:
        out.zero_()
        bounds = np.array(x.boundaries, np.int64)
    memory = _memory(pool)
    _launch(
        _flat(x.q, dtype), _flat(x.k, dtype), _flat(x.v, dtype), _flat(x.g, dtype), _flat(x.beta, dtype),
        _flat(x.A_log, dtype), _flat(x.dt_bias, dtype), memo["numbers"], memo["sizes"], _BITS[dtype], bounds, read,
        write, _NO_INDEX if x.states_out is None else _index(x.states_out_indices).reshape(-1), memory,
        memory if x.states_out is None else _memory(x.states_out), out.numpy().reshape(-1),
    )  # fmt: skip
    if direct:
        return out
    return out.to(x.v.dtype) if x.out is None else x.out.copy_(out)


def _sizes(p: KDAProblem, x: Operands, pool: Tensor, states_out: Tensor, mode: int) -> np.ndarray:
    """The integers that the loops need, by the names in `loops`."""
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
    sizes[loops.NULL], sizes[loops.WRITE] = x.null_index, mode
    return sizes


def _flat(x: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    if x is None:
        return _NOTHING[dtype]
    if x.dtype != dtype or not x.is_contiguous():
        x = x.detach().to(dtype).contiguous()
    elif x.requires_grad:
        x = x.detach()
    return x.numpy().reshape(-1)


def _index(x: Tensor) -> np.ndarray:
    array = x.numpy()
    return array if array.dtype == np.int64 and x.is_contiguous() else np.ascontiguousarray(array, np.int64)


def _memory(pool: Tensor) -> np.ndarray:
    """The pool's memory from its first to its last element, flat; rows of K are contiguous in it."""
    if pool.is_contiguous():
        return pool.numpy().reshape(-1)
    if pool.numel() == 0:
        return _NOTHING[pool.dtype]
    size = 1 + sum((n - 1) * s for n, s in zip(pool.shape, pool.stride(), strict=True))
    return pool.as_strided((size,), (1,)).numpy()


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
