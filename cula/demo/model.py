"""The byte-level language model: embedding, blocks of KDA and SwiGLU, and the embedding again as output."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cula.demo.config import DemoConfig
from cula.layers import KDACache, KDADraft, KimiDeltaAttention
from cula.layers.cache import Slots


class SwiGLU(nn.Module):
    """x [..., D] -> (silu(x W1) * x W2) W3 [..., D], inner width `hidden`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's formula."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + KDA(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixer = KimiDeltaAttention(config.width, num_heads=config.heads, head_dim=config.head_dim)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, mix: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """x [B,T,D] -> [B,T,D]; `mix` takes the mixer's place (a prefill, a step, a verification)."""
        x = x + (mix or self.mixer)(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out. All parameters are fp32.

    `prefill`, `step` and `verify` work on caches from `allocate`, one per layer, without gradients.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        with torch.no_grad():
            self.embed.weight.normal_(0.0, config.width**-0.5)
            for block in self.blocks:
                block.mlp.gate_up.weight.normal_(0.0, config.width**-0.5)
                block.mlp.down.weight.normal_(0.0, config.hidden**-0.5)
                for last in (block.mlp.down, block.mixer.o_proj):
                    last.weight.mul_((2 * config.layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B,T] -> logits [B,T,256], with gradients."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self._logits(x)

    def allocate(self, slots: int) -> list[KDACache]:
        """Caches for `slots` sequences, one per layer."""
        return [block.mixer.allocate_cache(slots) for block in self.blocks]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, caches: list[KDACache], slots: Slots, cu_seqlens: Tensor | None = None) -> Tensor:
        """Continue the sequences of `slots` by tokens [N,T], or packed ones [1,T] with cu_seqlens [N+1]; logits."""
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches):
            x = block(x, lambda y, b=block, c=cache: b.mixer.prefill(y, c, slots, cu_seqlens))
        return self._logits(x)

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[KDACache], slots: Slots) -> Tensor:
        """One token per sequence, tokens [N]; logits [N,256]."""
        x = self.embed(tokens)[:, None]
        for block, cache in zip(self.blocks, caches):
            x = block(x, lambda y, b=block, c=cache: b.mixer.step(y, c, slots))
        return self._logits(x)[:, 0]

    @torch.no_grad()
    def verify(self, tokens: Tensor, caches: list[KDACache], slots: Slots) -> tuple[Tensor, list[KDADraft]]:
        """Logits [N,T,256] of draft tokens [N,T], and per layer what a commit needs; the caches stay as they are."""
        x, drafts = self.embed(tokens), []

        for block, cache in zip(self.blocks, caches):

            def mix(y: Tensor, b: Block = block, c: KDACache = cache) -> Tensor:
                out, draft = b.mixer.verify(y, c, slots)
                drafts.append(draft)
                return out

            x = block(x, mix)
        return self._logits(x), drafts

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embed.weight)
