"""The grid's property, driven by hypothesis over random problems (`make fuzz` runs many more of them)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cula.checks import grid, rows
from cula.checks.cases import BETAS, DTYPES, GATES, Case

LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from((31, 32, 33, 63, 64, 65, 127, 128, 129)), st.integers(21, 150))


@st.composite
def problems(draw) -> Case:
    """Any KDA call that is legal, small enough for a CPU."""
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=4))) if packed else None
    H = draw(st.sampled_from((1, 2, 3)))
    T = sum(lengths) + draw(st.sampled_from((0, 0, 1, 5))) if packed else draw(LENGTHS)
    K = draw(st.sampled_from((2, 7, 16, 24, 32, 60, 64)))
    if max(lengths or (T,)) > 10 * K:
        K = 16  # many updates of few channels contract a state to nothing, and its gradient with it
    return Case(
        B=1 if packed else draw(st.integers(1, 3)),
        T=T,
        H=H,
        HV=H * draw(st.sampled_from((1, 1, 2, 4))),
        K=K,
        V=draw(st.sampled_from((1, 3, 16, 20, 32, 64))),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        gate=draw(st.sampled_from(tuple(GATES))),
        beta=draw(st.sampled_from(tuple(BETAS))),
        lengths=lengths,
        state=draw(st.booleans()),
        v_first=draw(st.booleans()),
        l2norm=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 1.0, 0.1, 0.0))),
        chunk_size=draw(st.sampled_from((16, 32, 64))),
        gates=draw(st.sampled_from(("own", "same"))),
        seed=draw(st.integers(0, 2**31)),
    )


def check(function: str, subject, case: Case) -> None:
    outcomes = grid.judge(function, case, subject.label, subject.device)
    bad = [f"{x.quantity}: {x.error:.2e} > {x.tolerance:.0e} {x.reason or ''}" for x in outcomes if not x.passed]
    assert not bad, f"{function} {case.id}: {bad}"


@given(case=problems())
def test_fuzz_chunk(on_chunk, case: Case) -> None:
    check("chunk_kda", on_chunk, case)


@given(case=problems())
def test_fuzz_prefill(on_prefill, case: Case) -> None:
    check("kda_prefill", on_prefill, case)


@given(case=problems())
def test_fuzz_recurrent(on_recurrent, case: Case) -> None:
    check("fused_recurrent_kda", on_recurrent, case)


@given(case=problems())
def test_fuzz_decode_and_verify(on_decode, case: Case) -> None:
    check("kda_decode", on_decode, case)
    if on_decode.label in rows.labels("kda_verify", on_decode.device):
        check("kda_verify", on_decode, case)


@given(case=problems())
def test_fuzz_gate(on_gate, case: Case) -> None:
    check("fused_kda_gate", on_gate, case)
