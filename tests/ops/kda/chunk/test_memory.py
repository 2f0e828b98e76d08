"""Peak memory of chunk_kda on a CPU, from the allocator's own events: it grows with T x K, and by how much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cula.checks.cases import Case, make
from cula.checks.runs import chunk

pytestmark = pytest.mark.usefixtures("each_chunk")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once by tensors made within `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


CASE = Case(H=2, HV=2, K=32, V=32, gate="softplus", beta="logits", l2norm=True, state=False)


def forward(case: Case) -> tuple[int, int]:
    """(peak of a forward, bytes of its inputs)."""
    p = make(case)
    return peak_bytes(lambda: chunk(p)), sum(x.numel() * x.element_size() for x in p.inputs().values())


def forward_backward(case: Case) -> tuple[int, int]:
    p = make(case)
    leaves = {name: x.requires_grad_() for name, x in p.inputs().items()}

    def run() -> None:
        o, _ = chunk(p, output_final_state=False)
        torch.autograd.grad(o, list(leaves.values()), p.do)

    return peak_bytes(run), sum(x.numel() * x.element_size() for x in p.inputs().values())


def test_the_measure_sees_a_temporary() -> None:
    def run() -> torch.Tensor:
        return (torch.ones(1 << 18) * 2.0).sum()

    assert 2 << 20 <= peak_bytes(run) < 3 << 20


@pytest.mark.parametrize("measure, bar", [(forward, 12), (forward_backward, 24)], ids=["forward", "backward"])
def test_peak_against_the_inputs_size(measure, bar: int) -> None:
    peak, size = measure(CASE.replace(T=2048, H=4, HV=4, K=64, V=64))
    assert peak <= bar * size, f"{peak / size:.1f}x the inputs"


@pytest.mark.parametrize("measure", [forward, forward_backward])
def test_twice_the_tokens_or_channels_at_most_twice_the_memory(measure) -> None:
    base = CASE.replace(T=1024)
    peaks = {name: measure(case)[0] for name, case in {
        "base": base, "2T": base.replace(T=2048), "4T": base.replace(T=4096), "2K": base.replace(K=64, V=64),
    }.items()}  # fmt: skip
    assert peaks["2T"] <= 2.2 * peaks["base"]
    assert peaks["4T"] <= 2.2 * peaks["2T"]
    assert peaks["2K"] <= 2.6 * peaks["base"]
