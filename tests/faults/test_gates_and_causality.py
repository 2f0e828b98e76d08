"""Public faults 1 to 14: exponent range, gates, causality, what a chunk's inverse and anchors get wrong.

Numbers are those of the public list; every row that serves prefill or training on a CPU runs each test.
"""

from __future__ import annotations

import math

import pytest
import torch

import cula
from cula.checks.cases import CLIFFS, Case, Problem, make
from cula.checks.runs import chunk, errors, limits, reference, run_chunk, run_recurrent
from cula.checks.tolerance import bits_equal, relative_error, rms
from cula.kda import fused_kda_gate, fused_recurrent_kda

pytestmark = pytest.mark.usefixtures("each_chunk")


def assert_right(p: Problem, *, gradients: bool = True, **options) -> None:
    got = run_chunk(p, gradients=gradients, **options)
    truth = reference(p, gradients=gradients)
    allowed = limits(p, got)
    wrong = {n: f"{e:.1e}" for n, e in errors(p, got, truth).items() if not e <= allowed[n]}
    assert not wrong, f"{p.case.id}: {wrong}"


def with_gate(p: Problem, g: torch.Tensor | float) -> Problem:
    value = g if isinstance(g, torch.Tensor) else torch.full_like(p.g, g)
    return p.map(lambda x: x, g=value.to(p.g.dtype), A_log=None, dt_bias=None, lower_bound=None, raw_gate=False)


