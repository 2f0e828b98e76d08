"""gate, eager: elementwise torch, with its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cula.ops.kda import activations as act

Tensor = torch.Tensor


class Gate(torch.autograd.Function):
    """`apply(g, A_log [HV] or None, dt_bias [HV, K] or None, lower_bound, output_dtype)` -> finished gate."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
        output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Compute in fp32, or fp64 for an fp64 gate."""
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return act.gate(*_operands(g, A_log, dt_bias), lower_bound).to(output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of g, A_log and dt_bias, the sums in float64."""
        g, A_log, dt_bias = ctx.saved_tensors
        x, a, bias = _operands(g, A_log, dt_bias)
        dx, dA = act.gate_backward(x, a, bias, ctx.lower_bound, dy.to(x.dtype))
        lead = tuple(range(g.dim() - 2))
        dA_log = None if A_log is None else dA.sum((*lead, -1), dtype=torch.float64).to(A_log.dtype)
        ddt = None if dt_bias is None else dx.sum(lead, dtype=torch.float64).to(dt_bias.dtype)
        return dx.to(g.dtype), dA_log, ddt, None, None


def _operands(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    a = None if A_log is None else A_log.to(dtype).exp().view(-1, 1)
    return g.to(dtype), a, None if dt_bias is None else dt_bias.to(dtype)
