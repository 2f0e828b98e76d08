"""Causal depthwise convolution with a carried history, for fixed batches and packed sequences, in plain torch.

    y[t, c] = silu(bias[c] + sum_j weight[c, j] * x[t - (W-1) + j, c])      j = 0..W-1

The last tap is the current token's. The rows before a sequence's first token are its history (zeros by default),
never another sequence's rows.
Everything stays on the device: no boundary is copied to the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Window:
    """Where each token and each sequence's history lie in one buffer: W-1 history rows, then the tokens.

    Fixed batch (cu_seqlens None): the buffer is [B, W-1+T, C]. Packed (B = 1, N sequences): [1, T+(N+1)*(W-1), C],
    sequence n after its own history; rows behind cu_seqlens[-1] come last, after W-1 rows of zeros.
    Boundaries are clamped between their predecessor and T: the kernels are who refuses wrong ones.
    """

    def __init__(self, x: Tensor, width: int, cu_seqlens: Tensor | None = None) -> None:
        """x: [B,T,C]. width: W >= 1. cu_seqlens: [N+1] integers on x's device."""
        self.tail = width - 1
        self.tokens: Tensor | None = None
        if cu_seqlens is None:
            return
        cu = cu_seqlens.to(device=x.device, dtype=torch.int64).clamp(0, x.shape[1]).cummax(0).values
        place = torch.arange(x.shape[1], device=x.device)
        sequence = torch.searchsorted(cu[1:].contiguous(), place, right=True)
        self.tokens = place + (sequence + 1) * self.tail
        self.sequences = cu.numel() - 1
        each = torch.arange(self.sequences, device=x.device)
        taps = torch.arange(self.tail, device=x.device)
        self.first = (cu[:-1] + each * self.tail)[:, None] + taps
        self.last = (cu[1:] + each * self.tail)[:, None] + taps

    def fill(self, x: Tensor, history: Tensor | None) -> Tensor:
        """The buffer that holds x [B,T,C] behind history [N,C,W-1] (oldest first; None = zeros)."""
        if self.tokens is None:
            if history is None:
                return F.pad(x, (0, 0, self.tail, 0))
            return torch.cat((history.transpose(1, 2).to(x.dtype), x), 1)
        rows = x.new_zeros(x.shape[1] + (self.sequences + 1) * self.tail, x.shape[2])
        rows = rows.index_copy(0, self.tokens, x[0])
        if history is not None:
            past = history.transpose(1, 2).reshape(-1, x.shape[2])
            rows = rows.index_copy(0, self.first.reshape(-1), past.to(x.dtype))
        return rows[None]

    def pick(self, y: Tensor) -> Tensor:
        """The tokens' rows [B,T,C] of y [B,rows-(W-1),C], the convolution of a filled buffer."""
        return y if self.tokens is None else y.index_select(1, self.tokens - self.tail)

    def new_history(self, rows: Tensor) -> Tensor:
        """The last W-1 rows of each sequence, [N,C,W-1], of a filled buffer; an empty sequence keeps its history."""
        if self.tokens is None:
            return rows[:, rows.shape[1] - self.tail :].transpose(1, 2)
        return rows[0][self.last].transpose(1, 2)


def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(depthwise convolution): rows [B,R,C], weight [C,W], bias [C] -> [B,R-(W-1),C] in rows' dtype.

    The 4-D form is the fast one on CPUs: the channels are innermost, as they are in memory.
    """
    picture = rows.transpose(1, 2).unsqueeze(2)
    kernel = weight.to(rows.dtype)[:, None, None]
    y = F.conv2d(picture, kernel, None if bias is None else bias.to(rows.dtype), groups=rows.shape[2])
    return F.silu(y.squeeze(2).transpose(1, 2))
