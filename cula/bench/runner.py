"""Run rows: check everybody against the float64 recurrence, time those that are right, in turn, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cula.bench.facts import Facts
from cula.bench.records import OURS, Record
from cula.bench.timing import (
    COPY_BYTES,
    MATMUL_SIZE,
    Timing,
    copy_step,
    in_place_step,
    interleave,
    matmul_step,
)

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs
    from cula.bench.memory import Peak
    from cula.bench.runs import Implementation, Run
    from cula.bench.truth import Check

#: Names of the machine's own steps among the timed ones.
COPY, MATMUL, LIMIT = "(copy)", "(matmul)", "(in place)"


@dataclass(frozen=True)
class Options:
    """rounds: timed rounds a row. threads: of everybody. budget: seconds that one implementation may spend on one
    row beyond its least rounds. memory: measure peaks. reference: stands in for the float64 recurrence in tests.
    say: hears what is going on; note: hears what should stay on the screen."""

    rounds: int = 20
    threads: int = 2
    budget: float = 10.0
    memory: bool = True
    reference: Callable[..., tuple] | None = None
    say: Callable[[str], None] = field(default=lambda text: None)
    note: Callable[[str], None] = field(default=lambda text: None)


@dataclass(frozen=True)
class Ready:
    """One implementation after its check: `run` where it is right, else the reason why it is not timed."""

    implementation: Implementation
    run: Run | None
    check: Check | None
    reason: str | None = None


def run_case(
    case: Case,
    gate: str,
    implementations: Sequence[Implementation],
    facts: Facts,
    options: Options,
    measure: Callable[[Case, str, Implementation], Peak] | None = None,
) -> list[Record]:
    """Records of one row with one gate, ours first as given; who cannot do the row is left out.

    An implementation that raises or is further from the reference than its tolerance gets no time and a reason.
    measure: how the peak of one call is measured; None leaves peaks out.
    """
    from cula.bench.inputs import make_inputs
    from cula.bench.truth import expected

    able = [x for x in implementations if x.available()[0] and x.refusal(case) is None]
    inputs = make_inputs(case, gate)
    options.say(f"{case.op} {case.name} {gate}: the reference")
    truth = expected(case, inputs, options.reference)
    ready = [prepare(case, inputs, x, truth, options) for x in able]
    options.say(f"{case.op} {case.name} {gate}: timing")
    timings = _time(case, ready, options)
    ready = [recheck(case, entry, truth) for entry in ready]
    peaks = {}
    for entry in ready:
        if measure is not None and options.memory and entry.run is not None:
            options.say(f"{case.op} {case.name} {gate}: memory of {entry.implementation.name}")
            try:
                peaks[entry.implementation.name] = measure(case, gate, entry.implementation)
            except (RuntimeError, OSError) as error:
                options.note(f"no peak: {error}")
    return [_record(case, gate, inputs, entry, timings, peaks, facts) for entry in ready]


def prepare(case: Case, inputs: Inputs, implementation: Implementation, truth: dict, options: Options) -> Ready:
    """Bind one implementation, make its first call and check it."""
    from cula.bench.truth import check

    try:
        run = implementation.run(case, inputs, options.threads)
        run.call_once()
        result = check(case, run.outputs(), truth)
    except Exception as error:  # a peer may fail in any way; its row says how
        return Ready(implementation, None, None, f"failed: {type(error).__name__}: {error}".splitlines()[0])
    return judged(implementation, run, result)


def judged(implementation: Implementation, run: Run, result: Check) -> Ready:
    """Keep the run only where the check passed."""
    if result.passed:
        return Ready(implementation, run, result)
    return Ready(
        implementation, None, result,
        f"red: {result.output} is off by {result.error:.1e}, more than {result.tolerance:.0e}",
    )  # fmt: skip


def recheck(case: Case, entry: Ready, truth: dict) -> Ready:
    """Check the outputs of the last timed call as well, where the row's state does not move on."""
    from cula.bench.truth import check

    if entry.run is None or not entry.run.repeatable:
        return entry
    return judged(entry.implementation, entry.run, check(case, entry.run.outputs(), truth))


