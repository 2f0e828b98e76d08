"""MiniMax's layer as a client: its block-by-block loop, prefill and step by step, equals our calls within rounding."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import normal
from cula.checks.tolerance import relative_error
from cula.lightning import chunk_lightning_attn, lightning_decode, lightning_prefill, lightning_slopes

LAYERS, H, D, BLOCK = 8, 4, 32, 256


def layer_slopes(layer: int) -> torch.Tensor:
    """The layer's slopes: powers of 2^(-8/H), times a factor that falls from 1 to almost 0 over the layers."""
    power = 2.0 ** (-8.0 / H * torch.arange(1, H + 1, dtype=torch.float64))
    return (power * (1 - layer / (LAYERS - 1 + 1e-5) + 1e-5)).float()


def block_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, S: torch.Tensor | None):
    """What MiniMax's layer computes in plain torch, in the inputs' dtype: `[B, T, H, D]`, blocks of 256, no scale.

    Without a state, whole blocks; with one `[B, H, D, D]`, one token after another. Returns (o, the state).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s, T, outputs = slopes.to(q.dtype)[:, None, None], q.shape[2], []
    if S is not None:
        for t in range(T):
            S = torch.exp(-s) * S + k[:, :, t, :, None] @ v[:, :, t, None]
            outputs.append(q[:, :, t, None] @ S)
        return torch.cat(outputs, 2).transpose(1, 2), S
    S = q.new_zeros(q.shape[0], H, D, D)
    place = torch.arange(1, BLOCK + 1, dtype=q.dtype)[:, None]
    apart = place - place.T
    pairs = torch.exp(torch.where(apart >= 0, -s * apart, -torch.inf))
    into, left = torch.exp(-s * place), torch.exp(-s * (BLOCK - place))
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        n = end - start
        a, b, c = q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]
        inside = (a @ b.mT * pairs[:, :n, :n]) @ c
        outputs.append(inside + (a * into[:, :n]) @ S)
        S = S * torch.exp(-s * n) + (b * left[:, -n:]).mT @ c
    return torch.cat(outputs, 2).transpose(1, 2), S


def inputs(T: int, dtype: torch.dtype) -> list[torch.Tensor]:
    drawn = normal(3, 2, T, H, D, seed=T)
    return [torch.nn.functional.silu(0.3 * x).to(dtype) for x in drawn]


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("T", [1, 100, 256, 300, 600])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.float64, 1e-10), (torch.bfloat16, 2e-2)])
def test_prefill_is_the_block_loop(on_lightning_chunk, layer: int, T: int, dtype: torch.dtype, limit: float) -> None:
    q, k, v = inputs(T, dtype)
    slopes = layer_slopes(layer)
    expected, state = block_loop(*(x.float() if dtype == torch.bfloat16 else x for x in (q, k, v)), slopes, None)
    o, last = chunk_lightning_attn(
        q, k, v, scale=1.0, slopes=slopes, output_final_state=True, implementation=on_lightning_chunk.name
    )
    assert relative_error(o, expected.double()) <= limit
    assert relative_error(last, state.double()) <= limit


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_prefill_then_step_by_step(on_lightning_decode, layer: int, dtype: torch.dtype, limit: float) -> None:
    q, k, v = inputs(280, dtype)
    slopes, slots = layer_slopes(layer), torch.tensor([1, 0])
    wide = [x.float() for x in (q, k, v)]
    _, state = block_loop(*(x[:, :270] for x in wide), slopes, None)
    expected, state = block_loop(*(x[:, 270:] for x in wide), slopes, state)
    pool = torch.zeros(2, H, D, D)
    lightning_prefill(
        *(x[:, :270] for x in (q, k, v)), scale=1.0, slopes=slopes, state_pool=pool, read_indices=slots,
    )  # fmt: skip
    for t in range(270, 280):
        o = lightning_decode(
            *(x[:, t : t + 1] for x in (q, k, v)), scale=1.0, slopes=slopes, state_pool=pool, state_indices=slots,
            implementation=on_lightning_decode.name,
        )  # fmt: skip
        assert relative_error(o, expected[:, t - 270 : t - 269].double()) <= limit
    assert relative_error(pool[slots].mT, state.double()) <= limit


def test_the_helpers_slopes_are_the_layers() -> None:
    """`lightning_slopes` takes the layer factor without the 1e-5 in its denominator: 2e-6 of the first slope apart."""
    for layer in range(LAYERS):
        assert (lightning_slopes(H, layer, LAYERS, "minimax") - layer_slopes(layer)).abs().max() <= 2e-6
