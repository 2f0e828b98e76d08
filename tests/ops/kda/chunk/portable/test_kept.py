"""What the portable forward keeps for its backward: the promise in the table, and the same bits with and without."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk
from cula.checks.tolerance import bits_equal

pytestmark = pytest.mark.usefixtures("interpreted")

CASE = Case(B=1, T=20, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True)
PACKED = CASE.replace(B=1, T=40, lengths=(0, 17, 1, 20), K=24, V=20)


def gradients(p: Problem, **options) -> list[list[torch.Tensor]]:
    """The gradients of two backwards of one forward."""
    leaves = {name: x.detach().requires_grad_() for name, x in p.inputs().items()}
    outputs = chunk(p.map(lambda x: x, **leaves), implementation="portable", **options)
    return [
        list(torch.autograd.grad(outputs, list(leaves.values()), [p.do, p.dht], retain_graph=True)) for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_kept_or_recomputed_gives_the_same_bits_twice(case: Case, dtype: str) -> None:
    p = make(case.replace(dtype=dtype))
    first, second = gradients(p)
    for other in (second, *gradients(p, disable_recompute=True)):
        assert all(bits_equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_the_table_promises_what_is_saved(case: Case, dtype: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cula.ops.kda.chunk.portable import forward

    seen = []
    real = forward._run
    monkeypatch.setattr(forward, "_run", lambda p, x: seen.append((p, real(p, x))) or seen[-1][1])
    gradients(make(case.replace(dtype=dtype)), disable_recompute=keep)
    ((problem, result),) = seen
    promised = forward.kept(problem)
    saved = {name: (tuple(x.shape), x.dtype) for name, x in result.saved.tensors.items()}
    assert saved == {name: (shape, kind) for name, shape, kind in promised}
    assert ("h" in saved) == (keep and dtype == "fp32")
