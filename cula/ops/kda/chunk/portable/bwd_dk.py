"""bwd_dk (Triton): the gradients of k and of the gate of one chunk and value head.

From h and dh (states before the chunk, gradient of the state after it), v_new and -dv as `bwd_dA` leaves them, G, the
pair gradients of `bwd_dA` and what `bwd_dq` put into dG:

    d(kb) = -dv h^T    d(kg) = v_new dh^T

Pairs go back level by level with the very factors of `intra`, so that what a pair adds to the gate of its row and
takes from that of its column cancels in front of both. The gate's gradient is a sum over later rows (pairs, qg, kb),
over earlier rows (kg: all minus later ones) and the state's own decay. Gradients are of raw k with its norm held; a
second pass over K subtracts the norm's share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import FINISHED, SOFTPLUS, exp2, exp2_again, sigmoid, softplus
from cula.ops.kda.chunk.portable.intra import EPS, SHIFT, base2_slice, before_block, to_end, to_midpoint
from cula.ops.kda.chunk.portable.tiles import find_tile


@triton.jit
def sum_later(x, BT: tl.constexpr, EXACT: tl.constexpr):
    """Row i of x: its sum over rows >= i; unless EXACT by a product, on x as a sum of two bf16 numbers."""
    if EXACT:
        return tl.cumsum(x, 0, reverse=True)
    take = (tl.arange(0, BT)[:, None] <= tl.arange(0, BT)[None, :]).to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(take, high, tl.dot(take, low))


@triton.jit
def gate_slopes(z, a, lower_bound, GATE: tl.constexpr):
    """(d gate / d raw, d gate / d A_log) at raw gate + bias z."""
    if GATE == SOFTPLUS:
        return -a * sigmoid(z), -a * softplus(z)
    slope = lower_bound * a * sigmoid(a * z) * sigmoid(-a * z)
    return slope, slope * z


@triton.jit
def block_cols(dk, dG, D, DT, masks, q, k, keep, G, anchor, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr):
    """dk, dG with what the pairs inside blocks of 16 rows give to k; D symmetric, DT q's transposed. Pointers."""
    inside = G - before_block(G, anchor, KP, BT)
    near = exp2_again(inside + SHIFT)
    rows_k = (tl.load(k, mask=keep, other=0.0).to(tl.float32) * near).to(dt)
    rows_q = (tl.load(q, mask=keep, other=0.0).to(tl.float32) * near).to(dt)
    to_col = tl.dot(tl.load(DT) * tl.load(masks + 6 * BT * BT), rows_q)
    to_col = tl.dot(tl.load(D) * tl.load(masks + 8 * BT * BT), rows_k, to_col)
    back = exp2_again(-inside - SHIFT)
    dk += to_col * back
    cols_k = (tl.load(k, mask=keep, other=0.0).to(tl.float32) * back).to(dt)
    dG -= cols_k.to(tl.float32) * to_col
    to_row = tl.dot(tl.load(D) * tl.load(masks + 7 * BT * BT), cols_k)
    return dk + to_row * exp2_again(inside + SHIFT), dG + rows_k.to(tl.float32) * to_row


