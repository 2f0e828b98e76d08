"""Tree drafts and rollback of the portable kernels in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from cula.checks.cases import Case, Problem, make, normal
from cula.checks.runs import serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.kda import KDARollback, kda_rollback

pytestmark = pytest.mark.usefixtures("interpreted")

CASE = Case(B=2, T=5, H=1, HV=2, K=24, V=20, gate="softplus", beta="logits", l2norm=True, v_first=True)
INDEX = [6, 2]
PARENT = torch.tensor([[-1, -1, 0, 0, 2], [0, 0, 1, 9, 1]], dtype=torch.int64)
PATHS = [[[0], [1], [0, 2], [0, 3], [0, 2, 4]], [[0], [0, 1], [0, 1, 2], [3], [0, 1, 4]]]


def pool_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(9, 2, 20, 24, seed=5, dtype=dtype)


def verify(p: Problem, pool: torch.Tensor, index: list[int] = INDEX, name: str = "portable", **options) -> torch.Tensor:
    given = {"state_pool": pool, "state_indices": torch.tensor(index), "cu_seqlens": p.cu_seqlens}
    return serve("kda_verify", p, **given, implementation=name, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
def test_every_path_of_a_tree_is_decode_in_bits(dtype: torch.dtype) -> None:
    p, pool = make(CASE), pool_of(dtype)
    kept, slots = pool.new_full((10, 2, 20, 24), math.nan), torch.arange(10).view(2, 5)
    out = verify(p, pool, parent=PARENT.to(torch.int32), states_out=kept, states_out_indices=slots)
    assert bits_equal(pool, pool_of(dtype))
    for n in range(2):
        for t in range(5):
            one = pool[INDEX[n]][None].clone()
            for step in PATHS[n][t]:
                cut = {f: getattr(p, f)[n : n + 1, step : step + 1] for f in ("q", "k", "v", "g", "beta")}
                given = {"state_pool": one, "state_indices": torch.tensor([0]), "implementation": "portable"}
                o = serve("kda_decode", p.map(lambda x: x, **cut), **given)
            assert bits_equal(out[n, t], o[0, 0]) and bits_equal(kept[slots[n, t]], one[0]), (n, t)


def test_the_state_that_was_read_may_be_overwritten_by_an_early_branch() -> None:
    p, pool = make(CASE), pool_of()
    slots = torch.tensor([[6, 7, -1, -1, 8], [2, -1, 0, -1, -1]])
    expected, apart = pool_of(), pool_of()
    right = verify(p, expected, parent=PARENT, states_out=apart, states_out_indices=slots)
    assert bits_equal(verify(p, pool, parent=PARENT, states_out=pool, states_out_indices=slots), right)
    assert bits_equal(pool, apart)


def test_ragged_trees_are_eagers() -> None:
    p = make(CASE.replace(B=1, T=9, lengths=(4, 0, 5)))
    parent = torch.tensor([-1, 0, 0, 1, -1, 0, 0, 2, 1]).repeat_interleave(2)[::2]
    outs = [verify(p, pool_of(), [6, 1, 2], name, parent=parent) for name in ("portable", "eager")]
    assert relative_error(outs[0], outs[1].double()) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
def test_rollback_is_the_kept_state_of_the_last_token_that_stands(dtype: torch.dtype) -> None:
    p = make(CASE.replace(B=3))
    wide = torch.full((9, 2, 20, 40), math.nan, dtype=dtype)
    for pool in (pool_of(dtype), wide[..., 8:32]):
        pool.copy_(pool_of(dtype))
        kept, slots = pool.new_full((15, 2, 20, 24), math.nan), torch.arange(15).view(3, 5)
        r = KDARollback.allocate(3, 7, 2, 24, 20, "cpu")
        for part in (r.k, r.u, r.g):
            part.fill_(math.nan)
        out = verify(p, pool, [6, 2, -1], rollback=r, states_out=kept, states_out_indices=slots)
        assert bits_equal(out, verify(p, pool, [6, 2, -1])) and bits_equal(pool, pool_of(dtype))
        assert r.count.tolist() == [5, 5, 0]
        for name in ("eager", "portable") if dtype == torch.float32 else ("portable",):  # the interpreter cuts bf16 off
            committed = pool.clone()
            accepted = torch.tensor([[3, 9, 5], [0, 0, 0]]).t()[:, 0]
            kda_rollback(committed, torch.tensor([6, 2, 1]), r, accepted, implementation=name)
            limit = 1e-5 if dtype == torch.float32 else 8e-3
            assert relative_error(committed[6], kept[2].double()) <= limit
            assert relative_error(committed[2], kept[9].double()) <= limit
            rest = [0, 1, 3, 4, 5, 7, 8]
            assert bits_equal(committed[rest], pool[rest])
        kda_rollback(pool, torch.tensor([6, 2, 1]), r, torch.tensor([0, -3, 0]), implementation="portable")
        assert bits_equal(pool.contiguous(), pool_of(dtype))
    assert wide[..., :8].isnan().all() and wide[..., 32:].isnan().all()


def test_what_portable_and_eager_keep_is_the_same() -> None:
    p = make(CASE.replace(B=1, T=6, lengths=(4, 2), gate="sigmoid"))
    kept = []
    for name in ("portable", "eager"):
        r = KDARollback.allocate(2, 4, 2, 24, 20, "cpu")
        verify(p, pool_of(), rollback=r, name=name)
        kept.append(r)
    assert bits_equal(kept[0].count, kept[1].count)
    for part in ("k", "u", "g"):
        assert relative_error(getattr(kept[0], part), getattr(kept[1], part).double()) <= 1e-5, part
