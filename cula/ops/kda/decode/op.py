"""fused_recurrent_kda, kda_decode, kda_verify: the public functions of the decode stage."""

from __future__ import annotations

from typing import Any

import torch

from cula.host import env
from cula.host.errors import NotSupportedError
from cula.host.table import choose, forward_only_name
from cula.ops.kda.debug import check_values
from cula.ops.kda.decode import calls
from cula.ops.kda.decode.calls import Call
from cula.ops.kda.decode.parse import (
    RecurrentOptions,
    ServingArguments,
    check_parent,
    check_states_out,
    check_write_indices,
    parse_recurrent,
    parse_serving,
)
from cula.ops.kda.decode.policy import DECODE, RECURRENT, STAGES, VERIFY
from cula.ops.kda.decode.rollback import KDARollback, with_drafts
from cula.ops.kda.problem import ActivationArguments

Tensor = torch.Tensor


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    implementation: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token: the arguments and returns of `chunk_kda`, no backward.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; g: `[B, T, HV, K]`; beta: `[B, T, HV]`.
        A_log: HV elements. dt_bias: `[HV*K]` or `[HV, K]`.
        scale: multiplies q; K**-0.5 by default.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), fp32 (fp64 in fp64 calls).
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound:
            q, k are normalised, g raw, beta logits (doubled after the sigmoid): all as in `chunk_kda`.
        cu_seqlens: `[N+1]` int32 or int64, B = 1: packed sequences. implementation: None, "auto" or a name.

    Returns:
        (o `[B, T, HV, V]` in q's dtype, final_state or None).

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why. In the backward: names chunk_kda.
    """
    activation = ActivationArguments(
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log, dt_bias
    )
    options = RecurrentOptions(scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first)
    problem, x = parse_recurrent(
        q, k, v, g, beta, activation, options, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    row = choose(STAGES[RECURRENT], problem, x.target, forward_only_name(implementation, "fused_recurrent_kda"))
    if not problem.grad:
        return row.load()(problem, x)
    tensors = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.initial_state)
    return _ForwardOnly.apply(row, problem, x, *tensors)


class _ForwardOnly(torch.autograd.Function):
    """Runs under autograd; asked for a gradient, it says which function has one."""

    @staticmethod
    def forward(ctx: Any, row: Any, problem: Any, x: Any, *tensors: Tensor | None) -> Any:
        """Run the row."""
        return row.load()(problem, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Refuse."""
        raise NotSupportedError("fused_recurrent_kda has no backward; use chunk_kda for gradients")


def _shared(common: tuple[Any, ...], out: Any) -> tuple[ActivationArguments, ServingArguments]:
    """The arguments that serving functions share, in the order of `calls.find`."""
    A_log, dt_bias, lower_bound, scale, raw, logits, normalize, neg_eigval, null_index = common
    activation = ActivationArguments(
        raw, logits, neg_eigval, lower_bound, A_log, dt_bias, sigmoid_flag="beta_is_logits"
    )
    return activation, ServingArguments(scale, normalize, null_index, out)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_pool: Tensor,
    state_indices: Tensor,
    write_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
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
    """One token for each of N sequences, states read and written in place in a pool; runs without grad.

    Args:
        q, k: `[N, 1, H, K]` or `[1, N, H, K]`; v: `[.., HV, V]`; g: `[.., HV, K]`; beta: `[.., HV]`, in the same form.
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 calls: fp64 too), any slot stride, updated in place.
        state_indices: `[N]` int32 or int64, any stride: the slot of each sequence; or `[N, S+1]` with
            `num_accepted_tokens [N]` (1..S+1): column accepted - 1 is read, and `write_indices` is required.
            A row that reads a null or out-of-range slot gives zeros and touches nothing.
        write_indices: `[N]` slots that get the new states (default: those that were read); null is skipped. On a GPU
            no row may write a slot that another row of the call reads: nothing orders the two.
        A_log, dt_bias, lower_bound, gate_is_raw: the gate, as in `kda_prefill`; likewise scale, beta_is_logits,
            normalize_qk, allow_neg_eigval, null_index, out, implementation.

    Returns:
        out, shaped like v.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    common = (
        A_log, dt_bias, lower_bound, scale, gate_is_raw, beta_is_logits, normalize_qk, allow_neg_eigval, null_index,
    )  # fmt: skip
    tensors = (q, k, v, g, beta, state_pool, state_indices, num_accepted_tokens, write_indices, out)
    call = calls.find(DECODE, tensors, (state_pool, out), common, implementation)
    if call.known:
        x = call.bind(q, k, v, g, beta, A_log, dt_bias)
        x.state_pool, x.read_indices, x.num_accepted_tokens = state_pool, state_indices, num_accepted_tokens
        x.write_indices, x.out = write_indices, out
        return call.run(call.problem, x)
    problem, x = parse_serving(
        q, k, v, g, beta, *_shared(common, out), pool=state_pool, indices=state_indices,
        accepted=num_accepted_tokens, one_token=True,
    )  # fmt: skip
    check_write_indices(x, write_indices, problem.N)
    x.update_state = True
    if env.debug():
        check_values(problem, x)
    row = choose(STAGES[DECODE], problem, x.target, forward_only_name(implementation, "kda_decode"))
    return call.remember(problem, x, row.load())(problem, x)


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_pool: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_out: Tensor | None = None,
    states_out_indices: Tensor | None = None,
    update_state: bool = False,
    parent: Tensor | None = None,
    rollback: Any = None,
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
    """1 to 16 draft tokens for each of N sequences from the committed states; runs without grad.

    Equals `kda_decode` token by token, in bits, on one implementation.

    Args:
        q, k, v, g, beta: `[N, T, ...]` as `kda_decode`, or packed `[1, total, ...]` with `cu_seqlens [N+1]`.
        state_pool, state_indices, num_accepted_tokens: the state that is read, as `kda_decode`.
        states_out: any pool `[slots, HV, V, K]` (`state_pool` too); states_out_indices: `[N, T]`, packed `[total]`:
            the slot that gets the state after each token; null is skipped. The two go together. On a GPU no sequence
            may write a slot that another one of the call reads.
        update_state: also write the state after the last token to the slot that was read.
        parent: int32 or int64, `[N, T]` or packed `[total]`, for tree drafts: the earlier token of the same sequence
            (counted from its first) whose state this token continues; -1, or any other value, is the committed state.
            Excludes update_state and rollback.
        rollback: a `KDARollback` with room for N sequences, filled for `kda_rollback`. Where only the device knows the
            lengths, no sequence may have more tokens than it has room for: the outputs of further ones are zeros.
        A_log: HV elements. dt_bias: `[HV*K]` or `[HV, K]`. lower_bound: finite and < 0, or None for softplus.
        scale: multiplies q; K**-0.5 by default. gate_is_raw, beta_is_logits, normalize_qk, allow_neg_eigval: the
            gate is raw, beta logits (doubled after the sigmoid), q and k unnormalised.
        null_index: the index that means no slot (negative ones always do). out: like v; written and returned.
        implementation: None, "auto" or a name.

    Returns:
        out, shaped like v; rows after cu_seqlens[-1] are zero.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    common = (
        A_log, dt_bias, lower_bound, scale, gate_is_raw, beta_is_logits, normalize_qk, allow_neg_eigval, null_index,
    )  # fmt: skip
    call = Call(None)
    if cu_seqlens is None or getattr(cu_seqlens, "is_cuda", False):  # lengths that the host can read are checked anew
        parts = (rollback.k, rollback.u, rollback.g, rollback.count) if isinstance(rollback, KDARollback) else ()
        tensors = (
            q, k, v, g, beta, state_pool, state_indices, num_accepted_tokens, cu_seqlens, states_out,
            states_out_indices, parent, out, *parts,
        )  # fmt: skip
        flags = (*common, update_state, rollback if not parts else len(parts))
        call = calls.find(VERIFY, tensors, (state_pool, states_out, out, *parts), flags, implementation)
    if call.known:
        x = call.bind(q, k, v, g, beta, A_log, dt_bias)
        x.state_pool, x.read_indices, x.num_accepted_tokens = state_pool, state_indices, num_accepted_tokens
        x.cu_seqlens, x.states_out, x.states_out_indices = cu_seqlens, states_out, states_out_indices
        x.update_state, x.parent, x.rollback, x.out = update_state, parent, rollback, out
        return call.run(call.problem, x)
    problem, x = parse_serving(
        q, k, v, g, beta, *_shared(common, out), pool=state_pool, indices=state_indices,
        accepted=num_accepted_tokens, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_states_out(problem, x, states_out, states_out_indices, update_state)
    check_parent(problem, x, parent, rollback)
    if parent is not None or rollback is not None:
        problem = with_drafts(problem, x, rollback)
    if env.debug():
        check_values(problem, x)
    row = choose(STAGES[VERIFY], problem, x.target, forward_only_name(implementation, "kda_verify"))
    return call.remember(problem, x, row.load())(problem, x)
