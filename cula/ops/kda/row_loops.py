"""What Numba compiles for `row_walk`: the innermost loops run over K, four state rows at a time, and vectorise.

A token updates four rows in place: one pass for the products of the decayed rows with k, one that decays, writes
and forms the products with q. Rows that must not change where they lie are first copied to a small buffer, so one
function serves every case and one token gives the same bits as one of many: it is called from one place, because a
compiler may round differently in two inlined copies of one loop.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from cula.ops.common.loops import FLAT, address_of, array_at, compiled, copy_rows, prefetch_rows, slot_of

#: Groups of rows that a lone token asks for ahead: 2 took the step from 105 to 80 us with 2 MiB states out of the
#: cache (two cores, DDR5), and cost nothing with states in it.
AHEAD = 2
#: Tokens whose activations are held at once.
BLOCK = 16
#: State rows that one pass takes through a token.
ROWS = 4

# Where `sizes` holds what.
H, HV, K, V, GATE, SIGMOID, L2NORM, HAS_A, HAS_BIAS = range(9)
POOL_STRIDES, OUT_STRIDES, SPLITS, N, TOKENS, SLOTS, OUT_SLOTS, NULL, WRITE = 9, 12, 15, 16, 17, 18, 19, 20, 21
PACKED, INDEXED, STATES_OUT = 22, 23, 24
# Of q, k, v, g, beta: from sequence to sequence, from token to token, from head to head.
Q_STRIDES, K_STRIDES, V_STRIDES, G_STRIDES, BETA_STRIDES = 25, 28, 31, 34, 37
COUNT = 40
#: Values of `sizes[WRITE]`.
WRITE_NONE, WRITE_READ, WRITE_GIVEN = range(3)


#: exp(x) = 2^n exp(r), |r| <= ln(2)/2: log2(e), ln(2) in two parts, and the range beyond which exp is 0 or infinite.
#: Per bytes of the real type: (log2 e, ln 2 high, ln 2 low, lowest x, highest x, mantissa bits, exponent bias).
EXP = {
    4: (1.4426950408889634, 0.693359375, -2.12194440e-4, -104.0, 89.0, 23, 127),
    8: (1.4426950408889634, 6.93145751953125e-1, 1.42860682030941723212e-6, -750.0, 710.0, 52, 1023),
}
EXP4, EXP8 = EXP[4], EXP[8]


@compiled()
def exp_row(x, bits):
    """x <- exp(x), in place, without a branch, so that it vectorises; NaN stays NaN. bits: integer scratch `[K]`."""
    real = x.dtype.type
    log2e, high, low, lowest, highest, mantissa, bias = EXP4 if x.itemsize == 4 else EXP8
    power = bits.view(x.dtype)
    for c in range(x.shape[0]):
        y = x[c]
        y = real(lowest) if y < real(lowest) else y
        y = real(highest) if y > real(highest) else y
        n = math.floor(y * real(log2e) + real(0.5))
        n = n if n > real(-bias) else real(-bias)
        n = n if n < real(bias + 1) else real(bias + 1)
        r = y - n * real(high) - n * real(low)
        p = real(0.0)
        if x.itemsize == 8:
            p = real(1 / 6227020800)
            p = p * r + real(1 / 479001600)
            p = p * r + real(1 / 39916800)
            p = p * r + real(1 / 3628800)
            p = p * r + real(1 / 362880)
            p = p * r + real(1 / 40320)
        p = p * r + real(1 / 5040)
        p = p * r + real(1 / 720)
        p = p * r + real(1 / 120)
        p = p * r + real(1 / 24)
        p = p * r + real(1 / 6)
        p = p * r + real(0.5)
        p = p * r + real(1.0)
        x[c] = p * r + real(1.0)
        bits[c] = (bits.dtype.type(n) + bits.dtype.type(bias)) << bits.dtype.type(mantissa)
    for c in range(x.shape[0]):
        x[c] *= power[c]


@compiled()
def offset_of(sizes, strides, n, first, token, head):
    """Where token `token` of sequence n is for a head; packed sequences start at token `first`."""
    start = first * sizes[strides + 1] if sizes[PACKED] else n * sizes[strides]
    return start + token * sizes[strides + 1] + head * sizes[strides + 2]


@compiled()
def activate(q, k, g, beta, A_log, dt_bias, numbers, sizes, n, first, token, head, finished, bits):
    """Finish one token and head into the rows decay, keys, queries (scaled), decay * keys; returns beta."""
    real = q.dtype.type
    width = sizes[K]
    decay, keys = finished[:width], finished[width : 2 * width]
    queries, decayed = finished[2 * width : 3 * width], finished[3 * width :]
    group = head // (sizes[HV] // sizes[H])
    at = offset_of(sizes, Q_STRIDES, n, first, token, group)
    q_row = q[at : at + width]
    at = offset_of(sizes, K_STRIDES, n, first, token, group)
    k_row = k[at : at + width]
    at = offset_of(sizes, G_STRIDES, n, first, token, head)
    g_row = g[at : at + width]
    q_norm, k_norm = real(numbers[0]), real(1.0)
    if sizes[L2NORM]:
        q_sum, k_sum = real(0.0), real(0.0)
        for c in range(width):
            q_sum += q_row[c] * q_row[c]
            k_sum += k_row[c] * k_row[c]
        q_norm = q_norm / math.sqrt(q_sum + real(1e-6))
        k_norm = k_norm / math.sqrt(k_sum + real(1e-6))
    for c in range(width):
        queries[c] = q_row[c] * q_norm
        keys[c] = k_row[c] * k_norm
    a = math.exp(A_log[head]) if sizes[HAS_A] else real(1.0)
    if sizes[GATE] == 0:
        for c in range(width):
            decay[c] = g_row[c]
    elif sizes[GATE] == 1:
        for c in range(width):
            x = g_row[c] + (dt_bias[head * width + c] if sizes[HAS_BIAS] else real(0.0))
            decay[c] = -a * (max(x, real(0.0)) + math.log1p(math.exp(-abs(x))))
    else:
        for c in range(width):
            decay[c] = -a * (g_row[c] + (dt_bias[head * width + c] if sizes[HAS_BIAS] else real(0.0)))
        exp_row(decay, bits)
        for c in range(width):
            decay[c] = real(numbers[1]) / (real(1.0) + decay[c])
    exp_row(decay, bits)
    for c in range(width):
        decayed[c] = decay[c] * keys[c]
    b = beta[offset_of(sizes, BETA_STRIDES, n, first, token, head)]
    return real(sizes[SIGMOID]) / (real(1.0) + math.exp(-b)) if sizes[SIGMOID] > 0 else b


# Offsets into flat buffers are unsigned in the innermost loops: a signed one may count from the end, and that check
# would keep the loop from vectorising.


@compiled()
def four_rows(rows, at, stride, tokens, token, width, b, v, v_at, out, place):
    """One token of four state rows in place, `stride` apart from `at` on.

    tokens[token ..]: `width` decays, keys, queries and decayed keys, one after the other. v_at, place: in v and out.
    """
    zero = rows.dtype.type(0.0)
    r0, step = np.uint64(at), np.uint64(stride)
    r1, r2, r3 = r0 + step, r0 + step + step, r0 + step + step + step
    decay, step = np.uint64(token), np.uint64(width)
    keys, queries, decayed = decay + step, decay + step + step, decay + step + step + step
    x0, x1, x2, x3 = zero, zero, zero, zero
    for c in range(width):
        j = np.uint64(c)
        key = tokens[decayed + j]
        x0 += rows[r0 + j] * key
        x1 += rows[r1 + j] * key
        x2 += rows[r2 + j] * key
        x3 += rows[r3 + j] * key
    u0, u1, u2, u3 = b * (v[v_at] - x0), b * (v[v_at + 1] - x1), b * (v[v_at + 2] - x2), b * (v[v_at + 3] - x3)
    x0, x1, x2, x3 = zero, zero, zero, zero
    for c in range(width):
        j = np.uint64(c)
        a, key, query = tokens[decay + j], tokens[keys + j], tokens[queries + j]
        y0, y1 = rows[r0 + j] * a + u0 * key, rows[r1 + j] * a + u1 * key
        y2, y3 = rows[r2 + j] * a + u2 * key, rows[r3 + j] * a + u3 * key
        rows[r0 + j], rows[r1 + j], rows[r2 + j], rows[r3 + j] = y0, y1, y2, y3
        x0 += y0 * query
        x1 += y1 * query
        x2 += y2 * query
        x3 += y3 * query
    out[place], out[place + 1], out[place + 2], out[place + 3] = x0, x1, x2, x3


@compiled()
def one_row(rows, at, tokens, token, width, b, v, v_at, out, place):
    """One token of one state row, as `four_rows`."""
    zero = rows.dtype.type(0.0)
    r0 = np.uint64(at)
    decay, step = np.uint64(token), np.uint64(width)
    keys, queries, decayed = decay + step, decay + step + step, decay + step + step + step
    x = zero
    for c in range(width):
        x += rows[r0 + np.uint64(c)] * tokens[decayed + np.uint64(c)]
    u = b * (v[v_at] - x)
    x = zero
    for c in range(width):
        j = np.uint64(c)
        y = rows[r0 + j] * tokens[decay + j] + u * tokens[keys + j]
        rows[r0 + j] = y
        x += y * tokens[queries + j]
    out[place] = x


@compiled()
def take_rows(
    low, high, count, v_at, first, head, slot, target_slot, sizes, v, out, pool, states_out, out_ids, state, tokens, b
):
    """State rows low..high of one head through a block of tokens: pool slot `slot` -> `target_slot` (-1: nowhere).

    v_at: the first token's v. first: its row in out and out_ids.
    """
    width, stride, item = sizes[K], sizes[POOL_STRIDES + 2], pool.itemsize
    source_at = slot * sizes[POOL_STRIDES] + head * sizes[POOL_STRIDES + 1]
    target_at = target_slot * sizes[POOL_STRIDES] + head * sizes[POOL_STRIDES + 1]
    in_place = target_slot == slot
    address, step, base = address_of(state), width, 0
    if in_place:
        address, step = address_of(pool) + source_at * item, stride
    work = array_at(pool, address, max(ROWS * width, high * stride + width))
    finished = array_at(pool, address_of(tokens), tokens.shape[0])
    r = low
    while r < high:
        rows = ROWS if r + ROWS <= high else 1
        if in_place:
            base = r * stride
            if count == 1:  # a lone token: memory is the limit, and four short streams hide from the prefetcher
                prefetch_rows(address + (base + AHEAD * ROWS * stride) * item, ROWS * stride * item)
        else:
            copy_rows(pool, source_at + r * stride, stride, state, 0, width, rows, width)
        place, from_v = (first * sizes[HV] + head) * sizes[V] + r, v_at + r
        for i in range(count):
            if rows == ROWS:
                four_rows(work, base, step, finished, i * 4 * width, width, b[i], v, from_v, out, place)
            else:
                one_row(work, base, finished, i * 4 * width, width, b[i], v, from_v, out, place)
            from_v += sizes[V_STRIDES + 1]
            place += sizes[HV] * sizes[V]
            if sizes[STATES_OUT]:
                wanted = slot_of(out_ids, first + i, sizes[OUT_SLOTS], sizes[NULL])
                if wanted >= 0:
                    to = wanted * sizes[OUT_STRIDES] + head * sizes[OUT_STRIDES + 1] + r * sizes[OUT_STRIDES + 2]
                    copy_rows(work, base, step, states_out, to, sizes[OUT_STRIDES + 2], rows, width)
        if target_slot >= 0 and not in_place:
            copy_rows(state, 0, width, pool, target_at + r * stride, stride, rows, width)
        r += rows


@compiled(parallel=True)
def walk(real, integer, numbers, sizes, addresses):
    """Every (sequence, head, part of V) through its tokens.

    real: an empty array of the compute type, integer: of integers as wide. numbers: scale, lower_bound.
    addresses: of q, k, v, g, beta, A_log, dt_bias, pool, states_out, out (real), bounds, read, write, out_ids
    (int64). The strides of q ... beta and of the pools are in `sizes`, the rest is contiguous; an absent one is never
    touched.
    """
    q, k, v, g, beta = (
        array_at(real, addresses[0], FLAT), array_at(real, addresses[1], FLAT), array_at(real, addresses[2], FLAT),
        array_at(real, addresses[3], FLAT), array_at(real, addresses[4], FLAT),
    )  # fmt: skip
    A_log, dt_bias = array_at(real, addresses[5], FLAT), array_at(real, addresses[6], FLAT)
    pool, states_out = array_at(real, addresses[7], FLAT), array_at(real, addresses[8], FLAT)
    out = array_at(real, addresses[9], FLAT)
    bounds, read = array_at(sizes, addresses[10], FLAT), array_at(sizes, addresses[11], FLAT)
    write, out_ids = array_at(sizes, addresses[12], FLAT), array_at(sizes, addresses[13], FLAT)
    splits, heads, width = sizes[SPLITS], sizes[HV], sizes[K]
    groups = sizes[V] // ROWS
    for task in numba.prange(sizes[N] * heads * splits):
        n = task % sizes[N]  # neighbours in n, so that a thread's share holds long and short sequences
        head = task // sizes[N] % heads
        part = task // (sizes[N] * heads)
        first, count = n * sizes[TOKENS], sizes[TOKENS]
        if sizes[PACKED]:
            first, count = bounds[n], bounds[n + 1] - bounds[n]
        low = ROWS * (groups * part // splits)
        high = ROWS * (groups * (part + 1) // splits) if part + 1 < splits else sizes[V]
        slot = slot_of(read, n, sizes[SLOTS], sizes[NULL]) if sizes[INDEXED] else n
        target_slot = -1
        if sizes[WRITE] == WRITE_READ:
            target_slot = slot
        elif sizes[WRITE] == WRITE_GIVEN:
            target_slot = slot_of(write, n, sizes[SLOTS], sizes[NULL])
        if slot < 0:
            for i in range(count):
                at = ((first + i) * heads + head) * sizes[V]
                out[at + low : at + high] = 0.0
            continue
        tokens = np.empty(BLOCK * 4 * width, real.dtype)  # per token: decays, keys, queries, decayed keys
        state, b = np.empty(ROWS * width, real.dtype), np.empty(BLOCK, real.dtype)
        scratch = np.empty(width, integer.dtype)
        for start in range(0, count, BLOCK):
            block = min(BLOCK, count - start)
            for i in range(block):
                b[i] = activate(
                    q, k, g, beta, A_log, dt_bias, numbers, sizes, n, first, start + i, head,
                    tokens[i * 4 * width : (i + 1) * 4 * width], scratch,
                )  # fmt: skip
            take_rows(
                low, high, block, offset_of(sizes, V_STRIDES, n, first, start, head), first + start, head, slot,
                target_slot, sizes, v, out, pool, states_out, out_ids, state, tokens, b,
            )  # fmt: skip
            slot = target_slot
