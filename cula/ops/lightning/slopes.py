"""Decay slopes of Lightning Attention, in the two conventions that models use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cula.host.errors import RangeError

if TYPE_CHECKING:
    import torch


def lightning_slopes(num_heads: int, layer_idx: int, num_layers: int, convention: str = "fla") -> torch.Tensor:
    """Slopes s >= 0, one per head; the decay per token is exp(-s). Returns float32 `[num_heads]` on the CPU.

    convention "fla": s_h = 8/H * (1 - layer_idx/num_layers) * h, h = 0..H-1 (head 0 never decays).
    convention "minimax": ALiBi slopes (2^(-8(h+1)/n) for n a power of two, else the next lower power's slopes and
    every second one of the power above), times 1 - layer_idx/(num_layers-1) + 1e-5 (1 + 1e-5 where num_layers <= 1).
    RangeError for a convention, head count or layer index that does not exist.
    """
    import torch

    check_layer(num_heads, layer_idx, num_layers)
    if convention == "fla":
        step = fla_step(num_heads, layer_idx, num_layers)
        values = [step * h for h in range(num_heads)]
    elif convention == "minimax":
        factor = 1.0 + 1e-5 if num_layers <= 1 else 1.0 - layer_idx / (num_layers - 1) + 1e-5
        values = [factor * s for s in _alibi(num_heads)]
    else:
        raise RangeError(f"convention must be 'fla' or 'minimax'; got {convention!r}")
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def check_layer(num_heads: int, layer_idx: int, num_layers: int) -> None:
    """RangeError for a head count or layer index that does not exist."""
    if num_heads < 1:
        raise RangeError(f"num_heads must be at least 1; got {num_heads}")
    if num_layers < 1 or not 0 <= layer_idx < num_layers:
        raise RangeError(f"layer_idx must lie in 0..num_layers-1 (num_layers={num_layers}); got {layer_idx}")


def fla_step(num_heads: int, layer_idx: int, num_layers: int) -> float:
    """By how much the slope grows from head to head in the convention "fla"."""
    return 8.0 / num_heads * (1.0 - layer_idx / num_layers)


def _alibi(n: int) -> list[float]:
    power = 2 ** math.floor(math.log2(n))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    if power < n:
        slopes += _alibi(2 * power)[0::2][: n - power]
    return slopes
