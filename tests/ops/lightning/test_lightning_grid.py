"""The check grid of Lightning Attention: every function of every implementation against the float64 recurrence."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cula.checks import grid, properties, rows, runs
from cula.checks.cases import DTYPES, SLOPES, Case

CASES = grid.lightning_cases()


def misses(subject, case: Case) -> list[str]:
    outcomes = []
    for function in runs.FUNCTIONS:
        if rows.algorithm_of(function) == "lightning" and subject.label in rows.labels(function, subject.device):
            outcomes += grid.judge(function, case, subject.label, subject.device)
    assert outcomes or subject.label != "eager", "nothing was compared"
    return [
        f"{x.function} {x.quantity}: {x.error:.2e} > {x.tolerance:.0e} ({x.case}) {x.reason or ''}"
        for x in outcomes
        if not x.passed
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_grid(subject, case: Case) -> None:
    assert misses(subject, case) == []


WIDE = [
    Case(B=2, T=63, H=4, HV=4, K=128, V=128, dtype="bf16", gate="slopes_alibi"),
    Case(B=1, T=130, H=2, HV=4, K=128, V=128, dtype="bf16", gate="slopes_mixed", v_first=True),
    Case(B=1, T=100, H=1, HV=2, K=128, V=64, dtype="fp16", gate="slopes_fla", lengths=(37, 63)),
    Case(B=1, T=65, H=3, HV=3, K=100, V=130, gate="slopes_weak"),
    Case(B=1, T=40, H=1, HV=8, K=192, V=40, gate="slopes_fla"),
    Case(B=1, T=33, H=2, HV=2, K=256, V=256, dtype="bf16", gate="slopes_fla"),
    Case(B=1, T=600, H=256, HV=256, K=4, V=4, gate="slopes_alibi"),
    Case(B=1, T=530, H=256, HV=256, K=4, V=4, lengths=(9, 150, 0, 64, 1, 65, 63, 128, 2, 30), gate="slopes_fla"),
    Case(B=1, T=270, H=512, HV=512, K=4, V=4, lengths=(90, 90, 90), gate="slopes_mixed", dtype="fp64", chunk_size=16),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_model_sized_and_many_heads(subject, case: Case) -> None:
    assert misses(subject, case) == []


def test_the_grid_covers_what_it_promises() -> None:
    assert {(c.T, c.gate) for c in CASES} == set(itertools.product(grid.LENGTHS, SLOPES))
    assert {(c.gate, c.dtype) for c in CASES} == set(itertools.product(SLOPES, grid.DTYPE_NAMES))
    assert {c.v_first for c in CASES} == {c.state for c in CASES} == {c.lengths is None for c in CASES} == {True, False}
    assert {c.HV // c.H for c in CASES} == {1, 2, 3} and {c.chunk_size for c in CASES} == {16, 32, 64}
    assert all(c.algorithm == "lightning" for c in CASES)
    for function in ("chunk_lightning_attn", "lightning_prefill", "lightning_decode", "lightning_verify"):
        assert sum(grid.plan(function, c) is not None for c in CASES) >= 20
        assert all(grid.plan(function, c) is None for c in grid.cases(quick=True))


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_property(subject, name: str) -> None:
    properties.check(name, subject.label, subject.device, "lightning")


LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from((31, 32, 33, 63, 64, 65, 127, 128, 129)), st.integers(21, 150))


@st.composite
def problems(draw) -> Case:
    """Any Lightning call that is legal, small enough for a CPU."""
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=4))) if packed else None
    H = draw(st.sampled_from((1, 2, 3)))
    return Case(
        B=1 if packed else draw(st.integers(1, 3)),
        T=sum(lengths) + draw(st.sampled_from((0, 0, 1, 5))) if packed else draw(LENGTHS),
        H=H,
        HV=H * draw(st.sampled_from((1, 1, 2, 4))),
        K=draw(st.sampled_from((1, 2, 7, 16, 24, 32, 60, 64))),
        V=draw(st.sampled_from((1, 3, 16, 20, 32, 64, 65, 80))),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        gate=draw(st.sampled_from(tuple(SLOPES))),
        lengths=lengths,
        state=draw(st.booleans()),
        v_first=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 1.0, 0.1, 0.0))),
        chunk_size=draw(st.sampled_from((16, 32, 64))),
        seed=draw(st.integers(0, 2**31)),
    )


@given(case=problems())
def test_fuzz(subject, case: Case) -> None:
    assert misses(subject, case) == []
