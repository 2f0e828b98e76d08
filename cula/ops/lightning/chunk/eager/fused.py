"""chunk forward, eager on a CPU with Numba: each head's state in the cache, 16 tokens at a time (`chunk_loops`)."""

from __future__ import annotations

import numpy as np
import torch

from cula.ops.common.pools import checkpoint_plan, read_slots, write_slots
from cula.ops.common.row_walk import REAL, launch, reach
from cula.ops.lightning.chunk.saved import ForwardResult
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands) -> ForwardResult:
    """Run the problem."""
    with torch.no_grad():
        return _run(p, x)


def _run(p: LightningProblem, x: Operands) -> ForwardResult:
    from cula.ops.lightning.chunk.eager import chunk_loops as loops

    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    Kp = -(-p.K // loops.ROWS) * loops.ROWS
    state = torch.zeros(p.N, p.HV, Kp, p.V, dtype=dtype)
    _enter(p, x, state[:, :, : p.K])
    inputs = [reach(t, dtype) for t in (x.q, x.k, x.v)]
    out, direct = x.out, True
    if out is None or out.dtype != dtype or not out.is_contiguous():
        out, direct = torch.empty(x.v.shape, dtype=dtype), x.out is None and x.v.dtype == dtype
    bounds = None
    if p.packed:
        out[:, x.boundaries[-1] :] = 0.0
        bounds = torch.tensor(x.boundaries, dtype=torch.int64)
    places = _checkpoints(p, x) if p.checkpoint_every else []
    captured = rows = None
    if places:
        captured = torch.empty(len(places), p.HV, Kp, p.V, dtype=dtype)
        rows = torch.full((p.B * p.T,), -1, dtype=torch.int64)
        rows[[token for token, _ in places]] = torch.arange(len(places))
    powers = decay_powers(x.slopes, loops.CHUNK, dtype)
    tensors = (*inputs, powers, state, out, captured, bounds, rows)  # alive until the loops are done
    addresses = np.array([0 if t is None else t.data_ptr() for t in tensors], np.int64)
    launch(loops.walk, REAL[dtype], p.scale, _sizes(p, inputs, bool(places)), addresses)
    if places:
        taken = captured[:, :, : p.K].mT.to(x.checkpoints.dtype)
        x.checkpoints[[row for _, row in places]] = taken
    state = state[:, :, : p.K]
    if p.pool:
        write_slots(p, x, tuple(range(p.N)), state.mT)
    final = None
    if p.final_state:
        final = (state.mT if p.state_v_first else state).contiguous()
    if not direct:
        out = out.to(x.v.dtype) if x.out is None else x.out.copy_(out)
    return ForwardResult(out, final)


def _enter(p: LightningProblem, x: Operands, state: Tensor) -> None:
    """Fill the K-first `state` `[N, HV, K, V]`, zero so far, with what the sequences start from."""
    if p.pool:
        read_slots(p, x, tuple(range(p.N)), state.mT)
    elif x.initial_state is not None:
        state.copy_(x.initial_state.mT if p.state_v_first else x.initial_state)


def decay_powers(slopes: Tensor, most: int, dtype: torch.dtype) -> Tensor:
    """`[HV, 2 (most + 1)]`: exp(-s m), m = 0..most, then what rounding to `dtype` took from them.

    A slow head's decay rounds to a number that, taken thousands of times, is another decay: the rest sets it right.
    """
    exact = torch.exp(-slopes.double()[:, None] * torch.arange(most + 1, dtype=torch.float64))
    rounded = exact.to(dtype)
    return torch.cat((rounded, (exact - rounded.double()).to(dtype)), 1)


def _checkpoints(p: LightningProblem, x: Operands) -> list[tuple[int, int]]:
    """(token, row of `checkpoints`) of each state that is kept, the token counted from the call's first."""
    starts = x.boundaries if p.packed else range(0, p.B * p.T + 1, max(1, p.T))
    return [(starts[n] + done - 1, row) for n, kept in enumerate(checkpoint_plan(p, x)) for done, row in kept]


def _sizes(p: LightningProblem, inputs: list[Tensor], capture: bool) -> np.ndarray:
    """The integers that the loops need, by the names in `chunk_loops`."""
    from cula.ops.lightning.chunk.eager import chunk_loops as loops

    sizes = np.zeros(loops.COUNT, np.int64)
    sizes[: loops.Q_STRIDES] = (
        p.H, p.HV, p.K, p.V, p.N, p.T, p.packed, _splits(p, torch.get_num_threads()), capture,
    )  # fmt: skip
    for i, t in enumerate(inputs):
        sizes[loops.Q_STRIDES + 3 * i : loops.Q_STRIDES + 3 * i + 3] = t.stride()[:3]
    return sizes


def _splits(p: LightningProblem, threads: int) -> int:
    """Parts of V per head: more than one where heads alone would leave threads idle."""
    from cula.ops.lightning.chunk.eager import chunk_loops as loops

    tasks, groups = p.N * p.HV, -(-p.V // loops.COLUMNS)
    return 1 if tasks == 0 or tasks % threads == 0 or tasks >= 4 * threads else groups
