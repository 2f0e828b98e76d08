"""chunk_kda, sentence by sentence: what each flag and tensor means, what comes back, and in which dtype and layout."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.checks.cases import DTYPES, Case, make
from cula.checks.poison import poisoned
from cula.checks.runs import chunk, k_first, reference
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import chunk_kda

pytestmark = pytest.mark.usefixtures("each_chunk")

SMALL = Case(B=2, T=37, H=1, HV=2, K=16, V=12)
PACKED = Case(T=70, H=1, HV=2, K=16, V=12, lengths=(0, 33, 1, 30))
RAW = SMALL.replace(gate="softplus", beta="logits", l2norm=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes_of_the_results(dtype: str) -> None:
    p = make(SMALL.replace(dtype=dtype))
    o, state = chunk(p)
    assert (o.shape, o.dtype) == (p.v.shape, DTYPES[dtype])
    assert (tuple(state.shape), state.dtype) == ((2, 2, 16, 12), p.h0.dtype)
    assert p.h0.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert chunk(p, state_v_first=True, initial_state=None)[1].shape == (2, 2, 12, 16)


def test_final_state_is_none_unless_asked_for() -> None:
    p = make(SMALL)
    result = chunk_kda(*p.five())
    assert len(result) == 2 and result[1] is None
    q = p.q.clone().requires_grad_()
    result = chunk_kda(q, *p.five()[1:])
    assert len(result) == 2 and result[1] is None and result[0].requires_grad


GATE_DTYPES = [("fp64", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("bf16", "fp64"), ("fp16", "bf16")]


@pytest.mark.parametrize("dtype, other", GATE_DTYPES)
def test_gate_tensors_may_have_any_floating_dtype(dtype: str, other: str) -> None:
    p = make(RAW.replace(dtype=dtype))
    names = ("g", "beta", "A_log", "dt_bias")
    for mixed in ((name,) for name in names):
        changed = p.map(lambda x: x, **{name: getattr(p, name).to(DTYPES[other]) for name in mixed})
        truth = reference(changed, gradients=False)
        o, state = chunk(changed)
        limit = tolerance("o", p.q.dtype)
        assert relative_error(o, truth["o"]) <= limit, mixed
        assert relative_error(state, truth["final_state"]) <= limit, mixed


def test_bf16_inputs_with_fp32_gates_use_all_digits_of_the_gates() -> None:
    p = make(Case(T=64, K=16, V=16, dtype="bf16", gate="mild"))
    coarse = p.map(lambda x: x, g=p.g.bfloat16().float())
    truth, wrong = reference(p, gradients=False), reference(coarse, gradients=False)
    got = chunk(p)[1]
    assert relative_error(got, truth["final_state"]) < relative_error(wrong["final_state"], truth["final_state"])


def test_a_log_and_dt_bias_come_in_two_shapes() -> None:
    p = make(RAW)
    o, state = chunk(p)
    for A_log in (p.A_log, p.A_log.view(1, 1, 2, 1)):
        for dt_bias in (p.dt_bias, p.dt_bias.reshape(-1)):
            other, end = chunk(p, A_log=A_log, dt_bias=dt_bias)
            assert bits_equal(o, other) and bits_equal(state, end)


def test_a_finished_gate_ignores_the_gate_parameters() -> None:
    p = make(SMALL)
    o, state = chunk(p)
    given = {"A_log": torch.full((2,), 3.0), "dt_bias": torch.full((32,), float("nan")), "lower_bound": -3.0}
    other, end = chunk(p, **given)
    assert bits_equal(o, other) and bits_equal(state, end)


@pytest.mark.parametrize("gate", ["mild", "sigmoid"])
def test_safe_gate_changes_no_bit(gate: str) -> None:
    p = make(SMALL.replace(gate=gate))
    for got, expected in zip(chunk(p, safe_gate=True), chunk(p)):
        assert bits_equal(got, expected)


def test_disable_recompute_changes_no_result() -> None:
    p = make(RAW)
    results = []
    for flag in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
        o, state = chunk(p.map(lambda x: x, **leaves), disable_recompute=flag)
        grads = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])
        results.append([o, state, *grads])
    for a, b in zip(*results):
        assert relative_error(b, a.double()) <= 1e-5


def test_scale_defaults_to_one_over_root_k_and_multiplies_q_alone() -> None:
    p = make(SMALL.replace(dtype="fp64"))
    o, state = chunk(p)
    assert relative_error(chunk(p, scale=16**-0.5)[0], o) <= 1e-12
    assert relative_error(chunk(p, scale=1.0)[0], 4.0 * o) <= 1e-12
    assert bits_equal(chunk(p, scale=1.0)[1], state)
    assert not chunk(p, scale=0.0)[0].any()


@pytest.mark.parametrize("case", [SMALL, PACKED, RAW], ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_state_layouts_say_the_same(case: Case, dtype: str) -> None:
    results = []
    for v_first in (False, True):
        p = make(case.replace(dtype=dtype, v_first=v_first))
        leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
        o, state = chunk(p.map(lambda x: x, **leaves))
        grads = dict(zip(leaves, torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])))
        results.append({"o": o, "state": k_first(state, p.case), **grads, "h0": k_first(grads["h0"], p.case)})
    limit = tolerance("v_first", DTYPES[dtype])
    for name in results[0]:
        assert relative_error(results[1][name], results[0][name].double()) <= limit, name


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("case", [SMALL.replace(T=70), PACKED], ids=lambda case: case.id)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_h_is_the_state_before_each_chunk(chunk_size: int, case: Case, v_first: bool, dtype: str) -> None:
    p = make(case.replace(v_first=v_first, dtype=dtype, chunk_size=chunk_size))
    with torch.no_grad():
        o, state, h = chunk(p, return_intermediate_states=True)
    lengths = case.lengths or (case.T,)
    count = sum(-(-n // chunk_size) for n in lengths)
    tail = (12, 16) if v_first else (16, 12)
    assert (tuple(h.shape), h.dtype) == ((case.B, count, 2, *tail), DTYPES[dtype])
    plain, plain_state = chunk(p)
    assert bits_equal(o, plain) and bits_equal(state, plain_state)
    expected = [
        chunk(one(p, n, cut), output_final_state=True)[1].to(h.dtype)
        for n, (_, start, end) in enumerate(p.spans())
        for cut in range(start, end, chunk_size)
        if case.lengths is not None or n == 0
    ]
    for i, before in enumerate(expected):
        assert relative_error(h[0, i], before[0].double()) <= tolerance("h", DTYPES[dtype])


def one(p, n: int, cut: int):
    """Sequence n up to token `cut`, as an unpacked batch of one."""
    b, start, _ = p.spans()[n]
    fields = {name: getattr(p, name)[b : b + 1, start:cut] for name in ("q", "k", "v", "g", "beta", "do")}
    state = {"h0": p.h0[n : n + 1], "cu_seqlens": None}
    return p.map(lambda x: x, case=p.case.replace(B=1, T=cut - start, lengths=None), **fields, **state)


def test_h_starts_with_the_initial_state() -> None:
    p = make(SMALL)
    h = chunk(p, return_intermediate_states=True)[2]
    assert bits_equal(h[:, 0], p.h0)


def test_use_graph_and_max_num_seqs_change_no_bit_of_a_fixed_batch() -> None:
    p = make(SMALL)
    o, state = chunk(p)
    other, end = chunk(p, use_graph=True, max_num_seqs=2)
    assert bits_equal(o, other) and bits_equal(state, end)
    q = make(PACKED)
    assert bits_equal(chunk(q, max_num_seqs=4)[0], chunk(q)[0])


def test_cu_seqlens_of_either_integer_type_and_any_stride() -> None:
    p = make(PACKED)
    o, state = chunk(p)
    for kind in (torch.int32, torch.int64):
        strided = torch.full((len(p.cu_seqlens), 3), -7, dtype=kind)
        strided[:, 1] = p.cu_seqlens
        for cu in (p.cu_seqlens.to(kind), strided[:, 1], poisoned(p.cu_seqlens.to(kind))):
            for host in (None, p.cu_seqlens.to(kind)):
                other, end = chunk(p, cu_seqlens=cu, cu_seqlens_cpu=host)
                assert bits_equal(o, other) and bits_equal(state, end)


def test_outputs_are_fresh_every_time() -> None:
    for case in (SMALL, PACKED, SMALL.replace(T=0), PACKED.replace(lengths=(0, 0), T=0)):
        p = make(case)
        with torch.no_grad():
            first, second = (chunk(p, return_intermediate_states=True) for _ in range(2))
        kept = [x.clone() for x in first]
        for x in second:
            x.fill_(7.0)
        for x, was in zip(first, kept):
            assert bits_equal(x, was), f"{case.id}: a second call returned the first call's memory"
        for x in first:
            x.fill_(9.0)
        again = make(case)
        for name, x in again.inputs().items():
            assert bits_equal(x, getattr(p, name)), f"{case.id}: an output shares memory with {name}"


def test_zero_length_sequences_keep_their_state_in_bits() -> None:
    p = make(PACKED)
    state = chunk(p)[1]
    assert bits_equal(state[0], p.h0[0])
    assert not chunk(p, initial_state=None)[1][0].any()
    empty = make(PACKED.replace(lengths=(0, 0, 0), T=5))
    o, state = chunk(empty)
    assert bits_equal(state, empty.h0) and not o.any()


def test_no_tokens_at_all() -> None:
    p = make(SMALL.replace(T=0))
    o, state = chunk(p)
    assert tuple(o.shape) == (2, 0, 2, 12)
    assert bits_equal(state, p.h0)
    assert not chunk(p, initial_state=None)[1].any()
    with torch.no_grad():
        assert chunk(p, return_intermediate_states=True)[2].shape[:2] == (2, 0)


def test_no_sequences_at_all() -> None:
    p = make(PACKED.replace(lengths=(), T=4))
    o, state = chunk(p, initial_state=None)
    assert not o.any() and tuple(state.shape) == (0, 2, 16, 12)


def test_rows_after_the_last_sequence_are_zero_whatever_they_hold() -> None:
    p = make(PACKED.replace(lengths=(10, 20), T=40))
    o = chunk(p)[0]
    for x in p.five():
        x[:, 30:] = float("nan")
    other = chunk(p)[0]
    assert bits_equal(o, other) and not o[:, 30:].any() and o[:, :30].any()


@pytest.mark.parametrize("value", [None, False, "off", "auto"])
def test_cp_mode_that_does_not_engage_changes_no_bit(value) -> None:
    p = make(SMALL)
    assert bits_equal(chunk(p, cp_mode=value)[0], chunk(p)[0])


def test_the_same_call_gives_the_same_bits(on_chunk) -> None:
    p = make(RAW.replace(dtype="bf16", K=64, V=64), on_chunk.device)
    runs = []
    for _ in range(3):
        leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
        try:
            o, state = chunk(p.map(lambda x: x, **leaves), implementation=on_chunk.name)
        except cula.NotSupportedError as error:
            pytest.skip(str(error))
        runs.append([o, state, *torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])])
    for again in runs[1:]:
        assert all(bits_equal(a, b) for a, b in zip(runs[0], again))
