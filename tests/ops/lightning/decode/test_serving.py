"""lightning_decode and lightning_verify: slots, null indices, drafts; every implementation of the stages."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, Case, Problem, make, normal
from cula.checks.poison import Poison
from cula.checks.runs import reference, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance

CASE = Case(B=4, T=1, H=1, HV=2, K=16, V=13, gate="slopes_mixed", v_first=True)
DRAFT = CASE.replace(T=5)
SLOTS = 9
INDEX = [6, 2, 0, 5]


def pool_of(p: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    dtype = torch.float64 if p.q.dtype == torch.float64 else dtype
    return normal(SLOTS, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def decode(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    return serve("decode", p, state_pool=pool, state_indices=index, **options)


def verify(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    return serve("verify", p, state_pool=pool, state_indices=index, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["slopes_mixed", "slopes_last", "slopes_steep"])
def test_one_step_is_the_recurrence(on_lightning_decode, dtype: str, gate: str) -> None:
    p = make(CASE.replace(dtype=dtype, gate=gate))
    pool = pool_of(p)
    before = pool.clone()
    out = decode(p, pool, INDEX, implementation=on_lightning_decode.name)
    truth = reference(p.map(lambda x: x, h0=before[INDEX]), gradients=False)
    assert out.shape == p.v.shape and out.dtype == p.v.dtype
    assert relative_error(out, truth["o"]) <= tolerance("o", p.q.dtype)
    assert relative_error(pool[INDEX].mT, truth["final_state"]) <= tolerance("pool", p.q.dtype)
    rest = [1, 3, 4, 7, 8]
    assert bits_equal(pool[rest], before[rest])


def test_both_forms_give_the_same_bits(on_lightning_decode) -> None:
    p = make(CASE)
    tall, wide = pool_of(p), pool_of(p)
    out = decode(p, tall, INDEX, implementation=on_lightning_decode.name)
    row = p.map(lambda x: x, **{n: getattr(p, n).transpose(0, 1) for n in p.names})
    other = decode(row, wide, INDEX, implementation=on_lightning_decode.name)
    assert bits_equal(out.transpose(0, 1).contiguous(), other) and bits_equal(tall, wide)


NULLS = [(-1, [3, -1, 0, -1]), (0, [3, 0, 5, 0]), (-1, [3, 99, -7, 0]), (4, [4, 4, 4, 4])]


@pytest.mark.parametrize("null, index", NULLS, ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_row_that_reads_null_gives_zeros_and_touches_nothing(
    on_lightning_verify, null: int, index: list, kind: torch.dtype, tokens: int
) -> None:
    p = make(CASE.replace(T=tokens))
    pool = pool_of(p, kind)
    plain = pool.clone()
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    alive = [n for n in range(4) if n not in dead]
    for x in p.operands():
        x[dead] = math.nan
    run = decode if tokens == 1 else verify
    more = {} if tokens == 1 else {"update_state": True}
    out = run(p, pool, index, null_index=null, implementation=on_lightning_verify.name, **more)
    assert not out[dead].any() and bool(torch.isfinite(out).all())
    rest = [i for i in range(SLOTS) if i not in [index[n] for n in alive]]
    assert bits_equal(pool[rest], plain[rest])
    if alive:
        expected = plain.clone()
        few = make(CASE.replace(T=tokens)).map(lambda x: x)
        few = few.map(lambda x: x, **{n: getattr(few, n)[alive] for n in few.names})
        same = run(few, expected, [index[n] for n in alive], implementation=on_lightning_verify.name, **more)
        assert bits_equal(out[alive], same) and bits_equal(pool, expected)


def test_writing_elsewhere_null_and_crossing_slots(on_lightning_decode) -> None:
    p = make(CASE)
    pool, inplace, swapped = pool_of(p), pool_of(p), pool_of(p)
    before = pool.clone()
    name = on_lightning_decode.name
    expected = decode(p, inplace, INDEX, implementation=name)
    out = decode(p, pool, INDEX, write_indices=torch.tensor([7, -1, 1, 99]), implementation=name)
    assert bits_equal(out, expected) and bits_equal(pool[[7, 1]], inplace[[6, 0]])
    rest = [0, 2, 3, 4, 5, 6, 8]
    assert bits_equal(pool[rest], before[rest])
    out = decode(p, swapped, INDEX, write_indices=torch.tensor([2, 6, 5, 0]), implementation=name)
    assert bits_equal(out, expected) and bits_equal(swapped[[2, 6, 5, 0]], inplace[INDEX])
    out = decode(p, pool.copy_(before), [-1] * 4, write_indices=torch.tensor([1, 2, 3, 4]), implementation=name)
    assert not out.any() and bits_equal(pool, before)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_accepted_tokens_pick_the_column_that_is_read(on_lightning_decode, kind: torch.dtype) -> None:
    p = make(CASE)
    table = torch.tensor([[6, 1, 1], [1, 2, 1], [1, 1, 0], [5, 1, 1]], dtype=kind)
    expected, pool = pool_of(p), pool_of(p)
    out = decode(p, expected, INDEX, implementation=on_lightning_decode.name)
    for accepted in ([1, 2, 3, 1], [0, 2, 99, -5]):  # the second is clamped to the first
        pool = pool_of(p)
        got = decode(
            p, pool, table, num_accepted_tokens=torch.tensor(accepted, dtype=kind),
            write_indices=torch.tensor(INDEX, dtype=kind), implementation=on_lightning_decode.name,
        )  # fmt: skip
        assert bits_equal(got, out) and bits_equal(pool, expected)


def test_pools_of_any_stride_and_slices_of_one_projection(on_lightning_decode) -> None:
    p = make(CASE.replace(V=16))
    name = on_lightning_decode.name
    plain = pool_of(p)
    expected = decode(p, plain, INDEX, implementation=name)
    poison = Poison(gap=3)
    padded = poison.tensor(pool_of(p), "state_pool", writable=True)
    wide = torch.full((SLOTS, 2, 2, 16, 16), math.nan)
    wide[:, 1] = pool_of(p)
    flipped = pool_of(p).mT.contiguous().mT  # K is not contiguous
    for pool in (padded, wide[:, 1], flipped):
        assert bits_equal(decode(p, pool, INDEX, implementation=name), expected) and bits_equal(pool, plain)
    poison.check()
    assert bool(wide[:, 0].isnan().all())
    heads = torch.cat([p.q, p.k, p.v], 2)
    views = dict(zip(p.names, heads.split([1, 1, 2], 2), strict=True))
    assert bits_equal(decode(p.map(lambda x: x, **views), pool_of(p), INDEX, implementation=name), expected)


def test_out_is_filled_inputs_stay_and_no_graph_is_made(on_lightning_decode) -> None:
    p = make(CASE.replace(dtype="bf16"))
    copies = [x.clone() for x in p.operands()]
    for x in p.operands():
        x.requires_grad_()
    out = torch.full_like(p.v, math.nan).detach()
    got = decode(p, pool_of(p), INDEX, out=out, implementation=on_lightning_decode.name)
    assert got is out and bool(out.isfinite().all()) and not got.requires_grad
    assert all(bits_equal(x, y) for x, y in zip(p.operands(), copies))
    fresh = [decode(p, pool_of(p), INDEX, implementation=on_lightning_decode.name) for _ in range(2)]
    assert fresh[0].data_ptr() != fresh[1].data_ptr() and bits_equal(fresh[0], out)


def test_no_rows(on_lightning_verify) -> None:
    p = make(CASE.replace(B=0))
    none = torch.zeros(0, dtype=torch.int32)
    assert decode(p, pool_of(p), none, implementation=on_lightning_verify.name).shape == (0, 1, 2, 13)
    assert verify(p, pool_of(p), none, implementation=on_lightning_verify.name).shape == (0, 1, 2, 13)


def test_a_call_that_looks_like_an_earlier_one_is_still_itself(on_lightning_decode) -> None:
    """Forms are remembered by shape; slopes, scale and slots are not part of what is kept."""
    p = make(CASE)
    for slopes in (p.slopes, p.slopes * 0.5, torch.zeros(2)):
        for index in (INDEX, [1, 3, 4, 8]):
            q = p.map(lambda x: x, slopes=slopes)
            pool = pool_of(p)
            truth = reference(q.map(lambda x: x, h0=pool[index]), gradients=False)
            out = decode(q, pool, index, implementation=on_lightning_decode.name)
            assert relative_error(out, truth["o"]) <= 1e-5
    with pytest.raises(cula.RangeError, match="slopes"):
        decode(p.map(lambda x: x, slopes=-p.slopes), pool_of(p), INDEX, implementation=on_lightning_decode.name)


# ---- verify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 5, 16])
def test_verify_is_decode_token_by_token_in_bits(on_lightning_verify, dtype: str, kind: torch.dtype, T: int) -> None:
    p = make(CASE.replace(T=T, dtype=dtype))
    name = on_lightning_verify.name
    step = pool_of(p, kind)
    beside = torch.zeros(4 * T, 2, 13, 16, dtype=step.dtype)
    where = torch.arange(4 * T).view(4, T)
    outs, states = [], []
    for t in range(T):
        outs.append(decode(p.tokens(t, t + 1), step, INDEX, implementation=name))
        states.append(step[INDEX].clone())
    pool = pool_of(p, kind)
    out = verify(p, pool, INDEX, states_out=beside, states_out_indices=where, update_state=True, implementation=name)
    assert bits_equal(out, torch.cat(outs, 1)) and bits_equal(pool, step)
    assert bits_equal(beside[where], torch.stack(states, 1))
    again = pool_of(p, kind)
    assert bits_equal(verify(p, again, INDEX, implementation=name), out)
    assert bits_equal(again, pool_of(p, kind)), "the committed state moved without update_state"


def test_states_may_go_to_the_pool_itself_and_null_is_skipped(on_lightning_verify) -> None:
    p = make(DRAFT.replace(B=2, T=3))
    name = on_lightning_verify.name
    pool, beside = pool_of(p), torch.zeros(6, 2, 13, 16)
    before = pool.clone()
    verify(p, pool, [4, 0], states_out=beside, states_out_indices=torch.arange(6).view(2, 3), implementation=name)
    where = torch.tensor([[4, 8, -1], [1, -1, 0]])  # one of them is a slot that is read
    verify(p, pool, [4, 0], states_out=pool, states_out_indices=where, implementation=name)
    assert bits_equal(pool[[4, 8, 1, 0]], beside[[0, 1, 3, 5]])
    rest = [2, 3, 5, 6, 7]
    assert bits_equal(pool[rest], before[rest])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ragged_drafts_are_each_their_own_call(on_lightning_verify, kind: torch.dtype) -> None:
    lengths, index, name = (3, 0, 1, 4), [6, 2, -1, 5], on_lightning_verify.name
    p = make(CASE.replace(B=1, T=10, lengths=lengths))
    pool, beside = pool_of(p), torch.zeros(10, 2, 13, 16)
    cu = p.cu_seqlens.to(kind)
    out = verify(
        p, pool, torch.tensor(index, dtype=kind), cu_seqlens=cu, states_out=beside, update_state=True,
        states_out_indices=torch.arange(10, dtype=kind), implementation=name,
    )  # fmt: skip
    assert not out[:, 8:].any() and not out[:, 3:4].any() and not beside[3].any() and not beside[8:].any()
    expected = pool_of(p)
    for n, (_, a, b) in enumerate(p.spans()):
        if index[n] < 0 or a == b:
            continue
        one = p.map(lambda x: x, cu_seqlens=None, **{m: getattr(p, m)[:, a:b] for m in p.names})
        same = verify(one, expected, [index[n]], update_state=True, implementation=name)
        assert bits_equal(out[:, a:b], same)
        assert bits_equal(beside[b - 1], expected[index[n]])
    assert bits_equal(pool, expected)


def test_states_out_of_another_type(on_lightning_verify) -> None:
    p = make(DRAFT)
    wide, narrow = torch.zeros(20, 2, 13, 16), torch.zeros(20, 2, 13, 16, dtype=torch.bfloat16)
    for beside in (wide, narrow):
        verify(
            p, pool_of(p), INDEX, states_out=beside, states_out_indices=torch.arange(20).view(4, 5),
            implementation=on_lightning_verify.name,
        )  # fmt: skip
    assert bits_equal(wide.bfloat16(), narrow)


BAD = [
    (lambda p: {"state_indices": torch.zeros(3, dtype=torch.int32)}, cula.ShapeError, "state_indices"),
    (lambda p: {"state_indices": torch.zeros(4)}, cula.DtypeError, "state_indices"),
    (lambda p: {"num_accepted_tokens": torch.ones(4, dtype=torch.int32)}, cula.ShapeError, "num_accepted_tokens"),
    (lambda p: {"state_indices": torch.zeros(4, 2, dtype=torch.int32)}, cula.ShapeError, "num_accepted_tokens"),
    (lambda p: {"state_pool": pool_of(p).mT}, cula.ShapeError, "state_pool"),
    (lambda p: {"state_pool": pool_of(p).half()}, cula.DtypeError, "state_pool"),
    (lambda p: {"null_index": True}, cula.DtypeError, "null_index"),
    (lambda p: {"out": torch.zeros(4, 5, 2, 12)}, cula.ShapeError, "out"),
    (lambda p: {"slopes": None}, cula.RangeError, "layer_idx"),
    (lambda p: {"slopes": p.slopes[:1]}, cula.ShapeError, "slopes"),
    (lambda p: {"states_out": pool_of(p)}, cula.ShapeError, "states_out_indices"),
    (lambda p: {"update_state": 1}, cula.DtypeError, "update_state"),
    (lambda p: {"parent": torch.zeros(4, 5, dtype=torch.int32), "update_state": True}, cula.RangeError, "parent"),
    (lambda p: {"parent": torch.zeros(4, 5, dtype=torch.int32)}, cula.NotSupportedError, "parent"),
    (lambda p: {"implementation": {"forward": "eager"}}, cula.NotSupportedError, "implementation"),
    (lambda p: {"implementation": "sm90"}, cula.NotSupportedError, "sm90"),
]


@pytest.mark.parametrize("change, error, name", BAD, ids=[f"{i}-{name}" for i, (_, _, name) in enumerate(BAD)])
def test_bad_arguments_touch_nothing(change, error: type, name: str) -> None:
    p = make(DRAFT)
    pool = pool_of(p)
    options = {"state_pool": pool, "state_indices": torch.tensor(INDEX), "update_state": True, **change(p)}
    if "parent" in options and "update_state" not in change(p):
        options["update_state"] = False
    with pytest.raises(error, match=name) as caught:
        serve("verify", p, **options)
    assert bits_equal(pool, pool_of(p)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("T", [0, 17])
def test_drafts_have_1_to_16_tokens(T: int) -> None:
    p = make(CASE.replace(T=T))
    with pytest.raises(cula.ShapeError, match="lightning_verify takes 1 to 16"):
        verify(p, pool_of(p), INDEX)
    with pytest.raises(cula.ShapeError, match="one token"):
        decode(make(CASE.replace(T=2)), pool_of(p), INDEX)
