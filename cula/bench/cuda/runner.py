"""Run GPU rows: bind everybody, check everybody, time those that are right in turn, one record each.

`Machine` holds what needs a device, so that everything else is tested with a stand-in for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cula.bench.records import Record, stand_ins

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.cuda.implementations import Call, Subject
    from cula.bench.cuda.inputs import RawInputs
    from cula.bench.facts import Facts
    from cula.bench.timing import Timing
    from cula.bench.truth import Check


@dataclass(frozen=True)
class Times:
    """ms, calls a sample and method ("graph", "events", "loop") of everybody; the device's rates in the same rounds."""

    timings: Mapping[str, Timing]
    calls: Mapping[str, int]
    methods: Mapping[str, str]
    outputs: Mapping[str, Any]
    copy_gb_s: float
    matmul_gflop_s: float


class Machine(Protocol):
    """The device: makes inputs, times calls, measures one call's memory."""

    def buffers(self, case: Case, gate: str) -> list[RawInputs]:
        """As many input sets as the row needs."""
        ...

    def time(self, case: Case, calls: Mapping[str, Sequence[Call]]) -> Times:
        """Time everybody in turn."""
        ...

    def peak(self, call: Call) -> int | None:
        """Bytes that one call holds at most beyond what was there."""
        ...

    def release(self) -> None:
        """Give memory of a finished row back."""
        ...


@dataclass
class Entry:
    """One implementation on its way through a row. calls is empty where it is not timed; reason says why."""

    subject: Subject
    calls: list[Call] = field(default_factory=list)
    check: Check | None = None
    reason: str | None = None
    peak: int | None = None
    kernels: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Options:
    """say: hears what is going on; note: hears what should stay on the screen."""

    say: Callable[[str], None] = field(default=lambda text: None)
    note: Callable[[str], None] = field(default=lambda text: None)


def peers_due(peers: Sequence[Subject], gate: str, done: set[tuple[str, str]]) -> list[Subject]:
    """The peers whose work with `gate` is not measured yet; done: (peer, gate) of earlier rows of the case."""
    return [peer for peer in peers if not any((peer.name, other) in done for other in stand_ins(peer.name, gate))]


def run_case(
    case: Case,
    gate: str,
    ours: Sequence[Subject],
    peers: Sequence[Subject],
    facts: Facts,
    machine: Machine,
    options: Options,
) -> list[Record]:
    """Records of one row with one gate, ours first; who cannot do the row is left out.

    RuntimeError where the reference itself is off; whatever an implementation raises is its own row's reason.
    """
    from cula.bench.cuda.truth import expected

    where = f"{case.op} {case.name} {gate}"
    able = [x for x in (*ours, *peers) if x.available()[0] and x.refusal(case) is None]
    options.say(f"{where}: inputs and reference")
    buffers = machine.buffers(case, gate)
    truth, floor = expected(case, buffers[0])
    entries = []
    for subject in able:
        options.say(f"{where}: first call of {subject.name}")
        entries.append(_prepare(case, subject, buffers, (truth, floor), ours=subject in ours))
    for entry in entries:
        if entry.calls:
            entry.peak = machine.peak(entry.calls[0])
    options.say(f"{where}: timing")
    times = machine.time(case, {e.subject.name: e.calls for e in entries if e.calls})
    for entry in entries:
        if entry.calls and (last := times.outputs.get(entry.subject.name)) is not None:
            _judge(case, entry, last, (truth, floor), entry.subject in ours)
    records = [_record(case, gate, buffers, entry, times, facts) for entry in entries]
    for record in records:
        if record.reason:
            options.note(f"{where} {record.impl}: {record.reason}")
    return records


def _prepare(case: Case, subject: Subject, buffers: Sequence[RawInputs], truth: tuple, ours: bool) -> Entry:
    """Bind one implementation to every buffer, make the first call, check it, and ask the compiler."""
    from cula.bench.cuda.kernels import launched

    entry = Entry(subject)
    try:
        calls = [subject.bind(case, inputs) for inputs in buffers]
        outputs = calls[0]()
        entry.calls = calls
        _judge(case, entry, outputs, truth, ours)
        if ours and entry.calls:
            entry.kernels = launched(calls[0])
    except Exception as error:  # a peer may fail in any way; its row says how
        entry.calls = []
        entry.reason = f"failed: {type(error).__name__}: {error}".splitlines()[0]
    return entry


