"""intra (Triton): everything of a chunk that needs no state, one launch.

One program per tile (chunk) and value head. With G the running sum of the gate inside the chunk (base 2, inclusive)
and Gn its last row, it reads q, k, g, beta and writes, tile by tile (`[tiles, HV, BT, ...]`):

    kb = k e^G    qg = scale q e^G    kg = k e^(Gn - G)    total = e^Gn    beta
    Aqk[i, j] = scale q_i . (k_j e^(G_i - G_j))  for j <= i
    M = Akk (I + beta Akk)^-1  with Akk[i, j] = k_i . (k_j e^(G_i - G_j)) for j < i, so that
    v_new = beta (x - M (beta x))  with x = v - kb h

nq and nk are the factors that make finished rows of raw q and k: their norms, and scale for q.

Pairs of rows meet at the middle of the smallest block of 2s rows that parts them: rows of its later half carry
e^(G_i - G_mid), columns of its earlier half e^(G_mid - G_j), both <= 1 for any gate, and no output depends on later
gates. Where the gate is bounded by -5 (BOUNDED) blocks of 16 rows are one product, its columns at most e^80. WHOLE
tiles are one such block: 16 rows, or 32 of normalized q and k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import base2_gate, exp2, finished_beta
from cula.ops.kda.chunk.portable.tiles import find_tile

EPS = tl.constexpr(1e-6)
#: Bits that centre e^-80 .. 1 and 1 .. e^80, so that neither meets the ends of bf16's range with inputs up to 1e15.
SHIFT = tl.constexpr(57.0)
#: The same for 32 rows, e^-160 .. 1 and 1 .. e^160, of q and k that are at most 1.
WIDE_SHIFT = tl.constexpr(115.0)


@triton.jit
def base2_slice(
    g, dt_bias, kk, keep, a, lower_bound, K: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """The base-2 gate of a slice of K; g: pointers."""
    x = tl.load(g, mask=keep, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(dt_bias + kk, mask=kk < K, other=0.0).to(tl.float32)[None, :]
    return tl.where(keep, base2_gate(x, a, lower_bound, GATE), 0.0)


@triton.jit
def running_sum(x, BT: tl.constexpr, EXACT: tl.constexpr):
    """Inclusive sums down the rows; unless EXACT by a product, on x as a sum of two fp16 numbers."""
    if EXACT:
        return tl.cumsum(x, 0)
    lower = (tl.arange(0, BT)[:, None] >= tl.arange(0, BT)[None, :]).to(tl.float16)
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return tl.dot(lower, high, tl.dot(lower, low))


@triton.jit
def to_midpoint(x, G, anchors, level, KP: tl.constexpr, BT: tl.constexpr, EXACT: tl.constexpr, BOUNDED: tl.constexpr):
    """log2 of the decay between each row and the middle of its block of 2s rows, s = 2^level, <= 0 `[BT, BK]`.

    EXACT sums the very gates between the two (fp32); else a difference of running sums, good to 2^-10 bits. anchors
    points at the sums of every 16th row where BOUNDED, of every row elsewhere.
    """
    r = tl.arange(0, BT)[:, None]
    if EXACT:
        j = tl.arange(0, BT)[None, :]
        middle = ((r >> (level + 1)) << (level + 1)) + (1 << level)
        between = ((j >= middle) & (j <= r)) | ((j < middle) & (j > r))
        return tl.dot(tl.where(between, 1.0, 0.0), x, input_precision="tf32x3")
    if BOUNDED:
        first = (1 << (level - 4)) - 1  # with chunks of 64 rows there are at most two blocks of 32 or more
        second = tl.minimum(first + (1 << (level - 3)), BT // 16 - 1)
        middle = tl.load(anchors + first * KP)[None, :]
        middle = tl.where(r >> (level + 1) == 0, middle, tl.load(anchors + second * KP)[None, :])
        return -tl.abs(G - middle)
    row = ((r >> (level + 1)) << (level + 1)) + (1 << level) - 1
    return -tl.abs(G - tl.load(anchors + row * KP))


@triton.jit
def to_end(x, G, last, BT: tl.constexpr, EXACT: tl.constexpr):
    """log2 of the decay between each row and the last `[BT, BK]`; EXACT as in `to_midpoint`."""
    if EXACT:
        later = tl.arange(0, BT)[:, None] < tl.arange(0, BT)[None, :]
        return tl.dot(tl.where(later, 1.0, 0.0), x, input_precision="tf32x3")
    return tl.minimum(last[None, :] - G, 0.0)


@triton.jit
def parted_by(i, j, level):
    """The pairs (i, j), j < i, that the middle of a block of 2s rows parts, s = 2^level."""
    return ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))


@triton.jit
def load_rows(x, keep, norm):
    """Rows of q or k in fp32 from pointers, times their factors."""
    return tl.load(x, mask=keep, other=0.0).to(tl.float32) * norm[:, None]


@triton.jit
def add_pairs(
    Pq, Pk, q, k, keep, q_norm, k_norm, x, G, anchors, level, KP: tl.constexpr, BT: tl.constexpr,
    dt: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pq, Pk with the products of the pairs that the middle of a block of 2s rows parts. q, k: pointers."""
    F = exp2(to_midpoint(x, G, anchors, level, KP, BT, dt == tl.float32, BOUNDED))
    rows = (load_rows(k, keep, k_norm) * F).to(dt)
    cols = tl.trans(rows)
    pairs = parted_by(tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :], level)
    Pk += tl.where(pairs, tl.dot(rows, cols, input_precision=PRECISION), 0.0)
    rows = (load_rows(q, keep, q_norm) * F).to(dt)
    Pq += tl.where(pairs, tl.dot(rows, cols, input_precision=PRECISION), 0.0)
    return Pq, Pk


