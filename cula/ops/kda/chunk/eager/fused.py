"""chunk forward, eager on a CPU with Numba: the recurrence itself, a few state rows at a time in the cache.

On a CPU the states of a few rows stay in registers and first-level cache, so the plain recurrence beats the chunked
form: no exponent can overflow, no output looks at a later token, and prefill equals decode in bits.
"""

from __future__ import annotations

import torch

from cula.ops.common.chunk_layout import groups, steps_per_slab
from cula.ops.kda.chunk.eager import pool as pools
from cula.ops.kda.chunk.saved import ForwardResult, Saved
from cula.ops.kda.problem import KDAProblem, Operands
from cula.ops.kda.row_walk import States, walk_rows, walkable

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands) -> ForwardResult:
    """Run the problem; under grad the states that enter each slab of the eager backward are saved for it."""
    with torch.no_grad():
        return _run(p, x)


def _run(p: KDAProblem, x: Operands) -> ForwardResult:
    start = _start(p, x)
    states = States(start.clone() if p.intermediate_states else start)
    bounds = x.boundaries if p.packed else tuple(range(0, p.B * p.T + 1, p.T)) if p.T else (0,) * (p.N + 1)
    finish = None
    if p.intermediate_states:
        finish = _snapshots(p, bounds, states, start, x.q.dtype)
    elif p.grad:
        finish = _entries(p, x, bounds, states)
    elif p.checkpoint_every:
        finish = _checkpoints(p, x, bounds, states)
    o = walk_rows(p, x, states)
    kept = finish() if finish is not None else None
    if p.pool:
        pools.write_slots(p, x, tuple(range(p.N)), states.pool)
    final = None
    if p.final_state:
        final = states.pool if p.state_v_first else states.pool.mT.contiguous()
    return ForwardResult(o, final, kept if p.intermediate_states else None, kept if p.grad else None)


def _start(p: KDAProblem, x: Operands) -> Tensor:
    """A fresh V-first `[N, HV, V, K]` of the states that the sequences start from, in the compute type."""
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    state = torch.zeros(p.N, p.HV, p.V, p.K, dtype=dtype)
    if p.pool:
        pools.read_slots(p, x, tuple(range(p.N)), state)
    elif x.initial_state is not None:
        state.copy_(x.initial_state if p.state_v_first else x.initial_state.mT)
    return state


def _capture(p: KDAProblem, states: States, rows: int, places: list[tuple[int, int]]) -> Tensor:
    """Have the walk leave the state after token t in row r of the returned pool, for each (t, r) of `places`."""
    taken = torch.empty(rows, p.HV, p.V, p.K, dtype=states.pool.dtype)
    if places:
        ids = torch.full((p.B * p.T,), -1, dtype=torch.int64)
        tokens, slots = torch.tensor(places, dtype=torch.int64).unbind(1)
        ids[tokens] = slots
        states.states_out, states.out_ids = taken, ids
    return taken


def _snapshots(p: KDAProblem, bounds: tuple[int, ...], states: States, start: Tensor, dtype: torch.dtype):
    """h `[B, NT, HV, ...]`: the state before each chunk."""
    C, row, places, firsts = p.chunk_size, 0, [], []
    for n in range(p.N):
        for c in range(-(-(bounds[n + 1] - bounds[n]) // C)):
            if c:
                places.append((bounds[n] + c * C - 1, row))
            else:
                firsts.append((row, n))
            row += 1
    taken = _capture(p, states, row, places)

    def finish() -> Tensor:
        if firsts:
            rows, owners = torch.tensor(firsts).unbind(1)
            taken[rows] = start[owners]
        h = (taken if p.state_v_first else taken.mT).to(dtype, memory_format=torch.contiguous_format)
        return h.unflatten(0, (1, row) if p.packed else (p.B, row // max(1, p.B)))

    return finish


def _entries(p: KDAProblem, x: Operands, bounds: tuple[int, ...], states: States):
    """The states that enter each slab of the eager backward but the first of a group, as `Saved`."""
    places, slabs, row = [], [], 0
    for group in groups(p, x.boundaries):
        for slab in group.slabs(steps_per_slab(p, group)):
            if slab.first:
                count = slab.active[0]
                tokens = [bounds[n] + slab.first * p.chunk_size - 1 for n in group.ids[:count]]
                places += [(token, row + r) for r, token in enumerate(tokens)]
                slabs.append((row, count))
                row += count
    taken = _capture(p, states, row, places)
    return lambda: Saved("eager", {f"entry{i}": taken[a : a + n].mT for i, (a, n) in enumerate(slabs)})


def _checkpoints(p: KDAProblem, x: Operands, bounds: tuple[int, ...], states: States):
    """States at absolute positions, straight into `checkpoints` where the loops can write there."""
    places = [(bounds[n] + done - 1, row) for n, found in enumerate(pools.checkpoint_plan(p, x)) for done, row in found]
    if not places:
        return None
    direct = walkable(states.pool, x.checkpoints)
    taken = _capture(
        p, states, 0 if direct else len(places), [(t, row if direct else i) for i, (t, row) in enumerate(places)]
    )
    if direct:
        states.states_out = x.checkpoints
        return None

    def finish() -> None:
        x.checkpoints[[row for _, row in places]] = taken.to(x.checkpoints.dtype)

    return finish
