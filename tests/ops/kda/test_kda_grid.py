"""The check grid as tests: every function of every implementation against the float64 recurrence."""

from __future__ import annotations

import pytest

from cula.checks import grid, rows, runs
from cula.checks.cases import Case


def judged(subject, case: Case) -> list[grid.Outcome]:
    outcomes = []
    for function in runs.FUNCTIONS:
        if subject.label in rows.labels(function, subject.device):
            outcomes += grid.judge(function, case, subject.label, subject.device)
    return outcomes


def misses(outcomes: list[grid.Outcome]) -> list[str]:
    return [
        f"{x.function} {x.quantity}: {x.error:.2e} > {x.tolerance:.0e} ({x.case}) {x.reason or ''}"
        for x in outcomes
        if not x.passed
    ]


@pytest.mark.parametrize("case", grid.cases(), ids=lambda case: case.id)
def test_grid(subject, case: Case) -> None:
    outcomes = judged(subject, case)
    assert outcomes or subject.label != "eager", "nothing was compared"
    assert misses(outcomes) == []


WIDE = [
    Case(B=2, T=63, H=4, HV=4, K=128, V=128, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True),
    Case(B=1, T=130, H=2, HV=4, K=128, V=128, dtype="bf16", gate="channels", gates="same", v_first=True),
    Case(B=1, T=100, H=1, HV=2, K=128, V=64, dtype="fp16", gate="softplus", lengths=(37, 63)),
    Case(B=1, T=65, H=3, HV=3, K=100, V=128, dtype="fp32", gate="sigmoid", beta="logits_doubled", l2norm=True),
    Case(B=1, T=40, H=1, HV=8, K=192, V=40, dtype="fp32", gate="mild"),
    Case(B=1, T=33, H=2, HV=2, K=256, V=256, dtype="bf16", gate="mild"),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_model_sized_heads(subject, case: Case) -> None:
    assert misses(judged(subject, case)) == []


#: So many heads (of so few channels that the reference stays small) that the work is cut into several parts.
MANY = [
    Case(B=1, T=600, H=256, HV=256, K=4, V=4, dtype="fp32", gate="mild"),
    Case(B=1, T=600, H=128, HV=256, K=4, V=4, dtype="bf16", gate="softplus", beta="logits", state=False),
    Case(B=7, T=70, H=256, HV=256, K=4, V=4, dtype="fp32", gate="channels", v_first=True),
    Case(B=1, T=530, H=256, HV=256, K=4, V=4, lengths=(9, 150, 0, 64, 1, 65, 63, 128, 2, 30), dtype="fp32"),
    Case(B=1, T=270, H=512, HV=512, K=4, V=4, lengths=(90, 90, 90), gate="sigmoid", chunk_size=16, dtype="fp64"),
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: case.id)
def test_many_heads_and_long_sequences(subject, case: Case) -> None:
    assert misses(judged(subject, case)) == []
