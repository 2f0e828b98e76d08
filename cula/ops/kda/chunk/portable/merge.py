"""merge (Triton): the entry states of all segments, from the maps that `pre_scan` found.

One program per sequence, value head and BV rows of the transposed state: from the sequence's entry state, segment by
segment, `S <- S P + b` (transposed), each state stored before its segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cula.ops.kda.chunk.portable.delta_h import load_state


@triton.jit(do_not_specialize=["slots", "null_index"])
def merge_kernel(
    b, P, parts, state_in, read, has_state, entry, sin, sih, siv, sik, srn, shn, slots, null_index,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    BK: tl.constexpr, STATE_IN: tl.constexpr, HAS_READ: tl.constexpr, HAS_FLAG: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """entry `[segments, HV, VP, KP]` fp32; parts `[N + 1]` int32: a sequence's first segment."""
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    kk = tl.arange(0, KP)
    vv = tl.program_id(0) * BV + tl.arange(0, BV)
    S = load_state(
        state_in, read, has_state, n, hv, vv, kk, sin, sih, siv, sik, srn, shn, slots, null_index, V, K, STATE_IN,
        HAS_READ, HAS_FLAG,
    )  # fmt: skip
    first = tl.load(parts + n)
    last = tl.load(parts + n + 1) - 1
    at = vv[:, None] * KP + kk[None, :]
    here = first.to(tl.int64) * HV + hv
    tl.store(entry + here * VP * KP + at, S)
    for _ in range(first, last):
        tl.debug_barrier()  # S is read back, in slices of K
        before = entry + here * VP * KP + vv[:, None] * KP
        S = tl.load(b + here * VP * KP + at)
        for k0 in range(0, KP, BK):
            k = k0 + tl.arange(0, BK)
            bp = tl.load(P + here * KP * KP + (k[:, None] * KP + kk[None, :]))
            S = tl.dot(tl.load(before + k[None, :]), bp, S, input_precision=PRECISION)
        here += HV
        tl.store(entry + here * VP * KP + at, S)
