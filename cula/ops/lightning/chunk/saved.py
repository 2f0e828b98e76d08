"""What the rows of the chunk stages return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass
class ForwardResult:
    """o `[B,T,HV,V]`, and final_state as the call asked, else None. Nothing is kept for the backward."""

    o: Tensor
    final_state: Tensor | None = None


@dataclass
class Gradients:
    """Gradients of the inputs, each with its input's shape and dtype; initial_state's None where there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    initial_state: Tensor | None = None
