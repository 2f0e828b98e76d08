"""kda_prefill: which slot is read, which is written, what stays untouched, and what comes back."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make, normal
from cula.checks.poison import Poison
from cula.checks.runs import chunk, serve
from cula.checks.tolerance import bits_equal, relative_error, tolerance

pytestmark = pytest.mark.usefixtures("each_prefill")

CASE = Case(B=3, T=40, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True, v_first=True)
PACKED = CASE.replace(B=1, T=70, lengths=(33, 0, 30))


def prefill(p: Problem, **options) -> torch.Tensor:
    return serve("kda_prefill", p, **{"cp_mode": False, "cu_seqlens": p.cu_seqlens, **options})


def pool_of(p: Problem, slots: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random slots, so that every slot has bits of its own."""
    return normal(slots, p.case.HV, p.case.V, p.case.K, seed=5, dtype=dtype)


def expected_of(p: Problem, start: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final states of chunk_kda from the given V-first states."""
    return chunk(p, initial_state=start, state_v_first=True)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_without_a_pool_it_starts_from_zero(case: Case) -> None:
    p = make(case)
    out = prefill(p)
    assert out.shape == p.v.shape and out.dtype == p.v.dtype
    assert bits_equal(out, expected_of(p, None)[0])


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_sequence_n_uses_slot_n_by_default(case: Case) -> None:
    p = make(case)
    pool = pool_of(p)
    before = pool.clone()
    out = prefill(p, state_pool=pool)
    o, state = expected_of(p, before[:3])
    assert bits_equal(out, o) and bits_equal(pool[:3], state) and bits_equal(pool[3:], before[3:])


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_reads_one_slot_and_writes_another(case: Case, kind: torch.dtype) -> None:
    p = make(case)
    pool = pool_of(p)
    before = pool.clone()
    read = torch.tensor([[6, -9], [2, -9], [4, -9]], dtype=kind)[:, 0]
    write = torch.tensor([[0, 3], [0, 7], [0, 1]], dtype=kind)[:, 1]
    out = prefill(p, state_pool=pool, read_indices=read, write_indices=write)
    o, state = expected_of(p, before[[6, 2, 4]])
    assert bits_equal(out, o) and bits_equal(pool[[3, 7, 1]], state)
    assert bits_equal(pool[[0, 2, 4, 5, 6]], before[[0, 2, 4, 5, 6]])


def test_one_slot_may_be_read_by_many() -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    options = {"read_indices": torch.tensor([5, 5, 5]), "write_indices": torch.tensor([1, 5, 2])}
    out = prefill(p, state_pool=pool, **options)
    o, state = expected_of(p, before[[5, 5, 5]])
    assert bits_equal(out, o) and bits_equal(pool[[1, 5, 2]], state)


NULLS = [
    (-1, [3, -1, 0], [3, 2, -1]),
    (0, [3, 0, 5], [3, 2, 0]),
    (0, [0, 0, 0], [0, 0, 0]),
    (-1, [3, 99, -7], [8, 2, -100]),
    (7, [3, 7, 0], [7, 2, 1]),
]


@pytest.mark.parametrize("null, read, write", NULLS, ids=str)
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_null_reads_zero_and_null_writes_nothing_independently(case: Case, null: int, read: list, write: list) -> None:
    p = make(case)
    pool = pool_of(p)
    before = pool.clone()

    def missing(i: int) -> bool:
        return i == null or not 0 <= i < 8

    start = torch.stack([torch.zeros_like(before[0]) if missing(i) else before[i] for i in read])
    options = {"read_indices": torch.tensor(read), "write_indices": torch.tensor(write), "null_index": null}
    out = prefill(p, state_pool=pool, **options)
    o, state = expected_of(p, start)
    assert bits_equal(out, o)
    for slot in range(8):
        expected = before[slot]
        for n in (n for n, i in enumerate(write) if i == slot and not missing(i)):
            expected = state[n]
        assert bits_equal(pool[slot], expected), f"slot {slot}"


def test_null_read_with_the_default_write_writes_nothing() -> None:
    p = make(CASE)
    pool = pool_of(p)
    before = pool.clone()
    prefill(p, state_pool=pool, read_indices=torch.tensor([-1, -1, 4]))
    assert bits_equal(pool[[0, 1, 2, 3, 5, 6, 7]], before[[0, 1, 2, 3, 5, 6, 7]])
    assert not bits_equal(pool[4], before[4])


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_has_initial_state_false_keeps_a_recycled_nan_out(case: Case) -> None:
    p = make(case)
    pool = pool_of(p)
    pool[[0, 2]] = math.nan
    start = pool[:3].clone()
    start[[0, 2]] = 0.0
    out = prefill(p, state_pool=pool, has_initial_state=torch.tensor([False, True, False]))
    o, state = expected_of(p, start)
    assert bits_equal(out, o) and bits_equal(pool[:3], state)


def test_zero_length_sequences_keep_their_state() -> None:
    p = make(PACKED.replace(lengths=(0, 33, 0), T=33))
    for dtype in (torch.float32, torch.bfloat16):
        pool = pool_of(p, dtype=dtype)
        before = pool.clone()
        prefill(p, state_pool=pool)
        assert bits_equal(pool[[0, 2]], before[[0, 2]])
        pool = before.clone()
        read, write = torch.tensor([4, 5, -1]), torch.tensor([0, 1, 2])
        prefill(p, state_pool=pool, read_indices=read, write_indices=write)
        assert bits_equal(pool[0], before[4]) and not pool[2].any()
        pool = before.clone()
        prefill(p, state_pool=pool, has_initial_state=torch.tensor([False, True, True]))
        assert not pool[0].any() and bits_equal(pool[2], before[2])


@pytest.mark.parametrize("T", [0, 1])
def test_no_tokens_and_one_token(T: int) -> None:
    p = make(CASE.replace(T=T))
    pool = pool_of(p)
    before = pool.clone()
    out = prefill(p, state_pool=pool)
    o, state = expected_of(p, before[:3])
    assert bits_equal(out, o) and bits_equal(pool[:3], state)
    assert T or bits_equal(pool, before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_bf16_pool_holds_the_rounded_states(dtype: str) -> None:
    p = make(CASE.replace(dtype=dtype))
    coarse = pool_of(p, dtype=torch.bfloat16)
    fine = coarse.float()
    outs = [prefill(p, state_pool=pool) for pool in (coarse, fine)]
    assert relative_error(coarse[:3], fine[:3].double()) <= tolerance("bf16_pool", p.q.dtype)
    assert bits_equal(outs[0], outs[1]) and bits_equal(coarse[:3], fine[:3].bfloat16())


def strided_pools(p: Problem) -> list[tuple[str, torch.Tensor]]:
    HV, V, K = p.case.HV, p.case.V, p.case.K
    wide = torch.full((8, HV + 3, V, K), math.nan)[:, 1 : 1 + HV]
    flat = torch.full((8, HV * V * K + 40), math.nan)[:, 8 : 8 + HV * V * K].view(8, HV, V, K)
    every = torch.full((16, HV, V, K), math.nan)[1::2]
    return [("heads of a wider pool", wide), ("padded slots", flat), ("every second slot", every)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_slot_strides_are_free_and_padding_stays_untouched(which: int) -> None:
    p = make(CASE)
    plain = pool_of(p)
    label, pool = strided_pools(p)[which]
    pool.copy_(plain)
    base, place = pool._base if pool._base is not None else pool, pool.data_ptr()
    before = base.clone()
    options = {"read_indices": torch.tensor([6, 2, 4])}
    out, expected = (prefill(p, state_pool=x, **options) for x in (pool, plain))
    assert bits_equal(out, expected) and bits_equal(pool, plain), label
    assert pool.data_ptr() == place
    torch.as_strided(before, pool.shape, pool.stride(), pool.storage_offset()).copy_(plain)
    assert bits_equal(base, before), f"{label}: the padding was written"


def test_out_is_filled_and_returned() -> None:
    p = make(PACKED)
    expected = prefill(p)
    for out in (torch.full_like(p.v, math.nan), torch.full((1, 70, 5, 12), math.nan)[:, :, 2:4]):
        got = prefill(p, out=out)
        assert got is out and bits_equal(out.contiguous(), expected)
        assert not out[:, 63:].any(), "rows after the last sequence are zeros"
    wide = torch.full((1, 70, 5, 12), math.nan)
    prefill(p, out=wide[:, :, 2:4])
    assert torch.isnan(wide[:, :, [0, 1, 4]]).all()


def test_it_runs_as_under_no_grad() -> None:
    p = make(CASE)
    leaves = {name: getattr(p, name).requires_grad_() for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    pool = pool_of(p)
    out = prefill(p.map(lambda x: x, **leaves), state_pool=pool)
    assert not out.requires_grad and not pool.requires_grad
    assert torch.is_grad_enabled()


def test_finished_inputs_are_the_same_call_without_activations() -> None:
    raw = make(CASE.replace(dtype="fp64"))
    from cula.kda import fused_kda_gate

    gate = fused_kda_gate(raw.g, raw.A_log, raw.dt_bias, None, torch.float64)
    norm = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (raw.q, raw.k)]
    done = raw.map(lambda x: x, q=norm[0], k=norm[1], g=gate, beta=raw.beta.sigmoid(), A_log=None, dt_bias=None)
    flags = {"gate_is_raw": False, "beta_is_logits": False, "normalize_qk": False}
    assert relative_error(serve("kda_prefill", done, **flags), prefill(raw)) <= 1e-10


def test_defaults_are_raw_gate_logits_and_norm() -> None:
    p = make(CASE)
    from cula.kda import kda_prefill

    assert bits_equal(kda_prefill(*p.five(), A_log=p.A_log, dt_bias=p.dt_bias, cp_mode=False), prefill(p))
    with pytest.raises(cula.CulaError, match="A_log"):
        kda_prefill(*p.five())


def test_a_doubled_sigmoid_needs_logits() -> None:
    p = make(CASE)
    doubled = prefill(p, allow_neg_eigval=True)
    assert bits_equal(doubled, chunk(p, initial_state=None, allow_neg_eigval=True)[0])
    with pytest.raises(cula.CulaError, match="allow_neg_eigval"):
        prefill(p, allow_neg_eigval=True, beta_is_logits=False)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_inputs_are_not_written(case: Case) -> None:
    poison = Poison()
    p = make(case)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
    held = {name: poison.tensor(getattr(p, name), name) for name in names if getattr(p, name) is not None}
    index = poison.tensor(torch.tensor([1, -1, 4]), "read_indices")
    mask = poison.tensor(torch.tensor([True, True, False]), "has_initial_state")
    prefill(p.map(lambda x: x, **held), state_pool=pool_of(p), read_indices=index, has_initial_state=mask)
    poison.check()


@pytest.mark.parametrize("value", [None, False, "off", "auto"])
def test_cp_mode_that_does_not_engage_changes_no_bit(value) -> None:
    p = make(PACKED)
    assert bits_equal(prefill(p, cp_mode=value), prefill(p))
