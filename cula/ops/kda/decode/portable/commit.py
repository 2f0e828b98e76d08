"""commit (Triton): the accepted tokens of a draft, from the k, u and g that `step` kept: kda_rollback.

One program of one warp per sequence, value head and BV rows of the V-first state, whose tile is `step`'s:
S <- S exp(g) + u k^T per token that stands. No sums, so the state alone is read and written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cula.ops.kda.decode.portable.config import configure
from cula.ops.kda.decode.portable.elementwise import LOG2E, power_of_two
from cula.ops.kda.decode.portable.layout import INDEX, on_device_of, programs_of, states
from cula.ops.kda.decode.portable.step import tile_at, tile_mask, updated, valid_slot, wide
from cula.ops.kda.problem import KDAProblem

INTEGERS = ["d_n", "d_h", "d_v", "index_n", "accepted_n", "slots", "null_index", "T"]


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["indices", "accepted"])
def commit_kernel(
    pool, indices, accepted, k, u, g, count,
    d_n: tl.int64, d_h: tl.int64, d_v: tl.int64, index_n: tl.int64, accepted_n: tl.int64, slots: tl.int64,
    null_index: tl.int64, T: tl.int64,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KI: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DST: tl.constexpr, DST_K: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """pool: states in place; k, u, g `[N, T, HV, ...]` fp32 and contiguous; count `[N]`."""
    NV: tl.constexpr = (V + BV - 1) // BV
    iv = tl.program_id(0) % NV
    hv = (tl.program_id(0) // NV % HV).to(tl.int64)
    n = (tl.program_id(0) // NV // HV).to(tl.int64)
    vv = iv * BV + tl.arange(0, BV)
    kk = tl.arange(0, KP // KI)[:, None] * KI + tl.arange(0, KI)[None, :]
    slot = valid_slot(indices, n * index_n, slots, null_index)
    stands = tl.minimum(tl.load(accepted + n * accepted_n).to(tl.int64), tl.load(count + n).to(tl.int64))
    stands = tl.where(slot >= 0, tl.minimum(stands, T), 0).to(tl.int32)
    at = tl.maximum(slot, 0) * wide(d_n, DST) + hv * wide(d_h, DST) + tile_at(vv, kk, d_v, DST, DST_K)
    mask = tile_mask(vv, kk, stands > 0, K, V, KP)
    S = tl.load(pool + at, mask=mask, other=0.0).to(tl.float32)
    for t in range(0, stands):
        place = (n * T + t) * HV + hv
        bk = tl.load(k + place * K + kk, mask=kk < K, other=0.0)
        bg = tl.load(g + place * K + kk, mask=kk < K, other=0.0)
        bu = tl.load(u + place * V + vv, mask=vv < V, other=0.0)
        S = updated(S, power_of_two(bg * LOG2E), bk, bu, pool.dtype.element_ty, ROUND)
    tl.store(pool + at, S.to(pool.dtype.element_ty), mask=mask)


def run(p: KDAProblem, x: Any) -> None:
    """Advance the states of a `kda_rollback` call in place: one launch."""
    if not p.N or not x.state_pool.shape[0]:
        return
    c, pool, r = configure(p, x.target), x.state_pool, x.rollback
    at = states(INDEX, pool, False)
    with torch.no_grad(), on_device_of(pool):
        commit_kernel[(programs_of(p, c),)](
            pool, x.indices, x.accepted, r.k, r.u, r.g, r.count,
            *at.strides, x.indices.stride(0), x.accepted.stride(0), pool.shape[0], x.null_index, p.T,
            HV=p.HV, K=p.K, KP=c.KP, KI=c.KI, V=p.V, BV=c.BV, DST=at.unit, DST_K=at.inner,
            ROUND=pool.dtype != torch.float32, num_warps=1, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
