"""chunk backward, portable: tiles and walk again (unless kept), the walk back, then the gradients chunk by chunk."""

from __future__ import annotations

import torch

from cula.ops.kda.chunk.portable.bwd_dA import MASKS, bwd_dA_kernel
from cula.ops.kda.chunk.portable.bwd_dhu import bwd_dhu_kernel
from cula.ops.kda.chunk.portable.bwd_dqk import bwd_dqk_kernel
from cula.ops.kda.chunk.portable.config import Config, configure
from cula.ops.kda.chunk.portable.forward import (
    DTYPES,
    GATES,
    PREPARED,
    Prepared,
    Tiles,
    make_tiles,
    padded_V,
    prepare,
    walk,
)
from cula.ops.kda.chunk.saved import Gradients, Saved
from cula.ops.kda.chunk.states import v_first_strides
from cula.ops.kda.problem import KDAProblem, Operands, has_wide_rows

Tensor = torch.Tensor


def run(p: KDAProblem, x: Operands, saved: Saved | None, do: Tensor, dht: Tensor | None) -> Gradients:
    """Gradients of every input, from do `[B,T,HV,V]` and dht (final_state's, or None)."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x, saved, do, dht)


def _run(p: KDAProblem, x: Operands, saved: Saved | None, do: Tensor, dht: Tensor | None) -> Gradients:
    c = configure(p, x.target, backward=True)
    if has_wide_rows(do):
        do = do.contiguous()
    tiles = make_tiles(p, x, c.BT)
    out = Gradients(*(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x.q, x.k, x.v, x.g, x.beta)))
    found = saved.tensors if saved is not None and saved.writer == "portable" else {}
    VP = padded_V(p, c)
    new = DTYPES[c.dtype]
    dh = torch.empty(tiles.count, p.HV, VP, c.KP, dtype=new, device=do.device)
    y = torch.empty(tiles.count, p.HV, c.BT, VP, dtype=new, device=do.device)
    if "h" in found:
        prep = Prepared(**{name: found.get(name) for name in PREPARED})
        h, e = found["h"], found["e"]
        v_new = torch.empty_like(e)
    else:
        prep = prepare(p, x, tiles, c, out.v, (found["Aqk"], found["M"]) if found else None, for_gradients=True)
        h, e = torch.empty_like(dh), torch.empty_like(y)
        v_new = e  # in place
        walk(p, x, tiles, c, prep, h=h, e=e, whole_h=True)
    if x.initial_state is not None:
        out.initial_state = torch.empty_like(x.initial_state, memory_format=torch.contiguous_format)
    walk_back(p, x, tiles, c, prep, do, dht, dh, y, out.initial_state)
    gradients(p, x, tiles, c, prep, do, (h, dh, e, v_new, y), out)
    return out


def walk_back(
    p: KDAProblem, x: Operands, tiles: Tiles, c: Config, prep: Prepared, do: Tensor, dht: Tensor | None, dh: Tensor,
    y: Tensor, dh0: Tensor | None,
) -> None:  # fmt: skip
    """Run `bwd_dhu` over every sequence: fills dh, y and dh0."""
    zero4 = (0, 0, 0, 0)
    BV = c.walk.block
    bwd_dhu_kernel[(-(-p.V // BV), p.N * p.HV)](
        do, prep.kb, prep.qg, prep.kg, prep.Aqk, prep.M, prep.total, prep.beta, tiles.sequences,
        dh, y, do if dht is None else dht, do if dh0 is None else dh0, *do.stride(),
        *(zero4 if dht is None else v_first_strides(dht, p.state_v_first)),
        *(zero4 if dh0 is None else v_first_strides(dh0, p.state_v_first)), p.T, tiles.NT,
        HV=p.HV, K=p.K, KP=c.KP, V=p.V, VP=dh.shape[2], BT=c.BT, BV=BV, PACKED=p.packed, HAS_DHT=dht is not None,
        HAS_DH0=dh0 is not None, PRECISION=c.precision, STAGES=c.walk.num_stages, num_warps=c.walk.num_warps,
    )  # fmt: skip


def gradients(
    p: KDAProblem, x: Operands, tiles: Tiles, c: Config, prep: Prepared, do: Tensor, walked: tuple[Tensor, ...],
    out: Gradients,
) -> None:  # fmt: skip
    """Run `bwd_dA`, `bwd_dqk` and the sums over value heads and tiles: fills `out`."""
    G = p.HV // p.H
    dq, dk = out.q, out.k
    if G > 1:
        dq, dk = (torch.empty(p.B, p.T, p.HV, p.K, dtype=torch.float32, device=do.device) for _ in range(2))
    dA = torch.empty(tiles.count, p.HV, dtype=torch.float32, device=do.device)
    dbias = torch.empty(tiles.count, p.HV, c.KP, dtype=torch.float32, device=do.device)
    if tiles.count:
        h, dh, e, v_new, y = walked
        VP, BT = h.shape[2], c.BT
        BV, grid = min(c.walk.block, 64), (tiles.count * p.HV,)
        A, D = (torch.empty(tiles.count, p.HV, BT, BT, dtype=h.dtype, device=do.device) for _ in range(2))
        if c.bounded:
            blocks = masks = torch.empty(tiles.count, p.HV, BT, 64, dtype=h.dtype, device=do.device)
        else:
            blocks = masks = torch.empty(MASKS, BT, BT, dtype=h.dtype, device=do.device)
        bwd_dA_kernel[grid](
            do, e, y, x.beta, prep.beta, prep.nq, prep.nk, tiles.table, v_new, out.v, out.beta, A, D, blocks, masks,
            *do.stride(), *x.beta.stride(), p.T, tiles.NT,
            HV=p.HV, V=p.V, VP=VP, BT=BT, BV=BV, SIGMOID=p.beta_sigmoid, DOUBLE=p.neg_eigval,
            PACKED=p.packed, BOUNDED=c.bounded, PRECISION=c.precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        bwd_dqk_kernel[grid](
            x.q, x.k, x.g, x.q if x.A_log is None else x.A_log, x.q if x.dt_bias is None else x.dt_bias, do,
            tiles.table, prep.nq, prep.nk, prep.total if prep.anchors is None else prep.anchors,
            prep.total if prep.G is None else prep.G, h, dh, v_new, y, A, D, blocks, masks, dq, dk, out.g, dA, dbias,
            *x.q.stride(), *x.k.stride(), *x.g.stride(), *do.stride(), p.T, tiles.NT, p.lower_bound or 0.0,
            1.0 / p.scale if p.scale else 0.0, HV=p.HV, G_HEADS=G, K=p.K, KP=c.KP, V=p.V, VP=VP, BT=BT,
            LEVELS=BT.bit_length() - 1, BK=c.gradients.block, BV=BV, GATE=GATES[p.gate], HAS_A=x.A_log is not None,
            HAS_BIAS=x.dt_bias is not None, L2NORM=p.l2norm, PACKED=p.packed, BOUNDED=c.bounded,
            PRECISION=c.precision, num_warps=c.gradients.num_warps, num_stages=c.gradients.num_stages,
        )  # fmt: skip
    if G > 1:
        out.q.copy_(dq.view(p.B, p.T, p.H, G, p.K).sum(3))
        out.k.copy_(dk.view(p.B, p.T, p.H, G, p.K).sum(3))
    if x.A_log is not None:
        out.A_log = dA.sum(0).to(x.A_log.dtype)
    if x.dt_bias is not None:
        out.dt_bias = dbias[..., : p.K].sum(0).to(x.dt_bias.dtype)
