"""serving step (Triton): convolution, SiLU, norms, gate, the token's step and the gated RMSNorm in one launch.

One program per sequence and query/key head: it alone reads and shifts that head's part of the convolution pool, so no
order among programs is needed. It walks through the value heads of its group and their blocks of BV rows of the V-first
state, tiles as in `step`, the next one loaded as soon as one is stored:

    x = S (d k)    y = S (d q)    u = beta (v - x)    o = y + u (k . q)    S <- S d + u k^T

and, where asked, out = o / rms(o) * norm_weight * sigmoid(output_gate).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cula.ops.kda.decode.portable.config import configure_serving
from cula.ops.kda.decode.portable.elementwise import LOG2E, logistic, power_of_two, product
from cula.ops.kda.decode.portable.launch import GATES, Launch
from cula.ops.kda.decode.portable.layout import INDEX, on_device_of, rows_of, states
from cula.ops.kda.decode.portable.step import (
    finished_beta,
    finished_gate,
    finished_keys,
    over_keys,
    tile_at,
    tile_mask,
    updated,
    valid_slot,
    wide,
)
from cula.ops.kda.problem import KDAProblem, Operands

INTEGERS = [
    "x_n", "g_n", "g_h", "b_n", "b_h", "o_n", "o_h", "z_n", "z_h", "z_v", "w_c", "w_j", "c_n", "c_c", "c_j",
    "d_n", "d_h", "d_v", "index_n", "slots", "null_index",
]  # fmt: skip
SCALARS = ["x", "g", "beta", "A_log", "indices", "weight", "bias", "conv", "norm_weight", "output_gate", "o"]


@triton.jit
def window_of(x, conv, channel, tap, live, c_c, c_j, W: tl.constexpr):
    """The current and the last W - 1 inputs of some channels in fp32, taps in the last dimension, oldest first."""
    now = tl.load(x + channel, mask=live, other=0.0).to(tl.float32)
    past = tl.load(conv + channel * c_c + tap * c_j, mask=live & (tap < W - 1), other=0.0).to(tl.float32)
    return tl.where(tap == W - 1, now, past)


@triton.jit
def convolved(
    window, weight, bias, channel, tap, live, w_c, w_j, W: tl.constexpr, AXIS: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """silu of the convolution of windows, the last dimension summed."""
    w = tl.load(weight + channel * w_c + tap * w_j, mask=live & (tap < W), other=0.0).to(tl.float32)
    y = product(window, w)
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=live, other=0.0).to(tl.float32) * tl.where(tap == W - 1, 1.0, 0.0)
    y = tl.sum(y, AXIS)
    return y * logistic(y)


@triton.jit
def keep_window(conv, window, channel, tap, live, c_c, c_j, W: tl.constexpr):
    """Store the last W - 1 inputs of a window."""
    at = conv + channel * c_c + (tap - 1) * c_j
    tl.store(at, window.to(conv.dtype.element_ty), mask=live & (tap > 0) & (tap < W))


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=SCALARS)
def serving_kernel(
    x, g, beta, A_log, dt_bias, o, pool, indices, weight, bias, conv, norm_weight, output_gate,
    x_n: tl.int64, g_n: tl.int64, g_h: tl.int64, b_n: tl.int64, b_h: tl.int64, o_n: tl.int64, o_h: tl.int64,
    z_n: tl.int64, z_h: tl.int64, z_v: tl.int64, w_c: tl.int64, w_j: tl.int64, c_n: tl.int64, c_c: tl.int64,
    c_j: tl.int64, d_n: tl.int64, d_h: tl.int64, d_v: tl.int64, index_n: tl.int64, slots: tl.int64,
    null_index: tl.int64, scale, lower_bound, norm_eps,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KI: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BLOCKS: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, DST: tl.constexpr, DST_K: tl.constexpr,
    O_V: tl.constexpr, GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr, L2NORM: tl.constexpr, CONV_BIAS: tl.constexpr, NORM: tl.constexpr, OUT_GATE: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """See the module. BLOCKS: the blocks of V, rounded up to a power of two; WP: the taps W, likewise."""
    NV: tl.constexpr = (V + BV - 1) // BV
    h = (tl.program_id(0) % H).to(tl.int64)
    n = (tl.program_id(0) // H).to(tl.int64)
    kk = tl.arange(0, KP // KI)[:, None] * KI + tl.arange(0, KI)[None, :]
    rows = tl.arange(0, BV)
    slot = valid_slot(indices, n * index_n, slots, null_index)
    place = tl.maximum(slot, 0)
    pool += place * wide(d_n, DST)
    hv = h * GROUP
    mask = tile_mask(rows, kk, slot >= 0, K, V, KP)
    S = tl.load(pool + hv * wide(d_h, DST) + tile_at(rows, kk, d_v, DST, DST_K), mask=mask, other=0.0).to(tl.float32)
    x += n * x_n
    conv += place * c_n
    taps = tl.arange(0, WP)
    tap = taps[None, None, :]
    channel = h * K + kk[:, :, None]
    live = kk[:, :, None] < tl.where(slot >= 0, K, 0)
    q_window = window_of(x, conv, channel, tap, live, c_c, c_j, W)
    k_window = window_of(x, conv, channel + H * K, tap, live, c_c, c_j, W)
    q = finished_keys(convolved(q_window, weight, bias, channel, tap, live, w_c, w_j, W, 2, CONV_BIAS), L2NORM) * scale
    k = convolved(k_window, weight, bias, channel + H * K, tap, live, w_c, w_j, W, 2, CONV_BIAS)
    k = finished_keys(k, L2NORM)
    kq = tl.sum(product(k, q))
    tl.debug_barrier()  # every thread has read what others now overwrite
    keep_window(conv, q_window, channel, tap, live, c_c, c_j, W)
    keep_window(conv, k_window, channel + H * K, tap, live, c_c, c_j, W)
    outs = tl.zeros((BLOCKS, BV), tl.float32)
    block = tl.arange(0, BLOCKS)[:, None]
    for m in range(0, GROUP * NV):
        iv = m % NV
        hv = h * GROUP + m // NV
        vv = iv * BV + rows
        a = 1.0
        if HAS_A:
            a = power_of_two(tl.load(A_log + hv).to(tl.float32) * LOG2E)
        dt = tl.zeros((KP // KI, KI), tl.float32)
        if HAS_BIAS:
            dt = tl.load(dt_bias + hv * K + kk, mask=kk < K, other=0.0).to(tl.float32)
        raw = tl.load(g + n * g_n + hv * g_h + kk, mask=kk < tl.where(slot >= 0, K, 0), other=0.0)
        d = power_of_two(finished_gate(raw, dt, a, lower_bound, GATE, HAS_BIAS))
        b = finished_beta(tl.load(beta + n * b_n + hv * b_h, mask=slot >= 0, other=0.0), SIGMOID, DOUBLE)
        v_channel = 2 * H * K + hv * V + vv[:, None]
        v_live = vv[:, None] < tl.where(slot >= 0, V, 0)
        v_window = window_of(x, conv, v_channel, taps[None, :], v_live, c_c, c_j, W)
        v = convolved(v_window, weight, bias, v_channel, taps[None, :], v_live, w_c, w_j, W, 1, CONV_BIAS)
        tl.debug_barrier()
        keep_window(conv, v_window, v_channel, taps[None, :], v_live, c_c, c_j, W)
        u = b * (v - over_keys(S, d * k))
        out = over_keys(S, d * q) + u * kq
        S = updated(S, d, k, u, pool.dtype.element_ty, ROUND)
        at = hv * wide(d_h, DST) + tile_at(vv, kk, d_v, DST, DST_K)
        tl.store(pool + at, S.to(pool.dtype.element_ty), mask=tile_mask(vv, kk, slot >= 0, K, V, KP))
        after = m + 1
        later = (after % NV) * BV + rows
        at = (h * GROUP + after // NV) * wide(d_h, DST) + tile_at(later, kk, d_v, DST, DST_K)
        held = (slot >= 0) & (after < GROUP * NV)
        S = tl.load(pool + at, mask=tile_mask(later, kk, held, K, V, KP), other=0.0).to(tl.float32)
        outs = tl.where(block == iv, out[None, :], outs)
        if iv == NV - 1:
            whole = block * BV + rows[None, :]
            inside = whole < V
            result = outs
            if NORM:
                result *= 1.0 / tl.sqrt(tl.sum(product(outs, outs)) / V + norm_eps)
                result *= tl.load(norm_weight + whole, mask=inside, other=0.0).to(tl.float32)
            if OUT_GATE:
                z = tl.load(output_gate + n * z_n + hv * z_h + whole * z_v, mask=inside, other=0.0).to(tl.float32)
                result *= logistic(z)
            result = tl.where(slot >= 0, result, 0.0)
            tl.store(o + n * o_n + hv * o_h + whole * O_V, result.to(o.dtype.element_ty), mask=inside)


def run(p: KDAProblem, x: Operands) -> torch.Tensor:
    """The output of kda_decode_fused: one launch."""
    s, pool = x.step, x.state_pool
    o = torch.empty(p.N, p.HV, p.V, dtype=s.x.dtype, device=s.x.device) if x.out is None else x.out
    if not p.N or not pool.shape[0]:
        return o.zero_()
    given = (s.x, x.g, x.beta, x.A_log, x.dt_bias, o, pool, x.read_indices, s.conv_weight, s.conv_bias, s.conv_pool,
             s.norm_weight, s.output_gate)  # fmt: skip
    form = [None if t is None else t.stride() for t in given]
    known = x.memo.get("launch")  # one entry, replaced whole: calls of one form may run in several threads
    rows = {0: rows_of, 1: rows_of, 3: torch.Tensor.contiguous, 4: torch.Tensor.contiguous}
    rows |= {9: torch.Tensor.contiguous, 11: torch.Tensor.contiguous}
    tensors = tuple(rows[i](t) if i in rows and t is not None else t for i, t in enumerate(given))
    if known is None or known[0] != form:
        known = x.memo["launch"] = (form, prepare(p, x, tensors))
    with on_device_of(o):
        known[1].run(tensors)
    return o


def prepare(p: KDAProblem, x: Operands, tensors: tuple[torch.Tensor, ...]) -> Launch:
    """The integers and constants of a launch."""
    s, c = x.step, configure_serving(p)
    rows, g, beta, _, _, o, pool, indices, weight, _, conv = tensors[:11]
    z = (0, 0, 0) if s.output_gate is None else s.output_gate.stride()
    at = states(INDEX, pool, False)
    integers = (
        rows.stride(0), *g.stride()[:2], *beta.stride(), *o.stride()[:2], *z, *weight.stride(), *conv.stride(),
        *at.strides, indices.stride(0), pool.shape[0], x.null_index,
    )  # fmt: skip
    blocks = -(-p.V // c.BV)
    constants = {
        "H": p.H, "GROUP": p.HV // p.H, "K": p.K, "KP": c.KP, "KI": c.KI, "V": p.V, "BV": c.BV,
        "BLOCKS": triton.next_power_of_2(blocks), "W": p.conv_width, "WP": triton.next_power_of_2(p.conv_width),
        "DST": at.unit, "DST_K": at.inner, "O_V": o.stride(2), "GATE": GATES[p.gate], "HAS_A": x.A_log is not None,
        "HAS_BIAS": x.dt_bias is not None, "SIGMOID": p.beta_sigmoid, "DOUBLE": p.neg_eigval, "L2NORM": p.l2norm,
        "CONV_BIAS": s.conv_bias is not None, "NORM": s.norm_weight is not None,
        "OUT_GATE": s.output_gate is not None, "ROUND": pool.dtype != torch.float32,
    }  # fmt: skip
    scalars = (p.scale, p.lower_bound or 0.0, float(s.norm_eps))
    return Launch(
        serving_kernel, (p.N * p.H, 1, 1), integers, scalars, constants, (6,) if x.dt_bias is None else (4, 6), c.warps
    )
