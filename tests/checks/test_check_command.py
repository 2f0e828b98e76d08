"""`cula check`: its table, its files, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cula.__main__ import main
from cula.checks import grid, properties
from cula.checks.cases import Case

SMALL = [
    Case(B=2, T=17, H=1, HV=2, K=16, V=12, gate="softplus"),
    Case(B=1, T=20, lengths=(3, 0, 15), K=16, V=16, dtype="bf16", gate="mild"),
    Case(B=1, T=9, K=16, V=16, dtype="fp64", gate="sigmoid"),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of three cases, one property, and output as into a pipe (xdist sets a terminal's width)."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(grid, "cases", lambda quick: SMALL)
    monkeypatch.setattr(properties, "PROPERTIES", {"always": lambda label, device: None})


def test_a_table_of_every_function_and_quantity(small, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("chunk_kda", "fused_recurrent_kda", "kda_prefill", "kda_decode", "kda_verify", "fused_kda_gate"):
        assert word in out
    for word in ("final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias", "pass", "always"):
        assert word in out
    assert "all within tolerance" in out and "MISS" not in out


def test_the_files(small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check.json", "check.md"):
        assert main(["check", "--device", "cpu", "--quick", "--report", str(tmp_path / name)]) == 0
        assert name in capsys.readouterr().out
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["passed"] is True and found["torch"] == torch.__version__ and found["quick"] is True
    assert {x["function"] for x in found["outcomes"]} >= {"chunk_kda", "kda_decode"}
    assert all(x["passed"] and x["error"] <= x["tolerance"] for x in found["outcomes"])
    assert found["properties"][0]["reason"] is None
    text = (tmp_path / "check.md").read_text()
    assert "| chunk_kda | eager | cpu | dq |" in text and "Passed." in text


def test_a_miss_is_exit_code_1_and_says_where(small, monkeypatch, capsys, tmp_path: Path) -> None:
    import cula.kda

    right = cula.kda.kda_prefill
    monkeypatch.setattr(cula.kda, "kda_prefill", lambda *a, **k: right(*a, **k) * 1.1)
    file = tmp_path / "check.json"
    assert main(["check", "--device", "cpu", "--report", str(file)]) == 1
    out = capsys.readouterr().out
    assert "MISS" in out and "missed: kda_prefill eager cpu" in out and "allowed" in out
    assert json.loads(file.read_text())["passed"] is False


def test_a_crash_is_a_miss_too(small, monkeypatch, capsys) -> None:
    import cula.kda

    def crash(*arguments, **named):
        raise RuntimeError("out of cheese")

    monkeypatch.setattr(cula.kda, "kda_prefill", crash)
    assert main(["check", "--device", "cpu"]) == 1
    assert "out of cheese" in capsys.readouterr().out


def test_a_broken_property_is_exit_code_1(small, monkeypatch, capsys) -> None:
    def broken(label: str, device: str) -> None:
        raise AssertionError("row 3 changes")

    monkeypatch.setattr(properties, "PROPERTIES", {"sequence isolation": broken})
    assert main(["check", "--device", "cpu"]) == 1
    assert "row 3 changes" in capsys.readouterr().out


def test_one_implementation(small, capsys) -> None:
    assert main(["check", "--implementation", "eager", "--quick"]) == 0
    assert main(["check", "--implementation", "eager/stepwise", "--quick"]) in (0, 2)
    capsys.readouterr()


@pytest.mark.parametrize("arguments, words", [
    (["--device", "hopper"], ["hopper", "cpu"]),
    (["--device", "meta"], ["meta", "cpu"]),
    (["--implementation", "fastest"], ["fastest", "eager"]),
    (["--report", "check.txt"], ["check.txt", ".json", ".md"]),
    (["--report", "no/such/folder/check.md"], ["no/such/folder"]),
    (["--frobnicate"], ["--frobnicate"]),
])  # fmt: skip
def test_a_bad_argument_is_exit_code_2_and_one_line(small, capsys, arguments: list[str], words: list[str]) -> None:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "sm90", "sm100"])
def test_a_gpu_that_is_not_there(small, capsys, device: str) -> None:
    assert main(["check", "--device", device]) == 2
    assert device in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    out = capsys.readouterr().out
    assert "cula check --quick" in out and "Exit code 0; 1" in out
