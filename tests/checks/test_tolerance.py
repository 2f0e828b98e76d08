"""The tolerance table is the contract's, and its metric finds what it must find."""

from __future__ import annotations

import math

import pytest
import torch

from cula.checks import runs
from cula.checks.cases import Case, make
from cula.checks.tolerance import GROUPS, TABLE, bits_equal, column, relative_error, rms, tolerance

CONTRACT = {
    ("o", "final_state"): (1e-10, 1e-5, 5e-5, 6e-3),
    ("dq", "dk", "dv", "dh0"): (1e-10, 2e-5, 1e-4, 8e-3),
    ("dg", "dbeta"): (1e-10, 5e-5, 2e-4, 2e-2),
    ("dA_log", "ddt_bias"): (1e-10, 5e-5, 2e-4, 8e-3),
    ("v_first", "split", "context_parallel"): (1e-10, 1e-5, 5e-5, 6e-3),
}
PLACES = [(torch.float64, "cpu"), (torch.float32, "cpu"), (torch.float32, "cuda"), (torch.bfloat16, "cuda")]


@pytest.mark.parametrize("names", CONTRACT, ids=str)
def test_the_table_is_the_contracts(names: tuple[str, ...]) -> None:
    for name in names:
        assert tuple(tolerance(name, *place) for place in PLACES) == CONTRACT[names]
        assert tolerance(name, torch.float16) == tolerance(name, torch.bfloat16)


def test_a_bf16_pool_and_what_the_table_leaves_open() -> None:
    assert tolerance("bf16_pool", torch.float32) == tolerance("bf16_pool", torch.bfloat16, "cuda") == 8e-3
    with pytest.raises(ValueError):
        tolerance("bf16_pool", torch.float64)
    with pytest.raises(KeyError):
        tolerance("dz", torch.float32)
    with pytest.raises(ValueError):
        column(torch.int32, "cpu")
    assert set(GROUPS.values()) == set(TABLE)


def test_relative_error_is_a_ratio_of_rms() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 5.0]), reference) == pytest.approx(1.0 / 5.0)
    assert relative_error(reference * 1.01, reference) == pytest.approx(0.01, rel=1e-3)
    assert relative_error(reference, reference) == 0.0


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert relative_error(torch.tensor([1.0, bad]), torch.ones(2)) == math.inf


def test_a_reference_of_zero_is_absolute() -> None:
    assert relative_error(torch.tensor([3e-3, 4e-3]), torch.zeros(2)) == pytest.approx(5e-3 / math.sqrt(2))
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_floor_bounds_the_denominator_from_below() -> None:
    tiny = torch.full((4,), 1e-12)
    assert relative_error(tiny * 2, tiny) == pytest.approx(1.0)
    assert relative_error(tiny * 2, tiny, floor=1e-3) == pytest.approx(1e-9)
    assert relative_error(torch.ones(4), torch.zeros(4), floor=1e-3) == pytest.approx(1e3)


def test_a_broadcast_is_not_an_answer() -> None:
    with pytest.raises(AssertionError, match="shape"):
        relative_error(torch.zeros(2, 1), torch.zeros(2, 3))


def test_rms_neither_overflows_nor_vanishes() -> None:
    assert rms(torch.full((8,), 1e200, dtype=torch.float64)) == pytest.approx(1e200)
    assert rms(torch.full((8,), 1e-200, dtype=torch.float64)) == pytest.approx(1e-200)
    assert rms(torch.zeros(0)) == 0.0


def test_bits_equal() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert bits_equal(nan, nan.clone())
    assert not bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bits_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not bits_equal(torch.zeros(2), torch.zeros(1, 2))
    assert bits_equal(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())
    assert not bits_equal(torch.tensor([True]), torch.tensor([False]))


@pytest.mark.parametrize("gate", ["zero", "mild", "bound", "channels", "softplus", "sigmoid"])
def test_floors_never_forgive_a_gradient_of_ordinary_size(gate: str) -> None:
    """A floor speaks only where the reference is far below its terms: for these gates it is not in force."""
    p = make(Case(B=2, T=40, H=1, HV=2, K=16, V=16, gate=gate))
    truth = runs.reference(p)
    floor = runs.floors(p, truth)
    for name, x in truth.items():
        assert floor[name] < rms(x), name


def test_a_wrong_gate_gradient_is_seen_through_its_floor() -> None:
    p = make(Case(T=40, K=16, V=16, gate="steep"))
    truth = runs.reference(p)
    wrong = {"dg": truth["dg"] + 1e-3 * truth["dq"] * p.q.double()}
    assert runs.errors(p, wrong, truth)["dg"] > tolerance("dg", torch.float32)
