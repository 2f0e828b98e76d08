"""Result files: one JSON object a line, one line per (op, case, gate, implementation) of one run.

Only `cula bench --json` writes them. A file may hold several runs; readers take a row's newest run as a whole, so
that an implementation is only ever compared with peers of its own run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One measured row. A value that was not measured is None; `ms` is None where the check was red.

    ms median, ms_least and ms_most over `rounds` samples of `calls` calls each. floor_ms: bytes that must move at
    the run's copy rate (None for a row that works in cache). ceiling_ms: the forward's arithmetic at the run's
    matmul rate. limit_ms: decode, the states multiplied by one in place, same run. fraction_of_copy = floor_ms / ms.
    peak_bytes: of one call, on a CPU its arguments included, on a GPU not; input_bytes: q, k, v, g, beta and the
    state. error: RMS ratio of the output named by `output`, the one closest to (or furthest past) its tolerance;
    errors: of every output.
    cp: context parallelism (off on a CPU). mechanism: which of an implementation's ways ran ("fused, numba").
    load: processes that wanted a core when the run began, near 0 on an idle machine. method: how a GPU row was
    timed ("graph", "events" or "loop", see `cula.bench.cuda.clock`). kernels: what the compiler says of the Triton
    kernels of a call of ours (`cula.bench.cuda.kernels`).
    """

    op: str
    case: str
    impl: str
    gate: str
    ms: float | None
    error: float | None
    tolerance: float | None
    output: str | None = None
    errors: dict[str, float] | None = None
    reason: str | None = None
    cp: str = "off"
    mechanism: str | None = None
    ms_least: float | None = None
    ms_most: float | None = None
    rounds: int = 0
    calls: int = 1
    floor_ms: float | None = None
    ceiling_ms: float | None = None
    limit_ms: float | None = None
    fraction_of_copy: float | None = None
    copy_gb_s: float | None = None
    matmul_gflop_s: float | None = None
    peak_bytes: int | None = None
    peak_method: str | None = None
    input_bytes: int | None = None
    dtype: str = "fp32"
    state_dtype: str = "fp32"
    tokens: int = 1
    head_dim: int = 128
    buffers: int = 1
    impl_version: str | None = None
    device: str = "cpu"
    cpu: str | None = None
    threads: int | None = None
    load: float | None = None
    flags: str | None = None
    gpu: str | None = None
    python: str | None = None
    torch: str | None = None
    numba: str | None = None
    triton: str | None = None
    dsl: str | None = None
    peers: dict[str, str | None] | None = None
    commit: str | None = None
    date: str | None = None
    run: str | None = None
    method: str | None = None
    kernels: list[dict[str, Any]] | None = None

    @property
    def group(self) -> tuple[str, str, str]:
        """What is compared with one another: (op, case, gate)."""
        return self.op, self.case, self.gate

    @property
    def peak_ratio(self) -> float | None:
        """Peak memory in multiples of the inputs' size."""
        return self.peak_bytes / self.input_bytes if self.peak_bytes and self.input_bytes else None


#: Implementations of ours, and `cula` for a call that none of them took; every other name is a peer.
OURS = ("eager", "portable", "sm90", "sm100", "cula")


#: Gates that cost a peer the same: its row of one of them stands for all. FLA's work does not depend on the gate's
#: values at all, cuDNN's is the same for every gate that remembers.
SAME_WORK: dict[str, tuple[tuple[str, ...], ...]] = {
    "fla": (("strong", "mixed", "weak"),),
    "cudnn": (("mixed", "weak"),),
}


def stand_ins(impl: str, gate: str) -> tuple[str, ...]:
    """The gates, `gate` first, whose row of `impl` is a measurement of `gate` too."""
    same = next((gates for gates in SAME_WORK.get(impl, ()) if gate in gates), ())
    return (gate, *(other for other in same if other != gate))


def is_ours(record: Record) -> bool:
    """Whether the row is an implementation of this library."""
    return record.impl in OURS


def ratio(ours: Record, peer: Record) -> float | None:
    """How many times the peer's speed ours has; None unless both have a time of the same run and row.

    The peer's gate may be one that stands for ours (`SAME_WORK`).
    """
    if ours.ms is None or peer.ms is None or ours.run != peer.run:
        return None
    if ours.group[:2] != peer.group[:2] or peer.gate not in stand_ins(peer.impl, ours.gate):
        return None
    return peer.ms / ours.ms


def counterpart(ours: Record, records: Iterable[Record], impl: str) -> Record | None:
    """The row of the peer `impl` to compare `ours` with: of its run, op and case, and of its gate if there is one."""
    rows = [r for r in records if r.impl == impl and r.run == ours.run and r.group[:2] == ours.group[:2]]
    gates = stand_ins(impl, ours.gate)
    return min((r for r in rows if r.gate in gates), key=lambda r: gates.index(r.gate), default=None)


def append(path: Path, records: Iterable[Record]) -> None:
    """Add the records to the file, which is made where it is not there, its folder included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(asdict(record), allow_nan=False, default=str) + "\n")


def read(path: Path) -> list[Record]:
    """The records of one file. ValueError, with the line, for a line that is none."""
    known = {f.name for f in fields(Record)}
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found = json.loads(line)
            records.append(Record(**{name: value for name, value in found.items() if name in known}))
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} line {number} is no result: {error}") from None
    return records


def newest(records: Iterable[Record]) -> list[Record]:
    """Of each machine and (op, case, gate), the rows of the newest run, in the order of first appearance."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record.device, record.cpu, record.gpu, *record.group), []).append(record)
    kept = []
    for rows in groups.values():
        last = max(row.run or "" for row in rows)
        kept += {row.impl: row for row in rows if (row.run or "") == last}.values()
    return kept


def default_name(device: str, date: str, topic: str) -> str:
    """`<device>-<date>-<topic>.jsonl`."""
    return f"{device}-{date}-{topic}.jsonl"
