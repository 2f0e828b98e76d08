"""Poisoned memory catches a read outside, a write outside and a write to an input."""

from __future__ import annotations

import math

import pytest
import torch

from cula.checks.poison import LARGE, Poison, poisoned

SHAPES = [(), (5,), (2, 3), (2, 3, 4, 5), (0, 4), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("gap", [0, 3])
def test_a_view_with_the_same_values_between_fill(shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> None:
    x = (torch.arange(math.prod(shape)).view(shape) % 2).to(dtype)
    view = poisoned(x, gap=gap)
    assert torch.equal(view, x) and view.dtype == dtype and view.storage_offset() == 64
    buffer = torch.as_strided(view, (view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
    for edge in (buffer[:64], buffer[-64:]):
        if dtype.is_floating_point:
            assert bool(torch.isnan(edge).all())
        else:
            assert bool((edge != 0).all())
    if gap and len(shape) > 1 and x.numel():
        assert view.stride(-2) == shape[-1] + gap


def test_a_read_outside_meets_nan_or_the_fill() -> None:
    view = Poison(fill=LARGE).tensor(torch.zeros(4))
    assert torch.as_strided(view, (1,), (1,), 68).item() == pytest.approx(1e30)
    half = poisoned(torch.zeros(4, dtype=torch.float16), fill=LARGE)
    assert torch.as_strided(half, (1,), (1,), 68).item() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("offset", [0, 63, 68, 131])
@pytest.mark.parametrize("writable", [False, True])
def test_a_write_outside_is_found(offset: int, writable: bool) -> None:
    poison = Poison()
    view = poison.tensor(torch.zeros(4), "v", writable=writable)
    poison.check()
    torch.as_strided(view, (1,), (1,), offset).fill_(0.0)
    with pytest.raises(AssertionError, match="v"):
        poison.check()


def test_a_write_between_rows_is_found() -> None:
    poison = Poison(gap=2)
    view = poison.tensor(torch.zeros(3, 4), "pool", writable=True)
    torch.as_strided(view, (1,), (1,), 64 + 4).fill_(0.0)
    with pytest.raises(AssertionError, match="pool"):
        poison.check()


def test_a_write_to_an_input_is_found_and_one_to_a_pool_is_not() -> None:
    poison = Poison()
    given, pool = poison.tensor(torch.zeros(4), "q"), poison.tensor(torch.zeros(4), "pool", writable=True)
    pool.fill_(3.0)
    poison.check()
    given[2] = -0.0
    with pytest.raises(AssertionError, match="q"):
        poison.check()


def test_a_dict_passes_what_is_no_tensor_through() -> None:
    held = Poison().tensors({"q": torch.ones(2), "scale": None})
    assert held["scale"] is None and torch.equal(held["q"], torch.ones(2))
