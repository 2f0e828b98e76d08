"""delta_h (Triton): the state's walk through the chunks of a sequence, with the output fused in.

One program per sequence (or segment of one), value head and BV columns of V. The transposed state `[BV, K]` stays in
fp32 registers; its copy in the tiles' dtype is the first operand of every product. Per chunk, from the tiles of
`intra`:

    x = v - kb h    e = x - M (beta x)    v_new = beta e    o = qg h + Aqk v_new    h <- total h + kg^T v_new
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.tiles import find_sequence

NONE = tl.constexpr(0)
TENSOR = tl.constexpr(1)
POOL = tl.constexpr(2)


@triton.jit
def slot_of(indices, n, stride, slots, null_index, HAS: tl.constexpr):
    """Slot of sequence n, -1 where it is null or out of range."""
    slot = n.to(tl.int64)
    if HAS:
        slot = tl.load(indices + n * stride).to(tl.int64)
        slot = tl.where((slot == null_index) | (slot < 0), -1, slot)
    return tl.where(slot >= slots, -1, slot)


@triton.jit
def load_state(
    state, indices, flag, n, hv, vv, kk, ssn, ssh, ssv, ssk, stride, flag_stride, slots, null_index, V: tl.constexpr,
    K: tl.constexpr, STATE_IN: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_FLAG: tl.constexpr,
):  # fmt: skip
    """The transposed entry state of sequence n, in fp32; zeros where it has none."""
    if STATE_IN == NONE:
        return tl.zeros((vv.shape[0], kk.shape[0]), tl.float32)
    slot = n.to(tl.int64)
    if STATE_IN == POOL:
        slot = slot_of(indices, n, stride, slots, null_index, HAS_INDEX)
    if HAS_FLAG:
        slot = tl.where(tl.load(flag + n * flag_stride) != 0, slot, -1)
    at = slot * ssn + hv.to(tl.int64) * ssh + vv[:, None].to(tl.int64) * ssv + kk[None, :] * ssk
    held = (vv < tl.where(slot >= 0, V, 0))[:, None] & (kk < K)[None, :]
    return tl.load(state + at, mask=held, other=0.0).to(tl.float32)


@triton.jit
def load_v(v, first, count, r, vv, svt, svv, V: tl.constexpr, BV: tl.constexpr):
    """Rows first + r of v, zeros from the count-th on."""
    some = (r < count)[:, None]
    if V % BV != 0:
        some = some & (vv < V)[None, :]
    return tl.load(v + first.to(tl.int64) * svt + (r[:, None] * svt + vv[None, :] * svv), mask=some, other=0.0)


@triton.jit(do_not_specialize=["T", "NT", "slots_in", "slots_out", "null_index", "ckpt_rows", "ckpt_every"])
def delta_h_kernel(
    v, kb, qg, kg, Aqk, M, total, beta, sequences,
    o, h, e, state_in, state_out, read, write, has_state, checkpoints, checkpoint_offsets,
    svb, svt, svh, svv, sob, sot, soh, sov, sin, sih, siv, sik, sun, suh, suv, suk, srn, swn, shn,
    scn, sch, scv, sck, sof, hst, hsh, hsv, hsk,
    slots_in, slots_out, null_index, ckpt_rows, ckpt_every, T, NT,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, TABLE: tl.constexpr, STATE_IN: tl.constexpr, STATE_OUT: tl.constexpr, HAS_READ: tl.constexpr,
    HAS_WRITE: tl.constexpr, HAS_FLAG: tl.constexpr, OUTPUT: tl.constexpr, KEEP_H: tl.constexpr,
    KEEP_E: tl.constexpr, WHOLE_H: tl.constexpr, CHECKPOINTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See the module; KEEP_H stores h (WHOLE_H: with its padding), KEEP_E stores e, OUTPUT False leaves out o."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    batch, first, length, tile, owner = find_sequence(sequences, n, T, NT, TABLE)
    kk = tl.arange(0, KP)
    vv = iv * BV + tl.arange(0, BV)
    r = tl.arange(0, BT)
    inside = (vv < V)[:, None] & (kk < K)[None, :]
    S = load_state(
        state_in, read, has_state, n, hv, vv, kk, sin, sih, siv, sik, srn, shn, slots_in, null_index, V, K, STATE_IN,
        HAS_READ, HAS_FLAG,
    )  # fmt: skip
    if CHECKPOINTS:
        row = tl.load(checkpoint_offsets + n * sof).to(tl.int64)
        row_end = tl.minimum(tl.load(checkpoint_offsets + (n + 1) * sof).to(tl.int64), ckpt_rows)
    v += batch.to(tl.int64) * svb + hv * svh
    o += batch.to(tl.int64) * sob + hv * soh
    dt = kb.dtype.element_ty
    chunks = tl.cdiv(length, BT)
    next_beta = tl.zeros((BT,), tl.float32)
    next_decay = tl.zeros((KP,), tl.float32)
    next_v = load_v(v, first, length, r, vv, svt, svv, V, BV)
    if chunks > 0:
        next_beta = tl.load(beta + (tile.to(tl.int64) * HV + hv) * BT + r)
        next_decay = tl.load(total + (tile.to(tl.int64) * HV + hv) * KP + kk)
    for c in tl.range(0, chunks, num_stages=STAGES):
        pid = (tile + c).to(tl.int64) * HV + hv
        token = (first + c * BT).to(tl.int64)
        live = r < length - c * BT
        bw = tl.load(kb + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bg = tl.load(kg + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bm = tl.load(M + pid * BT * BT + (r[:, None] * BT + r[None, :])).to(dt)
        bb, decay, bv = next_beta, next_decay, next_v  # loaded a chunk ahead: short loads, long waits
        ahead = pid + tl.where(c + 1 < chunks, HV, 0)
        next_beta = tl.load(beta + ahead * BT + r)
        next_decay = tl.load(total + ahead * KP + kk)
        next_v = load_v(v, first + (c + 1) * BT, length - (c + 1) * BT, r, vv, svt, svv, V, BV)
        Sb = S.to(dt)
        if KEEP_H:
            h_at = (tile + c).to(tl.int64) * hst + hv * hsh + vv[:, None].to(tl.int64) * hsv + kk[None, :] * hsk
            if WHOLE_H:
                tl.store(h + h_at, Sb)
            else:
                tl.store(h + h_at, Sb.to(h.dtype.element_ty), mask=inside)
        x = tl.trans(bv).to(tl.float32) - tl.dot(Sb, tl.trans(bw), input_precision=PRECISION)
        x -= tl.dot((x * bb[None, :]).to(dt), tl.trans(bm), input_precision=PRECISION)
        if KEEP_E:
            tl.store(e + pid * BT * VP + (r[None, :] * VP + vv[:, None]), x.to(dt))
        new = (x * bb[None, :]).to(dt)
        if OUTPUT:
            bq = tl.load(qg + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
            ba = tl.load(Aqk + pid * BT * BT + (r[:, None] * BT + r[None, :])).to(dt)
            out = tl.dot(Sb, tl.trans(bq), input_precision=PRECISION)
            out = tl.dot(new, tl.trans(ba), out, input_precision=PRECISION)
            o_at = r[None, :] * sot + vv[:, None] * sov
            some = live[:, None]
            if V % BV != 0:
                some = some & (vv < V)[None, :]
            tl.store(o + token * sot + o_at, out.to(o.dtype.element_ty), mask=tl.trans(some))
        S = tl.dot(new, bg, S * decay[None, :], input_precision=PRECISION)
        if CHECKPOINTS:
            done = (c + 1) * BT
            if (done % ckpt_every == 0) & (done <= length):
                if (row >= 0) & (row < row_end):
                    c_at = row * scn + hv.to(tl.int64) * sch + vv[:, None].to(tl.int64) * scv + kk[None, :] * sck
                    tl.store(checkpoints + c_at, S.to(checkpoints.dtype.element_ty), mask=inside)
                row += 1
    if STATE_OUT != NONE:
        slot = owner.to(tl.int64)
        if STATE_OUT == POOL:
            slot = slot_of(write, tl.maximum(owner, 0), swn, slots_out, null_index, HAS_WRITE)
            slot = tl.where(owner < 0, -1, slot)
        at = slot * sun + hv.to(tl.int64) * suh + vv[:, None].to(tl.int64) * suv + kk[None, :] * suk
        held = (vv < tl.where(slot >= 0, V, 0))[:, None] & (kk < K)[None, :]
        tl.store(state_out + at, S.to(state_out.dtype.element_ty), mask=held)
