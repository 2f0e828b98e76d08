"""merge (Triton): from what each segment adds to a state, the state that enters it: in place, segment by segment.

A segment of t tokens maps its entry state h to e^{-st} h + U. One program per sequence, head and block of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.common.decay import NONE, POOL, decay_pair, find_slot


@triton.jit(do_not_specialize=["T", "P", "cut", "slots", "null_index"])
def merge_kernel(
    U, slopes, cu_seqlens, state_in, read, has_state, sls, scu, sin, sih, siv, sik, srn, shn, T, P, cut, slots,
    null_index, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, STATE_IN: tl.constexpr, HAS_READ: tl.constexpr, HAS_FLAG: tl.constexpr,
):  # fmt: skip
    """U `[N * P, HV, V, K]` fp32, dense."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    hv = (pid // BLOCKS) % HV
    n = pid // (BLOCKS * HV)
    length = T
    if PACKED:
        length = tl.load(cu_seqlens + (n + 1).to(tl.int64) * scu).to(tl.int32)
        length -= tl.load(cu_seqlens + n.to(tl.int64) * scu).to(tl.int32)
    kk = tl.arange(0, KP)
    vv = (pid % BLOCKS) * BV + tl.arange(0, BV)
    inside = (vv < V)[:, None] & (kk < K)[None, :]
    S = tl.zeros((BV, KP), tl.float32)
    if STATE_IN != NONE:
        slot = n.to(tl.int64)
        if STATE_IN == POOL:
            slot = find_slot(read, n, srn, slots, null_index, HAS_READ)
        if HAS_FLAG:
            slot = tl.where(tl.load(has_state + n.to(tl.int64) * shn) != 0, slot, -1)
        at = slot * sin + hv.to(tl.int64) * sih + vv[:, None].to(tl.int64) * siv + kk[None, :] * sik
        held = (vv < tl.where(slot >= 0, V, 0))[:, None] & (kk < K)[None, :]
        S = tl.load(state_in + at, mask=held, other=0.0).to(tl.float32)
    decay, rest = decay_pair(tl.load(slopes + hv.to(tl.int64) * sls).to(tl.float32), cut.to(tl.float32))
    place = ((n.to(tl.int64) * P * HV + hv) * V + vv[:, None]) * K + kk[None, :]
    for _ in range(0, tl.cdiv(length, cut) - 1):
        added = tl.load(U + place, mask=inside, other=0.0)
        tl.store(U + place, S, mask=inside)
        S = S * decay + S * rest + added
        place += HV * V * K
    tl.store(U + place, S, mask=inside)
