"""chunk backward, eager: the states once more, then a reverse walk over the slabs.

With the gradient D of the state after a chunk of n tokens, and do, dv, ... of its rows (q scaled):

    dq_i = e^{-s(i+1)} h do_i + sum_{j<=i} e^{-s(i-j)} (do_i . v_j) k_j
    dk_j = e^{-s(n-1-j)} D v_j + sum_{i>=j} e^{-s(i-j)} (do_i . v_j) q_i
    dv_j = e^{-s(n-1-j)} D^T k_j + sum_{i>=j} e^{-s(i-j)} (q_i . k_j) do_i
    D   <- e^{-sn} D + sum_i e^{-s(i+1)} q_i do_i^T
"""

from __future__ import annotations

import torch

from cula.ops.common.chunk_layout import Group, Slab, SlabIndex, covers_all, groups, padded, steps_per_slab
from cula.ops.common.exact_matmul import add_bmm, bmm, exact_matmul
from cula.ops.lightning.chunk.eager.slab import (
    Constants,
    Inputs,
    advance,
    constants,
    entry_state,
    heads,
    load,
    pieces,
    runs,
    states,
    walk,
)
from cula.ops.lightning.chunk.saved import Gradients
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor


def run(p: LightningProblem, x: Operands, do: Tensor, dht: Tensor | None) -> Gradients:
    """Gradients of q, k, v and initial_state from do `[B,T,HV,V]` and dht (final_state's, or None)."""
    with torch.no_grad(), exact_matmul(x.q.device):
        return _Backward(p, x, do, dht).run()


class _Backward:
    """One backward call: its outputs, its constants, and the walk."""

    def __init__(self, p: LightningProblem, x: Operands, do: Tensor, dht: Tensor | None) -> None:
        self.p, self.x, self.do, self.dht = p, x, do, dht
        self.const: Constants = constants(p, x, backward=True)
        make = torch.empty_like if covers_all(p) else torch.zeros_like
        self.out = Gradients(*(make(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v)))
        if x.initial_state is not None:
            self.out.initial_state = torch.empty_like(x.initial_state, memory_format=torch.contiguous_format)

    def run(self) -> Gradients:
        """Walk every group backwards."""
        for group in groups(self.p, self.x.boundaries):
            slabs = list(group.slabs(steps_per_slab(self.p, group)))
            self.group(group, slabs, self.entries(group, slabs))
        return self.out

    def entries(self, group: Group, slabs: list[Slab]) -> list[Tensor]:
        """The states that enter each slab."""
        p, x = self.p, self.x
        h = entry_state(p, x, group, self.const.dtype)
        result = []
        for i, slab in enumerate(slabs):
            result.append(h.clone())
            if i + 1 < len(slabs):
                walk(p, self.const, load(p, x, self.const, SlabIndex(slab, x.q.device)), h, slab)
        return result

    def group(self, group: Group, slabs: list[Slab], entries: list[Tensor]) -> None:
        """One group: D starts at dht and walks back to dh0."""
        p, count = self.p, len(group.ids)
        D = torch.zeros(count * p.HV, padded(p.K), padded(p.V), dtype=self.const.dtype, device=self.do.device)
        if self.dht is not None:
            states(p, D, count).copy_((self.dht.mT if p.state_v_first else self.dht)[list(group.ids)])
        for slab, entry in zip(reversed(slabs), reversed(entries), strict=True):
            self.slab(slab, entry, D)
        if self.out.initial_state is not None:
            found = states(p, D, count)
            self.out.initial_state[list(group.ids)] = found.mT if p.state_v_first else found

    def slab(self, slab: Slab, h: Tensor, D: Tensor) -> None:
        """Walk D back through a slab whose entry states are h, and store the inputs' gradients."""
        p, const = self.p, self.const
        index = SlabIndex(slab, self.do.device)
        x = load(p, self.x, const, index)
        before = walk(p, const, x, h, slab)
        do = index.gather(self.do, const.ws("do", *x.v.shape))
        qd = const.ws("qd", *x.q.shape)
        torch.mul(heads(x.q, p), const.powers.rows, out=heads(qd, p))
        after = self.walk_back(slab, qd, do, D)
        dq, dk, dv = self.gradients(slab, x, before, after, do)
        if p.HV != p.H:
            dq, dk = (t.view(-1, p.HV // p.H, *t.shape[1:]).sum(1) for t in (dq, dk))
        index.scatter(self.out.q, dq)
        index.scatter(self.out.k, dk)
        index.scatter(self.out.v, dv)

    def walk_back(self, slab: Slab, qd: Tensor, do: Tensor, D: Tensor) -> Tensor:
        """Carry D back through the slab, in place; returns the D after each chunk."""
        p, const = self.p, self.const
        n, _, K = qd.shape
        after = const.ws("after", n, K, do.shape[2])
        update = bmm(qd.mT, do, const.ws("update", n, K, do.shape[2]))
        stop = n
        for step, active in zip(reversed(range(slab.first, slab.last)), reversed(slab.active), strict=True):
            start = stop - active * p.HV
            after[start:stop] = D[: active * p.HV]
            for r, last, tokens in runs(p, slab.group, step, active):
                rows = slice(r * p.HV, last * p.HV)
                advance(D[rows], update[start + rows.start : start + rows.stop], p, const, tokens)
            stop = start
        return after

    def gradients(
        self, slab: Slab, x: Inputs, before: Tensor, after: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the slab, all chunks at once."""
        p, const, ws = self.p, self.const, self.const.ws
        n, C, _ = x.q.shape
        dA = bmm(do, x.v.mT, ws("dA", n, C, C))
        heads(dA, p).mul_(const.powers.pairs)
        dq = bmm(do, before.mT, ws("dq", *x.q.shape))
        heads(dq, p).mul_(const.powers.rows)
        add_bmm(dq, dA, x.k).mul_(p.scale)
        dk = bmm(x.v, after.mT, ws("dk", *x.k.shape))
        for at, tokens in pieces(p, slab):
            heads(dk[at], p).mul_(const.tail(tokens))
        add_bmm(dk, dA.mT, x.q)
        A = bmm(x.q, x.k.mT, ws("A", n, C, C))
        heads(A, p).mul_(const.powers.pairs)
        dv = bmm(x.kd, after, ws("dv", *x.v.shape))
        add_bmm(dv, A.mT, do)
        return dq, dk, dv
