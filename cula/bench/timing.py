"""Medians of interleaved runs: one round times everybody once, in turn, so that drift hits all alike."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: A thread pool that has just worked spins for a few ms before it sleeps, and would take a core from the next one.
SETTLE_SECONDS = 0.01

#: Steps shorter than this are preceded by an untimed one, which wakes the implementation's own threads.
WAKE_BELOW_SECONDS = 0.05

#: Nobody is timed less often than this.
LEAST_ROUNDS = 5

#: What the machine's own rates are measured with: bytes of a copied buffer, rows of a square matrix.
COPY_BYTES = 128 << 20
MATMUL_SIZE = 1024


@dataclass
class Timing:
    """Times of one implementation, in milliseconds a call."""

    samples: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        """The shortest."""
        return min(self.samples)

    @property
    def most(self) -> float:
        """The longest."""
        return max(self.samples)


def takes_part(index: int, rounds: int, wanted: int) -> bool:
    """Whether someone with `wanted` of `rounds` rounds is timed in round `index`: spread evenly, last one included."""
    return (index + 1) * wanted // rounds > index * wanted // rounds


def interleave(
    steps: Mapping[str, tuple[Callable[[], object], int]],
    *,
    rounds: int = 20,
    budget: float = 10.0,
    settle: float = SETTLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every `name: (step, calls a step)` in turn, round after round.

    rounds: how often each is timed. Someone so slow that this would take more than `budget` seconds takes part in
    fewer rounds, at least `LEAST_ROUNDS`, spread evenly over the others'. Each gets warm-up steps first; in each
    round a pause of `settle` seconds comes before each. Cyclic garbage collection is off while the clock runs.
    """
    cost = {name: _warm_up(step, clock) for name, (step, _) in steps.items()}
    least = min(LEAST_ROUNDS, rounds)
    wanted = {name: max(least, min(rounds, int(budget / max(t, 1e-9)))) for name, t in cost.items()}
    timings = {name: Timing() for name in steps}
    collecting = gc.isenabled()
    try:
        for index in range(rounds):
            for name, (step, calls) in steps.items():
                if takes_part(index, rounds, wanted[name]):
                    timings[name].samples.append(_once(step, calls, cost[name], settle, clock))
    finally:
        if collecting:
            gc.enable()
    return timings


def _warm_up(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Run `step` until it is warm; returns the seconds that the last of these steps took."""
    spent = 0.0
    for _ in range(3):
        start = clock()
        step()
        last = clock() - start
        spent += last
        if spent > 1.0:
            break
    return last


def _once(step: Callable[[], object], calls: int, cost: float, settle: float, clock: Callable[[], float]) -> float:
    """One sample in ms a call."""
    gc.enable()
    gc.collect(0)
    gc.disable()
    time.sleep(settle)
    if cost < WAKE_BELOW_SECONDS:
        step()
    start = clock()
    step()
    return 1e3 * (clock() - start) / calls


def set_threads(threads: int) -> None:
    """Hold torch, and the pools that are made later in this process or its children, to `threads` threads."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = str(threads)
    import torch

    torch.set_num_threads(threads)
    if (numba := sys.modules.get("numba")) is not None:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def copy_step(device: str) -> Callable[[], object]:
    """A step that copies `COPY_BYTES`, reading and writing each once: the rate that floors are made of."""
    import torch

    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def matmul_step(device: str) -> Callable[[], object]:
    """A step of one square fp32 matmul of `MATMUL_SIZE`: the rate that the ceiling is made of."""
    import torch

    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def in_place_step(state_bytes: int, turns: Sequence[int], device: str) -> Callable[[], object]:
    """A step that multiplies a state by one in place for each of `turns`: what a decode cannot beat."""
    import torch

    states = torch.randn(max(turns) + 1, state_bytes // 4, device=device)
    rows = [states[j] for j in turns]

    def step() -> None:
        for row in rows:
            row.mul_(1.0)

    return step
