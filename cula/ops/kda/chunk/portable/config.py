"""Launch configurations of the Triton chunk kernels: a small table, chosen from the problem alone."""

from __future__ import annotations

from dataclasses import dataclass

from cula.host.arch import Target
from cula.ops.kda.problem import KDAProblem

#: Capabilities whose blocks may use more than 160 KiB of shared memory; others get at most 99 KiB.
LARGE_SHARED = ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0))


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
    intra: Launch
    walk: Launch
    gradients: Launch


def pow2(n: int, least: int = 16) -> int:
    """The smallest power of two >= n, and >= least."""
    return max(least, 1 << (int(n) - 1).bit_length())


def rows_per_chunk(p: KDAProblem) -> int:
    """Tokens of a chunk: what the call says, or fewer where checkpoints lie between or where K is small.

    More tokens than key channels make the keys of a chunk dependent, and 16-bit roundings grow: with K = 16, no decay
    and beta = 1 the error of o is 6.5e-3 at 64 tokens, 4.4e-3 at 16.
    """
    if p.intermediate_states:
        return p.chunk_size
    rows = min(p.chunk_size, pow2(p.K))
    return min(rows, p.checkpoint_every & -p.checkpoint_every) if p.checkpoint_every else rows


def configure(p: KDAProblem, t: Target, *, backward: bool = False) -> Config:
    """The configuration of a problem on a target. Gradients may be tiny: fp16's range is not for them, TF32's is."""
    dtype = "fp32" if backward and p.dtype == "fp16" else p.dtype
    KP, wide = pow2(p.K), dtype == "fp32"
    large = t.capability is None or t.capability in LARGE_SHARED
    bounded = dtype == "bf16" and p.gate == "lower_bound" and p.lower_bound >= -5.0
    inverse = "fp16" if p.l2norm and not p.neg_eigval else "tf32"
    BV = min(pow2(p.V), 64)
    if wide:
        inverse, walk = "tf32x3", Launch(min(BV, 32 if KP <= 128 else 16), 4, 1)
    elif KP <= 128:
        walk = Launch(BV, 4, 2 if large else 1)
    else:
        walk = Launch(min(BV, 32), 4, 1)
    intra = Launch(min(KP, 64), 4, 1)
    gradients = Launch(min(KP, 32 if wide else 64), 4, 1)
    return Config(
        dtype, KP, rows_per_chunk(p), "tf32x3" if p.dtype == "fp32" else "tf32", inverse, bounded,
        intra, walk, gradients
    )  # fmt: skip