@pytest.mark.parametrize("gate", ["bound", "sigmoid_full"])
@pytest.mark.parametrize("T, K, H", [(64, 128, 2), (256, 32, 2)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_01_a_saturated_bounded_gate_over_a_whole_chunk(gate: str, T: int, K: int, H: int, dtype: str) -> None:
    """64 tokens at -5 each decay by e^-320: no factor may hold the reciprocal."""
    assert_right(make(Case(T=T, H=H, HV=H, K=K, V=K, dtype=dtype, gate=gate)))


@pytest.mark.parametrize("value", [-5.91, -5.92, -11.08, -11.10, -20.0, -80.0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_02_beyond_the_ceiling_of_an_anchored_exponential(value: float, dtype: str) -> None:
    """Constant gates just below and above what a 16-row anchor can hold: right or refused."""
    p = with_gate(make(Case(T=64, K=32, V=32, dtype=dtype)), value)
    assert_right(p)
    raw = make(Case(T=64, K=32, V=32, dtype=dtype, gate="sigmoid_full"))
    assert_right(raw.map(lambda x: x, lower_bound=value))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_fault_03_an_unbounded_softplus_gate(dtype: str) -> None:
    """About -80 per token: the state is the last token's outer product, and nothing overflows."""
    p = make(Case(T=70, H=1, HV=2, K=32, V=32, dtype=dtype, gate="softplus_hard"))
    assert_right(p)
    state = chunk(p)[1]
    last = torch.einsum("bhk,bhv->bhkv", p.k[:, -1].repeat_interleave(2, 1).float(), p.v[:, -1].float())
    assert relative_error(state, last.double() * p.beta[:, -1, :, None, None].double()) <= 6e-3


@pytest.mark.parametrize("x", [-8.0, -1.0, 0.0, 1.0, 8.0])
@pytest.mark.parametrize("A_log", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
def test_fault_04_the_bounded_gate_is_a_scaled_sigmoid_not_a_clamped_softplus(x, A_log, bias) -> None:
    """One token with beta 0: the state's decay is the gate, told apart from the wrong formula."""
    rate = math.exp(A_log)
    right = -5.0 / (1.0 + math.exp(-rate * (x + bias)))
    wrong = max(-rate * math.log1p(math.exp(x + bias)), -5.0)
    p = make(Case(T=1, K=4, V=4, dtype="fp64", beta="zero"))
    raw = {"use_gate_in_kernel": True, "lower_bound": -5.0, "A_log": torch.tensor([A_log]).double()}
    raw["dt_bias"] = torch.full((1, 4), bias).double()
    q = p.map(lambda t: t, g=torch.full_like(p.g, x))
    decay = (chunk(q, **raw)[1] / q.h0).log()
    assert decay.flatten().tolist() == pytest.approx([right] * 16, rel=1e-9)
    step = fused_recurrent_kda(*q.five(), **{**q.flags(), **raw, "initial_state": q.h0})[1]
    assert (step / q.h0).log().flatten().tolist() == pytest.approx([right] * 16, rel=1e-9)
    gate = fused_kda_gate(q.g, raw["A_log"], raw["dt_bias"], -5.0, torch.float64)
    assert gate.flatten().tolist() == pytest.approx([right] * 4, rel=1e-9)
    if abs(right - wrong) > 0.1 * abs(right):
        assert abs(float(decay.mean()) - wrong) > 0.05 * abs(right)


@pytest.mark.parametrize("bias", [True, False])
def test_fault_05_no_a_log_is_a_rate_of_one_and_needs_a_bound(bias: bool) -> None:
    """A_log None equals A_log 0 with a bound, forward and gradients; without a bound it is an error."""
    p = make(Case(T=40, HV=2, K=16, V=16, dtype="fp64", gate="sigmoid_no_A" if bias else "sigmoid_bare"))
    zero = p.map(lambda x: x, A_log=torch.zeros(2, dtype=torch.float64))
    got, expected = run_chunk(p), run_chunk(zero)
    for name, x in got.items():
        assert relative_error(x, expected[name]) <= 1e-10, name
    with pytest.raises(cula.CulaError, match="A_log"):
        chunk(p, lower_bound=None)
    with pytest.raises(cula.CulaError, match="A_log"):
        fused_kda_gate(p.g, None, p.dt_bias)


@pytest.mark.parametrize("T", [1, 15, 17, 63, 65, 75])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_fault_06_rows_past_the_end_meet_a_very_strong_decay(T: int, dtype: str) -> None:
    """Padding rows of a tail whose gate is 0 beside valid rows of -20 to -60 per token: no 0 * inf."""
    p = make(Case(B=2, T=T, H=4, HV=4, K=32, V=32, dtype=dtype))
    rng = torch.Generator().manual_seed(T)
    assert_right(with_gate(p, -20.0 - 40.0 * torch.rand(p.g.shape, generator=rng)))


@pytest.mark.parametrize("disable_recompute", [False, True])
def test_fault_07_every_gradient_at_a_saturated_bound(disable_recompute: bool) -> None:
    """A shared anchor in a backward gave NaN in all but dv at -5."""
    p = make(Case(T=128, H=2, HV=2, K=32, V=32, dtype="bf16", gate="sigmoid_full", l2norm=True, beta="logits"))
    assert_right(p, disable_recompute=disable_recompute)


@pytest.mark.parametrize("position", CLIFFS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_08_one_closed_gate_at_an_edge(position: int, dtype: str) -> None:
    """-1000 at one token and 0 elsewhere: an exclusive sum or a shared anchor explodes there."""
    assert_right(make(Case(T=70, K=16, V=16, HV=2, dtype=dtype, gate=f"cliff{position}")))


@pytest.mark.parametrize("beta", ["zero", "one"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fault_09_no_decay_hides_no_state_bug(beta: str, dtype: str) -> None:
    """g = 0 over more than three chunks: every boundary contribution stays of order one."""
    assert_right(make(Case(T=200, H=1, HV=2, K=16, V=16, dtype=dtype, gate="zero", beta=beta)))


def test_fault_10_a_missing_gate_is_an_error_and_zero_is_no_decay() -> None:
    """KDA has no g=None: it is refused, and zeros give the plain delta rule, which is written out here."""
    p = make(Case(T=40, K=8, V=6, dtype="fp64", gate="zero"))
    with pytest.raises(cula.CulaError, match="g must"):
        chunk(p.map(lambda x: x, g=None))
    S = p.h0[0, 0].clone()
    for t in range(40):
        k = p.k[0, t, 0]
        S = S + p.beta[0, t, 0] * torch.outer(k, p.v[0, t, 0] - k @ S)
    assert relative_error(chunk(p)[1][0, 0], S) <= 1e-10
    assert_right(p)


def test_fault_11_beta_zero_only_decays_and_v_is_never_read() -> None:
    """beta = 0: the final state is the decayed initial one, and o does not depend on v in any bit."""
    p = make(Case(T=70, HV=2, K=16, V=16, beta="zero", gate="tenth"))
    o, state = chunk(p)
    assert relative_error(state, p.h0.double() * math.exp(-7.0)) <= 1e-5
    other, end = chunk(p.map(lambda x: x, v=p.v * -3.0 + 1.0))
    assert bits_equal(o, other) and bits_equal(state, end)


def test_fault_11_beta_one_overwrites_along_the_key() -> None:
    """One unit key repeated, no decay, q = k: each output is that token's v times scale."""
    p = make(Case(T=70, HV=2, K=16, V=16, beta="one", gate="zero", seed=2))
    k = p.k[:, :1].expand_as(p.k)
    o = chunk(p.map(lambda x: x, q=k, k=k), scale=0.5)[0]
    assert relative_error(o, 0.5 * p.v.double()) <= 1e-5


def test_fault_11_negative_eigenvalues_double_the_sigmoid() -> None:
    """2 sigmoid(logits) as the kernel's flag, or finished outside."""
    p = make(Case(T=70, HV=2, K=16, V=16, beta="logits_doubled", gate="tenth", dtype="fp64"))
    done = {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}
    outside = p.map(lambda x: x, beta=2.0 * p.beta.sigmoid())
    for a, b in zip(chunk(p), chunk(outside, **done)):
        assert relative_error(a, b) <= 1e-10
    assert_right(p)


@pytest.mark.parametrize("T", [64, 130])
def test_fault_12_the_gates_gradient_keeps_its_digits_in_16_bit(T: int) -> None:
    """dg is a difference of close sums: parked in bf16 it is lost. With no initial state it is 0 at token 0."""
    case = Case(T=T, H=2, HV=2, K=32, V=32, dtype="bf16", gate="softplus", l2norm=True, state=False)
    p = make(case)
    p = p.map(lambda x: x, A_log=torch.full((2,), math.log(16.0)))
    leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
    o, state = chunk(p.map(lambda x: x, **leaves))
    got = torch.autograd.grad([o, state], [leaves["g"]], [p.do, p.dht])[0]
    truth = reference(p)["dg"]
    assert rms(got.double() - truth) < 1e-2 * rms(truth)
    assert float(got[:, 0].abs().max()) < 1e-5 * float(got.abs().max())


def test_fault_13_large_values_in_fp16_do_not_overflow_the_state() -> None:
    """v of order 1e4 in fp16: the carried state is wider than fp16, so o and the state stay right."""
    p = make(Case(T=200, HV=2, K=32, V=32, dtype="fp16", gate="tiny", l2norm=True))
    p = p.map(lambda x: x, v=(p.v.float() * 1e4).clamp(-6e4, 6e4).half())
    assert float(chunk(p)[1].abs().max()) > 1e4
    assert_right(p, gradients=False)


def test_fault_14_every_internal_route_uses_one_base_of_logarithm() -> None:
    """g = -3 per token through chunk sizes, recompute on and off, and token by token: the same numbers."""
    p = with_gate(make(Case(T=100, HV=2, K=16, V=16)), -3.0)
    truth = reference(p)
    found = [run_chunk(p, chunk_size=c, disable_recompute=d) for c in (16, 32, 64) for d in (False, True)]
    for got in [*found, run_recurrent(p)]:
        allowed = limits(p, got)
        assert all(e <= allowed[n] for n, e in errors(p, got, truth).items())
