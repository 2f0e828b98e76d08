"""`cula bench`: exit codes, one line for a mistake, and the files it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cula.__main__ import main
from cula.bench import cases, peers
from cula.bench.cases import Case

QUICK = ["bench", "--rounds", "1", "--threads", "1", "--no-memory", "--gate", "mixed"]

MISTAKES = {
    "gate": (["--gate", "heavy"], "'strong', 'mixed', 'weak'"),
    "op": (["--op", "prefill"], "kda_prefill"),
    "case": (["--case", "B9"], "B1-T2048-H4"),
    "no-such-pair": (["--op", "kda_train", "--case", "N1-H32"], "give one of B1-T2048-H4"),
    "device": (["--device", "tpu"], "cpu"),
    "rounds": (["--rounds", "0"], "x>=1"),
    "threads": (["--threads", "many"], "integer"),
    "plot": (["--plot", "bench.jpg"], ".png"),
    "json": (["--json", "results"], ".jsonl"),
    "folder": (["--html", "no/such/folder/bench.html"], "does not exist"),
    "option": (["--jason", "x"], "--jason"),
    "argument": (["everything"], "everything"),
}


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small rows, no peers, small machine steps, a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        cases,
        "CASES",
        (Case("kda_prefill", T=48, H=1, K=16), Case("kda_train", T=48, H=1, K=16), Case("kda_decode", N=1, H=2, K=16)),
    )
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr("cula.bench.timing.COPY_BYTES", 1 << 16)
    monkeypatch.setattr("cula.bench.timing.MATMUL_SIZE", 16)
    monkeypatch.setattr("cula.bench.timing.set_threads", lambda threads: None)
    return


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, says = MISTAKES[mistake]
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and says in captured.err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "cula bench --device cpu" in capsys.readouterr().out


def test_a_run_prints_a_table_and_says_which_peers_are_missing(
    small_rows: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(QUICK) == 0
    out = capsys.readouterr().out
    for part in ("kda_prefill B1-T48-H1", "kda_train B1-T48-H1", "kda_decode N1-H2-warm", "eager"):
        assert part in out
    assert "ggml: not measured, not installed (pip install ggml-python)" in out
    assert "transformers: not measured, not installed (pip install transformers)" in out


def test_files_are_written_where_asked_and_nowhere_else(
    small_rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert main([*QUICK, "--op", "kda_prefill", "--json", "results", "--topic", "Small try", "--html", "b.html"]) == 0
    (file,) = (tmp_path / "results").iterdir()
    assert file.name.endswith("-small-try.jsonl")
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["case"] == "B1-T48-H1"
    assert main([*QUICK, "--op", "kda_prefill", "--json", str(file)]) == 0
    assert len(file.read_text().splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"results", "b.html"}


def test_a_red_check_is_exit_code_1_and_prints_no_time(
    small_rows: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cula.kda

    right = cula.kda.chunk_kda

    def wrong(*args: object, **kwargs: object) -> tuple:
        o, state = right(*args, **kwargs)
        return 1.01 * o, state

    monkeypatch.setattr(cula.kda, "chunk_kda", wrong)
    assert main([*QUICK, "--op", "kda_prefill"]) == 1
    out = capsys.readouterr().out
    assert "red: o is off by 1.0e-02" in out.replace("\n", " ")
