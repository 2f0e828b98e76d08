"""What Numba compiles for `fused`: chunks of 16 tokens, products of four rows, vectors along V.

Per head the K-first state `[K, V]` stays in the second-level cache. A chunk reads it for its outputs, then advances
it. Products are tiles (`tiles`) that sum over m in order, so a number has the same bits whatever its neighbours are.
"""

from __future__ import annotations

import numba
import numpy as np

from cula.ops.common.loops import FLAT, address_of, array_at, compiled, copy_rows, prefetch_rows
from cula.ops.lightning.chunk.eager.tiles import ROWS, TILE, add_tile, decay_tile

#: Tokens of a chunk.
CHUNK = 16
#: Rows of a state that all outputs of a chunk take before the next: they stay in the first-level cache.
BLOCK = 32
#: V is cut into parts of whole multiples of this, so that a column keeps its place in a vector.
COLUMNS = 64

# Where `sizes` holds what. Strides of q, k, v: from sequence to sequence, from token to token, from head to head.
H, HV, K, V, N, TOKENS, PACKED, SPLITS, CAPTURE = range(9)
Q_STRIDES, K_STRIDES, V_STRIDES = 9, 12, 15
COUNT = 18


@compiled(reassociate=False)
def add_products(out, out_at, out_step, a, a_at, a_row, a_col, b, b_at, b_step, count, columns):
    """out[r, :] += sum over m of a[r, m] * b[m, :], r in 0..3, m in 0..count-1; steps in elements."""
    item, wide = out.itemsize, TILE // out.itemsize
    a_from, zero = address_of(a) + a_at * item, out.dtype.type(0.0)
    whole = columns // wide * wide
    for c in range(0, whole, wide):
        add_tile(
            out, address_of(out) + (out_at + c) * item, out_step, a_from, a_row, a_col,
            address_of(b) + (b_at + c) * item, b_step, count, zero, zero,
        )  # fmt: skip
    for r in range(ROWS if whole < columns else 0):
        for m in range(count):
            add_row(out, out_at + r * out_step, a[a_at + r * a_row + m * a_col], b, b_at + m * b_step, whole, columns)


@compiled(reassociate=False)
def decay_and_add(out, out_at, out_step, a, a_at, a_row, a_col, b, b_at, b_step, count, columns, decay, rest):
    """out[r, :] = out[r, :] * (decay + rest) + the sum of `add_products`."""
    item, wide = out.itemsize, TILE // out.itemsize
    a_from = address_of(a) + a_at * item
    whole = columns // wide * wide
    for c in range(0, whole, wide):
        decay_tile(
            out, address_of(out) + (out_at + c) * item, out_step, a_from, a_row, a_col,
            address_of(b) + (b_at + c) * item, b_step, count, decay, rest,
        )  # fmt: skip
    for r in range(ROWS if whole < columns else 0):
        for c in range(whole, columns):
            place = np.uint64(out_at + r * out_step + c)
            out[place] = out[place] * decay + out[place] * rest
        for m in range(count):
            add_row(out, out_at + r * out_step, a[a_at + r * a_row + m * a_col], b, b_at + m * b_step, whole, columns)


@compiled(reassociate=False)
def add_row(out, out_at, factor, b, b_at, low, high):
    """out[low..high] += factor * b[low..high]."""
    o, x = np.uint64(out_at), np.uint64(b_at)
    for c in range(low, high):
        out[o + np.uint64(c)] += factor * b[x + np.uint64(c)]


