"""Public faults 15 to 24: tail rows, padding, memory that nobody wrote, shapes that read outside."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import (
    chunk,
    errors,
    fresh_pool,
    limits,
    reference,
    run_chunk,
    run_decode,
    run_prefill,
    run_recurrent,
    run_verify,
    serve,
)
from cula.checks.tolerance import bits_equal, relative_error, tolerance

pytestmark = pytest.mark.usefixtures("each_prefill")

TAILS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 500, 1000]


def assert_right(p: Problem, got: dict, truth: dict) -> None:
    allowed = limits(p, got)
    wrong = {n: f"{e:.1e}" for n, e in errors(p, got, truth).items() if not e <= allowed[n]}
    assert not wrong, f"{p.case.id}: {wrong}"


def rising_gate(p: Problem) -> Problem:
    """A decay that differs at every row, so that the wrong last row shows in the state."""
    T = p.case.T
    slope = torch.linspace(0.001, 0.4, T, dtype=torch.float64).view(1, T, 1, 1)
    return p.map(lambda x: x, g=(-slope).expand(p.g.shape).to(p.g.dtype).contiguous())


@pytest.mark.parametrize("T", TAILS)
def test_fault_15_the_final_states_decay_comes_from_the_last_valid_row(T: int) -> None:
    """Tails of every length with a different decay per row; the state is held to 1e-6, then continued from."""
    p = rising_gate(make(Case(T=T, HV=2, K=16, V=16)))
    truth = reference(p, gradients=False)
    got = run_chunk(p, gradients=False)
    assert relative_error(got["final_state"], truth["final_state"]) < 1e-6
    pooled = run_prefill(p)
    assert relative_error(pooled["final_state"], truth["final_state"]) < 1e-6
    if T > 1:
        cut = max(1, T - 7)
        first = chunk(p.tokens(0, cut))[1]
        second = chunk(p.tokens(cut, T), initial_state=first)[1]
        assert relative_error(second, truth["final_state"]) < 1e-6


def test_fault_15_every_split_point_gives_the_one_shot_state() -> None:
    """33 tokens cut after each of them, by chunk and by prefill over a pool."""
    p = rising_gate(make(Case(T=33, HV=2, K=16, V=16)))
    expected = chunk(p)[1].double()
    for cut in range(34):
        first = chunk(p.tokens(0, cut))[1]
        got = chunk(p.tokens(cut, 33), initial_state=first)[1]
        assert relative_error(got, expected) < 1e-6, cut
        pool, index = fresh_pool(p)
        for part in (p.tokens(0, cut), p.tokens(cut, 33)):
            serve("kda_prefill", part, state_pool=pool, read_indices=index)
        assert relative_error(pool[index.long()].mT, expected) < 1e-6, cut


@pytest.mark.parametrize("lengths, ill", [((500, 12), 1), ((12, 500), 0), ((37, 27, 64), 1)])
def test_fault_16_the_rows_behind_a_sequence_are_the_next_sequences(lengths: tuple[int, ...], ill: int) -> None:
    """NaN in the neighbour: a tail that is not masked before k^T v takes it in."""
    p = make(Case(T=sum(lengths), lengths=lengths, HV=2, K=16, V=16))
    clean = run_chunk(p, gradients=True, fill=None)
    _, start, end = p.spans()[ill]
    for x in (*p.five(), p.do):
        x[:, start:end] = math.nan
    got = run_chunk(p, gradients=True, fill=None)
    for n, (_, s, e) in enumerate(p.spans()):
        if n == ill:
            continue
        for name in ("final_state", "dh0"):
            assert bits_equal(got[name][n], clean[name][n]), name
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert bits_equal(got[name][:, s:e], clean[name][:, s:e]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_17_a_dense_tail_with_the_gate_in_the_kernel(dtype: str) -> None:
    """1500 tokens: a tail of 28 rows with softplus in the kernel, forward."""
    p = make(Case(T=1500, K=16, V=16, dtype=dtype, gate="softplus", beta="logits", l2norm=True))
    assert_right(p, run_chunk(p, gradients=False), reference(p, gradients=False))


@pytest.mark.parametrize("K", [60, 96, 100, 192])
@pytest.mark.parametrize("fill", [math.nan, 1e30], ids=["nan", "1e30"])
def test_fault_18_head_sizes_that_are_no_power_of_two_in_poisoned_memory(K: int, fill: float) -> None:
    """Every input ends at poison: an unmasked load of the last channels meets it."""
    p = make(Case(B=2, T=5, HV=2, K=K, V=20, gate="softplus", beta="logits", l2norm=True))
    truth = reference(p)
    assert_right(p, run_chunk(p, fill=fill), truth)
    for run in (run_recurrent, run_prefill, run_decode, run_verify):
        assert_right(p, run(p, fill=fill), truth)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch.empty gives NaN (integers: their largest), so that what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CASES = [
    Case(B=2, T=70, H=1, HV=2, K=20, V=36, gate="softplus", beta="logits", l2norm=True),
    Case(T=70, lengths=(0, 33, 1, 30), HV=2, K=16, V=16, dtype="bf16", gate="sigmoid"),
    Case(B=2, T=130, HV=1, K=16, V=16, dtype="fp16", v_first=True, chunk_size=32, state=False),
    Case(B=1, T=0, K=16, V=16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_fault_19_no_result_depends_on_memory_that_nobody_wrote(case: Case, filled_memory: None) -> None:
    """Workspaces, outputs and pools start as NaN; results keep the bits they had without."""
    p = make(case)
    short = p if case.lengths is not None else p.tokens(0, min(case.T, 3))
    runs = [lambda: run_chunk(p), lambda: run_prefill(p), lambda: run_recurrent(p)]
    if case.lengths is None and case.T:
        runs += [lambda: run_decode(short), lambda: run_verify(short)]
    dirty = [run() for run in runs]
    torch.use_deterministic_algorithms(False)
    for run, got in zip(runs, dirty):
        for name, x in run().items():
            assert bits_equal(x, got[name]), name
            assert bool(torch.isfinite(x).all()), name


def test_fault_19_poisoned_memory_really_is_poisoned(filled_memory: None) -> None:
    """The fixture does what it says, so that the test above can fail."""
    assert bool(torch.isnan(torch.empty(4)).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_20_rows_behind_the_last_sequence_are_zeros(dtype: str) -> None:
    """128 rows, 100 of them tokens: the rest of o and of a given `out` is zero, whatever was there."""
    p = make(Case(T=128, lengths=(40, 60), HV=2, K=16, V=16, dtype=dtype))
    for x in p.five():
        x[:, 100:] = math.nan
    assert not chunk(p)[0][:, 100:].any()
    out = torch.full_like(p.v, 7.0)
    serve("kda_prefill", p, cu_seqlens=p.cu_seqlens, out=out)
    assert not out[:, 100:].any() and bool(torch.isfinite(out).all())
    draft = make(Case(T=9, lengths=(2, 4), HV=2, K=16, V=16, dtype=dtype))
    for x in draft.five():
        x[:, 6:] = math.nan
    pool, index = fresh_pool(draft)
    out = torch.full_like(draft.v, 7.0)
    slots = {"state_pool": pool, "state_indices": index}
    serve("kda_verify", draft, cu_seqlens=draft.cu_seqlens, out=out, **slots)
    assert not out[:, 6:].any() and out[:, :6].any()


@pytest.mark.parametrize("bad", [[1, 40, 100], [0, 60, 40], [0, 40, 129], [-1, 40, 100]])
def test_fault_21_boundaries_that_drop_or_invent_tokens(bad: list[int]) -> None:
    """Ending early is defined (zero rows); starting late, decreasing and ending beyond T are errors."""
    p = make(Case(T=128, lengths=(40, 60), K=16, V=16))
    cu = torch.tensor(bad, dtype=torch.int32)
    with pytest.raises(cula.RangeError, match="cu_seqlens"):
        chunk(p, cu_seqlens=cu)
    with pytest.raises(cula.RangeError, match="cu_seqlens"):
        serve("kda_prefill", p, cu_seqlens=cu)
    early = chunk(p, cu_seqlens=torch.tensor([0, 40, 50], dtype=torch.int32))
    assert bits_equal(early[0][:, :50], chunk(p)[0][:, :50]) and not early[0][:, 50:].any()


def test_fault_22_parameters_are_initialised_by_whoever_makes_them(filled_memory: None) -> None:
    """A layer built while empty memory is NaN has finite parameters; so has every drawn problem."""
    from cula.layers import KimiDeltaAttention

    layer = KimiDeltaAttention(32, num_heads=2, head_dim=16)
    for name, x in [*layer.named_parameters(), *layer.named_buffers()]:
        assert bool(torch.isfinite(x).all()), name
    p = make(Case(T=5, gate="softplus"))
    assert all(bool(torch.isfinite(x).all()) for x in p.inputs().values())


WRONG = [
    ("g", lambda p: {"g": p.g[..., 0]}),
    ("g", lambda p: {"g": p.g[..., :1]}),
    ("g", lambda p: {"g": p.g[:, :, :1]}),
    ("v", lambda p: {"v": p.v.repeat(1, 1, 3, 1)[:, :, :5]}),
    ("beta", lambda p: {"beta": p.beta[..., None]}),
    ("beta", lambda p: {"beta": p.beta[:, :-1]}),
    ("k", lambda p: {"k": p.k[:, :, :, :-1]}),
]


@pytest.mark.parametrize("name, change", WRONG, ids=[f"{i}-{name}" for i, (name, _) in enumerate(WRONG)])
def test_fault_23_a_wrong_shape_is_refused_not_read(name: str, change) -> None:
    """A gate per head, of the wrong heads, broadcastable or short: a shape error before anything runs."""
    p = make(Case(B=2, T=9, H=2, HV=4, K=16, V=16))
    with pytest.raises(cula.ShapeError):
        chunk(p.map(lambda x: x, **change(p)))
    with pytest.raises(cula.ShapeError):
        serve("kda_prefill", p.map(lambda x: x, **change(p)))


def test_fault_23_a_value_head_of_512() -> None:
    """V = 512 with K = 64 is served and right."""
    p = make(Case(T=20, K=64, V=512, gate="mild"))
    assert_right(p, run_chunk(p), reference(p))


@pytest.mark.parametrize("gate", ["mild", "softplus"])
def test_fault_24_no_result_depends_on_a_tunable(gate: str) -> None:
    """Chunk sizes 16, 32 and 64 agree within rounding, gradients too."""
    p = make(Case(B=2, T=130, H=1, HV=2, K=32, V=32, gate=gate))
    found = [run_chunk(p, chunk_size=c) for c in (16, 32, 64)]
    truth = reference(p)
    for got in found:
        assert_right(p, got, truth)
    for name in found[0]:
        assert relative_error(found[0][name], found[2][name].double()) <= 2 * tolerance(name, p.q.dtype)
