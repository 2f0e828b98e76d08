"""The portable chunk kernels as the GPU's own instructions, run on numpy, against the float64 reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

WORKER = Path(__file__).with_name("run_ptx.py")
ROOT = WORKER.parents[5]
SERVING = {"intra_kernel", "delta_h_kernel"}
TRAINING = SERVING | {"bwd_dhu_kernel", "bwd_dA_kernel", "bwd_dqk_kernel"}


def held(arch: str, jobs: tuple[str, ...], cache: Path, *options: str) -> None:
    """Run jobs in a process of their own; their errors are what api.md allows, every kernel has products."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch, *jobs, *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == set(jobs)
    for job, result in results.items():
        found, limit = result["found"], result["limit"]
        missed = {name: (found[name], limit[name]) for name in found if not found[name] <= limit[name]}
        assert not missed, (job, missed)
        multiply = {x for x, count in result["products"].items() if count}
        expected = SERVING if "pool" in job else TRAINING
        assert multiply == (SERVING | {"pre_scan_kernel", "merge_kernel"} if job == "segments" else expected)


@pytest.mark.parametrize(
    ("arch", "jobs"), [("sm80", ("whole", "pool_packed")), ("sm90", ("whole", "levels", "packed", "segments"))]
)
def test_outputs_and_gradients_are_the_references(arch: str, jobs: tuple[str, ...], tmp_path: Path) -> None:
    held(arch, jobs, tmp_path)


ALL = (
    "whole",
    "levels",
    "blocks",
    "packed",
    "hard",
    "finished",
    "fp16",
    "fp32",
    "wide",
    "segments",
    "pool",
    "pool_packed",
)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_every_job(arch: str, tmp_path: Path) -> None:
    held(arch, ALL, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_copies_and_products_that_land_at_once(arch: str, tmp_path: Path) -> None:
    held(arch, ("whole", "levels", "pool_packed"), tmp_path, "--early")
