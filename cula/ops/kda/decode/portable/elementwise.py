"""exp2, sigmoid, softplus and a product to be summed (Triton device functions), for any argument."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

#: PTX's ex2 and rcp: what exp2 and a division compile to carries range checks that these arguments never need.
PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET", "0") != "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power_of_two(x):
    """2^x, 0 below -126."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def product(x, y):
    """x y, rounded, for a sum over threads.

    A plain product may be fused into the sum's first addition: each of two lanes then adds its own product exactly and
    the other's rounded, and the sum is not the same number in both.
    """
    return tl.fma(x, y, tl.zeros_like(x))


@triton.jit
def reciprocal(x):
    """1 / x."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def logistic(x):
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + power_of_two(-x * LOG2E))


@triton.jit
def log_of_one_plus_exp(x):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), the series where log would lose digits."""
    e = power_of_two(-tl.abs(x) * LOG2E)
    series = e * (1.0 - e * (0.5 - e * 0.33333333))
    return tl.maximum(x, 0.0) + tl.where(e < 0.01, series, tl.log2(1.0 + e) * LN2)
