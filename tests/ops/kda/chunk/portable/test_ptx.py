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
BOTH = {"intra_kernel", "delta_h_kernel"}
TRAINING = BOTH | {"bwd_dhu_kernel", "bwd_dA_kernel", "bwd_dqk_kernel"}


@pytest.mark.parametrize(
    ("arch", "jobs"),
    [
        ("sm80", ("whole", "levels", "pool_packed")),
        ("sm90", ("whole", "levels", "blocks", "packed", "hard", "finished", "fp16", "fp32", "pool", "pool_packed")),
    ],
)
def test_outputs_and_gradients_are_the_references(arch: str, jobs: tuple[str, ...], tmp_path: Path) -> None:
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch, *jobs]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == set(jobs)
    for job, result in results.items():
        found, limit = result["found"], result["limit"]
        assert all(found[name] <= limit[name] for name in found), (job, found, limit)
        assert all(count > 0 for count in result["products"].values()) or "tiles_kernel" in result["products"]
        assert {x for x, count in result["products"].items() if count} == (BOTH if "pool" in job else TRAINING)
