"""KDAProblem: one frozen description of a call, parsed and checked once, at the door.

`KDAProblem` holds plain Python values only, so every policy can be asked about any device on a CPU.
The `parse_*` functions check tensors (shape, dtype, device, host-visible values), raise before anything is
written, and return the problem with its `Operands`. The host copy of `cu_seqlens` is made here, at most once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cula.host import env
from cula.host.arch import target_of
from cula.host.errors import DtypeError, NotSupportedError, RangeError, ShapeError
from cula.ops.common.arguments import (  # some for those who take them from here
    DTYPE_NAMES,
    capturing,
    check_chunk_size,
    check_heads,
    check_tensor,
    has_aligned_rows,
    has_wide_rows,
    lengths_of,
    parse_scale,
    parse_sequences,
    parse_state,
    wants_grad,
)
from cula.ops.common.arguments import (
    check_out as check_out,
)
from cula.ops.common.arguments import (
    check_pool as check_pool,
)
from cula.ops.common.arguments import (
    dtype_name as dtype_name,
)
from cula.ops.common.arguments import (
    parse_null_index as parse_null_index,
)
from cula.ops.common.cp_mode import parse_context_parallel
from cula.ops.common.problem import SequenceOperands, SequenceProblem

Tensor = torch.Tensor


@dataclass(frozen=True)
class KDAProblem(SequenceProblem):
    """Everything that decides which implementation may serve a KDA call.

    gate: "finished", "softplus" or "lower_bound". rows_aligned: the channels of q, k, v, g and out are contiguous and
    begin at multiples of 16 bytes.
    """

    gate_dtype: str = "fp32"
    beta_dtype: str = "fp32"
    gate: str = "finished"
    lower_bound: float | None = None
    has_A_log: bool = False
    has_dt_bias: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    l2norm: bool = False
    intermediate_states: bool = False
    disable_recompute: bool = False
    use_graph: bool = False
    rollback: bool = False
    conv_width: int = 0
    rows_aligned: bool = True


@dataclass
class Operands(SequenceOperands):
    """The tensors of a call, as the caller gave them (A_log is `[HV]`, dt_bias `[HV, K]`: views)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    parent: Tensor | None = None
    rollback: Any = None
    step: Any = None  # the tensors that kda_decode_fused has beyond these


def check_qkv(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[int, int, int, int, int, int]:
    """Check the five inputs of every KDA call and return (B, T, H, HV, K, V)."""
    B, T, H, HV, K, V = check_heads(q, k, v)
    check_tensor("g", g, (B, T, HV, K), q.device, "[B, T, HV, K]")
    check_tensor("beta", beta, (B, T, HV), q.device, "[B, T, HV]")
    return B, T, H, HV, K, V


@dataclass(frozen=True)
class Activation:
    """Which activations happen in the kernel, after the checks of `parse_activation`."""

    gate: str
    lower_bound: float | None
    beta_sigmoid: bool
    neg_eigval: bool
    A_log: Tensor | None
    dt_bias: Tensor | None


def parse_lower_bound(lower_bound: Any) -> float | None:
    """`lower_bound` as a finite number < 0, or None."""
    if lower_bound is None:
        return None
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float)):
        raise DtypeError(f"lower_bound must be None or a number < 0; got {type(lower_bound).__name__}")
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise RangeError(f"lower_bound must be finite and < 0; got {lower_bound}")
    return float(lower_bound)


def parse_gate(
    A_log: Any, dt_bias: Any, lower_bound: Any, HV: int, K: int, device: Any
) -> tuple[str, float | None, Tensor | None, Tensor | None]:
    """Check the arguments of the in-kernel gate: (its kind, lower_bound, A_log `[HV]`, dt_bias `[HV, K]`)."""
    lower_bound = parse_lower_bound(lower_bound)
    if A_log is not None:
        if not isinstance(A_log, torch.Tensor) or A_log.numel() != HV:
            got = list(A_log.shape) if isinstance(A_log, torch.Tensor) else type(A_log).__name__
            raise ShapeError(f"A_log must be a tensor of HV={HV} elements, [HV] or [1, 1, HV, 1]; got {got}")
        check_tensor("A_log", A_log, tuple(A_log.shape), device, "[HV]")
        A_log = A_log.reshape(HV)
    elif lower_bound is None:
        raise RangeError("A_log must be given for the in-kernel softplus gate (lower_bound=None); got None")
    if dt_bias is not None:
        if not isinstance(dt_bias, torch.Tensor) or tuple(dt_bias.shape) not in ((HV * K,), (HV, K)):
            got = list(dt_bias.shape) if isinstance(dt_bias, torch.Tensor) else type(dt_bias).__name__
            raise ShapeError(f"dt_bias must be [HV*K] = [{HV * K}] or [HV, K] = [{HV}, {K}]; got {got}")
        check_tensor("dt_bias", dt_bias, tuple(dt_bias.shape), device, "[HV, K]")
        dt_bias = dt_bias.reshape(HV, K)
    return ("softplus" if lower_bound is None else "lower_bound"), lower_bound, A_log, dt_bias


