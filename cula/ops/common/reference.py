"""The references of every algorithm walk sequences alike: a batch at once, packed sequences one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

Tensor = torch.Tensor


def run_sequences(
    step: Callable[..., tuple[Tensor, Tensor, Tensor]], inputs: tuple[Tensor, ...], initial_state: Tensor | None,
    cu_seqlens: Tensor | None, v_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run `step(q, k, v, ..., S) -> (o, S, h)` on the batch, or on each packed sequence by itself."""
    q, _, v, *_ = inputs
    B, T, HV, K, V = *q.shape, v.shape[-1]
    bounds = None if cu_seqlens is None else [int(x) for x in cu_seqlens.tolist()]
    N = B if bounds is None else len(bounds) - 1
    S = q.new_zeros(N, HV, K, V) if initial_state is None else initial_state.double()
    if initial_state is not None and v_first:
        S = S.transpose(-1, -2)
    if bounds is None:
        o, S, h = step(*inputs, S)
    else:
        parts = [step(*(x[:, a:b] for x in inputs), S[n : n + 1]) for n, (a, b) in enumerate(pairwise(bounds))]
        rest = v.new_zeros(1, T - bounds[-1], HV, V)
        o = torch.cat([*(p[0] for p in parts), rest], 1)
        S = torch.cat([p[1] for p in parts]) if parts else S
        h = torch.cat([p[2] for p in parts], 1) if parts else S[None][:, :0]
    if v_first:
        S, h = S.transpose(-1, -2), h.transpose(-1, -2)
    return o, S, h
