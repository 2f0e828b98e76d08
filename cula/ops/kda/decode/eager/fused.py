"""recurrent, decode and verify, eager on a CPU with Numba: each state row is read once and written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cula.ops.kda.decode.eager import stepwise
from cula.ops.kda.decode.eager.work import final_state, initial_state, pool_work, read_indices
from cula.ops.kda.pools import scatter_rows, slot_ids
from cula.ops.kda.problem import KDAProblem, Operands
from cula.ops.kda.row_walk import States, walk_rows, walkable


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    if not p.pool:
        state = initial_state(p, x)
        o = walk_rows(p, x, States(state))
        return o, final_state(p, state)
    if "walkable" not in x.memo:
        x.memo["walkable"] = p.N > 0 and walkable(x.state_pool)
    if not x.memo["walkable"]:
        return stepwise.run(p, x)
    if x.parent is not None:
        return _tree(p, x)
    if x.rollback is not None:
        stepwise.record(p, x)
    read = read_indices(x)
    write = "none"
    if x.update_state:
        write = "read" if x.write_indices is None else x.write_indices
    if x.states_out is not None and not walkable(x.state_pool, x.states_out):
        return _through_copy(p, x, read)
    if isinstance(write, torch.Tensor) or x.states_out is not None:
        return _apart(p, x, read, write)
    return walk_rows(p, x, States(x.state_pool, read, write, null_index=x.null_index, memo=x.memo))


def _tree(p: KDAProblem, x: Operands) -> torch.Tensor:
    """Tree drafts: token by token, each a step of the same loops from the copy of one state to another beside it."""
    work = pool_work(p, x)
    T, HV, N = work.most, p.HV, p.N
    states = x.state_pool.new_zeros(N, T + 1, HV, p.V, p.K)
    states[:, 0] = torch.where((work.read >= 0)[:, None, None, None], x.state_pool[work.read.clamp(min=0)], 0.0)
    flat = [t.reshape(p.B * p.T, *t.shape[2:]) for t in (x.q, x.k, x.v, x.g, x.beta)]
    parents = x.parent.reshape(-1)
    out = torch.zeros(p.B * p.T, HV, p.V, dtype=x.v.dtype)
    kept = torch.full((p.B * p.T,), -1)
    for t in range(T):
        live = ((work.count > t) & (work.read >= 0)).nonzero().flatten()
        if not live.numel():
            continue
        rows = work.first[live] + t
        parent = parents[rows].to(torch.int64)
        parent = torch.where((parent >= 0) & (parent < t), parent + 1, 0)
        one = replace(p, B=1, T=live.numel(), N=live.numel(), packed=False, lengths=None, tokens=1)
        q, k, v, g, beta = (y[rows].unsqueeze(0) for y in flat)
        given = replace(x, q=q, k=k, v=v, g=g, beta=beta, out=None, memo={}, boundaries=None)
        to = live * (T + 1) + t + 1
        out[rows] = walk_rows(one, given, States(states.flatten(0, 1), live * (T + 1) + parent, to))[0]
        kept[rows] = to
    if x.states_out is not None:
        wanted = torch.where(kept >= 0, work.out_ids, -1)
        scatter_rows(x.states_out, wanted, states.flatten(0, 1)[kept.clamp(min=0)])
    out = out.view(p.B, p.T, HV, p.V)
    return out if x.out is None else x.out.copy_(out)


def _through_copy(p: KDAProblem, x: Operands, read: torch.Tensor) -> torch.Tensor:
    """`states_out` of another type or layout than the pool's: its states are made beside it, by the same loops."""
    ids = slot_ids(read, p.N, x.state_pool.shape[0], x.null_index, read.device)
    wanted = slot_ids(x.states_out_indices.flatten(), 0, x.states_out.shape[0], x.null_index, read.device)
    counts = torch.tensor(p.lengths) if p.packed else torch.full((p.N,), p.T)
    made = torch.zeros(wanted.numel(), dtype=torch.bool)  # tokens of sequences that read a slot
    made[: int(counts.sum())] = torch.repeat_interleave(ids >= 0, counts)
    wanted = torch.where(made, wanted, -1)
    beside = x.state_pool.new_empty(wanted.numel(), p.HV, p.V, p.K)
    rows = torch.where(wanted >= 0, torch.arange(wanted.numel()), -1)
    same = replace(
        x,
        read_indices=ids,
        num_accepted_tokens=None,
        states_out=beside,
        states_out_indices=rows,
        null_index=-1,
        memo={},
    )
    out = run(p, same)
    scatter_rows(x.states_out, wanted, beside)
    return out


def _apart(p: KDAProblem, x: Operands, read: torch.Tensor, write: Any) -> torch.Tensor:
    """Where a sequence may write a slot that another one reads, all reads come first: on copies of the states."""
    pool, slots = x.state_pool, x.state_pool.shape[0]
    ids = slot_ids(read, p.N, slots, x.null_index, pool.device)
    given = isinstance(write, torch.Tensor)
    targets = slot_ids(write, p.N, slots, x.null_index, pool.device) if given else ids
    states = States(pool, read, write, x.states_out, x.states_out_indices, x.null_index, x.memo)
    if not (given and _crosses(targets, ids)) and not (_shares(x) and _crosses_rows(p, x, ids)):
        return walk_rows(p, x, states)
    copies = pool.index_select(0, ids.clamp(min=0)).contiguous()
    states.pool, states.memo, states.write = copies, {}, "none" if write == "none" else "read"
    states.read = torch.where(ids >= 0, torch.arange(p.N), -1)
    states.null_index = -1
    if x.states_out is not None:
        states.out_ids = slot_ids(x.states_out_indices.flatten(), p.T, x.states_out.shape[0], x.null_index, pool.device)
    out = walk_rows(p, x, states)
    if states.write == "read":
        scatter_rows(pool, torch.where(ids >= 0, targets, -1), copies)
    return out


def _crosses(targets: torch.Tensor, ids: torch.Tensor) -> bool:
    """Some row writes a slot that another row reads."""
    same = (targets[:, None] == ids[None, :]) & (targets[:, None] >= 0)
    return bool(same.fill_diagonal_(False).any())


def _shares(x: Operands) -> bool:
    """`states_out` lies in the pool's own memory."""
    if x.states_out is None:
        return False
    return x.states_out.untyped_storage().data_ptr() == x.state_pool.untyped_storage().data_ptr()


def _crosses_rows(p: KDAProblem, x: Operands, ids: torch.Tensor) -> bool:
    """Some token's state may go to a slot that another sequence reads, or one that this one still reads."""
    if x.states_out.data_ptr() != x.state_pool.data_ptr() or x.states_out.stride() != x.state_pool.stride():
        return True
    return bool(torch.isin(x.states_out_indices.to(torch.int64), ids).any())
