"""Gate, l2norm and beta sigmoid of KDA in plain torch, forward and backward, any floating dtype and device.

`a` is exp(A_log) (or None) and `bias` is dt_bias, both already shaped to broadcast against the raw gate.
Everything is built from exp and log1p of arguments <= 0, so nothing overflows and small values keep their digits.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x * rstd, rstd) with rstd = 1 / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    rstd = torch.linalg.vecdot(x, x).add_(L2NORM_EPS).rsqrt_().unsqueeze_(-1)
    return x * rstd, rstd


def l2norm_backward(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """Gradient of x from the normalised y, rstd and dy."""
    return torch.addcmul(dy, y, torch.linalg.vecdot(y, dy).unsqueeze(-1), value=-1.0).mul_(rstd)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def sigmoid_slope(x: Tensor) -> Tensor:
    """sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|): exact far from 0 too."""
    e = x.abs().neg_().exp_()
    return e / (e + 1.0).square_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def gate(x: Tensor, a: Tensor | None, bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Natural-log gate <= 0 of the raw gate x: -a softplus(x + bias), or lower_bound sigmoid(a (x + bias))."""
    if bias is not None:
        x = x + bias
    if lower_bound is None:
        return softplus(x).mul_(-a)
    return sigmoid(x if a is None else x * a).mul_(lower_bound)


def gate_backward(
    x: Tensor, a: Tensor | None, bias: Tensor | None, lower_bound: float | None, dg: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of the raw gate, elementwise gradient of A_log still to be summed)."""
    if bias is not None:
        x = x + bias
    if lower_bound is None:
        return sigmoid(x).mul_(-a).mul_(dg), softplus(x).mul_(-a).mul_(dg)
    dx = sigmoid_slope(x if a is None else x * a).mul_(dg).mul_(lower_bound)
    if a is not None:
        dx = dx.mul_(a)
    return dx, dx * x


def beta(x: Tensor, neg_eigval: bool) -> Tensor:
    """sigmoid(x), doubled with neg_eigval."""
    return sigmoid(x).mul_(2.0) if neg_eigval else sigmoid(x)


def beta_backward(x: Tensor, neg_eigval: bool, dbeta: Tensor) -> Tensor:
    """Gradient of the logits x."""
    return sigmoid_slope(x).mul_(dbeta).mul_(2.0 if neg_eigval else 1.0)
