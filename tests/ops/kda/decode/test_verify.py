"""kda_verify: draft tokens from a committed state; equal to kda_decode token by token, in bits."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make, normal
from cula.checks.poison import Poison
from cula.checks.runs import reference, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance

CASE = Case(B=3, T=5, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, v_first=True)
SLOTS = 24
INDEX = [6, 2, 5]


def pool_of(p: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(SLOTS, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def verify(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    flags = {"cu_seqlens": p.cu_seqlens, **options}
    return serve("kda_verify", p, state_pool=pool, state_indices=index, **flags)


def by_decode(p: Problem, pool: torch.Tensor, index: list[int], name) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """kda_decode token by token in place: all outputs, and the states of the rows after each token."""
    outs, states = [], []
    for t in range(p.case.T):
        step = p.tokens(t, t + 1)
        ids = torch.tensor(index, dtype=torch.int32)
        outs.append(serve("kda_decode", step, state_pool=pool, state_indices=ids, implementation=name))
        states.append(pool[[max(i, 0) for i in index]].clone())
    return torch.cat(outs, 1), states


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
def test_verify_is_decode_token_by_token_in_bits(on_verify, pool_dtype, dtype: str, T: int, gate: str) -> None:
    p = make(CASE.replace(dtype=dtype, T=T, gate=gate))
    stepped, pool, states_out = pool_of(p, pool_dtype), pool_of(p, pool_dtype), torch.zeros(3 * T, 2, 12, 16)
    states_out = states_out.to(pool_dtype)
    expected, states = by_decode(p, stepped, INDEX, on_verify.name)
    slots = torch.arange(3 * T, dtype=torch.int32).view(3, T)
    keep = {"states_out": states_out, "states_out_indices": slots, "update_state": True}
    out = verify(p, pool, INDEX, **keep, implementation=on_verify.name)
    assert bits_equal(out, expected)
    assert bits_equal(pool, stepped)
    for t in range(T):
        assert bits_equal(states_out[slots[:, t].long()], states[t]), f"state after token {t}"


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
def test_auto_gives_verify_and_decode_the_same_bits(pool_dtype: torch.dtype) -> None:
    p = make(CASE.replace(dtype="bf16", K=64, V=64))
    stepped, pool = pool_of(p, pool_dtype), pool_of(p, pool_dtype)
    expected, _ = by_decode(p, stepped, INDEX, None)
    assert bits_equal(verify(p, pool, INDEX, update_state=True), expected) and bits_equal(pool, stepped)


def test_it_is_the_recurrence(on_verify) -> None:
    p = make(CASE.replace(T=16, gate="channels"))
    pool = pool_of(p)
    truth = reference(p.map(lambda x: x, h0=pool[INDEX].clone()), gradients=False)
    out = verify(p, pool, INDEX, update_state=True, implementation=on_verify.name)
    assert relative_error(out, truth["o"]) <= tolerance("o", p.q.dtype)
    assert relative_error(pool[INDEX].mT, truth["final_state"]) <= tolerance("pool", p.q.dtype)


def test_the_committed_state_stays_unless_asked(on_verify) -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    out = verify(p, pool, INDEX, implementation=on_verify.name)
    assert bits_equal(pool, before)
    assert bits_equal(verify(p, pool, INDEX, update_state=True, implementation=on_verify.name), out)
    rest = [i for i in range(SLOTS) if i not in INDEX]
    assert bits_equal(pool[rest], before[rest])
    assert not any(bits_equal(pool[i], before[i]) for i in INDEX)


def test_states_may_go_to_the_pool_itself_and_null_is_skipped(on_verify) -> None:
    p = make(CASE)
    apart, pool = torch.zeros(15, 2, 12, 16), pool_of(p)
    before = pool.clone()
    all_slots = torch.arange(15).view(3, 5)
    out = verify(p, pool, INDEX, states_out=apart, states_out_indices=all_slots, implementation=on_verify.name)
    assert bits_equal(pool, before)
    slots = torch.tensor([[8, -1, 9, 99, 10], [-1, -1, -1, -1, -1], [-7, 11, 12, 13, 14]])
    got = verify(p, pool, INDEX, states_out=pool, states_out_indices=slots, implementation=on_verify.name)
    assert bits_equal(got, out)
    written = set()
    for n in range(3):
        for t in range(5):
            slot = int(slots[n, t])
            if 0 <= slot < SLOTS:
                written.add(slot)
                assert bits_equal(pool[slot], apart[all_slots[n, t]]), f"row {n}, token {t}"
    rest = [i for i in range(SLOTS) if i not in written]
    assert bits_equal(pool[rest], before[rest])


def test_a_token_may_overwrite_the_slot_that_was_read(on_verify) -> None:
    p = make(CASE)
    updated, pool = pool_of(p), pool_of(p)
    expected = verify(p, updated, INDEX, update_state=True, implementation=on_verify.name)
    slots = torch.full((3, 5), -1)
    slots[:, 4] = torch.tensor(INDEX)
    keep = {"states_out": pool, "states_out_indices": slots}
    assert bits_equal(verify(p, pool, INDEX, **keep, implementation=on_verify.name), expected)
    assert bits_equal(pool, updated)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ragged_drafts_are_each_their_own_call(on_verify, kind: torch.dtype) -> None:
    lengths = (3, 0, 1, 16)
    p = make(CASE.replace(B=1, T=22, lengths=lengths))
    index = [6, 2, 5, 0]
    pool, states_out = pool_of(p), torch.full((20, 2, 12, 16), math.nan)
    before = pool.clone()
    slots = torch.full((22,), -1, dtype=kind)
    slots[:20] = torch.arange(20)
    keep = {"states_out": states_out, "states_out_indices": slots, "update_state": True}
    options = {"cu_seqlens": p.cu_seqlens.to(kind), "implementation": on_verify.name}
    out = verify(p, pool, index, **keep, **options)
    assert not out[:, 20:].any(), "rows after the last sequence are zeros"
    for n, (_, start, end) in enumerate(p.spans()):
        if start == end:
            assert bits_equal(pool[index[n]], before[index[n]])
            continue
        one = make(p.case).map(lambda x, s=start, e=end: x)
        cut = {f: getattr(one, f)[:, start:end] for f in ("q", "k", "v", "g", "beta")}
        one = one.map(lambda x: x, cu_seqlens=None, case=p.case.replace(T=end - start, lengths=None), **cut)
        alone, states = before.clone(), torch.zeros(end - start, 2, 12, 16)
        options = {"states_out": states, "states_out_indices": torch.arange(end - start)[None]}
        expected = verify(one, alone, [index[n]], update_state=True, **options, implementation=on_verify.name)
        assert bits_equal(out[:, start:end], expected)
        assert bits_equal(pool[index[n]], alone[index[n]]) and bits_equal(states_out[start:end], states)


@pytest.mark.parametrize("null, index", [(-1, [6, -1, 5]), (0, [6, 0, 5]), (-1, [99, -2, 5])], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_that_reads_null_gives_zeros_and_touches_nothing(on_verify, null: int, index: list, packed: bool) -> None:
    case = CASE.replace(B=1, T=11, lengths=(3, 4, 2)) if packed else CASE
    p = make(case)
    pool, states_out = pool_of(p), torch.full((16, 2, 12, 16), math.nan)
    before = pool.clone()
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    spans = p.spans()
    for n in dead:
        b, start, end = spans[n]
        for x in p.five():
            x[b, start:end] = math.nan
    slots = 1 + (torch.arange(11) if packed else torch.arange(15).view(3, 5))  # slot 0 may be the null one
    keep = {"states_out": states_out, "states_out_indices": slots, "update_state": True}
    out = verify(p, pool, index, null_index=null, **keep, implementation=on_verify.name)
    assert bool(torch.isfinite(out).all())
    for n, (b, start, end) in enumerate(spans):
        rows = slots[start:end] if packed else slots[n]
        if n in dead:
            assert not out[b, start:end].any()
            assert torch.isnan(states_out[rows.tolist()]).all(), "a state was written for a null row"
        else:
            assert out[b, start:end].any() and not torch.isnan(states_out[rows.tolist()]).any()
    rest = [i for i in range(SLOTS) if i not in [index[n] for n in range(3) if n not in dead]]
    assert bits_equal(pool[rest], before[rest])


def test_accepted_tokens_pick_the_column_that_is_read(on_verify) -> None:
    p = make(CASE)
    table = torch.tensor([[6, 1, 2], [2, 3, 4], [0, 7, -1]])
    for counts, columns in (([1, 3, 2], [6, 4, 7]), ([0, 99, 3], [6, 4, -1])):
        pool, expected = pool_of(p), pool_of(p)
        options = {"update_state": True, "implementation": on_verify.name}
        out = verify(p, pool, table, num_accepted_tokens=torch.tensor(counts), **options)
        assert bits_equal(out, verify(p, expected, columns, **options)) and bits_equal(pool, expected)


def test_speculation_round_trip_over_pool_slots(on_verify) -> None:
    """Draft, keep every state, accept some tokens, and draft on from the accepted state."""
    p = make(CASE.replace(T=8))
    pool, stepped = pool_of(p), pool_of(p)
    table = torch.tensor([[6, 10, 11, 12, 13], [2, 14, 15, 16, 17], [5, 18, 19, 20, 21]])
    draft, rest = p.tokens(0, 4), p.tokens(2, 6)
    keep = {"states_out": pool, "states_out_indices": table[:, 1:]}
    verify(draft, pool, table[:, 0], **keep, implementation=on_verify.name)
    accepted = torch.full((3,), 3)  # the committed token and two draft tokens stand
    out = verify(rest, pool, table, num_accepted_tokens=accepted, implementation=on_verify.name)
    expected, _ = by_decode(p.tokens(0, 6), stepped, INDEX, on_verify.name)
    assert bits_equal(out, expected[:, 2:])


def test_boundaries_are_clamped_or_refused(on_verify) -> None:
    """The host has the values of a CPU tensor; verify makes no host copy: refusing and clamping are both legal."""
    p = make(CASE.replace(B=1, T=6, lengths=(3, 3)))
    for bad, clamped in (([0, 9, 6], [0, 6, 6]), ([0, 4, 2], [0, 4, 4])):
        pool, expected = pool_of(p), pool_of(p)
        before, out = pool.clone(), torch.full_like(p.v, math.nan)
        options = {"update_state": True, "implementation": on_verify.name}
        try:
            verify(p, pool, [6, 2], cu_seqlens=torch.tensor(bad, dtype=torch.int32), out=out, **options)
        except cula.RangeError as error:
            assert "cu_seqlens" in str(error)
            assert bits_equal(pool, before) and torch.isnan(out).all()
            continue
        right = verify(p, expected, [6, 2], cu_seqlens=torch.tensor(clamped, dtype=torch.int32), **options)
        assert bits_equal(out, right) and bits_equal(pool, expected)


def test_out_inputs_and_grad(on_verify) -> None:
    poison = Poison(gap=0)
    p = make(CASE)
    held = {n: poison.tensor(getattr(p, n), n).requires_grad_() for n in ("q", "k", "v", "g", "beta", "A_log")}
    expected = verify(p, pool_of(p), INDEX, implementation=on_verify.name)
    wide = torch.full((3, 5, 6, 12), math.nan)
    out = wide[:, :, 1:3]
    options = {"out": out, "implementation": on_verify.name}
    assert verify(p.map(lambda x: x, **held), pool_of(p), INDEX, **options) is out
    assert bits_equal(out.contiguous(), expected) and not out.requires_grad
    assert torch.isnan(wide[:, :, [0, 3, 4, 5]]).all()
    poison.check()


def test_strided_states_out(on_verify) -> None:
    p = make(CASE)
    plain, wide = torch.full((15, 2, 12, 16), math.nan), torch.full((15, 4, 12, 16), math.nan)
    slots = torch.arange(15).view(5, 3).t()
    for target in (plain, wide[:, 1:3]):
        keep = {"states_out": target, "states_out_indices": slots}
        verify(p, pool_of(p), INDEX, **keep, implementation=on_verify.name)
    assert bits_equal(wide[:, 1:3].contiguous(), plain)
    assert torch.isnan(wide[:, [0, 3]]).all()


def test_a_bf16_states_out_beside_an_fp32_pool(on_verify) -> None:
    """states_out is any pool: its dtype is its own."""
    p = make(CASE)
    fine, coarse = torch.zeros(15, 2, 12, 16), torch.zeros(15, 2, 12, 16, dtype=torch.bfloat16)
    slots = torch.arange(15).view(3, 5)
    outs = []
    for target in (fine, coarse):
        keep = {"states_out": target, "states_out_indices": slots}
        outs.append(verify(p, pool_of(p), INDEX, **keep, implementation=on_verify.name))
    assert relative_error(coarse, fine.double()) <= tolerance("bf16_pool", p.q.dtype)
    assert relative_error(outs[1], outs[0].double()) <= tolerance("o", p.q.dtype)


BAD = [
    ({"states_out": torch.zeros(15, 2, 12, 16)}, "states_out_indices"),
    ({"states_out_indices": torch.zeros(3, 5, dtype=torch.int32)}, "states_out"),
    (
        {"states_out": torch.zeros(9, 2, 16, 12), "states_out_indices": torch.zeros(3, 5, dtype=torch.int32)},
        "states_out",
    ),
    (
        {"states_out": torch.zeros(9, 2, 12, 16), "states_out_indices": torch.zeros(5, 3, dtype=torch.int32)},
        "states_out",
    ),
    ({"states_out": torch.zeros(9, 2, 12, 16), "states_out_indices": torch.zeros(3, 5)}, "states_out_indices"),
    ({"parent": torch.zeros(3, 5, dtype=torch.int32), "update_state": True}, "parent"),
    ({"parent": torch.zeros(3, 5, dtype=torch.int32), "rollback": object()}, "parent"),
    ({"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, "num_accepted_tokens"),
    ({"state_indices": torch.zeros(3, 2, dtype=torch.int32)}, "num_accepted_tokens"),
    ({"state_indices": torch.zeros(4, dtype=torch.int32)}, "state_indices"),
    ({"state_indices": torch.zeros(3)}, "state_indices"),
    ({"state_pool": torch.zeros(SLOTS, 2, 16, 12)}, "state_pool"),
    ({"state_pool": torch.zeros(SLOTS, 2, 12, 16, dtype=torch.float16)}, "state_pool"),
    ({"out": torch.zeros(3, 5, 2, 13)}, "out"),
    ({"out": torch.zeros(3, 5, 2, 12, dtype=torch.bfloat16)}, "out"),
    ({"null_index": None}, "null_index"),
]


@pytest.mark.parametrize("change, name", BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments_touch_nothing(change: dict, name: str) -> None:
    p = make(CASE)
    pool, out = pool_of(p), torch.full_like(p.v, math.nan)
    before = pool.clone()
    given = {"out": out, **change}
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    kept = [x.clone() for x in tensors]
    options = {"state_pool": pool, "state_indices": torch.tensor(INDEX), **given}
    with pytest.raises(cula.CulaError, match=name):
        serve("kda_verify", p, **options)
    assert bits_equal(pool, before)
    assert all(bits_equal(x, was) for x, was in zip(tensors, kept))


@pytest.mark.parametrize("T", [0, 17])
def test_drafts_have_1_to_16_tokens(T: int) -> None:
    p = make(CASE.replace(T=T))
    pool = pool_of(p)
    before = pool.clone()
    with pytest.raises(cula.CulaError, match="16"):
        verify(p, pool, INDEX, update_state=True)
    packed = make(CASE.replace(B=1, T=20, lengths=(17, 3)))
    with pytest.raises(cula.CulaError, match="16"):
        verify(packed, pool, [6, 2], update_state=True)
    assert bits_equal(pool, before)
