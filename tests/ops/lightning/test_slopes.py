"""Decay slopes in both conventions, against the formulas written out here."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.lightning import lightning_slopes


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 64])
@pytest.mark.parametrize("layer, layers", [(0, 1), (0, 24), (7, 24), (23, 24)])
def test_fla_convention(heads: int, layer: int, layers: int) -> None:
    got = lightning_slopes(heads, layer, layers)
    assert got.dtype == torch.float32 and got.shape == (heads,) and got.device.type == "cpu"
    expected = [(8.0 / heads) * (1.0 - layer / layers) * h for h in range(heads)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)
    assert got[0] == 0.0


def alibi(heads: int) -> list[float]:
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return alibi(lower) + alibi(2 * lower)[::2][: heads - lower]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 40, 64, 96])
@pytest.mark.parametrize("layer, layers", [(0, 1), (0, 80), (40, 80), (79, 80)])
def test_minimax_convention(heads: int, layer: int, layers: int) -> None:
    factor = 1.0 + 1e-5 if layers <= 1 else 1.0 - layer / (layers - 1) + 1e-5
    got = lightning_slopes(heads, layer, layers, convention="minimax")
    assert got.tolist() == pytest.approx([s * factor for s in alibi(heads)], rel=1e-6)


def test_slopes_never_grow_a_state() -> None:
    for convention in ("fla", "minimax"):
        for layer in range(8):
            slopes = lightning_slopes(16, layer, 8, convention=convention)
            assert bool((slopes >= 0).all()) and math.isfinite(float(slopes.sum()))


BAD = [(0, 0, 1, "fla"), (4, -1, 4, "fla"), (4, 4, 4, "fla"), (4, 0, 0, "fla"), (4, 0, 4, "alibi")]


@pytest.mark.parametrize("heads, layer, layers, convention", BAD)
def test_bad_arguments(heads: int, layer: int, layers: int, convention: str) -> None:
    with pytest.raises(cula.RangeError):
        lightning_slopes(heads, layer, layers, convention)
