"""Where a walk's states come from and go to: a tensor of them, or slots of a pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.ops.kda.pools import slot_ids
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor
NONE, TENSOR, POOL = 0, 1, 2


@dataclass
class States:
    """One end of a walk: NONE, TENSOR or POOL, the states, and the slots' indices or None."""

    mode: int
    tensor: Tensor
    strides: tuple[int, ...] = (0, 0, 0, 0)
    indices: Tensor | None = None

    def index_arguments(self, spare: Tensor) -> tuple[Tensor, int]:
        """The indices and their stride, or a tensor that is not read."""
        return (spare, 0) if self.indices is None else (self.indices, self.indices.stride(0))


def v_first_strides(state: Tensor, v_first: bool) -> tuple[int, ...]:
    """Strides of a state tensor in the order n, head, V, K."""
    n, h, a, b = state.stride()
    return (n, h, a, b) if v_first else (n, h, b, a)


def entry(p: KDAProblem, x: Operands) -> States:
    """Where the states come from. Slots that other sequences may write are copied before any is written."""
    if not p.pool:
        if x.initial_state is None:
            return States(NONE, x.q)
        return States(TENSOR, x.initial_state, v_first_strides(x.initial_state, p.state_v_first))
    pool = x.state_pool
    if x.write_indices is None or x.write_indices is x.read_indices:
        return States(POOL, pool, pool.stride(), x.read_indices)
    ids = slot_ids(x.read_indices, p.N, pool.shape[0], x.null_index, pool.device)
    live = ids >= 0
    if x.has_initial_state is not None:
        live = live & x.has_initial_state
    if pool.shape[0] == 0:
        return States(NONE, x.q)
    states = torch.where(live[:, None, None, None], pool.index_select(0, ids.clamp(min=0)), 0.0)
    return States(TENSOR, states, states.stride())


def leaving(p: KDAProblem, x: Operands, final: Tensor | None) -> States:
    """Where the states go."""
    if p.pool:
        indices = x.read_indices if x.write_indices is None else x.write_indices
        return States(POOL, x.state_pool, x.state_pool.stride(), indices)
    if final is not None:
        return States(TENSOR, final, v_first_strides(final, p.state_v_first))
    return States(NONE, x.q)
