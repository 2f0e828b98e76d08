"""What every eager row of the decode stage needs to know: which tokens, which slots, where results go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.host.varlen import clamp_boundaries
from cula.ops.kda.pools import slot_ids
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


@dataclass
class Work:
    """One call, flattened: token i of sequence n is row first[n] + i of the inputs seen as `[tokens, heads, D]`.

    first, count: int64 `[N]` on the inputs' device; most: an upper bound of count on the host.
    read, write: slots of `pool` `[slots, HV, V, K]`, -1 for none. out_ids: `[tokens]` slots of `states_out`.
    """

    first: Tensor
    count: Tensor
    most: int
    pool: Tensor
    read: Tensor
    write: Tensor
    states_out: Tensor | None
    out_ids: Tensor | None


def token_rows(p: KDAProblem, x: Operands) -> tuple[Tensor, Tensor, int]:
    """(first, count, most) of the call."""
    device = x.q.device
    if not p.packed:
        per = 1 if p.N == p.B * p.T else p.T
        return torch.arange(p.N, device=device) * per, torch.full((p.N,), per, device=device), per
    if x.boundaries is not None:
        bounds = torch.tensor(x.boundaries, device=device)
        return bounds[:-1], bounds.diff(), max(p.lengths, default=0)
    bounds = clamp_boundaries(x.cu_seqlens.to(torch.int64), p.T)
    return bounds[:-1], bounds.diff().clamp(max=p.tokens), p.tokens


def state_work(p: KDAProblem, x: Operands, state: Tensor) -> Work:
    """fused_recurrent_kda: sequence n carries row n of `state` `[N, HV, V, K]`, in place."""
    ids = torch.arange(p.N, device=x.q.device)
    return Work(*token_rows(p, x), state, ids, ids, None, None)


def read_indices(x: Operands) -> Tensor:
    """`[N]` indices to read: those given, or of `[N, S+1]` the column of the last accepted token."""
    indices = x.read_indices
    if x.num_accepted_tokens is None:
        return indices
    column = (x.num_accepted_tokens.to(torch.int64) - 1).clamp(0, indices.shape[1] - 1)
    return indices.gather(1, column.unsqueeze(1)).squeeze(1)


def pool_work(p: KDAProblem, x: Operands) -> Work:
    """kda_decode and kda_verify."""
    first, count, most = token_rows(p, x)
    device, slots = x.q.device, x.state_pool.shape[0]
    read = slot_ids(read_indices(x), p.N, slots, x.null_index, device)
    if not x.update_state:
        write = torch.full_like(read, -1)
    elif x.write_indices is None:
        write = read
    else:
        write = slot_ids(x.write_indices, p.N, slots, x.null_index, device)
        write = torch.where(read < 0, -1, write)
    out_ids = None
    if x.states_out is not None:
        out_ids = slot_ids(x.states_out_indices.flatten(), p.T, x.states_out.shape[0], x.null_index, device)
    return Work(first, count, most, x.state_pool, read, write, x.states_out, out_ids)


def initial_state(p: KDAProblem, x: Operands) -> Tensor:
    """A fresh V-first `[N, HV, V, K]` copy of the call's initial state, or zeros."""
    dtype = torch.float64 if p.state_dtype == "fp64" else torch.float32
    if x.initial_state is None:
        return torch.zeros(p.N, p.HV, p.V, p.K, dtype=dtype, device=x.q.device)
    source = x.initial_state if p.state_v_first else x.initial_state.mT
    return source.detach().clone(memory_format=torch.contiguous_format)


def final_state(p: KDAProblem, state: Tensor) -> Tensor | None:
    """The V-first state in the layout that was asked for."""
    if not p.final_state:
        return None
    return state if p.state_v_first else state.mT.contiguous()
