"""chunk_lightning_attn: the public function and its autograd. Asks the policy, runs the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cula.ops.lightning.chunk.policy import choose_rows
from cula.ops.lightning.problem import ChunkOptions, SlopeArguments, parse_chunk

Tensor = torch.Tensor


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_v_first: bool = False,
    chunk_size: int = 64,
    cp_mode: Any = None,
    cp_context: Any = None,
    implementation: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning Attention over whole sequences, chunk by chunk; differentiable in q, k, v and initial_state.

    Per value head j, with q/k head j // (HV // H): S = exp(-s_j) S + k_t v_t^T; o_t = scale * S^T q_t. Under
    torch.compile the whole call is one op, `cula::lightning_chunk`.

    Args:
        q, k: `[B, T, H, K]`, bf16, fp16, fp32 or fp64 (one dtype for q, k, v).
        v: `[B, T, HV, V]`, HV a multiple of H.
        layer_idx, num_layers: give s_j = 8/HV * (1 - layer_idx/num_layers) * j (`lightning_slopes`, "fla").
        scale: multiplies q; K**-0.5 by default.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), fp32 (fp64 in fp64 calls).
        output_final_state: return the state after the last token of each sequence.
        cu_seqlens: `[N+1]` int32 or int64: B is 1 and sequence n is tokens cu_seqlens[n]..cu_seqlens[n+1]; rows
            after the last are zero. cu_seqlens_cpu: its host copy, trusted, which saves a device sync.
        slopes: `[HV]`, floating, finite and >= 0, on the inputs' device, without gradient: the decay per token is
            exp(-slopes). Exactly one of `slopes` and (`layer_idx`, `num_layers`) is given.
        chunk_size: 16, 32 or 64 tokens, at most: an implementation may take fewer.
        cp_mode, cp_context: context parallelism (none in this version; "force" raises).
        implementation: None, "auto", a name ("eager", ...), or {"forward": name, "backward": name}.

    Returns:
        (o `[B, T, HV, V]` in q's dtype, final_state or None).

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: no implementation, or not the forced one, accepts the call; says why.
    """
    slope_arguments = SlopeArguments(slopes, layer_idx, num_layers)
    options = ChunkOptions(scale, output_final_state, state_v_first, chunk_size, cp_mode, cp_context=cp_context)
    if torch.compiler.is_compiling():
        from cula.ops.lightning.chunk.library import traced_chunk

        return traced_chunk(
            (q, k, v), slope_arguments, options, implementation, initial_state, cu_seqlens, cu_seqlens_cpu
        )
    problem, x = parse_chunk(
        q, k, v, slope_arguments, options, initial_state=initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip
    forward, backward = choose_rows(problem, x.target, implementation)
    if problem.grad:
        return _ChunkLightning.apply(problem, x, forward, backward, x.q, x.k, x.v, x.initial_state)
    result = forward.load()(problem, x)
    return result.o, result.final_state


class _ChunkLightning(torch.autograd.Function):
    """Forward and backward rows behind autograd; saves the inputs."""

    @staticmethod
    def forward(ctx: Any, problem: Any, x: Any, forward: Any, backward: Any, *tensors: Tensor | None) -> Any:
        """Run the forward row."""
        result = forward.load()(problem, x)
        ctx.save_for_backward(*tensors)
        ctx.problem, ctx.backward_row = problem, backward
        ctx.template = replace(x, q=None, k=None, v=None, initial_state=None)
        ctx.set_materialize_grads(False)
        return result.o, result.final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> Any:
        """Run the backward row."""
        q, k, v, initial_state = ctx.saved_tensors
        x = replace(ctx.template, q=q, k=k, v=v, initial_state=initial_state)
        grads = ctx.backward_row.load()(ctx.problem, x, torch.zeros_like(v) if do is None else do, dht)
        found = (grads.q, grads.k, grads.v, grads.initial_state)
        needed = ctx.needs_input_grad[4:]
        return (None,) * 4 + tuple(grad if need else None for grad, need in zip(found, needed, strict=True))
