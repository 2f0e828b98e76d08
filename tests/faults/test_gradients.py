"""Public faults 52 to 58: what is differentiated, how often, with which strides and modes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk, errors, floors, gradients_of, limits, reference, run_chunk
from cula.checks.tolerance import bits_equal, relative_error, tolerance
from cula.kda import fused_recurrent_kda

pytestmark = pytest.mark.usefixtures("each_chunk")


def assert_right(p: Problem, got: dict, truth: dict) -> None:
    allowed = limits(p, got)
    wrong = {n: f"{e:.1e}" for n, e in errors(p, got, truth).items() if not e <= allowed[n]}
    assert not wrong, f"{p.case.id}: {wrong}"


OPTIONS = list(itertools.product([False, True], repeat=5))


@pytest.mark.parametrize("state, packed, raw, norm, logits", OPTIONS)
def test_fault_52_backward_with_every_optional_argument_on_and_off(state, packed, raw, norm, logits) -> None:
    """The public backward gives one gradient per input, of its shape and dtype, whatever else is given."""
    case = Case(B=1 if packed else 2, T=20, HV=2, K=8, V=6, state=state, lengths=(7, 13) if packed else None)
    case = case.replace(gate="softplus" if raw else "mild", l2norm=norm, beta="logits" if logits else "half")
    p = make(case)
    leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
    o, final = chunk(p.map(lambda x: x, **leaves))
    ((o * p.do).sum() + (final * p.dht).sum()).backward()
    got = {f"d{name}": x.grad for name, x in leaves.items()}
    for name, x in leaves.items():
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype, name
    assert_right(p, got, reference(p))


@pytest.mark.parametrize("lengths", [None, (0, 20), (20, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("through", ["o", "state", "both"])
def test_fault_54_the_initial_states_gradient_alone(lengths, through: str) -> None:
    """Only h0 asks for one, through o, through the final state, or both; empty sequences pass it on in bits."""
    T = 20 if lengths is None else sum(lengths)
    p = make(Case(B=1, T=T, HV=2, K=8, V=6, lengths=lengths))
    h0 = p.h0.clone().requires_grad_()
    o, state = chunk(p.map(lambda x: x, h0=h0))
    pairs = [(o, p.do)] if through == "o" else [(state, p.dht)] if through == "state" else [(o, p.do), (state, p.dht)]
    loss = sum((x * d).sum() for x, d in pairs)
    loss.backward()
    zero = {"do": torch.zeros_like(p.do)} if through == "state" else {"dht": torch.zeros_like(p.dht)}
    truth = reference(p if through == "both" else p.map(lambda x: x, **zero))
    assert relative_error(h0.grad, truth["dh0"]) <= tolerance("dh0", p.q.dtype)
    for n, length in enumerate(lengths or ()):
        if not length and through != "o":
            assert bits_equal(h0.grad[n], p.dht[n])


@pytest.mark.parametrize("gate", ["softplus", "softplus_nobias", "sigmoid", "sigmoid_no_A", "sigmoid_bare"])
@pytest.mark.parametrize("shape", ["T1", "batch", "packed", "group"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_fault_55_gradients_of_the_gates_parameters(gate: str, shape: str, dtype: str) -> None:
    """A_log, dt_bias and beta logits summed over batch, tokens and pack, per value head."""
    case = Case(B=2, T=40, HV=2, K=8, V=6, dtype=dtype, gate=gate, beta="logits", l2norm=True)
    case = case.replace(**{
        "T1": {"T": 1}, "batch": {}, "packed": {"B": 1, "T": 40, "lengths": (1, 0, 30)}, "group": {"H": 2, "HV": 8},
    }[shape])  # fmt: skip
    p = make(case)
    assert_right(p, run_chunk(p), reference(p))


@pytest.mark.parametrize("shape", ["flat", "bias2d", "model"])
def test_fault_55_in_every_shape_that_parameters_come_in(shape: str) -> None:
    """A_log [HV] or [1,1,HV,1], dt_bias [HV*K] or [HV,K]: the gradient has the shape that was given."""
    p = make(Case(B=2, T=40, HV=2, K=8, V=6, gate="softplus"))
    truth = reference(p)
    A_log = p.A_log.view(1, 1, 2, 1) if shape == "model" else p.A_log
    dt_bias = p.dt_bias.reshape(-1) if shape != "bias2d" else p.dt_bias
    leaves = [x.clone().requires_grad_() for x in (A_log, dt_bias)]
    o, state = chunk(p, A_log=leaves[0], dt_bias=leaves[1])
    grads = gradients_of([o, state], [p.do, p.dht], leaves)
    for x, grad, name in zip(leaves, grads, ("dA_log", "ddt_bias")):
        assert grad.shape == x.shape
        assert relative_error(grad, truth[name].view(x.shape)) <= tolerance(name, torch.float32)


def test_fault_56_a_grad_output_that_is_not_contiguous() -> None:
    """o.sum() has a gradient of stride 0, a transpose one of another order: the bits of the contiguous one."""
    p = make(Case(B=2, T=40, HV=2, K=8, V=6))
    ones, order = torch.ones((), dtype=p.v.dtype).expand(p.v.shape), p.do.permute(3, 2, 1, 0)
    for do in (ones, order.contiguous().permute(3, 2, 1, 0)):
        results = []
        for cotangent in (do, do.contiguous()):
            leaves = [x.clone().requires_grad_() for x in p.five()]
            o, _ = chunk(p.map(lambda x: x, **dict(zip(("q", "k", "v", "g", "beta"), leaves))))
            results.append(torch.autograd.grad(o, leaves, cotangent))
        assert all(bits_equal(a, b) for a, b in zip(*results))


def test_fault_57_forward_under_autocast_backward_outside() -> None:
    """fp32 parameters, a bf16 region around the forward: gradients in the inputs' dtypes, right for fp32."""
    p = make(Case(B=2, T=40, HV=2, K=32, V=32, gate="softplus", beta="logits", l2norm=True))
    leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = chunk(p.map(lambda x: x, **leaves))
    assert o.dtype == torch.float32
    grads = gradients_of([o, state], [p.do, p.dht], list(leaves.values()))
    got = {"o": o.detach(), **{f"d{n}": x for n, x in zip(leaves, grads)}}
    assert all(x.dtype == leaves[n].dtype for n, x in zip(leaves, grads))
    assert_right(p, got, reference(p))


