"""Products inside a chunk, exact for every gate: no exponent is ever positive, none is a difference.

The decay between tokens j < i is split at a midpoint: rows of a right half carry P, the product of the decays
from the midpoint up to the row, columns of the left half carry R, the product from behind the column up to the
midpoint. Halves of 1, 2, 4, ... C/2 tokens cover every pair once. P and R of twice the size come from those of
half the size by one multiplication by a block's total, all factors are <= 1, and neither looks at a later gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cula.ops.common.exact_matmul import bmm, sum_last
from cula.ops.common.workspace import Workspace

Tensor = torch.Tensor


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Left and right halves `[n, C/2s, s, D]` of the blocks of 2s rows of `x` `[n, C, D]`: views."""
    blocks = x.view(x.shape[0], -1, 2, s, x.shape[2])
    return blocks[:, :, 0], blocks[:, :, 1]


def blocks(A: Tensor, s: int, row: int, col: int) -> Tensor:
    """`[n, C/2s, s, s]` view of `A` `[n, C, C]`: in each diagonal block of 2s, the quarter (row, col)."""
    n, C, _ = A.shape
    offset = A.storage_offset() + s * (row * C + col)
    return A.as_strided((n, C // (2 * s), s, s), (C * C, 2 * s * (C + 1), C, 1), offset)


def sizes(C: int) -> list[int]:
    """The half sizes 1, 2, 4, ... C/2."""
    return [1 << i for i in range(C.bit_length() - 1)]


@dataclass(frozen=True)
class Level:
    """All views that one half size needs, over the workspace of a call: made once, used by every slab.

    Of tensors `[n, C, K]`: `_l` and `_r` are their left and right halves `[n, m, s, K]`, m = C / 2s; `p_total`,
    `r_total` the last rows of P's halves. rows: decayed q above decayed k of the right halves, cols: decayed k of
    the left, flat for the product `level` `[n*m, 2s, s]`.
    """

    q_r: Tensor
    k_l: Tensor
    k_r: Tensor
    p_r: Tensor
    r_l: Tensor
    left_total: Tensor
    right_total: Tensor
    rows: tuple[Tensor, Tensor, Tensor]  # q's, k's, both flat
    cols: tuple[Tensor, Tensor]  # and flat
    level: tuple[Tensor, Tensor, Tensor]  # q's, k's, both flat
    targets: tuple[Tensor, Tensor]  # blocks of Aqk and Akk
    lower: tuple[Tensor, Tensor]  # blocks of L and of A
    diagonal: tuple[Tensor, Tensor]  # A's diagonal blocks

    def load(self) -> None:
        """Fill rows and cols from q, k, P and R."""
        torch.mul(self.q_r, self.p_r, out=self.rows[0])
        torch.mul(self.k_r, self.p_r, out=self.rows[1])
        torch.mul(self.k_l, self.r_l, out=self.cols[0])

    def grow(self) -> None:
        """From the factors of blocks of s rows to those of 2s, in place."""
        self.r_l.mul_(self.right_total)
        self.p_r.mul_(self.left_total)


class Intra:
    """The intra-chunk products of slabs of n chunk-heads, over the buffers q, k, decay, P, R, ... of a workspace."""

    def __init__(self, ws: Workspace, n: int, C: int, K: int) -> None:
        self.ws, self.shape = ws, (n, C, K)
        self.q, self.k, self.decay, self.P, self.R = (ws(name, n, C, K) for name in ("q", "k", "decay", "P", "R"))
        self.Aqk, self.Akk, self.A = (ws.zeroed(name, n, C, C) for name in ("Aqk", "Akk", "A"))
        self.A.diagonal(0, 1, 2).fill_(1.0)
        self.L = ws("L", n, C, C)
        self.aqk_diagonal = self.Aqk.diagonal(0, 1, 2)
        self.levels = [self._level(s) for s in sizes(C)]

    def _level(self, s: int) -> Level:
        n, C, K = self.shape
        m = C // (2 * s)
        rows, cols = self.ws("rows", n, m, 2 * s, K), self.ws("cols", n, m, s, K)
        level = self.ws("level", n, m, 2, s, s)
        (p_l, p_r), (r_l, _), (k_l, k_r) = (halves(x, s) for x in (self.P, self.R, self.k))
        return Level(
            q_r=halves(self.q, s)[1],
            k_l=k_l,
            k_r=k_r,
            p_r=p_r,
            r_l=r_l,
            left_total=p_l[:, :, -1:],
            right_total=p_r[:, :, -1:],
            rows=(rows[:, :, :s], rows[:, :, s:], rows.view(n * m, 2 * s, K)),
            cols=(cols, cols.view(n * m, s, K)),
            level=(level[:, :, 0], level[:, :, 1], level.view(n * m, 2 * s, s)),
            targets=(blocks(self.Aqk, s, 1, 0), blocks(self.Akk, s, 1, 0)),
            lower=(blocks(self.L, s, 1, 0), blocks(self.A, s, 1, 0)),
            diagonal=(blocks(self.A, s, 0, 0), blocks(self.A, s, 1, 1)),
        )

    def start(self) -> None:
        """P and R of blocks of one row: the decay itself, and 1."""
        self.P.copy_(self.decay)
        self.R.fill_(1.0)

    def products(self) -> None:
        """Fill Aqk (lower, with diagonal), Akk (strictly lower), and P, R of the whole chunk, from q, k, decay.

        P_i = prod(decay[..i]), R_j = prod(decay[j+1..]); q is scaled.
        """
        self.start()
        self.aqk_diagonal.copy_(dot(self.ws, self.q, self.k))
        for level in self.levels:
            level.load()
            bmm(level.rows[2], level.cols[1].mT, level.level[2])
            level.targets[0].copy_(level.level[0])
            level.targets[1].copy_(level.level[1])
            level.grow()

    def inverse(self) -> None:
        """A = (I + L)^-1 of strictly lower L, from the inverses of diagonal blocks of half the size."""
        for s, level in zip(sizes(self.shape[1]), self.levels, strict=True):
            source, target = level.lower
            if s == 1:
                torch.neg(source, out=target)
                continue
            left, right = (x.reshape(-1, s, s) for x in level.diagonal)
            below = source.reshape(-1, s, s)
            low = bmm(right, bmm(below, left, torch.empty_like(below)), torch.empty_like(below))
            torch.neg(low.view(target.shape), out=target)

    def backward(self, dA: tuple[Tensor, Tensor], dq: Tensor, dk: Tensor, dP: Tensor, dR: Tensor) -> Tensor:
        """Add the gradients through dA = (dAqk, dAkk) to dq and dk, and return dg `[n, C, K]` (dP's memory).

        dP, dR: gradients of log P and log R of the whole chunk. Every gate's gradient is a sum of terms that its
        decay really scales: nothing large cancels.
        """
        diagonal = dA[0].diagonal(0, 1, 2).unsqueeze(-1)
        dq.addcmul_(diagonal, self.k)
        dk.addcmul_(diagonal, self.q)
        self.start()
        terms = [self._level_backward(s, level, dA, dq, dk) for s, level in self._pairs()]
        for (s, _), (row_term, col_term) in zip(reversed(self._pairs()), reversed(terms), strict=True):
            p_l, p_r = halves(dP, s)
            r_l, _ = halves(dR, s)
            from_rows, from_cols = p_r.sum(2), r_l.sum(2)
            p_l[:, :, -1].add_(from_rows)
            p_r[:, :, -1].add_(from_cols)
            p_r.add_(row_term)
            r_l.add_(col_term)
        return dP

    def _pairs(self) -> list[tuple[int, Level]]:
        return list(zip(sizes(self.shape[1]), self.levels, strict=True))

    def _level_backward(
        self, s: int, level: Level, dA: tuple[Tensor, Tensor], dq: Tensor, dk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One half size: add to dq and dk, and return the gradients of log P (right halves) and log R (left)."""
        n, C, K = self.shape
        m = C // (2 * s)
        ws = self.ws
        level.load()
        level.level[0].copy_(blocks(dA[0], s, 1, 0))
        level.level[1].copy_(blocks(dA[1], s, 1, 0))
        drows, dcols = ws("drows", n * m, 2 * s, K), ws("dcols", n * m, s, K)
        torch.bmm(level.level[2], level.cols[1], out=drows)
        torch.bmm(level.level[2].mT, level.rows[2], out=dcols)
        drows, dcols = drows.view(n, m, 2, s, K), dcols.view(n, m, s, K)
        halves(dq, s)[1].addcmul_(level.p_r, drows[:, :, 0])
        dk_l, dk_r = halves(dk, s)
        dk_r.addcmul_(level.p_r, drows[:, :, 1])
        dk_l.addcmul_(level.r_l, dcols)
        both = drows.mul_(level.rows[2].view(n, m, 2, s, K))
        row_term = torch.add(both[:, :, 0], both[:, :, 1], out=ws(f"row_term{s}", n, m, s, K))
        col_term = torch.mul(level.cols[0], dcols, out=ws(f"col_term{s}", n, m, s, K))
        level.grow()
        return row_term, col_term


def dot(ws: Workspace, x: Tensor, y: Tensor) -> Tensor:
    """Sum of x * y `[n, rows, D]` over the last dimension."""
    return sum_last(torch.mul(x, y, out=ws("dot", *x.shape)))


def suffix_decay(g: Tensor) -> Tensor:
    """R `[n, C, K]` of `Intra.products` alone, by the same multiplications."""
    P = g.exp()
    R = torch.ones_like(P)
    for s in sizes(g.shape[1]):
        p_l, p_r = halves(P, s)
        halves(R, s)[0].mul_(p_r[:, :, -1:])
        p_r.mul_(p_l[:, :, -1:])
    return R
