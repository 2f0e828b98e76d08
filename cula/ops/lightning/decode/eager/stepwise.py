"""decode and verify, eager: one batched torch step per token; any device, any state dtype."""

from __future__ import annotations

import torch

from cula.ops.common.drafts import Work, find_work
from cula.ops.common.exact_matmul import exact_matmul
from cula.ops.common.pools import scatter_rows
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands) -> Tensor:
    """The outputs; states go where the call says."""
    with torch.no_grad(), exact_matmul(x.q.device):
        return _walk(p, x, find_work(p, x))


def _walk(p: LightningProblem, x: Operands, work: Work) -> Tensor:
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    pool, rows = x.state_pool, p.B * p.T
    live = work.read >= 0
    S = torch.zeros(p.N, p.HV, p.V, p.K, dtype=pool.dtype, device=pool.device)
    if pool.shape[0]:
        S = torch.where(live[:, None, None, None], pool.index_select(0, work.read.clamp(min=0)), S)
    S = S.to(dtype)
    flat = [t.reshape(rows, *t.shape[2:]) for t in (x.q, x.k, x.v)]
    out = torch.zeros(rows + 1, p.HV, p.V, dtype=x.v.dtype, device=x.v.device)  # the last row takes what nobody wants
    exact = torch.exp(-x.slopes.double())
    decay = exact.to(dtype)
    rest = (exact - decay.double()).to(dtype)
    decay, rest = decay[:, None, None], rest[:, None, None]
    for t in range(work.most if rows else 0):
        running = work.count > t
        row = torch.where(running, work.first + t, 0)
        q, k, v = (y.index_select(0, row).to(dtype) for y in flat)
        if p.HV != p.H:
            q, k = (y.repeat_interleave(p.HV // p.H, 1) for y in (q, k))
        new = (S * rest).addcmul_(S, decay).addcmul_(v.unsqueeze(-1), k.unsqueeze(-2))
        new = new.to(pool.dtype).to(dtype)  # a narrower pool rounds after each token, as separate steps would
        S = torch.where(running[:, None, None, None], new, S)
        o = (S * (q * p.scale).unsqueeze(-2)).sum(-1)
        keep = running & live
        out.index_copy_(0, torch.where(keep, row, rows), o.to(out.dtype))
        if work.out_ids is not None:
            scatter_rows(x.states_out, torch.where(keep, work.out_ids.index_select(0, row), -1), S)
    scatter_rows(pool, work.write, S)
    result = out[:rows].view(p.B, p.T, p.HV, p.V)
    return result if x.out is None else x.out.copy_(result)
