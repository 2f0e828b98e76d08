"""Public faults 25 to 36: empty, tiny and many sequences, cu_seqlens of every kind, large counts and offsets."""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.properties import sequence
from cula.checks.runs import chunk, errors, fresh_pool, limits, reference, run_chunk, run_prefill, run_recurrent, serve
from cula.checks.tolerance import bits_equal, relative_error

pytestmark = pytest.mark.usefixtures("each_prefill")


def assert_right(p: Problem, got: dict, truth: dict) -> None:
    allowed = limits(p, got)
    wrong = {n: f"{e:.1e}" for n, e in errors(p, got, truth).items() if not e <= allowed[n]}
    assert not wrong, f"{p.case.id}: {wrong}"


@pytest.mark.parametrize("lengths", [(0, 64), (64, 0, 36), (0,), (0, 0, 0), (64, 0, 0, 36, 0)], ids=str)
@pytest.mark.parametrize("state", [True, False])
def test_fault_25_an_empty_sequence_passes_its_state_through(lengths: tuple[int, ...], state: bool) -> None:
    """Bitwise: final state = initial state, and the gradient of the one is the gradient of the other."""
    p = make(Case(T=sum(lengths), lengths=lengths, HV=2, K=16, V=16, state=state))
    got = run_chunk(p)
    assert_right(p, got, reference(p))
    pooled = run_prefill(p)
    for n in (n for n, length in enumerate(lengths) if not length):
        start = p.h0[n] if state else torch.zeros_like(got["final_state"][n])
        assert bits_equal(got["final_state"][n], start)
        assert bits_equal(pooled["final_state"][n].contiguous(), start)
        if state:
            assert bits_equal(got["dh0"][n], p.dht[n])


def test_fault_26_empty_and_one_token_sequences_again_and_again() -> None:
    """100 calls: zeros or the initial state every time, never what lay in the memory of the result."""
    p = make(Case(T=2, lengths=(0, 1, 0, 1), HV=2, K=16, V=16))
    expected = chunk(p)[1].clone()
    for i in range(100):
        garbage = torch.full_like(expected, math.nan)
        del garbage
        state = chunk(p)[1]
        assert bits_equal(state, expected), i
        assert not chunk(p, initial_state=None)[1][[0, 2]].any(), i


@pytest.mark.parametrize("T", range(1, 17))
def test_fault_27_very_short_prefills_are_the_recurrence(T: int) -> None:
    """1 to 16 tokens through the chunked path and token by token."""
    p = make(Case(B=2, T=T, HV=2, K=16, V=16, gate="softplus"))
    truth = reference(p)
    assert_right(p, run_chunk(p), truth)
    assert_right(p, run_prefill(p), truth)
    assert_right(p, run_recurrent(p), truth)


def test_fault_27_one_token_in_the_middle_of_a_long_batch() -> None:
    """Boundaries 0, 2048, 2049, 2561: each sequence is its own call."""
    p = make(Case(T=2561, lengths=(2048, 1, 512), K=16, V=16))
    o, state = chunk(p)
    for n, (_, start, end) in enumerate(p.spans()):
        alone, last = chunk(sequence(p, n, packed=False))
        assert bits_equal(o[:, start:end], alone) and bits_equal(state[n], last[0])


def test_fault_28_a_batch_with_cu_seqlens_names_the_batch_size() -> None:
    """B = 2 with cu_seqlens is an error that says 2."""
    p = make(Case(B=2, T=10, K=16, V=16))
    cu = torch.tensor([0, 10], dtype=torch.int32)
    for call in (lambda: chunk(p, cu_seqlens=cu, initial_state=None), lambda: serve("kda_prefill", p, cu_seqlens=cu)):
        with pytest.raises(cula.ShapeError, match="B=2"):
            call()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gradients", [False, True])
def test_fault_29_packed_is_a_loop_over_sequences(dtype: str, gradients: bool) -> None:
    """Packed outputs, states and gradients of each sequence are the bits of that sequence alone."""
    p = make(Case(T=120, lengths=(17, 64, 1, 38), H=1, HV=2, K=16, V=16, dtype=dtype, gate="zero"))
    got = run_chunk(p, gradients=gradients, fill=None)
    for n, (_, start, end) in enumerate(p.spans()):
        alone = run_chunk(sequence(p, n, packed=False), gradients=gradients, fill=None)
        for name, x in alone.items():
            whole = got[name][n : n + 1] if name in ("final_state", "dh0") else got[name][:, start:end]
            assert bits_equal(x, whole), f"{name} of sequence {n}"


