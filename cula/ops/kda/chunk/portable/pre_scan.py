"""pre_scan (Triton): the affine map of a segment, `S_out = P S_in + b`.

One program per segment, value head and block of rows of the transposed state. The first programs walk V rows from a
zero state, which gives b; the others walk the K rows of the identity with v = 0, which gives P. Per chunk, as in
`delta_h` but without output:

    x = v - kb h    e = x - M (beta x)    h <- total h + kg^T (beta e)
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.tiles import find_sequence


@triton.jit(do_not_specialize=["T", "NT"])
def pre_scan_kernel(
    v, kb, kg, M, total, beta, segments, b, P, svb, svt, svh, svv, T, NT,
    HV: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """b `[segments, HV, VP, KP]` and P `[segments, HV, KP, KP]`, both transposed, fp32; none of a last segment."""
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    batch, first, length, tile, owner = find_sequence(segments, n, T, NT, True)
    if owner >= 0:  # nothing enters after a sequence's last segment
        return
    kk = tl.arange(0, KP)
    vv = tl.program_id(0) * BV + tl.arange(0, BV)
    r = tl.arange(0, BT)
    S = tl.where(vv[:, None] - VP == kk[None, :], 1.0, 0.0)  # of P's rows; zeros of b's
    v += batch.to(tl.int64) * svb + hv * svh
    dt = kb.dtype.element_ty
    chunks = tl.cdiv(length, BT)
    for c in tl.range(0, chunks, num_stages=STAGES):
        pid = (tile + c).to(tl.int64) * HV + hv
        token = (first + c * BT).to(tl.int64)
        bw = tl.load(kb + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bg = tl.load(kg + pid * BT * KP + (r[:, None] * KP + kk[None, :]))
        bm = tl.load(M + pid * BT * BT + (r[:, None] * BT + r[None, :])).to(dt)
        some = (r < length - c * BT)[:, None] & (vv < V)[None, :]
        bv = tl.load(v + token * svt + (r[:, None] * svt + vv[None, :] * svv), mask=some, other=0.0)
        bb = tl.load(beta + pid * BT + r)[None, :]
        decay = tl.load(total + pid * KP + kk)
        x = tl.trans(bv).to(tl.float32) - tl.dot(S.to(dt), tl.trans(bw), input_precision=PRECISION)
        x -= tl.dot((x * bb).to(dt), tl.trans(bm), input_precision=PRECISION)
        S = tl.dot((x * bb).to(dt), bg, S * decay[None, :], input_precision=PRECISION)
    at = n.to(tl.int64) * HV + hv
    tl.store(b + at * VP * KP + (vv[:, None] * KP + kk[None, :]), S, mask=(vv < VP)[:, None])
    row = vv - VP
    tl.store(P + at * KP * KP + (row[:, None] * KP + kk[None, :]), S, mask=((row >= 0) & (row < KP))[:, None])
