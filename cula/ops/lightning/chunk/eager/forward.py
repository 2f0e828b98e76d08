"""chunk forward, eager: batched torch over slabs of chunks; serves training and prefill on any device."""

from __future__ import annotations

import torch

from cula.ops.common.chunk_layout import Slab, SlabIndex, covers_all, groups, steps_per_slab
from cula.ops.common.exact_matmul import add_bmm, bmm, exact_matmul
from cula.ops.common.pools import checkpoint_plan, write_slots
from cula.ops.lightning.chunk.eager.slab import (
    Constants,
    Inputs,
    advance,
    constants,
    entry_state,
    heads,
    load,
    states,
    walk,
)
from cula.ops.lightning.chunk.saved import ForwardResult
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands) -> ForwardResult:
    """Run the problem."""
    with torch.no_grad(), exact_matmul(x.q.device):
        return _run(p, x)


def _run(p: LightningProblem, x: Operands) -> ForwardResult:
    make = torch.empty_like if covers_all(p) else torch.zeros_like
    o = x.out if x.out is not None else make(x.v, memory_format=torch.contiguous_format)
    if x.out is not None and not covers_all(p):
        o[:, x.boundaries[-1] :] = 0.0
    const = constants(p, x)
    final = None
    if p.final_state:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        final = torch.empty(p.N, p.HV, *tail, dtype=const.dtype, device=x.q.device)
    boundaries = checkpoint_plan(p, x) if p.checkpoint_every else None
    for group in groups(p, x.boundaries):
        h = entry_state(p, x, group, const.dtype)
        for slab in group.slabs(steps_per_slab(p, group)):
            index = SlabIndex(slab, x.q.device)
            inputs = load(p, x, const, index)
            before = walk(p, const, inputs, h, slab)
            index.scatter(o, output(p, const, inputs, before))
            if boundaries is not None:
                _checkpoint(p, x, const, slab, inputs, before, boundaries)
        found = states(p, h, len(group.ids))
        if final is not None:
            final[list(group.ids)] = found.mT if p.state_v_first else found
        if p.pool:
            write_slots(p, x, group.ids, found.mT)
    return ForwardResult(o, final)


def output(p: LightningProblem, const: Constants, x: Inputs, before: Tensor) -> Tensor:
    """o `[n, C, V]` of the slab."""
    n, C, _ = x.q.shape
    A = bmm(x.q, x.k.mT, const.ws("A", n, C, C))
    heads(A, p).mul_(const.powers.pairs)
    o = bmm(x.q, before, const.ws("o", *x.v.shape))
    heads(o, p).mul_(const.powers.rows)
    return add_bmm(o, A, x.v)


def _checkpoint(
    p: LightningProblem, x: Operands, const: Constants, slab: Slab, inputs: Inputs, before: Tensor,
    boundaries: list[list[tuple[int, int]]],
) -> None:  # fmt: skip
    """Store the states of the slab's checkpoints: the chunk's start state advanced over its first tokens."""
    C, start = p.chunk_size, 0
    for step, active in zip(range(slab.first, slab.last), slab.active, strict=True):
        for r in range(active):
            at = slice((start + r) * p.HV, (start + r + 1) * p.HV)
            for done, row in boundaries[slab.group.ids[r]]:
                if step * C < done <= (step + 1) * C:
                    state = _state_after(p, const, inputs, before, at, done - step * C)
                    x.checkpoints[row] = state[:, : p.K, : p.V].mT.to(x.checkpoints.dtype)
        start += active


def _state_after(
    p: LightningProblem, const: Constants, inputs: Inputs, before: Tensor, at: slice, tokens: int
) -> Tensor:
    """The state after the first `tokens` rows of a chunk, by the very operations of a chunk that ends there."""
    k, v = inputs.k[at].clone(), inputs.v[at].clone()
    k[:, tokens:], v[:, tokens:] = 0.0, 0.0
    state = before[at].clone()
    update = bmm((k * const.tail(tokens)).mT, v, torch.empty_like(state))
    advance(state, update, p, const, tokens)
    return state
