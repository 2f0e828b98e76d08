"""bwd_dqk (Triton): the gradients of q, k and the gate of one chunk and value head.

From h (state before the chunk), dh (gradient of the state after it), e and y of the walks, do, the raw inputs and the
pair gradients of `bwd_dA`, with v_new = beta e and dv = beta y:

    d(qg) = do h^T    d(kb) = -dv h^T    d(kg) = v_new dh^T

Pairs go back level by level with the very factors of `intra`, so that what a pair adds to the gate of its row and
takes from that of its column cancels in front of both. The gate's gradient is a sum over later rows (pairs, qg, kb),
over earlier rows (kg: all minus later ones) and the state's own decay. One slice of K at a time, first dq, then dk,
then the gate: what is live at once fits the registers. Gradients are of raw q and k with the norms held; a second
pass over K subtracts the norms' share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import FINISHED, SOFTPLUS, base2_gate, exp2, exp2_again, sigmoid, softplus
from cula.ops.kda.chunk.portable.intra import EPS, SHIFT, before_block, parted_by, running_sum, to_end, to_midpoint
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
def block_rows(dq, dG, D, q, k, G, anchor, KP: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """dq, dG with what the pairs inside blocks of 16 rows give to their rows of q."""
    dt = D.dtype
    inside = G - before_block(G, anchor, KP, BT)
    cols_k = (k * exp2_again(-inside - SHIFT)).to(dt)
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    to_row = tl.dot(tl.where(i // 16 == j // 16, D, 0.0).to(dt), cols_k, input_precision=PRECISION)
    near = exp2_again(inside + SHIFT)
    return dq + to_row * near, dG + (q * near).to(dt).to(tl.float32) * to_row


@triton.jit
def block_cols(dk, dG, D, DT, q, k, G, anchor, KP: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """dk, dG with what the pairs inside blocks of 16 rows give to k; D is symmetric, DT q's transposed."""
    dt = D.dtype
    inside = G - before_block(G, anchor, KP, BT)
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    block = i // 16 == j // 16
    near = exp2_again(inside + SHIFT)
    back = exp2_again(-inside - SHIFT)
    rows_k = (k * near).to(dt)
    cols_k = (k * back).to(dt)
    to_row = tl.dot(tl.where(block & (i > j), D, 0.0).to(dt), cols_k, input_precision=PRECISION)
    dk += to_row * near
    dG += rows_k.to(tl.float32) * to_row
    to_col = tl.dot(tl.where(block & (i < j), D, 0.0).to(dt), rows_k, input_precision=PRECISION)
    to_col = tl.dot(tl.where(block, DT, 0.0).to(dt), (q * near).to(dt), to_col, input_precision=PRECISION)
    return dk + to_col * back, dG - cols_k.to(tl.float32) * to_col


