"""Numba loops as the eager rows of every algorithm start them: states in pools, threads, tensors by address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor

REAL = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
INTEGER = {torch.float32: np.empty(0, np.int32), torch.float64: np.empty(0, np.int64)}
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


def plain(tensors: list[Tensor | None], dtype: torch.dtype) -> bool:
    """The tensors that are there have this type and no gaps."""
    return all(t is None or (t.dtype is dtype and t.is_contiguous()) for t in tensors)


def reachable(inputs: list[Tensor], dtype: torch.dtype) -> bool:
    """The loops can read these inputs where they lie: of the compute type, head vectors contiguous."""
    return all(t.dtype is dtype and (t.dim() == 3 or t.stride(3) == 1) for t in inputs)


def reach(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as the loops can read it: of the compute type, head vectors contiguous."""
    x = x.detach().to(dtype)
    return x if x.dim() == 3 or x.stride(3) == 1 else x.contiguous()


def splits(tasks: int, groups: int, threads: int) -> int:
    """Parts of V per head, whole groups of rows: more than one where heads alone would leave threads idle."""
    if tasks == 0 or tasks % threads == 0 or tasks >= 4 * threads:
        return 1
    return max(1, min(groups // 4, -(-4 * threads // tasks)))


def launch(loops: Callable[..., None], *arguments: Any) -> None:
    """Run `loops` on as many threads as torch uses, and leave both thread counts as they were."""
    import numba

    wanted = torch.get_num_threads()
    threads = min(wanted, numba.config.NUMBA_NUM_THREADS)
    with _one_at_a_time:
        before = numba.get_num_threads()
        if before != threads:
            numba.set_num_threads(threads)
        try:
            loops(*arguments)
        finally:
            if before != threads:
                numba.set_num_threads(before)
            if torch.get_num_threads() != wanted:  # Numba's first launch sets the count of the OpenMP they share
                torch.set_num_threads(wanted)
