"""tiles (Triton): which tokens a program works on.

A tile is one chunk of one sequence. Fixed batches find theirs by arithmetic; packed sequences read a table
`[tiles, 4]` int32 = (first token, tokens, sequence, chunk), sequence -1 for tiles that only hold rows after the last
boundary, and a table `[N, 5]` = (first token, tokens, first tile, batch row, sequence), which `tiles_kernel` makes on
the device, so that nothing depends on lengths that only the device knows. Segments of sequences are such rows too: the
last column is then -1 for all but a sequence's last.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Sequences that one step of the search looks at, and tiles of one program.
BLOCK_N = 64
BLOCK_TILES = 64
#: Columns of the table of sequences.
COLUMNS = tl.constexpr(5)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["stride", "N", "T", "tiles"])
def tiles_kernel(
    cu_seqlens, table, sequences, stride, N, T, tiles, BT: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr
):
    """Fill both tables; every boundary is clamped between its predecessor and T."""
    tile = tl.program_id(0) * BI + tl.arange(0, BI)
    owner = tl.full((BI,), -1, tl.int32)
    start = tl.zeros((BI,), tl.int32)
    count = tl.zeros((BI,), tl.int32)
    chunk = tl.zeros((BI,), tl.int32)
    base = tl.minimum(tl.maximum(tl.load(cu_seqlens).to(tl.int32), 0), T)
    end, used = base, 0
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        raw = tl.load(cu_seqlens + (n + 1).to(tl.int64) * stride, mask=n < N, other=0)
        raw = tl.minimum(raw, T).to(tl.int32)
        stop = tl.maximum(tl.associative_scan(raw, 0, _larger), end)
        before = tl.load(cu_seqlens + n.to(tl.int64) * stride, mask=n < N, other=0)
        before = tl.where(tl.arange(0, BN) == 0, end, tl.minimum(before, T).to(tl.int32))
        first = tl.maximum(tl.associative_scan(before, 0, _larger), end)
        length = tl.where(n < N, stop - first, 0)
        chunks = (length + BT - 1) // BT
        last = used + tl.cumsum(chunks, 0)
        row = last - chunks
        if tl.program_id(0) == 0:
            tl.store(sequences + n * COLUMNS, first, mask=n < N)
            tl.store(sequences + n * COLUMNS + 1, length, mask=n < N)
            tl.store(sequences + n * COLUMNS + 2, row, mask=n < N)
            tl.store(sequences + n * COLUMNS + 3, tl.zeros((BN,), tl.int32), mask=n < N)
            tl.store(sequences + n * COLUMNS + 4, n, mask=n < N)
        mine = (tile[:, None] >= row[None, :]) & (tile[:, None] < last[None, :])
        at = tile[:, None] - row[None, :]
        owner = tl.maximum(owner, tl.max(tl.where(mine, n[None, :], -1), 1))
        start += tl.sum(tl.where(mine, first[None, :] + at * BT, 0), 1)
        count += tl.sum(tl.where(mine, tl.minimum(length[None, :] - at * BT, BT), 0), 1)
        chunk += tl.sum(tl.where(mine, at, 0), 1)
        end = tl.maximum(end, tl.max(tl.where(n < N, stop, 0), 0))
        used += tl.sum(chunks, 0)
    spare = owner < 0
    begin = tl.minimum(end + (tile - used) * BT, T)
    start = tl.where(spare, begin, start)
    count = tl.where(spare, tl.minimum(T - begin, BT), count)
    keep = tile < tiles
    tl.store(table + tile * 4, start, mask=keep)
    tl.store(table + tile * 4 + 1, count, mask=keep)
    tl.store(table + tile * 4 + 2, owner, mask=keep)
    tl.store(table + tile * 4 + 3, chunk, mask=keep)


@triton.jit
def find_tile(table, tile, T, NT, BT: tl.constexpr, PACKED: tl.constexpr):
    """(batch row, first token, tokens, sequence) of a tile."""
    if PACKED:
        first = tl.load(table + tile * 4)
        count = tl.load(table + tile * 4 + 1)
        owner = tl.load(table + tile * 4 + 2)
        batch = 0
    else:
        batch = tile // NT
        first = (tile % NT) * BT
        count = tl.minimum(T - first, BT)
        owner = batch
    return batch, first, count, owner


@triton.jit
def find_sequence(sequences, n, T, NT, TABLE: tl.constexpr):
    """(batch row, first token, tokens, first tile, sequence whose end it is or -1) of sequence or segment n."""
    if TABLE:
        row = sequences + n * COLUMNS
        first = tl.load(row)
        length = tl.load(row + 1)
        tile = tl.load(row + 2)
        batch = tl.load(row + 3)
        owner = tl.load(row + 4)
    else:
        batch = n
        first = 0
        length = T
        tile = n * NT
        owner = n
    return batch, first, length, tile, owner
