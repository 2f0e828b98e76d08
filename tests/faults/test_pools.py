"""Public faults 59 to 71: null slots, live neighbours, drafts, recycled memory, split prefills, repetition."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make, normal
from cula.checks.poison import Poison
from cula.checks.runs import fresh_pool, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance

CASE = Case(B=4, T=1, H=1, HV=2, K=16, V=12, gate="sigmoid", beta="logits", l2norm=True, v_first=True)
SLOTS = 6


def pool_of(seed: int = 3, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> torch.Tensor:
    return normal(slots, 2, 12, 16, seed=seed, dtype=dtype)


def step(function: str, p: Problem, pool: torch.Tensor, index: list[int], **options) -> torch.Tensor:
    update = {"update_state": True} if function == "kda_verify" else {}
    return serve(function, p, state_pool=pool, state_indices=torch.tensor(index), **update, **options)


BOTH = pytest.mark.parametrize("function", ["kda_decode", "kda_verify"])
POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@BOTH
@POOLS
def test_fault_59_minus_one_is_never_an_address(on_decode, function: str, dtype: torch.dtype) -> None:
    """Indices 3, -1, 0, -1 between canary rows: the rows before slot 0 and after the last keep their bytes."""
    poison = Poison(pad=2 * 12 * 16)
    pool = poison.tensor(pool_of(dtype=dtype), "state_pool", writable=True)
    before = pool.clone()
    out = step(function, make(CASE), pool, [3, -1, 0, -1], implementation=on_decode.name)
    poison.check()
    assert not out[[1, 3]].any() and out[[0, 2]].any()
    assert bits_equal(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]])


@BOTH
@POOLS
def test_fault_60_padding_does_not_fall_on_slot_zero(on_decode, function: str, dtype: torch.dtype) -> None:
    """Slot 0 is live and not in the batch: padded rows leave every bit of it, and give zeros."""
    p = make(CASE)
    pool = pool_of(dtype=dtype)
    before = pool.clone()
    for x in p.five():
        x[2:] = 1e4
    out = step(function, p, pool, [3, 4, -1, -1], implementation=on_decode.name)
    assert bits_equal(pool[0], before[0]) and not out[2:].any()
    assert not bits_equal(pool[3], before[3])


def test_fault_60_a_padded_prefill_leaves_slot_zero_alone(on_prefill) -> None:
    """The same for prefill: a null sequence reads zero and writes nowhere."""
    p = make(CASE.replace(T=20))
    pool = pool_of()
    before = pool.clone()
    options = {"read_indices": torch.tensor([3, -1, 4, -1]), "implementation": on_prefill.name}
    serve("kda_prefill", p, state_pool=pool, **options)
    assert bits_equal(pool[[0, 1, 2, 5]], before[[0, 1, 2, 5]])


@pytest.mark.parametrize("null", [-1, 0])
@BOTH
def test_fault_61_one_null_convention_in_every_function(on_decode, function: str, null: int) -> None:
    """null_index 0: slot 0 is nobody's. null_index -1: slot 0 is a slot like any other."""
    p = make(CASE)
    pool = pool_of()
    before = pool.clone()
    out = step(function, p, pool, [3, 0, 4, -1], null_index=null, implementation=on_decode.name)
    assert bool(out[1].any()) == (null == -1) and not out[3].any()
    assert bits_equal(pool[0], before[0]) == (null == 0)


def test_fault_61_trailing_repeats_and_unbalanced_rows(on_verify) -> None:
    """Packed drafts of 3, 0, 1, 0, 0 tokens: rows equal sequences in number, and none is taken for another's."""
    p = make(CASE.replace(B=1, T=5, lengths=(3, 0, 1, 0, 0)))
    pool = pool_of()
    before = pool.clone()
    options = {"cu_seqlens": p.cu_seqlens, "implementation": on_verify.name}
    out = step("kda_verify", p, pool, [1, 2, 3, 4, -1], **options)
    assert bits_equal(pool[[0, 2, 4, 5]], before[[0, 2, 4, 5]]) and not out[:, 4:].any()
    for slot, start, end in ((1, 0, 3), (3, 3, 4)):
        cut = {n: getattr(p, n)[:, start:end] for n in ("q", "k", "v", "g", "beta")}
        alone = before.clone()
        one = p.map(lambda x: x, cu_seqlens=None, **cut)
        expected = step("kda_verify", one, alone, [slot], implementation=on_verify.name)
        assert bits_equal(out[:, start:end], expected) and bits_equal(pool[slot], alone[slot])


def test_fault_62_a_read_only_prefix_slot_shared_by_rows_that_write_elsewhere(on_decode) -> None:
    """Four rows read slot 5 and write slots of their own: the prefix stays, each row is its own call."""
    p = make(CASE)
    pool = pool_of()
    before = pool.clone()
    options = {"write_indices": torch.tensor([0, 1, 2, 3]), "implementation": on_decode.name}
    out = step("kda_decode", p, pool, [5, 5, 5, 5], **options)
    assert bits_equal(pool[[4, 5]], before[[4, 5]])
    for n in range(4):
        alone = before.clone()
        row = p.map(lambda x: x, **{f: getattr(p, f)[n : n + 1] for f in ("q", "k", "v", "g", "beta")})
        assert bits_equal(step("kda_decode", row, alone, [5], implementation=on_decode.name)[0], out[n])
        assert bits_equal(alone[5], pool[n])


