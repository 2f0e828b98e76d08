"""The choice among rows, on made-up rows for every arch and on the real table."""

from __future__ import annotations

import pytest

import cula
from cula.host.arch import CPU, Target
from cula.host.table import Row, Rule, Verdict, check_name, choose, request_for, verdicts

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
GPUS = [Target("cuda", capability, 100, live=False) for capability in CAPABILITIES]


class Problem:
    """What the made-up rules look at."""

    def __init__(self, K: int = 128) -> None:
        self.K = K


def capability(major: int, minor: int) -> Rule:
    return Rule(lambda p, t: t.capability == (major, minor), f"needs sm{major}{minor}, got {{t.name}}")


GPU = Rule(lambda p, t: t.kind == "cuda", "needs a GPU, got {t.name}")
WIDE = Rule(lambda p, t: p.K == 128, "needs K=128, got {p.K}")


def row(name: str, *rules: Rule, mechanism: str = "fused", verified: bool = True, status: str = "measured on X") -> Row:
    return Row(name, mechanism, "kda", "chunk forward", "-", "-", status, "math:sqrt", rules, verified)


ROWS = (
    row("sm90", capability(9, 0), WIDE),
    row("sm100", capability(10, 0), verified=False, status="compiled, not run"),
    row("portable", GPU),
    row("eager", mechanism="batched"),
)
EXPECTED = {(9, 0): "sm90"}


@pytest.mark.parametrize("target", [CPU, *GPUS], ids=lambda t: t.name)
@pytest.mark.parametrize("name", [None, "auto"])
def test_auto_takes_the_first_row_that_accepts(target: Target, name: str | None) -> None:
    chosen = choose(ROWS, Problem(), target, name)
    assert chosen.name == EXPECTED.get(target.capability, "eager" if target is CPU else "portable")


@pytest.mark.parametrize("target", [CPU, *GPUS], ids=lambda t: t.name)
def test_every_capability_is_served_or_refused_never_an_accident(target: Target) -> None:
    for name in ("sm90", "sm100", "portable", "eager"):
        try:
            assert choose(ROWS, Problem(), target, name).name == name
        except cula.NotSupportedError as error:
            assert name in str(error) and target.name in str(error)


@pytest.mark.parametrize("other", [(10, 3), (12, 0), (12, 1), (11, 0)])
def test_a_row_for_one_capability_does_not_match_by_major(other: tuple[int, int]) -> None:
    target = Target("cuda", other, 100, live=False)
    with pytest.raises(cula.NotSupportedError, match=f"sm100 needs sm100, got sm{other[0]}{other[1]}"):
        choose(ROWS, Problem(), target, "sm100")


def test_the_reason_is_the_first_rule_that_fails_with_its_numbers() -> None:
    hopper = GPUS[2]
    with pytest.raises(cula.NotSupportedError) as caught:
        choose(ROWS, Problem(K=64), hopper, "sm90")
    assert str(caught.value) == "sm90 needs K=128, got 64"
    assert choose(ROWS, Problem(K=64), hopper).name == "portable"
    assert ROWS[0].refusal(Problem(K=64), CPU) == "needs sm90, got cpu"


def test_verdicts_keep_the_order_and_say_why() -> None:
    found = verdicts(ROWS, Problem(), GPUS[3])
    assert [v.row.name for v in found] == ["sm90", "sm100", "portable", "eager"]
    assert [v.reason is None for v in found] == [False, False, True, True]
    assert all(isinstance(v, Verdict) for v in found)


def test_unverified_rows_need_a_name_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    blackwell = GPUS[3]
    reason = verdicts(ROWS, Problem(), blackwell)[1].reason
    assert "compiled, not run" in reason and "CULA_ALLOW_UNVERIFIED=1" in reason
    assert choose(ROWS, Problem(), blackwell).name == "portable"
    assert choose(ROWS, Problem(), blackwell, "sm100").name == "sm100"
    monkeypatch.setenv("CULA_ALLOW_UNVERIFIED", "1")
    assert choose(ROWS, Problem(), blackwell).name == "sm100"
    monkeypatch.setenv("CULA_ALLOW_UNVERIFIED", "0")
    assert choose(ROWS, Problem(), blackwell).name == "portable"


def test_the_environment_is_a_preference_that_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = GPUS[2]
    monkeypatch.setenv("CULA_IMPLEMENTATION", "portable")
    assert choose(ROWS, Problem(), hopper).name == "portable"
    assert choose(ROWS, Problem(), hopper, "auto").name == "sm90", "auto does not ask the environment"
    assert choose(ROWS, Problem(), hopper, "eager").name == "eager", "an argument beats the environment"
    assert choose(ROWS, Problem(), CPU).name == "eager", "a preference that refuses is passed over"
    monkeypatch.setenv("CULA_IMPLEMENTATION", "auto")
    assert choose(ROWS, Problem(), hopper).name == "sm90"
    monkeypatch.setenv("CULA_IMPLEMENTATION", "")
    assert choose(ROWS, Problem(), hopper).name == "sm90"


@pytest.mark.parametrize("name, value", [
    ("CULA_IMPLEMENTATION", "fastest"), ("CULA_CP", "on"), ("CULA_DEBUG", "yes"), ("CULA_ALLOW_UNVERIFIED", "true"),
])  # fmt: skip
@pytest.mark.parametrize("asked", [None, "auto", "eager"])
def test_an_unknown_value_of_any_variable_is_a_range_error(monkeypatch, name: str, value: str, asked) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(cula.RangeError) as caught:
        choose(ROWS, Problem(), CPU, asked)
    assert name in str(caught.value) and value in str(caught.value) and "must be one of" in str(caught.value)


def test_a_name_without_a_row_says_what_there_is() -> None:
    with pytest.raises(cula.NotSupportedError, match="portable, eager"):
        choose(ROWS[2:], Problem(), CPU, "sm90")


def test_nothing_accepts() -> None:
    with pytest.raises(cula.NotSupportedError) as caught:
        choose(ROWS[:1], Problem(), CPU)
    assert "chunk forward" in str(caught.value) and "needs sm90, got cpu" in str(caught.value)
    with pytest.raises(cula.NotSupportedError):
        choose((), Problem(), CPU)


def test_two_rows_of_one_name_are_tried_in_turn() -> None:
    rows = (row("eager", WIDE, mechanism="fused"), row("eager", mechanism="stepwise"))
    assert choose(rows, Problem(K=128), CPU, "eager").mechanism == "fused"
    assert choose(rows, Problem(K=64), CPU, "eager").mechanism == "stepwise"


def test_implementation_arguments() -> None:
    for name in (None, "auto", "eager", "portable", "sm90", "sm100"):
        assert check_name(name) == name
        assert request_for(name, "forward") == request_for(name, "backward") == name
    both = {"forward": "sm90", "backward": "portable"}
    assert (request_for(both, "forward"), request_for(both, "backward")) == ("sm90", "portable")
    assert request_for({"forward": "sm90"}, "backward") is None
    for bad in ("hopper", 90, ("eager",), True, {"sideways": "eager"}, {"forward": "hopper"}, {"backward": 1}):
        with pytest.raises(cula.RangeError):
            request_for(bad, "forward")


def test_load_imports_the_entry_only_then() -> None:
    assert row("eager").load()(9.0) == 3.0
    with pytest.raises(ModuleNotFoundError):
        Row("x", "m", "kda", "gate", "-", "-", "-", "cula.no_such_module:f").load()
