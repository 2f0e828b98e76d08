"""What Numba compiles for `fused`: V-first state rows, four at a time, through the tokens of a sequence, in place."""

from __future__ import annotations

import math

import numba
import numpy as np

from cula.ops.common.loops import FLAT, address_of, array_at, compiled, copy_rows, prefetch_rows, slot_of

#: State rows that one pass takes through a token, and how many passes ahead a lone token asks for.
ROWS, AHEAD = 4, 2

# Where `sizes` holds what. Strides of q, k, v: from sequence to sequence, from token to token, from head to head.
H, HV, K, V, N, TOKENS, PACKED, SPLITS, SLOTS, NULL, INDEXED, CAPTURE = range(12)
Q_STRIDES, K_STRIDES, V_STRIDES, POOL_STRIDES = 12, 15, 18, 21
COUNT = 24


@compiled()
def step_rows(state, at, step, rows, q, q_at, k, k_at, v, v_at, numbers, width, out, place):
    """One token of `rows` state rows (1 or 4), `step` apart from `at` on: S <- decay S + v k, out = scale S . q.

    numbers: decay, what rounding took from it, scale.
    """
    decay, rest, scale, zero = numbers[0], numbers[1], numbers[2], state.dtype.type(0.0)
    keys, queries, gap = np.uint64(k_at), np.uint64(q_at), np.uint64(step)
    r0 = np.uint64(at)
    x0, x1, x2, x3 = zero, zero, zero, zero
    if rows == ROWS:
        r1, r2, r3 = r0 + gap, r0 + gap + gap, r0 + gap + gap + gap
        v0, v1, v2, v3 = v[v_at], v[v_at + 1], v[v_at + 2], v[v_at + 3]
        for i in range(width):
            c = np.uint64(i)
            key, query = k[keys + c], q[queries + c]
            y0 = state[r0 + c] * decay + (state[r0 + c] * rest + v0 * key)
            y1 = state[r1 + c] * decay + (state[r1 + c] * rest + v1 * key)
            y2 = state[r2 + c] * decay + (state[r2 + c] * rest + v2 * key)
            y3 = state[r3 + c] * decay + (state[r3 + c] * rest + v3 * key)
            state[r0 + c], state[r1 + c], state[r2 + c], state[r3 + c] = y0, y1, y2, y3
            x0 += y0 * query
            x1 += y1 * query
            x2 += y2 * query
            x3 += y3 * query
        out[place], out[place + 1], out[place + 2], out[place + 3] = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    else:
        v0 = v[v_at]
        for i in range(width):
            c = np.uint64(i)
            y0 = state[r0 + c] * decay + (state[r0 + c] * rest + v0 * k[keys + c])
            state[r0 + c] = y0
            x0 += y0 * q[queries + c]
        out[place] = x0 * scale


@compiled(parallel=True)
def walk(real, scale, sizes, addresses):
    """Every (sequence, head, part of V) through its tokens, its pool slot updated in place.

    real: an empty array of the compute type. addresses: of q, k, v, pool, out, captured `[rows, HV, V, K]` (real),
    slopes `[HV]` (float64), bounds, read, and for each token the row of `captured` that gets the state after it, or
    -1 (int64). What is not there is never touched.
    """
    q, k, v = (
        array_at(real, addresses[0], FLAT), array_at(real, addresses[1], FLAT), array_at(real, addresses[2], FLAT),
    )  # fmt: skip
    pool, out = array_at(real, addresses[3], FLAT), array_at(real, addresses[4], FLAT)
    captured = array_at(real, addresses[5], FLAT)
    slopes = array_at(np.empty(0, np.float64), addresses[6], FLAT)
    bounds, read, wanted = (
        array_at(sizes, addresses[7], FLAT), array_at(sizes, addresses[8], FLAT), array_at(sizes, addresses[9], FLAT),
    )  # fmt: skip
    heads, splits, width, full = sizes[HV], sizes[SPLITS], sizes[K], sizes[V]
    groups = full // ROWS
    for task in numba.prange(sizes[N] * heads * splits):
        n = task % sizes[N]  # neighbours in n, so that a thread's share holds long and short sequences
        head = task // sizes[N] % heads
        part = task // (sizes[N] * heads)
        first, count = n * sizes[TOKENS], sizes[TOKENS]
        if sizes[PACKED]:
            first, count = bounds[n], bounds[n + 1] - bounds[n]
        low = ROWS * (groups * part // splits)
        high = ROWS * (groups * (part + 1) // splits) if part + 1 < splits else full
        slot = slot_of(read, n, sizes[SLOTS], sizes[NULL]) if sizes[INDEXED] else n
        if slot < 0:
            for i in range(count):
                at = ((first + i) * heads + head) * full
                out[at + low : at + high] = 0.0
            continue
        group = head // (heads // sizes[H])
        row, token = (0, first) if sizes[PACKED] else (n, 0)
        q_at = row * sizes[Q_STRIDES] + token * sizes[Q_STRIDES + 1] + group * sizes[Q_STRIDES + 2]
        k_at = row * sizes[K_STRIDES] + token * sizes[K_STRIDES + 1] + group * sizes[K_STRIDES + 2]
        v_at = row * sizes[V_STRIDES] + token * sizes[V_STRIDES + 1] + head * sizes[V_STRIDES + 2]
        exact, numbers = math.exp(-slopes[head]), np.empty(3, real.dtype)
        numbers[0], numbers[2] = exact, scale
        numbers[1] = exact - np.float64(numbers[0])
        base = slot * sizes[POOL_STRIDES] + head * sizes[POOL_STRIDES + 1]
        step = sizes[POOL_STRIDES + 2]
        r = low
        while r < high:
            rows = ROWS if r + ROWS <= high else 1
            at, place = base + r * step, (first * heads + head) * full + r
            if count == 1:
                prefetch_rows(
                    address_of(pool) + (at + AHEAD * ROWS * step) * pool.itemsize, ROWS * step * pool.itemsize
                )
            for i in range(count):
                step_rows(
                    pool, at, step, rows, q, q_at + i * sizes[Q_STRIDES + 1], k, k_at + i * sizes[K_STRIDES + 1], v,
                    v_at + i * sizes[V_STRIDES + 1] + r, numbers, width, out, place + i * heads * full,
                )  # fmt: skip
                to = wanted[first + i] if sizes[CAPTURE] else -1
                if to >= 0:
                    copy_rows(pool, at, step, captured, ((to * heads + head) * full + r) * width, width, rows, width)
            r += rows
