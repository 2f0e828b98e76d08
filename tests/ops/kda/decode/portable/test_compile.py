"""The portable decode kernels compiled for GPUs that are not here: vector accesses, registers, no recompile."""

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

#: Seconds that one kernel may take; the slowest takes 3 with both cores busy.
SLOWEST = 60.0
#: Bytes of shared memory that vectors over K need to reach all lanes: a state tile would take 4 KiB or more.
VECTORS = 1024


def compiled(arch: str, *jobs: str, cache: Path, shared: int = VECTORS) -> dict[str, list[dict[str, Any]]]:
    """{job: facts of each compilation}; a failed compilation fails the test."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(WORKER), arch, *jobs]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for job, kernels in found.items():
        for facts in kernels:
            assert facts["seconds"] < SLOWEST and facts["shared"] <= shared and not facts["spills"], (job, facts)
    return found


def accesses(kernels: list[dict[str, Any]]) -> tuple[int, int]:
    """128-bit loads and stores of the only compilation."""
    (facts,) = kernels
    return facts["loads"], facts["stores"]


#: Elements of a program's tile; 32 lanes move 128 fp32 or 256 bf16 elements of it with one 128-bit access each.
TILE, FEW, DRAFT = 2048, 1024, 4096
#: The same of kda_decode_fused, which 128 lanes move, twice in the code: the first tile and the next one.
SERVING = 8192


def check_vectors(found: dict[str, list[dict[str, Any]]]) -> None:
    """States move in 128-bit accesses, through registers alone (`VECTORS`), on every arch."""
    loads, stores = accesses(found["decode"])
    assert stores == TILE // 128 and stores <= loads <= stores + 1  # and dt_bias
    loads, stores = accesses(found["verify"])
    assert stores == 0 and DRAFT // 128 <= loads <= DRAFT // 128 + 1
    loads, stores = accesses(found["serving"])
    assert stores == SERVING // 512 and 2 * stores <= loads <= 2 * stores + 4


@pytest.mark.parametrize("arch", ["sm80", "sm100"])
def test_other_archs(arch: str, tmp_path: Path) -> None:
    check_vectors(compiled(arch, "decode", "verify", "serving", cache=tmp_path))


def test_sm90_moves_states_in_vectors(tmp_path: Path) -> None:
    jobs = ("decode", "verify", "serving", "few", "K64", "K256", "padded", "unaligned", "bf16_pool", "keep", "drafts")
    found = compiled("sm90", *jobs, "serving_bf16", "serving_K256", cache=tmp_path)
    check_vectors(found)
    for job, elements in {"few": FEW, "K64": TILE, "K256": TILE, "padded": TILE}.items():
        loads, stores = accesses(found[job])
        assert stores == elements // 128 and stores <= loads <= stores + 10, job
    loads, stores = accesses(found["bf16_pool"])
    assert stores == TILE // 256 and stores <= loads <= stores + 1
    assert accesses(found["keep"])[1] == 2 * DRAFT // 128
    assert accesses(found["unaligned"])[1] == 0  # slots 2 elements off a multiple of 16 bytes: right, and slower
    tree, roll, commit = found["drafts"]
    assert TILE // 128 <= tree["loads"] <= TILE // 128 + 1 and tree["stores"] == 0
    assert DRAFT // 128 <= roll["loads"] <= DRAFT // 128 + 1
    assert commit["name"] == "commit_kernel" and commit["stores"] == DRAFT // 128 <= commit["loads"]
    assert accesses(found["serving_bf16"])[1] == SERVING // 1024
    assert accesses(found["serving_K256"])[1] == SERVING // 512


def test_sm90_one_kernel_serves_all_and_decode_is_verify(tmp_path: Path) -> None:
    jobs = ("batches_vary", "drafts_vary", "packings_vary", "servings_vary", "one_arithmetic")
    found = compiled("sm90", *jobs, cache=tmp_path)
    assert len(found["batches_vary"]) == 2  # small tiles where they fill the card, else large ones
    assert [facts["call"] for facts in found["drafts_vary"]] == [1, 2]  # two tokens, more
    assert [facts["call"] for facts in found["packings_vary"]] == [1]
    assert [facts["call"] for facts in found["servings_vary"]] == [1]
    # One instruction of a kind more would be another rounding: decode's bits would not be verify's.
    decode, *others = found["one_arithmetic"]
    assert len(others) == 3 and decode["arithmetic"]["fma"] > 0
    assert all(facts["arithmetic"] == decode["arithmetic"] for facts in others)


def test_k_first_states_compile(tmp_path: Path) -> None:
    (facts,) = compiled("sm90", "recurrent", cache=tmp_path, shared=2**16)["recurrent"]
    assert facts["loads"] and facts["stores"]
