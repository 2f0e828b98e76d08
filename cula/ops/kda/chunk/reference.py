"""The chunked (WY) form of KDA in plain torch, float64: one short function per part of a kernel.

All parts work on one chunk of every head: leading dimensions `...`, then `[C, K]`, `[C, V]` or `[C]`.
Names as in the literature: G = cumsum(g), Aqk, L, A = (I + L)^-1, w, u, qg, kg, v_new.
"""

from __future__ import annotations

import torch

from cula.ops.kda.reference import finished_inputs, run_sequences

Tensor = torch.Tensor


def decay_between(G: Tensor) -> Tensor:
    """D `[..., C, C, K]`: exp(G_i - G_j) where j <= i, else 0. Only differences <= 0 are ever exponentiated."""
    C = G.shape[-2]
    keep = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()[..., None]
    return torch.where(keep, (G[..., :, None, :] - G[..., None, :, :]).masked_fill(~keep, 0.0).exp(), 0.0)


def intra_products(q: Tensor, k: Tensor, beta: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Aqk `[..., C, C]` (diagonal kept) and L (strictly lower) of scaled q, k and beta."""
    Aqk = torch.einsum("...ik,...jk,...ijk->...ij", q, k, D).tril()
    L = (beta[..., None] * torch.einsum("...ik,...jk,...ijk->...ij", k, k, D)).tril(-1)
    return Aqk, L


def inverse(L: Tensor) -> Tensor:
    """A = (I + L)^-1, unit lower triangular."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False, unitriangular=True)


def w_u(A: Tensor, k: Tensor, v: Tensor, beta: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """w = A (beta k e^G) `[..., C, K]`, u = A (beta v) `[..., C, V]`."""
    b = beta[..., None]
    return A @ (b * k * G.exp()), A @ (b * v)


def v_new(u: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """What the delta rule writes, given the state h `[..., K, V]` that enters the chunk."""
    return u - w @ h


def output(q: Tensor, G: Tensor, h: Tensor, Aqk: Tensor, vn: Tensor) -> Tensor:
    """o `[..., C, V]` of scaled q."""
    return (q * G.exp()) @ h + Aqk @ vn


def next_state(h: Tensor, k: Tensor, G: Tensor, vn: Tensor) -> Tensor:
    """The state that leaves the chunk."""
    last = G[..., -1:, :]
    return last.exp().transpose(-1, -2) * h + (k * (last - G).exp()).transpose(-1, -2) @ vn


def chunk_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk `[B, HV, C, ...]` from state h: (o, next state)."""
    G = g.cumsum(-2)
    Aqk, L = intra_products(q, k, beta, decay_between(G))
    w, u = w_u(inverse(L), k, v, beta, G)
    vn = v_new(u, w, h)
    return output(q, G, h, Aqk, vn), next_state(h, k, G, vn)


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, C: int) -> tuple[Tensor, ...]:
    outputs, before = [], []
    for t in range(0, q.shape[1], C):
        part = [x[:, t : t + C].movedim(2, 1) for x in (q, k, v, g, beta)]  # [B, HV, C, ...]
        before.append(S)
        o, S = chunk_step(*part, S)
        outputs.append(o.movedim(1, 2))
    o = torch.cat(outputs, 1) if outputs else torch.zeros_like(v)
    h = torch.stack(before, 1) if before else S[:, None][:, :0]
    return o, S, h


def kda_chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """KDA chunk by chunk, in float64: arguments and returns of `kda_recurrent_reference`, any chunk_size >= 1."""
    inputs = finished_inputs(
        (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, A_log, dt_bias,
    )  # fmt: skip
    o, S, h = run_sequences(lambda *x: _chunked(*x, chunk_size), inputs, initial_state, cu_seqlens, state_v_first)
    final = S if output_final_state else None
    return (o, final, h) if return_intermediate_states else (o, final)
