"""chunk forward, portable: one walk; where segments pay, a walk for their states and `merge` before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.host.varlen import clamp_boundaries
from cula.ops.common.pools import slot_ids
from cula.ops.lightning.chunk.portable.config import Config, configure, segments_of
from cula.ops.lightning.chunk.portable.merge import merge_kernel
from cula.ops.lightning.chunk.portable.walk import walk_kernel
from cula.ops.lightning.chunk.saved import ForwardResult
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor

#: Ends of a walk, as `cula.ops.common.decay` numbers them.
NONE, TENSOR, POOL, SEGMENTS = range(4)


@dataclass
class States:
    """One end of a walk: its kind, the states, their strides as n, head, V, K; the slots' indices, or None."""

    kind: int
    tensor: Tensor
    strides: tuple[int, ...] = (0, 0, 0, 0)
    indices: Tensor | None = None
    flag: Tensor | None = None


@dataclass
class Walk:
    """The operands of one walk, in the order of its formula, `[B, T, heads, ...]`; o None: states alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    source: States
    target: States
    out_scale: float = 1.0
    in_scale: float = 1.0
    reverse: bool = False
    parts: int = 1
    checkpoints: bool = False


def run(p: LightningProblem, x: Operands) -> ForwardResult:
    """Run the problem."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x)


def _run(p: LightningProblem, x: Operands) -> ForwardResult:
    c = configure(p, x.target, p.K, p.V)
    o = x.out if x.out is not None else torch.empty_like(x.v, memory_format=torch.contiguous_format)
    final = None
    if p.final_state:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        final = torch.empty(p.N, p.HV, *tail, dtype=torch.float32, device=x.q.device)
    cu = boundaries(p, x)
    source, target = entry(p, x), leaving(p, x, final)
    parts = segments_of(p, c, x.target.sm_count)
    if parts > 1:
        U = torch.empty(p.N * parts, p.HV, p.V, p.K, dtype=torch.float32, device=x.q.device)
        between = States(SEGMENTS, U, U.stride())
        walk(p, x, c, cu, Walk(x.q, x.k, x.v, None, States(NONE, x.q), between, parts=parts))
        merge(p, x, c, cu, U, source, parts)
        source = between
    checkpoints = x.checkpoints is not None
    walk(p, x, c, cu, Walk(x.q, x.k, x.v, o, source, target, p.scale, parts=parts, checkpoints=checkpoints))
    return ForwardResult(o, final)


def boundaries(p: LightningProblem, x: Operands) -> Tensor | None:
    """cu_seqlens on the device; clamped there, by a few small kernels, where the host has not checked them."""
    if not p.packed:
        return None
    cu = x.cu_seqlens.to(x.q.device)
    return clamp_boundaries(cu, p.T) if x.boundaries is None else cu


