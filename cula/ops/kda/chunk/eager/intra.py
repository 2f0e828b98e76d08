"""Products inside a chunk, exact for every gate: no exponent is ever positive, none is a difference.

The decay between tokens j < i is split at a midpoint: rows of a right half carry P, the product of the decays
from the midpoint up to the row, columns of the left half carry R, the product from behind the column up to the
midpoint. Halves of 1, 2, 4, ... C/2 tokens cover every pair once. P and R of twice the size come from those of
half the size by one multiplication by a block's total, all factors are <= 1, and neither looks at a later gate.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Left and right halves `[n, C/2s, s, D]` of the blocks of 2s rows of `x` `[n, C, D]`: views."""
    blocks = x.unflatten(1, (-1, 2, s))
    return blocks[:, :, 0], blocks[:, :, 1]


def blocks(A: Tensor, s: int, row: int, col: int) -> Tensor:
    """`[n, C/2s, s, s]` view of `A` `[n, C, C]`: in each diagonal block of 2s, the quarter (row, col)."""
    n, C, _ = A.shape
    offset = A.storage_offset() + s * (row * C + col)
    return A.as_strided((n, C // (2 * s), s, s), (C * C, 2 * s * (C + 1), C, 1), offset)


def grow(P: Tensor, R: Tensor, s: int) -> None:
    """From the factors of blocks of s rows to those of 2s, in place."""
    p_left, p_right = halves(P, s)
    r_left, _ = halves(R, s)
    r_left.mul_(p_right[:, :, -1:])
    p_right.mul_(p_left[:, :, -1:])


def operands(q: Tensor, k: Tensor, P: Tensor, R: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """(rows `[n*m, 2s, K]`: decayed q above decayed k of the right halves; cols `[n*m, s, K]`: of the left)."""
    n, C, K = q.shape
    m = C // (2 * s)
    p_right = halves(P, s)[1]
    rows = torch.empty(n, m, 2 * s, K, dtype=q.dtype, device=q.device)
    torch.mul(halves(q, s)[1], p_right, out=rows[:, :, :s])
    torch.mul(halves(k, s)[1], p_right, out=rows[:, :, s:])
    cols = halves(k, s)[0] * halves(R, s)[0]
    return rows.view(n * m, 2 * s, K), cols.view(n * m, s, K)


def products(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Aqk (lower, with diagonal), Akk (strictly lower) `[n, C, C]`, and P, R `[n, C, K]` of the whole chunk.

    q (scaled) and k `[n, C, K]`; decay = exp(g). P_i = prod(decay[..i]), R_j = prod(decay[j+1..]).
    """
    n, C, K = q.shape
    P, R = decay.clone(), torch.ones_like(decay)
    Aqk, Akk = q.new_zeros(n, C, C), q.new_zeros(n, C, C)
    Aqk.diagonal(0, 1, 2).copy_(torch.linalg.vecdot(q, k))
    s = 1
    while s < C:
        rows, cols = operands(q, k, P, R, s)
        A = torch.bmm(rows, cols.mT).view(n, C // (2 * s), 2, s, s)
        blocks(Aqk, s, 1, 0).copy_(A[:, :, 0])
        blocks(Akk, s, 1, 0).copy_(A[:, :, 1])
        grow(P, R, s)
        s *= 2
    return Aqk, Akk, P, R


def suffix_decay(g: Tensor) -> Tensor:
    """R `[n, C, K]` of `products` alone, by the same multiplications."""
    P, s = g.exp(), 1
    R = torch.ones_like(P)
    while s < g.shape[1]:
        grow(P, R, s)
        s *= 2
    return R


def inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular L `[n, C, C]`, from the inverses of diagonal blocks of half the size."""
    n, C, _ = L.shape
    A = torch.zeros_like(L)
    A.diagonal(0, 1, 2).fill_(1.0)
    s = 1
    while s < C:
        left, right = (blocks(A, s, i, i).reshape(-1, s, s) for i in (0, 1))
        low = torch.bmm(right, torch.bmm(blocks(L, s, 1, 0).reshape(-1, s, s), left))
        blocks(A, s, 1, 0).copy_(low.neg_().view(n, -1, s, s))
        s *= 2
    return A


def products_backward(
    q: Tensor, k: Tensor, decay: Tensor, dAqk: Tensor, dAkk: Tensor, dq: Tensor, dk: Tensor, dP: Tensor, dR: Tensor
) -> Tensor:
    """Add the gradients through Aqk and Akk to dq and dk, and return dg `[n, C, K]`.

    dP, dR: gradients of log P and log R of the whole chunk (overwritten). Every gate's gradient is a sum of terms
    that its decay really scales: nothing large cancels.
    """
    n, C, K = q.shape
    P, R = decay.clone(), torch.ones_like(decay)
    diagonal = dAqk.diagonal(0, 1, 2).unsqueeze(-1)
    dq.addcmul_(diagonal, k)
    dk.addcmul_(diagonal, q)
    terms = []
    s = 1
    while s < C:
        m = C // (2 * s)
        rows, cols = operands(q, k, P, R, s)
        D = torch.stack((blocks(dAqk, s, 1, 0), blocks(dAkk, s, 1, 0)), 2).view(n * m, 2 * s, s)
        drows = torch.bmm(D, cols).view(n, m, 2, s, K)
        dcols = torch.bmm(D.mT, rows).view(n, m, s, K)
        p_right, r_left = halves(P, s)[1], halves(R, s)[0]
        halves(dq, s)[1].addcmul_(p_right, drows[:, :, 0])
        halves(dk, s)[1].addcmul_(p_right, drows[:, :, 1])
        halves(dk, s)[0].addcmul_(r_left, dcols)
        rows = rows.view(n, m, 2, s, K)
        row_term = (rows[:, :, 0] * drows[:, :, 0]).addcmul_(rows[:, :, 1], drows[:, :, 1])
        terms.append((row_term, cols.view(n, m, s, K).mul_(dcols)))
        grow(P, R, s)
        s *= 2
    while terms:
        s //= 2
        row_term, col_term = terms.pop()
        p_left, p_right = halves(dP, s)
        r_left, _ = halves(dR, s)
        from_rows, from_cols = p_right.sum(2), r_left.sum(2)
        p_left[:, :, -1].add_(from_rows)
        p_right[:, :, -1].add_(from_cols)
        p_right.add_(row_term)
        r_left.add_(col_term)
    return dP
