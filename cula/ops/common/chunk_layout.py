"""Tokens to chunks and back: the chunk-major layout that every part of the eager path works in.

Sequences are cut into chunks of C tokens, each from its own start. A group of sequences, longest first, is
walked in slabs of a few steps; step c holds chunk c of every sequence that is long enough, so the active ones
are always a prefix. A slab's tensors are `[n, C, D]` with n = chunks * heads, contiguous and zero-padded, small
enough to stay in the cache: memory beyond inputs and outputs does not grow with T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from cula.ops.common.problem import SequenceProblem

Tensor = torch.Tensor

#: Elements of one [n, C, K] tensor of a slab: 16 chunks of 64 x 128, measured best on two cores with 1 MiB of L2.
SLAB_ELEMENTS = 32 * 64 * 128


def padded(size: int) -> int:
    """Head dimensions are padded to a multiple of 4, so every matrix starts on a 64-byte boundary."""
    return -(-size // 4) * 4


@dataclass(frozen=True)
class Slab:
    """Steps [first, last) of a group. active[i]: sequences still running at step first + i."""

    group: Group
    first: int
    last: int
    active: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Chunks of one head in this slab."""
        return sum(self.active)


@dataclass(frozen=True)
class Group:
    """Sequences that are walked together.

    ids: their numbers, longest first. starts, lengths: in tokens. uniform: a fixed batch or neighbours of equal
    length, so that tokens are reached by views instead of index lists.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    uniform: bool
    fixed: bool
    chunk_size: int

    def slabs(self, steps_per_slab: int) -> Iterator[Slab]:
        """The group's slabs in order; none for empty sequences."""
        C = self.chunk_size
        counts = [-(-n // C) for n in self.lengths]
        for first in range(0, max(counts, default=0), steps_per_slab):
            last = min(first + steps_per_slab, counts[0])
            active = tuple(sum(n > c for n in counts) for c in range(first, last))
            yield Slab(self, first, last, active)


def groups(p: SequenceProblem, boundaries: tuple[int, ...] | None) -> list[Group]:
    """Cut the batch into groups of about a slab's worth of chunk-heads a step."""
    size = max(1, slab_chunk_heads(p) // p.HV)
    if boundaries is None:
        return [
            Group(ids, (0,) * len(ids), (p.T,) * len(ids), True, True, p.chunk_size)
            for ids in (tuple(range(i, min(i + size, p.N))) for i in range(0, p.N, size))
        ]
    order = sorted(range(p.N), key=lambda n: -p.lengths[n])
    result = []
    for i in range(0, p.N, size):
        ids = tuple(order[i : i + size])
        starts, lengths = tuple(boundaries[n] for n in ids), tuple(p.lengths[n] for n in ids)
        neighbours = all(b == a + 1 for a, b in pairwise(ids)) and len(set(lengths)) == 1
        result.append(Group(ids, starts, lengths, neighbours, False, p.chunk_size))
    return result


def steps_per_slab(p: SequenceProblem, group: Group) -> int:
    """Steps that fill a slab."""
    return max(1, slab_chunk_heads(p) // (p.HV * max(1, len(group.ids))))


def slab_chunk_heads(p: SequenceProblem) -> int:
    """Chunk-heads that a slab should hold."""
    return max(1, 2 * SLAB_ELEMENTS // (p.chunk_size * (padded(p.K) + padded(p.V))))


def covers_all(p: SequenceProblem) -> bool:
    """Every token belongs to a sequence, so outputs need no zero fill."""
    return not p.packed or sum(p.lengths) == p.T


class SlabIndex:
    """Reads and writes token tensors `[B, T, heads, D]` of one slab."""

    def __init__(self, slab: Slab, device: torch.device) -> None:
        self.slab = slab
        self.group = slab.group
        self.C = slab.group.chunk_size
        self.device = device
        self.tail = self.group.lengths[0] - (slab.last - 1) * self.C  # tokens in the last step if uniform
        self.rows = self.places = self.pad = None
        if self.group.uniform:
            if self.tail < self.C:
                self.pad = torch.zeros(slab.last - slab.first, len(self.group.ids), self.C, dtype=torch.bool)
                self.pad[-1, :, self.tail :] = True
                self.pad = self.pad.view(-1, 1, self.C, 1).to(device)
        else:
            self._index()

    def _index(self) -> None:
        C, steps = self.C, range(self.slab.first, self.slab.last)
        starts = torch.tensor(
            [self.group.starts[r] + c * C for c, n in zip(steps, self.slab.active, strict=True) for r in range(n)]
        )
        left = torch.tensor(
            [self.group.lengths[r] - c * C for c, n in zip(steps, self.slab.active, strict=True) for r in range(n)]
        )
        offset = torch.arange(C)
        valid = offset < left[:, None]
        self.rows = (starts[:, None] + offset)[valid].to(self.device)
        chunk, row = valid.nonzero(as_tuple=True)
        self.places = (chunk.to(self.device), row.to(self.device))
        if not bool(valid.all()):
            self.pad = (~valid).view(-1, 1, C, 1).to(self.device)

    def _view(self, x: Tensor) -> Tensor:
        """Uniform groups: the tokens as `[sequences, length, heads, D]`."""
        first, count, length = self.group.ids[0], len(self.group.ids), self.group.lengths[0]
        if self.group.fixed:
            return x[first : first + count]
        start = self.group.starts[0]
        return x[0, start : start + count * length].unflatten(0, (count, length))

    def _pieces(self, tokens: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (tokens, chunks) of views that hold the same elements, `chunks` being `[steps, N, C, heads, D]`."""
        first, steps = self.slab.first, self.slab.last - self.slab.first
        full = steps if self.tail >= self.C else steps - 1
        if full:
            span = tokens[:, first * self.C : (first + full) * self.C].unflatten(1, (full, self.C))
            yield span.transpose(0, 1), chunks[:full]
        if full < steps:
            start = (first + full) * self.C
            yield tokens[:, start : start + self.tail], chunks[full, :, : self.tail]

    def gather(self, x: Tensor, out: Tensor, group: int = 1) -> Tensor:
        """Fill `out` `[n, C, Dp]` from `[B, T, heads, D]`, each head repeated `group` times, zero elsewhere."""
        heads, D = x.shape[2:]
        chunks, Dp = self.slab.chunks, out.shape[2]
        if self.pad is not None or Dp != D:
            out.zero_()
        view = out.view(chunks, heads, group, self.C, Dp).permute(0, 3, 1, 2, 4)[..., :D]
        if self.group.uniform:
            view = view.unflatten(0, (self.slab.last - self.slab.first, len(self.group.ids)))
            for tokens, part in self._pieces(self._view(x), view):
                part.copy_(tokens.unsqueeze(-2))
        else:
            rows = x[0].index_select(0, self.rows).to(out.dtype)
            view[self.places] = rows.unsqueeze(-2).expand(-1, -1, group, -1)
        return out

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """Write `x` `[n, C, Dp]` to the tokens of `out` `[B, T, heads, D]`."""
        heads, D = out.shape[2:]
        view = x.view(self.slab.chunks, heads, self.C, -1).transpose(1, 2)[..., :D]  # [chunks, C, heads, D]
        if self.group.uniform:
            view = view.unflatten(0, (self.slab.last - self.slab.first, len(self.group.ids)))
            for tokens, part in self._pieces(self._view(out), view):
                tokens.copy_(part)
        else:
            out[0].index_copy_(0, self.rows, view[self.places].to(out.dtype))

    def zero_padding(self, x: Tensor, heads: int) -> Tensor:
        """Set the rows of `x` `[n, C, D]` that hold no token to zero, in place."""
        if self.pad is not None:
            x.view(self.slab.chunks, heads, self.C, -1).masked_fill_(self.pad, 0.0)
        return x
