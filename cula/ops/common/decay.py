"""decay, slots and entry states (Triton device functions): what the kernels of a fixed decay per head share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

#: Where a state comes from or goes to.
NONE = tl.constexpr(0)
TENSOR = tl.constexpr(1)
POOL = tl.constexpr(2)
SEGMENTS = tl.constexpr(3)


@triton.jit
def decay_pair(slope, tokens):
    """(a, b) with a + b = exp(-slope * tokens), b exact where a would round a slow decay to another one."""
    x = slope * tokens
    small = 1.0 - x * (1.0 / 5.0) * (1.0 - x * (1.0 / 6.0) * (1.0 - x * (1.0 / 7.0)))
    small = -x * (1.0 - x * (1.0 / 2.0) * (1.0 - x * (1.0 / 3.0) * (1.0 - x * (1.0 / 4.0) * small)))
    slow = x < 0.25
    return tl.where(slow, 1.0, tl.exp2(-x * LOG2E)), tl.where(slow, small, 0.0)


@triton.jit
def find_slot(indices, n, stride, slots, null_index, HAS: tl.constexpr):
    """Slot of sequence n (n itself without indices), -1 where it is null or out of range."""
    slot = n.to(tl.int64)
    if HAS:
        slot = tl.load(indices + n.to(tl.int64) * stride).to(tl.int64)
        slot = tl.where((slot == null_index) | (slot < 0), -1, slot)
    return tl.where(slot >= slots, -1, slot)
