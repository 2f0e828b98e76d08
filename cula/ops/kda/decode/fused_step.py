"""kda_decode_fused: one serving step of a KDA layer between its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cula.host import env
from cula.host.arch import target_of
from cula.host.errors import DtypeError, RangeError, ShapeError
from cula.host.table import choose, forward_only_name
from cula.host.varlen import check_index_tensor
from cula.ops.kda.debug import check_values
from cula.ops.kda.decode import calls
from cula.ops.kda.decode.policy import FUSED, STAGES
from cula.ops.kda.problem import (
    DTYPE_NAMES,
    ActivationArguments,
    KDAProblem,
    Operands,
    check_out,
    check_pool,
    check_tensor,
    dtype_name,
    parse_activation,
    parse_null_index,
    parse_scale,
)

Tensor = torch.Tensor


@dataclass
class StepOperands:
    """The tensors of a call beyond those of kda_decode. x: `[N, channels]`, in `Operands.q` too."""

    x: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_pool: Tensor
    output_gate: Tensor | None
    norm_weight: Tensor | None
    norm_eps: float


def kda_decode_fused(
    x: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_indices: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
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
    """One token of N sequences from the projections to the gated output; runs without grad.

    Causal depthwise convolution over x and the last tokens, SiLU, the norms of q and k, gate, recurrence, then
    RMSNorm(o) * norm_weight and * sigmoid(output_gate), each of these two left out where its tensor is None.

    Args:
        x: `[N, 2*H*K + HV*V]`: q, k and v of the current token, packed in this order, before the convolution. HV, V
            and K come from `state_pool`, H from x. bf16, fp16, fp32 or (eager) fp64; any row stride.
        g: `[N, HV, K]` or `[1, N, HV, K]`; beta: `[N, HV]` or `[1, N, HV]`: raw gate and logits, as in `kda_decode`.
        conv_weight: `[channels, width]`, the last column meets the current token. conv_bias: `[channels]`.
        conv_pool: `[slots, channels, width - 1]`, any strides, the inputs of the last tokens, oldest first; updated in
            place. It has as many slots as state_pool and is read and written at the same indices.
        state_pool: `[slots, HV, V, K]` fp32 or bf16 (fp64 calls: fp64 too), any slot stride, updated in place.
        state_indices: `[N]` int32 or int64, any stride. A row that reads a null or out-of-range slot gives zeros and
            touches neither pool.
        output_gate: `[N, HV, V]`. norm_weight: `[V]`. norm_eps: added to the mean of squares.
        A_log, dt_bias, lower_bound, gate_is_raw, scale, beta_is_logits, normalize_qk, allow_neg_eigval, null_index,
            implementation: as in `kda_decode`. out: `[N, HV, V]` in x's dtype; written and returned.

    Returns:
        out `[N, HV, V]` in x's dtype.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong; nothing was touched.
        NotSupportedError: the forced implementation refuses the call; says why.
    """
    common = (
        A_log, dt_bias, lower_bound, scale, gate_is_raw, beta_is_logits, normalize_qk, allow_neg_eigval, null_index,
        norm_eps,
    )  # fmt: skip
    tensors = (x, g, beta, state_pool, state_indices, out, conv_weight, conv_bias, conv_pool, output_gate, norm_weight)
    step = StepOperands(x, conv_weight, conv_bias, conv_pool, output_gate, norm_weight, norm_eps)
    call = calls.find(FUSED, tensors, (state_pool, out, conv_pool), common, implementation)
    if call.known:
        operands = call.bind(x, x, x, _rows(g, 3), _rows(beta, 2), A_log, dt_bias)
        operands.state_pool, operands.read_indices, operands.out, operands.step = state_pool, state_indices, out, step
        return call.run(call.problem, operands)
    activation = ActivationArguments(
        gate_is_raw, beta_is_logits, allow_neg_eigval, lower_bound, A_log, dt_bias, sigmoid_flag="beta_is_logits"
    )
    problem, operands = _parse(step, g, beta, activation, state_pool, state_indices, scale, normalize_qk)
    operands.null_index = parse_null_index(null_index)
    if out is not None:
        operands.out = check_out(out, x.new_empty(problem.N, problem.HV, problem.V))
    if env.debug():
        check_values(problem, operands)
    row = choose(STAGES[FUSED], problem, operands.target, forward_only_name(implementation, "kda_decode_fused"))
    return call.remember(problem, operands, row.load())(problem, operands)


def _rows(x: Tensor, dim: int) -> Tensor:
    """g or beta without its leading 1."""
    return x[0] if x.dim() == dim + 1 else x


def _parse(
    s: StepOperands, g: Any, beta: Any, activation: ActivationArguments, pool: Any, indices: Any, scale: Any,
    normalize_qk: Any,
) -> tuple[KDAProblem, Operands]:  # fmt: skip
    """Check a call and describe it."""
    env.check_all()
    x = s.x
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ShapeError(f"x must be a tensor [N, 2*H*K + HV*V]; got {got}")
    N, channels = x.shape
    check_tensor("x", x, (N, channels), x.device, "[N, 2*H*K + HV*V]")
    if not isinstance(pool, torch.Tensor) or pool.dim() != 4:
        got = list(pool.shape) if isinstance(pool, torch.Tensor) else type(pool).__name__
        raise ShapeError(f"state_pool must be a tensor [slots, HV, V, K]; got {got}")
    slots, HV, V, K = pool.shape
    dtype = DTYPE_NAMES[x.dtype]
    check_pool("state_pool", pool, (HV, V, K), dtype, x.device)
    H, rest = divmod(channels - HV * V, max(2 * K, 1))
    if rest or H < 1 or HV % H:
        raise ShapeError(
            f"x must have 2*H*K + HV*V channels with HV={HV}, V={V}, K={K} of state_pool and H a divisor of HV; "
            f"got {channels}"
        )
    _check_rows("g", g, (N, HV, K), "[N, HV, K]", x.device)
    _check_rows("beta", beta, (N, HV), "[N, HV]", x.device)
    g, beta = _rows(g, 3), _rows(beta, 2)
    width = _check_convolution(s, channels, slots)
    _check_output(s, N, HV, V)
    check_index_tensor("state_indices", indices, (N,), x.device)
    act = parse_activation(g, activation)
    problem = KDAProblem(
        N, 1, H, HV, K, V, N, dtype=dtype, gate_dtype=DTYPE_NAMES[g.dtype], beta_dtype=DTYPE_NAMES[beta.dtype],
        state_dtype=dtype_name(pool), gate=act.gate, lower_bound=act.lower_bound, has_A_log=act.A_log is not None,
        has_dt_bias=act.dt_bias is not None, beta_sigmoid=act.beta_sigmoid, neg_eigval=act.neg_eigval,
        l2norm=bool(normalize_qk), scale=parse_scale(scale, K), pool=True, state_v_first=True, tokens=1,
        conv_width=width,
    )  # fmt: skip
    operands = Operands(
        x, x, x, g, beta, A_log=act.A_log, dt_bias=act.dt_bias, state_pool=pool, read_indices=indices,
        update_state=True, step=s, target=target_of(x.device),
    )  # fmt: skip
    return problem, operands


def _check_rows(name: str, t: Any, shape: tuple[int, ...], axes: str, device: Any) -> None:
    """A tensor of this shape, or with a leading 1."""
    if isinstance(t, torch.Tensor) and t.dim() == len(shape) + 1:
        shape, axes = (1, *shape), f"[1, {axes[1:]}"
    check_tensor(name, t, shape, device, axes)


def _check_convolution(s: StepOperands, channels: int, slots: int) -> int:
    """The width of the convolution."""
    weight, pool, device = s.conv_weight, s.conv_pool, s.x.device
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[1] < 1:
        got = list(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ShapeError(f"conv_weight must be a tensor [channels, width]; got {got}")
    width = weight.shape[1]
    check_tensor("conv_weight", weight, (channels, width), device, "[channels, width]")
    if s.conv_bias is not None:
        check_tensor("conv_bias", s.conv_bias, (channels,), device, "[channels]")
    check_tensor("conv_pool", pool, (slots, channels, width - 1), device, "[slots of state_pool, channels, width - 1]")
    if any(size > 1 and stride == 0 for size, stride in zip(pool.shape, pool.stride(), strict=True)):
        raise ShapeError(f"conv_pool is written in place: no dimension may be expanded (stride 0); got {pool.stride()}")
    return width


def _check_output(s: StepOperands, N: int, HV: int, V: int) -> None:
    """The gated norm behind the recurrence."""
    if s.output_gate is not None:
        check_tensor("output_gate", s.output_gate, (N, HV, V), s.x.device, "[N, HV, V]")
    if s.norm_weight is not None:
        check_tensor("norm_weight", s.norm_weight, (V,), s.x.device, "[V]")
    if isinstance(s.norm_eps, bool) or not isinstance(s.norm_eps, (int, float)):
        raise DtypeError(f"norm_eps must be a number; got {type(s.norm_eps).__name__}")
    if not 0 <= s.norm_eps < float("inf"):
        raise RangeError(f"norm_eps must be finite and >= 0; got {s.norm_eps}")
