"""State pools and checkpoints of kda_prefill, eager: gather, scatter, and states inside a chunk."""

from __future__ import annotations

import torch

from cula.ops.kda.chunk.eager.intra import suffix_decay
from cula.ops.kda.chunk.eager.layout import Group, Slab
from cula.ops.kda.chunk.eager.slab import Inputs, Walk, advance, total_decay
from cula.ops.kda.pools import scatter_rows, slot_ids
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def read(p: KDAProblem, x: Operands, group: Group, h: Tensor) -> None:
    """Fill h `[sequences, HV, K, V]` from the pool; null slots and sequences without a state stay zero."""
    members = torch.tensor(group.ids, device=h.device)
    ids = slot_ids(x.read_indices, p.N, x.state_pool.shape[0], x.null_index, h.device)[members]
    live = ids >= 0
    if x.has_initial_state is not None:
        live &= x.has_initial_state.to(h.device)[members]
    states = x.state_pool.index_select(0, ids.clamp(min=0)).mT.to(h.dtype)
    h.copy_(torch.where(live[:, None, None, None], states, 0.0))


class Writer:
    """Writes final states to pool slots and states at checkpoint positions to `checkpoints`."""

    def __init__(self, p: KDAProblem, x: Operands) -> None:
        self.p, self.x = p, x
        self.boundaries: list[list[tuple[int, int]]] = [[] for _ in range(p.N)]  # (tokens done, row)
        if p.pool:
            slots = x.state_pool.shape[0]
            source = x.write_indices if x.write_indices is not None else x.read_indices
            self.slots = slot_ids(source, p.N, slots, x.null_index, x.q.device)
        if p.checkpoint_every:
            self._plan_checkpoints()

    def _plan_checkpoints(self) -> None:
        p, x = self.p, self.x
        lengths = p.lengths if p.packed else (p.T,) * p.N
        offsets = x.checkpoint_offsets.tolist()
        positions = [0] * p.N if x.position_offsets is None else x.position_offsets.tolist()
        rows = x.checkpoints.shape[0]
        for n, length in enumerate(lengths):
            every, row = p.checkpoint_every, offsets[n]
            done = every - positions[n] % every
            while done <= length and row < min(offsets[n + 1], rows):
                if row >= 0:
                    self.boundaries[n].append((done, row))
                done, row = done + every, row + 1

    def checkpoints_in(self, slab: Slab) -> bool:
        """Some checkpoint lies in this slab."""
        C = self.p.chunk_size
        low, high = slab.first * C, slab.last * C
        return any(low < done <= high for n in slab.group.ids for done, _ in self.boundaries[n])

    def checkpoint(self, slab: Slab, inputs: Inputs, walked: Walk, h: Tensor) -> None:
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
        states = h.view(len(group.ids), p.HV, *h.shape[1:])[..., : p.K, : p.V].mT
        scatter_rows(self.x.state_pool, self.slots[torch.tensor(group.ids, device=h.device)], states)


def _state_after(inputs: Inputs, walked: Walk, heads: slice, tokens: int) -> Tensor:
    """The state after the first `tokens` rows of a chunk, by the very operations of a chunk that ends there."""
    g, k, vn = inputs.g[heads].clone(), inputs.k[heads].clone(), walked.vn[heads].clone()
    for x in (g, k, vn):
        x[:, tokens:] = 0.0
    state = walked.h[heads].clone()
    advance(state, total_decay(g), k * suffix_decay(g), vn)
    return state
