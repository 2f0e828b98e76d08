"""What a fused kernel is compiled for, and the sizes that follow; needs no kernel DSL."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 32  # tokens of a stage, two chunks
TILE = ROWS * 256  # bytes of 128 bf16 channels
GROUP = 128  # threads of a warpgroup
PRODUCERS = 2
REGISTERS = {1: (128, 208), 2: (96, 160)}  # of a producer's and a consumer's thread, by consumer warpgroups


@dataclass(frozen=True)
class Options:
    """What a kernel is compiled for."""

    consumers: int = 2  # warpgroups, 64 rows of V each
    wide_gate: bool = False  # g in fp32
    wide_beta: bool = True  # beta in fp32
    has_A: bool = True
    has_bias: bool = True
    sigmoid: bool = True  # of beta
    doubled: bool = False
    packed: int = 0  # bytes of a boundary, 0: a fixed batch
    state_in: str = ""  # "fp32" or "bf16"
    state_out: str = ""
    index_in: int = 0  # bytes of a slot's index, 0: sequence n has slot n
    index_out: int = 0
    flagged: bool = False  # a flag says which sequences have an entry state
    checkpoints: str = ""  # "fp32" or "bf16"
    offset: int = 0  # bytes of a checkpoint offset

    @property
    def stage_bytes(self) -> int:
        """q, k, g or ck, v; Aqk and M of two chunks; total; beta, both norms."""
        return 4 * TILE + (2 * TILE if self.wide_gate else 0) + 4 * 512 + 2 * 512 + 4 * 4 * ROWS

    @property
    def stages(self) -> int:
        """As many as 227 KiB hold, an even number."""
        return min(6, (227 * 1024 - 5120) // -(-self.stage_bytes // 1024) // 1024 // 2 * 2)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return GROUP * (PRODUCERS + self.consumers)
