"""Times of calls on a CUDA device, and of the device's own copy and matmul.

Three methods, named in the result row:

- graph: the calls of one step are captured once, after warm-up on a side stream, and the graph is replayed between two
  CUDA events. A step of less than `SHORT_MS` holds several calls, so that the graph's own start is shared; calls walk
  over several buffers where one fits in the L2 cache.
- events: the same step launched from Python between two events, where it cannot be captured.
- loop: wall time of many calls with one synchronisation at the end, host cost included (rows without a graph).

Everybody is timed once a round, in turn; an untimed step goes before each timed one, so that the device is never idle
when the clock starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cula.bench.timing import LEAST_ROUNDS, Timing, takes_part

#: A step is at least this long, if `MOST_CALLS` calls make it so.
SHORT_MS = 1.0
MOST_CALLS = 40

#: A call that touches less than this multiple of the L2 cache finds part of its data there when it is repeated.
L2_MULTIPLE = 4

#: Wall time of one sample of a loop, and how many calls it has.
LOOP_SECONDS = 0.05
LOOP_CALLS = (5, 200)

#: What the device's rates are measured with: bytes of a copied buffer, rows of a square bf16 matrix.
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


@dataclass
class Step:
    """What is timed as one: `launch` makes `calls` calls. output: what the first of them last left, if kept."""

    launch: Callable[[], object]
    calls: int
    method: str
    output: Any = None
    keep: list[Any] = field(default_factory=list)


def buffers_for(moved_bytes: int, l2_bytes: int) -> int:
    """How many input buffers a row needs so that none is in the L2 cache when its turn comes."""
    return max(1, min(8, math.ceil(L2_MULTIPLE * l2_bytes / max(moved_bytes, 1))))


def calls_for(call_ms: float, buffers: int) -> int:
    """Calls of one step: every buffer equally often, `SHORT_MS` if `MOST_CALLS` allow."""
    wanted = min(MOST_CALLS, math.ceil(SHORT_MS / max(call_ms, 1e-4)))
    return buffers * max(1, math.ceil(wanted / buffers))


def l2_bytes() -> int:
    """The size of the device's L2 cache; 50 MB where torch does not say."""
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0)) or 50_000_000


def prepare(calls: Sequence[Callable[[], Any]], note: Callable[[str], None] = lambda text: None) -> Step:
    """A step over `calls` (one per buffer, each made before): captured if it can be, else launched from Python."""
    for call in calls:
        call()
    count = calls_for(_event_ms(calls[0], 3), len(calls))
    order = [calls[i % len(calls)] for i in range(count)]
    try:
        graph, output = _capture(order)
        better = calls_for(_event_ms(graph.replay, 3) / count, len(calls))
        if better > 1.5 * count:  # the first estimate was the host's time
            del graph, output
            count, order = better, [calls[i % len(calls)] for i in range(better)]
            graph, output = _capture(order)
    except Exception as error:  # whatever refuses to be captured is timed without
        torch.cuda.synchronize()
        note(f"no graph, events instead: {type(error).__name__}: {error}".splitlines()[0])
        return _uncaptured(order)
    return Step(graph.replay, count, "graph", output, [graph])


def _capture(order: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph of all calls, what its first call leaves at each replay)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in list(dict.fromkeys(order)) * 2:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = order[0]()
        for call in order[1:]:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, output


def _uncaptured(order: Sequence[Callable[[], Any]]) -> Step:
    step = Step(lambda: None, len(order), "events")

    def launch() -> None:
        step.output = order[0]()
        for call in order[1:]:
            call()

    step.launch = launch
    return step


def _event_ms(launch: Callable[[], object], times: int = 1) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def interleave(
    steps: Mapping[str, Step],
    *,
    rounds: int = 20,
    budget: float = 10.0,
    sample: Callable[[Callable[[], object]], float] = _event_ms,
) -> dict[str, Timing]:
    """ms a call of every step, round after round, each in turn, an untimed launch before each timed one.

    Someone so slow that `rounds` would take more than `budget` seconds takes part in fewer, at least `LEAST_ROUNDS`.
    """
    cost = {}
    for name, step in steps.items():
        step.launch()
        cost[name] = 2e-3 * sample(step.launch)
    least = min(LEAST_ROUNDS, rounds)
    wanted = {name: max(least, min(rounds, int(budget / max(cost[name], 1e-9)))) for name in steps}
    timings = {name: Timing() for name in steps}
    for index in range(rounds):
        for name, step in steps.items():
            if takes_part(index, rounds, wanted[name]):
                step.launch()
                timings[name].samples.append(sample(step.launch) / step.calls)
    return timings


def loops(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    *,
    rounds: int = 20,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Wall ms a call of everybody in a loop of many calls with one synchronisation at its end; and calls a loop."""
    sync = synchronize or torch.cuda.synchronize

    def once(order: Sequence[Callable[[], object]], count: int) -> float:
        sync()
        start = clock()
        for i in range(count):
            order[i % len(order)]()
        sync()
        return (clock() - start) / count

    counts = {}
    for name, order in calls.items():
        once(order, 3)
        counts[name] = min(max(math.ceil(LOOP_SECONDS / max(once(order, 3), 1e-9)), LOOP_CALLS[0]), LOOP_CALLS[1])
    timings = {name: Timing() for name in calls}
    for _ in range(rounds):
        for name, order in calls.items():
            timings[name].samples.append(1e3 * once(order, counts[name]))
    return timings, counts


def copy_step() -> Step:
    """A copy of `COPY_BYTES`, each byte read and written once: the rate that floors are made of."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source), 1, "events")


def matmul_step() -> Step:
    """One square bf16 matmul of random numbers: the rate that the ceiling is made of."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return Step(lambda: torch.mm(a, b, out=out), 1, "events")


def peak_growth(call: Callable[[], object]) -> int:
    """The most that torch's allocator held during one call beyond what it held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