@pytest.mark.parametrize("ill", [0, 1, 2])
@pytest.mark.parametrize("where", ["inputs", "state"])
def test_fault_29_nan_stays_in_its_sequence(ill: int, where: str) -> None:
    """In both directions along the pack, through inputs or through the initial state, gradients included."""
    p = make(Case(T=100, lengths=(33, 30, 37), HV=2, K=16, V=16, gate="zero"))
    _, start, end = p.spans()[ill]
    if where == "inputs":
        for x in p.five():
            x[:, start:end] = math.nan
    else:
        p.h0[ill] = math.nan
    got = run_chunk(p, fill=None)
    for n, (_, s, e) in enumerate(p.spans()):
        if n != ill:
            for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
                assert bool(torch.isfinite(got[name][:, s:e]).all()), f"{name} of sequence {n}"
            for name in ("final_state", "dh0"):
                assert bool(torch.isfinite(got[name][n]).all()), f"{name} of sequence {n}"
    assert bool(torch.isnan(got["o"][:, start:end]).any())


def test_fault_31_boundaries_of_every_kind_work_or_are_refused() -> None:
    """int32, int64, a strided slice: the same bits. float, bool, int16, a list: a clear error."""
    p = make(Case(T=100, lengths=(33, 30, 37), HV=2, K=16, V=16))
    expected = chunk(p)
    grid = torch.zeros(4, 5, dtype=torch.int64)
    grid[:, 2] = p.cu_seqlens
    for cu in (p.cu_seqlens.long(), grid[:, 2], grid.int()[:, 2], p.cu_seqlens.flip(0).flip(0)):
        leaf = p.q.clone().requires_grad_()
        o, state = chunk(p.map(lambda x: x, q=leaf), cu_seqlens=cu)
        assert bits_equal(o, expected[0]) and bits_equal(state, expected[1])
        o.sum().backward()
        assert bool(torch.isfinite(leaf.grad).all())
    for cu in (p.cu_seqlens.float(), p.cu_seqlens.bool(), p.cu_seqlens.short(), p.cu_seqlens.tolist()):
        with pytest.raises(cula.DtypeError, match="cu_seqlens"):
            chunk(p, cu_seqlens=cu)


class Watched(torch.Tensor):
    """A tensor that counts how often its values are fetched by the host."""

    fetches = 0
    FETCH = ("tolist", "item", "cpu", "numpy", "__int__", "__index__", "__bool__", "__iter__", "__getitem__")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in cls.FETCH:
            cls.fetches += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def watched(x: torch.Tensor) -> torch.Tensor:
    Watched.fetches = 0
    return x.as_subclass(Watched)


@pytest.mark.parametrize("given", [False, True], ids=["copied", "host copy given"])
def test_fault_32_boundaries_reach_the_host_once_per_call_or_never(given: bool) -> None:
    """Forward and backward fetch cu_seqlens at most once; with cu_seqlens_cpu they never look."""
    p = make(Case(T=100, lengths=(33, 30, 37), HV=2, K=16, V=16))
    host = p.cu_seqlens.clone() if given else None
    for _ in range(3):
        cu, leaf = watched(p.cu_seqlens), p.q.clone().requires_grad_()
        o, _ = chunk(p.map(lambda x: x, q=leaf), cu_seqlens=cu, cu_seqlens_cpu=host)
        o.sum().backward()
        assert Watched.fetches <= (0 if given else 1)
        cu = watched(p.cu_seqlens)
        serve("kda_prefill", p, cu_seqlens=cu, cu_seqlens_cpu=host)
        assert Watched.fetches <= (0 if given else 1)


def test_fault_32_the_watch_sees_a_fetch() -> None:
    """Each way to the host counts, so that the test above can fail."""
    cu = watched(torch.tensor([0, 5]))
    cu.tolist()
    int(cu[1])
    assert Watched.fetches >= 2


