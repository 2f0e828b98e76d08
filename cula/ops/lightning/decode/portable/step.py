"""decode and verify, portable (Triton): each program takes a block of state rows through its sequence's tokens.

    S <- exp(-s) S + v k^T;  o = scale * S q        S `[BV, K]` fp32 in registers, read once and written once

A narrower pool rounds S after each token, so that drafts have the bits of single steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cula.host.varlen import clamp_boundaries
from cula.ops.common.decay import decay_pair, find_slot
from cula.ops.common.drafts import MAX_VERIFY_TOKENS, accepted_column
from cula.ops.common.pools import slot_ids
from cula.ops.lightning.problem import LightningProblem, Operands

Tensor = torch.Tensor

#: Elements of a program's block of state rows: 32 a thread.
TILE = 4096


@triton.jit(do_not_specialize=["TOKENS", "slots", "write_slots", "out_slots", "null_read", "null_index"])
def step_kernel(
    q, k, v, o, slopes, cu_seqlens, source, pool, read, write, states_out, out_ids,
    sqn, sqt, sqh, sqk, skn, skt, skh, skk, svn, svt, svh, svv, son, sot, soh, sov, sls, scu,
    sin, sih, siv, sik, spn, sph, spv, spk, srn, swn, sxn, sxh, sxv, sxk, sidn, sidt,
    TOKENS, slots, write_slots, out_slots, null_read, null_index, scale,
    HV: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, MOST: tl.constexpr, UPDATE: tl.constexpr, HAS_WRITE: tl.constexpr,
    STATES_OUT: tl.constexpr,
):  # fmt: skip
    """source: where states are read, by `read`; pool: where they are written, by `write` or `read` again."""
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    hv = (pid // BLOCKS) % HV
    n = pid // (BLOCKS * HV)
    vv = (pid % BLOCKS) * BV + tl.arange(0, BV)
    kk = tl.arange(0, KP)
    n64, hv64, vv64 = n.to(tl.int64), hv.to(tl.int64), vv.to(tl.int64)
    first = n64 * 0
    count = TOKENS
    row = n64
    if PACKED:
        first = tl.load(cu_seqlens + n64 * scu).to(tl.int64)
        count = tl.minimum(tl.load(cu_seqlens + (n64 + 1) * scu).to(tl.int64) - first, MOST).to(tl.int32)
        row = n64 * 0
    slot = find_slot(read, n, srn, slots, null_read, True)
    live = slot >= 0
    inside = (vv < V)[:, None] & (kk < K)[None, :]
    at = slot * sin + hv64 * sih + vv64[:, None] * siv + kk[None, :] * sik
    held = (vv < tl.where(live, V, 0))[:, None] & (kk < K)[None, :]
    S = tl.load(source + at, mask=held, other=0.0).to(tl.float32)
    decay, rest = decay_pair(tl.load(slopes + hv64 * sls).to(tl.float32), 1.0)
    q += row * sqn + first * sqt + hv64 // G * sqh
    k += row * skn + first * skt + hv64 // G * skh
    v += row * svn + first * svt + hv64 * svh
    o += row * son + first * sot + hv64 * soh
    for step in range(0, count):
        t = first * 0 + step  # 64 bits
        bq = tl.load(q + t * sqt + kk * sqk, mask=kk < K, other=0.0).to(tl.float32)
        bk = tl.load(k + t * skt + kk * skk, mask=kk < K, other=0.0).to(tl.float32)
        bv = tl.load(v + t * svt + vv * svv, mask=vv < V, other=0.0).to(tl.float32)
        S = S * decay + (S * rest + bv[:, None] * bk[None, :])
        if pool.dtype.element_ty != tl.float32:
            S = S.to(pool.dtype.element_ty).to(tl.float32)
        out = tl.sum(S * bq[None, :], 1) * scale
        out = tl.where(live, out, 0.0)
        tl.store(o + t * sot + vv * sov, out.to(o.dtype.element_ty), mask=vv < V)
        if STATES_OUT:
            wanted = tl.load(out_ids + row * sidn + (first + t) * sidt).to(tl.int64)
            wanted = tl.where((wanted == null_index) | (wanted >= out_slots) | (slot < 0), -1, wanted)
            to = wanted * sxn + hv64 * sxh + vv64[:, None] * sxv + kk[None, :] * sxk
            kept = (vv < tl.where(wanted >= 0, V, 0))[:, None] & (kk < K)[None, :]
            tl.store(states_out + to, S.to(states_out.dtype.element_ty), mask=kept)
    if UPDATE:
        target = slot
        if HAS_WRITE:
            target = tl.where(live, find_slot(write, n, swn, write_slots, null_index, True), -1)
        to = target * spn + hv64 * sph + vv64[:, None] * spv + kk[None, :] * spk
        kept = (vv < tl.where(target >= 0, V, 0))[:, None] & inside
        tl.store(pool + to, S.to(pool.dtype.element_ty), mask=kept)


def run(p: LightningProblem, x: Operands) -> Tensor:
    """The outputs; states go where the call says."""
    with torch.no_grad(), torch.cuda.device_of(x.q):
        return _run(p, x)


def _run(p: LightningProblem, x: Operands) -> Tensor:
    q, pool, out = x.q, x.state_pool, x.out
    if out is None:
        out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    cu = None
    if p.packed:
        cu = x.cu_seqlens.to(q.device)
        cu = clamp_boundaries(cu, p.T) if x.boundaries is None else cu
        out.zero_()  # rows behind the last boundary
    if not p.N or not p.T:
        return out
    if pool.shape[0] == 0:
        return out.zero_()
    read = accepted_column(x)
    if x.write_indices is not None or _shares(x):  # some may write what others read: copies are read
        ids = slot_ids(read, p.N, pool.shape[0], x.null_index, pool.device)
        copies = pool.index_select(0, ids.clamp(min=0))
        rows = torch.where(ids >= 0, torch.arange(p.N, device=pool.device), -1)
        _launch(p, x, out, cu, (copies, rows, -1), read if x.write_indices is None else x.write_indices)
    else:
        _launch(p, x, out, cu, (pool, read, x.null_index), None)
    return out


def _launch(
    p: LightningProblem, x: Operands, out: Tensor, cu: Tensor | None, source: tuple[Tensor, Tensor, int],
    write: Tensor | None,
) -> None:  # fmt: skip
    """source: where states are read, by which indices, and what means none there."""
    q, pool, (states, read, null_read) = x.q, x.state_pool, source
    KP = 1 << (p.K - 1).bit_length()
    BV = max(1, min(1 << (p.V - 1).bit_length(), TILE // KP))
    across = 0 if p.packed or p.N == p.B else 1  # [1, N, ...]: the sequences lie along dim 1
    strides = [(t.stride(across), *t.stride()[1:]) for t in (q, x.k, x.v, out)]
    target, ids = (q, q) if x.states_out is None else (x.states_out, x.states_out_indices)
    id_strides = (0, 0) if x.states_out is None else ids.stride() if ids.dim() == 2 else (0, ids.stride(0))
    step_kernel[(p.N * p.HV * -(-p.V // BV),)](
        q, x.k, x.v, out, x.slopes, q if cu is None else cu, states, pool, read, q if write is None else write, target,
        ids, *(s for row in strides for s in row), x.slopes.stride(0), 0 if cu is None else cu.stride(0),
        *states.stride(), *pool.stride(), read.stride(0), 0 if write is None else write.stride(0),
        *(target.stride() if x.states_out is not None else (0, 0, 0, 0)), *id_strides,
        p.T if p.N == p.B else 1, states.shape[0], pool.shape[0], target.shape[0], null_read, x.null_index, p.scale,
        HV=p.HV, G=p.HV // p.H, K=p.K, KP=KP, V=p.V, BV=BV, PACKED=p.packed, MOST=MAX_VERIFY_TOKENS,
        UPDATE=x.update_state, HAS_WRITE=write is not None, STATES_OUT=x.states_out is not None, num_warps=4,
    )  # fmt: skip


def _shares(x: Operands) -> bool:
    """`states_out` lies in the pool's own memory."""
    if x.states_out is None:
        return False
    return x.states_out.untyped_storage().data_ptr() == x.state_pool.untyped_storage().data_ptr()
