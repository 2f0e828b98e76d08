"""KDA on a CPU with Numba: V-first state rows walk through the tokens, each read once and written once.

The rows of a V-first state are independent, so a few of them go through a block of tokens while they lie in the
first-level cache. Serves the eager rows of every stage: whole sequences, one token, and drafts are one function.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

_GATES = {"finished": 0, "softplus": 1, "lower_bound": 2}
_REAL = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
_INTEGER = {torch.float32: np.empty(0, np.int32), torch.float64: np.empty(0, np.int64)}
_one_at_a_time = threading.Lock()  # Numba's default thread pool takes one parallel region at a time


@dataclass
class States:
    """Where the states are.

    pool: `[slots, HV, V, K]`, fp32 or fp64 (the compute type), rows of K contiguous. read: `[N]` slots, None: slot n.
    write: "none", "read" (the slot that was read) or `[N]` slots. A row that reads a null or out-of-range slot gives
    zeros. states_out: another such pool, out_ids: `[tokens]` slot in it of the state after each token.
    """

    pool: Tensor
    read: Tensor | None = None
    write: Tensor | str = "read"
    states_out: Tensor | None = None
    out_ids: Tensor | None = None
    null_index: int = -1
    memo: dict[str, Any] = field(default_factory=dict)  # facts of calls that look just like this one


def walkable(*pools: Tensor | None) -> bool:
    """The loops can reach these states where they lie."""
    given = [t for t in pools if t is not None]
    return all(t.numel() and t.stride(3) == 1 and t.dtype == given[0].dtype for t in given)


def walk_rows(p: KDAProblem, x: Operands, s: States) -> Tensor:
    """All tokens of the call; returns o, in `x.out` where it is given. Rows after the last sequence are zero."""
    dtype, memo = s.pool.dtype, s.memo
    inputs = [x.q, x.k, x.v, x.g, x.beta]
    if not _reachable(inputs, dtype):
        inputs = [_reach(t, dtype) for t in inputs]
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
    if not _plain(constants, dtype) or not _plain(integers, torch.int64):
        constants = [None if t is None else t.detach().to(dtype).contiguous() for t in constants]
        integers = [None if t is None else t.to(torch.int64).contiguous() for t in integers]
    tensors = (*inputs, *constants, s.pool, s.states_out, out, *integers)  # alive until the loops are done
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)
    _launch(_REAL[dtype], _INTEGER[dtype], numbers, sizes, addresses)
    if direct:
        return out
    return out.to(x.v.dtype) if x.out is None else x.out.copy_(out)


def _plain(tensors: list[Tensor | None], dtype: torch.dtype) -> bool:
    return all(t is None or (t.dtype is dtype and t.is_contiguous()) for t in tensors)


def _reachable(inputs: list[Tensor], dtype: torch.dtype) -> bool:
    """The loops can read these inputs where they lie: of the compute type, head vectors contiguous."""
    return all(t.dtype is dtype and (t.dim() == 3 or t.stride(3) == 1) for t in inputs)


def _reach(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.detach().to(dtype)
    return x if x.dim() == 3 or x.stride(3) == 1 else x.contiguous()


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
    sizes[loops.SPLITS] = _splits(p.N * p.HV, p.V // loops.ROWS, torch.get_num_threads())
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


def _splits(tasks: int, groups: int, threads: int) -> int:
    """Parts of V per head, whole groups of rows: more than one where heads alone would leave threads idle."""
    if tasks == 0 or tasks % threads == 0 or tasks >= 4 * threads:
        return 1
    return max(1, min(groups // 4, -(-4 * threads // tasks)))


def _launch(*arguments: Any) -> None:
    """Run the loops on as many threads as torch uses, and leave both thread counts as they were."""
    numba, loops = _compiler()
    wanted = torch.get_num_threads()
    threads = min(wanted, numba.config.NUMBA_NUM_THREADS)
    with _one_at_a_time:
        before = numba.get_num_threads()
        if before != threads:
            numba.set_num_threads(threads)
        try:
            loops.walk(*arguments)
        finally:
            if before != threads:
                numba.set_num_threads(before)
            if torch.get_num_threads() != wanted:  # Numba's first launch sets the count of the OpenMP they share
                torch.set_num_threads(wanted)


@lru_cache(maxsize=1)
def _compiler() -> tuple[Any, Any]:
    """Numba and the loops, imported when they are first needed."""
    import numba

    from cula.ops.kda import row_loops

    return numba, row_loops