@compiled()
def inner_products(q, q_at, k, k_at, width, A, A_at):
    """A[r, m] = q[r, :] . k[m, :], r and m in 0..3, of rows that lie one after the other; A's rows are CHUNK apart."""
    zero = q.dtype.type(0.0)
    step, q0, k0 = np.uint64(width), np.uint64(q_at), np.uint64(k_at)
    q1, q2, q3 = q0 + step, q0 + step + step, q0 + step + step + step
    k1, k2, k3 = k0 + step, k0 + step + step, k0 + step + step + step
    a00, a01, a02, a03, a10, a11, a12, a13 = zero, zero, zero, zero, zero, zero, zero, zero
    a20, a21, a22, a23, a30, a31, a32, a33 = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(width):
        c = np.uint64(i)
        x0, x1, x2, x3 = q[q0 + c], q[q1 + c], q[q2 + c], q[q3 + c]
        y0, y1, y2, y3 = k[k0 + c], k[k1 + c], k[k2 + c], k[k3 + c]
        a00 += x0 * y0
        a01 += x0 * y1
        a02 += x0 * y2
        a03 += x0 * y3
        a10 += x1 * y0
        a11 += x1 * y1
        a12 += x1 * y2
        a13 += x1 * y3
        a20 += x2 * y0
        a21 += x2 * y1
        a22 += x2 * y2
        a23 += x2 * y3
        a30 += x3 * y0
        a31 += x3 * y1
        a32 += x3 * y2
        a33 += x3 * y3
    A[A_at], A[A_at + 1], A[A_at + 2], A[A_at + 3] = a00, a01, a02, a03
    A_at += CHUNK
    A[A_at], A[A_at + 1], A[A_at + 2], A[A_at + 3] = a10, a11, a12, a13
    A_at += CHUNK
    A[A_at], A[A_at + 1], A[A_at + 2], A[A_at + 3] = a20, a21, a22, a23
    A_at += CHUNK
    A[A_at], A[A_at + 1], A[A_at + 2], A[A_at + 3] = a30, a31, a32, a33


@compiled(reassociate=False)
def load_rows(source, at, step, count, width, target, padded):
    """Copy `count` rows of `width` numbers, `step` apart, to rows of `padded`; zeros up to CHUNK rows."""
    for i in range(count):
        s, t = np.uint64(at + i * step), np.uint64(i * padded)
        for c in range(width):
            target[t + np.uint64(c)] = source[s + np.uint64(c)]
    for c in range(count * padded, CHUNK * padded):
        target[c] = 0.0


@compiled()
def ask_ahead(x, at, step, count, width):
    """Ask for `count` rows of `width` numbers, `step` apart: rows of a head lie pages apart, which hides them."""
    for i in range(count):
        prefetch_rows(address_of(x) + (at + i * step) * x.itemsize, width * x.itemsize)


@compiled(reassociate=False)
def scale_rows(rows, count, width, scale, powers, first, step, target):
    """target[i, :] = scale * powers[first + i * step] * rows[i, :]."""
    for i in range(count):
        a, at = scale * powers[first + i * step], np.uint64(i * width)
        for c in range(width):
            target[at + np.uint64(c)] = a * rows[at + np.uint64(c)]


@compiled(reassociate=False)
def advance(state, at, step, keys, scaled, values, tokens, width, columns, powers):
    """The state, K rows of `columns` numbers `step` apart, over the first `tokens` rows of keys and values.

    powers: exp(-s m), m in 0..CHUNK, and behind them what rounding took from them.
    """
    scale_rows(keys, tokens, width, state.dtype.type(1.0), powers, tokens - 1, -1, scaled)
    for r in range(0, width, ROWS):
        decay_and_add(
            state, at + r * step, step, scaled, r, 1, width, values, 0, columns, tokens, columns, powers[tokens],
            powers[CHUNK + 1 + tokens],
        )  # fmt: skip


@compiled(reassociate=False)
def attend(queries, keys, count, width, scale, powers, A):
    """A[i, j] = scale (q_i . k_j) exp(-s (i - j)) for j <= i, zeros above, in whole blocks of rows."""
    for i in range(0, count, ROWS):
        for j in range(0, i + ROWS, ROWS):
            inner_products(queries, i * width, keys, j * width, width, A, i * CHUNK + j)
        for r in range(i, i + ROWS):
            for j in range(i + ROWS):
                A[r * CHUNK + j] = A[r * CHUNK + j] * (scale * powers[r - j]) if j <= r else 0.0


