"""Launch configurations of the Triton decode kernels: a small table, chosen from the problem alone."""

from __future__ import annotations

from dataclasses import dataclass

from cula.host.arch import Target
from cula.ops.kda.problem import KDAProblem

#: fp32 state elements of one program, one warp: a lone token waits for memory alone, so many small programs; several
#: tokens share what a program does once per token, so larger ones, but for trees, which hold two states; where heads
#: are few, the smallest fill the card.
FEW, ONE_TOKEN, MANY_TOKENS = 1024, 2048, 4096
#: The same of kda_decode_fused, four warps.
SERVING = 8192
#: Programs per multiprocessor below which the smallest tiles are used.
FILLED = 16


@dataclass(frozen=True)
class Config:
    """What one call's kernel is compiled for, besides its flags. KI: adjacent elements of K on adjacent lanes."""

    KP: int
    KI: int
    BV: int
    warps: int = 1


def pow2(n: int, least: int = 1) -> int:
    """The smallest power of two >= n, and >= least."""
    return max(least, 1 << (int(n) - 1).bit_length())


def configure(p: KDAProblem, t: Target) -> Config:
    """The configuration of a problem on a target; KP and KI, which decide bits, do not depend on tokens or batch."""
    KP = pow2(p.K, 16)
    KI = min(KP, 64 if p.state_dtype == "bf16" else 32)
    elements = ONE_TOKEN if p.tokens <= 2 or p.tree else MANY_TOKENS
    if p.N * p.HV * pow2(p.V) * KP < FILLED * max(t.sm_count, 1) * elements:
        elements = FEW
    return Config(KP, KI, min(pow2(p.V), max(4, elements // KP)))


def configure_serving(p: KDAProblem) -> Config:
    """The configuration of kda_decode_fused: four warps, a tile of whole heads where it fits."""
    KP = pow2(p.K, 16)
    return Config(KP, min(KP, 64 if p.state_dtype == "bf16" else 32), min(pow2(p.V, 16), max(16, SERVING // KP)), 4)