@triton.jit
def pair_cols(
    dk, dG, D, DT, masks, q, k, keep, x, G, anchor, level, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dG with what the pairs parted at this level give to k; D symmetric, DT q's transposed. Pointers."""
    i = tl.arange(0, BT)[:, None]
    mask = masks + level * BT * BT
    F = exp2(to_midpoint(x, G, anchor, level, KP, BT, dt == tl.float32, BOUNDED))
    rows_q = (tl.load(q, mask=keep, other=0.0).to(tl.float32) * F).to(dt)
    own = tl.dot(tl.load(DT) * tl.load(mask), rows_q, input_precision=PRECISION)
    rows_k = (tl.load(k, mask=keep, other=0.0).to(tl.float32) * F).to(dt)
    own = tl.dot(tl.load(D) * tl.load(mask), rows_k, own, input_precision=PRECISION)
    signed = tl.where(((i >> level) & 1) == 1, own, -own)
    return dk + own * F, dG + signed * rows_k.to(tl.float32)


@triton.jit(do_not_specialize=["T", "NT"])
def bwd_dk_kernel(
    q, k, g, A_log, dt_bias, table, nk, anchors, G, h, dh, new, back, Dk, DqT, masks, dG, dk, dg, dA, dbias,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, sgb, sgt, sgh, sgk, T, NT, lower_bound,
    HV: tl.constexpr, G_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module. dk, dg `[B, T, HV, K]`, dA `[tiles, HV]` and dbias `[tiles, HV, KP]` still to be summed."""
    pid = tl.program_id(0).to(tl.int64)
    hv = (pid % HV).to(tl.int32)
    batch, first, count, owner = find_tile(table, (pid // HV).to(tl.int32), T, NT, BT, PACKED)
    r = tl.arange(0, BT)
    i = r[:, None]
    j = r[None, :]
    live = r < count
    token = first.to(tl.int64)
    row = ((batch.to(tl.int64) * T + token) * HV + hv) * K
    dk += row
    dg += row
    out = i * HV * K
    if PACKED:
        spare = owner < 0  # rows after the last boundary: their gradients are zeros
        if spare:
            for k0 in range(0, KP, BK):
                kk = k0 + tl.arange(0, BK)
                rest = live[:, None] & (kk < K)[None, :]
                tl.store(dk + out + kk[None, :], tl.zeros((BT, BK), dk.dtype.element_ty), rest)
                tl.store(dg + out + kk[None, :], tl.zeros((BT, BK), dg.dtype.element_ty), rest)
                tl.store(dbias + pid * KP + kk, tl.zeros((BK,), tl.float32))
            tl.store(dA + pid, 0.0)
            return
    dt = h.dtype.element_ty
    exact: tl.constexpr = dt == tl.float32
    a = 1.0
    if HAS_A:
        a = exp2(tl.load(A_log + hv).to(tl.float32) * 1.4426950408889634)
    q += batch.to(tl.int64) * sqb + token * sqt + (hv // G_HEADS) * sqh
    k += batch.to(tl.int64) * skb + token * skt + (hv // G_HEADS) * skh
    g += batch.to(tl.int64) * sgb + token * sgt + hv * sgh
    h += pid * VP * KP
    dh += pid * VP * KP
    new += pid * BT * VP
    back += pid * BT * VP
    G += pid * BT * KP
    dG += pid * BT * KP
    anchors += pid * (BT // 16) * KP
    dt_bias += hv * K
    DqT += pid * BT * BT + i * BT + j
    Dk += pid * BT * BT + i * BT + j
    masks += i * BT + j
    dot_k = tl.zeros((BT,), tl.float32)
    square_k = tl.zeros((BT,), tl.float32)
    dA_sum = 0.0
    for k0 in range(0, KP, BK):
        kk = k0 + tl.arange(0, BK)
        keep = live[:, None]
        if K != KP:
            keep = keep & (kk < K)[None, :]
        q_at = q + (i * sqt + kk[None, :] * sqk)
        k_at = k + (i * skt + kk[None, :] * skk)
        g_at = g + (i * sgt + kk[None, :] * sgk)
        anchor = (anchors if BOUNDED else G) + kk
        to_kg = tl.zeros((BT, BK), tl.float32)
        to_kb = tl.zeros((BT, BK), tl.float32)
        decay = tl.zeros((BK,), tl.float32)
        for v0 in range(0, VP, BV):
            vv = v0 + tl.arange(0, BV)
            bh = tl.load(h + vv[:, None] * KP + kk[None, :])
            bdh = tl.load(dh + vv[:, None] * KP + kk[None, :])
            decay += tl.sum(bh.to(tl.float32) * bdh.to(tl.float32), 0)
            to_kb = tl.dot(tl.load(back + i * VP + vv[None, :]), bh, to_kb, input_precision=PRECISION)
            to_kg = tl.dot(tl.load(new + i * VP + vv[None, :]), bdh, to_kg, input_precision=PRECISION)
        bG = tl.load(G + i * KP + kk[None, :])
        last = tl.load(G + (BT - 1) * KP + kk)
        x = bG
        if exact:
            x = base2_slice(g_at, dt_bias, kk, keep, a, lower_bound, K, GATE, HAS_BIAS)
        row_k = tl.load(nk + pid * BT + r)[:, None]
        bk = tl.load(k_at, mask=keep, other=0.0).to(tl.float32)
        to_kb *= exp2(bG) * row_k
        bdG = bk * to_kb
        to_kg *= exp2(to_end(x, bG, last, BT, exact)) * row_k
        bdk = to_kb + to_kg
        to_kg *= bk
        bdG -= to_kg
        whole = decay * exp2(last) + tl.sum(to_kg, 0)
        if BOUNDED:
            bdk, bdG = block_cols(bdk, bdG, Dk, DqT, masks, q_at, k_at, keep, bG, anchor, dt, KP, BT)
        else:
            diagonal = tl.sum(tl.where(i == j, tl.load(DqT), 0.0).to(tl.float32), 1)
            bdk += diagonal[:, None] * tl.load(q_at, mask=keep, other=0.0).to(tl.float32)
        for level in range(4 if BOUNDED else 0, LEVELS):
            bdk, bdG = pair_cols(
                bdk, bdG, Dk, DqT, masks, q_at, k_at, keep, x, bG, anchor, level, dt, KP, BT, BOUNDED, PRECISION
            )
        if L2NORM:
            bk = tl.load(k_at, mask=keep, other=0.0).to(tl.float32)
            dot_k += tl.sum(bk * bdk, 1)
            square_k += tl.sum(bk * bk, 1)
        tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=keep)
        bdG += tl.load(dG + i * KP + kk[None, :])
        bdg = sum_later(bdG, BT, exact) + whole[None, :]
        if GATE != FINISHED:
            z = tl.load(g_at, mask=keep, other=0.0).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(dt_bias + kk, mask=kk < K, other=0.0).to(tl.float32)[None, :]
            slope, slope_A = gate_slopes(z, a, lower_bound, GATE)
            dA_sum += tl.sum(tl.where(keep, slope_A * bdg, 0.0))
            bdg *= slope
        tl.store(dg + out + kk[None, :], bdg.to(dg.dtype.element_ty), mask=keep)
        tl.store(dbias + pid * KP + kk, tl.sum(tl.where(keep, bdg, 0.0), 0))
    tl.store(dA + pid, dA_sum)
    if L2NORM:
        tl.debug_barrier()
        share = dot_k / (square_k + EPS)
        for k0 in range(0, KP, BK):
            kk = k0 + tl.arange(0, BK)
            some = live[:, None] & (kk < K)[None, :]
            bk = tl.load(k + (i * skt + kk[None, :] * skk), mask=some, other=0.0).to(tl.float32)
            bdk = tl.load(dk + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bk * share[:, None]
            tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=some)
