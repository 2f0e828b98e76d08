"""chunk_kda: the public function and its autograd. Asks the policy, runs the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cula.ops.kda.chunk.policy import choose_rows
from cula.ops.kda.problem import ActivationArguments, ChunkOptions, parse_chunk

Tensor = torch.Tensor


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    cp_mode: Any = None,
    plan: Any = None,
    implementation: Any = None,
) -> tuple[Tensor, ...]:
    """Kimi Delta Attention over whole sequences, chunk by chunk; differentiable.

    Per value head j, with q/k head j // (HV // H): S = exp(g_t)[:, None] * S; S += beta_t k_t (v_t - S^T k_t)^T;
    o_t = scale * S^T q_t. Under torch.compile the whole call is one op, `cula::kda_chunk`.

    Args:
        q, k: `[B, T, H, K]`, bf16, fp16, fp32 or fp64 (one dtype for q, k, v).
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: `[B, T, HV, K]`, any floating dtype: the natural-log gate, <= 0; with `use_gate_in_kernel` the raw one.
        beta: `[B, T, HV]`, any floating dtype, in [0, 1] (to 2 for negative eigenvalues); with
            `use_beta_sigmoid_in_kernel` logits.
        scale: multiplies q; K**-0.5 by default.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), fp32 (fp64 in fp64 calls).
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: q, k <- x / sqrt(sum(x^2) + 1e-6).
        use_gate_in_kernel: g <- -exp(A_log) softplus(g + dt_bias), or with `lower_bound` (finite, < 0)
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        allow_neg_eigval: beta <- 2 sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
        safe_gate: a promise that changes no result; with the in-kernel gate it needs -5 <= lower_bound < 0.
        disable_recompute: keep intermediates for the backward instead of recomputing them, where a row can.
        return_intermediate_states: also return h `[B, NT, HV, K, V]` (V-first with `state_v_first`), the state
            before each chunk, in q's dtype; needs no-grad.
        cu_seqlens: `[N+1]` int32 or int64: B is 1 and sequence n is tokens cu_seqlens[n]..cu_seqlens[n+1]; rows
            after the last are zero. cu_seqlens_cpu: its host copy, trusted, which saves a device sync.
        use_graph: forbids the host copy. max_num_seqs: if given, N.
        A_log: HV elements, `[HV]` or `[1, 1, HV, 1]`. dt_bias: `[HV*K]` or `[HV, K]`.
        chunk_size: 16, 32 or 64 tokens.
        cp_context, cp_mode, plan: context parallelism (none in this version; "force" raises).
        implementation: None, "auto", a name ("eager", ...), or {"forward": name, "backward": name}.

    Returns:
        (o `[B, T, HV, V]` in q's dtype, final_state or None), and h where asked.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: no implementation, or not the forced one, accepts the call; says why.
    """
    activation = ActivationArguments(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log, dt_bias, safe_gate
    )
    options = ChunkOptions(
        scale, output_final_state, use_qk_l2norm_in_kernel, disable_recompute, return_intermediate_states,
        state_v_first, use_graph, max_num_seqs, chunk_size, cp_mode, plan, cp_context,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        from cula.ops.kda.chunk.library import traced_chunk

        return traced_chunk(
            (q, k, v, g, beta), activation, options, implementation, initial_state, cu_seqlens, cu_seqlens_cpu
        )
    problem, x = parse_chunk(
        q, k, v, g, beta, activation, options, initial_state=initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip
    forward, backward = choose_rows(problem, x.target, implementation)
    if problem.grad:
        tensors = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state)
        o, final = _ChunkKDA.apply(problem, x, forward, backward, *tensors)
        return o, final
    result = forward.load()(problem, x)
    if problem.intermediate_states:
        return result.o, result.final_state, result.h
    return result.o, result.final_state


class _ChunkKDA(torch.autograd.Function):
    """Forward and backward rows behind autograd; saves the inputs and what the forward row kept."""

    @staticmethod
    def forward(ctx: Any, problem: Any, x: Any, forward: Any, backward: Any, *tensors: Tensor | None) -> Any:
        """Run the forward row."""
        result = forward.load()(problem, x)
        kept = result.saved.tensors if result.saved is not None else {}
        ctx.save_for_backward(*tensors, *kept.values())
        ctx.problem, ctx.backward_row, ctx.writer, ctx.names = problem, backward, forward.name, tuple(kept)
        ctx.template = replace(x, q=None, k=None, v=None, g=None, beta=None, A_log=None, dt_bias=None,
                               initial_state=None)  # fmt: skip
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        """Run the backward row."""
        from cula.ops.kda.chunk.saved import Saved

        q, k, v, g, beta, A_log, dt_bias, initial_state, *kept = ctx.saved_tensors
        x = replace(ctx.template, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias,
                    initial_state=initial_state)  # fmt: skip
        saved = Saved(ctx.writer, dict(zip(ctx.names, kept, strict=True))) if kept else None
        if do is None:
            do = torch.zeros_like(v)
        grads = ctx.backward_row.load()(ctx.problem, x, saved, do, dht)
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        needed = ctx.needs_input_grad[4:]
        return (None,) * 4 + tuple(getattr(grads, n) if need else None for n, need in zip(names, needed, strict=True))
