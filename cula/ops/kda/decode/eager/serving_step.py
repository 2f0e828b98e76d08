"""decode fused, eager: convolution, SiLU, the token's step and the gated norm in torch; any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cula.host.arch import has_numba
from cula.ops.kda.decode.eager import stepwise
from cula.ops.kda.pools import scatter_rows, slot_ids
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands) -> Tensor:
    """The output of kda_decode_fused; everything between x and the output is in fp32 (fp64 in fp64 calls)."""
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    s = x.step
    with torch.no_grad():
        ids = slot_ids(x.read_indices, p.N, x.state_pool.shape[0], x.null_index, x.q.device)
        y = _convolve(s, ids, dtype)
        q, k, v = y.split([p.H * p.K, p.H * p.K, p.HV * p.V], -1)
        q, k = q.unflatten(-1, (p.H, p.K)), k.unflatten(-1, (p.H, p.K))
        inputs = [t.unsqueeze(1) for t in (q, k, v.unflatten(-1, (p.HV, p.V)), x.g, x.beta)]
        given = dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True))
        token = replace(x, **given, read_indices=ids, null_index=-1, out=None, step=None, memo={})
        wide = replace(p, dtype="fp64" if dtype == torch.float64 else "fp32")
        o = _stepper(wide, x)(wide, token).squeeze(1)
        if s.norm_weight is not None:
            o = o * (o.square().mean(-1, keepdim=True) + s.norm_eps).rsqrt() * s.norm_weight.to(dtype)
        if s.output_gate is not None:
            o = o * s.output_gate.to(dtype).sigmoid()
        o = torch.where((ids >= 0)[:, None, None], o, 0.0).to(s.x.dtype)
    return o if x.out is None else x.out.copy_(o)


def _convolve(s: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(convolution) `[N, channels]` of the current tokens behind the pool's; the pool then holds the last ones."""
    pool, weight = s.conv_pool, s.conv_weight.to(dtype)
    y = s.x.to(dtype) * weight[:, -1]
    if s.conv_bias is not None:
        y = y + s.conv_bias.to(dtype)
    if pool.shape[2] and pool.shape[0] and ids.shape[0]:
        past = pool.index_select(0, ids.clamp(min=0))
        past = torch.where((ids >= 0)[:, None, None], past, 0.0)
        y = y + (past.to(dtype) * weight[:, :-1]).sum(-1)
        scatter_rows(pool, ids, torch.cat([past[..., 1:], s.x.to(pool.dtype).unsqueeze(-1)], -1))
    return torch.nn.functional.silu(y)


def _stepper(p: KDAProblem, x: Operands) -> Any:
    """The eager form of the recurrence that kda_decode would take."""
    if x.q.device.type == "cpu" and has_numba() and p.state_dtype == p.compute_dtype:
        from cula.ops.kda.decode.eager import fused

        return fused.run
    return stepwise.run
