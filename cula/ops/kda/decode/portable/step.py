"""step (Triton): a state tile walks through the tokens of its sequence: decode, verify, recurrent.

One program of one warp per sequence, value head and BV rows of the V-first state. The tile `[KP / KI, BV, KI]` is read
once, stays in fp32 registers, and is written once; its three dimensions put KI adjacent elements of K on adjacent
lanes, so that a sum over K is mostly within a thread. Per token, with d = exp(g) and q scaled:

    x = S (d k)    y = S (d q)    u = beta (v - x)    o = y + u (k . q)    S <- S d + u k^T

The arithmetic does not depend on how many tokens, sequences or rows a launch has: one token of many has the bits of
one token alone. Strides of dimensions beyond the innermost count units of IN, SRC, DST and OUT elements: what the host
knows to divide them, so that loads are vectors and no length or batch size compiles anything again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.decode.portable.elementwise import (
    LN2,
    LOG2E,
    PTX,
    log_of_one_plus_exp,
    logistic,
    power_of_two,
    product,
)

EPS = tl.constexpr(1e-6)
#: Bits that one token may lose: 2^-256 is 0 in fp32.
FLOOR = tl.constexpr(-256.0)

FINISHED = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
LOWER_BOUND = tl.constexpr(2)

#: Where a state comes from and goes to: nowhere, row n, a slot by index, the slot of the last accepted token; the slot
#: that was read.
NONE = tl.constexpr(0)
ROW = tl.constexpr(1)
INDEX = tl.constexpr(2)
COLUMN = tl.constexpr(3)
SAME = tl.constexpr(4)

INTEGERS = [
    "q_n", "q_t", "q_h", "k_n", "k_t", "k_h", "v_n", "v_t", "v_h", "g_n", "g_t", "g_h", "b_n", "b_t", "b_h",
    "o_n", "o_t", "o_h", "s_n", "s_h", "s_v", "d_n", "d_h", "d_v", "x_n", "x_h", "x_v",
    "read_n", "read_c", "write_n", "accepted_n", "cu_n", "keep_n", "keep_t", "parent_n", "parent_t",
    "slots", "target_slots", "kept_slots", "null_index", "columns", "N", "tokens", "total", "roll_T",
]  # fmt: skip
#: Tensors whose alignment makes no difference.
SCALARS = ["beta", "A_log", "read", "write", "accepted", "cu_seqlens", "keep", "parent", "roll_count"]


@triton.jit
def valid_slot(indices, at, slots, null_index):
    """The slot at an offset of an index tensor, -1 where it is null or out of range."""
    slot = tl.load(indices + at).to(tl.int64)
    return tl.where((slot == null_index) | (slot < 0) | (slot >= slots), -1, slot)


@triton.jit
def read_slot(read, accepted, n, read_n, read_c, accepted_n, columns, slots, null_index, READ: tl.constexpr):
    """The slot that sequence n reads, -1 for none."""
    if READ == INDEX:
        return valid_slot(read, n * read_n, slots, null_index)
    if READ == COLUMN:
        last = tl.load(accepted + n * accepted_n).to(tl.int64) - 1
        last = tl.minimum(tl.maximum(last, 0), columns - 1)
        return valid_slot(read, n * read_n + last * read_c, slots, null_index)
    return n


@triton.jit
def boundaries(cu_seqlens, n, cu_n, total, BLOCK: tl.constexpr):
    """(first token, tokens) of packed sequence n: each boundary clamped between its predecessor and `total`."""
    first = tl.zeros((), tl.int64)
    for i in range(0, n + 1, BLOCK):
        at = i + tl.arange(0, BLOCK)
        bounds = tl.load(cu_seqlens + at * cu_n, mask=(at > 0) & (at <= n), other=0).to(tl.int64)
        first = tl.maximum(first, tl.max(bounds, 0))
    first = tl.minimum(first, total)
    end = tl.minimum(tl.load(cu_seqlens + (n + 1) * cu_n).to(tl.int64), total)
    return first, tl.maximum(end - first, 0)


@triton.jit
def wide(stride, UNIT: tl.constexpr):
    """A stride in elements, 64 bits (which the interpreter would not make of its annotation)."""
    return stride.to(tl.int64) * UNIT


@triton.jit
def tile_at(vv, kk, stride, UNIT: tl.constexpr, INNER: tl.constexpr):
    """Offsets of a tile's elements in a state; INNER: the stride of K, 0 where V's is 1 (K-first) and `stride` K's."""
    if INNER == 0:
        return kk[:, None, :].to(tl.int64) * wide(stride, UNIT) + vv[None, :, None]
    at = vv[None, :, None].to(tl.int64) * wide(stride, UNIT) + kk[:, None, :] * INNER
    if INNER == 1:  # 2 breaks a tie for the compiler: lanes beyond KI go to rows of V, not to KC
        at = tl.max_contiguous(at, (1, 2, kk.shape[1]))
    return at


