"""chunk forward, portable: tiles, intra, delta_h; at most three launches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import accumulate

import torch

from cula.host import env
from cula.host.arch import Target
from cula.host.errors import NotSplittableError
from cula.ops.kda.chunk.cp.plan import Plan, Shape, make_plan
from cula.ops.kda.chunk.portable.config import Config, configure, pow2
from cula.ops.kda.chunk.portable.delta_h import delta_h_kernel
from cula.ops.kda.chunk.portable.intra import intra_kernel
from cula.ops.kda.chunk.portable.merge import merge_kernel
from cula.ops.kda.chunk.portable.pre_scan import pre_scan_kernel
from cula.ops.kda.chunk.portable.tiles import BLOCK_N, BLOCK_TILES, COLUMNS, tiles_kernel
from cula.ops.kda.chunk.saved import ForwardResult, Saved
from cula.ops.kda.chunk.states import States, entry, leaving, v_first_strides
from cula.ops.kda.cp_mode import CPMode
from cula.ops.kda.problem import KDAProblem, Operands

Tensor = torch.Tensor
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: pre_scan and merge ran on hardware. Until they have, auto leaves sequences whole unless CULA_ALLOW_UNVERIFIED=1.
SEGMENTS_VERIFIED = False
GATES = {"finished": 0, "softplus": 1, "lower_bound": 2}


@dataclass
class Tiles:
    """Where the chunks lie. count: tiles; NT: tiles of one sequence of a fixed batch; tables: see `tiles`."""

    count: int
    NT: int
    table: Tensor
    sequences: Tensor


def make_tiles(p: KDAProblem, x: Operands, BT: int) -> Tiles:
    """The tiles of a call; packed calls launch `tiles_kernel`, on lengths that only the device may know."""
    if not p.packed:
        NT = -(-p.T // BT)
        return Tiles(p.B * NT, NT, x.q, x.q)
    if p.lengths is None or p.grad:  # under grad what is saved has a shape that does not depend on lengths
        count = -(-p.T // BT) + p.N
    else:
        rest = p.T - x.boundaries[-1]
        count = sum(-(-n // BT) for n in p.lengths) + -(-rest // BT)
    device = x.q.device
    table = torch.empty(max(count, 1), 4, dtype=torch.int32, device=device)
    sequences = torch.empty(p.N, COLUMNS.value, dtype=torch.int32, device=device)
    cu = x.cu_seqlens.to(device)
    grid = (max(1, -(-count // BLOCK_TILES)),)
    tiles_kernel[grid](cu, table, sequences, cu.stride(0), p.N, p.T, count, BT=BT, BN=BLOCK_N, BI=BLOCK_TILES)
    return Tiles(count, 0, table, sequences)


@dataclass
class Prepared:
    """What `intra` leaves, `[tiles, HV, ...]`: see its module."""

    kb: Tensor
    qg: Tensor
    kg: Tensor
    Aqk: Tensor
    M: Tensor
    total: Tensor
    beta: Tensor
    nq: Tensor
    nk: Tensor
    anchors: Tensor | None = None
    G: Tensor | None = None


PREPARED = tuple(field.name for field in fields(Prepared))


def prepare(
    p: KDAProblem,
    x: Operands,
    tiles: Tiles,
    c: Config,
    o: Tensor,
    kept: tuple[Tensor, Tensor] | None = None,
    for_gradients: bool = False,
) -> Prepared:
    """Run `intra`; `kept` are the Aqk and M of an earlier run."""
    HV, BT, KP = p.HV, c.BT, c.KP
    keep_G = not c.bounded and (for_gradients or (kept is None and c.dtype != "fp32"))  # the pairs look rows up in it
    given = {} if kept is None else {"Aqk": kept[0], "M": kept[1]}
    for name, shape, dtype in prepared_shapes(p, c, tiles.count):
        if name not in given and (name != "G" or keep_G):
            given[name] = torch.empty(shape, dtype=dtype, device=x.q.device)
    prep = Prepared(**given)
    if tiles.count:
        intra_kernel[(tiles.count * HV,)](
            x.q, x.k, x.g, x.beta, x.q if x.A_log is None else x.A_log, x.q if x.dt_bias is None else x.dt_bias,
            tiles.table, prep.kb, prep.qg, prep.kg, prep.Aqk, prep.M, prep.total, prep.beta, prep.nq, prep.nk,
            prep.total if prep.anchors is None else prep.anchors, prep.total if prep.G is None else prep.G, o,
            *x.q.stride(), *x.k.stride(), *x.g.stride(), *x.beta.stride(), *o.stride()[1:],
            p.T, tiles.NT, p.scale, p.lower_bound or 0.0,
            HV=HV, G_HEADS=HV // p.H, K=p.K, KP=KP, V=p.V, BT=BT, LEVELS=BT.bit_length() - 1,
            BK=c.intra.block, BV=min(pow2(p.V), 64),
            GATE=GATES[p.gate], HAS_A=x.A_log is not None, HAS_BIAS=x.dt_bias is not None,
            SIGMOID=p.beta_sigmoid, DOUBLE=p.neg_eigval, L2NORM=p.l2norm,
            PACKED=p.packed, BOUNDED=c.bounded, WHOLE=c.whole, PRODUCTS=kept is None, KEEP_G=keep_G,
            KEEP_ANCHORS=for_gradients, PRECISION=c.precision,
            INVERSE=c.inverse, num_warps=c.intra.num_warps, num_stages=c.intra.num_stages,
        )  # fmt: skip
    return prep


def prepared_shapes(p: KDAProblem, c: Config, tiles: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of the tensors of `Prepared`."""
    dtype, n = DTYPES[c.dtype], (tiles, p.HV)
    shapes = [(name, (*n, c.BT, c.KP), dtype) for name in ("kb", "qg", "kg")]
    shapes += [(name, (*n, c.BT, c.BT), dtype) for name in ("Aqk", "M")]
    shapes += [("total", (*n, c.KP), torch.float32)]
    shapes += [(name, (*n, c.BT), torch.float32) for name in ("beta", "nq", "nk")]
    if c.bounded:
        return [*shapes, ("anchors", (*n, c.BT // 16, c.KP), torch.float32)]
    return [*shapes, ("G", (*n, c.BT, c.KP), torch.float32)]


def padded_V(p: KDAProblem, c: Config) -> int:
    """V in whole blocks of a walk."""
    return -(-p.V // c.walk.block) * c.walk.block


def run(p: KDAProblem, x: Operands) -> ForwardResult:
    """Run the problem."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x)


def kept(p: KDAProblem) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """What a forward under grad saves for the backward: (name, shape, dtype)."""
    c = configure(p, Target("cuda"))
    tiles = -(-p.T // c.BT) + p.N if p.packed else p.B * -(-p.T // c.BT)
    shapes = prepared_shapes(p, c, tiles)
    if not keeps_all(p):
        return [entry for entry in shapes if entry[0] in ("Aqk", "M")]
    VP, dtype = padded_V(p, c), DTYPES[c.dtype]
    return [*shapes, ("h", (tiles, p.HV, VP, c.KP), dtype), ("e", (tiles, p.HV, c.BT, VP), dtype)]


def keeps_all(p: KDAProblem) -> bool:
    """Whether the backward gets everything of the forward; in fp16 its tiles would not do (see `configure`)."""
    return p.grad and p.disable_recompute and p.dtype != "fp16"


def _run(p: KDAProblem, x: Operands) -> ForwardResult:
    c = configure(p, x.target)
    tiles = make_tiles(p, x, c.BT)
    o = x.out if x.out is not None else torch.empty_like(x.v, memory_format=torch.contiguous_format)
    keep = keeps_all(p)
    prep = prepare(p, x, tiles, c, o, for_gradients=keep)
    final = None
    if p.final_state:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        final = torch.empty(p.N, p.HV, *tail, dtype=torch.float32, device=x.q.device)
    h = e = None
    if keep:
        VP, new = padded_V(p, c), DTYPES[c.dtype]
        h = torch.empty(tiles.count, p.HV, VP, c.KP, dtype=new, device=x.q.device)
        e = torch.empty(tiles.count, p.HV, c.BT, VP, dtype=new, device=x.q.device)
    elif p.intermediate_states:
        tail = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        chunks = tiles.count if not p.packed else sum(-(-n // c.BT) for n in p.lengths)
        h = x.q.new_empty(chunks, p.HV, *tail)
    plan = segments_of(p, x, c)
    segments = None
    if plan is not None:
        try:
            segments = entry_states(p, x, tiles, c, prep, plan)
        except NotSplittableError:  # auto: whole sequences do as well
            segments = None
    walk(p, x, tiles, c, prep, o=o, final=final, h=h, e=e, whole_h=keep, segments=segments)
    if p.grad:
        tensors = {**{name: getattr(prep, name) for name in PREPARED}, "h": h, "e": e}
        saved = Saved("portable", {name: tensors[name] for name, _, _ in kept(p)})
        return ForwardResult(o, final, None, saved)
    if h is not None:
        h = h.view(p.B, -1, *h.shape[1:])
    return ForwardResult(o, final, h)


def walk(
    p: KDAProblem, x: Operands, tiles: Tiles, c: Config, prep: Prepared, *,
    o: Tensor | None = None, final: Tensor | None = None, h: Tensor | None = None, e: Tensor | None = None,
    whole_h: bool = False, segments: tuple[Tensor, States] | None = None,
) -> None:  # fmt: skip
    """Run `delta_h` over every sequence: fills those of o, final, h and e that are given, and the pool.

    segments: a table of them in place of the sequences, and their entry states.
    """
    q, none = x.q, (0, 0, 0, 0)
    if segments is None:
        sequences, source, count = tiles.sequences, entry(p, x), p.N
    else:
        (sequences, source), count = segments, segments[0].shape[0]
    target = leaving(p, x, final)
    flag = x.has_initial_state if source.mode == 2 else None
    ck = x.checkpoints
    offsets = None if ck is None else x.checkpoint_offsets.to(q.device)
    read, read_stride = source.index_arguments(q)
    write, write_stride = target.index_arguments(q)
    BV = c.walk.block
    delta_h_kernel[(-(-p.V // BV), count * p.HV)](
        x.v, prep.kb, prep.qg, prep.kg, prep.Aqk, prep.M, prep.total, prep.beta, sequences,
        q if o is None else o, q if h is None else h, q if e is None else e, source.tensor, target.tensor, read, write,
        q if flag is None else flag, q if ck is None else ck, q if ck is None else offsets,
        *x.v.stride(), *(none if o is None else o.stride()), *source.strides, *target.strides, read_stride,
        write_stride, 0 if flag is None else flag.stride(0), *(none if ck is None else ck.stride()),
        0 if ck is None else offsets.stride(0),
        *(none if h is None else v_first_strides(h, p.state_v_first or whole_h)),
        source.tensor.shape[0], target.tensor.shape[0], x.null_index, 0 if ck is None else ck.shape[0],
        p.checkpoint_every or 64, p.T, tiles.NT,
        HV=p.HV, K=p.K, KP=c.KP, V=p.V, VP=0 if e is None else e.shape[-1], BT=c.BT, BV=BV,
        TABLE=p.packed or segments is not None, STATE_IN=source.mode, STATE_OUT=target.mode,
        HAS_READ=source.indices is not None, HAS_WRITE=target.indices is not None, HAS_FLAG=flag is not None,
        OUTPUT=o is not None, KEEP_H=h is not None, KEEP_E=e is not None, WHOLE_H=whole_h,
        CHECKPOINTS=ck is not None, PRECISION=c.precision, STAGES=c.walk.num_stages, num_warps=c.walk.num_warps,
    )  # fmt: skip


def segments_of(p: KDAProblem, x: Operands, c: Config) -> Plan | None:
    """The plan of a call whose sequences are worth cutting, or None."""
    if p.cp is CPMode.OFF or p.grad or not p.host_lengths or x.checkpoints is not None:
        return None
    if not (SEGMENTS_VERIFIED or env.allow_unverified()):
        return None
    chunks = tuple(-(-n // c.BT) for n in p.lengths) if p.packed else (-(-p.T // c.BT),) * p.B
    blocks, map_blocks = -(-p.V // c.walk.block), -(-c.KP // c.walk.block)
    return make_plan(chunks, Shape(p.HV * blocks, p.HV * map_blocks, x.target.sm_count))


@lru_cache(maxsize=64)
def segment_tables(
    plan: Plan, lengths: tuple[int, ...], starts: tuple[int, ...], BT: int, packed: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(the table of segments as `tiles` describes it, each sequence's first segment), on the device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotSplittableError("segments of a CUDA graph must be known before its capture; run the call once before")
    rows, tile = [], 0
    for n, (length, start, chunks) in enumerate(zip(lengths, starts, plan.chunks)):
        step = plan.cut * BT
        for at in range(0, max(length, 1), step):
            count = min(step, length - at)
            owner = n if at + step >= length else -1
            rows.append((start + at, count, tile + at // BT, 0 if packed else n, owner))
        tile += chunks
    parts = list(accumulate(plan.parts, initial=0))
    to = partial(torch.tensor, dtype=torch.int32, device=device)
    return to(rows), to(parts)


def entry_states(
    p: KDAProblem, x: Operands, tiles: Tiles, c: Config, prep: Prepared, plan: Plan
) -> tuple[Tensor, States]:
    """(the table of a plan's segments, their entry states); NotSplittableError where the table cannot be made now."""
    q, BV, KP = x.q, c.walk.block, c.KP
    lengths, starts = (p.lengths, x.boundaries[:-1]) if p.packed else ((p.T,) * p.B, (0,) * p.B)
    table, parts = segment_tables(plan, lengths, starts, c.BT, p.packed, q.device)
    count, VP = table.shape[0], padded_V(p, c)
    b, state = (torch.empty(count, p.HV, VP, KP, dtype=torch.float32, device=q.device) for _ in range(2))
    P = torch.empty(count, p.HV, KP, KP, dtype=torch.float32, device=q.device)
    pre_scan_kernel[(VP // BV + -(-KP // BV), count * p.HV)](
        x.v, prep.kb, prep.kg, prep.M, prep.total, prep.beta, table, b, P, *x.v.stride(), p.T, tiles.NT,
        HV=p.HV, KP=KP, V=p.V, VP=VP, BT=c.BT, BV=BV, PRECISION=c.precision, STAGES=c.walk.num_stages,
        num_warps=c.walk.num_warps,
    )  # fmt: skip
    source = entry(p, x)
    flag = x.has_initial_state if source.mode == 2 else None
    read, read_stride = source.index_arguments(q)
    rows = 16
    merge_kernel[(VP // rows, p.N * p.HV)](
        b, P, parts, source.tensor, read, q if flag is None else flag, state, *source.strides, read_stride,
        0 if flag is None else flag.stride(0), source.tensor.shape[0], x.null_index,
        HV=p.HV, K=p.K, KP=KP, V=p.V, VP=VP, BV=rows, BK=min(KP, 32), STATE_IN=source.mode,
        HAS_READ=source.indices is not None, HAS_FLAG=flag is not None, PRECISION="tf32x3", num_warps=4, num_stages=1,
    )  # fmt: skip
    return table, States(1, state, state.stride())
