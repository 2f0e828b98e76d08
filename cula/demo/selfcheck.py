"""The same text through every way in: one-shot prefill, chunked prefill, decode and verify must agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cula.demo.model import ByteLM

#: Largest difference of logits, relative to the largest logit: fp32 rounding on a CPU; GPUs may split fp32 products.
TOLERANCE_CPU = 1e-4
TOLERANCE_OTHER = 1e-3


def tolerance(model: ByteLM) -> float:
    """The bound for the device that the model is on."""
    return TOLERANCE_CPU if next(model.parameters()).device.type == "cpu" else TOLERANCE_OTHER


def self_check(model: ByteLM, tokens: Tensor) -> dict[str, float]:
    """Way -> max |logits - one-shot prefill| / max |one-shot prefill| for tokens int64 [N,T], T >= 24."""
    tokens = tokens.to(next(model.parameters()).device)
    slots = torch.arange(tokens.shape[0], device=tokens.device)
    truth = model.prefill(tokens, model.allocate(tokens.shape[0]), slots)
    ways: dict[str, Callable[[ByteLM, Tensor, Tensor], Tensor]] = {
        "training forward": _forward,
        "chunked prefill": _chunked,
        "decode, token by token": _decode,
        "verify, 5 of 8 drafts kept": _verify,
    }
    scale = truth.abs().max()
    return {name: ((way(model, tokens, slots) - truth).abs().max() / scale).item() for name, way in ways.items()}


@torch.no_grad()
def _forward(model: ByteLM, tokens: Tensor, slots: Tensor) -> Tensor:
    return model(tokens)


def _chunked(model: ByteLM, tokens: Tensor, slots: Tensor) -> Tensor:
    caches, pieces, start = model.allocate(len(slots)), [], 0
    for size in (1, 2, 17, tokens.shape[1]):
        pieces.append(model.prefill(tokens[:, start : start + size], caches, slots))
        start += size
    return torch.cat(pieces, 1)


def _decode(model: ByteLM, tokens: Tensor, slots: Tensor) -> Tensor:
    caches = model.allocate(len(slots))
    return torch.stack([model.step(token, caches, slots) for token in tokens.unbind(1)], 1)


def _verify(model: ByteLM, tokens: Tensor, slots: Tensor) -> Tensor:
    """Half by prefill; then 8 drafts at a time, of which 5 are committed and the rest thrown away."""
    caches, half = model.allocate(len(slots)), tokens.shape[1] // 2
    pieces = [model.prefill(tokens[:, :half], caches, slots)]
    start = half
    while start < tokens.shape[1]:
        kept = min(5, tokens.shape[1] - start)
        logits, drafts = model.verify(tokens[:, start : start + 8], caches, slots)
        for cache, draft in zip(caches, drafts):
            draft.commit(cache, [kept] * len(slots))
        pieces.append(logits[:, :kept])
        start += kept
    return torch.cat(pieces, 1)
