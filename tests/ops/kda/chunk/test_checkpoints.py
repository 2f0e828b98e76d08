"""Checkpoints of kda_prefill: which positions, which rows, and the bits that the truncated call leaves."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import serve
from cula.checks.tolerance import bits_equal

pytestmark = pytest.mark.usefixtures("each_prefill")

CASE = Case(B=1, T=130, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, v_first=True)


def prefill(p: Problem, **options) -> torch.Tensor:
    return serve("kda_prefill", p, **{"cp_mode": False, "cu_seqlens": p.cu_seqlens, **options})


def positions(length: int, first: int, every: int) -> list[int]:
    """Tokens after which a sequence whose first token has position `first` stands at a multiple of `every`."""
    return [t for t in range(1, length + 1) if (first + t) % every == 0]


def start_pool(p: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return p.h0.to(dtype).clone()


def truncated(p: Problem, n: int, tokens: int, dtype: torch.dtype | None) -> torch.Tensor:
    """The state that the same call leaves when sequence n ends after `tokens` tokens (dtype None: no pool)."""
    b, start, _ = p.spans()[n]
    cut = {f: getattr(p, f)[b : b + 1, start : start + tokens] for f in ("q", "k", "v", "g", "beta", "do")}
    one = p.map(lambda x: x, cu_seqlens=None, **cut)
    pool = torch.zeros_like(p.h0[n : n + 1]) if dtype is None else start_pool(p, dtype)[n : n + 1]
    prefill(one, state_pool=pool)
    return pool[0]


def check_rows(p: Problem, every: int, first: list[int] | None, dtype: torch.dtype | None) -> int:
    """Run with room for every boundary and compare each row in bits; the number of rows."""
    N, spans = p.case.N, p.spans()
    found = [positions(e - s, 0 if first is None else first[n], every) for n, (_, s, e) in enumerate(spans)]
    offsets = torch.tensor([0, *[len(x) for x in found]]).cumsum(0).to(torch.int32)
    rows = torch.full((int(offsets[-1]) + 2, *p.h0.shape[1:]), math.nan, dtype=dtype or torch.float32)
    pool = None if dtype is None else start_pool(p, dtype)
    options = {"checkpoints": rows, "checkpoint_every": every, "checkpoint_offsets": offsets}
    if first is not None:
        options["position_offsets"] = torch.tensor(first)
    plain_pool = None if dtype is None else start_pool(p, dtype)
    out = prefill(p, state_pool=pool, **options)
    assert bits_equal(out, prefill(p, state_pool=plain_pool)), "checkpoints change the output"
    assert pool is None or bits_equal(pool, plain_pool), "checkpoints change the final state"
    for n in range(N):
        for i, tokens in enumerate(found[n]):
            place = f"sequence {n} after {tokens} tokens"
            assert bits_equal(rows[offsets[n] + i], truncated(p, n, tokens, dtype)), place
    assert torch.isnan(rows[offsets[-1] :]).all(), "an unused row was written"
    return int(offsets[-1])


@pytest.mark.parametrize("every", [16, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=["nopool", "fp32", "bf16"])
def test_each_checkpoint_is_what_the_truncated_call_leaves(every: int, dtype: torch.dtype | None) -> None:
    assert check_rows(make(CASE), every, None, dtype) == 130 // every


@pytest.mark.parametrize("gate", ["zero", "bound", "channels", "cliff63", "sigmoid"])
@pytest.mark.parametrize("q_dtype", ["fp32", "bf16"])
def test_with_every_kind_of_gate(gate: str, q_dtype: str) -> None:
    assert check_rows(make(CASE.replace(gate=gate, dtype=q_dtype)), 16, None, torch.float32) == 8


@pytest.mark.parametrize("first", [0, 1, 15, 16, 36, 63, 64, 100, 1000])
@pytest.mark.parametrize("every", [16, 64])
def test_position_offsets_move_the_boundaries(first: int, every: int) -> None:
    check_rows(make(CASE), every, [first], torch.float32)


def test_the_examples_of_the_contract() -> None:
    assert positions(130, 0, 64) == [64, 128]
    assert positions(130, 100, 64) == [28, 92]
    assert check_rows(make(CASE), 64, [100], torch.float32) == 2


@pytest.mark.parametrize("first", [None, [0, 100, 7, 64]])
def test_packed_sequences_and_a_batch(first: list[int] | None) -> None:
    packed = CASE.replace(T=200, lengths=(70, 0, 64, 63))
    batch = CASE.replace(B=4, T=70)
    for case in (packed, batch):
        for every in (16, 64):
            check_rows(make(case), every, first, torch.float32)


def test_rows_beyond_a_sequences_share_are_dropped() -> None:
    p = make(CASE.replace(T=130, lengths=(64, 66)))
    rows = torch.full((6, *p.h0.shape[1:]), math.nan)
    offsets = torch.tensor([1, 3, 4])
    pool = start_pool(p)
    prefill(p, state_pool=pool, checkpoints=rows, checkpoint_every=16, checkpoint_offsets=offsets)
    expected = {1: (0, 16), 2: (0, 32), 3: (1, 16)}
    for row in range(6):
        if row in expected:
            assert bits_equal(rows[row], truncated(p, *expected[row], torch.float32)), row
        else:
            assert torch.isnan(rows[row]).all(), f"row {row} was written"


def test_no_room_means_no_row() -> None:
    p = make(CASE)
    rows = torch.full((3, *p.h0.shape[1:]), math.nan)
    options = {"checkpoints": rows, "checkpoint_every": 16, "checkpoint_offsets": torch.tensor([2, 2])}
    prefill(p, state_pool=start_pool(p), **options)
    assert torch.isnan(rows).all()


def test_rows_of_any_stride_and_offsets_of_any_integer_type() -> None:
    p = make(CASE)
    plain = torch.full((2, *p.h0.shape[1:]), math.nan)
    options = {"checkpoint_every": 64, "checkpoint_offsets": torch.tensor([0, 2], dtype=torch.int64)}
    prefill(p, checkpoints=plain, **options)
    wide = torch.full((4, 5, 12, 16), math.nan)
    options["checkpoint_offsets"] = torch.tensor([[0, 9], [2, 9]], dtype=torch.int32)[:, 0]
    prefill(p, checkpoints=wide[::2, 1:3], **options)
    assert bits_equal(wide[::2, 1:3].contiguous(), plain)
    wide[::2, 1:3] = math.nan
    assert torch.isnan(wide).all()


def test_the_boundary_at_the_end_is_the_final_state() -> None:
    p = make(CASE.replace(T=128))
    rows, pool = torch.full((2, *p.h0.shape[1:]), math.nan), start_pool(p)
    options = {"checkpoints": rows, "checkpoint_offsets": torch.tensor([0, 2])}
    prefill(p, state_pool=pool, **options)
    assert bits_equal(rows[1], pool[0])


BAD = [
    ({"checkpoint_every": 24}, "checkpoint_every"),
    ({"checkpoint_every": 0}, "checkpoint_every"),
    ({"checkpoint_every": -64}, "checkpoint_every"),
    ({"checkpoint_every": 64.0}, "checkpoint_every"),
    ({"checkpoint_offsets": None}, "checkpoint_offsets"),
    ({"checkpoint_offsets": torch.tensor([0, 1, 2])}, "checkpoint_offsets"),
    ({"checkpoint_offsets": torch.tensor([0.0, 2.0])}, "checkpoint_offsets"),
    ({"position_offsets": torch.tensor([0, 0])}, "position_offsets"),
    ({"position_offsets": torch.tensor([0.5])}, "position_offsets"),
    ({"checkpoints": torch.zeros(2, 2, 16, 12)}, "checkpoints"),
    ({"checkpoints": torch.zeros(2, 2, 12, 16, dtype=torch.bfloat16)}, "checkpoints"),
    ({"checkpoints": torch.zeros(2, 2, 12, 16, device="meta")}, "checkpoints"),
]


@pytest.mark.parametrize("change, name", BAD, ids=str)
def test_bad_checkpoint_arguments_touch_nothing(change: dict, name: str) -> None:
    p = make(CASE)
    rows, pool = torch.full((2, *p.h0.shape[1:]), math.nan), start_pool(p)
    out = torch.full_like(p.v, math.nan)
    options = {"checkpoints": rows, "checkpoint_offsets": torch.tensor([0, 2]), **change}
    with pytest.raises(cula.CulaError, match=name):
        prefill(p, state_pool=pool, out=out, **options)
    assert torch.isnan(rows).all() and torch.isnan(out).all() and bits_equal(pool, p.h0)


def test_a_bf16_pool_needs_bf16_checkpoints() -> None:
    p = make(CASE)
    options = {"checkpoints": torch.zeros(2, 2, 12, 16), "checkpoint_offsets": torch.tensor([0, 2])}
    with pytest.raises(cula.DtypeError, match="checkpoints"):
        prefill(p, state_pool=start_pool(p, torch.bfloat16), **options)


def test_offsets_that_point_outside_never_write_outside() -> None:
    p = make(CASE)
    guard = torch.full((6, *p.h0.shape[1:]), math.nan)
    for offsets in ([-2, 2], [1, 9], [7, 9]):
        rows = guard[2:4]
        with contextlib.suppress(cula.CulaError):
            prefill(p, checkpoints=rows, checkpoint_every=16, checkpoint_offsets=torch.tensor(offsets))
        assert torch.isnan(guard[:2]).all() and torch.isnan(guard[4:]).all()
