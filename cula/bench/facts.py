"""Facts about the machine and the software that a number means nothing without."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Facts:
    """cpu: model name. flags: vector instruction sets that torch dispatches to and the CPU has. commit: of the
    checkout that cula was imported from, with "-dirty" where files differ from it, None outside a checkout.
    peers: peer -> version or None. load: of the minute before the run. run: its start, to the second (UTC).
    gpu: its name, and triton: its version, of a GPU run."""

    device: str
    cpu: str
    cores: int
    threads: int
    flags: str
    python: str
    torch: str
    numba: str | None
    load: float | None
    commit: str | None
    run: str
    peers: dict[str, str | None] = field(default_factory=dict)
    gpu: str | None = None
    triton: str | None = None

    @property
    def date(self) -> str:
        """The day of the run, YYYY-MM-DD."""
        return self.run[:10]

    def lines(self) -> list[str]:
        """The facts as a person reads them."""
        numba = f", numba {self.numba}" if self.numba else ""
        peers = ", ".join(f"{name} {v}" for name, v in self.peers.items() if v) or "none installed"
        if self.gpu:
            return [
                f"{self.gpu}, torch {self.torch}, triton {self.triton or 'none'}, python {self.python}",
                f"peers: {peers}; cula at {self.commit or 'no commit'}",
            ]
        return [
            f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.flags}",
            f"python {self.python}, torch {self.torch}{numba}; peers: {peers}; cula at {self.commit or 'no commit'}",
        ]


def collect(device: str, threads: int, peers: dict[str, str | None], checkout: str | None = None) -> Facts:
    """Look everything up. Imports torch. checkout: its commit, where the files at hand are a copy without git."""
    import torch

    gpu = device == "cuda"

    return Facts(
        device=device,
        cpu=cpu_model(),
        cores=usable_cores(),
        threads=threads,
        flags=f"torch uses {torch.backends.cpu.get_cpu_capability()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        numba=_installed("numba"),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        commit=checkout or commit(),
        run=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        peers=peers,
        gpu=torch.cuda.get_device_name() if gpu else None,
        triton=_installed("triton") if gpu else None,
    )


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cpu_model() -> str:
    """The CPU's name, as precise as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()

    def entry(key: str) -> str | None:
        found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        return found[1].strip() if found else None

    name = entry("model name") or platform.machine()
    family, model = entry("cpu family"), entry("model")
    return f"{name} (family {family} model {model})" if family and model else name


def commit() -> str | None:
    """HEAD of the checkout around this package, None where there is none."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


def slug(text: str) -> str:
    """`text` as part of a file name: lower case, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", text).lower()).strip("-")


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
