"""One GPU run: the device behind `runner.Machine`, the facts of the run, and the loop over its rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cula.bench.cuda import runner
from cula.bench.cuda.implementations import PEERS, Ours

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.cuda.implementations import Call
    from cula.bench.cuda.inputs import RawInputs
    from cula.bench.facts import Facts
    from cula.bench.records import Record

#: Names of the device's own steps among the timed ones.
COPY, MATMUL = "(copy)", "(matmul)"


class Cuda:
    """The current CUDA device."""

    def __init__(self, rounds: int, note: Callable[[str], None] = lambda text: None) -> None:
        from cula.bench.cuda import clock

        self.clock, self.rounds, self.note = clock, rounds, note
        self.steps = {COPY: clock.copy_step(), MATMUL: clock.matmul_step()}

    def buffers(self, case: Case, gate: str) -> list[RawInputs]:
        """Enough input sets to leave the L2 cache between two uses."""
        from cula.bench.cuda.inputs import make

        count = self.clock.buffers_for(case.moved_bytes, self.clock.l2_bytes())
        return [make(case, gate, seed) for seed in range(count)]

    def time(self, case: Case, calls: Mapping[str, Sequence[Call]]) -> runner.Times:
        """Graphs (or what stands for them) in turn with the device's own steps; loops for a row without a graph."""
        clock, steps = self.clock, dict(self.steps)
        if case.graph:
            steps |= {name: clock.prepare(order, self.note) for name, order in calls.items()}
        timings = clock.interleave(steps, rounds=self.rounds)
        counts = {name: step.calls for name, step in steps.items()}
        methods = {name: step.method for name, step in steps.items()}
        if not case.graph:
            looped, counts = clock.loops(calls, rounds=self.rounds)
            timings |= looped
            methods = dict.fromkeys(calls, "loop")
        return runner.Times(
            timings=timings, calls=counts, methods=methods,
            outputs={name: steps[name].output for name in calls if name in steps},
            copy_gb_s=2e-6 * clock.COPY_BYTES / timings[COPY].ms,
            matmul_gflop_s=2e-6 * clock.MATMUL_SIZE**3 / timings[MATMUL].ms,
        )  # fmt: skip

    def peak(self, call: Call) -> int:
        """Growth of torch's allocator during one call."""
        return self.clock.peak_growth(call)

    def release(self) -> None:
        """Free what no tensor holds any more."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def versions(wanted: Sequence[str]) -> dict[str, str | None]:
    """peer -> version, None where it is not installed or not wanted."""
    return {name: peer.version() if name in wanted and peer.available()[0] else None for name, peer in PEERS.items()}


def run(
    rows: Sequence[Case],
    gates: Sequence[str],
    subjects: tuple[Sequence[Ours], Sequence[str]],
    facts: Facts,
    machine: Any,
    *,
    json_file: Path | None = None,
    show: Callable[[list[Record], list[Record]], None] = lambda found, records: None,
    options: runner.Options | None = None,
) -> list[Record]:
    """All rows; each (case, gate) is shown and written to `json_file` as soon as it is done.

    subjects: ours, and the names of the peers to time. A peer whose work a gate does not change is timed once a case.
    show: hears the rows of one (case, gate) and all rows so far. A row that could not be run at all is shown, not
    written.
    """
    from cula.bench.records import append

    ours, names = subjects
    records: list[Record] = []
    for case in rows:
        done: set[tuple[str, str]] = set()
        for gate in gates:
            due = runner.peers_due([PEERS[name] for name in names], gate, done)
            try:
                found = runner.run_case(case, gate, ours, due, facts, machine, options or runner.Options())
                done |= {(peer.name, gate) for peer in due}
                if json_file is not None:
                    append(json_file, found)
            except RuntimeError as error:  # out of memory, a reference that is off: the next row may fare better
                found = [_lost(case, gate, facts, error)]
            finally:
                machine.release()
            records += found
            show(found, records)
    return records


def _lost(case: Case, gate: str, facts: Facts, error: Exception) -> Record:
    """A row that failed outside of any implementation."""
    from cula.bench.records import Record

    reason = f"failed: {type(error).__name__}: {error}".splitlines()[0]
    return Record(
        op=case.op, case=case.name, impl="cula", gate=gate, ms=None, error=None, tolerance=None, reason=reason,
        dtype=case.dtype, device=facts.device, gpu=facts.gpu, run=facts.run,
    )  # fmt: skip
