"""bwd_dqk (Triton): the gradients of q, k and the gate of one chunk and value head.

From h and dh (the state before the chunk, the gradient of the one after it), do, v_new, -dv and the pair gradients of
`bwd_dA`:

    d(qg) = do h^T    d(kb) = -dv h^T    d(kg) = v_new dh^T

Pairs go back level by level with the factors of `intra`'s blocks and levels. At a level, rows of q in the later half
of a block and rows of k in the earlier half are one operand: A holds what the ones multiply by below its diagonal,
what the others do above it; D, symmetric, is that of k with k. What a pair adds to the gate of its row and takes from
that of its column is formed from the same rounded numbers, so that it cancels in front of both.

The gate's gradient is a sum over later rows (pairs, qg, kb), over earlier rows (kg: all minus later ones) and the
state's own decay. Gradients are of raw q and k with their norms held; then each norm's share is subtracted, in a
second pass over K where one slice is not all of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import FINISHED, SOFTPLUS, exp2, sigmoid, sigmoid_and_slope, softplus
from cula.ops.kda.chunk.portable.intra import SHIFT, base2_slice, before_block, running_sum, to_end, to_midpoint
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
    _, slope = sigmoid_and_slope(a * z)
    slope *= lower_bound * a
    return slope, slope * z


@triton.jit
def norm_share(dot, norm):
    """What a row times this is of its gradient, from <row, gradient> with the norm held; norm: 1 / its length."""
    return dot * norm * norm


@triton.jit
def block_pairs(
    dq, dk, dG, blocks, q, k, G, anchor, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr
):
    """dq, dk, dG with what the pairs inside blocks of 16 rows give.

    blocks: pointers to the rows of `[BT, 64]`: of each row's block, Dq, its transpose, and Dk below and above its
    diagonal.
    """
    j = tl.arange(0, BT)[None, :]
    own = tl.arange(0, BT)[:, None] // 16 == j // 16
    at = blocks + j % 16
    inside = G - before_block(G, anchor, KP, BT)
    near = exp2(inside + SHIFT)
    far = exp2(-inside - SHIFT)
    cols_k = (k.to(tl.float32) * far).to(dt)
    to_row = tl.dot(tl.load(at, mask=own, other=0.0), cols_k, input_precision=PRECISION)
    dq += to_row * near
    rows_q = (q.to(tl.float32) * near).to(dt)
    dG += rows_q.to(tl.float32) * to_row
    to_row = tl.dot(tl.load(at + 32, mask=own, other=0.0), cols_k, input_precision=PRECISION)
    dk += to_row * near
    rows_k = (k.to(tl.float32) * near).to(dt)
    dG += rows_k.to(tl.float32) * to_row
    to_col = tl.dot(tl.load(at + 16, mask=own, other=0.0), rows_q, input_precision=PRECISION)
    to_col = tl.dot(tl.load(at + 48, mask=own, other=0.0), rows_k, to_col, input_precision=PRECISION)
    return dq, dk + to_col * far, dG - cols_k.to(tl.float32) * to_col


@triton.jit
def level_pairs(
    dq, dk, dG, A, D, masks, q, k, x, G, anchor, level, dt: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dG with what the pairs parted at this level give. A, D: pointers."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    if BOUNDED:
        s: tl.constexpr = 1 << level
        pairs = (i // (2 * s) == j // (2 * s)) & (i // s != j // s)
        bA = tl.load(A, mask=pairs, other=0.0)
        bD = tl.load(D, mask=pairs, other=0.0)
    else:
        pairs = tl.load(masks + level * BT * BT)
        bA = tl.load(A) * pairs
        bD = tl.load(D) * pairs
    F = exp2(to_midpoint(x, G, anchor, level, KP, BT, dt == tl.float32, BOUNDED))
    later = ((i >> level) & 1) == 1
    mixed = (tl.where(later, q, k).to(tl.float32) * F).to(dt)
    own = tl.dot(bA, mixed, input_precision=PRECISION)
    rows_k = (k.to(tl.float32) * F).to(dt)
    both = tl.dot(bD, rows_k, input_precision=PRECISION)
    term = mixed.to(tl.float32) * own + rows_k.to(tl.float32) * both
    own *= F
    dq += tl.where(later, own, 0.0)
    dk += tl.where(later, 0.0, own) + both * F
    return dq, dk, dG + tl.where(later, term, -term)


@triton.jit(do_not_specialize=["T", "NT"])
def bwd_dqk_kernel(
    q, k, g, A_log, dt_bias, do, table, nq, nk, anchors, G, h, dh, new, back, A, D, blocks, masks,
    dq, dk, dg, dA, dbias,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, sgb, sgt, sgh, sgk, sdb, sdt, sdh, sdv, T, NT, lower_bound, per_scale,
    HV: tl.constexpr, G_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module. dq, dk, dg `[B, T, HV, K]`, dA `[tiles, HV]` and dbias `[tiles, HV, KP]` still to be summed;
    per_scale: 1 / scale."""
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
    dk += row
    dg += row
    out = i * HV * K
    if PACKED:
        spare = owner < 0  # rows after the last boundary: their gradients are zeros
        if spare:
            for k0 in range(0, KP, BK):
                kk = k0 + tl.arange(0, BK)
                rest = live[:, None] & (kk < K)[None, :]
                tl.store(dq + out + kk[None, :], tl.zeros((BT, BK), dq.dtype.element_ty), rest)
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
    do += batch.to(tl.int64) * sdb + token * sdt + hv * sdh
    h += pid * VP * KP
    dh += pid * VP * KP
    new += pid * BT * VP
    back += pid * BT * VP
    G += pid * BT * KP
    anchors += pid * (BT // 16) * KP
    dt_bias += hv * K
    A += pid * BT * BT + i * BT + j
    D += pid * BT * BT + i * BT + j
    blocks += pid * BT * 64 + i * 64
    masks += i * BT + j
    dot_q = tl.zeros((BT,), tl.float32)
    dot_k = tl.zeros((BT,), tl.float32)
    dA_sum = 0.0
    for k0 in range(0, KP, BK):
        kk = k0 + tl.arange(0, BK)
        keep = live[:, None]
        if K != KP:
            keep = keep & (kk < K)[None, :]
        g_at = g + (i * sgt + kk[None, :] * sgk)
        anchor = (anchors if BOUNDED else G) + kk
        if BOUNDED:
            x = base2_slice(g_at, dt_bias, kk, keep, a, lower_bound, K, GATE, HAS_BIAS)
            bG = running_sum(x, BT, exact)
            last = tl.load(anchor + (BT // 16 - 1) * KP)
        else:
            bG = tl.load(G + i * KP + kk[None, :])
            last = tl.load(anchor + (BT - 1) * KP)
            x = bG
            if exact:
                x = base2_slice(g_at, dt_bias, kk, keep, a, lower_bound, K, GATE, HAS_BIAS)
        to_qg = tl.zeros((BT, BK), tl.float32)
        to_kg = tl.zeros((BT, BK), tl.float32)
        to_kb = tl.zeros((BT, BK), tl.float32)
        decay = tl.zeros((BV, BK), tl.float32)
        for v0 in range(0, VP, BV):
            vv = v0 + tl.arange(0, BV)
            some = live[:, None]
            if V % BV != 0:
                some = some & (vv < V)[None, :]
            bo = tl.load(do + i * sdt + vv[None, :] * sdv, mask=some, other=0.0).to(dt)
            bh = tl.load(h + vv[:, None] * KP + kk[None, :])
            bdh = tl.load(dh + vv[:, None] * KP + kk[None, :])
            decay += bh.to(tl.float32) * bdh.to(tl.float32)
            to_qg = tl.dot(bo, bh, to_qg, input_precision=PRECISION)
            to_kb = tl.dot(tl.load(back + i * VP + vv[None, :]), bh, to_kb, input_precision=PRECISION)
            to_kg = tl.dot(tl.load(new + i * VP + vv[None, :]), bdh, to_kg, input_precision=PRECISION)
        bq = tl.load(q + (i * sqt + kk[None, :] * sqk), mask=keep, other=0.0)
        bk = tl.load(k + (i * skt + kk[None, :] * skk), mask=keep, other=0.0)
        row_q = tl.load(nq + pid * BT + r)[:, None]
        row_k = tl.load(nk + pid * BT + r)[:, None]
        E = exp2(bG)
        bdq = to_qg * (E * row_q)
        to_kb *= E * row_k
        bdG = bq.to(tl.float32) * bdq + bk.to(tl.float32) * to_kb
        to_kg *= exp2(to_end(x, bG, last, BT, exact)) * row_k
        bdk = to_kb + to_kg
        to_kg *= bk.to(tl.float32)
        bdG -= to_kg
        whole = tl.sum(decay, 0) * exp2(last) + tl.sum(to_kg, 0)
        if BOUNDED:
            bdq, bdk, bdG = block_pairs(bdq, bdk, bdG, blocks, bq, bk, bG, anchor, dt, KP, BT, PRECISION)
            for level in tl.static_range(4, LEVELS):
                bdq, bdk, bdG = level_pairs(
                    bdq, bdk, bdG, A, D, masks, bq, bk, x, bG, anchor, level, dt, KP, BT, BOUNDED, PRECISION
                )
        else:
            diagonal = tl.sum(tl.where(i == j, tl.load(A), 0.0).to(tl.float32), 1)[:, None]
            bdq += diagonal * bk.to(tl.float32)
            bdk += diagonal * bq.to(tl.float32)
            for level in range(0, LEVELS):
                bdq, bdk, bdG = level_pairs(
                    bdq, bdk, bdG, A, D, masks, bq, bk, x, bG, anchor, level, dt, KP, BT, BOUNDED, PRECISION
                )
        if L2NORM:
            dot_q += tl.sum(bq.to(tl.float32) * bdq, 1)
            dot_k += tl.sum(bk.to(tl.float32) * bdk, 1)
            if BK == KP:
                bdq -= bq.to(tl.float32) * norm_share(dot_q[:, None], row_q * per_scale)
                bdk -= bk.to(tl.float32) * norm_share(dot_k[:, None], row_k)
        tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=keep)
        tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=keep)
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
    if L2NORM and BK != KP:
        tl.debug_barrier()
        share_q = norm_share(dot_q[:, None], tl.load(nq + pid * BT + r)[:, None] * per_scale)
        share_k = norm_share(dot_k[:, None], tl.load(nk + pid * BT + r)[:, None])
        for k0 in range(0, KP, BK):
            kk = k0 + tl.arange(0, BK)
            some = live[:, None] & (kk < K)[None, :]
            bq = tl.load(q + (i * sqt + kk[None, :] * sqk), mask=some, other=0.0).to(tl.float32)
            bdq = tl.load(dq + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bq * share_q
            tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=some)
            bk = tl.load(k + (i * skt + kk[None, :] * skk), mask=some, other=0.0).to(tl.float32)
            bdk = tl.load(dk + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bk * share_k
            tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=some)
