"""fused_kda_gate: two formulas, written out here number by number, with their gradients."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, GATES, Case, make
from cula.checks.poison import Poison
from cula.checks.runs import errors, gate_reference, run_gate
from cula.checks.tolerance import bits_equal, relative_error
from cula.kda import fused_kda_gate

RAW = [name for name in GATES if name.startswith(("softplus", "sigmoid"))]


def formula(x: float, A_log: float, bound: float | None) -> float:
    rate = math.exp(A_log)
    if bound is None:
        return -rate * (max(x, 0.0) + math.log1p(math.exp(-abs(x))))
    z = rate * x
    return bound / (1.0 + math.exp(-z)) if z > 0 else bound * math.exp(z) / (1.0 + math.exp(z))


@pytest.mark.parametrize("bound", [None, -5.0, -0.5, -80.0])
@pytest.mark.parametrize("A_log", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
def test_one_number_at_a_time(bound: float | None, A_log: float, bias: float) -> None:
    xs = [-100.0, -20.5, -8.0, -1.0, 0.0, 1.0, 8.0, 19.5, 20.5, 100.0]
    g = torch.tensor(xs, dtype=torch.float64).view(1, 1, 1, -1)
    options = {"dt_bias": torch.full((1, 10), bias, dtype=torch.float64), "output_dtype": torch.float64}
    got = fused_kda_gate(g, torch.tensor([A_log], dtype=torch.float64), lower_bound=bound, **options)
    expected = [formula(x + bias, A_log, bound) for x in xs]
    assert got.flatten().tolist() == pytest.approx(expected, rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("gate", RAW)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_gate_and_gradients_of_every_kind(on_gate, gate: str, dtype: str) -> None:
    p = make(Case(B=2, T=33, H=1, HV=3, K=20, V=4, dtype=dtype, gate=gate))
    truth = gate_reference(p)
    got = run_gate(p)
    assert set(got) == set(truth)
    for name, error in errors(p, got, truth).items():
        assert error <= (1e-12 if dtype == "fp64" else 1e-5), f"{name}: {error:.2e}"


@pytest.mark.parametrize("x", [-30.0, -8.0, 8.0, 17.0, 30.0, 60.0])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_slopes_far_from_zero_keep_their_digits(x: float, bound: float | None) -> None:
    g = torch.tensor([[[[x]]]], requires_grad=True)
    exact = g.detach().double().requires_grad_()
    fused_kda_gate(g, torch.zeros(1), lower_bound=bound).sum().backward()
    fused_kda_gate(exact, torch.zeros(1).double(), lower_bound=bound, output_dtype=torch.float64).sum().backward()
    s = 1.0 / (1.0 + math.exp(-x))
    slope = -s if bound is None else bound * math.exp(-abs(x)) / (1.0 + math.exp(-abs(x))) ** 2
    assert exact.grad.item() == pytest.approx(slope, rel=1e-12)
    assert g.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("kind", DTYPES.values(), ids=DTYPES)
def test_output_dtype(on_gate, kind: torch.dtype) -> None:
    p = make(Case(T=9, HV=2, K=8, gate="softplus"))
    got = fused_kda_gate(p.g, p.A_log, p.dt_bias, output_dtype=kind)
    assert got.dtype == kind and got.shape == p.g.shape
    exact = fused_kda_gate(p.g.double(), p.A_log.double(), p.dt_bias.double(), output_dtype=torch.float64)
    assert relative_error(got, exact) <= {8: 1e-6, 4: 1e-6, 2: 6e-3}[got.element_size()]
    assert fused_kda_gate(p.g.bfloat16(), p.A_log, p.dt_bias).dtype == torch.float32


def test_gradients_have_their_inputs_shape_and_dtype(on_gate) -> None:
    p = make(Case(T=9, HV=2, K=8, gate="sigmoid", dtype="bf16", gates="same"))
    shapes = [(p.A_log.view(1, 1, 2, 1), p.dt_bias.reshape(-1)), (p.A_log.bfloat16(), p.dt_bias)]
    for A_log, dt_bias in shapes:
        leaves = [x.clone().requires_grad_() for x in (p.g, A_log, dt_bias)]
        fused_kda_gate(*leaves, -5.0).square().sum().backward()
        for x in leaves:
            assert x.grad.shape == x.shape and x.grad.dtype == x.dtype and x.grad.any()


def test_two_shapes_of_parameters_give_the_same_bits(on_gate) -> None:
    p = make(Case(T=9, HV=2, K=8, gate="softplus"))
    a = fused_kda_gate(p.g, p.A_log, p.dt_bias)
    assert bits_equal(a, fused_kda_gate(p.g, p.A_log.view(1, 1, 2, 1), p.dt_bias.reshape(-1)))


def test_no_a_log_is_a_rate_of_one(on_gate) -> None:
    p = make(Case(T=9, HV=2, K=8, gate="sigmoid_no_A"))
    with_zero = fused_kda_gate(p.g, torch.zeros(2), p.dt_bias, -5.0)
    assert relative_error(fused_kda_gate(p.g, None, p.dt_bias, -5.0), with_zero.double()) <= 1e-6


def test_one_row_of_the_output_depends_on_one_row_of_the_input(on_gate) -> None:
    p = make(Case(B=2, T=9, HV=2, K=8, gate="softplus"))
    whole = fused_kda_gate(p.g, p.A_log, p.dt_bias)
    for b in range(2):
        for t in (0, 3, 8):
            row = fused_kda_gate(p.g[b : b + 1, t : t + 1], p.A_log, p.dt_bias)
            assert bits_equal(row[0, 0], whole[b, t])


def test_strided_inputs_and_nothing_written(on_gate) -> None:
    p = make(Case(B=2, T=9, HV=2, K=8, gate="softplus"))
    poison = Poison(gap=5)
    g = poison.tensor(p.g, "g")
    A_log, dt_bias = poison.tensor(p.A_log, "A_log"), poison.tensor(p.dt_bias, "dt_bias")
    assert bits_equal(fused_kda_gate(g, A_log, dt_bias), fused_kda_gate(p.g, p.A_log, p.dt_bias))
    poison.check()


def test_no_tokens(on_gate) -> None:
    g = torch.zeros(1, 0, 2, 8, requires_grad=True)
    A_log = torch.zeros(2, requires_grad=True)
    out = fused_kda_gate(g, A_log)
    assert out.shape == (1, 0, 2, 8)
    out.sum().backward()
    assert not A_log.grad.any()


BAD = [
    ({"A_log": None}, cula.CulaError, "A_log"),
    ({"A_log": torch.zeros(3)}, cula.ShapeError, "A_log"),
    ({"A_log": torch.zeros(2, device="meta")}, cula.DeviceError, "A_log"),
    ({"A_log": torch.zeros(2, dtype=torch.int64)}, cula.DtypeError, "A_log"),
    ({"dt_bias": torch.zeros(2)}, cula.ShapeError, "dt_bias"),
    ({"dt_bias": torch.zeros(8, 2)}, cula.ShapeError, "dt_bias"),
    ({"lower_bound": 0.0}, cula.RangeError, "lower_bound"),
    ({"lower_bound": 5.0}, cula.RangeError, "lower_bound"),
    ({"lower_bound": -math.inf}, cula.RangeError, "lower_bound"),
    ({"lower_bound": math.nan}, cula.RangeError, "lower_bound"),
    ({"output_dtype": torch.int32}, cula.DtypeError, "output_dtype"),
    ({"g": torch.zeros(8)}, cula.ShapeError, "g"),
    ({"g": torch.zeros(1, 1, 2, 8, dtype=torch.int32)}, cula.DtypeError, "g"),
]


@pytest.mark.parametrize("change, error, name", BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments(change: dict, error: type, name: str) -> None:
    given = {"g": torch.zeros(1, 1, 2, 8), "A_log": torch.zeros(2), **change}
    with pytest.raises(error, match=name):
        fused_kda_gate(**given)
