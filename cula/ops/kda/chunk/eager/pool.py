"""State pools and checkpoints of kda_prefill, eager: gather, scatter, and states inside a chunk."""

from __future__ import annotations

import torch

from cula.ops.kda.chunk.eager.intra import suffix_decay
from cula.ops.kda.chunk.eager.layout import Group, Slab
from cula.ops.kda.chunk.eager.slab import Inputs, Walk, advance, total_decay
from cula.ops.kda.pools import scatter_rows, slot_ids
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def read_slots(p: KDAProblem, x: Operands, members: tuple[int, ...], states: Tensor) -> None:
    """Fill V-first `states` `[sequences, HV, V, K]` from the pool; null slots and absent states become zero."""
    ids = slot_ids(x.read_indices, p.N, x.state_pool.shape[0], x.null_index, states.device)
    live = ids >= 0
    if x.has_initial_state is not None:
        live &= x.has_initial_state.to(states.device)
    if members != tuple(range(p.N)):
        chosen = torch.tensor(members, device=states.device)
        ids, live = ids[chosen], live[chosen]
    if x.state_pool.shape[0]:
        found = x.state_pool.index_select(0, ids.clamp(min=0)).to(states.dtype)
        states.copy_(torch.where(live[:, None, None, None], found, 0.0))


def write_slots(p: KDAProblem, x: Operands, members: tuple[int, ...], states: Tensor) -> None:
    """Write V-first `states` `[sequences, HV, V, K]` to the sequences' slots; null is skipped."""
    source = x.write_indices if x.write_indices is not None else x.read_indices
    ids = slot_ids(source, p.N, x.state_pool.shape[0], x.null_index, states.device)
    scatter_rows(x.state_pool, ids[torch.tensor(members, dtype=torch.int64, device=states.device)], states)


def checkpoint_plan(p: KDAProblem, x: Operands) -> list[list[tuple[int, int]]]:
    """Per sequence, (tokens done, row of `checkpoints`) of each boundary that is kept."""
    lengths = p.lengths if p.packed else (p.T,) * p.N
    offsets = x.checkpoint_offsets.tolist()
    positions = [0] * p.N if x.position_offsets is None else x.position_offsets.tolist()
    rows, every, plan = x.checkpoints.shape[0], p.checkpoint_every, []
    for n, length in enumerate(lengths):
        last = min(offsets[n + 1], rows)
        boundaries = range(every - positions[n] % every, length + 1, every)
        plan.append([(done, offsets[n] + i) for i, done in enumerate(boundaries) if 0 <= offsets[n] + i < last])
    return plan


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
