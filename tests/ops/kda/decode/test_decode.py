"""kda_decode: one token per sequence, states in place in a pool; every implementation of the stage."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, Case, Problem, make, normal
from cula.checks.poison import Poison, poisoned
from cula.checks.runs import floors, reference, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance

CASE = Case(B=4, T=1, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, v_first=True)
SLOTS = 9


def pool_of(p: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if p.q.dtype == torch.float64:
        dtype = torch.float64
    return normal(SLOTS, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def decode(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    return serve("kda_decode", p, state_pool=pool, state_indices=index, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["softplus", "sigmoid", "sigmoid_bare", "sigmoid_no_A"])
def test_one_step_is_the_recurrence(on_decode, dtype: str, gate: str) -> None:
    if dtype == "fp64" and on_decode.name == "portable":
        pytest.skip("portable takes no fp64")
    p = make(CASE.replace(dtype=dtype, gate=gate))
    pool = pool_of(p)
    before = pool.clone()
    index = [6, 2, 0, 5]
    out = decode(p, pool, index, implementation=on_decode.name)
    truth = reference(p.map(lambda x: x, h0=before[index]), gradients=False)
    assert out.shape == p.v.shape and out.dtype == p.v.dtype
    assert relative_error(out, truth["o"]) <= tolerance("o", p.q.dtype)
    assert relative_error(pool[index].mT, truth["final_state"]) <= tolerance("pool", p.q.dtype)
    rest = [1, 3, 4, 7, 8]
    assert bits_equal(pool[rest], before[rest])


def test_both_forms_and_both_give_the_same_bits(on_decode) -> None:
    p = make(CASE)
    tall, wide = pool_of(p), pool_of(p)
    out = decode(p, tall, [6, 2, 0, 5], implementation=on_decode.name)
    row = p.map(lambda x: x, **{n: getattr(p, n).transpose(0, 1) for n in ("q", "k", "v", "g", "beta")})
    other = decode(row, wide, [6, 2, 0, 5], implementation=on_decode.name)
    assert out.shape == (4, 1, 2, 12) and other.shape == (1, 4, 2, 12)
    assert bits_equal(out.transpose(0, 1).contiguous(), other) and bits_equal(tall, wide)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_column_of_a_wider_index_table(on_decode, kind: torch.dtype) -> None:
    p = make(CASE)
    expected, pool = pool_of(p), pool_of(p)
    out = decode(p, expected, [6, 2, 0, 5], implementation=on_decode.name)
    table = torch.full((4, 3), -77, dtype=kind)
    table[:, 1] = torch.tensor([6, 2, 0, 5])
    assert bits_equal(decode(p, pool, table[:, 1], implementation=on_decode.name), out)
    assert bits_equal(pool, expected)


NULLS = [
    (-1, [3, -1, 0, -1]),
    (0, [3, 0, 5, 0]),
    (0, [3, -1, 0, 2]),
    (-1, [3, 99, -7, 0]),
    (4, [4, 4, 4, 4]),
]


@pytest.mark.parametrize("null, index", NULLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_reads_null_gives_zeros_and_touches_nothing(on_decode, null: int, index: list, dtype) -> None:
    p = make(CASE)
    pool = pool_of(p, dtype)
    plain = pool.clone()
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    for x in p.five():
        x[dead] = math.nan
    out = decode(p, pool, index, null_index=null, implementation=on_decode.name)
    alive = [n for n in range(4) if n not in dead]
    assert not out[dead].any() and bool(torch.isfinite(out).all())
    safe = make(CASE)
    spare = [i for i in range(SLOTS) if i not in index][: len(dead)]
    full = [spare[dead.index(n)] if n in dead else i for n, i in enumerate(index)]
    expected_pool = plain.clone()
    expected = decode(safe, expected_pool, full, null_index=-1, implementation=on_decode.name)
    assert bits_equal(out[alive], expected[alive])
    touched = [index[n] for n in alive]
    rest = [i for i in range(SLOTS) if i not in touched]
    assert bits_equal(pool[touched], expected_pool[touched]) and bits_equal(pool[rest], plain[rest])


def test_writing_elsewhere_and_writing_null(on_decode) -> None:
    p = make(CASE)
    pool, inplace = pool_of(p), pool_of(p)
    before = pool.clone()
    expected = decode(p, inplace, [6, 2, 0, 5], implementation=on_decode.name)
    write = torch.tensor([7, -1, 1, 99])
    out = decode(p, pool, [6, 2, 0, 5], write_indices=write, implementation=on_decode.name)
    assert bits_equal(out, expected)
    assert bits_equal(pool[[7, 1]], inplace[[6, 0]])
    rest = [0, 2, 3, 4, 5, 6, 8]
    assert bits_equal(pool[rest], before[rest])


def test_reading_null_and_writing_a_slot_touches_no_slot(on_decode) -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    write = torch.tensor([1, 2, 3, 4])
    out = decode(p, pool, [-1, -1, -1, -1], write_indices=write, implementation=on_decode.name)
    assert not out.any() and bits_equal(pool, before)


def test_a_shared_prefix_slot_with_slots_of_their_own_to_write(on_decode) -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    out = decode(p, pool, [5, 5, 5, 5], write_indices=torch.tensor([0, 1, 2, 3]), implementation=on_decode.name)
    for n in range(4):
        one = before.clone()
        row = p.map(lambda x: x, **{f: getattr(p, f)[n : n + 1] for f in ("q", "k", "v", "g", "beta")})
        assert bits_equal(decode(row, one, [5], implementation=on_decode.name)[0], out[n])
        assert bits_equal(one[5], pool[n])
    assert bits_equal(pool[4:], before[4:])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_accepted_tokens_pick_the_column_that_is_read(on_decode, kind: torch.dtype) -> None:
    p = make(CASE)
    table = torch.tensor([[6, 1, 2], [2, 3, 4], [0, 7, 8], [5, -1, 1]], dtype=kind)
    accepted = torch.tensor([1, 3, 2, 2], dtype=kind)
    write = torch.tensor([6, 2, 0, 5], dtype=kind)
    pool, expected = pool_of(p), pool_of(p)
    options = {"write_indices": write, "implementation": on_decode.name}
    out = decode(p, pool, table, num_accepted_tokens=accepted, **options)
    assert bits_equal(out, decode(p, expected, [6, 4, 7, -1], **options))
    assert bits_equal(pool, expected) and not out[3].any()


def test_an_accepted_count_out_of_range_is_clamped(on_decode) -> None:
    p = make(CASE)
    table = torch.tensor([[6, 1], [2, 3], [0, 7], [5, 8]])
    options = {"write_indices": torch.tensor([6, 2, 0, 5]), "implementation": on_decode.name}
    pool, expected = pool_of(p), pool_of(p)
    out = decode(p, pool, table, num_accepted_tokens=torch.tensor([0, -5, 3, 1000]), **options)
    clamped = decode(p, expected, table, num_accepted_tokens=torch.tensor([1, 1, 2, 2]), **options)
    assert bits_equal(out, clamped) and bits_equal(pool, expected)


def test_columns_and_accepted_counts_go_together() -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    table, counts = torch.zeros(4, 3, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    with pytest.raises(cula.CulaError, match="num_accepted_tokens"):
        decode(p, pool, table, write_indices=table[:, 0])
    with pytest.raises(cula.CulaError, match="num_accepted_tokens"):
        decode(p, pool, table[:, 0], num_accepted_tokens=counts)
    with pytest.raises(cula.CulaError, match="write_indices"):
        decode(p, pool, table, num_accepted_tokens=counts)
    assert bits_equal(pool, before)


def test_a_bf16_pool_is_rounded_after_each_step(on_decode) -> None:
    p = make(CASE.replace(T=6))
    coarse = pool_of(p, torch.bfloat16)
    index = [6, 2, 0, 5]
    for t in range(6):
        step = p.tokens(t, t + 1)
        fine = coarse.float()
        out = decode(step, coarse, index, implementation=on_decode.name)
        exact = decode(step, fine, index)
        assert relative_error(out, exact.double()) <= tolerance("o", p.q.dtype)
        assert relative_error(coarse[index], fine[index].double()) <= tolerance("bf16_pool", p.q.dtype)
        assert relative_error(coarse[index], fine[index].bfloat16().double()) <= 2e-3, "rounded more than once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_of_any_slot_stride(on_decode, dtype: torch.dtype) -> None:
    p = make(CASE)
    plain = pool_of(p, dtype)
    wide = torch.full((SLOTS, 5, 12, 16), math.nan, dtype=dtype)
    flat = torch.full((SLOTS, 2 * 12 * 16 + 24), math.nan, dtype=dtype)
    views = [wide[:, 1:3], flat[:, 8 : 8 + 2 * 12 * 16].view(SLOTS, 2, 12, 16)]
    expected = plain.clone()
    out = decode(p, expected, [6, 2, -1, 5], implementation=on_decode.name)
    for base, pool in zip((wide, flat), views):
        pool.copy_(plain)
        place, around = pool.data_ptr(), base.clone()
        assert bits_equal(decode(p, pool, [6, 2, -1, 5], implementation=on_decode.name), out)
        assert bits_equal(pool, expected) and pool.data_ptr() == place
        torch.as_strided(around, pool.shape, pool.stride(), pool.storage_offset()).copy_(expected)
        assert bits_equal(base, around), "the padding between slots was written"


def test_slices_of_one_packed_projection(on_decode) -> None:
    p = make(CASE.replace(l2norm=True))
    expected_pool, pool = pool_of(p), pool_of(p)
    expected = decode(p, expected_pool, [6, 2, 0, 5], implementation=on_decode.name)
    packed = torch.cat([p.q.flatten(2), p.k.flatten(2), p.v.flatten(2), p.g.flatten(2), p.beta.flatten(2)], -1)
    packed = poisoned(packed, gap=3)
    q, k, v, g, beta = packed.split([16, 16, 24, 32, 2], -1)
    sliced = p.map(
        lambda x: x,
        q=q.unflatten(-1, (1, 16)),
        k=k.unflatten(-1, (1, 16)),
        v=v.unflatten(-1, (2, 12)),
        g=g.unflatten(-1, (2, 16)),
        beta=beta,
    )
    assert bits_equal(decode(sliced, pool, [6, 2, 0, 5], implementation=on_decode.name), expected)
    assert bits_equal(pool, expected_pool)


def test_expanded_inputs(on_decode) -> None:
    p = make(CASE)
    beta, g = p.beta[:1].expand_as(p.beta), p.g[..., :1].expand_as(p.g)
    expanded = p.map(lambda x: x, beta=beta, g=g)
    dense = p.map(lambda x: x, beta=beta.contiguous(), g=g.contiguous())
    pools = [pool_of(p), pool_of(p)]
    outs = [decode(x, pool, [6, 2, 0, 5], implementation=on_decode.name) for x, pool in zip((expanded, dense), pools)]
    assert bits_equal(*outs) and bits_equal(*pools)


def test_out_is_filled_and_returned(on_decode) -> None:
    p = make(CASE)
    expected = decode(p, pool_of(p), [6, -1, 0, 5], implementation=on_decode.name)
    wide = torch.full((4, 1, 6, 12), math.nan)
    for out in (torch.full_like(p.v, math.nan), wide[:, :, 1:3]):
        got = decode(p, pool_of(p), [6, -1, 0, 5], out=out, implementation=on_decode.name)
        assert got is out and bits_equal(out.contiguous(), expected)
    assert torch.isnan(wide[:, :, [0, 3, 4, 5]]).all()


def test_outputs_are_fresh(on_decode) -> None:
    p = make(CASE)
    first = decode(p, pool_of(p), [6, 2, 0, 5], implementation=on_decode.name)
    kept = first.clone()
    decode(p, pool_of(p), [6, 2, 0, 5], implementation=on_decode.name).fill_(7.0)
    assert bits_equal(first, kept)


def test_inputs_are_not_written_and_no_graph_is_made(on_decode) -> None:
    poison = Poison(fill=1e30)
    p = make(CASE)
    held = {n: poison.tensor(getattr(p, n), n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    index = poison.tensor(torch.tensor([6, 2, -1, 5]), "state_indices")
    leaves = {n: x.requires_grad_() for n, x in held.items()}
    out = decode(p.map(lambda x: x, **leaves), pool_of(p), index, implementation=on_decode.name)
    assert not out.requires_grad
    poison.check()


def test_autocast_changes_nothing(on_decode) -> None:
    p = make(CASE)
    pools = [pool_of(p), pool_of(p)]
    expected = decode(p, pools[0], [6, 2, 0, 5], implementation=on_decode.name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = decode(p, pools[1], [6, 2, 0, 5], implementation=on_decode.name)
    assert bits_equal(got, expected) and bits_equal(*pools)


def test_no_rows(on_decode) -> None:
    p = make(CASE.replace(B=0))
    pool = pool_of(p)
    before = pool.clone()
    out = decode(p, pool, torch.zeros(0, dtype=torch.int32), implementation=on_decode.name)
    assert out.shape == (0, 1, 2, 12) and bits_equal(pool, before)


@pytest.mark.parametrize("gate", ["zero", "bound", "wall", "channels", "sigmoid_full", "softplus_wall"])
@pytest.mark.parametrize("beta", ["zero", "one", "two"])
def test_many_steps_stay_right_for_every_gate(on_decode, gate: str, beta: str) -> None:
    p = make(CASE.replace(B=2, T=20, gate=gate, beta=beta, l2norm=False))
    pool = pool_of(p)
    index = [3, 1]
    start = pool[index].clone()
    outs = [decode(p.tokens(t, t + 1), pool, index, implementation=on_decode.name) for t in range(20)]
    problem = p.map(lambda x: x, h0=start)
    truth = reference(problem, gradients=False)
    floor = floors(problem, truth)
    got = {"o": torch.cat(outs, 1), "final_state": pool[index].mT}
    for name, x in got.items():
        assert relative_error(x, truth[name], floor=floor[name]) <= tolerance(name, p.q.dtype), name


VARIATIONS = {
    "scale": {"scale": 0.3},
    "another scale": {"scale": 0.7},
    "no norm": {"normalize_qk": False},
    "doubled": {"allow_neg_eigval": True},
    "finished beta": {"beta_is_logits": False},
    "finished gate": {"gate_is_raw": False},
    "a bound": {"lower_bound": -5.0},
    "another bound": {"lower_bound": -2.0},
    "no bias": {"dt_bias": None},
    "a bound alone": {"lower_bound": -5.0, "A_log": None, "dt_bias": None},
}
CHUNK_NAMES = {
    "normalize_qk": "use_qk_l2norm_in_kernel",
    "beta_is_logits": "use_beta_sigmoid_in_kernel",
    "gate_is_raw": "use_gate_in_kernel",
}


@pytest.mark.parametrize("order", [1, -1])
def test_a_call_that_looks_like_an_earlier_one_is_still_itself(on_decode, order: int) -> None:
    """One argument differs at a time, in two orders: each call is the recurrence with that argument."""
    from cula.kda import kda_recurrent_reference

    p = make(CASE)
    p = p.map(lambda x: x, beta=p.beta.abs() / 4, g=-p.g.abs())
    for what in list(VARIATIONS)[::order]:
        change = VARIATIONS[what]
        for _ in range(2):
            pool = pool_of(p)
            start = pool[[6, 2, 0, 5]].clone()
            out = decode(p, pool, [6, 2, 0, 5], **change, implementation=on_decode.name)
            named = {"A_log": p.A_log, "dt_bias": p.dt_bias, "initial_state": start}
            renamed = {CHUNK_NAMES.get(name, name): value for name, value in change.items()}
            o, state = kda_recurrent_reference(*p.five(), **{**p.flags(), **named, "state_v_first": True, **renamed})
            assert relative_error(out, o) <= 1e-5, what
            assert relative_error(pool[[6, 2, 0, 5]], state) <= 1e-5, what


@pytest.mark.parametrize("function", ["kda_decode", "kda_verify"])
def test_a_name_is_asked_again_after_a_call_of_the_same_form(function: str) -> None:
    p = make(CASE)
    slots = {"state_pool": pool_of(p), "state_indices": torch.tensor([6, 2, 0, 5])}
    for known in (None, "auto", "eager"):
        serve(function, p, **slots, implementation=known)
        with pytest.raises(cula.NotSupportedError, match="sm90"):
            serve(function, p, **slots, implementation="sm90")
        with pytest.raises(cula.RangeError, match="implementation"):
            serve(function, p, **slots, implementation="fastest")
        with pytest.raises(cula.DtypeError, match="null_index"):
            serve(function, p, **slots, implementation=known, null_index=None)
        with pytest.raises(cula.CulaError, match="lower_bound"):
            serve(function, p, **slots, implementation=known, lower_bound=math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_write_the_slots_that_others_read(on_decode, dtype: torch.dtype) -> None:
    """Every row reads before any row writes: slots handed round in a ring, with two threads."""
    if on_decode.name == "portable":
        pytest.skip("on a GPU nothing orders one row's write after another's read: the docstring says so")
    p = make(CASE.replace(B=32, K=64, V=64, HV=4, H=4))
    start = normal(32, 4, 64, 64, seed=5, dtype=dtype)
    ring = torch.arange(32).roll(1)
    torch.set_num_threads(2)
    for _ in range(5):
        moved, inplace = start.clone(), start.clone()
        options = {"implementation": on_decode.name}
        out = decode(p, moved, torch.arange(32), write_indices=ring, **options)
        assert bits_equal(out, decode(p, inplace, torch.arange(32), **options))
        assert bits_equal(moved[ring], inplace)
