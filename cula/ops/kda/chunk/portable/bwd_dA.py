"""bwd_dA (Triton): the gradients that need no K, of one chunk and value head, after both walks.

From do and the walks' e and y, with v_new = beta e:

    dv = beta y    dbeta = <e, y>    dAqk = tril(do v_new^T)    dAkk = -stril(dv v_new^T)

It writes what `bwd_dqk` multiplies by, the norms' factors included: A is Dq = dAqk nq nk below its diagonal and its
transpose above, D = (dAkk nk nk) + its transpose, and where the gate is BOUNDED their blocks of 16 rows again, each
half for itself; new gets v_new, y becomes -dv. Elsewhere the first program also writes the masks of the pairs, as
numbers: there they are loaded, which costs no registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.gate import sigmoid
from cula.ops.kda.chunk.portable.tiles import find_tile

#: Masks `[MASKS, BT, BT]`: the pairs parted at each level.
MASKS = 6


@triton.jit
def write_masks(masks, BT: tl.constexpr):
    """Fill the table of masks with 1 and 0."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    for level in range(0, 6):
        pairs = ((i ^ j) >> level) == 1
        tl.store(masks + level * BT * BT + i * BT + j, pairs.to(masks.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "NT", "sbb"])
def bwd_dA_kernel(
    do, e, y, beta, beta_in, nq, nk, table, new, dv, dbeta, A, D, blocks, masks,
    sdb, sdt, sdh, sdv, sbb, sbt, sbh, T, NT,
    HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module; dv `[B, T, HV, V]`, dbeta `[B, T, HV]`, a tile's A, D `[BT, BT]`, blocks `[BT, 64]`."""
    pid = tl.program_id(0).to(tl.int64)
    hv = (pid % HV).to(tl.int32)
    batch, first, count, owner = find_tile(table, (pid // HV).to(tl.int32), T, NT, BT, PACKED)
    if not BOUNDED:  # noqa: SIM102 (a constant: the other is none)
        if tl.program_id(0) == 0:
            write_masks(masks, BT)
    r = tl.arange(0, BT)
    i = r[:, None]
    j = r[None, :]
    live = r < count
    token = first.to(tl.int64)
    row = (batch.to(tl.int64) * T + token) * HV + hv
    dv += row * V
    dbeta += row
    out_v = i * HV * V
    if PACKED:
        spare = owner < 0  # rows after the last boundary: their gradients are zeros
        if spare:
            for v0 in range(0, V, BV):
                vv = v0 + tl.arange(0, BV)[None, :]
                tl.store(dv + out_v + vv, tl.zeros((BT, BV), dv.dtype.element_ty), live[:, None] & (vv < V))
            tl.store(dbeta + r * HV, tl.zeros((BT,), dbeta.dtype.element_ty), live)
            return
    dt = e.dtype.element_ty
    bb = tl.load(beta_in + pid * BT + r)
    do += batch.to(tl.int64) * sdb + token * sdt + hv * sdh
    e += pid * BT * VP
    y += pid * BT * VP
    new += pid * BT * VP
    Pq = tl.zeros((BT, BT), tl.float32)
    Pk = tl.zeros((BT, BT), tl.float32)
    db = tl.zeros((BT,), tl.float32)
    for v0 in range(0, VP, BV):
        vv = v0 + tl.arange(0, BV)
        some = live[:, None]
        if V % BV != 0:
            some = some & (vv < V)[None, :]
        bo = tl.load(do + i * sdt + vv[None, :] * sdv, mask=some, other=0.0).to(dt)
        be = tl.load(e + i * VP + vv[None, :]).to(tl.float32)
        by = tl.load(y + i * VP + vv[None, :]).to(tl.float32)
        db += tl.sum(be * by, 1)
        by *= bb[:, None]
        be *= bb[:, None]
        tl.store(new + i * VP + vv[None, :], be.to(dt))
        tl.store(y + i * VP + vv[None, :], (-by).to(dt))
        tl.store(dv + out_v + vv[None, :], by.to(dv.dtype.element_ty), mask=some)
        columns = tl.trans(be.to(dt))
        Pq = tl.dot(bo, columns, Pq, input_precision=PRECISION)
        Pk = tl.dot(by.to(dt), columns, Pk, input_precision=PRECISION)
    if SIGMOID:
        logit = tl.load(beta + batch.to(tl.int64) * sbb + (token + r) * sbt + hv * sbh, mask=live, other=0.0).to(
            tl.float32
        )
        db *= sigmoid(logit) * sigmoid(-logit)
    if DOUBLE:
        db *= 2.0
    tl.store(dbeta + r * HV, db.to(dbeta.dtype.element_ty), mask=live)
    row_q = tl.load(nq + pid * BT + r)[:, None]
    row_k = tl.load(nk + pid * BT + r)[:, None]
    col_k = tl.load(nk + pid * BT + r)[None, :]
    Pq = tl.where(i >= j, Pq * row_q * col_k, 0.0).to(dt)
    Pk = tl.where(i > j, -Pk * row_k * col_k, 0.0).to(dt)
    Pq = tl.where(i >= j, Pq, tl.trans(Pq))
    Pk += tl.trans(Pk)
    at = pid * BT * BT + i * BT + j
    tl.store(A + at, Pq)
    tl.store(D + at, Pk)
    if BOUNDED:
        blocks += pid * BT * 64 + i * 64 + j % 16
        own = i // 16 == j // 16
        tl.store(blocks, tl.where(i >= j, Pq, 0.0).to(dt), mask=own)
        tl.store(blocks + 16, tl.where(i <= j, Pq, 0.0).to(dt), mask=own)
        tl.store(blocks + 32, tl.where(i > j, Pk, 0.0).to(dt), mask=own)
        tl.store(blocks + 48, tl.where(i < j, Pk, 0.0).to(dt), mask=own)
