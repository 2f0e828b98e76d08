"""Run the decode kernel's PTX of an architecture that need not be there, by the host code that a GPU would run.

    TRITON_INTERPRET=0 python run_ptx.py ARCH

Prints one JSON object: {case: {"found", "limit": {quantity: error}, "same": decode has verify's bits}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from cula.checks.cases import Case, make
from cula.checks.runs import errors, limits, reference, run_decode, run_verify
from cula.checks.tolerance import bits_equal
from cula.host.arch import parse_target
from tests.ptx.triton_host import Runs

BASE = {"dtype": "bf16", "beta": "logits", "l2norm": True}
CASES = [
    Case(B=3, T=2, H=1, HV=2, K=128, V=128, gate="softplus", **BASE),
    Case(B=2, T=3, K=64, V=40, gate="sigmoid", **BASE),
    Case(B=1, T=2, K=256, V=64, gate="sigmoid_bare", **BASE),
    Case(T=22, lengths=(3, 0, 1, 16), H=1, HV=2, K=128, V=64, gate="sigmoid", **BASE),
]


def run(arch: str, case: Case) -> dict[str, Any]:
    """Verify and, of a fixed batch, decode."""
    p = make(case)
    with Runs(arch, races=True) as runs:
        got = run_verify(p, "portable")
        steps = got if case.lengths else run_decode(p, "portable")
    assert runs.launches
    same = all(bits_equal(got[name], steps[name]) for name in got)
    return {"found": errors(p, got, reference(p, gradients=False)), "limit": limits(p, got), "same": same}


def main() -> None:
    arch = sys.argv[1]
    target = parse_target(arch)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("cula.ops") and hasattr(module, "target_of"):
            module.target_of = lambda device: target
    torch.set_num_threads(1)
    print(json.dumps({case.id: run(arch, case) for case in CASES}))


if __name__ == "__main__":
    main()
