"""The portable chunk kernels compiled for GPUs that are not here: instructions, time, no recompile per length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

WORKER = Path(__file__).with_name("compile_only.py")
ROOT = WORKER.parents[5]

#: Seconds that one kernel may take; the slowest takes 10 with both cores busy.
SLOWEST = 60.0

TRAINING = {"intra_kernel", "delta_h_kernel", "bwd_dhu_kernel", "bwd_dA_kernel", "bwd_dqk_kernel"}
WALKS = {"delta_h_kernel", "bwd_dhu_kernel", "merge_kernel"}
#: The kernels whose products have 16 or 32 rows in a chunk of 32, which a bounded gate gets: wgmma takes 64.
SMALL = {"intra_kernel", "bwd_dA_kernel", "bwd_dqk_kernel"}
MMA, WGMMA, TCGEN05 = "mma.sync", "wgmma.mma_async", "tcgen05.mma"


def compiled(arch: str, *jobs: str, cache: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{job: {kernel: facts of each compilation}}; a failed compilation fails the test."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch, *jobs]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    jobs_found = json.loads(done.stdout.splitlines()[-1])["jobs"]
    for kernels in jobs_found.values():
        for name, facts in kernels.items():
            assert all(fact["cubin"] and fact["seconds"] < SLOWEST for fact in facts), (name, facts)
    return jobs_found


def products(kernels: dict[str, list[dict[str, Any]]]) -> dict[str, set[str]]:
    """The tensor-core instructions of each kernel that has products, over all its compilations."""
    assert not any(fact["products"] for fact in kernels.get("tiles_kernel", []))
    return {
        name: {x for fact in facts for x in fact["products"]}
        for name, facts in kernels.items()
        if name != "tiles_kernel"
    }


def test_sm80(tmp_path: Path) -> None:
    for kernels in compiled("sm80", "bf16", "fp16", cache=tmp_path).values():
        assert products(kernels) == {name: {MMA} for name in TRAINING}


def test_sm90(tmp_path: Path) -> None:
    found = compiled("sm90", "bf16_packed", "bf16_unbounded", "fp32", "wide", "segments", cache=tmp_path)
    assert "tiles_kernel" in found["bf16_packed"]
    assert products(found["bf16_packed"]) == {name: {MMA} if name in SMALL else {WGMMA} for name in TRAINING}
    assert products(found["bf16_unbounded"]) == {name: {WGMMA} for name in TRAINING}
    for job in ("fp32", "wide"):  # the transposed state of these has 32 rows or fewer: no wgmma, which takes 64
        assert products(found[job]) == {name: {MMA} if name in WALKS else {WGMMA} for name in TRAINING}
    assert products(found["segments"]) == {
        "intra_kernel": {MMA}, "delta_h_kernel": {WGMMA}, "pre_scan_kernel": {WGMMA}, "merge_kernel": {MMA},
    }  # fmt: skip


def test_sm100(tmp_path: Path) -> None:
    found = compiled("sm100", "bf16", "bf16_unbounded", cache=tmp_path)
    assert products(found["bf16"]) == {name: {MMA} if name in SMALL else {TCGEN05} for name in TRAINING}
    assert products(found["bf16_unbounded"]) == {name: {TCGEN05} for name in TRAINING}


def test_one_kernel_serves_all_lengths_and_batches(tmp_path: Path) -> None:
    found = compiled("sm80", "lengths_vary", "packings_vary", "serving_varies", cache=tmp_path)
    for job, kernels in found.items():
        late = {(name, fact["call"]) for name, facts in kernels.items() for fact in facts if fact["call"] > 1}
        assert not late, (job, late)
