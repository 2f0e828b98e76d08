"""fused_kda_gate: the public function."""

from __future__ import annotations

import torch

from cula.host import env
from cula.host.arch import target_of
from cula.host.errors import DtypeError, ShapeError
from cula.host.table import choose
from cula.ops.kda.gate.policy import ROWS
from cula.ops.kda.problem import DTYPE_NAMES, KDAProblem, check_tensor, parse_gate, wants_grad

Tensor = torch.Tensor


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The natural-log gate of KDA from its raw form; differentiable in g, A_log and dt_bias.

    -exp(A_log) * softplus(g + dt_bias), or with `lower_bound` lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).

    Args:
        g: `[..., HV, K]`, any floating dtype.
        A_log: HV elements; required without `lower_bound`, with it optional (exp(A_log) is then 1).
        dt_bias: `[HV*K]` or `[HV, K]`, optional.
        lower_bound: finite and < 0, or None for softplus.
        output_dtype: a floating dtype.

    Returns:
        `[..., HV, K]` in `output_dtype`, values <= 0.

    Raises:
        ShapeError, DtypeError, DeviceError, RangeError: an argument is wrong.
    """
    env.check_all()
    if not isinstance(g, torch.Tensor) or g.dim() < 2:
        got = list(g.shape) if isinstance(g, torch.Tensor) else type(g).__name__
        raise ShapeError(f"g must be a tensor [..., HV, K]; got {got}")
    check_tensor("g", g, tuple(g.shape), g.device, "[..., HV, K]")
    if output_dtype not in DTYPE_NAMES:
        raise DtypeError(f"output_dtype must be bf16, fp16, fp32 or fp64; got {output_dtype}")
    HV, K = g.shape[-2:]
    kind, bound, A_log, dt_bias = parse_gate(A_log, dt_bias, lower_bound, HV, K, g.device)
    tokens = g.numel() // max(1, HV * K)
    problem = KDAProblem(
        1, tokens, HV, HV, K, K, 1, dtype=DTYPE_NAMES[g.dtype], gate_dtype=DTYPE_NAMES[g.dtype], gate=kind,
        lower_bound=bound, has_A_log=A_log is not None, has_dt_bias=dt_bias is not None,
        grad=wants_grad(g, A_log, dt_bias),
    )  # fmt: skip
    row = choose(ROWS, problem, target_of(g.device))
    return row.load().apply(g, A_log, dt_bias, bound, output_dtype)
