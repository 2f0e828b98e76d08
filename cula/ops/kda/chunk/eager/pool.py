"""State pools and checkpoints of kda_prefill, eager: gather, scatter, and states inside a chunk."""

from __future__ import annotations

import torch

from cula.ops.common.chunk_layout import Group, Slab
from cula.ops.common.pools import checkpoint_plan, read_slots, write_slots
from cula.ops.kda.chunk.eager.intra import suffix_decay
from cula.ops.kda.chunk.eager.slab import Inputs, Walk, advance, total_decay
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor

__all__ = ["Writer", "checkpoint_plan", "read_slots", "write_slots"]


class Writer:
    """Writes final states to pool slots and states at checkpoint positions to `checkpoints`."""

    def __init__(self, p: KDAProblem, x: Operands) -> None:
        self.p, self.x = p, x
        self.boundaries = checkpoint_plan(p, x) if p.checkpoint_every else [[] for _ in range(p.N)]

    def checkpoints_in(self, slab: Slab) -> bool:
        """Some checkpoint lies in this slab."""
        C = self.p.chunk_size
        low, high = slab.first * C, slab.last * C
        return any(low < done <= high for n in slab.group.ids for done, _ in self.boundaries[n])

    def checkpoint(self, slab: Slab, inputs: Inputs, walked: Walk) -> None:
        """Store the states of the slab's checkpoints: the chunk's start state advanced over its first tokens."""
        if walked.h is None:
            return
        p, C, start = self.p, self.p.chunk_size, 0
        for step, active in zip(range(slab.first, slab.last), slab.active, strict=True):
            for r in range(active):
                for done, row in self.boundaries[slab.group.ids[r]]:
                    if step * C < done <= (step + 1) * C:
                        heads = slice((start + r) * p.HV, (start + r + 1) * p.HV)
                        self._store(row, _state_after(inputs, walked, heads, done - step * C))
            start += active

    def _store(self, row: int, state: Tensor) -> None:
        self.x.checkpoints[row] = state[:, : self.p.K, : self.p.V].mT.to(self.x.checkpoints.dtype)

    def finish(self, group: Group, h: Tensor) -> None:
        """Write the group's final states to their slots."""
        if not self.p.pool:
            return
        p = self.p
        states = h.view(len(group.ids), p.HV, *h.shape[1:])[..., : p.K, : p.V]
        write_slots(p, self.x, group.ids, states.mT)


def _state_after(inputs: Inputs, walked: Walk, heads: slice, tokens: int) -> Tensor:
    """The state after the first `tokens` rows of a chunk, by the very operations of a chunk that ends there."""
    g, k, vn = inputs.g[heads].clone(), inputs.k[heads].clone(), walked.vn[heads].clone()
    for x in (g, k, vn):
        x[:, tokens:] = 0.0
    state = walked.h[heads].clone()
    advance(state, total_decay(g), k * suffix_decay(g), vn)
    return state
