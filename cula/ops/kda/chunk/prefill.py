"""kda_prefill: whole sequences against a state pool, for serving. Runs the chunk forward rows without grad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cula.host import env
from cula.host.table import forward_only_name
from cula.ops.common.debug import check_values
from cula.ops.common.prefill import parse_checkpoints, parse_pool
from cula.ops.kda.chunk.policy import choose_rows
from cula.ops.kda.problem import (
    ActivationArguments,
    ChunkOptions,
    check_out,
    has_aligned_rows,
    parse_chunk,
    parse_null_index,
)

Tensor = torch.Tensor


@torch.no_grad()
def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    state_pool: Tensor | None = None,
    read_indices: Tensor | None = None,
    write_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoints: Tensor | None = None,
    checkpoint_every: int = 64,
    checkpoint_offsets: Tensor | None = None,
    position_offsets: Tensor | None = None,
    cp_mode: Any = None,
    plan: Any = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    gate_is_raw: bool = True,
    beta_is_logits: bool = True,
    normalize_qk: bool = True,
    allow_neg_eigval: bool = False,
    null_index: int = -1,
    out: Tensor | None = None,
    implementation: Any = None,
) -> Tensor:
    """KDA over whole sequences, reading and writing slots of a state pool in place; runs without grad.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; g: `[B, T, HV, K]`; beta: `[B, T, HV]`: as `chunk_kda`, but the
            gate is raw, beta logits and q, k unnormalised unless `gate_is_raw`, `beta_is_logits`, `normalize_qk`
            say otherwise.
        cu_seqlens, cu_seqlens_cpu: packed sequences, as `chunk_kda`.
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 calls: fp64 too), any slot stride; None starts from zero
            and keeps nothing.
        read_indices: `[N]` slot that each sequence starts from (default n). A null or out-of-range index reads a
            zero state. write_indices: `[N]` slot that gets the final state (default: the one that was read);
            null is skipped.
        has_initial_state: bool `[N]`; False starts from zero, whatever the slot holds.
        checkpoints: `[rows, HV, V, K]` in the pool's dtype (fp32 without a pool): states at absolute positions
            that are multiples of `checkpoint_every` tokens (a multiple of 16). checkpoint_offsets: `[N+1]`,
            required with it: boundary i of sequence n goes to row checkpoint_offsets[n] + i, and is dropped from
            checkpoint_offsets[n+1] on. position_offsets: `[N]` position of each sequence's first token (default 0).
        scale, A_log, dt_bias, lower_bound, allow_neg_eigval, cp_mode, plan, implementation: as `chunk_kda`.
        null_index: the index that means no slot (negative ones always do).
        out: like v; written and returned.

    Returns:
        out `[B, T, HV, V]`, rows after cu_seqlens[-1] zero.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: no implementation, or not the forced one, accepts the call; says why.
    """
    implementation = forward_only_name(implementation, "kda_prefill")
    activation = ActivationArguments(
        gate_is_raw, beta_is_logits, allow_neg_eigval, lower_bound, A_log, dt_bias, sigmoid_flag="beta_is_logits"
    )
    options = ChunkOptions(scale=scale, l2norm=normalize_qk, state_v_first=True, cp_mode=cp_mode, plan=plan)
    problem, x = parse_chunk(
        q, k, v, g, beta, activation, options, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu
    )
    problem, x = parse_pool(
        problem, x, state_pool, read_indices, write_indices, has_initial_state, parse_null_index(null_index)
    )
    problem, x = parse_checkpoints(problem, x, checkpoints, checkpoint_every, checkpoint_offsets, position_offsets)
    x.out = check_out(out, v)
    if problem.rows_aligned and not has_aligned_rows(x.out):
        problem = replace(problem, rows_aligned=False)
    if env.debug():
        check_values(problem, x)
    forward, _ = choose_rows(problem, x.target, implementation)
    return forward.load()(problem, x).o