def test_fault_63_a_convolution_pool_of_another_size_than_the_state_pool() -> None:
    """One slot id is used for both pools, so both have as many slots; refused before anything is written."""
    from cula.kda import kda_decode_fused

    channels = 2 * 16 + 2 * 12
    for slots in (SLOTS - 1, SLOTS + 1):
        pool, conv = pool_of(), normal(slots, channels, 3, seed=1)
        before = pool.clone(), conv.clone()
        with pytest.raises(cula.ShapeError, match="conv_pool"):
            kda_decode_fused(
                normal(4, channels), normal(4, 2, 16), normal(4, 2), conv_weight=normal(channels, 4), conv_pool=conv,
                state_pool=pool, state_indices=torch.tensor([0, 1, 2, 3]), lower_bound=-5.0,
            )  # fmt: skip
        assert bits_equal(pool, before[0]) and bits_equal(conv, before[1])


@POOLS
def test_fault_64_drafting_leaves_the_committed_state(on_verify, dtype: torch.dtype) -> None:
    """Verify without update_state: every byte of the pool stays, with and without states kept elsewhere."""
    p = make(CASE.replace(T=6))
    poison = Poison()
    pool = poison.tensor(pool_of(dtype=dtype), "state_pool")
    index = torch.tensor([3, 1, -1, 0])
    states = torch.zeros(24, 2, 12, 16, dtype=dtype)
    keep = {"states_out": states, "states_out_indices": torch.arange(24).view(4, 6)}
    for options in ({}, keep):
        serve("kda_verify", p, state_pool=pool, state_indices=index, **options, implementation=on_verify.name)
        poison.check()


def test_fault_68_a_prefill_bucket_longer_than_its_tokens(on_prefill) -> None:
    """128 rows for 100 tokens: padding rows belong to nobody, not to the last sequence's state."""
    p = make(CASE.replace(B=1, T=128, lengths=(40, 60)))
    exact = p.map(lambda x: x, **{n: getattr(p, n)[:, :100] for n in ("q", "k", "v", "g", "beta")})
    pools = [pool_of(), pool_of()]
    options = {"cu_seqlens": p.cu_seqlens, "read_indices": torch.tensor([1, 4]), "implementation": on_prefill.name}
    outs = [serve("kda_prefill", x, state_pool=pool, **options) for x, pool in zip((p, exact), pools)]
    assert bits_equal(outs[0][:, :100], outs[1]) and not outs[0][:, 100:].any()
    assert bits_equal(*pools)


def test_fault_69_a_snapshot_survives_later_calls(on_prefill) -> None:
    """States kept in slots and checkpoint rows stay as they are while other sequences and later chunks run."""
    p = make(CASE.replace(B=2, T=70))
    rows, pool = torch.zeros(3, 2, 12, 16), pool_of()
    keep = {"checkpoints": rows, "checkpoint_every": 64, "checkpoint_offsets": torch.tensor([0, 1, 2], device="cpu")}
    serve("kda_prefill", p, state_pool=pool, read_indices=torch.tensor([1, 2]), **keep, implementation=on_prefill.name)
    snapshot, saved = rows.clone(), pool[[1, 2]].clone()
    other = make(p.case.replace(seed=9))
    slots = torch.tensor([4, 5])
    serve("kda_prefill", other, state_pool=pool, read_indices=slots, implementation=on_prefill.name)
    step("kda_decode", make(CASE.replace(B=2)), pool, [4, 5])
    assert bits_equal(rows, snapshot) and bits_equal(pool[[1, 2]], saved)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", [64, 128, 192, 1, 63, 65, 100])
def test_fault_70_a_chunked_prefill_is_the_one_shot_prefill(on_prefill, dtype: str, cut: int) -> None:
    """Cut at a multiple of the chunk: the same bits. Cut anywhere: within the tolerance of a split."""
    p = make(CASE.replace(B=2, T=200, dtype=dtype, gate="zero", beta="one"))
    whole, index = fresh_pool(p)
    options = {"read_indices": index, "cp_mode": False, "implementation": on_prefill.name}
    expected = serve("kda_prefill", p, state_pool=whole, **options)
    pool, _ = fresh_pool(p)
    options["state_pool"] = pool
    out = torch.cat([serve("kda_prefill", part, **options) for part in (p.tokens(0, cut), p.tokens(cut, 200))], 1)
    limit = tolerance("split", p.q.dtype)
    assert relative_error(out, expected.double()) <= limit
    assert relative_error(pool[index.long()], whole[index.long()].double()) <= limit
    if cut % 64 == 0:
        assert bits_equal(out, expected) and bits_equal(pool[index.long()], whole[index.long()])


@pytest.mark.parametrize("threads", [1, 2])
@BOTH
def test_fault_71_the_same_step_a_thousand_times(on_decode, function: str, threads: int) -> None:
    """Equal bits every time, with one thread and with two: no race, no forgotten barrier."""
    p = make(CASE.replace(B=4, K=64, V=64))
    start = normal(SLOTS, 2, 64, 64, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected_pool = start.clone()
        expected = step(function, p, expected_pool, [3, 1, -1, 0], implementation=on_decode.name)
        for i in range(1000 if on_decode.label == "eager" else 100):
            pool = start.clone()
            out = step(function, p, pool, [3, 1, -1, 0], implementation=on_decode.name)
            assert bits_equal(out, expected) and bits_equal(pool, expected_pool), i
    finally:
        torch.set_num_threads(before)


def test_a_nan_in_a_recycled_slot_stays_out_of_everything(on_decode) -> None:
    """Slots that no row names may hold NaN."""
    p = make(CASE)
    pool = pool_of()
    pool[[1, 2]] = math.nan
    out = step("kda_decode", p, pool, [3, 4, 0, 5], implementation=on_decode.name)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(pool[[0, 3, 4, 5]]).all())
