"""chunk backward, eager: a reverse walk over the slabs of the forward, each recomputed from its entry states."""

from __future__ import annotations

import torch

from cula.ops.common.exact_matmul import exact_matmul
from cula.ops.kda import activations as act
from cula.ops.kda.chunk.eager import intra
from cula.ops.kda.chunk.eager.forward import entry_state
from cula.ops.kda.chunk.eager.layout import Group, Slab, SlabIndex, covers_all, groups, padded, steps_per_slab
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
        self.const: Constants = constants(p, x, padded(p.K))
        make = torch.empty_like if covers_all(p) else torch.zeros_like
        self.out = Gradients(
            *(make(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta))
        )
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
                entries = [saved.tensors[f"entry{at + i}"] for i in range(len(slabs))]
            else:
                entries = self.entries(group, slabs)
            at += len(slabs)
            self.group(group, slabs, entries)
        if self.dA_log is not None:
            self.out.A_log = self.dA_log.to(self.x.A_log.dtype)
        if self.dt_bias is not None:
            self.out.dt_bias = self.dt_bias.to(self.x.dt_bias.dtype)
        return self.out

    def entries(self, group: Group, slabs: list[Slab]) -> list[Tensor]:
        """The states that enter each slab, where no eager forward kept them."""
        p, x = self.p, self.x
        h = entry_state(p, x, group, self.const.dtype)
        result = []
        for slab in slabs:
            result.append(h.clone())
            prep = prepare(load(p, x, self.const, SlabIndex(slab, x.q.device)))
            walk(prep, h, slab.active, p.HV, keep_h=False)
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
            self.slab(slab, entry.clone(), dh)
        if self.out.initial_state is not None:
            dh0 = dh.view(count, p.HV, *dh.shape[1:])[..., : p.K, : p.V]
            self.out.initial_state[list(group.ids)] = (dh0.mT if p.state_v_first else dh0).to(
                self.out.initial_state.dtype
            )

    def slab(self, slab: Slab, h: Tensor, dh: Tensor) -> None:
        """Recompute a slab from its entry states h, then walk dh through it and store the inputs' gradients."""
        p = self.p
        index = SlabIndex(slab, self.do.device)
        x = load(p, self.x, self.const, index, keep=True)
        prep = prepare(x)
        walked = walk(prep, h, slab.active, p.HV, keep_h=True)
        do = index.gather(self.do, self.const.dtype)
        dinter, dkg, dtotal = walk_back(prep, walked, do, dh, slab.active, p.HV)
        dq, dk, dv, dg, dbeta = chunk_gradients(x, prep, walked, do, dinter, dkg, dtotal)
        self.store(index, x, dq, dk, dv, dg, dbeta)

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


def walk_back(
    prep: Prepared, walked: Walk, do: Tensor, dh: Tensor, active: tuple[int, ...], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry dh back through the slab, in place.

    Returns dinter `[n, 2C, V]` (minus the gradient of v_new, above do), dkg `[n, C, K]`, dtotal `[n, K]`
    (gradient of the log of the chunk's total decay).
    """
    n, C2, K = prep.wq.shape
    C, V = C2 // 2, do.shape[2]
    dinter = torch.empty(n, C2, V, dtype=do.dtype, device=do.device)
    dinter[:, C:] = do
    torch.bmm(prep.Aqk.mT, do, out=dinter[:, :C])
    dkg = torch.empty(n, C, K, dtype=do.dtype, device=do.device)
    dtotal = torch.empty(n, K, dtype=do.dtype, device=do.device)
    stop = n
    for count in reversed(active):
        m = count * heads
        now = slice(stop - m, stop)
        state = dh[:m]
        torch.bmm(walked.vn[now], state.mT, out=dkg[now])
        torch.mul(torch.linalg.vecdot(walked.h[now], state), prep.total[now].squeeze(-1), out=dtotal[now])
        dvn = dinter[now, :C]
        dvn.baddbmm_(prep.kg[now], state).neg_()
        state.mul_(prep.total[now]).baddbmm_(prep.wq[now].mT, dinter[now])
        stop -= m
    return dinter, dkg, dtotal


def chunk_gradients(
    x: Inputs, prep: Prepared, walked: Walk, do: Tensor, dinter: Tensor, dkg: Tensor, dtotal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq of the scaled q, dk, dv, dg, dbeta) of finished inputs, all chunks of the slab at once."""
    n, C, K = x.q.shape
    dwq = torch.bmm(dinter, walked.h.mT)  # dw above d(qP)
    dqP = dwq[:, C:]
    dAqk = torch.bmm(do, walked.vn.mT)
    dY = torch.cat((dwq[:, :C], dinter[:, :C].neg()), 2)
    dX = torch.bmm(prep.A.mT, dY)
    dL = torch.bmm(dX, prep.wu.mT).neg_().tril_(-1)
    kP = x.k * prep.P
    dbeta = torch.linalg.vecdot(dL, prep.Akk).unsqueeze(-1)
    dbeta += (torch.linalg.vecdot(dX[:, :, :K], kP) + torch.linalg.vecdot(dX[:, :, K:], x.v)).unsqueeze(-1)
    dX.mul_(x.beta)
    dkP, dv = dX[:, :, :K], dX[:, :, K:]
    dq = dqP * prep.P
    dk = torch.addcmul(dkP * prep.P, dkg, prep.R)
    dP = (prep.wq[:, C:] * dqP).addcmul_(kP, dkP)
    dP[:, -1].add_(dtotal)
    dR = prep.kg * dkg
    dg = intra.products_backward(x.q, x.k, prep.decay, dAqk, dL.mul_(x.beta), dq, dk, dP, dR)
    return dq, dk, dv, dg, dbeta
