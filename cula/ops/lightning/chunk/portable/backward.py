"""chunk backward, portable: three walks, one for each of dq, dk and dv, and the sums over value heads."""

from __future__ import annotations

import torch

from cula.ops.common.arguments import has_wide_rows
from cula.ops.lightning.chunk.portable.config import configure
from cula.ops.lightning.chunk.portable.forward import (
    NONE,
    TENSOR,
    States,
    Walk,
    boundaries,
    v_first_strides,
    walk,
)
from cula.ops.lightning.chunk.saved import Gradients
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands, do: Tensor, dht: Tensor | None) -> Gradients:
    """Gradients of q, k, v and initial_state from do `[B,T,HV,V]` and dht (final_state's, or None)."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x, do, dht)


def _run(p: LightningProblem, x: Operands, do: Tensor, dht: Tensor | None) -> Gradients:
    if has_wide_rows(do):
        do = do.contiguous()
    cu = boundaries(p, x)
    out = Gradients(*(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.q, x.k, x.v)))
    dq, dk = out.q, out.k
    if p.HV != p.H:
        dq, dk = (torch.empty(p.B, p.T, p.HV, p.K, dtype=torch.float32, device=do.device) for _ in range(2))
    nothing = States(NONE, x.q)
    start, end, dh0 = nothing, nothing, nothing
    if x.initial_state is not None:
        start = _ends(x.initial_state, p)
        out.initial_state = torch.empty_like(x.initial_state, memory_format=torch.contiguous_format)
        dh0 = _ends(out.initial_state, p)
    if dht is not None:
        end = _ends(dht, p)
    over_k = configure(p, x.target, p.V, p.K)  # the columns are K's
    walk(p, x, over_k, cu, Walk(do, x.v, x.k, dq, _turned(start), nothing, out_scale=p.scale))
    walk(p, x, over_k, cu, Walk(x.v, do, x.q, dk, _turned(end), nothing, in_scale=p.scale, reverse=True))
    over_v = configure(p, x.target, p.K, p.V)
    walk(p, x, over_v, cu, Walk(x.k, x.q, do, out.v, end, dh0, in_scale=p.scale, reverse=True))
    if p.HV != p.H:
        for grad, parts in ((out.q, dq), (out.k, dk)):
            grad.copy_(parts.unflatten(2, (p.H, -1)).sum(3))
    return out


def _ends(state: Tensor, p: LightningProblem) -> States:
    """A state tensor as an end of a walk over V."""
    return States(TENSOR, state, v_first_strides(state, p.state_v_first))


def _turned(s: States) -> States:
    """The same states for a walk over K."""
    n, h, a, b = s.strides
    return States(s.kind, s.tensor, (n, h, b, a))
