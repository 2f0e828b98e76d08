"""What is made of result records: the picture, the page and the tables of the document."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from cula.bench import page, plot, tables
from cula.bench.records import Record, append

COMMON = {
    "tolerance": 1e-5, "floor_ms": 0.5, "copy_gb_s": 50.0, "cpu": "some CPU", "threads": 2, "torch": "2.13",
    "commit": "abc", "run": "2030-01-02T03:04:05Z", "peers": {"ggml": "0.1", "transformers": None},
}  # fmt: skip


def records() -> list[Record]:
    row = {"op": "kda_prefill", "case": "B1-T2048-H4", "gate": "mixed", "error": 2e-7, **COMMON}
    return [
        Record(impl="eager", mechanism="numba", ms=10.0, fraction_of_copy=0.05, peak_bytes=80, input_bytes=16, **row),
        Record(impl="ggml", ms=25.0, fraction_of_copy=0.02, **row),
        Record(impl="transformers", ms=None, reason="red: <o> is off", **row),
    ]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed here")
    target = tmp_path / "bench.png"
    plot.bars(records(), target, "a title")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_timed_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.bars(records()[2:], tmp_path / "bench.png", "a title")


def test_the_page_stands_alone_and_escapes(tmp_path: Path) -> None:
    target = tmp_path / "bench.html"
    page.write(records(), ["a & b"], target)
    text = target.read_text()
    assert "a &amp; b" in text and "red: &lt;o&gt; is off" in text
    assert "2.50x" in text and "&gt;= 1x met" in text
    assert "http" not in text and "<script" not in text


def test_the_document_matches_the_result_files() -> None:
    assert tables.main(["--check"]) == 0, "run python -m cula.bench.tables"


def test_tables_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, results = tmp_path / "doc.md", tmp_path / "results"
    document.write_text("before\n<!-- results: cpu -->\nstale\n<!-- end of results -->\nafter\n")
    results.mkdir()
    arguments = ["--document", str(document), "--results", str(results)]
    assert tables.main(arguments) == 0
    assert "No result file yet." in document.read_text()
    append(results / "x.jsonl", records())
    assert tables.main([*arguments, "--check"]) == 1
    assert "does not match" in capsys.readouterr().err
    assert tables.main(arguments) == 0
    assert tables.main([*arguments, "--check"]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- results: cpu -->\n") and text.endswith("<!-- end of results -->\nafter\n")
    assert "stale" not in text
    assert "| mixed | **cula, eager (numba)** | 10.0 | 20.0 | 2e-07 | | | 5.0 | 12, met |" in text.replace("  ", " ")
    assert "| mixed | ggml | 25.0 | 50.0 | 2e-07 | 2.50x | 1x, met |" in text
    assert "| mixed | transformers | red: <o> is off |" in text
    assert "peers ggml 0.1, cula at abc" in text


def test_a_document_without_a_region_is_an_error() -> None:
    with pytest.raises(ValueError, match="region"):
        tables.updated("nothing here", [])