@dataclass(frozen=True)
class ActivationArguments:
    """The gate and beta arguments of a call, unchecked. sigmoid_flag: what the caller calls `beta_logits`."""

    raw_gate: bool
    beta_logits: bool
    neg_eigval: bool
    lower_bound: Any = None
    A_log: Any = None
    dt_bias: Any = None
    safe_gate: bool = False
    sigmoid_flag: str = "use_beta_sigmoid_in_kernel"


def parse_activation(g: Tensor, a: ActivationArguments) -> Activation:
    """Check the gate and beta flags; with a finished gate A_log, dt_bias and lower_bound are ignored."""
    if a.neg_eigval and not a.beta_logits:
        raise RangeError(f"allow_neg_eigval doubles the in-kernel sigmoid: it needs {a.sigmoid_flag}=True; got False")
    if not a.raw_gate:
        return Activation("finished", None, bool(a.beta_logits), bool(a.neg_eigval), None, None)
    HV, K = g.shape[-2:]
    kind, bound, A_log, dt_bias = parse_gate(a.A_log, a.dt_bias, a.lower_bound, HV, K, g.device)
    if a.safe_gate and not (bound is not None and -5 <= bound < 0):
        raise RangeError(f"safe_gate with the in-kernel gate needs -5 <= lower_bound < 0; got {bound}")
    return Activation(kind, bound, bool(a.beta_logits), bool(a.neg_eigval), A_log, dt_bias)


@dataclass(frozen=True)
class ChunkOptions:
    """The other arguments of a `chunk_kda` or `kda_prefill` call, unchecked.

    grad: whether gradients are wanted, None to ask autograd. traced: the tensors have no values yet.
    """

    scale: Any = None
    final_state: bool = False
    l2norm: bool = False
    disable_recompute: bool = False
    intermediate_states: bool = False
    state_v_first: bool = False
    use_graph: bool = False
    max_num_seqs: Any = None
    chunk_size: Any = 64
    cp_mode: Any = None
    plan: Any = None
    cp_context: Any = None
    grad: bool | None = None
    traced: bool = False


def parse_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, activation: ActivationArguments, options: ChunkOptions,
    *, initial_state: Any = None, cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
) -> tuple[KDAProblem, Operands]:  # fmt: skip
    """Check a chunk call and describe it."""
    env.check_all()
    B, T, H, HV, K, V = check_qkv(q, k, v, g, beta)
    act = parse_activation(g, activation)
    opt = options
    check_chunk_size(opt.chunk_size)
    host_copy = not (opt.use_graph or capturing(q.device))
    N, bounds = parse_sequences(B, T, q.device, cu_seqlens, cu_seqlens_cpu, host_copy=host_copy, traced=opt.traced)
    integers = (int, torch.SymInt) if opt.traced else (int,)
    if opt.max_num_seqs is not None and (type(opt.max_num_seqs) not in integers or opt.max_num_seqs != N):
        raise RangeError(f"max_num_seqs must equal the number of sequences N={N}; got {opt.max_num_seqs!r}")
    dtype = DTYPE_NAMES[q.dtype]
    if initial_state is not None:
        axes, tail = ("[N, HV, V, K]", (V, K)) if opt.state_v_first else ("[N, HV, K, V]", (K, V))
        parse_state("initial_state", initial_state, (N, HV, *tail), axes, dtype, q.device)
    given = (q, k, v, g, beta, initial_state, act.A_log, act.dt_bias)
    grad = wants_grad(*given) if opt.grad is None else opt.grad
    if opt.intermediate_states and grad:
        raise NotSupportedError("return_intermediate_states needs torch.no_grad(); got inputs that require grad")
    problem = KDAProblem(
        B, T, H, HV, K, V, N, dtype=dtype, gate_dtype=DTYPE_NAMES[g.dtype], beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype="fp64" if dtype == "fp64" else "fp32", packed=cu_seqlens is not None, lengths=lengths_of(bounds),
        gate=act.gate, lower_bound=act.lower_bound, has_A_log=act.A_log is not None,
        has_dt_bias=act.dt_bias is not None, beta_sigmoid=act.beta_sigmoid, neg_eigval=act.neg_eigval,
        l2norm=bool(opt.l2norm), scale=parse_scale(opt.scale, K), initial_state=initial_state is not None,
        final_state=bool(opt.final_state), state_v_first=bool(opt.state_v_first),
        intermediate_states=bool(opt.intermediate_states), disable_recompute=bool(opt.disable_recompute),
        chunk_size=opt.chunk_size, grad=grad, use_graph=bool(opt.use_graph),
        cp=parse_context_parallel(opt.cp_mode, opt.plan, opt.cp_context, grad),
        wide_rows=not opt.traced and has_wide_rows(q, k, v, g, beta),
        rows_aligned=opt.traced or has_aligned_rows(q, k, v, g),
    )  # fmt: skip
    operands = Operands(
        q, k, v, g, beta, A_log=act.A_log, dt_bias=act.dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, boundaries=bounds, target=target_of(q.device),
    )  # fmt: skip
    return problem, operands
