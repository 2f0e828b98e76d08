"""The loops that Numba compiles for `fused`: the innermost ones run over K, four state rows at a time, and vectorise.

A token takes four rows in two passes: `held` <- decayed `source`, with the products with k; then `target` <- `held`
plus the write, with the products with q. Source and target may be the same memory, `held` never is, so that every
call takes the same vector path and one token gives the same bits as one of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

#: Tokens whose activations are held at once.
BLOCK = 16
#: State rows that one pass takes through a token.
ROWS = 4

# Where `sizes` holds what.
H, HV, K, V, GATE, SIGMOID, L2NORM, HAS_A, HAS_BIAS = range(9)
POOL_STRIDES, OUT_STRIDES, SPLITS, N, TOKENS, SLOTS, OUT_SLOTS, NULL, WRITE = 9, 12, 15, 16, 17, 18, 19, 20, 21
COUNT = 22
#: Values of `sizes[WRITE]`.
WRITE_NONE, WRITE_READ, WRITE_GIVEN = range(3)


def compiled(parallel: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`numba.njit` with the machine code kept on disk, where that can be written.

    Sums may be reassociated into vector lanes; NaN and infinity keep their meaning.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "parallel": parallel,
        "error_model": "numpy",
        "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no writable place for the cache
            return numba.njit(**options)(function)

    return decorate


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
def activate(q, k, g, beta, A_log, dt_bias, numbers, sizes, token, head, decay, keys, queries, bits):
    """Finish the inputs of one token and head into decay, keys, queries (scaled) `[K]`; returns beta."""
    real = q.dtype.type
    width = sizes[K]
    at = (token * sizes[H] + head // (sizes[HV] // sizes[H])) * width
    q_row, k_row = q[at : at + width], k[at : at + width]
    at = (token * sizes[HV] + head) * width
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
    b = beta[token * sizes[HV] + head]
    return real(sizes[SIGMOID]) / (real(1.0) + math.exp(-b)) if sizes[SIGMOID] > 0 else b


# Offsets into flat buffers are unsigned in the innermost loops: a signed one may count from the end, and that check
# would keep the loop from vectorising.


@compiled()
def four_rows(source, from_at, from_stride, target, to_at, to_stride, held, token, b, v, out, at):
    """One token (decay, keys, queries = rows of `token`) of four state rows, from `source` to `target`."""
    width = held.shape[1]
    zero = held.dtype.type(0.0)
    s0, step = np.uint64(from_at), np.uint64(from_stride)
    s1, s2, s3 = s0 + step, s0 + step + step, s0 + step + step + step
    x0, x1, x2, x3 = zero, zero, zero, zero
    for c in range(width):
        j = np.uint64(c)
        a, key = token[0, c], token[1, c]
        y0, y1, y2, y3 = source[s0 + j] * a, source[s1 + j] * a, source[s2 + j] * a, source[s3 + j] * a
        held[0, c], held[1, c], held[2, c], held[3, c] = y0, y1, y2, y3
        x0 += y0 * key
        x1 += y1 * key
        x2 += y2 * key
        x3 += y3 * key
    u0, u1, u2, u3 = b * (v[at] - x0), b * (v[at + 1] - x1), b * (v[at + 2] - x2), b * (v[at + 3] - x3)
    t0, step = np.uint64(to_at), np.uint64(to_stride)
    t1, t2, t3 = t0 + step, t0 + step + step, t0 + step + step + step
    x0, x1, x2, x3 = zero, zero, zero, zero
    for c in range(width):
        j = np.uint64(c)
        key, query = token[1, c], token[2, c]
        y0, y1, y2, y3 = held[0, c] + u0 * key, held[1, c] + u1 * key, held[2, c] + u2 * key, held[3, c] + u3 * key
        target[t0 + j], target[t1 + j], target[t2 + j], target[t3 + j] = y0, y1, y2, y3
        x0 += y0 * query
        x1 += y1 * query
        x2 += y2 * query
        x3 += y3 * query
    out[at], out[at + 1], out[at + 2], out[at + 3] = x0, x1, x2, x3


@compiled()
def one_row(source, from_at, target, to_at, held, token, b, v, out, at):
    """One token of one state row, as `four_rows`."""
    width = held.shape[1]
    zero = held.dtype.type(0.0)
    s0, t0 = np.uint64(from_at), np.uint64(to_at)
    x = zero
    for c in range(width):
        y = source[s0 + np.uint64(c)] * token[0, c]
        held[0, c] = y
        x += y * token[1, c]
    u = b * (v[at] - x)
    x = zero
    for c in range(width):
        y = held[0, c] + u * token[1, c]
        target[t0 + np.uint64(c)] = y
        x += y * token[2, c]
    out[at] = x


@compiled()
def copy_rows(source, from_at, from_stride, target, to_at, to_stride, rows, width):
    """Copy state rows between flat buffers."""
    for r in range(rows):
        s, t = np.uint64(from_at + r * from_stride), np.uint64(to_at + r * to_stride)
        for c in range(width):
            target[t + np.uint64(c)] = source[s + np.uint64(c)]


@compiled()
def slot_of(indices, row, slots, null):
    """The slot of a row, -1 where it is null or out of range; no indices: its own number."""
    if indices.shape[0] == 0:
        return row
    slot = indices[row]
    return -1 if slot < 0 or slot >= slots or slot == null else slot


@compiled()
def take_rows(
    count,
    first,
    at,
    r,
    rows,
    slot,
    target_slot,
    offset,
    sizes,
    v,
    out,
    pool,
    states_out,
    out_ids,
    held,
    state,
    tokens,
    b,
):
    """`rows` (4 or 1) state rows through a block of tokens: pool slot `slot` -> `target_slot` (-1: nowhere).

    at: where row r of the first token is in v and out. offset: of the rows in a slot. The calls are spelled out
    because an array variable that changes its meaning costs atomic reference counts.
    """
    width, stride = sizes[K], sizes[POOL_STRIDES + 2]
    source_at, target_at = slot * sizes[POOL_STRIDES] + offset, target_slot * sizes[POOL_STRIDES] + offset
    direct = count == 1 and target_slot >= 0 and out_ids.shape[0] == 0
    if rows == ROWS:
        if direct:
            four_rows(pool, source_at, stride, pool, target_at, stride, held, tokens[0], b[0], v, out, at)
        else:
            four_rows(pool, source_at, stride, state, 0, width, held, tokens[0], b[0], v, out, at)
    elif direct:
        one_row(pool, source_at, pool, target_at, held, tokens[0], b[0], v, out, at)
    else:
        one_row(pool, source_at, state, 0, held, tokens[0], b[0], v, out, at)
    if direct:
        return
    head = at // sizes[V] % sizes[HV]
    for i in range(count):
        if i > 0:
            at += sizes[HV] * sizes[V]
            if rows == ROWS:
                four_rows(state, 0, width, state, 0, width, held, tokens[i], b[i], v, out, at)
            else:
                one_row(state, 0, state, 0, held, tokens[i], b[i], v, out, at)
        if out_ids.shape[0] > 0:
            wanted = slot_of(out_ids, first + i, sizes[OUT_SLOTS], sizes[NULL])
            if wanted >= 0:
                place = wanted * sizes[OUT_STRIDES] + head * sizes[OUT_STRIDES + 1] + r * sizes[OUT_STRIDES + 2]
                copy_rows(state, 0, width, states_out, place, sizes[OUT_STRIDES + 2], rows, width)
    if target_slot >= 0:
        copy_rows(state, 0, width, pool, target_at, stride, rows, width)


@compiled(parallel=True)
def walk(q, k, v, g, beta, A_log, dt_bias, numbers, sizes, bits, bounds, read, write, out_ids, pool, states_out, out):
    """Every (sequence, head, part of V) through its tokens. All arrays flat; see `fused` for their meaning.

    bits: an empty array of integers as wide as the real type.
    """
    splits, heads, width = sizes[SPLITS], sizes[HV], sizes[K]
    groups = sizes[V] // ROWS
    for task in numba.prange(sizes[N] * heads * splits):
        part = task % splits
        head = (task // splits) % heads
        n = task // (splits * heads)
        first, count = n * sizes[TOKENS], sizes[TOKENS]
        if bounds.shape[0] > 0:
            first, count = bounds[n], bounds[n + 1] - bounds[n]
        low = ROWS * (groups * part // splits)
        high = ROWS * (groups * (part + 1) // splits) if part + 1 < splits else sizes[V]
        slot = slot_of(read, n, sizes[SLOTS], sizes[NULL])
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
        tokens = np.empty((BLOCK, 3, width), q.dtype)  # decay, keys, queries
        held, state, b = np.empty((ROWS, width), q.dtype), np.empty(ROWS * width, q.dtype), np.empty(BLOCK, q.dtype)
        scratch = np.empty(width, bits.dtype)
        for start in range(0, count, BLOCK):
            block = min(BLOCK, count - start)
            for i in range(block):
                b[i] = activate(
                    q, k, g, beta, A_log, dt_bias, numbers, sizes, first + start + i, head, tokens[i, 0], tokens[i, 1],
                    tokens[i, 2], scratch,
                )  # fmt: skip
            r = low
            while r < high:
                rows = ROWS if r + ROWS <= high else 1
                take_rows(
                    block, first + start, ((first + start) * heads + head) * sizes[V] + r, r, rows, slot, target_slot,
                    head * sizes[POOL_STRIDES + 1] + r * sizes[POOL_STRIDES + 2], sizes, v, out, pool, states_out,
                    out_ids, held, state, tokens, b,
                )  # fmt: skip
                r += rows
            slot = target_slot
