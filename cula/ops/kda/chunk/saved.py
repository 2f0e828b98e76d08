"""What a forward stage may keep for a backward stage, by name.

A backward row works from the call's inputs alone. `Saved` is an optional extra: only the row that wrote it, and
the rows it names as partners, read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Saved:
    """writer: the forward row's name. tensors: by name, in the writer's own layout."""

    writer: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class ForwardResult:
    """o `[B,T,HV,V]`, final_state and h as the call asked (else None), and what is kept for the backward."""

    o: torch.Tensor
    final_state: torch.Tensor | None = None
    h: torch.Tensor | None = None
    saved: Saved | None = None


@dataclass
class Gradients:
    """Gradients of the inputs, each with its input's shape and dtype, or None where it is not needed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