def test_fault_33_more_sequences_times_heads_than_a_grid_axis_holds() -> None:
    """2050 packed documents of 32 value heads, forward and backward: the last ones are right; and a decode of 2050."""
    p = make(Case(T=4100, lengths=(2,) * 2050, H=32, HV=32, K=2, V=2, state=False, chunk_size=16))
    leaf = p.v.clone().requires_grad_()
    o, state = chunk(p.map(lambda x: x, v=leaf))
    o.backward(p.do)
    tail = p.map(lambda x: x, **{n: getattr(p, n)[:, -6:] for n in ("q", "k", "v", "g", "beta")})
    leaf_tail = tail.v.clone().requires_grad_()
    alone, last = chunk(tail.map(lambda x: x, v=leaf_tail), cu_seqlens=torch.tensor([0, 2, 4, 6]))
    alone.backward(p.do[:, -6:])
    assert bits_equal(alone, o[:, -6:]) and bits_equal(last, state[-3:])
    assert bits_equal(leaf_tail.grad, leaf.grad[:, -6:])
    rows = make(Case(B=2050, T=1, H=32, HV=32, K=2, V=2))
    pool, index = fresh_pool(rows, slots=4101)
    out = serve("kda_decode", rows, state_pool=pool, state_indices=index)
    one = rows.map(lambda x: x, **{n: getattr(rows, n)[-1:] for n in ("q", "k", "v", "g", "beta")})
    single, where = fresh_pool(rows, slots=4101)
    assert bits_equal(serve("kda_decode", one, state_pool=single, state_indices=where[-1:])[0], out[-1])


def far_apart(x: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """A copy of `x` whose slices along `dim` lie `stride` elements apart, in memory that is never touched between."""
    base = torch.empty((x.shape[dim] - 1) * stride + x.numel() + 64, dtype=x.dtype)
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    return torch.as_strided(base, x.shape, strides).copy_(x)


def test_fault_34_offsets_beyond_two_to_the_31_elements() -> None:
    """Strides put the second token and the last slot beyond 2^31 elements: a 32-bit offset would wrap."""
    far = 2**31 + 64
    p = make(Case(T=2, K=16, V=16, dtype="bf16"))
    wide = p.map(lambda x: x, q=far_apart(p.q, 1, far), v=far_apart(p.v, 1, far))
    assert bits_equal(chunk(wide)[0], chunk(p)[0])
    rows = make(Case(B=1, T=1, K=16, V=16, v_first=True))
    plain = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    pool = far_apart(plain, 0, far)
    for function, options in (("kda_decode", {}), ("kda_verify", {"update_state": True})):
        outs = [serve(function, rows, state_pool=x, state_indices=torch.tensor([1]), **options) for x in (pool, plain)]
        assert bits_equal(*outs) and bits_equal(pool[1], plain[1]), function
    outs = [serve("kda_prefill", rows, state_pool=x, read_indices=torch.tensor([1])) for x in (pool, plain)]
    assert bits_equal(*outs) and bits_equal(pool[1], plain[1])


@pytest.mark.parametrize("lengths", [(513, 511), (257, 1, 253), (1, 2, 1, 63, 2)], ids=str)
def test_fault_35_tails_of_one_and_two_tokens(lengths: tuple[int, ...]) -> None:
    """Last chunks of length 1 and 2 with the gate in the kernel (the convolution's part of the fault is not here)."""
    p = make(Case(T=sum(lengths), lengths=lengths, K=16, V=16, gate="softplus", beta="logits"))
    assert_right(p, run_chunk(p, gradients=False), reference(p, gradients=False))
    for n, (_, start, end) in enumerate(p.spans()):
        alone = chunk(sequence(p, n, packed=False))
        assert relative_error(alone[0], chunk(p)[0][:, start:end].double()) <= 1e-5


def test_fault_36_a_new_length_compiles_nothing() -> None:
    """50 lengths after the first call: no compilation of compiled loops (plain torch has none)."""
    numba = pytest.importorskip("numba")
    from numba.core import event

    def calls(T: int) -> None:
        p = make(Case(T=T, K=16, V=16))
        chunk(p)
        run_prefill(p, fill=None)
        run_recurrent(p, fill=None)
        serve("kda_decode", p.tokens(0, 1), state_pool=torch.zeros(3, 1, 16, 16), state_indices=torch.tensor([1]))

    calls(5)
    with event.install_recorder("numba:compile") as recorder:
        for T in range(6, 56):
            calls(T)
    assert numba.__version__ and len(recorder.buffer) == 0