@triton.jit
def add_blocks(
    Pq, Pk, q, k, keep, q_norm, k_norm, G, anchors, KP: tl.constexpr, BT: tl.constexpr, dt: tl.constexpr,
):  # fmt: skip
    """Pq, Pk with the products of the pairs inside blocks of 16 rows. q, k: pointers."""
    inside = G - before_block(G, anchors, KP, BT)
    cols = tl.trans((load_rows(k, keep, k_norm) * exp2(-inside - SHIFT)).to(dt))
    near = exp2(inside + SHIFT)
    block = tl.arange(0, BT)[:, None] // 16 == tl.arange(0, BT)[None, :] // 16
    Pk += tl.where(block, tl.dot((load_rows(k, keep, k_norm) * near).to(dt), cols), 0.0)
    Pq += tl.where(block, tl.dot((load_rows(q, keep, q_norm) * near).to(dt), cols), 0.0)
    return Pq, Pk


@triton.jit
def before_block(G, anchors, KP: tl.constexpr, BT: tl.constexpr):
    """G of the last row before each row's block of 16."""
    block = tl.arange(0, BT)[:, None] // 16
    before = tl.zeros_like(G)
    for at in tl.static_range(1, BT // 16):
        before = tl.where(block == at, tl.load(anchors + (at - 1) * KP)[None, :], before)
    return before


@triton.jit
def delta_inverse(P, b, BT: tl.constexpr, LEVELS: tl.constexpr, INVERSE: tl.constexpr):
    """M = P (I + diag(b) P)^-1 of strictly lower P `[BT, BT]`, doubling diagonal blocks, two products each."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    M = tl.where(parted_by(i, j, 0), P, 0.0)
    if INVERSE == "fp16":
        for level in tl.static_range(1, LEVELS):
            low = tl.where(parted_by(i, j, level), P, 0.0)
            X = low - tl.dot(low.to(tl.float16), (b[:, None] * M).to(tl.float16))
            M += X - tl.dot(M.to(tl.float16), (b[:, None] * X).to(tl.float16))
    else:
        for level in range(1, LEVELS):
            low = tl.where(parted_by(i, j, level), P, 0.0)
            X = low - tl.dot(low, b[:, None] * M, input_precision=INVERSE)
            M += X - tl.dot(M, b[:, None] * X, input_precision=INVERSE)
    return M


@triton.jit(do_not_specialize=["T", "NT", "sbb"])
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, table,
    kb, qg, kg, Aqk, M, total, beta_out, nq, nk, anchors, G_out, o,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, sgb, sgt, sgh, sgk, sbb, sbt, sbh, sot, soh, sov,
    T, NT, scale, lower_bound,
    HV: tl.constexpr, G_HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, BOUNDED: tl.constexpr, WHOLE: tl.constexpr, PRODUCTS: tl.constexpr,
    KEEP_G: tl.constexpr, KEEP_ANCHORS: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """See the module; PRODUCTS False leaves out Aqk and M; KEEP_G stores G, KEEP_ANCHORS its rows 15, 31, ..."""
    pid = tl.program_id(0).to(tl.int64)
    hv = (pid % HV).to(tl.int32)
    batch, first, count, owner = find_tile(table, (pid // HV).to(tl.int32), T, NT, BT, PACKED)
    h = hv // G_HEADS
    r = tl.arange(0, BT)
    live = r < count
    token = first.to(tl.int64)
    if PACKED:
        spare = owner < 0  # rows after the last boundary: their outputs are zeros
        if spare:
            for v0 in range(0, V, BV):
                vv = v0 + tl.arange(0, BV)
                rest = live[:, None] & (vv < V)[None, :]
                at = r[:, None] * sot + vv[None, :] * sov
                tl.store(o + token * sot + hv * soh + at, tl.zeros((BT, BV), o.dtype.element_ty), rest)
            return
    q += batch.to(tl.int64) * sqb + token * sqt + h * sqh
    k += batch.to(tl.int64) * skb + token * skt + h * skh
    g += batch.to(tl.int64) * sgb + token * sgt + hv * sgh
    beta += batch.to(tl.int64) * sbb + token * sbt + hv * sbh
    qg += pid * BT * KP
    kb += pid * BT * KP
    kg += pid * BT * KP
    anchors += pid * (BT // 16) * KP
    G_out += pid * BT * KP
    bb = tl.load(beta + r * sbt, mask=live, other=0.0).to(tl.float32)
    bb = tl.where(live, finished_beta(bb, SIGMOID, DOUBLE), 0.0)
    tl.store(beta_out + pid * BT + r, bb)
    a = 1.0
    if HAS_A:
        a = exp2(tl.load(A_log + hv).to(tl.float32) * 1.4426950408889634)
    q_norm = tl.full((BT,), 1.0, tl.float32)
    k_norm = tl.full((BT,), 1.0, tl.float32)
    if L2NORM:
        q_square = tl.zeros((BT,), tl.float32)
        k_square = tl.zeros((BT,), tl.float32)
        for k0 in range(0, KP, BK):
            kk = k0 + tl.arange(0, BK)
            keep = live[:, None]
            if K != KP:
                keep = keep & (kk < K)[None, :]
            bq = tl.load(q + (r[:, None] * sqt + kk[None, :] * sqk), mask=keep, other=0.0).to(tl.float32)
            bk = tl.load(k + (r[:, None] * skt + kk[None, :] * skk), mask=keep, other=0.0).to(tl.float32)
            q_square += tl.sum(bq * bq, 1)
            k_square += tl.sum(bk * bk, 1)
        q_norm = tl.rsqrt(q_square + EPS)
        k_norm = tl.rsqrt(k_square + EPS)
    tl.store(nq + pid * BT + r, q_norm * scale)
    tl.store(nk + pid * BT + r, k_norm)
    if not WHOLE:
        q_norm *= scale
    dt = kb.dtype.element_ty
    i = r[:, None]
    j = r[None, :]
    Pq = tl.zeros((BT, BT), tl.float32)
    Pk = tl.zeros((BT, BT), tl.float32)
    for k0 in range(0, KP, BK):
        kk = k0 + tl.arange(0, BK)
        keep = live[:, None]
        if K != KP:
            keep = keep & (kk < K)[None, :]
        q_at = q + (i * sqt + kk[None, :] * sqk)
        k_at = k + (i * skt + kk[None, :] * skk)
        g_at = g + (i * sgt + kk[None, :] * sgk)
        x = base2_slice(g_at, dt_bias + hv * K, kk, keep, a, lower_bound, K, GATE, HAS_BIAS)
        G = running_sum(x, BT, dt == tl.float32)
        at = i * KP + kk[None, :]
        if KEEP_G:
            tl.store(G_out + at, G)
        if WHOLE:
            last = tl.sum(x, 0)
            if KEEP_ANCHORS:
                tl.store(anchors + kk[None, :] + i // 16 * KP, G, mask=i % 16 == 15)
            shift: tl.constexpr = SHIFT if BT == 16 else WIDE_SHIFT
            shifted: tl.constexpr = 2.0**-shift
            near = exp2(G + shift)
            rows_q = tl.load(q_at, mask=keep, other=0.0).to(tl.float32) * near * q_norm[:, None]
            tl.store(qg + at, (rows_q * (scale * shifted)).to(dt))
            bk = tl.load(k_at, mask=keep, other=0.0).to(tl.float32)
            rows_k = bk * near * k_norm[:, None]
            tl.store(kb + at, (rows_k * shifted).to(dt))
            cols_k = bk * exp2(-G - shift) * k_norm[:, None]
            tl.store(kg + at, (cols_k * exp2(last + shift)[None, :]).to(dt))
            tl.store(total + pid * KP + kk, exp2(last))
            if PRODUCTS:
                cols = tl.trans(cols_k.to(dt))
                Pq = tl.dot(rows_q.to(dt), cols, Pq, input_precision=PRECISION)
                Pk = tl.dot(rows_k.to(dt), cols, Pk, input_precision=PRECISION)
        else:
            if BOUNDED:
                anchor = anchors + kk
                tl.store(anchor[None, :] + i // 16 * KP, G, mask=i % 16 == 15)
                tl.debug_barrier()
                last = tl.load(anchor + (BT // 16 - 1) * KP)
            else:
                anchor = G_out + kk
                tl.debug_barrier()
                last = tl.sum(x, 0)
            E = exp2(G)
            bq = load_rows(q_at, keep, q_norm)
            tl.store(qg + at, (bq * E).to(dt))
            bk = load_rows(k_at, keep, k_norm)
            tl.store(kb + at, (bk * E).to(dt))
            tl.store(kg + at, (bk * exp2(to_end(x, G, last, BT, dt == tl.float32))).to(dt))
            tl.store(total + pid * KP + kk, exp2(last))
            if PRODUCTS:
                tl.debug_barrier()
                if BOUNDED:
                    Pq, Pk = add_blocks(Pq, Pk, q_at, k_at, keep, q_norm, k_norm, G, anchor, KP, BT, dt)
                else:
                    Pq += tl.where(i == j, tl.sum(bq * bk, 1)[:, None], 0.0)
                for level in range(4 if BOUNDED else 0, LEVELS):
                    Pq, Pk = add_pairs(
                        Pq, Pk, q_at, k_at, keep, q_norm, k_norm, x, G, anchor, level, KP, BT, dt, BOUNDED,
                        PRECISION,
                    )  # fmt: skip
    if PRODUCTS:
        at = i * BT + j
        if WHOLE:
            Pq *= scale
        tl.store(Aqk + pid * BT * BT + at, tl.where(i >= j, Pq, 0.0).to(dt))
        Pk = tl.where(i > j, Pk, 0.0)
        tl.store(M + pid * BT * BT + at, delta_inverse(Pk, bb, BT, LEVELS, INVERSE).to(dt))
