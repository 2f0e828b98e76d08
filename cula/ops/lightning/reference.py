"""The truth: Lightning Attention token by token in plain torch, float64 whatever the inputs, gradients by autograd.

Per value head h, with q/k head h // (HV // H) and slope s_h >= 0, S `[K, V]`:

    S = exp(-s_h) * S + outer(k_t, v_t);  o_t = scale * S^T q_t
"""

from __future__ import annotations

import torch

from cula.ops.common.reference import run_sequences
from cula.ops.lightning.slopes import lightning_slopes

Tensor = torch.Tensor


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(o, the last state, no states between) of scaled q and k `[B, T, HV, K]`, decay `[HV]`."""
    outputs = []
    for t in range(q.shape[1]):
        S = decay[:, None, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)), S, S[:, None][:, :0]


def lightning_recurrent_reference(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int | None = None, num_layers: int | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, *, slopes: Tensor | None = None, state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Lightning Attention by its definition, one token after another, in float64.

    Arguments as `chunk_lightning_attn` (q, k `[B,T,H,K]`, v `[B,T,HV,V]`, states `[N,HV,K,V]` or V-first, slopes
    `[HV]` or FLA's of a layer), any floating dtype. Returns `(o, final_state or None)` in float64. Differentiable in
    q, k, v and initial_state.
    """
    HV = v.shape[2]
    s = lightning_slopes(HV, layer_idx, num_layers).to(q.device) if slopes is None else slopes
    decay = torch.exp(-s.double())
    group = HV // q.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    o, S, _ = run_sequences(
        lambda q, k, v, S: recurrence(q, k, v, decay, S), (q, k, v), initial_state, cu_seqlens, state_v_first
    )
    return o, (S if output_final_state else None)
