"""lightning_prefill: whole sequences against a state pool, for serving. Runs the chunk forward rows without grad."""

from __future__ import annotations

from typing import Any

import torch

from cula.host import env
from cula.host.table import forward_only_name
from cula.ops.common.arguments import check_out, parse_null_index
from cula.ops.common.debug import check_values
from cula.ops.common.prefill import parse_checkpoints, parse_pool
from cula.ops.lightning.chunk.policy import choose_rows
from cula.ops.lightning.problem import ChunkOptions, SlopeArguments, parse_chunk

Tensor = torch.Tensor


@torch.no_grad()
def lightning_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    layer_idx: int | None = None,
    num_layers: int | None = None,
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
    scale: float | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    implementation: Any = None,
) -> Tensor:
    """Lightning Attention over whole sequences, reading and writing slots of a state pool in place; without grad.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; slopes `[HV]`, or layer_idx and num_layers; scale, cp_mode,
            implementation: as `chunk_lightning_attn`. plan: none in this version.
        cu_seqlens, cu_seqlens_cpu: packed sequences, as `chunk_lightning_attn`.
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 calls: fp64 too), any slot stride; None starts from zero
            and keeps nothing.
        read_indices: `[N]` slot that each sequence starts from (default n). A null or out-of-range index reads a
            zero state. write_indices: `[N]` slot that gets the final state (default: the one that was read);
            null is skipped.
        has_initial_state: bool `[N]`; False starts from zero, whatever the slot holds.
        checkpoints: `[rows, HV, V, K]` in the pool's dtype (fp32 without a pool): states at absolute positions
            that are multiples of `checkpoint_every` tokens (a multiple of 16), as `cula.kda.kda_prefill` says, with
            checkpoint_offsets `[N+1]` and position_offsets `[N]`.
        null_index: the index that means no slot (negative ones always do).
        out: like v; written and returned.

    Returns:
        out `[B, T, HV, V]`, rows after cu_seqlens[-1] zero.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: no implementation, or not the forced one, accepts the call; says why.
    """
    implementation = forward_only_name(implementation, "lightning_prefill")
    options = ChunkOptions(scale=scale, state_v_first=True, cp_mode=cp_mode, plan=plan)
    problem, x = parse_chunk(
        q, k, v, SlopeArguments(slopes, layer_idx, num_layers), options, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip
    problem, x = parse_pool(
        problem, x, state_pool, read_indices, write_indices, has_initial_state, parse_null_index(null_index)
    )
    problem, x = parse_checkpoints(problem, x, checkpoints, checkpoint_every, checkpoint_offsets, position_offsets)
    x.out = check_out(out, v)
    if env.debug():
        check_values(problem, x)
    forward, _ = choose_rows(problem, x.target, implementation)
    return forward.load()(problem, x).o
