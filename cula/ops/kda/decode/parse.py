"""The doors of the decode stage: check fused_recurrent_kda, kda_decode and kda_verify calls and describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cula.host import env
from cula.host.arch import target_of
from cula.host.errors import DtypeError, RangeError, ShapeError
from cula.host.varlen import check_index_tensor
from cula.ops.kda.problem import (
    DTYPE_NAMES,
    ActivationArguments,
    KDAProblem,
    Operands,
    capturing,
    check_out,
    check_pool,
    check_qkv,
    dtype_name,
    lengths_of,
    parse_activation,
    parse_null_index,
    parse_scale,
    parse_sequences,
    parse_state,
    wants_grad,
)

Tensor = torch.Tensor

MAX_VERIFY_TOKENS = 16


@dataclass(frozen=True)
class RecurrentOptions:
    """The other arguments of a `fused_recurrent_kda` call, unchecked."""

    scale: Any = None
    final_state: bool = False
    l2norm: bool = False
    state_v_first: bool = False


@dataclass(frozen=True)
class ServingArguments:
    """The arguments that kda_decode and kda_verify share beyond tensors, unchecked."""

    scale: Any
    normalize_qk: bool
    null_index: Any
    out: Any


def parse_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, activation: ActivationArguments,
    options: RecurrentOptions, *, initial_state: Any, cu_seqlens: Any,
) -> tuple[KDAProblem, Operands]:  # fmt: skip
    """Check a `fused_recurrent_kda` call and describe it."""
    env.check_all()
    B, T, H, HV, K, V = check_qkv(q, k, v, g, beta)
    act = parse_activation(g, activation)
    N, bounds = parse_sequences(B, T, q.device, cu_seqlens, None, host_copy=not capturing(q.device))
    dtype = DTYPE_NAMES[q.dtype]
    if initial_state is not None:
        axes, tail = ("[N, HV, V, K]", (V, K)) if options.state_v_first else ("[N, HV, K, V]", (K, V))
        parse_state("initial_state", initial_state, (N, HV, *tail), axes, dtype, q.device)
    problem = KDAProblem(
        B, T, H, HV, K, V, N, dtype=dtype, gate_dtype=DTYPE_NAMES[g.dtype], beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype="fp64" if dtype == "fp64" else "fp32", packed=cu_seqlens is not None, lengths=lengths_of(bounds),
        gate=act.gate, lower_bound=act.lower_bound, has_A_log=act.A_log is not None,
        has_dt_bias=act.dt_bias is not None, beta_sigmoid=act.beta_sigmoid, neg_eigval=act.neg_eigval,
        l2norm=bool(options.l2norm), scale=parse_scale(options.scale, K), initial_state=initial_state is not None,
        final_state=bool(options.final_state), state_v_first=bool(options.state_v_first), tokens=T,
        grad=wants_grad(q, k, v, g, beta, initial_state, act.A_log, act.dt_bias),
    )  # fmt: skip
    operands = Operands(
        q, k, v, g, beta, A_log=act.A_log, dt_bias=act.dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
        boundaries=bounds, target=target_of(q.device),
    )  # fmt: skip
    return problem, operands


def parse_serving(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, activation: ActivationArguments,
    shared: ServingArguments, *, pool: Any, indices: Any, accepted: Any, cu_seqlens: Any = None,
    one_token: bool = False,
) -> tuple[KDAProblem, Operands]:  # fmt: skip
    """What kda_decode and kda_verify share: inputs, activations, pool, read indices, out."""
    env.check_all()
    B, T, H, HV, K, V = check_qkv(q, k, v, g, beta)
    act = parse_activation(g, activation)
    N, tokens, bounds = _rows(B, T, q.device, cu_seqlens, one_token)
    dtype = DTYPE_NAMES[q.dtype]
    check_pool("state_pool", pool, (HV, V, K), dtype, q.device)
    _check_read_indices(indices, accepted, N, q.device)
    problem = KDAProblem(
        B, T, H, HV, K, V, N, dtype=dtype, gate_dtype=DTYPE_NAMES[g.dtype], beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype=dtype_name(pool), packed=cu_seqlens is not None, lengths=lengths_of(bounds), gate=act.gate,
        lower_bound=act.lower_bound, has_A_log=act.A_log is not None, has_dt_bias=act.dt_bias is not None,
        beta_sigmoid=act.beta_sigmoid, neg_eigval=act.neg_eigval, l2norm=bool(shared.normalize_qk),
        scale=parse_scale(shared.scale, K), pool=True, state_v_first=True, tokens=tokens,
    )  # fmt: skip
    operands = Operands(
        q, k, v, g, beta, A_log=act.A_log, dt_bias=act.dt_bias, cu_seqlens=cu_seqlens, boundaries=bounds,
        state_pool=pool, read_indices=indices, num_accepted_tokens=accepted,
        null_index=parse_null_index(shared.null_index), out=check_out(shared.out, v), target=target_of(q.device),
    )  # fmt: skip
    return problem, operands


def _rows(B: int, T: int, device: Any, cu_seqlens: Any, one_token: bool) -> tuple[int, int, tuple[int, ...] | None]:
    """(N, most tokens per sequence, boundaries on the host)."""
    if one_token:
        if B != 1 and T != 1:
            raise ShapeError(f"kda_decode takes one token per sequence, [N, 1, ...] or [1, N, ...]; got B={B}, T={T}")
        return B * T, 1, None
    if cu_seqlens is None:
        if not 1 <= T <= MAX_VERIFY_TOKENS:
            raise ShapeError(f"kda_verify takes 1 to {MAX_VERIFY_TOKENS} tokens per sequence; got T={T}")
        return B, T, None
    N, bounds = parse_sequences(B, T, device, cu_seqlens, None, host_copy=False)
    if bounds is None:
        return N, min(T, MAX_VERIFY_TOKENS), None
    longest = max(lengths_of(bounds), default=0)
    if longest > MAX_VERIFY_TOKENS:
        raise RangeError(f"kda_verify takes at most {MAX_VERIFY_TOKENS} tokens per sequence; got {longest}")
    return N, longest, bounds


def _check_read_indices(indices: Any, accepted: Any, N: int, device: Any) -> None:
    two = isinstance(indices, torch.Tensor) and indices.dim() == 2
    if two and accepted is None:
        raise ShapeError(
            f"state_indices [N, S+1] goes with num_accepted_tokens [N]; got {list(indices.shape)} and None"
        )
    if accepted is not None and not two:
        got = list(indices.shape) if isinstance(indices, torch.Tensor) else type(indices).__name__
        raise ShapeError(f"num_accepted_tokens goes with state_indices [N, S+1]; got state_indices {got}")
    if two and indices.shape[1] < 1:
        raise ShapeError(f"state_indices [N, S+1] needs at least one column; got {list(indices.shape)}")
    check_index_tensor("state_indices", indices, (N, indices.shape[1]) if two else (N,), device)
    if accepted is not None:
        check_index_tensor("num_accepted_tokens", accepted, (N,), device)


def check_write_indices(x: Operands, write_indices: Any, N: int) -> None:
    """kda_decode's `write_indices`, required where the read slot comes from a column."""
    if write_indices is None:
        if x.num_accepted_tokens is not None:
            raise ShapeError("write_indices [N] is required with num_accepted_tokens; got None")
        return
    check_index_tensor("write_indices", write_indices, (N,), x.q.device)
    x.write_indices = write_indices


