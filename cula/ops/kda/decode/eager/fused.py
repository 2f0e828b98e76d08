"""recurrent, decode and verify, eager on a CPU with Numba: each state row is read once and written once.

The rows of a V-first state are independent, so one pass takes a row through all tokens of a block while it lies
in the first-level cache. One compiled function serves one and many tokens, hence the equal bits.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from cula.ops.kda.decode.eager import stepwise
from cula.ops.kda.decode.eager.work import Work, final_state, initial_state, pool_work, state_work
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

_GATES = {"finished": 0, "softplus": 1, "lower_bound": 2}
_one_at_a_time = threading.Lock()  # Numba's default thread pool takes one parallel region at a time


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if p.pool:
        strided = x.state_pool.stride(-1) != 1 or (x.states_out is not None and x.states_out.stride(-1) != 1)
        mixed = x.states_out is not None and x.states_out.dtype != x.state_pool.dtype
        if mixed or (strided and p.K > 1):
            return stepwise.run(p, x)
        return _walk(p, x, pool_work(p, x))
    state = initial_state(p, x)
    o = _walk(p, x, state_work(p, x, state))
    return o, final_state(p, state)


def _walk(p: KDAProblem, x: Operands, work: Work) -> Tensor:
    double = p.dtype == "fp64"
    dtype = torch.float64 if double else torch.float32
    direct = x.out is not None and x.out.dtype == dtype and x.out.is_contiguous()
    out = x.out if direct else torch.empty(x.v.shape, dtype=dtype)
    if p.packed:
        out.zero_()
    states_out = work.pool if work.states_out is None else work.states_out
    out_ids = work.first[:0] if work.out_ids is None else work.out_ids
    numbers = np.array([p.scale, 0.0 if p.lower_bound is None else p.lower_bound], np.float64)
    sizes = np.array([p.H, p.HV, p.K, p.V, _GATES[p.gate], int(p.beta_sigmoid) * (1 + int(p.neg_eigval)),
                      int(p.l2norm), int(x.A_log is not None), int(x.dt_bias is not None),
                      *work.pool.stride()[:3], *states_out.stride()[:3], _splits(p)])  # fmt: skip
    _launch(
        *(_flat(t, dtype) for t in (x.q, x.k, x.v, x.g, x.beta)),
        _flat(x.A_log, dtype), _flat(x.dt_bias, dtype), numbers, sizes,
        *(t.numpy() for t in (work.first, work.count, work.read, work.write)),
        _memory(work.pool), _memory(states_out), out_ids.numpy(), out.view(-1).numpy(),
    )  # fmt: skip
    if x.out is not None:
        return x.out if direct else x.out.copy_(out)
    return out if out.dtype == x.v.dtype else out.to(x.v.dtype)


def _splits(p: KDAProblem) -> int:
    """Parts of V per head, so that few heads still fill the cores."""
    threads = torch.get_num_threads()
    return max(1, min(p.V // 16, -(-4 * threads // max(1, p.N * p.HV))))


def _flat(x: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    if x is None:
        return np.empty(0, np.float64 if dtype == torch.float64 else np.float32)
    return x.detach().to(dtype).contiguous().view(-1).numpy()


def _memory(pool: Tensor) -> np.ndarray:
    """The pool's memory from its first to its last element, flat; rows of K are contiguous in it."""
    if pool.numel() == 0:
        return np.empty(0, np.float64 if pool.dtype == torch.float64 else np.float32)
    size = 1 + sum((n - 1) * s for n, s in zip(pool.shape, pool.stride(), strict=True))
    return pool.as_strided((size,), (1,)).numpy()


def _launch(*arguments: Any) -> None:
    import numba

    from cula.ops.kda.decode.eager.loops import walk

    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    with _one_at_a_time:
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            walk(*arguments)
        finally:
            numba.set_num_threads(before)
