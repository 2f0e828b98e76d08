"""One slab of the eager path: load its inputs, do all work that needs no state, walk the state through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.ops.kda import activations as act
from cula.ops.kda.chunk.eager import intra
from cula.ops.kda.chunk.eager.layout import SlabIndex
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


@dataclass(frozen=True)
class Constants:
    """Per-head constants in the compute dtype: a = exp(A_log) `[HV,1,1]`, bias = dt_bias `[HV,1,Kp]`, or None."""

    dtype: torch.dtype
    a: Tensor | None
    bias: Tensor | None


def constants(p: KDAProblem, x: Operands, Kp: int) -> Constants:
    """The call's constants, made once."""
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    a = None if x.A_log is None else x.A_log.to(dtype).exp().view(-1, 1, 1)
    bias = None
    if x.dt_bias is not None:
        bias = torch.nn.functional.pad(x.dt_bias.to(dtype), (0, Kp - p.K)).view(p.HV, 1, Kp)
    return Constants(dtype, a, bias)


@dataclass
class Inputs:
    """A slab's finished inputs `[n, C, ...]` (q scaled) and what their backward needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor  # [n, C, 1]
    raw_g: Tensor | None = None
    raw_beta: Tensor | None = None
    q_rstd: Tensor | None = None
    k_rstd: Tensor | None = None


def load(p: KDAProblem, x: Operands, const: Constants, index: SlabIndex, *, keep: bool = False) -> Inputs:
    """Gather and activate a slab's inputs; `keep` holds on to the raw gate and beta and the norms."""
    G, dtype = p.HV // p.H, const.dtype
    q, k = index.gather(x.q, dtype, G), index.gather(x.k, dtype, G)
    q_rstd = k_rstd = None
    if p.l2norm:
        (q, q_rstd), (k, k_rstd) = act.l2norm(q), act.l2norm(k)
    q.mul_(p.scale)
    v = index.gather(x.v, dtype)
    g = raw_g = index.gather(x.g, dtype)
    if p.gate != "finished":
        heads = raw_g.view(-1, p.HV, *raw_g.shape[1:])
        g = act.gate(heads, const.a, const.bias, p.lower_bound).view_as(raw_g)
        if g.shape[-1] != p.K:
            g[..., p.K :] = 0.0
        index.zero_padding(g, p.HV)
    beta = raw_beta = index.gather(x.beta.unsqueeze(-1), dtype)[..., :1]
    if p.beta_sigmoid:
        beta = act.beta(raw_beta, p.neg_eigval)
    inputs = Inputs(q, k, v, g, beta)
    if keep:
        inputs.raw_g, inputs.raw_beta, inputs.q_rstd, inputs.k_rstd = raw_g, raw_beta, q_rstd, k_rstd
    return inputs


@dataclass
class Prepared:
    """What the chunks of a slab need beyond the state: all `[n, ...]`, see `intra` for Aqk, Akk, P and R."""

    decay: Tensor  # exp(g) [n, C, K]
    total: Tensor  # exp(sum of g) [n, K, 1]
    Aqk: Tensor
    Akk: Tensor
    A: Tensor  # (I + beta Akk)^-1
    P: Tensor
    R: Tensor
    wu: Tensor  # A [beta k P | beta v]  [n, C, K + V]
    wq: Tensor  # w above q P  [n, 2C, K]
    kg: Tensor  # k R  [n, C, K]


def prepare(x: Inputs) -> Prepared:
    """Everything that does not touch the state."""
    n, C, K = x.q.shape
    decay = x.g.exp()
    Aqk, Akk, P, R = intra.products(x.q, x.k, decay)
    A = intra.inverse(x.beta * Akk)
    right = torch.cat((x.k * P, x.v), 2).mul_(x.beta)
    wu = torch.bmm(A, right)
    wq = torch.empty(n, 2 * C, K, dtype=decay.dtype, device=decay.device)
    wq[:, :C] = wu[:, :, :K]
    torch.mul(x.q, P, out=wq[:, C:])
    total = total_decay(x.g)
    return Prepared(decay, total, Aqk, Akk, A, P, R, wu, wq, x.k * R)


def total_decay(g: Tensor) -> Tensor:
    """exp(sum of g over the chunk) `[n, K, 1]`: from the sum, so that weak gates do not drift over many chunks."""
    return g.sum(1).exp_().unsqueeze(-1)


def advance(h: Tensor, total: Tensor, kg: Tensor, vn: Tensor) -> None:
    """h <- total * h + kg^T v_new, in place; h `[n, K, V]`."""
    h.mul_(total).baddbmm_(kg.mT, vn)


@dataclass
class Walk:
    """v_new and the state-dependent part of o for each chunk; h before each chunk where it was kept."""

    vn: Tensor  # [n, C, V]
    inter: Tensor  # [n, C, V]
    h: Tensor | None  # [n, K, V]


def walk(prep: Prepared, h: Tensor, active: tuple[int, ...], heads: int, *, keep_h: bool) -> Walk:
    """Carry the states h `[sequences * heads, K, V]` through the slab, in place, step by step."""
    n, C2, K = prep.wq.shape
    C, V = C2 // 2, h.shape[2]
    out = torch.empty(n, C2, V, dtype=h.dtype, device=h.device)  # v_new above q P h
    kept = torch.empty(n, K, V, dtype=h.dtype, device=h.device) if keep_h else None
    u = prep.wu[:, :, K:]
    start = 0
    for count in active:
        m = count * heads
        now = slice(start, start + m)
        state = h[:m]
        if kept is not None:
            kept[now] = state
        torch.bmm(prep.wq[now], state, out=out[now])
        vn = out[now, :C]
        torch.sub(u[now], vn, out=vn)
        advance(state, prep.total[now], prep.kg[now], vn)
        start += m
    return Walk(out[:, :C], out[:, C:], kept)


def output(prep: Prepared, walked: Walk) -> Tensor:
    """o `[n, C, V]` of the slab."""
    return torch.baddbmm(walked.inter, prep.Aqk, walked.vn)
