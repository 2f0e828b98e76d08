"""Run the chunk kernels' PTX of an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python run_ptx.py ARCH JOB... [--early]

Prints one JSON object: {job: {"found", "limit": {quantity: error}, "products": {kernel: tensor-core instructions}}}.
Shared memory that two warps touch without a barrier between, addresses outside a tensor and unaligned ones are errors;
asynchronous copies and products land as late as the program allows, or at once with --early.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from cula.checks.cases import Case, make
from cula.checks.runs import errors, limits, reference, run_chunk, run_prefill
from cula.ops.kda.chunk.cp.plan import Plan
from cula.ops.kda.chunk.portable import forward
from tests.ptx.triton_host import Runs, pretend

PACKED = (0, 17, 1, 40, 0)
#: name: (function, case, options)
JOBS: dict[str, tuple[Any, Case, dict[str, Any]]] = {
    "whole": (
        run_chunk, Case(T=70, H=1, HV=2, K=128, V=128, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True), {},
    ),
    "levels": (run_chunk, Case(T=70, H=1, HV=2, K=128, V=128, dtype="bf16", gate="softplus", l2norm=True), {}),
    "blocks": (run_chunk, Case(T=70, K=64, V=128, dtype="bf16", gate="sigmoid"), {}),
    "packed": (
        run_chunk,
        Case(T=58, H=2, HV=2, K=96, V=80, dtype="bf16", gate="sigmoid", l2norm=True, lengths=PACKED, v_first=True), {},
    ),
    "hard": (run_chunk, Case(T=70, K=64, V=64, dtype="bf16", gate="softplus_hard", l2norm=True), {}),
    "finished": (run_chunk, Case(T=66, K=128, V=64, dtype="bf16", gate="channels", l2norm=True), {"chunk_size": 32}),
    "fp16": (run_chunk, Case(T=70, K=64, V=64, dtype="fp16", gate="softplus", l2norm=True), {}),
    "fp32": (run_chunk, Case(T=70, K=64, V=64, gate="mild", l2norm=True), {}),
    "wide": (run_chunk, Case(T=40, H=2, HV=2, K=256, V=64, dtype="bf16", gate="sigmoid", l2norm=True), {}),
    "segments": (
        run_chunk, Case(B=1, T=200, H=1, HV=2, K=128, V=128, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True),
        {"cp_mode": "auto", "gradients": False},
    ),
    "pool": (
        run_prefill, Case(T=70, K=128, V=128, dtype="bf16", gate="sigmoid", beta="logits", l2norm=True), {},
    ),
    "pool_packed": (run_prefill, Case(T=58, K=128, V=128, dtype="bf16", gate="softplus", lengths=PACKED), {}),
}  # fmt: skip


def run(arch: str, name: str, late: bool = True) -> dict[str, Any]:
    """One job: its errors against the float64 reference, what they may be, and the products that ran."""
    function, case, options = JOBS[name]
    p = make(case)
    if name == "segments":  # whatever the cost model says
        forward.SEGMENTS_VERIFIED, forward.make_plan = True, lambda chunks, shape: Plan(chunks, 2)
    with Runs(arch, races=True, late=late) as runs:
        got = function(p, "portable", **options)
    truth = reference(p, gradients=function is run_chunk and options.get("gradients", True))
    return {"found": errors(p, got, truth), "limit": limits(p, got), "products": runs.launches}


def main() -> None:
    arch, *names = sys.argv[1:]
    late = "--early" not in names
    names = [name for name in names if name != "--early"]
    pretend(arch)
    torch.set_num_threads(1)
    print(json.dumps({name: run(arch, name, late) for name in names}))


if __name__ == "__main__":
    main()
