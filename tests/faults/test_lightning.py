"""Public faults again, of Lightning Attention: memory, lengths, offsets, races. The grid has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cula
from cula.checks.cases import Case, make, normal
from cula.checks.runs import chunk, fresh_pool, reference, run_chunk, run_decode, run_prefill, run_verify, serve
from cula.checks.tolerance import bits_equal, relative_error
from cula.host import varlen
from cula.ops.common import arguments


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.isnan(torch.empty(4)).all())
    yield
    torch.use_deterministic_algorithms(False)


CASES = [
    Case(B=2, T=70, H=1, HV=2, K=20, V=36, gate="slopes_mixed"),
    Case(T=70, lengths=(0, 33, 1, 30), HV=2, K=16, V=16, dtype="bf16", gate="slopes_fla"),
    Case(B=2, T=130, HV=1, K=16, V=16, dtype="fp16", v_first=True, chunk_size=32, state=False, gate="slopes_last"),
    Case(B=1, T=0, K=16, V=16, gate="slopes_zero"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fault_19_no_result_depends_on_memory_that_nobody_wrote(on_lightning_chunk, case: Case, filled_memory) -> None:
    p = make(case)
    short, name = p if case.lengths is not None else p.tokens(0, min(case.T, 3)), on_lightning_chunk.name
    runs = [lambda: run_chunk(p, name), lambda: run_prefill(p, name)]
    if case.lengths is None and case.T:
        runs += [lambda: run_decode(short, name), lambda: run_verify(short, name)]
    dirty = [run() for run in runs]
    torch.use_deterministic_algorithms(False)
    for run, got in zip(runs, dirty):
        for quantity, x in run().items():
            assert bits_equal(x, got[quantity]) and bool(torch.isfinite(x).all()), quantity


def test_fault_13_large_values_in_fp16_do_not_overflow_the_state(on_lightning_chunk) -> None:
    p = make(Case(T=200, K=16, V=16, dtype="fp16", gate="slopes_zero", scale=1e-3))
    p = p.map(lambda x: x, v=torch.full_like(p.v, 3e4))
    got = run_chunk(p, on_lightning_chunk.name, gradients=False)
    truth = reference(p, gradients=False)
    assert relative_error(got["o"], truth["o"]) <= 6e-3
    assert relative_error(got["final_state"], truth["final_state"]) <= 6e-3


def test_fault_32_boundaries_reach_the_host_once_per_call_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    read, copy = [], varlen.to_host
    monkeypatch.setattr(arguments, "to_host", lambda x: read.append(1) or copy(x))
    p = make(Case(T=70, lengths=(3, 0, 67), K=16, V=16, gate="slopes_fla"))
    leaf = p.v.clone().requires_grad_()
    for given in (None, p.cu_seqlens.clone()):
        read.clear()
        chunk(p.map(lambda x: x, v=leaf), cu_seqlens_cpu=given)[0].sum().backward()
        assert len(read) == 1  # of a CPU tensor, and none in the backward


def test_fault_33_more_sequences_times_heads_than_a_grid_axis_holds(on_lightning_chunk) -> None:
    p = make(Case(T=4100, lengths=(2,) * 2050, H=32, HV=32, K=2, V=2, state=False, gate="slopes_fla"))
    leaf, name = p.v.clone().requires_grad_(), {"implementation": on_lightning_chunk.name}
    o, state = chunk(p.map(lambda x: x, v=leaf), **name)
    o.backward(p.do)
    tail = p.map(lambda x: x, **{n: getattr(p, n)[:, -6:] for n in p.names})
    leaf_tail = tail.v.clone().requires_grad_()
    alone, last = chunk(tail.map(lambda x: x, v=leaf_tail), cu_seqlens=torch.tensor([0, 2, 4, 6]), **name)
    alone.backward(p.do[:, -6:])
    assert bits_equal(alone, o[:, -6:]) and bits_equal(last, state[-3:])
    assert bits_equal(leaf_tail.grad, leaf.grad[:, -6:])
    rows = make(Case(B=2050, T=1, H=32, HV=32, K=2, V=2, gate="slopes_fla"))
    pool, index = fresh_pool(rows, slots=4101)
    out = serve("decode", rows, state_pool=pool, state_indices=index)
    one = rows.map(lambda x: x, **{n: getattr(rows, n)[-1:] for n in rows.names})
    single, where = fresh_pool(rows, slots=4101)
    assert bits_equal(serve("decode", one, state_pool=single, state_indices=where[-1:])[0], out[-1])


def far_apart(x: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """A copy of `x` whose slices along `dim` lie `stride` elements apart, in memory that is never touched between."""
    base = torch.empty((x.shape[dim] - 1) * stride + x.numel() + 64, dtype=x.dtype)
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    return torch.as_strided(base, x.shape, strides).copy_(x)


def test_fault_34_offsets_beyond_two_to_the_31_elements() -> None:
    far = 2**31 + 64
    p = make(Case(T=2, K=16, V=16, dtype="bf16", gate="slopes_alibi"))
    wide = p.map(lambda x: x, q=far_apart(p.q, 1, far), v=far_apart(p.v, 1, far))
    assert bits_equal(chunk(wide)[0], chunk(p)[0])
    rows = make(Case(B=1, T=1, K=16, V=16, v_first=True, gate="slopes_alibi"))
    plain = normal(2, 1, 16, 16, seed=1)
    pool = far_apart(plain, 0, far)
    index = torch.tensor([1])
    for what, options in (("decode", {}), ("verify", {"update_state": True})):
        outs = [serve(what, rows, state_pool=x, state_indices=index, **options) for x in (pool, plain)]
        assert bits_equal(*outs) and bits_equal(pool[1], plain[1]), what
    outs = [serve("prefill", rows, state_pool=x, read_indices=index) for x in (pool, plain)]
    assert bits_equal(*outs) and bits_equal(pool[1], plain[1])


def test_fault_36_a_new_length_compiles_nothing() -> None:
    pytest.importorskip("numba")
    from numba.core import event

    def calls(T: int) -> None:
        p = make(Case(T=T, K=16, V=16, gate="slopes_fla"))
        chunk(p)
        run_prefill(p, fill=None)
        serve("decode", p.tokens(0, 1), state_pool=torch.zeros(3, 1, 16, 16), state_indices=torch.tensor([1]))

    calls(5)
    with event.install_recorder("numba:compile") as recorder:
        for T in range(6, 56):
            calls(T)
    assert len(recorder.buffer) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_fault_71_the_same_calls_again_and_again(on_lightning_decode, threads: int) -> None:
    p = make(Case(B=4, T=1, H=2, HV=2, K=64, V=64, gate="slopes_fla"))
    long = make(Case(B=1, T=100, H=3, HV=3, K=32, V=130, gate="slopes_fla"))
    start, index = normal(9, 2, 64, 64, seed=3), torch.tensor([3, 1, -1, 0])
    expected = None
    torch.set_num_threads(threads)
    try:
        for i in range(60):
            pool = start.clone()
            out = serve("decode", p, state_pool=pool, state_indices=index, implementation=on_lightning_decode.name)
            found = [out, pool, *(chunk(long) if i % 20 == 0 else ())]
            expected = expected or found
            assert all(map(bits_equal, found, expected)), i
    finally:
        torch.set_num_threads(1)


def test_columns_have_the_same_bits_however_the_work_is_cut() -> None:
    """Few heads are cut into parts of V, by the number of threads."""
    p = make(Case(T=100, H=1, HV=1, K=20, V=200, gate="slopes_fla"))
    whole = chunk(p)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert all(map(bits_equal, chunk(p), whole))
        finally:
            torch.set_num_threads(1)


def test_debug_checks_values_that_only_a_device_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_DEBUG", "1")
    p = make(Case(B=2, T=1, K=16, V=16, gate="slopes_fla"))
    with pytest.raises(cula.RangeError, match="state_indices"):
        serve("decode", p, state_pool=torch.zeros(3, 1, 16, 16), state_indices=torch.tensor([1, 7]))
