"""The truth: KDA token by token in plain torch, float64 whatever the inputs, any device, gradients by autograd.

Per value head, with q/k head j // (HV // H), natural-log gate g_t `[K]`, S `[K, V]`:

    S = exp(g_t)[:, None] * S;  S = S + beta_t * outer(k_t, v_t - S^T k_t);  o_t = scale * S^T q_t
"""

from __future__ import annotations

import torch

from cula.ops.common.reference import run_sequences

Tensor = torch.Tensor


def finished_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Natural-log gate `[..., HV, K]` from the raw one: softplus without a lower bound, scaled sigmoid with one."""
    HV, K = g.shape[-2:]
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(HV, K)
    a = 1.0 if A_log is None else A_log.double().reshape(HV, 1).exp()
    if lower_bound is None:
        return -a * torch.nn.functional.softplus(x, threshold=100.0)
    return lower_bound * torch.sigmoid(a * x)


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def finished_inputs(
    inputs: tuple[Tensor, ...], scale: float | None, l2norm: bool, gate: bool, sigmoid: bool, neg_eigval: bool,
    lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(scaled q, k, v, g, beta) in float64 with all in-kernel activations done and q, k repeated to HV heads."""
    q, k, v, g, beta = (x.double() for x in inputs)
    if l2norm:
        q, k = unit(q), unit(k)
    g = finished_gate(g, A_log, dt_bias, lower_bound) if gate else g
    if sigmoid:
        beta = torch.sigmoid(beta) * (2.0 if neg_eigval else 1.0)
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, g, beta


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, every: int) -> tuple[Tensor, ...]:
    """o, the last state and the states before tokens 0, every, 2 every, ... of finished inputs `[B, T, HV, ...]`."""
    outputs, before = [], []
    for t in range(q.shape[1]):
        if t % every == 0:
            before.append(S)
        S = S * g[:, t].exp()[..., None]  # [B, HV, K, V]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    h = torch.stack(before, 1) if before else S[:, None][:, :0]
    return o, S, h


def kda_recurrent_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """KDA by its definition, one token after another, in float64.

    Arguments as `chunk_kda` up to `cu_seqlens` (q, k `[B,T,H,K]`, v `[B,T,HV,V]`, g `[B,T,HV,K]` natural log,
    beta `[B,T,HV]`, states `[N,HV,K,V]` or V-first), any floating dtype. Returns `(o, final_state or None)` in
    float64, plus h `[B,NT,HV,K,V]`, the state before each chunk, with `return_intermediate_states`.
    Differentiable in every floating input. `safe_gate` and `disable_recompute` change nothing.
    """
    inputs = finished_inputs(
        (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, A_log, dt_bias,
    )  # fmt: skip
    o, S, h = run_sequences(lambda *x: recurrence(*x, chunk_size), inputs, initial_state, cu_seqlens, state_v_first)
    final = S if output_final_state else None
    return (o, final, h) if return_intermediate_states else (o, final)
