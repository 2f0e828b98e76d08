"""The portable kernels compiled for GPUs that are not here: instructions, shared memory, no recompile per length."""

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
ROOT = WORKER.parents[3]
MMA, WGMMA, TCGEN05 = "mma.sync", "wgmma.mma_async", "tcgen05.mma"
SHARED = {"sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10}


def compiled(arch: str, *jobs: str, cache: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{job: {kernel: facts of each compilation}}; a failed compilation fails the test."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch, *jobs]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])["jobs"]
    for kernels in found.values():
        for name, facts in kernels.items():
            assert all(fact["cubin"] and fact["shared"] <= SHARED[arch] for fact in facts), (name, facts)
    return found


def products(kernels: dict[str, list[dict[str, Any]]]) -> dict[str, list[set[str]]]:
    """The tensor-core instructions of each kernel, compilation by compilation."""
    return {name: [set(fact["products"]) for fact in facts] for name, facts in kernels.items()}


def test_sm80(tmp_path: Path) -> None:
    found = compiled("sm80", "bf16", "fp16", "decode", cache=tmp_path)
    for job in ("bf16", "fp16"):  # the forward, dq, and dk with dv: a walk of its own where the state's ends differ
        assert set(products(found[job])) == {"walk_kernel"}
        assert all(x == {MMA} for x in products(found[job])["walk_kernel"]), job
    assert products(found["decode"])["step_kernel"] == [set()] * len(found["decode"]["step_kernel"])


def test_sm90(tmp_path: Path) -> None:
    found = compiled("sm90", "bf16_packed", "fp32", "wide", "segments", cache=tmp_path)
    assert all(x == {WGMMA} for x in products(found["bf16_packed"])["walk_kernel"])
    for job in ("fp32", "wide"):  # the transposed state has 32 rows or fewer: only q k^T can be wgmma, which takes 64
        assert all(x <= {WGMMA, MMA} and MMA in x for x in products(found[job])["walk_kernel"]), job
    assert set(found["segments"]) == {"walk_kernel", "merge_kernel"}
    assert all(x == {WGMMA} for x in products(found["segments"])["walk_kernel"])
    assert products(found["segments"])["merge_kernel"] == [set()]


def test_sm100(tmp_path: Path) -> None:
    found = compiled("sm100", "bf16", cache=tmp_path)
    assert all(x == {TCGEN05} for x in products(found["bf16"])["walk_kernel"])


def test_one_kernel_serves_all_lengths_and_batches(tmp_path: Path) -> None:
    found = compiled("sm80", "lengths_vary", "packings_vary", "decode", cache=tmp_path)
    first = {"lengths_vary": 1, "packings_vary": 5, "decode": 5}  # the prefills and the drafts are calls of their own
    for job, kernels in found.items():
        late = {fact["call"] for facts in kernels.values() for fact in facts} - {1, first[job]}
        assert not late, (job, late)