def _judge(case: Case, entry: Entry, outputs: Any, truth: tuple, ours: bool) -> None:
    """Check outputs; a red check takes the calls away."""
    from cula.bench.cuda.truth import PEER_FACTOR, check

    found = check(case, outputs, *truth, factor=1.0 if ours else PEER_FACTOR)
    entry.check = found
    if not found.passed:
        entry.calls = []
        entry.reason = f"red: {found.output} is off by {found.error:.1e}, more than {found.tolerance:.0e}"


def rates(case: Case, copy_gb_s: float, matmul_gflop_s: float) -> dict[str, float | None]:
    """The row's floor and ceiling in ms, and the rates that they are made of."""
    return {
        "floor_ms": 1e-6 * case.moved_bytes / copy_gb_s,
        "ceiling_ms": 1e-6 * case.forward_flop / matmul_gflop_s if case.op == "kda_prefill" else None,
        "copy_gb_s": copy_gb_s,
        "matmul_gflop_s": matmul_gflop_s,
    }


def named(case: Case, subject: Subject) -> dict[str, Any]:
    """impl, mechanism, dsl and cp of one implementation: for ours what the table chooses."""
    from cula.host import env

    chosen = getattr(subject, "chosen", None)
    if chosen is None:
        return {"impl": subject.name, "mechanism": None, "dsl": None, "cp": "off"}
    rows = chosen(case)
    cp = env.read("CULA_CP") or ("off" if case.op == "kda_train" else "auto")
    if not rows:
        return {"impl": subject.name, "mechanism": None, "dsl": None, "cp": cp}
    mixed = len({row.name for row in rows}) > 1
    ways = [f"{row.name} {row.mechanism}" if mixed else row.mechanism for row in rows]
    return {
        "impl": rows[0].name,
        "mechanism": "; ".join(dict.fromkeys(ways)),
        "dsl": ", ".join(dict.fromkeys(row.dsl for row in rows)),
        "cp": cp,
    }


def _record(case: Case, gate: str, buffers: Sequence[RawInputs], entry: Entry, times: Times, facts: Facts) -> Record:
    """One line of the result file."""
    name, check = entry.subject.name, entry.check
    timing = times.timings.get(name) if entry.calls else None
    ground = rates(case, times.copy_gb_s, times.matmul_gflop_s)
    return Record(
        op=case.op, case=case.name, gate=gate, **named(case, entry.subject),
        ms=timing.ms if timing else None,
        error=check.error if check is not None and math.isfinite(check.error) else None,
        tolerance=check.tolerance if check else None,
        output=check.output if check else None,
        errors={k: v for k, v in check.errors.items() if math.isfinite(v)} if check else None,
        reason=entry.reason,
        ms_least=timing.least if timing else None, ms_most=timing.most if timing else None,
        rounds=len(timing.samples) if timing else 0, calls=times.calls.get(name, 1),
        fraction_of_copy=ground["floor_ms"] / timing.ms if timing else None, **ground,
        peak_bytes=entry.peak if entry.calls else None,
        peak_method="torch allocator, arguments not counted" if entry.calls and entry.peak is not None else None,
        input_bytes=buffers[0].bytes,
        dtype=case.dtype, state_dtype=case.state_dtype, head_dim=case.K, buffers=len(buffers),
        impl_version=entry.subject.version(), device=facts.device, cpu=facts.cpu, gpu=facts.gpu,
        threads=facts.threads, load=facts.load, python=facts.python, torch=facts.torch, triton=facts.triton,
        peers=facts.peers, commit=facts.commit, date=facts.date, run=facts.run,
        method=times.methods.get(name) if timing else None, kernels=entry.kernels,
    )  # fmt: skip
