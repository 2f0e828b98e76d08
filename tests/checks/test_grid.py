"""The grid covers what it promises, and finds errors planted in an implementation."""

from __future__ import annotations

import itertools

import pytest
import torch

import cula
from cula.checks import grid, properties, report, rows, runs
from cula.checks.cases import GATES, Case

CASES = grid.cases()


def test_every_length_meets_every_gate_and_every_gate_every_dtype() -> None:
    assert {(c.T, c.gate) for c in CASES} == set(itertools.product((0, 1, 15, 16, 17, 63, 64, 65, 200), GATES))
    assert {(c.gate, c.dtype) for c in CASES} == set(itertools.product(GATES, grid.DTYPE_NAMES))
    assert {(c.T, c.dtype) for c in CASES} == set(itertools.product(grid.LENGTHS, grid.DTYPE_NAMES))


@pytest.mark.parametrize("dtype", grid.DTYPE_NAMES)
def test_every_dtype_meets_every_other_choice(dtype: str) -> None:
    here = [c for c in CASES if c.dtype == dtype]
    assert {c.v_first for c in here} == {c.l2norm for c in here} == {c.state for c in here} == {True, False}
    assert {c.HV // c.H for c in here} == {1, 2, 3}
    assert {c.chunk_size for c in here} == {16, 32, 64}
    assert {c.beta for c in here} == {"uniform", "zero", "tiny", "half", "one", "two", "logits", "logits_doubled"}
    assert {c.lengths is None for c in here} == {True, False}
    assert any(c.K != c.V for c in here) and any(c.K % 16 for c in here)
    assert {c.scale for c in here} == {None, 1.0, 0.25}


def test_layouts_and_packing_meet_every_gate_and_length() -> None:
    for key in ("gate", "T"):
        for choice in ("v_first", "packed"):
            value = {"v_first": lambda c: c.v_first, "packed": lambda c: c.lengths is not None}[choice]
            for name in {getattr(c, key) for c in CASES}:
                found = {value(c) for c in CASES if getattr(c, key) == name}
                assert found == {True, False}, (key, name, choice)


def test_packed_cases_have_empty_sequences_and_rows_after_the_last() -> None:
    packed = [c for c in CASES if c.lengths is not None]
    assert any(0 in c.lengths for c in packed if c.T)
    assert any(sum(c.lengths) < c.T for c in packed) and all(sum(c.lengths) <= c.T for c in packed)


def test_the_grid_is_the_same_in_every_process() -> None:
    assert grid.cases() == CASES and grid.cases(quick=True) == grid.cases(quick=True)
    assert len({c.id + str(c.seed) for c in CASES}) == len(CASES)
    quick = grid.cases(quick=True)
    assert {c.dtype for c in quick} == set(grid.DTYPE_NAMES) and 0 in {c.T for c in quick}
    assert len(quick) < len(CASES) / 4


def test_the_fp32_lanes_of_every_function_see_raw_and_finished_gates() -> None:
    for function in (x for x in runs.FUNCTIONS if rows.algorithm_of(x) == "kda"):
        planned = [p for c in CASES if (p := grid.plan(function, c)) is not None]
        assert len(planned) >= 20, function
        assert {p.dtype for p in planned} == set(grid.DTYPE_NAMES)
    decoded = [p for c in CASES if (p := grid.plan("kda_decode", c)) is not None]
    assert all(1 <= p.T <= runs.MAX_STEPS for p in decoded) and any(p.T > 1 for p in decoded)
    verified = [p for c in CASES if (p := grid.plan("kda_verify", c)) is not None]
    assert all(max(p.lengths or (p.T,)) <= 16 for p in verified) and any(p.lengths for p in verified)


CASE = Case(B=2, T=40, H=1, HV=2, K=16, V=12, gate="mild")


def planted(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    """Every result of chunk_kda passes through `wrong` before anybody sees it."""
    import cula.kda

    right = cula.kda.chunk_kda
    monkeypatch.setattr(cula.kda, "chunk_kda", lambda *a, **k: wrong(*right(*a, **k)))


PLANTED = {
    "a factor of 1.0001": lambda o, s: (o * 1.0001, s),
    "a NaN in one row": lambda o, s: (torch.cat([o[:, :-1], o[:, -1:] * float("nan")], 1), s),
    "a state of the other layout": lambda o, s: (o, s.mT.contiguous().view(s.shape)),
    "one head swapped": lambda o, s: (o.flip(2), s),
    "one token late": lambda o, s: (o.roll(1, 1), s),
    "a zero where a row should be": lambda o, s: (torch.cat([o[:, :-1], o[:, -1:] * 0], 1), s),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_a_miss(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert all(x.passed for x in grid.judge("chunk_kda", CASE, "eager"))
    planted(monkeypatch, PLANTED[name])
    found = grid.judge("chunk_kda", CASE, "eager")
    assert any(not x.passed for x in found)
    missed = report.Report(outcomes=found)
    assert not missed.passed and missed.misses and "MISS" in missed.as_markdown()


def test_a_wrong_gradient_alone_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, do):
            return do * 1.001

    planted(monkeypatch, lambda o, s: (Wrong.apply(o), s))
    found = {x.quantity: x.passed for x in grid.judge("chunk_kda", CASE, "eager")}
    assert found["o"] and found["final_state"] and not found["dq"] and not found["dv"]


def test_a_written_input_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    import cula.kda

    right = cula.kda.chunk_kda

    def greedy(q, *rest, **named):
        result = right(q, *rest, **named)
        with torch.no_grad():
            q.detach().mul_(1.0000001)
        return result

    monkeypatch.setattr(cula.kda, "chunk_kda", greedy)
    with pytest.raises((AssertionError, RuntimeError)):
        grid.judge("chunk_kda", CASE, "eager")
    found = [x for _, _, outcomes in _one_case_sweep(monkeypatch) for x in outcomes if x.function == "chunk_kda"]
    assert found and all(x.quantity == "call" and not x.passed and x.reason for x in found)


def _one_case_sweep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grid, "cases", lambda quick: [CASE])
    return grid.sweep(device="cpu", implementation="eager")


def test_a_refusal_is_a_miss_for_eager_and_said_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments, **named):
        raise cula.NotSupportedError("eager needs better weather, got rain")

    import cula.kda

    monkeypatch.setattr(cula.kda, "chunk_kda", refuse)
    (found,) = grid.judge("chunk_kda", CASE, "eager")
    assert not found.passed and "weather" in found.reason
    (found,) = grid.judge("chunk_kda", CASE, "eager/other")
    assert found.passed and found.refused
    assert not report.Report(outcomes=[found]).passed, "a sweep in which nothing was compared passes nothing"


def test_sixteen_bit_calls_with_doubled_beta_must_be_finite_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE.replace(dtype="bf16", beta="two")
    planted(monkeypatch, lambda o, s: (o * 2, s))
    assert all(x.passed for x in grid.judge("chunk_kda", case, "eager"))
    monkeypatch.undo()
    planted(monkeypatch, lambda o, s: (o * float("nan"), s))
    assert not all(x.passed for x in grid.judge("chunk_kda", case, "eager"))


def test_labels_name_every_row_that_runs_here() -> None:
    for function, stage in rows.STAGES.items():
        here = [row for row, reason in cula.available().rows if row.stage == stage and reason is None]
        labels = [label for device in rows.devices() for label in rows.labels(function, device)]
        assert len(set(labels)) == len(here), function
        assert "eager" in labels


def test_only_forces_the_very_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from cula.host.table import Row

    ran = []
    load = Row.load
    monkeypatch.setattr(Row, "load", lambda row: ran.append((row.stage, row.mechanism)) or load(row))
    for label in rows.labels("kda_decode", "cpu"):
        for _ in range(2):
            with rows.only(label):
                grid.judge("kda_decode", CASE.replace(T=1), label)
        mechanism = label.partition("/")[2]
        if mechanism:
            assert ("decode", mechanism) in ran
            ran.clear()
    assert rows.labels("kda_decode", "cpu") == rows.labels("kda_decode", "cpu")


# ------------------------------------------------------------------------------------- planted broken properties


def test_split_anywhere_finds_a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import cula.kda

    right = cula.kda.kda_prefill

    def forgetful(*arguments, **named):
        if arguments[0].shape[1] == 64:
            named["has_initial_state"] = torch.zeros(arguments[0].shape[0], dtype=torch.bool)
        return right(*arguments, **named)

    monkeypatch.setattr(cula.kda, "kda_prefill", forgetful)
    with pytest.raises(AssertionError, match="split at"):
        properties.check("split anywhere", "eager")


def test_prefix_stability_finds_a_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda o, s: (o + 1e-7 * o[:, -1:], s))
    with pytest.raises(AssertionError, match="later tokens"):
        properties.check("prefix stability", "eager")


def test_sequence_isolation_finds_a_leak_over_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda o, s: (o + 1e-7 * o.sum(0, keepdim=True), s))
    with pytest.raises(AssertionError, match="batch row"):
        properties.check("sequence isolation", "eager")


def test_call_order_independence_finds_a_stale_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {}

    def cached(o, s):
        old = kept.get(o.dtype)
        kept[o.dtype] = o.detach()
        return (o if old is None else o + 1e-3), s

    planted(monkeypatch, cached)
    with pytest.raises(AssertionError, match="fresh process"):
        properties.check("call-order independence", "eager")
