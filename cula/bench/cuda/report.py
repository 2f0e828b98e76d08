"""What GPU rows look like on the screen and in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cula.bench.records import SAME_WORK, Record, counterpart, is_ours, newest, ratio
from cula.bench.report import label, number

#: Peers in the order of their columns.
PEER_NAMES = tuple(SAME_WORK)

COLUMNS = ("gate", "impl", "ms", "x floor", "error", *(f"x {name}" for name in PEER_NAMES), "peak MB", "method")


def cells(record: Record, records: Sequence[Record]) -> list[str]:
    """One line of a run: a row of ours says how many times each peer's speed it has."""
    error = "" if record.error is None else f"{record.error:.1e}"
    if record.ms is None:
        return [record.gate, label(record), record.reason or "not timed", "", error, *("" for _ in PEER_NAMES), "", ""]
    peers = [counterpart(record, records, name) if is_ours(record) else None for name in PEER_NAMES]
    return [
        record.gate,
        label(record),
        number(record.ms),
        multiple(record),
        error,
        *(times(record, peer) for peer in peers),
        megabytes(record),
        f"{record.method} of {record.calls}" if record.method else "",
    ]


def times(ours: Record, peer: Record | None) -> str:
    """How many times the peer's speed ours has; empty where they cannot be compared."""
    value = None if peer is None else ratio(ours, peer)
    return "" if value is None else f"{value:.2f}x"


def multiple(record: Record) -> str:
    """The time in multiples of the floor."""
    return f"{1 / record.fraction_of_copy:.1f}" if record.fraction_of_copy else ""


def megabytes(record: Record | None) -> str:
    """The peak in MB, arguments not counted."""
    return "" if record is None or record.peak_bytes is None else f"{record.peak_bytes / 1e6:.0f}"


def title(record: Record) -> str:
    """The row and what the device itself needs for it."""
    text = f"{record.op} {record.case}, {record.dtype}, head dim {record.head_dim}"
    if record.floor_ms and record.copy_gb_s:
        text += f"; floor {number(record.floor_ms)} ms at {record.copy_gb_s:.0f} GB/s"
    if record.ceiling_ms and record.matmul_gflop_s:
        text += f"; matmul ceiling {number(record.ceiling_ms)} ms at {record.matmul_gflop_s / 1e3:.0f} TFLOP/s"
    return text


def kernel_lines(records: Sequence[Record]) -> list[list[str]]:
    """Name, registers, spills, shared KB and warps of every distinct kernel of the records, one line each."""
    found: list[list[str]] = []
    for fact in (fact for record in records for fact in record.kernels or ()):
        line = [_plain(fact.get(key)) for key in ("name", "registers", "spills")]
        shared = fact.get("shared")
        line += ["" if shared is None else f"{shared / 1024:.0f}", _plain(fact.get("warps"))]
        if line not in found:
            found.append(line)
    return found


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


KERNEL_COLUMNS = ("kernel", "registers", "spills", "shared, KB", "warps")


def render(records: Sequence[Record]) -> str:
    """Markdown of all GPU rows: a section for each GPU. records: of all runs; the newest run of a row of ours counts,
    beside the peers of that run."""
    text = ""
    for gpu in dict.fromkeys(r.gpu for r in records):
        here = [r for r in records if r.gpu == gpu]
        text += _machine(newest(r for r in here if is_ours(r)), here)
    return text or "\nNo result file yet.\n\n"


def _machine(ours: Sequence[Record], records: Sequence[Record]) -> str:
    if not ours:
        return ""
    text = f"\n### {ours[0].gpu}\n"
    for op in dict.fromkeys(r.op for r in ours):
        text += f"\n**{op}**\n\n" + _table([r for r in ours if r.op == op], records)
    kernels = kernel_lines(ours)
    if kernels:
        text += "\n**Triton kernels of these calls**\n\n" + _markdown(KERNEL_COLUMNS, kernels)
    for run in dict.fromkeys(r.run for r in ours):
        first = next(r for r in ours if r.run == run)
        found = ", ".join(f"{name} {v}" for name, v in (first.peers or {}).items() if v) or "none"
        text += (
            f"\nRun of {run}: torch {first.torch}, triton {first.triton or 'none'}, peers {found}, copy "
            f"{first.copy_gb_s or 0:.0f} GB/s, cula at {first.commit or 'no commit'}.\n"
        )
    return text + "\n"


def _table(rows: Sequence[Record], records: Sequence[Record]) -> str:
    """One op: a line for each case, gate and implementation of ours, two columns for each peer that was there."""
    peers = [name for name in PEER_NAMES if any(counterpart(r, records, name) for r in rows)]
    train = rows[0].op == "kda_train"
    head = ["case", "gate", "floor, ms", "implementation", "ms", "x floor", "error"]
    head += [text for name in peers for text in (f"{name}, ms", f"x {name}")]
    head += ["peak, MB", *(f"{name} peak, MB" for name in peers)] if train else []
    lines = []
    for row in rows:
        others = [counterpart(row, records, name) for name in peers]
        line = [
            row.case,
            row.gate,
            number(row.floor_ms),
            f"**{label(row)}**",
            number(row.ms) or row.reason or "not timed",
            multiple(row),
            "" if row.error is None else f"{row.error:.1e}",
        ]
        line += [text for peer in others for text in (_time_of(peer), times(row, peer))]
        line += [megabytes(row), *map(megabytes, others)] if train else []
        lines.append(line)
    return _markdown(head, lines)


def _time_of(peer: Record | None) -> str:
    if peer is None:
        return ""
    return number(peer.ms) or (peer.reason or "not timed").partition(":")[0]


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
