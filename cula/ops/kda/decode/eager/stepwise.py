"""recurrent, decode and verify, eager: one batched torch step per token; any device, any state dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cula.ops.common.exact_matmul import exact_matmul
from cula.ops.kda import activations as act
from cula.ops.kda.decode.eager.work import Work, final_state, initial_state, pool_work, state_work
from cula.ops.kda.pools import scatter_rows
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands) -> Any:
    """(o, final_state) of fused_recurrent_kda; the output alone of kda_decode and kda_verify."""
    with torch.no_grad(), exact_matmul(x.q.device):
        if p.pool:
            return _walk(p, x, pool_work(p, x))
        state = initial_state(p, x)
        o = _walk(p, x, state_work(p, x, state))
        return o, final_state(p, state)


def record(p: KDAProblem, x: Operands) -> None:
    """Fill `x.rollback` of a verify call and write nothing else."""
    apart = replace(x, states_out=None, states_out_indices=None, update_state=False, out=None)
    with torch.no_grad(), exact_matmul(x.q.device):
        _walk(p, apart, pool_work(p, apart))


def _walk(p: KDAProblem, x: Operands, work: Work) -> Tensor:
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    rows, HV, V = p.B * p.T, p.HV, p.V
    flat = [t.reshape(rows, *t.shape[2:]) for t in (x.q, x.k, x.v, x.g, x.beta)]
    live = work.read >= 0
    S = work.pool.index_select(0, work.read.clamp(min=0)) if work.pool.shape[0] else _no_slots(p, work)
    S = torch.where(live[:, None, None, None], S, 0.0).to(dtype)
    out = torch.zeros(rows + 1, HV, V, dtype=x.v.dtype, device=x.v.device)  # the last row takes what nobody wants
    a = None if x.A_log is None else x.A_log.to(dtype).exp().view(-1, 1)
    bias = None if x.dt_bias is None else x.dt_bias.to(dtype)
    branches = None if x.parent is None else Branches(S)
    if x.rollback is not None:
        x.rollback.count.copy_(torch.where(live, work.count, 0))
    for t in range(work.most if rows else 0):
        running = work.count > t
        row = torch.where(running, work.first + t, 0)
        q, k, v, g, beta = _finish(p, [y.index_select(0, row).to(dtype) for y in flat], a, bias)
        if branches is not None:
            S = branches.state(x.parent.reshape(-1).index_select(0, row), t)
        new, o, u = _step(S, q, k, v, g, beta)
        if work.pool.dtype != dtype:  # a narrower pool rounds after each token, as separate steps would
            new = new.to(work.pool.dtype).to(dtype)
        S = torch.where(running[:, None, None, None], new, S)
        if branches is not None:
            branches.after.append(S)
        keep = running & live
        if x.rollback is not None:
            x.rollback.record(t, keep, k, u, g)
        out.index_copy_(0, torch.where(keep, row, rows), o.to(out.dtype))
        if work.states_out is not None:
            scatter_rows(work.states_out, torch.where(keep, work.out_ids.index_select(0, row), -1), S)
    scatter_rows(work.pool, work.write, S)
    result = out[:rows].view(p.B, p.T, HV, V)
    return result if x.out is None else x.out.copy_(result)


def _no_slots(p: KDAProblem, work: Work) -> Tensor:
    return torch.zeros(p.N, p.HV, p.V, p.K, dtype=work.pool.dtype, device=work.pool.device)


def _finish(p: KDAProblem, flat: list[Tensor], a: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Activations of one token per sequence: (q scaled, k, v, g, beta), q and k repeated to HV heads."""
    q, k, v, g, beta = flat
    if p.l2norm:
        q, k = act.l2norm(q)[0], act.l2norm(k)[0]
    if p.gate != "finished":
        g = act.gate(g, a, bias, p.lower_bound)
    if p.beta_sigmoid:
        beta = act.beta(beta, p.neg_eigval)
    group = p.HV // p.H
    if group > 1:
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    return q * p.scale, k, v, g, beta


class Branches:
    """Tree drafts: the states after the tokens so far, and which of them the next token continues."""

    def __init__(self, committed: Tensor) -> None:
        """committed: `[N, HV, V, K]`."""
        self.after = [committed]

    def state(self, parent: Tensor, t: int) -> Tensor:
        """The state that token t continues: after token `parent` `[N]` where that is an earlier one, else committed."""
        at = torch.where((parent >= 0) & (parent < t), parent.to(torch.int64) + 1, 0)
        if t == 0:
            return self.after[0]
        return torch.stack(self.after)[at, torch.arange(at.shape[0], device=at.device)]


def _step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token: (the new state, o, u `[N, HV, V]`), from S `[N, HV, V, K]` and q, k `[N, HV, K]`."""
    S = S * g.exp().unsqueeze(-2)
    u = (v - (S * k.unsqueeze(-2)).sum(-1)).mul_(beta.unsqueeze(-1))
    S.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    return S, (S * q.unsqueeze(-2)).sum(-1), u