def tokens_of_a_part(p: LightningProblem, c: Config, parts: int) -> int:
    """Tokens of a segment: whole chunks; parts * this covers the longest sequence that there can be."""
    longest = max(p.lengths, default=0) if parts > 1 and p.packed and p.lengths is not None else p.T
    chunks = -(-longest // c.BT)
    return max(1, -(-chunks // parts)) * c.BT


def walk(p: LightningProblem, x: Operands, c: Config, cu: Tensor | None, w: Walk) -> None:
    """Run `walk_kernel` over every sequence."""
    q, none, HV = w.q, (0, 0, 0, 0), p.HV
    V, cut = w.v.shape[3], tokens_of_a_part(p, c, w.parts)
    parts = w.parts
    spare = 1 if p.packed and w.o is not None else 0  # who writes the zeros behind the last boundary
    if spare and parts > 1:
        spare = -(-p.T // (cut * parts))
    count = (p.N * parts + spare * parts) * HV * -(-V // c.BV)
    if count == 0:
        return
    o, ck, flag = w.o, x.checkpoints if w.checkpoints else None, w.source.flag
    offsets = None if ck is None else x.checkpoint_offsets.to(q.device)
    read, write = w.source.indices, w.target.indices
    walk_kernel[(count,)](
        q, w.k, w.v, q if o is None else o, x.slopes, q if cu is None else cu, w.source.tensor, w.target.tensor,
        q if read is None else read, q if write is None else write, q if flag is None else flag,
        q if ck is None else ck, q if offsets is None else offsets,
        *q.stride(), *w.k.stride(), *w.v.stride(), *(none if o is None else o.stride()), x.slopes.stride(0),
        0 if cu is None else cu.stride(0), *w.source.strides, *w.target.strides, 0 if read is None else read.stride(0),
        0 if write is None else write.stride(0), 0 if flag is None else flag.stride(0),
        *(none if ck is None else ck.stride()), 0 if offsets is None else offsets.stride(0),
        p.T, p.N, parts, cut, w.source.tensor.shape[0], w.target.tensor.shape[0], x.null_index,
        0 if ck is None else ck.shape[0], p.checkpoint_every or 64, w.out_scale, w.in_scale,
        HV=HV, GQ=HV // q.shape[2], GK=HV // w.k.shape[2], GV=HV // w.v.shape[2], K=q.shape[3], KP=c.KP, V=V, BV=c.BV,
        BT=c.BT, PACKED=p.packed, REVERSE=w.reverse, STATE_IN=w.source.kind, STATE_OUT=w.target.kind,
        HAS_READ=read is not None, HAS_WRITE=write is not None, HAS_FLAG=flag is not None, OUTPUT=o is not None,
        CHECKPOINTS=ck is not None, WIDE=c.wide, PRECISION=c.precision, STAGES=c.num_stages, num_warps=c.num_warps,
    )  # fmt: skip


def merge(
    p: LightningProblem, x: Operands, c: Config, cu: Tensor | None, U: Tensor, source: States, parts: int
) -> None:
    """Run `merge_kernel`: U then holds the states that enter the segments."""
    q, read, flag, rows = x.q, source.indices, source.flag, 16
    merge_kernel[(p.N * p.HV * -(-p.V // rows),)](
        U, x.slopes, q if cu is None else cu, source.tensor, q if read is None else read, q if flag is None else flag,
        x.slopes.stride(0), 0 if cu is None else cu.stride(0), *source.strides, 0 if read is None else read.stride(0),
        0 if flag is None else flag.stride(0), p.T, parts, tokens_of_a_part(p, c, parts), source.tensor.shape[0],
        x.null_index, HV=p.HV, K=p.K, KP=c.KP, V=p.V, BV=rows, PACKED=p.packed, STATE_IN=source.kind,
        HAS_READ=read is not None, HAS_FLAG=flag is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def v_first_strides(state: Tensor, v_first: bool) -> tuple[int, ...]:
    """Strides of a state tensor in the order n, head, V, K."""
    n, h, a, b = state.stride()
    return (n, h, a, b) if v_first else (n, h, b, a)


def entry(p: LightningProblem, x: Operands) -> States:
    """Where the states come from. Slots that other sequences may write are copied before any is written."""
    if not p.pool:
        if x.initial_state is None:
            return States(NONE, x.q)
        return States(TENSOR, x.initial_state, v_first_strides(x.initial_state, p.state_v_first))
    pool = x.state_pool
    if pool.shape[0] == 0:
        return States(NONE, x.q)
    if x.write_indices is None or x.write_indices is x.read_indices:
        return States(POOL, pool, pool.stride(), x.read_indices, x.has_initial_state)
    ids = slot_ids(x.read_indices, p.N, pool.shape[0], x.null_index, pool.device)
    live = ids >= 0 if x.has_initial_state is None else (ids >= 0) & x.has_initial_state
    states = torch.where(live[:, None, None, None], pool.index_select(0, ids.clamp(min=0)), 0.0)
    return States(TENSOR, states, states.stride())


def leaving(p: LightningProblem, x: Operands, final: Tensor | None) -> States:
    """Where the states go."""
    if p.pool:
        indices = x.read_indices if x.write_indices is None else x.write_indices
        return States(POOL, x.state_pool, x.state_pool.stride(), indices)
    if final is not None:
        return States(TENSOR, final, v_first_strides(final, p.state_v_first))
    return States(NONE, x.q)