@triton.jit
def pair_rows(
    dq, dG, D, q, k, x, G, anchor, level, KP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dG with what the pairs parted at this level give to their rows of q."""
    dt = D.dtype
    pairs = parted_by(tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :], level)
    F = exp2(to_midpoint(x, G, anchor, level, KP, BT, BK, dt == tl.float32, BOUNDED))
    to_row = tl.dot(tl.where(pairs, D, 0.0).to(dt), (k * F).to(dt), input_precision=PRECISION)
    return dq + to_row * F, dG + (q * F).to(dt).to(tl.float32) * to_row


@triton.jit
def pair_cols(
    dk, dG, D, DT, q, k, x, G, anchor, level, KP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dG with what the pairs parted at this level give to k; D is symmetric, DT q's transposed."""
    dt = D.dtype
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    mirror = parted_by(j, i, level)
    F = exp2(to_midpoint(x, G, anchor, level, KP, BT, BK, dt == tl.float32, BOUNDED))
    rows_k = (k * F).to(dt)
    own = tl.dot(tl.where(mirror | parted_by(i, j, level), D, 0.0).to(dt), rows_k, input_precision=PRECISION)
    own = tl.dot(tl.where(mirror, DT, 0.0).to(dt), (q * F).to(dt), own, input_precision=PRECISION)
    signed = tl.where(((i >> level) & 1) == 1, own, -own)
    return dk + own * F, dG + signed * rows_k.to(tl.float32)


@triton.jit(do_not_specialize=["T", "NT"])
def bwd_dqk_kernel(
    q, k, g, A_log, dt_bias, do, table, beta_in, nq, nk, anchors, h, dh, e, y, Dq, DqT, Dk,
    dq, dk, dg, dA, dbias,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, sgb, sgt, sgh, sgk, sdb, sdt, sdh, sdv, T, NT, lower_bound,
    HV: tl.constexpr, G_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module. dq, dk, dg `[B, T, HV, K]`, dA `[tiles, HV]` and dbias `[tiles, HV, KP]` still to be summed."""
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
            nothing = tl.zeros((BT, BK), tl.float32)
            for k0 in range(0, KP, BK):
                kk = k0 + tl.arange(0, BK)
                rest = live[:, None] & (kk < K)[None, :]
                tl.store(dq + out + kk[None, :], nothing.to(dq.dtype.element_ty), rest)
                tl.store(dk + out + kk[None, :], nothing.to(dk.dtype.element_ty), rest)
                tl.store(dg + out + kk[None, :], nothing.to(dg.dtype.element_ty), rest)
                tl.store(dbias + pid * KP + kk, tl.zeros((BK,), tl.float32))
            tl.store(dA + pid, 0.0)
            return
    dt = h.dtype.element_ty
    exact: tl.constexpr = dt == tl.float32
    pairs = i * BT + j
    a = 1.0
    if HAS_A:
        a = exp2(tl.load(A_log + hv).to(tl.float32) * 1.4426950408889634)
    q += batch.to(tl.int64) * sqb + token * sqt + (hv // G_HEADS) * sqh
    k += batch.to(tl.int64) * skb + token * skt + (hv // G_HEADS) * skh
    g += batch.to(tl.int64) * sgb + token * sgt + hv * sgh
    do += batch.to(tl.int64) * sdb + token * sdt + hv * sdh
    h += pid * VP * KP
    dh += pid * VP * KP
    e += pid * BT * VP
    y += pid * BT * VP
    Dq += pid * BT * BT
    DqT += pid * BT * BT
    Dk += pid * BT * BT
    anchors += pid * (BT // 16) * KP
    bb = tl.load(beta_in + pid * BT + r)[:, None]
    dot_q = tl.zeros((BT,), tl.float32)
    dot_k = tl.zeros((BT,), tl.float32)
    square_q = tl.zeros((BT,), tl.float32)
    square_k = tl.zeros((BT,), tl.float32)
    dA_sum = 0.0
    for k0 in range(0, KP, BK):
        kk = k0 + tl.arange(0, BK)
        keep = live[:, None]
        if K != KP:
            keep = keep & (kk < K)[None, :]
        x = tl.load(g + i * sgt + kk[None, :] * sgk, mask=keep, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(dt_bias + hv * K + kk, mask=kk < K, other=0.0).to(tl.float32)[None, :]
        x = tl.where(keep, base2_gate(x, a, lower_bound, GATE), 0.0)
        G = running_sum(x, BT, exact)
        anchor = anchors + kk
        if BOUNDED:
            last = tl.load(anchor + (BT // 16 - 1) * KP)
        else:
            last = tl.sum(x, 0)

        # q
        bdq = tl.zeros((BT, BK), tl.float32)
        for v0 in range(0, VP, BV):
            vv = v0 + tl.arange(0, BV)
            some = live[:, None]
            if V % BV != 0:
                some = some & (vv < V)[None, :]
            bo = tl.load(do + i * sdt + vv[None, :] * sdv, mask=some, other=0.0).to(dt)
            bh = tl.load(h + vv[:, None] * KP + kk[None, :])
            bdq = tl.dot(bo, bh, bdq, input_precision=PRECISION)
        bdq *= exp2(G) * tl.load(nq + pid * BT + r)[:, None]
        bq = tl.load(q + i * sqt + kk[None, :] * sqk, mask=keep, other=0.0).to(tl.float32)
        bk = tl.load(k + i * skt + kk[None, :] * skk, mask=keep, other=0.0).to(tl.float32)
        dG = bq * bdq
        D = tl.load(Dq + pairs)
        if BOUNDED:
            bdq, dG = block_rows(bdq, dG, D, bq, bk, G, anchor, KP, BT, PRECISION)
        else:
            bdq += tl.sum(tl.where(i == j, D, 0.0).to(tl.float32), 1)[:, None] * bk
        for level in range(4 if BOUNDED else 0, LEVELS):
            bdq, dG = pair_rows(bdq, dG, D, bq, bk, x, G, anchor, level, KP, BT, BK, BOUNDED, PRECISION)
        if L2NORM:
            dot_q += tl.sum(bq * bdq, 1)
            square_q += tl.sum(bq * bq, 1)
        tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=keep)

        # k
        tl.debug_barrier()
        bdk = tl.zeros((BT, BK), tl.float32)
        to_kg = tl.zeros((BT, BK), tl.float32)
        decay = tl.zeros((BK,), tl.float32)
        for v0 in range(0, VP, BV):
            vv = v0 + tl.arange(0, BV)
            state = vv[:, None] * KP + kk[None, :]
            bh = tl.load(h + state)
            by = tl.load(y + i * VP + vv[None, :]).to(tl.float32) * -bb
            bdk = tl.dot(by.to(dt), bh, bdk, input_precision=PRECISION)
            bdh = tl.load(dh + state)
            be = tl.load(e + i * VP + vv[None, :]).to(tl.float32) * bb
            to_kg = tl.dot(be.to(dt), bdh, to_kg, input_precision=PRECISION)
            decay += tl.sum(bh.to(tl.float32) * bdh.to(tl.float32), 0)
        row_k = tl.load(nk + pid * BT + r)[:, None]
        bk = tl.load(k + i * skt + kk[None, :] * skk, mask=keep, other=0.0).to(tl.float32)
        bdk *= exp2_again(G) * row_k
        dG += bk * bdk
        to_kg *= exp2(to_end(x, G, last, BT, exact)) * row_k
        bdk += to_kg
        to_kg *= bk
        dG -= to_kg
        whole = decay * exp2(last) + tl.sum(to_kg, 0)
        bq = tl.load(q + i * sqt + kk[None, :] * sqk, mask=keep, other=0.0).to(tl.float32)
        D = tl.load(Dk + pairs)
        DT = tl.load(DqT + pairs)
        if BOUNDED:
            bdk, dG = block_cols(bdk, dG, D, DT, bq, bk, G, anchor, KP, BT, PRECISION)
        else:
            bdk += tl.sum(tl.where(i == j, DT, 0.0).to(tl.float32), 1)[:, None] * bq
        for level in range(4 if BOUNDED else 0, LEVELS):
            bdk, dG = pair_cols(bdk, dG, D, DT, bq, bk, x, G, anchor, level, KP, BT, BK, BOUNDED, PRECISION)
        if L2NORM:
            dot_k += tl.sum(bk * bdk, 1)
            square_k += tl.sum(bk * bk, 1)
        tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=keep)

        # gate
        tl.debug_barrier()
        bdg = sum_later(dG, BT, exact) + whole[None, :]
        if GATE != FINISHED:
            z = tl.load(g + i * sgt + kk[None, :] * sgk, mask=keep, other=0.0).to(tl.float32)
            if HAS_BIAS:
                z += tl.load(dt_bias + hv * K + kk, mask=kk < K, other=0.0).to(tl.float32)[None, :]
            slope, slope_A = gate_slopes(z, a, lower_bound, GATE)
            dA_sum += tl.sum(tl.where(keep, slope_A * bdg, 0.0))
            bdg *= slope
        tl.store(dg + out + kk[None, :], bdg.to(dg.dtype.element_ty), mask=keep)
        tl.store(dbias + pid * KP + kk, tl.sum(tl.where(keep, bdg, 0.0), 0))
    tl.store(dA + pid, dA_sum)
    if L2NORM:
        tl.debug_barrier()
        share_q = dot_q / (square_q + EPS)
        share_k = dot_k / (square_k + EPS)
        for k0 in range(0, KP, BK):
            kk = k0 + tl.arange(0, BK)
            some = live[:, None] & (kk < K)[None, :]
            bq = tl.load(q + i * sqt + kk[None, :] * sqk, mask=some, other=0.0).to(tl.float32)
            bdq = tl.load(dq + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bq * share_q[:, None]
            tl.store(dq + out + kk[None, :], bdq.to(dq.dtype.element_ty), mask=some)
            bk = tl.load(k + i * skt + kk[None, :] * skk, mask=some, other=0.0).to(tl.float32)
            bdk = tl.load(dk + out + kk[None, :], mask=some, other=0.0).to(tl.float32) - bk * share_k[:, None]
            tl.store(dk + out + kk[None, :], bdk.to(dk.dtype.element_ty), mask=some)
