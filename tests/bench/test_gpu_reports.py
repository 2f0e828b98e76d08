"""What is made of GPU rows: ratios across gates and runs, the document's tables, the floor plot, the command."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cula.__main__ import main
from cula.bench import plot, tables
from cula.bench.cuda import report
from cula.bench.records import Record, append, counterpart, ratio, stand_ins

COMMON: dict[str, Any] = {
    "op": "kda_prefill", "case": "B1-T8192-H64", "gate": "strong", "error": 4e-3, "tolerance": 6e-3, "floor_ms": 0.16,
    "copy_gb_s": 4270.0, "matmul_gflop_s": 7e5, "ceiling_ms": 0.11, "device": "cuda", "cpu": "a CPU", "gpu": "Some GPU",
    "dtype": "bf16", "torch": "2.11", "triton": "3.6", "commit": "abc", "run": "2030-01-02T03:04:05Z",
    "peers": {"fla": "0.6.0", "cudnn": "1.32.0"},
}  # fmt: skip
KERNEL = {"name": "kda_intra", "registers": 255, "spills": 8, "shared": 65536, "warps": 4}


def row(impl: str, ms: float | None, **more: Any) -> Record:
    fields = {**COMMON, "impl": impl, "ms": ms, "method": "graph", **more}
    return Record(**fields, fraction_of_copy=fields["floor_ms"] / ms if ms else None)


def records() -> list[Record]:
    """One case with three gates, FLA timed once, cuDNN twice, and a training row."""
    train = {"op": "kda_train", "ceiling_ms": None, "floor_ms": 0.44}
    return [
        row("portable", 0.8, mechanism="two_pass", calls=2, kernels=[KERNEL]),
        row("fla", 1.6),
        row("cudnn", 0.6),
        row("portable", 0.9, gate="mixed", mechanism="two_pass", kernels=[KERNEL]),
        row("cudnn", 2.7, gate="mixed"),
        row("portable", 1.0, gate="weak", mechanism="two_pass"),
        row("portable", 4.0, **train, peak_bytes=3_000_000_000),
        row("fla", 8.0, **train, peak_bytes=5_000_000_000),
        row("portable", None, **train, gate="weak", reason="red: dg is off by 1.0e+00, more than 2e-02"),
    ]


# ---- ratios ------------------------------------------------------------------------------------------------------


def test_a_gate_stands_for_those_that_cost_a_peer_the_same() -> None:
    assert stand_ins("fla", "weak") == ("weak", "strong", "mixed")
    assert stand_ins("cudnn", "weak") == ("weak", "mixed")
    assert stand_ins("cudnn", "strong") == ("strong",)
    assert stand_ins("ggml", "weak") == ("weak",)


def test_ours_is_compared_with_the_peers_of_its_run() -> None:
    found = records()
    strong, weak = found[0], found[5]
    assert ratio(strong, found[1]) == 2.0 and ratio(weak, found[1]) == pytest.approx(1.6)
    assert ratio(weak, found[4]) == pytest.approx(2.7) and ratio(weak, found[2]) is None
    assert counterpart(weak, found, "cudnn") is found[4]
    assert counterpart(weak, [*found, own := row("fla", 1.7, gate="weak")], "fla") is own
    assert counterpart(replace(weak, run="later"), found, "fla") is None
    assert counterpart(replace(weak, case="B1-T1024-H64"), found, "fla") is None


# ---- tables ------------------------------------------------------------------------------------------------------


def test_the_screens_lines() -> None:
    found = records()
    assert report.cells(found[0], found) == [
        "strong", "portable (two_pass)", "0.800", "5.0", "4.0e-03", "2.00x", "0.75x", "", "graph of 2",
    ]  # fmt: skip
    assert report.cells(found[1], found)[5:8] == ["", "", ""]
    assert report.cells(found[-1], found)[2].startswith("red: dg")
    assert all(len(report.cells(r, found)) == len(report.COLUMNS) for r in found)
    assert report.title(found[0]).endswith("floor 0.160 ms at 4270 GB/s; matmul ceiling 0.110 ms at 700 TFLOP/s")


def test_the_documents_tables_come_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, results = tmp_path / "doc.md", tmp_path / "results"
    document.write_text(
        "a\n<!-- results: cpu -->\n<!-- end of results -->\n"
        "b\n<!-- results: cuda -->\nold\n<!-- end of results -->\nc\n"
    )
    append(results / "gpu.jsonl", records())
    arguments = ["--document", str(document), "--results", str(results)]
    assert tables.main([*arguments, "--check"]) == 1
    assert tables.main(arguments) == 0 and tables.main([*arguments, "--check"]) == 0
    text = document.read_text()
    cpu, _, gpu = text.partition("<!-- results: cuda -->")
    assert "No result file yet." in cpu and "old" not in gpu and text.endswith("<!-- end of results -->\nc\n")
    lines = gpu.splitlines()
    assert "### Some GPU" in lines
    head = "| case | gate | floor, ms | implementation | ms | x floor | error | fla, ms | x fla | cudnn, ms | x cudnn |"
    assert head in lines
    start = "| B1-T8192-H64 |"
    assert (
        f"{start} strong | 0.160 | **portable (two_pass)** | 0.800 | 5.0 | 4.0e-03 | 1.60 | 2.00x | 0.600 | 0.75x |"
        in lines
    )
    assert (
        f"{start} weak | 0.160 | **portable (two_pass)** | 1.00 | 6.2 | 4.0e-03 | 1.60 | 1.60x | 2.70 | 2.70x |"
        in lines
    )
    assert f"{start} strong | 0.440 | **portable** | 4.00 | 9.1 | 4.0e-03 | 8.00 | 2.00x | 3000 | 5000 |" in lines
    assert any("weak" in line and "red: dg is off" in line for line in lines)
    assert lines.count("| kda_intra | 255 | 8 | 64 | 4 |") == 1
    assert "peers fla 0.6.0, cudnn 1.32.0, copy 4270 GB/s, cula at abc" in gpu


def test_a_newer_run_of_ours_takes_its_own_peers_along(tmp_path: Path) -> None:
    later = {"run": "2030-01-03T00:00:00Z", "gate": "mixed"}
    found = report.render([*records(), row("portable", 0.5, **later), row("cudnn", 2.5, **later)])
    (mixed,) = [line for line in found.splitlines() if "| mixed |" in line]
    assert mixed.endswith("| 0.500 | 3.1 | 4.0e-03 |  |  | 2.50 | 5.00x |")
    (strong,) = [line for line in found.splitlines() if "| strong | 0.160" in line]
    assert "| 1.60 | 2.00x |" in strong
    assert found.count("Run of ") == 2


def test_a_peer_that_is_red_says_so() -> None:
    found = report.render([row("portable", 0.8), row("fla", None, reason="red: o is off by 1, more than 2e-02")])
    assert "| red |  |" in found


# ---- the picture -------------------------------------------------------------------------------------------------


def test_the_floor_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed here")
    append(tmp_path / "gpu.jsonl", records())
    target = tmp_path / "gpu.png"
    assert tables.main(["--results", str(tmp_path), "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.jsonl", "gpu.png"]


def test_nothing_timed_is_nothing_to_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.floors(records()[-1:], tmp_path / "gpu.png", "a title")
    (tmp_path / "empty").mkdir()
    assert tables.main(["--results", str(tmp_path / "empty"), "--plot", str(tmp_path / "gpu.png")]) == 1
    assert "nothing to plot" in capsys.readouterr().err


# ---- the command -------------------------------------------------------------------------------------------------

MISTAKES = {
    "no-gpu": (["--device", "cuda"], "no CUDA device"),
    "cpu-case": (["--device", "cuda", "--case", "N1-H32"], "give one of B1-T8192-H64"),
    "gpu-case": (["--case", "packed8x1024-H96"], "give one of B1-T2048-H4"),
    "op-without-rows": (["--device", "cuda", "--op", "kda_decode"], "--device cuda has no row"),
    "cpu-peer": (["--device", "cuda", "--peer", "ggml"], "give fla, cudnn or none"),
    "gpu-peer": (["--peer", "fla"], "give ggml, transformers or none"),
    "implementation": (["--implementation", "triton"], "portable"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, says = MISTAKES[mistake]
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and says in captured.err


@pytest.mark.parametrize(
    ("arguments", "peers", "implementations", "gates"),
    [
        ([], ["fla", "cudnn"], ["cula"], ("strong", "mixed", "weak")),
        (["--peer", "none"], [], ["cula"], ("strong", "mixed", "weak")),
        (["--peers", "cudnn", "--gates", "mixed"], ["cudnn"], ["cula"], ("mixed",)),
        (
            ["--implementation", "portable", "--implementation", "eager", "--gate", "weak", "--peer", "none"],
            [],
            ["portable", "eager"],
            ("weak",),
        ),
    ],
)
def test_filters_reach_the_run(
    arguments: list[str], peers: list[str], implementations: list[str], gates: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from cula.bench import facts
    from cula.bench.cuda import implementations as subjects
    from cula.bench.cuda import session

    heard: dict[str, Any] = {}

    def run(rows: Any, gates: Any, subjects: Any, facts: Any, machine: Any, **more: Any) -> list[Record]:
        heard.update(rows=rows, gates=gates, subjects=subjects, facts=facts, **more)
        found = [row("portable", 0.8)]
        more["show"](found, found)
        return found

    collect = facts.collect
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(facts, "collect", lambda *a: collect(*a))
    for peer in subjects.PEERS.values():
        monkeypatch.setattr(peer, "available", lambda: (True, ""))
    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(session, "Cuda", lambda rounds, note: None)
    options = ["--device", "cuda", "--cases", "B1-T8192-H64", "--ops", "kda_prefill", "--json", str(tmp_path)]
    assert main(["bench", *options, "--commit", "abcdef", "--topic", "kda try", *arguments]) == 0
    ours, names = heard["subjects"]
    assert [case.name for case in heard["rows"]] == ["B1-T8192-H64"] and heard["gates"] == gates
    assert [subject.name for subject in ours] == implementations and names == peers
    assert heard["facts"].commit == "abcdef" and heard["facts"].gpu == "NVIDIA H200"
    assert heard["json_file"].parent == tmp_path
    assert heard["json_file"].name == f"nvidia-h200-{heard['facts'].date}-kda-try.jsonl"
    assert "portable" in capsys.readouterr().out


def test_the_cpus_bars_are_not_held_against_a_gpu() -> None:
    from cula.bench.report import verdicts

    heavy = row("portable", 0.8, peak_bytes=10**12, input_bytes=1)
    assert verdicts([heavy]) == []
    assert len(verdicts([replace(heavy, device="cpu")])) == 1
