"""The tables that a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cula.bench.bars import memory_bar, speed_bar
from cula.bench.records import Record, is_ours, ratio

if TYPE_CHECKING:
    from rich.table import Table

    from cula.bench.facts import Facts
    from cula.bench.runs import Implementation

#: A load per core above this is said aloud.
BUSY = 0.35

COLUMNS = (
    "gate", "impl", "ms", "least", "x floor", "error", "cula's speed", "by least", "bar", "peak MB", "x inputs", "bar",
)  # fmt: skip

#: The screen width that all columns need, and the columns that a narrower one does without.
WIDE = 130
LESSER = ("least", "by least", "x floor", "peak MB")


def verdicts(records: Sequence[Record]) -> list[tuple[Record, str, float, float, bool]]:
    """(row, what, measured, bar, met) for every bar that these records can answer; what: "speed" or "memory".

    The bars are those of a CPU.
    """
    found = []
    for record in records:
        if record.device != "cpu":
            continue
        if is_ours(record):
            most, held = memory_bar(record.op), record.peak_ratio
            if most is not None and held is not None:
                found.append((record, "memory", held, most, held <= most))
            continue
        bar = speed_bar(record.op, record.impl)
        for ours in records:
            if bar is not None and is_ours(ours) and (times := ratio(ours, record)) is not None:
                found.append((record, "speed", times, bar.least, times >= bar.least))
    return found


def case_table(records: Sequence[Record], width: int = WIDE) -> Table:
    """All gates of one row; columns that nobody fills are left out, some more where `width` is below `WIDE`.

    A peer's line says how many times its speed ours has, and the bar for that.
    """
    from rich.box import SIMPLE_HEAD

    from cula.cli.console import make_table

    lines = []
    for i, record in enumerate(records):
        same = i > 0 and records[i - 1].gate == record.gate
        lines.append(["" if same else record.gate, *cells(record, records)])
        if width < WIDE:
            lines[-1][1] = record.impl
    left_out = LESSER if width < WIDE else ()
    used = [i for i, name in enumerate(COLUMNS) if name not in left_out and any(line[i] for line in lines)]
    table = make_table("", *(COLUMNS[i] for i in used))
    table.title = None
    if width < WIDE:
        table.box = SIMPLE_HEAD
    for line in lines:
        if line[0] and table.row_count:
            table.add_section()
        table.add_row(*(line[i] for i in used))
    return table


def title(record: Record) -> str:
    """The row and what the machine itself needs for it."""
    parts = [f"{record.op} {record.case}, {record.dtype}, head dim {record.head_dim}"]
    if record.buffers > 1:
        parts.append(f"over {record.buffers} states in turn")
    if record.floor_ms:
        parts.append(f"floor {number(record.floor_ms)} ms at {record.copy_gb_s:.0f} GB/s")
    if record.limit_ms:
        parts.append(f"states x 1 in place {number(record.limit_ms)} ms")
    if record.ceiling_ms:
        parts.append(f"matmul ceiling {number(record.ceiling_ms)} ms at {record.matmul_gflop_s:.0f} GFLOP/s")
    return "; ".join(parts)


def cells(record: Record, records: Sequence[Record]) -> list[str]:
    """The columns after the gate."""
    answers = {what: (value, bar, met) for row, what, value, bar, met in verdicts(records) if row is record}
    error = "" if record.error is None else f"{record.error:.0e}"
    if record.ms is None:
        return [label(record), record.reason or "not timed", "", "", error, "", "", "", "", "", ""]
    ours = next((x for x in records if is_ours(x) and x.group == record.group), None)
    times = None if is_ours(record) or ours is None else ratio(ours, record)
    speed, memory = answers.get("speed"), answers.get("memory")
    return [
        label(record),
        number(record.ms),
        number(record.ms_least),
        f"{1 / record.fraction_of_copy:.1f}" if record.fraction_of_copy else "",
        error,
        f"{times:.2f}x" if times is not None else "",
        f"{record.ms_least / ours.ms_least:.2f}x" if times and record.ms_least and ours.ms_least else "",
        f">= {speed[1]:g}x {word(speed[2])}" if speed else "",
        f"{record.peak_bytes / 1e6:.0f}" if record.peak_bytes else "",
        f"{record.peak_ratio:.1f}" if record.peak_ratio else "",
        f"<= {memory[1]:g} {word(memory[2])}" if memory else "",
    ]


def label(record: Record) -> str:
    """The implementation, and which of its ways ran where it has several."""
    return f"{record.impl} ({record.mechanism})" if record.mechanism else record.impl


def word(met: bool) -> str:
    """How a bar's answer reads."""
    return "met" if met else "MISSED"


def number(ms: float | None) -> str:
    """Milliseconds with three significant digits."""
    if ms is None:
        return ""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def absent(peers: Sequence[Implementation]) -> list[str]:
    """One line for each peer that is not here: it was not measured, and why."""
    return [f"{peer.name}: not measured, {why}" for peer in peers for here, why in [peer.available()] if not here]


def header(facts: Facts, rounds: int, instructions: Sequence[str] = ()) -> list[str]:
    """What the run is, before its first table. instructions: what ggml says that it was built for."""
    lines = facts.lines()
    if instructions:
        lines.append(f"ggml was built for {', '.join(instructions)}")
    if facts.load is not None and facts.load > BUSY * facts.cores:
        lines.append(f"the machine was busy before the run (load {facts.load:.1f}): neither times nor ratios mean much")
    lines.append(f"medians of {rounds} interleaved rounds; q and k normalised, gate and beta finished beforehand")
    return lines
