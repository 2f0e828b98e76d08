"""fused_recurrent_kda: token by token, arguments and returns of chunk_kda, no backward."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, Case, Problem, make
from cula.checks.poison import Poison
from cula.checks.runs import chunk, floors, reference
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import fused_recurrent_kda

CASE = Case(B=2, T=19, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True)
PACKED = CASE.replace(B=1, T=24, lengths=(7, 0, 1, 12))


def recurrent(p: Problem, name=None, **options):
    named = {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": p.h0}
    return fused_recurrent_kda(*p.five(), **{**p.flags(), **named, **options}, implementation=name)


@pytest.mark.parametrize("case", [CASE, PACKED, CASE.replace(v_first=True)], ids=["batch", "packed", "vfirst"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_recurrence(on_recurrent, case: Case, dtype: str) -> None:
    if dtype == "fp64" and on_recurrent.name == "portable":
        pytest.skip("portable takes no fp64")
    p = make(case.replace(dtype=dtype))
    o, state = recurrent(p, on_recurrent.name)
    truth = reference(p, gradients=False)
    assert (o.shape, o.dtype) == (p.v.shape, p.v.dtype)
    assert (state.shape, state.dtype) == (p.h0.shape, p.h0.dtype)
    floor = floors(p, truth)
    state = state.mT if case.v_first else state
    for name, got in (("o", o), ("final_state", state)):
        assert relative_error(got, truth[name], floor=floor[name]) <= tolerance(name, p.q.dtype), name


def test_it_agrees_with_chunk_kda(on_recurrent) -> None:
    dtype, limit = ("fp32", 5e-5) if on_recurrent.name == "portable" else ("fp64", 1e-10)
    for case in (CASE, PACKED):
        p = make(case.replace(dtype=dtype))
        for a, b in zip(recurrent(p, on_recurrent.name), chunk(p)):
            assert relative_error(a, b) <= limit


def test_final_state_is_none_unless_asked_for(on_recurrent) -> None:
    p = make(CASE)
    o, state = recurrent(p, on_recurrent.name, output_final_state=False)
    assert state is None and bits_equal(o, recurrent(p, on_recurrent.name)[0])


def test_its_backward_names_chunk_kda() -> None:
    p = make(CASE)
    for name, x in p.inputs().items():
        leaf = x.clone().requires_grad_()
        o, state = recurrent(p.map(lambda y: y, **{name: leaf}))
        assert o.requires_grad
        with pytest.raises(cula.NotSupportedError, match="chunk_kda"):
            o.sum().backward()
    with torch.no_grad():
        assert not recurrent(p.map(lambda y: y, q=p.q.clone().requires_grad_()))[0].requires_grad


def test_zero_lengths_and_rows_after_the_last_sequence(on_recurrent) -> None:
    p = make(PACKED)
    for x in p.five():
        x[:, 20:] = float("nan")
    o, state = recurrent(p, on_recurrent.name)
    assert bits_equal(state[1], p.h0[1])
    assert not o[:, 20:].any() and o[:, :20].any()


@pytest.mark.parametrize("case", [CASE.replace(T=0), PACKED.replace(T=0, lengths=(0, 0))], ids=["batch", "packed"])
def test_no_tokens(on_recurrent, case: Case) -> None:
    p = make(case)
    o, state = recurrent(p, on_recurrent.name)
    assert o.shape == p.v.shape and bits_equal(state, p.h0)
    assert not recurrent(p, on_recurrent.name, initial_state=None)[1].any()


def test_inputs_are_not_written_and_outputs_are_fresh(on_recurrent) -> None:
    poison, p = Poison(gap=2), make(PACKED)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0", "cu_seqlens")
    held = p.map(lambda x: x, **{n: poison.tensor(getattr(p, n), n) for n in names})
    o, state = recurrent(held, on_recurrent.name)
    plain, end = recurrent(p, on_recurrent.name)
    assert bits_equal(o, plain) and bits_equal(state, end)
    o.fill_(7.0)
    state.fill_(7.0)
    poison.check()
    again, _ = recurrent(p, on_recurrent.name)
    assert bits_equal(again, plain)


def test_cu_seqlens_of_either_integer_type(on_recurrent) -> None:
    p = make(PACKED)
    wide = torch.stack([p.cu_seqlens.long()] * 2, 1)
    results = [recurrent(p, on_recurrent.name, cu_seqlens=x) for x in (p.cu_seqlens, p.cu_seqlens.long(), wide[:, 0])]
    for o, state in results[1:]:
        assert bits_equal(o, results[0][0]) and bits_equal(state, results[0][1])


BAD = [
    ({"cu_seqlens": torch.tensor([0, 5, 4, 20])}, cula.RangeError, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([1, 5, 6, 7, 20])}, cula.RangeError, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0, 5, 6, 7, 25])}, cula.RangeError, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0.0, 24.0])}, cula.DtypeError, "cu_seqlens"),
    ({"initial_state": torch.zeros(4, 2, 12, 16)}, cula.ShapeError, "initial_state"),
    ({"initial_state": torch.zeros(4, 2, 16, 12, dtype=torch.bfloat16)}, cula.DtypeError, "initial_state"),
    ({"A_log": None}, cula.CulaError, "A_log"),
    ({"lower_bound": 0.0}, cula.RangeError, "lower_bound"),
    ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, cula.CulaError, "allow_neg_eigval"),
]


@pytest.mark.parametrize("change, error, name", BAD, ids=lambda x: str(x)[:50])
def test_bad_arguments(change: dict, error: type, name: str) -> None:
    with pytest.raises(error, match=name):
        recurrent(make(PACKED), **change)
