"""The tables of docs/benchmarks.md, made from the result files: `python -m cula.bench.tables [--check]`.

The document has one region per device, between `<!-- results: cpu -->` (or `cuda`) and `<!-- end of results -->`. What
stands there is replaced by tables of the newest run of every row; `--check` only says whether the document is up to
date (exit code 1 where it is not). `--plot FILE.png` draws the GPU rows of all files instead, time against floor.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cula.bench.cuda.report import render as gpu_tables
from cula.bench.records import Record, is_ours, newest, ratio, read
from cula.bench.report import label, number, verdicts, word

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"

_REGION = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

HEAD = "| gate | implementation | ms | x floor | error | cula's speed | bar | peak, x inputs | bar |"
RULE = "|---|---|---|---|---|---|---|---|---|"


def load(folder: Path = RESULTS) -> list[Record]:
    """Every row of every run in the folder's result files, in the files' order."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read(path)]


def render(records: Sequence[Record], device: str) -> str:
    """Markdown for the newest run of every row of one device; one sentence where there is none."""
    if device == "cuda":
        return gpu_tables([r for r in records if r.device == device])
    chosen = newest(r for r in records if r.device == device)
    if not chosen:
        return "\nNo result file yet.\n\n"
    machines = list(dict.fromkeys((r.cpu, r.gpu) for r in chosen))
    return "".join(_machine([r for r in chosen if (r.cpu, r.gpu) == machine]) for machine in machines)


def _machine(records: Sequence[Record]) -> str:
    first = records[0]
    text = f"\n### {first.gpu or first.cpu}\n"
    for op, case in dict.fromkeys((r.op, r.case) for r in records):
        rows = [r for r in records if (r.op, r.case) == (op, case)]
        text += f"\n**{op} {case}**, {rows[0].dtype}, head dim {rows[0].head_dim}{_ground(rows[0])}.\n\n"
        text += "\n".join([HEAD, RULE, *(_line(r, rows) for r in rows)]) + "\n"
    runs = dict.fromkeys((r.run, r.commit, r.torch, r.numba, r.threads) for r in records)
    for run, commit, torch, numba, threads in runs:
        versions = ", ".join(f"{k} {v}" for r in records if r.run == run and r.peers for k, v in r.peers.items() if v)
        text += (
            f"\nRun of {run}: {threads} threads, torch {torch}{f', numba {numba}' if numba else ''}"
            f", peers {_distinct(versions) or 'none'}, cula at {commit or 'no commit'}.\n"
        )
    return text + "\n"


def _distinct(versions: str) -> str:
    return ", ".join(dict.fromkeys(versions.split(", "))) if versions else ""


def _ground(record: Record) -> str:
    """What the machine itself needs for the row."""
    parts = [f"floor {number(record.floor_ms)} ms at {record.copy_gb_s:.0f} GB/s"] if record.floor_ms else []
    parts += [f"{record.buffers} states in turn"] if record.buffers > 1 else []
    parts += [f"the states times one in place {number(record.limit_ms)} ms"] if record.limit_ms else []
    parts += [f"matmul ceiling {number(record.ceiling_ms)} ms"] if record.ceiling_ms else []
    return "".join(f"; {part}" for part in parts)


def _line(record: Record, rows: Sequence[Record]) -> str:
    answers = {what: (bar, met) for row, what, _, bar, met in verdicts(rows) if row is record}
    name = f"**cula, {label(record)}**" if is_ours(record) else record.impl
    error = "" if record.error is None else f"{record.error:.0e}"
    if record.ms is None:
        return f"| {record.gate} | {name} | {record.reason or 'not timed'} | | {error} | | | | |"
    ours = next((r for r in rows if is_ours(r) and r.group == record.group), None)
    times = None if is_ours(record) or ours is None else ratio(ours, record)
    speed, memory = answers.get("speed"), answers.get("memory")
    columns = [
        record.gate,
        name,
        number(record.ms),
        f"{1 / record.fraction_of_copy:.1f}" if record.fraction_of_copy else "",
        error,
        f"{times:.2f}x" if times is not None else "",
        f"{speed[0]:g}x, {word(speed[1])}" if speed else "",
        f"{record.peak_ratio:.1f}" if record.peak_ratio else "",
        f"{memory[0]:g}, {word(memory[1])}" if memory else "",
    ]
    return "| " + " | ".join(columns) + " |"


def updated(text: str, records: Sequence[Record]) -> str:
    """`text` with every region made anew. ValueError where it has none."""
    if not _REGION.search(text):
        raise ValueError("the document has no `<!-- results: DEVICE -->` region")
    return _REGION.sub(lambda found: found[1] + render(records, found[2]) + found[3], text)


def draw(records: Sequence[Record], path: Path) -> int:
    """Draw the newest run of every GPU row; 1 where there is none."""
    from cula.bench.plot import floors

    rows = [r for r in newest(records) if r.device == "cuda"]
    try:
        floors(rows, path, ", ".join(dict.fromkeys(r.gpu or "a GPU" for r in rows)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: drawn")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the document, or with --check compare it; 0 where it matches (or was written), else 1."""
    parser = argparse.ArgumentParser(prog="python -m cula.bench.tables", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, say whether the tables match")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the GPU rows and leave the document alone")
    options = parser.parse_args(argv)
    if options.plot:
        return draw(load(options.results), options.plot)
    before = options.document.read_text(encoding="utf-8")
    after = updated(before, load(options.results))
    if before == after:
        return 0
    if options.check:
        print(
            f"{options.document.name} does not match the result files: run python -m cula.bench.tables",
            file=sys.stderr,
        )
        return 1
    options.document.write_text(after, encoding="utf-8")
    print(f"{options.document.name}: tables written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
