"""A sequence may write a slot that another one reads in the same call: every read comes first."""

from __future__ import annotations

import pytest
import torch

from cula.checks.rows import labels, only
from cula.kda import kda_decode, kda_verify

HV, K, V = 2, 8, 8


def inputs(N: int, T: int) -> list[torch.Tensor]:
    """q, k, v, raw g, beta logits `[N, T, ...]`."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, T, HV, K), (N, T, HV, K), (N, T, HV, V), (N, T, HV, K), (N, T, HV)]
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def pool_of(slots: int) -> torch.Tensor:
    """A pool of random states."""
    return torch.randn(slots, HV, V, K, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("label", labels("kda_decode", "cpu"))
def test_two_sequences_swap_their_slots(label: str) -> None:
    x, before = inputs(2, 1), pool_of(3)
    read, write = torch.tensor([0, 1]), torch.tensor([1, 0])
    expected_pool, expected = before.clone(), []
    for n in (0, 1):  # one at a time, each from the pool as it was
        pool = before.clone()
        one = [t[n : n + 1] for t in x]
        with only(label) as name:
            expected.append(
                kda_decode(*one, state_pool=pool, state_indices=read[n : n + 1], lower_bound=-5.0, implementation=name)
            )
        expected_pool[write[n]] = pool[read[n]]
    pool = before.clone()
    with only(label) as name:
        out = kda_decode(
            *x, state_pool=pool, state_indices=read, write_indices=write, lower_bound=-5.0, implementation=name
        )
    assert torch.equal(out, torch.cat(expected))
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("label", labels("kda_verify", "cpu"))
def test_token_states_may_go_to_slots_that_others_read(label: str) -> None:
    x, before = inputs(2, 3), pool_of(6)
    read, rows = torch.tensor([0, 1]), torch.tensor([[1, 2, 3], [4, 5, 0]])
    apart = torch.zeros(6, HV, V, K)
    pool = before.clone()
    with only(label) as name:
        expected = kda_verify(
            *x, state_pool=pool, state_indices=read, states_out=apart, states_out_indices=rows, lower_bound=-5.0,
            implementation=name,
        )  # fmt: skip
        assert torch.equal(pool, before)
        out = kda_verify(
            *x, state_pool=pool, state_indices=read, states_out=pool, states_out_indices=rows, lower_bound=-5.0,
            implementation=name,
        )  # fmt: skip
    assert torch.equal(out, expected)
    assert torch.equal(pool, apart)


@pytest.mark.parametrize("kind", ["bf16", "strided"])
@pytest.mark.parametrize("label", labels("kda_verify", "cpu"))
def test_token_states_of_another_type_or_layout_keep_the_bits(label: str, kind: str) -> None:
    x, pool = inputs(3, 4), pool_of(4)
    read, rows = torch.tensor([2, 0, 1]), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [0, 8, 9, 10]])
    rows[2, 0] = -1
    apart = torch.full((11, HV, V, K), 7.0)
    other = torch.full((11, HV, V, K), 7.0, dtype=torch.bfloat16)
    if kind == "strided":
        other = torch.full((11, HV, V, 2 * K), 7.0)[..., ::2]
    common = {"state_pool": pool, "state_indices": read, "lower_bound": -5.0, "null_index": 0}  # slot 0 is null
    with only(label) as name:
        expected = kda_verify(*x, states_out=apart, states_out_indices=rows, implementation=name, **common)
        out = kda_verify(*x, states_out=other, states_out_indices=rows, implementation=name, **common)
    assert torch.equal(out, expected)
    assert not out[1].any()
    assert torch.equal(other.float(), apart.to(other.dtype).float())
    assert (apart[4:8] == 7.0).all()
