"""The Lightning kernels as the GPU's own instructions, bf16 included, run on numpy, against the float64 reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

WORKER = Path(__file__).with_name("run_ptx.py")
ROOT = WORKER.parents[3]


@pytest.mark.parametrize("arch", ["sm90", pytest.param("sm80", marks=pytest.mark.long)])
def test_outputs_and_gradients_are_the_references(arch: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 6
    for job, result in results.items():
        found, limit = result["found"], result["limit"]
        assert all(found[name] <= limit[name] for name in found), (job, found, limit)
