"""chunk backward, eager: a reverse walk over the slabs of the forward, each recomputed from its entry states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.ops.common.chunk_layout import Group, Slab, SlabIndex, covers_all, groups, padded, steps_per_slab
from cula.ops.common.exact_matmul import exact_matmul
from cula.ops.common.workspace import Workspace
from cula.ops.kda import activations as act
from cula.ops.kda.chunk.eager.forward import entry_state
from cula.ops.kda.chunk.eager.intra import dot
from cula.ops.kda.chunk.eager.slab import Constants, Inputs, Prepared, Walk, constants, load, prepare, walk
from cula.ops.kda.chunk.saved import Gradients, Saved
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands, saved: Saved | None, do: Tensor, dht: Tensor | None) -> Gradients:
    """Gradients of every input, from do `[B,T,HV,V]` and dht (final_state's, or None)."""
    with torch.no_grad(), exact_matmul(x.q.device):
        return _Backward(p, x, do, dht).run(saved)


class _Backward:
    """One backward call: its outputs, its constants, and the walk."""

    def __init__(self, p: KDAProblem, x: Operands, do: Tensor, dht: Tensor | None) -> None:
        self.p, self.x, self.do, self.dht = p, x, do, dht
        self.const: Constants = constants(p, x, backward=True)
        make = torch.empty_like if covers_all(p) else torch.zeros_like
        self.out = Gradients(*(make(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta)))
        self.dA_log = None if x.A_log is None else torch.zeros(p.HV, dtype=torch.float64, device=x.q.device)
        self.dt_bias = None
        if x.dt_bias is not None:
            self.dt_bias = torch.zeros(p.HV, p.K, dtype=torch.float64, device=x.q.device)
        if x.initial_state is not None:
            self.out.initial_state = torch.empty_like(x.initial_state, memory_format=torch.contiguous_format)

    def run(self, saved: Saved | None) -> Gradients:
        """Walk every group backwards."""
        at = 0
        for group in groups(self.p, self.x.boundaries):
            slabs = list(group.slabs(steps_per_slab(self.p, group)))
            if saved is not None and saved.writer == "eager":
                later = [saved.tensors[f"entry{at + i}"] for i in range(max(0, len(slabs) - 1))]
                entries = [entry_state(self.p, self.x, group, self.const.dtype), *map(self.padded_state, later)]
            else:
                entries = self.entries(group, slabs)
            at += max(0, len(slabs) - 1)
            self.group(group, slabs, entries)
        if self.dA_log is not None:
            self.out.A_log = self.dA_log.to(self.x.A_log.dtype)
        if self.dt_bias is not None:
            self.out.dt_bias = self.dt_bias.to(self.x.dt_bias.dtype)
        return self.out

    def padded_state(self, states: Tensor) -> Tensor:
        """States `[count, HV, K, V]` as the slabs hold them, `[count * HV, Kp, Vp]`."""
        p, count = self.p, states.shape[0]
        h = torch.zeros(count, p.HV, padded(p.K), padded(p.V), dtype=self.const.dtype, device=states.device)
        h[..., : p.K, : p.V] = states
        return h.view(count * p.HV, *h.shape[2:])

    def entries(self, group: Group, slabs: list[Slab]) -> list[Tensor]:
        """The states that enter each slab, where no eager forward kept them."""
        p, x = self.p, self.x
        h = entry_state(p, x, group, self.const.dtype)
        result = []
        for slab in slabs:
            result.append(h.clone())
            inputs = load(p, x, self.const, SlabIndex(slab, x.q.device))
            prep = prepare(self.const, inputs)
            walk(self.const.ws, inputs, prep, h, slab.active, p.HV, keep_h=False)
        return result

    def group(self, group: Group, slabs: list[Slab], entries: list[Tensor]) -> None:
        """One group: dh starts at dht and walks back to dh0."""
        p = self.p
        count = len(group.ids)
        dh = torch.zeros(count, p.HV, padded(p.K), padded(p.V), dtype=self.const.dtype, device=self.do.device)
        if self.dht is not None:
            source = self.dht.mT if p.state_v_first else self.dht
            dh[..., : p.K, : p.V] = source[list(group.ids)]
        dh = dh.view(count * p.HV, *dh.shape[2:])
        for slab, entry in zip(reversed(slabs), reversed(entries), strict=True):
            self.slab(slab, entry, dh)
        if self.out.initial_state is not None:
            dh0 = dh.view(count, p.HV, *dh.shape[1:])[..., : p.K, : p.V]
            self.out.initial_state[list(group.ids)] = (dh0.mT if p.state_v_first else dh0).to(
                self.out.initial_state.dtype
            )

    def slab(self, slab: Slab, h: Tensor, dh: Tensor) -> None:
        """Recompute a slab from its entry states h, then walk dh through it and store the inputs' gradients."""
        p, ws = self.p, self.const.ws
        index = SlabIndex(slab, self.do.device)
        x = load(p, self.x, self.const, index)
        prep = prepare(self.const, x)
        walked = walk(ws, x, prep, h, slab.active, p.HV, keep_h=True)
        do = index.gather(self.do, ws("do", *x.v.shape))
        back = walk_back(ws, x, prep, walked, do, dh, slab.active, p.HV)
        self.store(index, x, *chunk_gradients(ws, x, prep, walked, do, back))

    def store(self, index: SlabIndex, x: Inputs, dq: Tensor, dk: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor) -> None:
        """Through the activations, then from chunks back to tokens."""
        p, const = self.p, self.const
        dq.mul_(p.scale)
        if p.l2norm:
            y = x.q if p.scale == 0.0 else x.q / p.scale
            dq = act.l2norm_backward(y, x.q_rstd, dq)
            dk = act.l2norm_backward(x.k, x.k_rstd, dk)
        if p.HV != p.H:
            dq, dk = (t.view(-1, p.HV // p.H, *t.shape[1:]).sum(1) for t in (dq, dk))
        if p.gate != "finished":
            heads = (-1, p.HV, *dg.shape[1:])
            dx, dA = act.gate_backward(x.raw_g.view(heads), const.a, const.bias, p.lower_bound, dg.view(heads))
            for t in (dx, dA):
                index.zero_padding(t, p.HV)
            if self.dA_log is not None:
                self.dA_log += dA[..., : p.K].sum((0, 2, 3), dtype=torch.float64)
            if self.dt_bias is not None:
                self.dt_bias += dx[..., : p.K].sum((0, 2), dtype=torch.float64)
            dg = dx.view_as(dg)
        if p.beta_sigmoid:
            dbeta = act.beta_backward(x.raw_beta, p.neg_eigval, dbeta)
        index.scatter(self.out.q, dq)
        index.scatter(self.out.k, dk)
        index.scatter(self.out.v, dv)
        index.scatter(self.out.g, dg)
        index.scatter(self.out.beta.unsqueeze(-1), dbeta)


@dataclass
class WalkBack:
    """What the reverse walk leaves for the chunks: all `[n, ...]`."""

    dx: Tensor  # gradient of x = beta (v - k P h)  [n, C, V]
    dseen: Tensor  # - beta dx above do: gradient of [k P; q P] h  [n, 2C, V]
    dkg: Tensor  # [n, C, K]
    dtotal: Tensor  # gradient of the log of the chunk's total decay  [n, K]


def walk_back(
    ws: Workspace, x: Inputs, prep: Prepared, walked: Walk, do: Tensor, dh: Tensor, active: tuple[int, ...], heads: int
) -> WalkBack:
    """Carry dh `[sequences * heads, K, V]` back through the slab, in place."""
    n, C2, K = prep.kq.shape
    C, V = C2 // 2, do.shape[2]
    dvn = torch.bmm(prep.Aqk.mT, do, out=ws("dvn", n, C, V))
    back = WalkBack(ws("dx", n, C, V), ws("dseen", n, C2, V), ws("dkg", n, C, K), ws("dtotal", n, K))
    back.dseen[:, C:] = do
    stop = n
    for count in reversed(active):
        m = count * heads
        now = slice(stop - m, stop)
        state = dh[:m]
        torch.bmm(walked.vn[now], state.mT, out=back.dkg[now])
        back.dtotal[now] = dot(ws, walked.h[now], state)
        dvn[now].baddbmm_(prep.kg[now], state)
        dx = torch.bmm(prep.A[now].mT, dvn[now], out=back.dx[now])
        torch.mul(dx, x.beta[now], out=back.dseen[now, :C]).neg_()
        state.mul_(prep.total[now]).baddbmm_(prep.kq[now].mT, back.dseen[now])
        stop -= m
    back.dtotal.mul_(prep.total.squeeze(-1))
    return back


def chunk_gradients(
    ws: Workspace, x: Inputs, prep: Prepared, walked: Walk, do: Tensor, back: WalkBack
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq of the scaled q, dk, dv, dg, dbeta) of finished inputs, all chunks of the slab at once."""
    n, C, K = x.q.shape
    dkq = torch.bmm(back.dseen, walked.h.mT, out=ws("dkq", n, 2 * C, K))  # d(k P) above d(q P)
    dkP, dqP = dkq[:, :C], dkq[:, C:]
    dAqk = torch.bmm(do, walked.vn.mT, out=ws("dAqk", n, C, C))
    dL = torch.bmm(back.dx, walked.vn.mT, out=ws("dL", n, C, C)).neg_().tril_(-1)
    # x = beta * e with e = v - k P h: dbeta = <dx, e>, and e comes back from v_new without a division.
    seen = torch.bmm(prep.kq[:, :C], walked.h, out=ws("dvn", n, C, back.dx.shape[2]))
    error = torch.sub(x.v, seen, out=seen)
    dbeta = (dot(ws, back.dx, error) + (dL * prep.intra.Akk).sum(-1)).unsqueeze(-1)
    dv = torch.neg(back.dseen[:, :C], out=ws("dv", *x.v.shape))
    dq = torch.mul(dqP, prep.intra.P, out=ws("dq", n, C, K))
    dk = torch.mul(dkP, prep.intra.P, out=ws("dk", n, C, K)).addcmul_(back.dkg, prep.intra.R)
    both = dkq.mul_(prep.kq)
    dP = torch.add(both[:, :C], both[:, C:], out=ws("dP", n, C, K))
    dP[:, -1].add_(back.dtotal)
    dR = torch.mul(prep.kg, back.dkg, out=ws("dR", n, C, K))
    dg = prep.intra.backward((dAqk, dL.mul_(x.beta)), dq, dk, dP, dR)
    return dq, dk, dv, dg, dbeta
