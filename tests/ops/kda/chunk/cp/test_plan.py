"""The cost model of segments: pure Python, every card and problem on a CPU."""

from __future__ import annotations

import time

import pytest

from cula.ops.kda.chunk.cp.plan import GAIN, LEAST_CHUNKS, PARTS, Plan, Shape, cost, make_plan

H100 = 132


def shape(heads: int, programs: int = H100) -> Shape:
    """K = V = 128 in blocks of 64."""
    return Shape(2 * heads, 2 * heads, programs)


@pytest.mark.parametrize(
    "chunks, heads, cut",
    [
        ((128,), 64, False),
        ((128,), 96, False),
        ((16,), 64, False),
        ((512,), 32, False),
        ((512,), 8, True),
        ((2048,), 4, True),
        ((1024,), 2, True),
        ((128,), 4, True),
        ((128,) * 64, 8, False),
        ((896,) + (16,) * 16, 16, True),
        ((7,), 1, False),
        ((), 8, False),
        ((0, 0), 8, False),
    ],
)
def test_long_sequences_with_few_heads_are_cut_and_no_others(chunks, heads: int, cut: bool) -> None:
    assert (make_plan(chunks, shape(heads)) is not None) == cut


def test_a_larger_card_cuts_more() -> None:
    small, large = (make_plan((512,), shape(8, programs)) for programs in (40, 148))
    assert small is None or small.cut > large.cut
    assert make_plan((512,), shape(8, 0)) is None


@pytest.mark.parametrize("chunks", [(512,), (2048, 3), (896, 0, 16, 16), (100, 90, 80)])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_a_plan_covers_every_chunk_and_promises_its_gain(chunks, heads: int) -> None:
    plan = make_plan(chunks, shape(heads))
    if plan is None:
        return
    assert plan.chunks == chunks and plan.cut >= LEAST_CHUNKS
    for n, parts in zip(chunks, plan.parts):
        assert (parts - 1) * plan.cut < max(n, 1) <= parts * plan.cut
    assert cost(plan, shape(heads)) < (1 - GAIN) * cost(Plan(chunks, max(chunks)), shape(heads))


def test_no_other_cut_is_cheaper() -> None:
    plan = make_plan((2048,), shape(4))
    others = [Plan((2048,), -(-2048 // parts)) for parts in PARTS]
    assert cost(plan, shape(4)) == min(cost(other, shape(4)) for other in others)


def test_a_thousand_sequences_are_judged_in_a_moment() -> None:
    chunks = tuple(range(1, 1001))
    start = time.perf_counter()
    make_plan(chunks, shape(1))
    assert time.perf_counter() - start < 0.2
