"""Run the Lightning kernels' PTX of an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python run_ptx.py ARCH

Prints one JSON object: {case and function: {"found", "limit": {quantity: error}}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import cula.lightning
from cula.checks.cases import Case, make
from cula.checks.runs import errors, limits, reference, run_chunk, run_decode, run_prefill, run_verify
from tests.ptx.triton_host import Runs, pretend

PACKED = (0, 17, 1, 40, 0)
BF16 = {"dtype": "bf16", "H": 1, "HV": 2}
JOBS: list[tuple[Callable[..., Any], Case]] = [
    (run_chunk, Case(T=150, K=128, V=128, gate="slopes_mixed", **BF16)),
    (run_chunk, Case(T=58, K=96, V=80, gate="slopes_fla", lengths=PACKED, v_first=True, **BF16)),
    (run_chunk, Case(T=70, K=64, V=64, gate="slopes_steep")),
    (run_prefill, Case(T=150, K=128, V=128, gate="slopes_weak", **BF16)),
    (run_verify, Case(B=2, T=3, K=128, V=64, gate="slopes_alibi", **BF16)),
    (run_decode, Case(B=2, T=2, K=64, V=40, gate="slopes_mixed", **BF16)),
]


def run(arch: str, function: Callable[..., Any], case: Case) -> dict[str, Any]:
    """One job: its errors against the float64 reference and what they may be."""
    p = make(case)
    with Runs(arch, races=True) as runs:
        got = function(p, "portable")
    assert runs.launches
    return {"found": errors(p, got, reference(p, gradients=function is run_chunk)), "limit": limits(p, got)}


def main() -> None:
    arch = sys.argv[1]
    dir(cula.lightning)
    for name in ("chunk_lightning_attn", "lightning_prefill", "lightning_decode", "lightning_verify"):
        getattr(cula.lightning, name)
    pretend(arch)
    torch.set_num_threads(1)
    print(json.dumps({f"{case.id} {job.__name__}": run(arch, job, case) for job, case in JOBS}))


if __name__ == "__main__":
    main()
