"""Peak memory of one call, in a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch

from cula.bench import memory
from cula.bench.cases import Case
from cula.bench.inputs import Inputs, make_inputs
from cula.bench.runs import Run

CASE = Case("kda_prefill", B=1, T=256, H=2, K=32)
MIB = 1 << 20


@dataclass
class Hungry:
    """Touches `size` bytes during the call and keeps none of them."""

    size: int
    name: str = "hungry"

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        def step() -> None:
            if case.T > memory.WARM_TOKENS:
                torch.ones(self.size, dtype=torch.uint8)

        return Run(step=step, outputs=dict)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("size", [0, 24 * MIB, 96 * MIB])
def test_memory_that_is_gone_again_is_seen(size: int) -> None:
    peak = memory.peak_of(CASE, "mixed", Hungry(size), 1)
    assert peak.method == "VmHWM"
    assert size <= peak.growth + MIB and peak.growth < size + 6 * MIB
    assert peak.bytes == peak.growth + make_inputs(CASE, "mixed").bytes


def test_without_a_mark_to_reset_the_growth_of_maxrss_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_mark", lambda: False)
    peak = memory.peak_of(CASE, "mixed", Hungry(0), 1)
    assert peak.method == "ru_maxrss" and peak.growth >= 0


def test_a_process_of_its_own_measures_our_call() -> None:
    peak = memory.measure(CASE, "mixed", "eager", None, 1)
    assert peak.bytes >= make_inputs(CASE, "mixed").bytes


def test_a_failing_process_says_why() -> None:
    with pytest.raises(RuntimeError, match="memory of eager: .*implementation"):
        memory.measure(CASE, "mixed", "eager", "nonsense", 1)