@triton.jit
def tile_mask(vv, kk, held, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr):
    """The elements of a tile that exist, none unless `held`."""
    mask = (vv < tl.where(held, V, 0))[None, :, None]
    if K != KP:
        mask = mask & (kk < K)[:, None, :]
    return mask


@triton.jit
def joined(a, w, b, v):
    """a w + b v, and a weight of 1: sums of products of which the source, not the compiler, says what is rounded."""
    return tl.fma(b, v, a * w), tl.full((), 1.0, tl.float32)


@triton.jit
def over_keys(S, x):
    """The product of a tile with a vector over K `[KC, KI]`: `[BV]`."""
    x = tl.broadcast_to(x[:, None, :], S.shape)
    if PTX and S.shape[0] > 1:  # the interpreter would walk through every element in Python
        return tl.sum(tl.reduce((S, x), 0, joined)[0], 1)
    return tl.sum(tl.sum(product(S, x), 0), 1)


@triton.jit
def finished_keys(k, L2NORM: tl.constexpr):
    """k in fp32, normalised where L2NORM."""
    k = k.to(tl.float32)
    if L2NORM:
        k = k * (1.0 / tl.sqrt(tl.sum(product(k, k)) + EPS))
    return k


@triton.jit
def finished_gate(g, bias, a, lower_bound, GATE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """log2 of the decay from a raw or finished gate; a = exp(A_log), or 1."""
    x = g.to(tl.float32)
    if GATE != FINISHED:
        if HAS_BIAS:
            x += bias
        if GATE == SOFTPLUS:
            x = -a * log_of_one_plus_exp(x)
        else:
            x = lower_bound * logistic(a * x)
    return tl.maximum(x * LOG2E, FLOOR)


@triton.jit
def finished_beta(b, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """beta in fp32, from logits where SIGMOID, doubled where DOUBLE."""
    b = b.to(tl.float32)
    if SIGMOID:
        b = logistic(b)
    if DOUBLE:
        b = 2.0 * b
    return b


@triton.jit
def updated(S, d, k, u, dtype: tl.constexpr, ROUND: tl.constexpr):
    """The state after a token, rounded to the pool's type where ROUND. d, k: `[KC, KI]`.

    Which product is rounded is said here: the compiler may choose one way in decode and the other in a tree.
    """
    S = tl.fma(S, tl.broadcast_to(d[:, None, :], S.shape), u[None, :, None] * k[:, None, :])
    if ROUND:
        S = S.to(dtype).to(tl.float32)
    return S


@triton.jit
def ancestors(parent, t, parent_t):
    """The tokens on the way from the committed state to token t, t excluded, as bits."""
    path = tl.zeros((), tl.int32)
    child = t
    up = tl.load(parent + child * parent_t).to(tl.int32)
    while (up >= 0) & (up < child):
        path = path | (1 << up)
        child = up
        up = tl.load(parent + child * parent_t).to(tl.int32)
    return path


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=SCALARS)
def step_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, source, target, kept, read, write, accepted, cu_seqlens, keep, parent,
    roll_k, roll_u, roll_g, roll_count,
    q_n: tl.int64, q_t: tl.int64, q_h: tl.int64, k_n: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_n: tl.int64, v_t: tl.int64, v_h: tl.int64, g_n: tl.int64, g_t: tl.int64, g_h: tl.int64,
    b_n: tl.int64, b_t: tl.int64, b_h: tl.int64, o_n: tl.int64, o_t: tl.int64, o_h: tl.int64,
    s_n: tl.int64, s_h: tl.int64, s_v: tl.int64, d_n: tl.int64, d_h: tl.int64, d_v: tl.int64,
    x_n: tl.int64, x_h: tl.int64, x_v: tl.int64, read_n: tl.int64, read_c: tl.int64, write_n: tl.int64,
    accepted_n: tl.int64, cu_n: tl.int64, keep_n: tl.int64, keep_t: tl.int64, parent_n: tl.int64, parent_t: tl.int64,
    slots: tl.int64, target_slots: tl.int64, kept_slots: tl.int64, null_index: tl.int64, columns: tl.int64,
    N: tl.int64, tokens: tl.int64, total: tl.int64, roll_T: tl.int64, scale, lower_bound,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KI: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, IN: tl.constexpr, SRC: tl.constexpr, DST: tl.constexpr, OUT: tl.constexpr,
    SRC_K: tl.constexpr, DST_K: tl.constexpr, OUT_K: tl.constexpr, O_V: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    L2NORM: tl.constexpr, PACKED: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr,
    TREE: tl.constexpr, ROLL: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """See the module. KEEP stores the state after each token, TREE follows `parent`, ROLL stores k, u and g."""
    KC: tl.constexpr = KP // KI
    NV: tl.constexpr = (V + BV - 1) // BV
    iv = tl.program_id(0) % NV
    hv = (tl.program_id(0) // NV % HV).to(tl.int64)
    n = (tl.program_id(0) // NV // HV).to(tl.int64)
    hq = hv // GROUP
    vv = iv * BV + tl.arange(0, BV)
    kk = tl.arange(0, KC)[:, None] * KI + tl.arange(0, KI)[None, :]
    slot = read_slot(read, accepted, n, read_n, read_c, accepted_n, columns, slots, null_index, READ)
    if READ == NONE:
        S = tl.zeros((KC, BV, KI), tl.float32)
    else:
        at = tl.maximum(slot, 0) * wide(s_n, SRC) + hv * wide(s_h, SRC) + tile_at(vv, kk, s_v, SRC, SRC_K)
        S = tl.load(source + at, mask=tile_mask(vv, kk, slot >= 0, K, V, KP), other=0.0).to(tl.float32)
    if TREE:
        committed = S
    row = n
    count = tokens
    if PACKED:
        row, length = boundaries(cu_seqlens, n, cu_n, total, 128)
        count = tl.minimum(length, tokens)
    done = tl.where(slot >= 0, count, 0).to(tl.int32)
    q += row * wide(q_n, IN) + hq * wide(q_h, IN)
    k += row * wide(k_n, IN) + hq * wide(k_h, IN)
    v += row * wide(v_n, IN) + hv * wide(v_h, IN)
    g += row * wide(g_n, IN) + hv * wide(g_h, IN)
    beta += row * b_n + hv * b_h
    o += row * o_n + hv * o_h
    a = 1.0
    if HAS_A:
        a = power_of_two(tl.load(A_log + hv).to(tl.float32) * LOG2E)
    bias = tl.zeros((KC, KI), tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + hv * K + kk, mask=kk < K, other=0.0).to(tl.float32)
    some = kk < tl.where(done > 0, K, 0)
    next_q = tl.load(q + kk, mask=some, other=0.0)
    next_k = tl.load(k + kk, mask=some, other=0.0)
    next_g = tl.load(g + kk, mask=some, other=0.0)
    next_v = tl.load(v + vv, mask=vv < tl.where(done > 0, V, 0), other=0.0)
    next_b = tl.load(beta, mask=done > 0, other=0.0)
    for t in range(0, done):
        if TREE:
            up = tl.load(parent + row * parent_n + t * parent_t).to(tl.int32)
            if up != t - 1:  # not the token before: walk again from the committed state
                path = ancestors(parent + row * parent_n, t, parent_t)
                S = committed
                for j in range(0, t):
                    if (path >> j) & 1 != 0:
                        yk = finished_keys(tl.load(k + j * wide(k_t, IN) + kk, mask=kk < K, other=0.0), L2NORM)
                        yg = tl.load(g + j * wide(g_t, IN) + kk, mask=kk < K, other=0.0)
                        yd = power_of_two(finished_gate(yg, bias, a, lower_bound, GATE, HAS_BIAS))
                        yv = tl.load(v + j * wide(v_t, IN) + vv, mask=vv < V, other=0.0).to(tl.float32)
                        yb = finished_beta(tl.load(beta + j * b_t), SIGMOID, DOUBLE)
                        yu = yb * (yv - over_keys(S, yd * yk))
                        S = updated(S, yd, yk, yu, source.dtype.element_ty, ROUND)
        bq = finished_keys(next_q, L2NORM) * scale
        bk = finished_keys(next_k, L2NORM)
        gate = finished_gate(next_g, bias, a, lower_bound, GATE, HAS_BIAS)
        bv = next_v.to(tl.float32)
        bb = finished_beta(next_b, SIGMOID, DOUBLE)
        after = t + 1  # loaded a token ahead
        some = kk < tl.where(after < done, K, 0)
        next_q = tl.load(q + after * wide(q_t, IN) + kk, mask=some, other=0.0)
        next_k = tl.load(k + after * wide(k_t, IN) + kk, mask=some, other=0.0)
        next_g = tl.load(g + after * wide(g_t, IN) + kk, mask=some, other=0.0)
        next_v = tl.load(v + after * wide(v_t, IN) + vv, mask=vv < tl.where(after < done, V, 0), other=0.0)
        next_b = tl.load(beta + after * b_t, mask=after < done, other=0.0)
        d = power_of_two(gate)
        kq = tl.sum(product(bk, bq))
        x = over_keys(S, d * bk)
        y = over_keys(S, d * bq)
        u = bb * (bv - x)
        out = tl.fma(u, tl.broadcast_to(kq, u.shape), y)
        tl.store(o + t * o_t + vv * O_V, out.to(o.dtype.element_ty), mask=vv < V)
        S = updated(S, d, bk, u, source.dtype.element_ty, ROUND)
        if ROLL:
            place = (n * roll_T + t) * HV + hv
            tl.store(roll_u + place * V + vv, u, mask=vv < V)
            first = kk < tl.where(iv == 0, K, 0)
            tl.store(roll_k + place * K + kk, bk, mask=first)
            tl.store(roll_g + place * K + kk, gate * LN2, mask=first)
        if KEEP:
            to = valid_slot(keep + row * keep_n, t * keep_t, kept_slots, null_index)
            at = tl.maximum(to, 0) * wide(x_n, OUT) + hv * wide(x_h, OUT) + tile_at(vv, kk, x_v, OUT, OUT_K)
            tl.store(kept + at, S.to(kept.dtype.element_ty), mask=tile_mask(vv, kk, to >= 0, K, V, KP))
    if ROLL:
        tl.store(roll_count + n, done, mask=(iv == 0) & (hv == 0))
    if WRITE != NONE:
        to = slot
        if WRITE == INDEX:
            to = valid_slot(write, n * write_n, target_slots, null_index)
            to = tl.where(slot >= 0, to, -1)
        at = tl.maximum(to, 0) * wide(d_n, DST) + hv * wide(d_h, DST) + tile_at(vv, kk, d_v, DST, DST_K)
        tl.store(target + at, S.to(target.dtype.element_ty), mask=tile_mask(vv, kk, to >= 0, K, V, KP))
    fill = count
    if PACKED:
        fill = tl.where(n == N - 1, total - row, length)
    for t in range(done, fill.to(tl.int32)):
        tl.store(o + t * o_t + vv * O_V, tl.zeros((BV,), o.dtype.element_ty), mask=vv < V)
