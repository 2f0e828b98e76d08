"""rollback, eager: the accepted tokens of a draft, one batched torch update each; any device."""

from __future__ import annotations

from typing import Any

import torch

from cula.ops.kda.pools import scatter_rows, slot_ids
from cula.ops.kda.problem import KDAProblem


def run(p: KDAProblem, x: Any) -> None:
    """Advance the states of a `kda_rollback` call in place."""
    pool, r = x.state_pool, x.rollback
    if not pool.shape[0] or not p.N:
        return
    with torch.no_grad():
        ids = slot_ids(x.indices, p.N, pool.shape[0], x.null_index, pool.device)
        count = torch.minimum(x.accepted.to(torch.int64).clamp(min=0), r.count.to(torch.int64)).clamp(max=p.T)
        S = pool.index_select(0, ids.clamp(min=0)).to(r.k.dtype)
        for t in range(p.T):
            new = S * r.g[:, t].exp().unsqueeze(-2) + r.u[:, t].unsqueeze(-1) * r.k[:, t].unsqueeze(-2)
            if pool.dtype != r.k.dtype:  # a narrower pool rounds after each token, as verify does
                new = new.to(pool.dtype).to(r.k.dtype)
            S = torch.where((count > t)[:, None, None, None], new, S)
        scatter_rows(pool, torch.where(count > 0, ids, -1), S)
