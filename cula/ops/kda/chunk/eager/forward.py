"""chunk forward, eager: batched torch over slabs of chunks; serves chunk_kda and kda_prefill on any device."""

from __future__ import annotations

import torch

from cula.ops.common.chunk_layout import Group, Slab, SlabIndex, covers_all, groups, padded, steps_per_slab
from cula.ops.common.exact_matmul import exact_matmul
from cula.ops.kda.chunk.eager import pool as pools
from cula.ops.kda.chunk.eager.slab import constants, load, output, prepare, walk
from cula.ops.kda.chunk.saved import ForwardResult, Saved
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands) -> ForwardResult:
    """Run the problem; under grad the states that enter each slab are saved for the eager backward."""
    with torch.no_grad(), exact_matmul(x.q.device):
        return _run(p, x)


def _run(p: KDAProblem, x: Operands) -> ForwardResult:
    make = torch.empty_like if covers_all(p) else torch.zeros_like
    o = x.out if x.out is not None else make(x.v, memory_format=torch.contiguous_format)
    if x.out is not None and not covers_all(p):
        o[:, x.boundaries[-1] :] = 0.0
    const = constants(p, x)
    final = _state_tensor(p, x) if p.final_state else None
    writer = pools.Writer(p, x) if p.pool or p.checkpoint_every else None
    snapshots = _Snapshots(p, x) if p.intermediate_states else None
    entries: list[Tensor] = []
    for group in groups(p, x.boundaries):
        h = entry_state(p, x, group, const.dtype)
        for slab in group.slabs(steps_per_slab(p, group)):
            if p.grad and slab.first:
                entries.append(_states(p, h, slab.active[0]).clone())
            index = SlabIndex(slab, x.q.device)
            inputs = load(p, x, const, index)
            prep = prepare(const, inputs)
            keep = snapshots is not None or (writer is not None and writer.checkpoints_in(slab))
            walked = walk(const.ws, inputs, prep, h, slab.active, p.HV, keep_h=keep)
            index.scatter(o, output(prep, walked))
            if snapshots is not None:
                snapshots.take(slab, walked.h)
            if writer is not None:
                writer.checkpoint(slab, inputs, walked)
        if final is not None:
            _store_state(p, group, h, final)
        if writer is not None:
            writer.finish(group, h)
    saved = Saved("eager", {f"entry{i}": e for i, e in enumerate(entries)}) if p.grad else None
    return ForwardResult(o, final, snapshots.h if snapshots is not None else None, saved)


def entry_state(p: KDAProblem, x: Operands, group: Group, dtype: torch.dtype) -> Tensor:
    """States that enter the group's first step, `[sequences * HV, Kp, Vp]`, a fresh tensor."""
    count = len(group.ids)
    h = torch.zeros(count, p.HV, padded(p.K), padded(p.V), dtype=dtype, device=x.q.device)
    if p.pool:
        pools.read_slots(p, x, group.ids, h[..., : p.K, : p.V].mT)
    elif x.initial_state is not None:
        source = x.initial_state.mT if p.state_v_first else x.initial_state
        h[..., : p.K, : p.V] = source[list(group.ids)]
    return h.view(count * p.HV, padded(p.K), padded(p.V))


def _state_tensor(p: KDAProblem, x: Operands) -> Tensor:
    tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
    dtype = torch.float64 if p.state_dtype == "fp64" else torch.float32
    return torch.empty(p.N, p.HV, *tail, dtype=dtype, device=x.q.device)


def _states(p: KDAProblem, h: Tensor, count: int) -> Tensor:
    """The first `count` states `[count, HV, K, V]` without padding: a view."""
    return h[: count * p.HV].view(count, p.HV, *h.shape[1:])[..., : p.K, : p.V]


def _store_state(p: KDAProblem, group: Group, h: Tensor, final: Tensor) -> None:
    h = _states(p, h, len(group.ids))
    final[list(group.ids)] = (h.mT if p.state_v_first else h).to(final.dtype)


class _Snapshots:
    """h `[B, NT, HV, K, V]`: the state before each chunk, in sequence order, in q's dtype."""

    def __init__(self, p: KDAProblem, x: Operands) -> None:
        counts = [-(-n // p.chunk_size) for n in (p.lengths if p.packed else (p.T,) * p.N)]
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        self.first = [sum(counts[:n]) for n in range(p.N)]
        self.flat = torch.empty(sum(counts), p.HV, *tail, dtype=x.q.dtype, device=x.q.device)
        self.h = self.flat.view(1, -1, p.HV, *tail) if p.packed else self.flat.view(p.B, -1, p.HV, *tail)
        self.p = p

    def take(self, slab: Slab, kept: Tensor) -> None:
        p = self.p
        kept = kept.view(slab.chunks, p.HV, *kept.shape[1:])[..., : p.K, : p.V]
        rows = [
            self.first[slab.group.ids[r]] + step
            for step, count in zip(range(slab.first, slab.last), slab.active, strict=True)
            for r in range(count)
        ]
        self.flat[rows] = (kept.mT if p.state_v_first else kept).to(self.flat.dtype)