def _time(case: Case, ready: Sequence[Ready], options: Options) -> dict[str, Timing]:
    """Everybody who is right and the machine's own steps, interleaved. Times of the latter are per call too."""
    steps = {x.implementation.name: (x.run.step, x.run.calls) for x in ready if x.run is not None}
    if not steps:
        return {}
    steps[COPY] = (copy_step(case.device), 1)
    steps[MATMUL] = (matmul_step(case.device), 1)
    if case.decodes:
        steps[LIMIT] = (in_place_step(case.state_bytes, case.turns, case.device), len(case.turns))
    return interleave(steps, rounds=options.rounds, budget=options.budget)


def _record(
    case: Case, gate: str, inputs: Inputs, entry: Ready, timings: dict[str, Timing], peaks: dict, facts: Facts
) -> Record:
    """One line of the result file."""
    name = entry.implementation.name
    timing = timings.get(name) if entry.run is not None else None
    check, peak = entry.check, peaks.get(name)
    finite = check is not None and math.isfinite(check.error)
    rates = _rates(case, timings)
    return Record(
        op=case.op, case=case.name, impl=name, gate=gate,
        ms=timing.ms if timing else None,
        error=check.error if finite else None,
        tolerance=check.tolerance if check else None,
        output=check.output if check else None,
        errors={k: v for k, v in check.errors.items() if math.isfinite(v)} if check else None,
        reason=entry.reason,
        ms_least=timing.least if timing else None, ms_most=timing.most if timing else None,
        rounds=len(timing.samples) if timing else 0, calls=entry.run.calls if entry.run else 1,
        fraction_of_copy=rates["floor_ms"] / timing.ms if timing and rates["floor_ms"] else None, **rates,
        peak_bytes=peak.bytes if peak else None, peak_method=peak.method if peak else None,
        input_bytes=inputs.bytes,
        dtype=case.dtype, state_dtype=case.state_dtype, tokens=case.tokens, head_dim=case.K, buffers=case.buffers,
        mechanism=entry.implementation.mechanism(case),
        impl_version=entry.implementation.version(),
        device=facts.device, cpu=facts.cpu, threads=facts.threads,
        load=facts.load, flags=facts.flags, python=facts.python,
        torch=facts.torch, numba=facts.numba, peers=facts.peers, commit=facts.commit, date=facts.date, run=facts.run,
    )  # fmt: skip


def _rates(case: Case, timings: dict[str, Timing]) -> dict[str, float | None]:
    """The run's copy and matmul rates, and the row's floor, ceiling and in-place limit in ms."""
    if COPY not in timings:
        return dict.fromkeys(("floor_ms", "ceiling_ms", "limit_ms", "copy_gb_s", "matmul_gflop_s"))
    copy = 2 * COPY_BYTES / (1e-3 * timings[COPY].ms)
    matmul = 2 * MATMUL_SIZE**3 / (1e-3 * timings[MATMUL].ms)
    return {
        "floor_ms": 1e3 * case.moved_bytes / copy if case.from_memory else None,
        "ceiling_ms": 1e3 * case.forward_flop / matmul if case.op.endswith("_prefill") else None,
        "limit_ms": timings[LIMIT].ms if LIMIT in timings else None,
        "copy_gb_s": copy / 1e9,
        "matmul_gflop_s": matmul / 1e9,
    }


def in_fresh_process(threads: int) -> Callable[[Case, str, Implementation], Peak]:
    """A `measure` for `run_case`. A peer's work does not depend on the gate, so its peak is measured with the
    first gate and kept; ours is measured every time."""
    from cula.bench import memory

    kept: dict[tuple[Case, str], Peak] = {}

    def measure(case: Case, gate: str, implementation: Implementation) -> Peak:
        name = implementation.name
        if name in OURS:
            return memory.measure(case, gate, name, getattr(implementation, "implementation", None), threads)
        if (case, name) not in kept:
            kept[case, name] = memory.measure(case, gate, name, None, threads)
        return kept[case, name]

    return measure
