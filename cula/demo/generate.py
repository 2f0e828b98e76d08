"""Text from the trained model: the prompt is prefilled once, its slot copied, and all samples decoded together."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.demo.model import ByteLM


def sample(
    model: ByteLM,
    prompt: bytes,
    *,
    length: int,
    samples: int = 1,
    temperature: float = 0.7,
    top_p: float = 0.9,
    seed: int = 0,
) -> list[bytes]:
    """`samples` continuations of `prompt` (1 byte or more), `length` bytes each, without the prompt."""
    device = next(model.parameters()).device
    caches = model.allocate(samples)
    tokens = torch.tensor([list(prompt)], device=device)
    logits = model.prefill(tokens, caches, [0])[:, -1].expand(samples, -1)
    if samples > 1:
        for cache in caches:
            cache.copy([0] * (samples - 1), range(1, samples))
    slots = torch.arange(samples, device=device)
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Tensor] = []
    for _ in range(length):
        token = _draw(logits.cpu(), temperature, top_p, generator)
        drawn.append(token)
        if len(drawn) < length:
            logits = model.step(token.to(device), caches, slots)
    if not drawn:
        return [b""] * samples
    return [bytes(row) for row in torch.stack(drawn, 1).tolist()]


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token per row of logits [N,256], from the smallest set of likeliest ones that holds `top_p`."""
    chance, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    chance = chance.masked_fill(chance.cumsum(-1) - chance >= top_p, 0.0)
    return order.gather(1, torch.multinomial(chance, 1, generator=generator))[:, 0]
