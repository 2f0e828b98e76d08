"""Tree drafts (`parent`) and rollback: every path of a tree and every accepted prefix is kda_decode's."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make, normal
from cula.checks.poison import Poison
from cula.checks.runs import reference, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import KDARollback, kda_rollback

CASE = Case(B=3, T=6, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, v_first=True)
SLOTS = 24
INDEX = [6, 2, 5]
#: A chain, roots alone, a bush, and values that mean the committed state: the token itself, later ones, anything.
TREES = torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, -1, 0, 0, 2, 1], [0, 7, -5, 3, 2, 4]], dtype=torch.int32)


def pool_of(p: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal(SLOTS, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def verify(p: Problem, pool: torch.Tensor, index, **options) -> torch.Tensor:
    index = torch.tensor(index, dtype=torch.int32) if isinstance(index, list) else index
    return serve("kda_verify", p, **{"cu_seqlens": p.cu_seqlens, **options}, state_pool=pool, state_indices=index)


def path(parent: list[int], t: int) -> list[int]:
    """The tokens from the committed state to token t, t included."""
    found = [t]
    while 0 <= parent[found[0]] < found[0]:
        found.insert(0, parent[found[0]])
    return found


def token(p: Problem, row: int, t: int) -> Problem:
    cut = {f: getattr(p, f)[row : row + 1, t : t + 1] for f in ("q", "k", "v", "g", "beta")}
    return p.map(lambda x: x, **cut)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_path_of_a_tree_is_decode_in_bits(on_verify, pool_dtype: torch.dtype, dtype: str) -> None:
    p = make(CASE.replace(dtype=dtype))
    pool, kept = pool_of(p, pool_dtype), torch.full((18, 2, 12, 16), math.nan, dtype=pool_dtype)
    start, slots = pool.clone(), torch.arange(18).view(3, 6)
    keep = {"states_out": kept, "states_out_indices": slots, "implementation": on_verify.name}
    out = verify(p, pool, INDEX, parent=TREES.to(p.q.device), **keep)
    assert bits_equal(pool, start)
    for n in range(3):
        for t in range(6):
            one = start[INDEX[n]][None].clone()
            for step in path(TREES[n].tolist(), t):
                options = {"state_pool": one, "state_indices": torch.tensor([0])}
                o = serve("kda_decode", token(p, n, step), **options, implementation=on_verify.name)
            assert bits_equal(out[n, t], o[0, 0]), (n, t)
            assert bits_equal(kept[slots[n, t]], one[0]), (n, t)


def test_a_tree_is_the_recurrence_along_its_paths(on_verify) -> None:
    p = make(CASE)
    pool = pool_of(p)
    out = verify(p, pool, INDEX, parent=TREES.to(p.q.device), implementation=on_verify.name)
    for n in range(3):
        for t in range(6):
            steps = path(TREES[n].tolist(), t)
            cut = {f: getattr(p, f)[n : n + 1, steps] for f in ("q", "k", "v", "g", "beta")}
            truth = reference(p.map(lambda x: x, h0=pool[[INDEX[n]]], **cut), gradients=False)["o"]
            assert relative_error(out[n, t], truth[0, -1]) <= tolerance("o", p.q.dtype, p.q.device.type)


def test_a_chain_is_no_tree_in_bits(on_verify) -> None:
    p = make(CASE)
    chain = torch.arange(-1, 5).expand(3, 6)
    plain = verify(p, pool_of(p), INDEX, implementation=on_verify.name)
    assert bits_equal(verify(p, pool_of(p), INDEX, parent=chain, implementation=on_verify.name), plain)


def test_ragged_trees_count_from_their_own_first_token(on_verify) -> None:
    p = make(CASE.replace(B=1, T=12, lengths=(4, 0, 6)))
    parent = torch.tensor([-1, 0, 0, 1, -1, 0, 0, 2, 3, 1, 9, 9])
    options = {"implementation": on_verify.name}
    kept = torch.full((12, 2, 12, 16), math.nan)
    slots = torch.arange(12)
    out = verify(p, pool_of(p), INDEX, parent=parent, states_out=kept, states_out_indices=slots, **options)
    assert not out[:, 10:].any() and kept[10:].isnan().all()
    for slot, (start, end) in ((INDEX[0], (0, 4)), (INDEX[2], (4, 10))):
        cut = {f: getattr(p, f)[:, start:end] for f in ("q", "k", "v", "g", "beta")}
        one = p.map(lambda x: x, cu_seqlens=None, **cut)
        states = torch.full((end - start, 2, 12, 16), math.nan)
        rows = torch.arange(end - start)[None]
        alone = verify(one, pool_of(p), [slot], parent=parent[None, start:end], states_out=states,
                       states_out_indices=rows, **options)  # fmt: skip
        assert bits_equal(out[:, start:end], alone) and bits_equal(kept[start:end], states)


@pytest.mark.parametrize("null, index", [(-1, [6, -1, 99]), (0, [0, 2, -3])], ids=str)
def test_null_rows_of_trees_and_rollbacks(on_verify, null: int, index: list[int]) -> None:
    p = make(CASE)
    dead = [n for n, i in enumerate(index) if i == null or not 0 <= i < SLOTS]
    pool, kept = pool_of(p), torch.full((19, 2, 12, 16), math.nan)
    r = KDARollback.allocate(3, 6, 2, 16, 12, p.q.device)
    for x in p.five():
        x[dead] = math.nan
    slots = 1 + torch.arange(18).view(3, 6)
    options = {"null_index": null, "implementation": on_verify.name}
    keep = {"states_out": kept, "states_out_indices": slots}
    out = verify(p, pool, index, parent=TREES.to(p.q.device), **keep, **options)
    assert not out[dead].any() and torch.isfinite(out).all() and kept[slots[dead].flatten()].isnan().all()
    out = verify(p, pool, index, rollback=r, **options)
    assert not out[dead].any() and torch.isfinite(out).all() and bits_equal(pool, pool_of(p))
    assert r.count.tolist() == [0 if n in dead else 6 for n in range(3)]
    kda_rollback(pool, torch.tensor(index), r, torch.tensor([6, 6, 6]), null_index=null,
                 implementation=on_verify.name)  # fmt: skip
    alive = [index[n] for n in range(3) if n not in dead]
    rest = [i for i in range(SLOTS) if i not in alive]
    assert bits_equal(pool[rest], pool_of(p)[rest]) and torch.isfinite(pool).all()
    assert not any(bits_equal(pool[i], pool_of(p)[i]) for i in alive)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32pool", "bf16pool"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("accepted", [[0, 0, 0], [1, 6, 3], [-4, 99, 5]], ids=str)
def test_rollback_commits_what_stands(on_rollback, pool_dtype, dtype: str, accepted: list[int]) -> None:
    name = on_rollback.name
    if dtype == "fp64" and (name == "portable" or pool_dtype == torch.bfloat16):
        pytest.skip("no fp64 call of this kind")
    p = make(CASE.replace(dtype=dtype))
    wide = torch.float64 if dtype == "fp64" else torch.float32
    pool = pool_of(p, wide if pool_dtype == torch.float32 else pool_dtype)
    start, kept = pool.clone(), pool.new_full((18, 2, 12, 16), math.nan)
    slots = torch.arange(18).view(3, 6)
    r = KDARollback.allocate(3, 8, 2, 16, 12, p.q.device, wide)
    for part in (r.k, r.u, r.g):
        part.fill_(math.nan)
    keep = {"states_out": kept, "states_out_indices": slots, "rollback": r, "implementation": name}
    out = verify(p, pool, INDEX, **keep)
    assert bits_equal(out, verify(p, pool, INDEX, implementation=name)) and bits_equal(pool, start)
    assert r.count.tolist() == [6, 6, 6]
    table = torch.tensor([INDEX, INDEX]).t()
    assert kda_rollback(pool, table[:, 1], r, torch.tensor(accepted), implementation=name) is None
    for n, count in enumerate(min(max(c, 0), 6) for c in accepted):
        got = pool[INDEX[n]]
        if count == 0:
            assert bits_equal(got, start[INDEX[n]])
        else:
            limit = tolerance("pool" if pool_dtype == torch.float32 else "bf16_pool", p.q.dtype, p.q.device.type)
            assert relative_error(got, kept[slots[n, count - 1]].double()) <= limit
    rest = [i for i in range(SLOTS) if i not in INDEX]
    assert bits_equal(pool[rest], start[rest])


def test_rollback_of_ragged_drafts_stops_at_their_ends(on_rollback) -> None:
    name, lengths = on_rollback.name, (3, 0, 5)
    p = make(CASE.replace(B=1, T=9, lengths=lengths))
    r = KDARollback.allocate(3, 5, 2, 16, 12, p.q.device)
    for part in (r.k, r.u, r.g):
        part.fill_(math.nan)
    pool, updated = pool_of(p), pool_of(p)
    verify(p, pool, INDEX, rollback=r, implementation=name)
    verify(p, updated, INDEX, update_state=True, implementation=name)
    assert r.count.tolist() == [3, 0, 5] and bits_equal(pool, pool_of(p))
    kda_rollback(pool, torch.tensor(INDEX), r, torch.tensor([5, 5, 5]), implementation=name)
    assert relative_error(pool[INDEX], updated[INDEX].double()) <= tolerance("pool", p.q.dtype, p.q.device.type)
    assert bits_equal(pool[INDEX[1]], pool_of(p)[INDEX[1]])


def test_accepting_in_parts_is_accepting_at_once(on_rollback) -> None:
    """Draft, accept two, draft on from there: the states are those of the accepted tokens alone."""
    p, name = make(CASE), on_rollback.name
    pool, expected = pool_of(p), pool_of(p)
    r = KDARollback.allocate(3, 4, 2, 16, 12, p.q.device)
    for first, count in ((0, 2), (2, 4)):
        verify(p.tokens(first, first + 4), pool, INDEX, rollback=r, implementation=name)
        kda_rollback(pool, torch.tensor(INDEX), r, torch.full((3,), count), implementation=name)
    verify(p, expected, INDEX, update_state=True, implementation=name)
    assert relative_error(pool[INDEX], expected[INDEX].double()) <= tolerance("pool", p.q.dtype, p.q.device.type)


def test_rollback_leaves_its_buffers_and_any_pool_stride_alone(on_rollback) -> None:
    p, name, poison = make(CASE), on_rollback.name, Poison()
    r = KDARollback.allocate(3, 6, 2, 16, 12, p.q.device)
    verify(p, pool_of(p), INDEX, rollback=r, implementation=name)
    held = KDARollback(*(poison.tensor(getattr(r, part), part) for part in ("k", "u", "g", "count")))
    wide = torch.full((SLOTS, 2, 12, 40), math.nan)
    pools = [pool_of(p), wide[..., 8:24]]
    pools[1].copy_(pools[0])
    for pool in pools:
        kda_rollback(pool, torch.tensor(INDEX), held, torch.tensor([6, 2, 0]), implementation=name)
    assert bits_equal(pools[0], pools[1].contiguous())
    assert wide[..., :8].isnan().all() and wide[..., 24:].isnan().all()
    poison.check()


BAD_ROLLBACK = [
    ({"rollback": object()}, "rollback"),
    ({"state_pool": torch.zeros(9, 2, 16, 12)}, "state_pool"),
    ({"state_indices": torch.zeros(4, dtype=torch.int32)}, "state_indices"),
    ({"state_indices": torch.zeros(3)}, "state_indices"),
    ({"num_accepted_tokens": torch.ones(2, dtype=torch.int32)}, "num_accepted_tokens"),
    ({"num_accepted_tokens": torch.ones(3)}, "num_accepted_tokens"),
    ({"null_index": None}, "null_index"),
    ({"implementation": "sm90"}, "sm90"),
    ({"implementation": {"forward": "eager"}}, "implementation"),
]


@pytest.mark.parametrize("change, name", BAD_ROLLBACK, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_bad_rollbacks_touch_nothing(change: dict, name: str) -> None:
    pool = torch.ones(9, 2, 12, 16)
    given = {
        "state_pool": pool, "state_indices": torch.tensor(INDEX), "num_accepted_tokens": torch.ones(3).int(),
        "rollback": KDARollback.allocate(3, 6, 2, 16, 12, "cpu"), **change,
    }  # fmt: skip
    with pytest.raises(cula.CulaError, match=name):
        kda_rollback(**given)
    assert bool((pool == 1).all())


@pytest.mark.parametrize("sizes", [(4, 6, 2, 16, 12), (3, 5, 2, 16, 12), (3, 6, 1, 16, 12), (3, 6, 2, 12, 16)])
def test_a_buffer_of_another_size_is_refused(sizes: tuple[int, ...]) -> None:
    p = make(CASE)
    pool = pool_of(p)
    with pytest.raises(cula.ShapeError, match="rollback"):
        verify(p, pool, INDEX, rollback=KDARollback.allocate(*sizes, "cpu"))
    assert bits_equal(pool, pool_of(p))


@pytest.mark.parametrize("change", [{"T": 0}, {"T": 17}, {"N": -1}, {"K": 1.5}, {"dtype": torch.bfloat16}], ids=str)
def test_sizes_that_no_buffer_has(change: dict) -> None:
    sizes = {"N": 3, "T": 6, "HV": 2, "K": 16, "V": 12, "device": "cpu", **change}
    with pytest.raises(cula.CulaError, match=next(iter(change))):
        KDARollback.allocate(**sizes)


@pytest.mark.parametrize("parent", [torch.zeros(3, 5), torch.zeros(3, 5).int(), torch.zeros(18).int(), [[0]]], ids=str)
def test_bad_parents_touch_nothing(parent) -> None:
    p = make(CASE)
    pool = pool_of(p)
    with pytest.raises(cula.CulaError, match="parent"):
        verify(p, pool, INDEX, parent=parent)
    assert bits_equal(pool, pool_of(p))
