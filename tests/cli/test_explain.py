"""`cula explain` shows every row with its reason, for devices that are not here too."""

from __future__ import annotations

from typing import Any

import pytest

import cula
from cula.__main__ import main
from cula.cli.explain import used_row
from cula.host.table import Row, Verdict

Capture = pytest.CaptureFixture[str]


def lines(capsys: Capture, *arguments: str) -> list[str]:
    """The printed lines of `cula explain ...`, which must succeed."""
    assert main(["explain", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of `cula explain ...`, which must end with code 2."""
    assert main(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


def test_a_function_on_an_architecture_that_is_not_here(capsys: Capture) -> None:
    out = "\n".join(lines(capsys, "chunk_kda", "--device", "sm90", "--B", "1", "--T", "8192", "--H", "64"))
    assert "chunk forward" in out
    assert "eager" in out
    assert "accepts, used" in out


def test_gradients_add_the_backward_stage(capsys: Capture) -> None:
    assert "chunk backward" not in "\n".join(lines(capsys, "chunk_kda", "--device", "cpu"))
    assert "chunk backward" in "\n".join(lines(capsys, "chunk_kda", "--device", "cpu", "--grad"))


def test_one_row_per_stage_is_the_one_used(capsys: Capture) -> None:
    explanation = cula.explain("chunk_kda", device="cpu", grad=True)
    out = lines(capsys, "chunk_kda", "--device", "cpu", "--grad")
    assert sum("accepts, used" in line for line in out) == len(explanation.stages)


def test_a_forced_implementation_is_the_one_used_or_none_is(capsys: Capture) -> None:
    command = ("chunk_kda", "--device", "cpu", "--flag")
    assert "accepts, used" in "\n".join(lines(capsys, *command, "implementation=eager"))
    assert ", used" not in "\n".join(lines(capsys, *command, "implementation=sm100"))


def _verdict(name: str, reason: str | None = None) -> Verdict:
    return Verdict(Row(name, "batched", "kda", "chunk forward", "any", "torch", "measured", "m:f"), reason)


@pytest.mark.parametrize(
    ("implementation", "preferred", "used"),
    [
        (None, None, "portable"),
        (None, "eager", "eager"),
        (None, "sm90", "portable"),
        ("auto", "eager", "portable"),
        ("eager", "portable", "eager"),
        ("sm90", None, None),
        ({"forward": "eager", "backward": "portable"}, None, "eager"),
        ({"backward": "eager"}, None, "portable"),
    ],
)
def test_the_used_row_is_what_a_call_would_choose(
    monkeypatch: pytest.MonkeyPatch, implementation: Any, preferred: str | None, used: str | None
) -> None:
    if preferred:
        monkeypatch.setenv("CULA_IMPLEMENTATION", preferred)
    verdicts = [_verdict("sm90", "needs K=128, got 64"), _verdict("portable"), _verdict("eager")]
    row = used_row("chunk forward", verdicts, implementation)
    assert (row.name if row else None) == used


def test_without_a_name_every_function_is_shown(capsys: Capture) -> None:
    out = "\n".join(lines(capsys, "--device", "cpu"))
    for stage in ("chunk forward", "decode"):
        assert stage in out


def test_options_reach_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Nothing:
        stages: tuple[()] = ()

    def fake(name: str | None = None, **arguments: Any) -> Nothing:
        seen.update(name=name, **arguments)
        return Nothing()

    monkeypatch.setattr(cula, "explain", fake)
    command = "kda_prefill --device sm90 --B 2 --T 7 --H 4 --HV 8 --K 64 --V 32 --lengths 3,4 --dtype fp16 --grad"
    flags = "--flag chunk_size=32 --flag safe_gate=true --flag lower_bound=-5.0 --flag cp_mode=off --flag plan=None"
    assert main(["explain", *command.split(), *flags.split()]) == 0
    assert seen == {
        "name": "kda_prefill",
        "device": "sm90",
        "B": 2,
        "T": 7,
        "H": 4,
        "HV": 8,
        "K": 64,
        "V": 32,
        "lengths": [3, 4],
        "dtype": "fp16",
        "grad": True,
        "flags": {"chunk_size": 32, "safe_gate": True, "lower_bound": -5.0, "cp_mode": "off", "plan": None},
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["chunk_kdaa"], "chunk_kda"),
        (["chunk_kda", "--device", "toaster"], "toaster"),
        (["chunk_kda", "--dtype", "int8"], "int8"),
        (["chunk_kda", "--B", "-1"], "B must be"),
        (["chunk_kda", "--T", "many"], "many"),
        (["chunk_kda", "--H", "3", "--HV", "4"], "HV"),
        (["chunk_kda", "--flag", "chunk_size"], "name=value"),
        (["chunk_kda", "--flag", "chunk_sise=32"], "chunk_sise"),
        (["chunk_kda", "--flag", "use_gate_in_kernel=true", "--flag", "lower_bound=5"], "lower_bound"),
        (["chunk_kda", "--lengths", "3,x"], "--lengths"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line_that_names_it(capsys: Capture, arguments: list[str], named: str) -> None:
    assert named in refused(capsys, *arguments)


def test_a_wrong_environment_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CULA_IMPLEMENTATION", "fastest")
    assert "CULA_IMPLEMENTATION must be one of auto" in refused(capsys, "chunk_kda", "--device", "cpu")