@compiled(parallel=True)
def walk(real, scale, sizes, addresses):
    """Every (sequence, head, part of V) through its chunks.

    real: an empty array of the compute type. addresses: of q, k, v, powers `[HV, 2 (CHUNK + 1)]`, state
    `[N, HV, K padded to 4, V]`, out `[tokens, HV, V]`, captured `[rows, HV, K padded, V]` (real), bounds, and for
    each token the row of `captured` that gets the state after it, or -1 (int64). What is not there is never touched.
    """
    q, k, v = (
        array_at(real, addresses[0], FLAT), array_at(real, addresses[1], FLAT), array_at(real, addresses[2], FLAT),
    )  # fmt: skip
    all_powers, state = array_at(real, addresses[3], FLAT), array_at(real, addresses[4], FLAT)
    out, captured = array_at(real, addresses[5], FLAT), array_at(real, addresses[6], FLAT)
    bounds, rows = array_at(sizes, addresses[7], FLAT), array_at(sizes, addresses[8], FLAT)
    heads, splits, full = sizes[HV], sizes[SPLITS], sizes[V]
    width = -(-sizes[K] // ROWS) * ROWS
    groups, factor = -(-full // COLUMNS), real.dtype.type(scale)
    for task in numba.prange(sizes[N] * heads * splits):
        n = task % sizes[N]  # neighbours in n, so that a thread's share holds long and short sequences
        head = task // sizes[N] % heads
        part = task // (sizes[N] * heads)
        first, total = n * sizes[TOKENS], sizes[TOKENS]
        if sizes[PACKED]:
            first, total = bounds[n], bounds[n + 1] - bounds[n]
        low = COLUMNS * (groups * part // splits)
        columns = min(full, COLUMNS * (groups * (part + 1) // splits)) - low
        group = head // (heads // sizes[H])
        powers = array_at(real, addresses[3] + head * 2 * (CHUNK + 1) * all_powers.itemsize, 2 * (CHUNK + 1))
        queries, keys = np.zeros(CHUNK * width, real.dtype), np.zeros(CHUNK * width, real.dtype)
        scaled = np.zeros(CHUNK * width, real.dtype)
        values, o = np.zeros(CHUNK * columns, real.dtype), np.zeros(CHUNK * columns, real.dtype)
        A = np.zeros(CHUNK * CHUNK, real.dtype)
        state_at = (n * heads + head) * width * full + low
        for start in range(0, total, CHUNK):
            count, ahead = min(CHUNK, total - start), max(0, min(CHUNK, total - start - CHUNK))
            token = first + start if sizes[PACKED] else start
            row = 0 if sizes[PACKED] else n
            at = row * sizes[Q_STRIDES] + token * sizes[Q_STRIDES + 1] + group * sizes[Q_STRIDES + 2]
            load_rows(q, at, sizes[Q_STRIDES + 1], count, sizes[K], queries, width)
            ask_ahead(q, at + CHUNK * sizes[Q_STRIDES + 1], sizes[Q_STRIDES + 1], ahead, width)
            at = row * sizes[K_STRIDES] + token * sizes[K_STRIDES + 1] + group * sizes[K_STRIDES + 2]
            load_rows(k, at, sizes[K_STRIDES + 1], count, sizes[K], keys, width)
            ask_ahead(k, at + CHUNK * sizes[K_STRIDES + 1], sizes[K_STRIDES + 1], ahead, width)
            at = row * sizes[V_STRIDES] + token * sizes[V_STRIDES + 1] + head * sizes[V_STRIDES + 2] + low
            ask_ahead(v, at + CHUNK * sizes[V_STRIDES + 1], sizes[V_STRIDES + 1], ahead, columns)
            load_rows(v, at, 0, 0, columns, values, columns)
            load_rows(v, at, 0, 0, columns, o, columns)
            scale_rows(queries, CHUNK, width, factor, powers, 1, 1, scaled)
            for r in range(0, sizes[K], BLOCK):
                block = min(BLOCK, sizes[K] - r)
                for i in range(0, count, ROWS):
                    add_products(
                        o, i * columns, columns, scaled, i * width + r, width, 1, state, state_at + r * full, full,
                        block, columns,
                    )  # fmt: skip
            for i in range(count):  # values row by row: a state after i + 1 tokens has seen no later one
                wanted = rows[first + start + i] if sizes[CAPTURE] else -1
                source = np.uint64(at + i * sizes[V_STRIDES + 1])
                for c in range(columns):
                    values[i * columns + c] = v[source + np.uint64(c)]
                last = i + 1 == count
                if not last and wanted < 0:
                    continue
                place = (wanted * heads + head) * width * full + low
                address, to = address_of(state), state_at
                if not last:
                    copy_rows(state, state_at, full, captured, place, full, width, columns)
                    address, to = address_of(captured), place
                advance(array_at(real, address, FLAT), to, full, keys, scaled, values, i + 1, width, columns, powers)
                if last and wanted >= 0:
                    copy_rows(state, state_at, full, captured, place, full, width, columns)
            attend(queries, keys, count, width, factor, powers, A)
            for i in range(0, count, ROWS):
                add_products(
                    o, i * columns, columns, A, i * CHUNK, CHUNK, 1, values, 0, columns, min(i + ROWS, count), columns
                )
            for i in range(count):
                target = np.uint64(((first + start + i) * heads + head) * full + low)
                for c in range(columns):
                    out[target + np.uint64(c)] = o[i * columns + c]