def check_states_out(p: KDAProblem, x: Operands, states_out: Any, indices: Any, update_state: Any) -> None:
    """kda_verify's pool of per-token states."""
    if (states_out is None) != (indices is None):
        missing = "states_out" if states_out is None else "states_out_indices"
        raise ShapeError(f"states_out and states_out_indices go together; {missing} is None")
    if states_out is not None:
        check_pool("states_out", states_out, (p.HV, p.V, p.K), p.dtype, x.q.device)
        shape = (p.T,) if p.packed else (p.N, p.T)
        check_index_tensor("states_out_indices", indices, shape, x.q.device)
    if not isinstance(update_state, bool):
        raise DtypeError(f"update_state must be a bool; got {type(update_state).__name__}")
    x.states_out, x.states_out_indices, x.update_state = states_out, indices, update_state


def check_parent(p: KDAProblem, x: Operands, parent: Any, rollback: Any) -> None:
    """kda_verify's tree of drafts, which excludes `update_state` and `rollback`."""
    if parent is None:
        return
    if x.update_state or rollback is not None:
        other = "update_state" if x.update_state else "rollback"
        raise RangeError(f"parent (tree drafts) excludes {other}; got both")
    check_index_tensor("parent", parent, (p.T,) if p.packed else (p.N, p.T), x.q.device)
    x.parent = parent
