"""bwd_dhu (Triton): the gradient of the state, walked back through the chunks of a sequence.

One program per sequence, value head and BV columns of V; the transposed gradient dS `[BV, K]` stays in fp32
registers. Per chunk, last first, with the tiles of `intra` and do:

    dh <- dS    dv_new = Aqk^T do + kg dS    y = dv_new - M^T (beta dv_new)
    dS <- total dS + qg^T do - kb^T (beta y)

y is the gradient of v divided by beta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.tiles import find_sequence


@triton.jit(do_not_specialize=["T", "NT"])
def bwd_dhu_kernel(
    do, kb, qg, kg, Aqk, M, total, beta, sequences, dh, y, dht, dh0,
    sdb, sdt, sdh, sdv, stn, sth, stv, stk, s0n, s0h, s0v, s0k, T, NT,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, PACKED: tl.constexpr, HAS_DHT: tl.constexpr, HAS_DH0: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See the module."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    batch, first, length, tile, _ = find_sequence(sequences, n, T, NT, PACKED)
    kk = tl.arange(0, KP)
    vv = iv * BV + tl.arange(0, BV)
    r = tl.arange(0, BT)
    inside = (vv < V)[:, None] & (kk < K)[None, :]
    S = tl.zeros((BV, KP), tl.float32)
    if HAS_DHT:
        at = n.to(tl.int64) * stn + hv.to(tl.int64) * sth + vv[:, None].to(tl.int64) * stv + kk[None, :] * stk
        S = tl.load(dht + at, mask=inside, other=0.0).to(tl.float32)
    do += batch.to(tl.int64) * sdb + hv * sdh
    dt = kb.dtype.element_ty
    chunks = tl.cdiv(length, BT)
    next_beta = tl.zeros((BT,), tl.float32)
    next_decay = tl.zeros((KP,), tl.float32)
    if chunks > 0:
        last = (tile + chunks - 1).to(tl.int64) * HV + hv
        next_beta = tl.load(beta + last * BT + r)
        next_decay = tl.load(total + last * KP + kk)
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - step
        pid = (tile + c).to(tl.int64) * HV + hv
        token = (first + c * BT).to(tl.int64)
        some = (r < length - c * BT)[:, None]
        if V % BV != 0:
            some = some & (vv < V)[None, :]
        bo = tl.load(do + token * sdt + (r[:, None] * sdt + vv[None, :] * sdv), mask=some, other=0.0)
        bw = tl.load(kb + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bg = tl.load(kg + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bq = tl.load(qg + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bm = tl.load(M + pid * BT * BT + (r[:, None] * BT + r[None, :])).to(dt)
        ba = tl.load(Aqk + pid * BT * BT + (r[:, None] * BT + r[None, :])).to(dt)
        bb, decay = next_beta[None, :], next_decay  # loaded a chunk ahead: short loads, long waits
        ahead = pid - tl.where(c > 0, HV, 0)
        next_beta = tl.load(beta + ahead * BT + r)
        next_decay = tl.load(total + ahead * KP + kk)
        Sb = S.to(dt)
        tl.store(dh + pid * VP * KP + (vv[:, None] * KP + kk[None, :]), Sb)
        back = tl.trans(bo)
        new = tl.dot(Sb, tl.trans(bg), input_precision=PRECISION)
        new = tl.dot(back.to(dt), ba, new, input_precision=PRECISION)
        new -= tl.dot((new * bb).to(dt), bm, input_precision=PRECISION)
        tl.store(y + pid * BT * VP + (r[None, :] * VP + vv[:, None]), new.to(y.dtype.element_ty))
        S = tl.dot(back.to(dt), bq, S * decay[None, :], input_precision=PRECISION)
        S = tl.dot((new * -bb).to(dt), bw, S, input_precision=PRECISION)
    if HAS_DH0:
        at = n.to(tl.int64) * s0n + hv.to(tl.int64) * s0h + vv[:, None].to(tl.int64) * s0v + kk[None, :] * s0k
        tl.store(dh0 + at, S, mask=inside)
