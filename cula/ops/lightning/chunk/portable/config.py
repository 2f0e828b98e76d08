"""Launch configurations of the Triton chunk kernels, and how long sequences are cut: from the problem alone."""

from __future__ import annotations

from dataclasses import dataclass

from cula.host.arch import Target
from cula.ops.common.cp_mode import CPMode
from cula.ops.lightning.problem import LightningProblem

#: KiB of shared memory that a block may use, by capability; 99 on any other GPU.
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}

#: Microseconds, estimates until a GPU has run this: a chunk of the walk, a chunk of the walk without outputs, a segment
#: in `merge`, two more launches. A cut must promise to save this part of the time.
WALK, STATES, MERGE, LAUNCHES, GAIN = 1.0, 0.7, 1.0, 12.0, 0.10
PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_CHUNKS = 4


@dataclass(frozen=True)
class Config:
    """What one walk is compiled for, besides its flags. wide: products of fp32 numbers, by `precision`."""

    BT: int
    BV: int
    KP: int
    wide: bool
    precision: str
    num_warps: int
    num_stages: int


def pow2(n: int, least: int = 16) -> int:
    """The smallest power of two >= n, and >= least."""
    return max(least, 1 << (int(n) - 1).bit_length())


def configure(p: LightningProblem, t: Target, K: int, V: int) -> Config:
    """The configuration of a walk with K channels in the products and V columns; a backward has them the other way.

    fp16 has too little range for states and gradients, so its products are TF32's, which keep as many digits.
    """
    KP, BT = pow2(K), min(p.chunk_size, 64)
    if p.checkpoint_every:
        BT = min(BT, p.checkpoint_every & -p.checkpoint_every)
    if p.dtype != "bf16":
        BV = min(pow2(V), 32 if KP <= 128 else 16)
        return Config(BT, BV, KP, True, "tf32x3" if p.dtype == "fp32" else "tf32", 4, 1)
    BV = min(pow2(V), 64 if KP <= 128 else 32)
    stage = 2 * BT * (2 * KP + BV)
    rest = 2 * BT * max(BT, BV)
    shared = 1024 * SHARED.get(t.capability or (9, 0), 99)
    return Config(BT, BV, KP, False, "tf32", 4, max(1, min(3, (shared - rest) // stage)))


def segments_of(p: LightningProblem, c: Config, sm_count: int) -> int:
    """Into how many parts sequences are cut: 1 where context parallelism is off, or the card is busy as it is.

    Packed sequences are as long as they can be: a part that lies behind a sequence's end does nothing.
    """
    if p.cp is CPMode.OFF or p.grad or sm_count < 1:
        return 1
    lengths = p.lengths if p.lengths is not None else (p.T,) * (1 if p.packed else p.B)
    chunks = [-(-n // c.BT) for n in lengths]
    columns, longest = p.HV * -(-p.V // c.BV), max(chunks, default=0)
    busy = sum(chunks) * columns / sm_count
    best, least = 1, (1 - GAIN) * max(longest, busy) * WALK
    for parts in PARTS:
        cut = -(-longest // parts)
        if cut < LEAST_CHUNKS:
            break
        time = max(cut, busy) * WALK + max(cut, busy * (parts - 1) / parts) * STATES + parts * MERGE + LAUNCHES
        if time < least:
            best, least = parts, time
    return best
