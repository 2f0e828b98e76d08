"""gate (Triton device functions): the finished base-2 gate, beta and their slopes, as every part needs them."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

#: PTX's ex2 and rcp: what exp2 and a division compile to carries range checks that these arguments never need.
PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET", "0") != "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Bits a single token may lose: exp2 of anything below is 0 in fp32, and sums over a chunk keep their digits.
FLOOR = tl.constexpr(-256.0)

FINISHED = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
LOWER_BOUND = tl.constexpr(2)


@triton.jit
def exp2(x):
    """2^x, 0 below -126."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def exp2_again(x):
    """exp2, computed anew where the same power was computed before: a value kept for later would cost registers."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, False, 1)
    return tl.exp2(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), to fp32 rounding for any x."""
    y = 1.0 + exp2(-x * LOG2E)
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1)
    return 1.0 / y


@triton.jit
def sigmoid_and_slope(x):
    """sigmoid(x) and its derivative sigmoid(x) sigmoid(-x)."""
    e = exp2(tl.minimum(-x * LOG2E, 120.0))
    if PTX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, True, 1)
    else:
        y = 1.0 / (1.0 + e)
    return y, y * (y * e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), the series where log would lose digits."""
    e = exp2(-tl.abs(x) * LOG2E)
    small = e * (1.0 - e * (0.5 - e * 0.33333333))
    return tl.maximum(x, 0.0) + tl.where(e < 0.01, small, tl.log2(1.0 + e) * LN2)


@triton.jit
def base2_gate(x, a, lower_bound, GATE: tl.constexpr):
    """log2 of the decay from the raw gate + bias x; a = exp(A_log), or 1."""
    if GATE == SOFTPLUS:
        x = -a * softplus(x)
    if GATE == LOWER_BOUND:
        x = lower_bound * sigmoid(a * x)
    return tl.maximum(x * LOG2E, FLOOR)


@triton.jit
def finished_beta(x, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """beta from logits where SIGMOID, doubled where DOUBLE."""
    if SIGMOID:
        x = sigmoid(x)
    if DOUBLE:
        x = 2.0 * x
    return x
