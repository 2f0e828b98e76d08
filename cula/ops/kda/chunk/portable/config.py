"""Launch configurations of the Triton chunk kernels: a small table, chosen from the problem alone."""

from __future__ import annotations

from dataclasses import dataclass

from cula.host.arch import Target
from cula.ops.kda.problem import KDAProblem

#: KiB of shared memory that a block may use, by capability; 99 on any other GPU.
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}


@dataclass(frozen=True)
class Launch:
    """block: BK of token-parallel kernels, BV of walks."""

    block: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config:
    """What one call's kernels are compiled for, besides its flags."""

    dtype: str  # of the tiles and the operands of products: the inputs', but fp32 in the backward of fp16
    KP: int
    BT: int
    precision: str
    inverse: str
    bounded: bool
    whole: bool  # a tile's pairs are one product
    intra: Launch
    walk: Launch
    gradients: Launch


def pow2(n: int, least: int = 16) -> int:
    """The smallest power of two >= n, and >= least."""
    return max(least, 1 << (int(n) - 1).bit_length())


def rows_per_chunk(p: KDAProblem) -> int:
    """Tokens of a chunk: what the call says, or fewer where checkpoints lie between, where K is small, where it pays.

    More tokens than key channels make the keys of a chunk dependent, and 16-bit roundings grow: with K = 16, no decay
    and beta = 1 the error of o is 6.5e-3 at 64 tokens, 4.4e-3 at 16. It pays where 32 rows are one block: `is_bounded`.
    """
    if p.intermediate_states:
        return p.chunk_size
    rows = min(p.chunk_size, pow2(p.K), 32 if p.l2norm and is_bounded(p) else 64)
    return min(rows, p.checkpoint_every & -p.checkpoint_every) if p.checkpoint_every else rows


def is_bounded(p: KDAProblem) -> bool:
    """Whether no gate of the call is so strong that the factors of 16 rows leave bf16's range."""
    return p.dtype == "bf16" and p.gate == "lower_bound" and p.lower_bound >= -5.0


def stages_of_walk(BT: int, KP: int, BV: int, shared: int) -> int:
    """How many chunks' tiles a walk of 16-bit tiles holds at once, at most three: one in use, two under way."""
    stage = 2 * (3 * BT * KP + 2 * BT * BT + BT * BV)
    rest = 2 * BT * KP
    return max(1, min(3, (1024 * shared - rest) // stage))


def configure(p: KDAProblem, t: Target, *, backward: bool = False) -> Config:
    """The configuration of a problem on a target. Gradients may be tiny: fp16's range is not for them, TF32's is."""
    dtype = "fp32" if backward and p.dtype == "fp16" else p.dtype
    KP, wide = pow2(p.K), dtype == "fp32"
    bounded, BT = is_bounded(p), rows_per_chunk(p)
    whole = bounded and (BT == 16 or (BT == 32 and p.l2norm))
    inverse = "fp16" if p.l2norm and not p.neg_eigval else "tf32"
    BV = min(pow2(p.V), 64)
    if wide:
        inverse, walk = "tf32x3", Launch(min(BV, 32 if KP <= 128 else 16), 4, 1)
    elif KP <= 128:
        walk = Launch(BV, 4, stages_of_walk(BT, KP, BV, SHARED.get(t.capability or (9, 0), 99)))
    else:
        walk = Launch(min(BV, 32), 4, 1)
    intra = Launch(min(KP, 32), 1, 1) if whole else Launch(min(KP, 64), 4, 1)
    gradients = Launch(min(KP, 32 if wide else 64), 4, 1)
    return Config(
        dtype, KP, BT, "tf32x3" if p.dtype == "fp32" else "tf32", inverse, bounded, whole, intra, walk, gradients
    )  # fmt: skip
