"""Peak memory of one call, measured in a fresh process.

The kernel keeps the high-water mark of a process's resident memory and lets the process reset it (Linux,
`/proc/self/clear_refs`). A child process builds the row's inputs, warms the implementation up on a small row (thread
pools, imports and just-in-time code do not count), gives freed memory back, resets the mark, makes the call once and
reads the mark again. Unlike a profiler of torch's allocator, this sees every byte that any library touches. Elsewhere
the child falls back to the growth of `ru_maxrss`, which can only be too low; the row says which way it was measured.

peak_bytes = growth during the call (its results included) + the size of the call's arguments.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cula.bench.cases import Case

if TYPE_CHECKING:
    from cula.bench.runs import Implementation

#: Tokens of the warm-up row.
WARM_TOKENS = 128


@dataclass(frozen=True)
class Peak:
    """bytes: peak of the call, arguments included. growth: without them. method: "VmHWM" or "ru_maxrss"."""

    bytes: int
    growth: int
    method: str


def measure(case: Case, gate: str, impl: str, implementation: str | None, threads: int, timeout: float = 600.0) -> Peak:
    """Peak of one call of `impl` (a peer's name, or anything else for ours) in a process of its own.

    RuntimeError with the child's last line where it fails or takes longer than `timeout` seconds.
    """
    request = {
        "case": asdict(case),
        "gate": gate,
        "impl": impl,
        "implementation": implementation,
        "threads": threads,
    }
    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cula.bench.memory", json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"memory of {impl}: not done after {timeout:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"memory of {impl}: {lines[-1]}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_mark() -> bool:
    """Set the resident high-water mark to what is resident now; False where the system has no such thing."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        _status("VmHWM")
    except OSError:
        return False
    return True


def _release_freed() -> None:
    """Give freed heap memory back to the system, so that reusing it counts as growth."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _maxrss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_of(case: Case, gate: str, implementation: Implementation, threads: int) -> Peak:
    """Measure in this process: for the child, and for tests with a stand-in."""
    from cula.bench.inputs import make_inputs

    small = replace(case, T=min(case.T, WARM_TOKENS), lengths=(), buffers=1)
    for _ in range(2):
        implementation.run(small, make_inputs(small, gate, seed=1), threads).call_once()
    inputs = make_inputs(case, gate)
    arguments = inputs.bytes
    if case.trains:
        arguments += inputs.do.numel() * inputs.do.element_size()
    _release_freed()
    run = implementation.run(case, inputs, threads)
    _release_freed()
    if _reset_mark():
        before = _status("VmRSS")
        run.call_once()
        growth, method = _status("VmHWM") - before, "VmHWM"
    else:
        before = _maxrss()
        run.call_once()
        growth, method = _maxrss() - before, "ru_maxrss"
    growth = max(growth, 0)
    return Peak(bytes=growth + arguments, growth=growth, method=method)


def main(argument: str) -> None:
    """Child process: one request as JSON, one Peak as JSON on the last line of standard output."""
    request = json.loads(argument)
    fields = {**request["case"], "lengths": tuple(request["case"]["lengths"])}
    from cula.bench.ours import Cula
    from cula.bench.peers import PEERS
    from cula.bench.timing import set_threads

    set_threads(request["threads"])
    implementation = PEERS.get(request["impl"]) or Cula(request["impl"], request["implementation"])
    print(json.dumps(asdict(peak_of(Case(**fields), request["gate"], implementation, request["threads"]))))


if __name__ == "__main__":
    main(sys.argv[1])
