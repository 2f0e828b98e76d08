"""One slab of the eager path: load its inputs, do all work that needs no state, walk the state through it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from cula.ops.common.chunk_layout import SlabIndex, padded, slab_chunk_heads
from cula.ops.common.exact_matmul import add_bmm, bmm, sum_last
from cula.ops.common.workspace import Workspace
from cula.ops.kda import activations as act
from cula.ops.kda.chunk.eager.intra import Intra, dot
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


@dataclass(frozen=True)
class Constants:
    """Made once a call: a = exp(A_log) `[HV,1,1]`, bias = dt_bias `[HV,1,Kp]`, or None; and the workspace."""

    dtype: torch.dtype
    a: Tensor | None
    bias: Tensor | None
    ws: Workspace
    intras: dict[tuple[int, int, int], Intra] = field(default_factory=dict)

    def intra(self, n: int, C: int, K: int) -> Intra:
        """The intra-chunk products of slabs of this size, their views made once."""
        if (n, C, K) not in self.intras:
            self.intras[n, C, K] = Intra(self.ws, n, C, K)
        return self.intras[n, C, K]


def constants(p: KDAProblem, x: Operands, *, backward: bool = False) -> Constants:
    """The call's constants in the compute dtype."""
    dtype = torch.float64 if p.dtype == "fp64" else torch.float32
    a = None if x.A_log is None else x.A_log.to(dtype).exp().view(-1, 1, 1)
    bias = None
    if x.dt_bias is not None:
        Kp = padded(p.K)
        bias = torch.nn.functional.pad(x.dt_bias.to(dtype), (0, Kp - p.K)).view(p.HV, 1, Kp)
    return Constants(dtype, a, bias, Workspace(dtype, x.q.device, scratch_elements(p, backward=backward)))


def scratch_elements(p: KDAProblem, *, backward: bool) -> int:
    """Elements of all named buffers of a slab of the usual size; a larger slab finds memory of its own."""
    K, V, C = padded(p.K), padded(p.V), p.chunk_size
    row = 12 * K + 4 * V + 5 * C
    if backward:
        row += 15 * K + 7 * V + 2 * C + -(-K * V // C)
    heads = p.HV * max(1, slab_chunk_heads(p) // p.HV)
    tokens = p.HV * (p.T if p.packed else p.B * p.T) + p.N * p.HV * C
    return min(heads * C, tokens) * row + 64 * 64


@dataclass
class Inputs:
    """A slab's finished inputs `[n, C, ...]` (q scaled) and what their backward needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor  # [n, C, 1]
    raw_g: Tensor
    raw_beta: Tensor
    q_rstd: Tensor | None = None
    k_rstd: Tensor | None = None


def load(p: KDAProblem, x: Operands, const: Constants, index: SlabIndex) -> Inputs:
    """Gather and activate a slab's inputs."""
    ws, C = const.ws, p.chunk_size
    n, Kp, Vp = index.slab.chunks * p.HV, padded(p.K), padded(p.V)
    q = index.gather(x.q, ws("q", n, C, Kp), p.HV // p.H)
    k = index.gather(x.k, ws("k", n, C, Kp), p.HV // p.H)
    v = index.gather(x.v, ws("v", n, C, Vp))
    g = raw_g = index.gather(x.g, ws("g", n, C, Kp))
    beta = raw_beta = index.gather(x.beta.unsqueeze(-1), ws("beta", n, C, 1))
    q_rstd = k_rstd = None
    if p.l2norm:
        q_rstd, k_rstd = (dot(ws, y, y).add_(act.L2NORM_EPS).rsqrt_().unsqueeze(-1) for y in (q, k))
        k.mul_(k_rstd)
        q.mul_(q_rstd * p.scale)
    else:
        q.mul_(p.scale)
    if p.gate != "finished":
        heads = raw_g.view(-1, p.HV, C, Kp)
        g = act.gate(heads, const.a, const.bias, p.lower_bound).view_as(raw_g)
        if Kp != p.K:
            g[..., p.K :] = 0.0
        index.zero_padding(g, p.HV)
    if p.beta_sigmoid:
        beta = act.beta(raw_beta, p.neg_eigval)
    return Inputs(q, k, v, g, beta, raw_g, raw_beta, q_rstd, k_rstd)


@dataclass
class Prepared:
    """What the chunks of a slab need beyond the state: all `[n, ...]`, see `Intra` for Aqk, Akk, A, P and R."""

    intra: Intra
    total: Tensor  # exp(sum of g) [n, K, 1]
    Aqk: Tensor
    A: Tensor
    kq: Tensor  # k P above q P  [n, 2C, K]
    kg: Tensor  # k R  [n, C, K]


def prepare(const: Constants, x: Inputs) -> Prepared:
    """Everything that does not touch the state."""
    n, C, K = x.q.shape
    ws, intra = const.ws, const.intra(n, C, K)
    torch.exp(x.g, out=intra.decay)
    intra.products()
    torch.mul(x.beta, intra.Akk, out=intra.L)
    intra.inverse()
    kq = ws("kq", n, 2 * C, K)
    torch.mul(x.k, intra.P, out=kq[:, :C])
    torch.mul(x.q, intra.P, out=kq[:, C:])
    kg = torch.mul(x.k, intra.R, out=ws("kg", n, C, K))
    return Prepared(intra, total_decay(x.g), intra.Aqk, intra.A, kq, kg)


def total_decay(g: Tensor) -> Tensor:
    """exp(sum of g over the chunk) `[n, K, 1]`: from the sum, so that weak gates do not drift over many chunks."""
    total = g.sum(1) if g.device.type == "cpu" else sum_last(g.mT)
    return total.exp_().unsqueeze(-1)


def advance(h: Tensor, total: Tensor, kg: Tensor, vn: Tensor) -> None:
    """h <- total * h + kg^T v_new, in place; h `[n, K, V]`."""
    add_bmm(h.mul_(total), kg.mT, vn)


@dataclass
class Walk:
    """v_new and the state-dependent part of o for each chunk; h before each chunk where it was kept."""

    vn: Tensor  # [n, C, V]
    inter: Tensor  # [n, C, V]
    h: Tensor | None  # [n, K, V]


def walk(
    ws: Workspace, x: Inputs, prep: Prepared, h: Tensor, active: tuple[int, ...], heads: int, *, keep_h: bool
) -> Walk:
    """Carry the states h `[sequences * heads, K, V]` through the slab, in place, step by step.

    v_new = A (beta (v - k P h)), the inter-chunk output is q P h.
    """
    n, C2, K = prep.kq.shape
    C, V = C2 // 2, h.shape[2]
    vn, inter = ws("vn", n, C, V), ws("inter", n, C, V)
    kept = ws("h", n, K, V) if keep_h else None
    start = 0
    for count in active:
        m = count * heads
        now = slice(start, start + m)
        state = h[:m]
        if kept is not None:
            kept[now] = state
        seen = bmm(prep.kq[now], state, ws("seen", m, C2, V))
        inter[now] = seen[:, C:]
        write = torch.sub(x.v[now], seen[:, :C], out=ws("write", m, C, V)).mul_(x.beta[now])
        new = bmm(prep.A[now], write, vn[now])
        advance(state, prep.total[now], prep.kg[now], new)
        start += m
    return Walk(vn, inter, kept)


def output(prep: Prepared, walked: Walk) -> Tensor:
    """o `[n, C, V]` of the slab (in the memory of `walked.inter`)."""
    return add_bmm(walked.inter, prep.Aqk, walked.vn)
