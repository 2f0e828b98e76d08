"""walk (Triton): the state's walk through the chunks of a sequence, or of a segment of one, with the output fused in.

One program per sequence (or segment), value head and BV columns of V. The transposed state `[BV, K]` stays in fp32
registers; its copy in the tiles' type is the first operand of its product. Per chunk of n tokens, slope s:

    o_i = out_scale [ e^{-s(i+1)} h^T q_i + in_scale sum_{j<=i} e^{-s(i-j)} (q_i . k_j) v_j ]
    h  <- e^{-sn} h + in_scale sum_j e^{-s(n-1-j)} k_j v_j^T

The backward is three walks: dq is this with (do, v, k) for (q, k, v); dk with (v, do, q) and dv with (k, q, do), both
with REVERSE, which goes from a sequence's last token to its first. There a state that enters is the gradient of the
state after the last token, so it has decayed by no token yet, and one that leaves has one more token to decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.common.decay import LOG2E, NONE, POOL, SEGMENTS, decay_pair, find_slot


@triton.jit
def load_rows(x, token, st, sc, some, cc, C: tl.constexpr, CP: tl.constexpr, STEP: tl.constexpr, BT: tl.constexpr):
    """BT rows of x from `token` on, forwards (STEP 1) or backwards (-1); zeros where not `some` and beyond C."""
    r = tl.arange(0, BT) * STEP
    mask = some[:, None]
    if C % CP != 0:
        mask = mask & (cc < C)[None, :]
    return tl.load(x + token.to(tl.int64) * st + (r[:, None] * st + cc[None, :] * sc), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "P", "cut", "slots_in", "slots_out", "null_index", "ckpt_rows", "ckpt_every"])
def walk_kernel(
    q, k, v, o, slopes, cu_seqlens, state_in, state_out, read, write, has_state, checkpoints, checkpoint_offsets,
    sqb, sqt, sqh, sqk, skb, skt, skh, skk, svb, svt, svh, svv, sob, sot, soh, sov, sls, scu,
    sin, sih, siv, sik, sun, suh, suv, suk, srn, swn, shn, scn, sch, scv, sck, sof,
    T, N, P, cut, slots_in, slots_out, null_index, ckpt_rows, ckpt_every, out_scale, in_scale,
    HV: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    STATE_IN: tl.constexpr, STATE_OUT: tl.constexpr, HAS_READ: tl.constexpr, HAS_WRITE: tl.constexpr,
    HAS_FLAG: tl.constexpr, OUTPUT: tl.constexpr, CHECKPOINTS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module. GQ, GK, GV: value heads per head of q, k, v. P segments of `cut` tokens a sequence."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    iv = pid % BLOCKS
    hv = (pid // BLOCKS) % HV
    segment = pid // (BLOCKS * HV)
    n = tl.minimum(segment // P, N)  # N: the rows behind the last boundary, however many segments that takes
    batch, first, length = n, 0, T
    if PACKED:
        batch = n * 0
        first = tl.load(cu_seqlens + n.to(tl.int64) * scu).to(tl.int32)
        length = T - first  # behind the last boundary
        if n < N:
            length = tl.load(cu_seqlens + (n + 1).to(tl.int64) * scu).to(tl.int32) - first
    start = (segment - n * P) * cut
    tokens = tl.minimum(length - start, cut)
    if (tokens <= 0) & (start > 0):
        return
    if STATE_OUT == SEGMENTS:
        behind = length - start - tokens
        if behind <= 0:  # nothing enters there
            return
    kk = tl.arange(0, KP)
    vv = iv * BV + tl.arange(0, BV)
    r = tl.arange(0, BT)
    STEP: tl.constexpr = -1 if REVERSE else 1
    hv64, vv64 = hv.to(tl.int64), vv.to(tl.int64)
    q += batch.to(tl.int64) * sqb + hv64 // GQ * sqh
    k += batch.to(tl.int64) * skb + hv64 // GK * skh
    v += batch.to(tl.int64) * svb + hv64 // GV * svh
    o += batch.to(tl.int64) * sob + hv64 * soh
    if PACKED:
        zeros = tl.zeros((BT, BV), o.dtype.element_ty)
        if n >= N:
            if OUTPUT:
                for at in range(0, tokens, BT):
                    row_at = (first + start + at).to(tl.int64) * sot + r[:, None] * sot + vv[None, :] * sov
                    tl.store(o + row_at, zeros, mask=(r < tokens - at)[:, None] & (vv < V)[None, :])
            return
    S = tl.zeros((BV, KP), tl.float32)
    slot = n.to(tl.int64)
    if STATE_IN == POOL:
        slot = find_slot(read, n, srn, slots_in, null_index, HAS_READ)
    if STATE_IN == SEGMENTS:
        slot = segment.to(tl.int64)
    if HAS_FLAG:
        slot = tl.where(tl.load(has_state + n.to(tl.int64) * shn) != 0, slot, -1)
    if STATE_IN != NONE:
        in_at = slot * sin + hv64 * sih + vv64[:, None] * siv + kk[None, :] * sik
        in_mask = (vv < tl.where(slot >= 0, V, 0))[:, None] & (kk < K)[None, :]
        S = tl.load(state_in + in_at, mask=in_mask, other=0.0).to(tl.float32)
    if CHECKPOINTS:
        base = tl.load(checkpoint_offsets + n.to(tl.int64) * sof).to(tl.int64)
        row_end = tl.minimum(tl.load(checkpoint_offsets + (n + 1).to(tl.int64) * sof).to(tl.int64), ckpt_rows)
    dt = tl.float32 if WIDE else q.dtype.element_ty
    slope = tl.load(slopes + hv64 * sls).to(tl.float32)
    apart = (r[None, :] - r[:, None]).to(tl.float32)  # of key (row) and query (column)
    pairs = tl.where(apart >= 0, tl.exp2(tl.maximum(apart, 0.0) * (slope * -LOG2E)) * (out_scale * in_scale), 0.0)
    # One token for each chunk: the next is a whole chunk further on.
    token = first + start
    if REVERSE:
        token = first + length - 1 - start
    for c in tl.range(0, tl.cdiv(tokens, BT), num_stages=STAGES):
        count = tl.minimum(tokens - c * BT, BT)
        here = token + c * (BT * STEP)
        live = r < count
        bk = load_rows(k, here, skt, skk, live, kk, K, KP, STEP, BT).to(dt)
        bv = tl.trans(load_rows(v, here, svt, svv, live, vv, V, BV, STEP, BT)).to(dt)
        lag = 1
        if REVERSE:
            lag = tl.where(start + c == 0, 0, 1)
        if OUTPUT:
            bq = tl.trans(load_rows(q, here, sqt, sqk, live, kk, K, KP, STEP, BT)).to(dt)
            A = tl.dot(bk, bq, input_precision=PRECISION) * pairs
            out = tl.dot(S.to(dt), bq, input_precision=PRECISION)
            out *= (tl.exp2((r + lag).to(tl.float32) * (slope * -LOG2E)) * out_scale)[None, :]
            out = tl.dot(bv, A.to(dt), out, input_precision=PRECISION)
            place = here.to(tl.int64) * sot + ((r * STEP)[None, :] * sot + vv[:, None] * sov)
            tl.store(o + place, out.to(o.dtype.element_ty), mask=live[None, :] & (vv < V)[:, None])
        back = tl.maximum(count - 1 - r, 0).to(tl.float32)
        new = bv.to(tl.float32) * (tl.exp2(back * (slope * -LOG2E)) * in_scale)[None, :]
        decay, rest = decay_pair(slope, (count - 1 + lag).to(tl.float32))
        S = tl.dot(new.to(dt), bk, S * decay + S * rest, input_precision=PRECISION)
        if CHECKPOINTS:
            done = start + c * BT + count
            if done % ckpt_every == 0:
                row = base + done // ckpt_every - 1
                if (row >= 0) & (row < row_end):
                    c_at = row * scn + hv64 * sch + vv64[:, None] * scv + kk[None, :] * sck
                    c_mask = (vv < V)[:, None] & (kk < K)[None, :]
                    tl.store(checkpoints + c_at, S.to(checkpoints.dtype.element_ty), mask=c_mask)
    if STATE_OUT != NONE:
        if REVERSE:
            more, rest_more = decay_pair(slope, tl.where(tokens > 0, 1.0, 0.0))
            S = S * more + S * rest_more
        slot = n.to(tl.int64)
        if STATE_OUT == POOL:
            slot = find_slot(write, n, swn, slots_out, null_index, HAS_WRITE)
        if STATE_OUT == SEGMENTS:
            slot = segment.to(tl.int64)
        else:
            slot = tl.where(start + tokens >= length, slot, -1)
        out_at = slot * sun + hv64 * suh + vv64[:, None] * suv + kk[None, :] * suk
        out_mask = (vv < tl.where(slot >= 0, V, 0))[:, None] & (kk < K)[None, :]
        tl.store(state_out + out_at, S.to(state_out.dtype.element_ty), mask=out_mask)