def test_fault_58_a_backward_that_is_not_there_is_said_before_the_forward_runs() -> None:
    """A forced row without a backward: NotSupportedError before any work, so nothing is computed for nothing."""
    p = make(Case(B=2, T=40, HV=2, K=8, V=6))
    leaf = p.q.clone().requires_grad_()
    for name in ("sm90", "sm100", "portable"):
        for choice in (name, {"forward": "eager", "backward": name}):
            with pytest.raises(cula.NotSupportedError, match=name):
                chunk(p.map(lambda x: x, q=leaf), implementation=choice)
    with pytest.raises(cula.NotSupportedError, match="chunk_kda"):
        fused_recurrent_kda(leaf, *p.five()[1:])[0].sum().backward()


@pytest.mark.parametrize("safe", [False, True])
def test_fault_58_a_promise_changes_no_number(safe: bool) -> None:
    """safe_gate is a promise about values: forward and gradients keep their bits."""
    p = make(Case(B=2, T=40, HV=2, K=8, V=6, gate="sigmoid"))
    leaf = p.g.clone().requires_grad_()
    o, _ = chunk(p.map(lambda x: x, g=leaf), safe_gate=safe)
    o.backward(p.do)
    got = run_chunk(p)
    assert bits_equal(o.detach(), got["o"])
    plain = p.g.clone().requires_grad_()
    chunk(p.map(lambda x: x, g=plain))[0].backward(p.do)
    assert bits_equal(leaf.grad, plain.grad)


def test_floors_are_not_what_makes_these_pass() -> None:
    p = make(Case(B=2, T=40, HV=2, K=8, V=6, gate="softplus"))
    truth = reference(p)
    assert all(floors(p, truth)[n] < math.sqrt(float(x.square().mean())) for n, x in truth.items())
