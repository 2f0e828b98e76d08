"""bwd_dq (Triton): the gradient of q of one chunk and value head, and the share of q's rows in the gate's gradient.

From h (state before the chunk), do, the running gate G and the pair gradients of `bwd_dA`: d(qg) = do h^T, and pairs
go back level by level with the very factors of `intra`. dG collects q dq of each, as far as a decay scales it; what
lies on the diagonal does not. One slice of K at a time. Gradients are of raw q with its norm held; a second pass over
K subtracts the norm's share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import exp2, exp2_again
from cula.ops.kda.chunk.portable.intra import EPS, SHIFT, base2_slice, before_block, to_midpoint
from cula.ops.kda.chunk.portable.tiles import find_tile


@triton.jit
def block_rows(dq, dG, D, masks, q, k, keep, G, anchor, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """dq, dG with what the pairs inside blocks of 16 rows give to their rows of q. D, q, k: pointers."""
    inside = G - before_block(G, anchor, KP, BT)
    cols_k = (tl.load(k, mask=keep, other=0.0).to(tl.float32) * exp2_again(-inside - SHIFT)).to(dt)
    to_row = tl.dot(tl.load(D) * tl.load(masks + 6 * BT * BT), cols_k)
    near = exp2_again(inside + SHIFT)
    rows_q = (tl.load(q, mask=keep, other=0.0).to(tl.float32) * near).to(dt)
    return dq + to_row * near, dG + rows_q.to(tl.float32) * to_row


@triton.jit
def pair_rows(
    dq, dG, D, masks, q, k, keep, x, G, anchor, level, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dG with what the pairs parted at this level give to their rows of q. D, q, k: pointers."""
    F = exp2(to_midpoint(x, G, anchor, level, KP, BT, dt == tl.float32, BOUNDED))
    rows_k = (tl.load(k, mask=keep, other=0.0).to(tl.float32) * F).to(dt)
    to_row = tl.dot(tl.load(D) * tl.load(masks + level * BT * BT), rows_k, input_precision=PRECISION)
    rows_q = (tl.load(q, mask=keep, other=0.0).to(tl.float32) * F).to(dt)
    return dq + to_row * F, dG + rows_q.to(tl.float32) * to_row


@triton.jit(do_not_specialize=["T", "NT"])
def bwd_dq_kernel(
    q, k, g, A_log, dt_bias, do, table, nq, anchors, G, h, Dq, masks, dq, dG,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, sgb, sgt, sgh, sgk, sdb, sdt, sdh, sdv, T, NT, lower_bound,
    HV: tl.constexpr, G_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module. dq `[B, T, HV, K]`, dG `[tiles, HV, BT, KP]`."""
    pid = tl.program_id(0).to(tl.int64)
    hv = (pid % HV).to(tl.int32)
    batch, first, count, owner = find_tile(table, (pid // HV).to(tl.int32), T, NT, BT, PACKED)
    r = tl.arange(0, BT)
    i = r[:, None]
    j = r[None, :]
    live = r < count
    token = first.to(tl.int64)
    row = ((batch.to(tl.int64) * T + token) * HV + hv) * K
    dq += row
    out = i * HV * K
    if PACKED:
        spare = owner < 0  # rows after the last boundary: their gradients are zeros
        if spare:
            for k0 in range(0, KP, BK):
                kk = k0 + tl.arange(0, BK)
                rest = live[:, None] & (kk < K)[None, :]
                tl.store(dq + out + kk[None, :], tl.zeros((BT, BK), dq.dtype.element_ty), rest)
            return
    dt = h.dtype.element_ty
    exact: tl.constexpr = dt == tl.float32
    a = 1.0
    if HAS_A:
        a = exp2(tl.load(A_log + hv).to(tl.float32) * 1.4426950408889634)
    q += batch.to(tl.int64) * sqb + token * sqt + (hv // G_HEADS) * sqh
    k += batch.to(tl.int64) * skb + token * skt + (hv // G_HEADS) * skh
    g += batch.to(tl.int64) * sgb + token * sgt + hv * sgh
    do += batch.to(tl.int64) * sdb + token * sdt + hv * sdh
    h += pid * VP * KP
    G += pid * BT * KP
    dG += pid * BT * KP
    anchors += pid * (BT // 16) * KP
    dt_bias += hv * K
    Dq += pid * BT * BT + i * BT + j
    masks += i * BT + j
    dot_q = tl.zeros((BT,), tl.float32)
    square_q = tl.zeros((BT,), tl.float32)
    for k0 in range(0, KP, BK):
        kk = k0 + tl.arange(0, BK)
        keep = live[:, None]
        if K != KP:
            keep = keep & (kk < K)[None, :]
        q_at = q + (i * sqt + kk[None, :] * sqk)
        k_at = k + (i * skt + kk[None, :] * skk)
        anchor = (anchors if BOUNDED else G) + kk
        bdq = tl.zeros((BT, BK), tl.float32)
        for v0 in range(0, VP, BV):
            vv = v0 + tl.arange(0, BV)
            some = live[:, None]
            if V % BV != 0:
                some = some & (vv < V)[None, :]
            bo = tl.load(do + i * sdt + vv[None, :] * sdv, mask=some, other=0.0).to(dt)
            bh = tl.load(h + vv[:, None] * KP + kk[None, :])
            bdq = tl.dot(bo, bh, bdq, input_precision=PRECISION)
        bG = tl.load(G + i * KP + kk[None, :])
        x = bG
        if exact:
            x = base2_slice(g + (i * sgt + kk[None, :] * sgk), dt_bias, kk, keep, a, lower_bound, K, GATE, HAS_BIAS)
        bdq *= exp2(bG) * tl.load(nq + pid * BT + r)[:, None]
        bdG = tl.load(q_at, mask=keep, other=0.0).to(tl.float32) * bdq
        if BOUNDED:
            bdq, bdG = block_rows(bdq, bdG, Dq, masks, q_at, k_at, keep, bG, anchor, dt, KP, BT)
        else:
            diagonal = tl.sum(tl.where(i == j, tl.load(Dq), 0.0).to(tl.float32), 1)
            bdq += diagonal[:, None] * tl.load(k_at, mask=keep, other=0.0).to(tl.float32)
        for level in range(4 if BOUNDED else 0, LEVELS):
            bdq, bdG = pair_rows(
                bdq, bdG, Dq, masks, q_at, k_at, keep, x, bG, anchor, level, dt, KP, BT, BOUNDED, PRECISION
            )
        tl.store(dG + i * KP + kk[None, :], bdG)
        if L2NORM:
            bq = tl.load(q_at, mask=keep, other=0.0).to(tl.float32)
            dot_q += tl.sum(bq * bdq, 1)
            square_q += tl.sum(bq * bq, 1)
        tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=keep)
    if L2NORM:
        tl.debug_barrier()
        share = dot_q / (square_q + EPS)
        for k0 in range(0, KP, BK):
            kk = k0 + tl.arange(0, BK)
            some = live[:, None] & (kk < K)[None, :]
            bq = tl.load(q + (i * sqt + kk[None, :] * sqk), mask=some, other=0.0).to(tl.float32)
            bdq = tl.load(dq + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bq * share[:, None]
            tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=some)
