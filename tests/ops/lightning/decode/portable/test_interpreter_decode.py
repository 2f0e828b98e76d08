"""The portable decode kernel in Triton's interpreter: the same calls as eager, over pools of both types."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import Case, make, normal
from cula.checks.runs import errors, limits, reference, run_decode, run_verify, serve
from cula.checks.tolerance import bits_equal, relative_error

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = [
    Case(B=3, T=3, H=1, HV=2, K=16, V=12, gate="slopes_mixed"),
    Case(B=2, T=2, H=2, HV=2, K=100, V=130, gate="slopes_last"),
    Case(B=2, T=4, H=1, HV=1, K=64, V=64, dtype="fp16", gate="slopes_fla"),
    Case(B=1, T=1, H=1, HV=3, K=3, V=1, gate="slopes_steep"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_and_verify_are_the_recurrence(case: Case) -> None:
    p = make(case)
    for run in (run_decode, run_verify):
        got = run(p, "portable")
        found, limit = errors(p, got, reference(p, gradients=False)), limits(p, got)
        assert all(found[name] <= limit[name] for name in found), (run.__name__, found)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_verify_is_decode_token_by_token_in_bits(kind: torch.dtype, shared: bool) -> None:
    p = make(Case(B=3, T=4, H=1, HV=2, K=16, V=12, gate="slopes_mixed"))
    index, name = torch.tensor([5, -1, 2], dtype=torch.int32), {"implementation": "portable"}
    step = normal(20, 2, 12, 16, seed=5, dtype=kind)
    pool = step.clone()
    outs, states = [], []
    for t in range(4):
        one = p.tokens(t, t + 1)
        outs.append(serve("decode", one, state_pool=step, state_indices=index, **name))
        states.append(step[[5, 2]].clone())
    beside = pool if shared else torch.zeros(20, 2, 12, 16, dtype=kind)
    where = torch.arange(6, 18).view(3, 4)
    before = beside.clone()
    out = serve(
        "verify", p, state_pool=pool, state_indices=index, states_out=beside, states_out_indices=where,
        update_state=True, **name,
    )  # fmt: skip
    assert bits_equal(out, torch.cat(outs, 1)) and not out[1].any()
    assert bits_equal(pool[:6], step[:6])
    assert bits_equal(beside[where[[0, 2]]], torch.stack(states, 1))
    assert bits_equal(beside[where[1]], before[where[1]])


@pytest.mark.parametrize("null", [-1, 0])
def test_slots_that_cross_and_null_ones(null: int) -> None:
    p = make(Case(B=4, T=1, H=1, HV=2, K=16, V=12, gate="slopes_fla"))
    results = []
    for name in ("portable", "eager"):
        pool = normal(7, 2, 12, 16, seed=5)
        out = serve(
            "decode", p, state_pool=pool, state_indices=torch.tensor([[1, 4], [2, 2], [null, 3], [99, 5]]),
            num_accepted_tokens=torch.tensor([2, 1, 1, 1]), write_indices=torch.tensor([2, 4, 6, 1]), null_index=null,
            implementation=name,
        )  # fmt: skip
        results.append((out, pool))
    for got, truth in zip(*results, strict=True):
        assert relative_error(got, truth) <= 1e-6
    assert not results[0][0][2:].any()
    assert bits_equal(results[0][1][[0, 1, 3, 5, 6]], normal(7, 2, 12, 16, seed=5)[[0, 1, 3, 5, 6]])


def test_ragged_drafts_and_an_empty_pool() -> None:
    p = make(Case(T=12, H=1, HV=2, K=16, V=12, gate="slopes_mixed", lengths=(3, 0, 1, 5)))
    index = torch.tensor([6, 2, -1, 5])
    results = []
    for name in ("portable", "eager"):
        pool, beside = normal(7, 2, 12, 16, seed=5), torch.zeros(12, 2, 12, 16)
        out = serve(
            "verify", p, state_pool=pool, state_indices=index, cu_seqlens=p.cu_seqlens, update_state=True,
            states_out=beside, states_out_indices=torch.arange(12), implementation=name,
        )  # fmt: skip
        results.append((out, pool, beside))
    for got, truth in zip(*results, strict=True):
        assert relative_error(got, truth) <= 1e-6
    assert not results[0][0][:, 9:].any() and not results[0][2][9:].any()
    none = serve(
        "decode", make(Case(B=2, T=1, gate="slopes_fla")), state_pool=torch.zeros(0, 1, 16, 16),
        state_indices=torch.tensor([0, 1]), implementation="portable",
    )  # fmt: skip
    assert not none.any()
