"""What the problems and the operands of every algorithm hold. A problem is plain Python: a policy can ask on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cula.host.arch import Target, target_of
from cula.ops.common.cp_mode import CPMode

Tensor = torch.Tensor


@dataclass(frozen=True)
class SequenceProblem:
    """The part of a call's description that no algorithm adds to.

    Sizes as in the public API (T: tokens in dim 1, for packed input their total). lengths: tokens per packed
    sequence, None for a fixed batch or where only the device knows them (`packed` tells which). lengths_later: they
    are None because the call is being traced, the host will know them when it runs. tokens: most tokens per sequence
    in the decode stage, else 0. wide_rows: 64 tokens of an input span 2^31 elements or more, so that even offsets
    inside a chunk need 64 bits.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: str = "bf16"
    state_dtype: str = "fp32"
    packed: bool = False
    lengths: tuple[int, ...] | None = None
    lengths_later: bool = False
    scale: float = 1.0
    initial_state: bool = False
    final_state: bool = False
    state_v_first: bool = False
    chunk_size: int = 64
    grad: bool = False
    cp: CPMode = CPMode.OFF
    pool: bool = False
    checkpoint_every: int = 0
    position_offsets: bool = False
    host_offsets: bool = True
    tokens: int = 0
    tree: bool = False
    wide_rows: bool = False

    @property
    def host_lengths(self) -> bool:
        """The host knows how long each sequence is, or will when the call runs."""
        return not self.packed or self.lengths is not None or self.lengths_later

    @property
    def compute_dtype(self) -> str:
        """What the eager rows compute in."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def tokens_stage(self) -> bool:
        """A decode or verify call (a prefill describes its pool too, but no token count)."""
        return self.pool and self.tokens > 0

    def __str__(self) -> str:
        shape = f"B{self.B}-T{self.T}-H{self.H}" + (f"-HV{self.HV}" if self.HV != self.H else "")
        return f"{shape}-K{self.K}" + (f"-V{self.V}" if self.V != self.K else "") + f"-{self.dtype}"


@dataclass(kw_only=True)
class SequenceOperands:
    """The tensors of a call beyond its inputs, as the caller gave them."""

    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    boundaries: tuple[int, ...] | None = None  # cu_seqlens on the host
    state_pool: Tensor | None = None
    read_indices: Tensor | None = None
    write_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    checkpoints: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    position_offsets: Tensor | None = None
    states_out: Tensor | None = None
    states_out_indices: Tensor | None = None
    update_state: bool = False
    null_index: int = -1
    out: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)  # a row's own facts of calls that look just like this one
    target: Target = field(default_factory=lambda: target_of(torch.device("cpu")))
