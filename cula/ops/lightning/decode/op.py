"""lightning_decode and lightning_verify: the public functions of the decode stage."""

from __future__ import annotations

from typing import Any

import torch

from cula.host import env
from cula.host.errors import ShapeError
from cula.host.table import choose, forward_only_name
from cula.ops.common.arguments import (
    DTYPE_NAMES,
    check_heads,
    check_out,
    check_pool,
    dtype_name,
    lengths_of,
    parse_null_index,
    parse_scale,
)
from cula.ops.common.debug import check_values
from cula.ops.common.drafts import parse_indices, parse_rows, parse_states_out, refuse_trees
from cula.ops.common.forms import find_form
from cula.ops.lightning.decode.policy import DECODE, STAGES, VERIFY
from cula.ops.lightning.problem import LightningProblem, Operands, SlopeArguments, parse_slopes, target_of

Tensor = torch.Tensor


@torch.no_grad()
def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    state_pool: Tensor,
    state_indices: Tensor,
    write_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    scale: float | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    implementation: Any = None,
) -> Tensor:
    """One token for each of N sequences, states read and written in place in a pool; runs without grad.

    Args:
        q, k: `[N, 1, H, K]` or `[1, N, H, K]`; v: `[.., HV, V]`, in the same form.
        slopes: `[HV]`, or layer_idx and num_layers: as in `chunk_lightning_attn`; likewise scale.
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 calls: fp64 too), any slot stride, updated in place.
        state_indices: `[N]` int32 or int64, any stride: the slot of each sequence; or `[N, S+1]` with
            `num_accepted_tokens [N]` (1..S+1): column accepted - 1 is read, and `write_indices` is required.
            A row that reads a null or out-of-range slot gives zeros and touches nothing.
        write_indices: `[N]` slots that get the new states (default: those that were read); null is skipped.
        null_index: the index that means no slot (negative ones always do). out: like v; written and returned.
        implementation: None, "auto" or a name.

    Returns:
        out, shaped like v.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    tensors = (q, k, v, slopes, state_pool, state_indices, num_accepted_tokens, write_indices, out)
    values = (layer_idx, num_layers, scale, null_index, implementation)
    form = find_form(DECODE, tensors, (state_pool, out), values)
    given = SlopeArguments(slopes, layer_idx, num_layers)
    if form.run is not None:
        s = parse_slopes(given, v.shape[2], q.device)
        x = Operands(q, k, v, s, memo=form.memo, target=form.target)
        _bind(x, state_pool, state_indices, num_accepted_tokens, write_indices, null_index, out)
        x.update_state = True
        return form.run(form.problem, x)
    problem, x = _parse("lightning_decode", q, k, v, given, scale, state_pool, None, one_token=True)
    parse_indices(problem.N, q.device, state_indices, num_accepted_tokens, write_indices)
    if num_accepted_tokens is not None and write_indices is None:
        raise ShapeError("write_indices [N] is required with num_accepted_tokens; got None")
    _bind(x, state_pool, state_indices, num_accepted_tokens, write_indices, parse_null_index(null_index), out)
    check_out(out, v)
    x.update_state = True
    if env.debug():
        check_values(problem, x)
    row = choose(STAGES[DECODE], problem, x.target, forward_only_name(implementation, "lightning_decode"))
    return form.remember(problem, x, row.load())(problem, x)


@torch.no_grad()
def lightning_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    layer_idx: int | None = None,
    num_layers: int | None = None,
    state_pool: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_out: Tensor | None = None,
    states_out_indices: Tensor | None = None,
    update_state: bool = False,
    parent: Tensor | None = None,
    scale: float | None = None,
    null_index: int = -1,
    out: Tensor | None = None,
    implementation: Any = None,
) -> Tensor:
    """1 to 16 draft tokens for each of N sequences from the committed states; runs without grad.

    Equals `lightning_decode` token by token, in bits, on one implementation.

    Args:
        q, k, v: `[N, T, ...]` as `lightning_decode`, or packed `[1, total, ...]` with `cu_seqlens [N+1]`.
        slopes, layer_idx, num_layers, scale: as in `chunk_lightning_attn`.
        state_pool, state_indices, num_accepted_tokens: the state that is read, as `lightning_decode`.
        states_out: any pool `[slots, HV, V, K]` (`state_pool` too); states_out_indices: `[N, T]`, packed `[total]`:
            the slot that gets the state after each token; null is skipped. The two go together.
        update_state: also write the state after the last token to the slot that was read.
        parent: tree drafts, which no implementation has in this version.
        null_index: the index that means no slot (negative ones always do). out: like v; written and returned.
        implementation: None, "auto" or a name.

    Returns:
        out, shaped like v; rows after cu_seqlens[-1] are zero.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    given = SlopeArguments(slopes, layer_idx, num_layers)
    problem, x = _parse("lightning_verify", q, k, v, given, scale, state_pool, cu_seqlens)
    parse_indices(problem.N, q.device, state_indices, num_accepted_tokens, None)
    _bind(x, state_pool, state_indices, num_accepted_tokens, None, parse_null_index(null_index), check_out(out, v))
    parse_states_out(problem, x, states_out, states_out_indices, update_state)
    refuse_trees(parent, update_state)
    if env.debug():
        check_values(problem, x)
    row = choose(STAGES[VERIFY], problem, x.target, forward_only_name(implementation, "lightning_verify"))
    return row.load()(problem, x)


def _bind(
    x: Operands, pool: Tensor, indices: Tensor, accepted: Any, write: Any, null_index: int, out: Tensor | None
) -> None:
    """Put the pool, its indices and the output among the operands."""
    x.state_pool, x.read_indices, x.num_accepted_tokens = pool, indices, accepted
    x.write_indices, x.null_index, x.out = write, null_index, out


def _parse(
    function: str, q: Tensor, k: Tensor, v: Tensor, slopes: SlopeArguments, scale: Any, pool: Any, cu_seqlens: Any,
    *, one_token: bool = False,
) -> tuple[LightningProblem, Operands]:  # fmt: skip
    """What both functions share: inputs, slopes, sequences, pool."""
    env.check_all()
    B, T, H, HV, K, V = check_heads(q, k, v)
    s = parse_slopes(slopes, HV, q.device)
    N, tokens, bounds = parse_rows(function, B, T, q.device, cu_seqlens, one_token=one_token)
    dtype = DTYPE_NAMES[q.dtype]
    check_pool("state_pool", pool, (HV, V, K), dtype, q.device)
    problem = LightningProblem(
        B, T, H, HV, K, V, N, dtype=dtype, state_dtype=dtype_name(pool), packed=cu_seqlens is not None,
        lengths=lengths_of(bounds), scale=parse_scale(scale, K), pool=True, state_v_first=True, tokens=tokens,
    )  # fmt: skip
    return problem, Operands(q, k, v, s, cu_seqlens=cu_seqlens, boundaries=bounds, target=target_of(q.device))
