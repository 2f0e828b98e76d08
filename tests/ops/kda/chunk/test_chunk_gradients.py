"""Gradients through the public autograd door: which inputs, which cotangents, which strides, which modes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import cula
from cula.checks.cases import Case, Problem, make
from cula.checks.runs import chunk, floors, reference
from cula.checks.tolerance import bits_equal, relative_error, tolerance

pytestmark = pytest.mark.usefixtures("each_chunk")

CASE = Case(B=2, T=37, H=1, HV=2, K=16, V=12, gate="softplus", beta="logits", l2norm=True)
PACKED = CASE.replace(B=1, T=70, lengths=(0, 33, 1, 30))
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")


def leaves_of(p: Problem, names=NAMES) -> dict[str, torch.Tensor]:
    return {name: getattr(p, name).clone().requires_grad_() for name in names if getattr(p, name) is not None}


def gradients(p: Problem, names=NAMES, *, do="do", dht="dht", **options) -> dict[str, torch.Tensor]:
    """Gradients of sum(o * do) + sum(state * dht) for the named inputs; None leaves a term out."""
    leaves = leaves_of(p, names)
    o, state = chunk(p.map(lambda x: x, **leaves), **options)
    loss = 0.0
    if do is not None:
        loss = loss + (o * p.do).sum()
    if dht is not None:
        loss = loss + (state * p.dht).sum()
    loss.backward()
    return {f"d{name}": x.grad for name, x in leaves.items()}


def assert_right(p: Problem, got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    floor = floors(p, truth)
    for name, grad in got.items():
        assert grad.dtype == getattr(p, name[1:]).dtype
        error = relative_error(grad, truth[name], floor=floor[name])
        assert error <= tolerance(name, p.q.dtype), f"{name}: {error:.2e}"


SUBSETS = [(name,) for name in NAMES] + [("q", "h0"), ("v", "beta"), ("k", "g", "A_log"), ("dt_bias", "h0")]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_any_subset_of_inputs_may_require_grad(names: tuple[str, ...], case: Case) -> None:
    p = make(case)
    assert_right(p, gradients(p, names), {k: v for k, v in reference(p).items() if k[0] == "d"} | needed(p))


def needed(p: Problem) -> dict[str, torch.Tensor]:
    """dq and dk, from which the floors of the other gradients come."""
    return {name: x for name, x in reference(p).items() if name in ("dq", "dk")}


@pytest.mark.parametrize("do, dht", [("do", None), (None, "dht"), ("do", "dht")])
@pytest.mark.parametrize("case", [CASE, PACKED], ids=["batch", "packed"])
def test_either_output_alone_may_be_differentiated(case: Case, do, dht) -> None:
    p = make(case)
    zero = p.map(
        lambda x: x, **{n: torch.zeros_like(getattr(p, n)) for n, v in (("do", do), ("dht", dht)) if v is None}
    )
    assert_right(p, gradients(p, do=do, dht=dht), reference(zero))


def test_final_state_not_returned() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    o, state = chunk(p.map(lambda x: x, **leaves), output_final_state=False)
    assert state is None
    o.backward(p.do)
    truth = reference(p.map(lambda x: x, dht=torch.zeros_like(p.dht)))
    assert_right(p, {f"d{n}": x.grad for n, x in leaves.items()}, truth)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), 0.5, dtype=x.dtype).expand(x.shape)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), math.nan, dtype=x.dtype)
    wide[..., 2 : 2 + x.shape[-1]] = x
    return wide[..., 2 : 2 + x.shape[-1]]


@pytest.mark.parametrize("stride", [expanded, transposed, sliced], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grad_outputs_of_any_stride(stride, dtype: str) -> None:
    p = make(CASE.replace(dtype=dtype))
    given = p.map(lambda x: x, do=stride(p.do), dht=stride(p.dht))
    plain = p.map(lambda x: x, do=given.do.contiguous(), dht=given.dht.contiguous())
    results = []
    for x in (given, plain):
        leaves = leaves_of(x)
        outputs = chunk(x.map(lambda y: y, **leaves))
        results.append(torch.autograd.grad(outputs, list(leaves.values()), [x.do, x.dht]))
    for a, b in zip(*results):
        assert bits_equal(a, b)


def test_sum_backward_gives_every_gradient() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    o, state = chunk(p.map(lambda x: x, **leaves))
    (o.sum() + state.sum()).backward()
    truth = reference(p.map(lambda x: x, do=torch.ones_like(p.do), dht=torch.ones_like(p.dht)))
    assert_right(p, {f"d{n}": x.grad for n, x in leaves.items()}, truth)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_inputs_of_any_stride_get_the_same_gradients(name: str) -> None:
    p = make(CASE)
    expected = gradients(p)
    for stride in (transposed, sliced):
        x = getattr(p, name)
        leaf = stride(x if x.dim() == 4 else x[..., None]).reshape(x.shape) if x.dim() != 4 else stride(x)
        leaves = {**leaves_of(p), name: leaf.detach().requires_grad_()}
        o, state = chunk(p.map(lambda y: y, **leaves))
        grads = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])
        for key, grad in zip(leaves, grads):
            assert bits_equal(grad, expected[f"d{key}"]), key


def test_shapes_of_parameter_gradients_are_their_inputs_shapes() -> None:
    p = make(CASE)
    expected = gradients(p)
    A_log = p.A_log.view(1, 1, 2, 1).clone().requires_grad_()
    dt_bias = p.dt_bias.reshape(-1).clone().requires_grad_()
    o, state = chunk(p, A_log=A_log, dt_bias=dt_bias)
    ((o * p.do).sum() + (state * p.dht).sum()).backward()
    assert bits_equal(A_log.grad, expected["dA_log"].view(1, 1, 2, 1))
    assert bits_equal(dt_bias.grad, expected["ddt_bias"].reshape(-1))


def test_bf16_parameters_get_bf16_gradients() -> None:
    p = make(CASE.replace(dtype="bf16", gates="same"))
    p = p.map(lambda x: x, A_log=p.A_log.bfloat16(), dt_bias=p.dt_bias.bfloat16())
    got = gradients(p)
    assert all(got[f"d{n}"].dtype == torch.bfloat16 for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"))
    assert got["dh0"].dtype == torch.float32
    truth = reference(p)
    for name, grad in got.items():
        assert relative_error(grad, truth[name]) <= tolerance(name, torch.bfloat16), name


def test_ignored_gate_parameters_get_no_gradient() -> None:
    p = make(CASE.replace(gate="mild"))
    A_log, dt_bias = torch.ones(2, requires_grad=True), torch.ones(32, requires_grad=True)
    q = p.q.clone().requires_grad_()
    o, _ = chunk(p.map(lambda x: x, q=q), A_log=A_log, dt_bias=dt_bias)
    o.sum().backward()
    for x in (A_log, dt_bias):
        assert x.grad is None or not x.grad.any()


def test_rows_after_the_last_sequence_get_zero_gradients() -> None:
    p = make(PACKED.replace(lengths=(10, 20), T=40))
    for x in (p.q, p.k, p.v, p.g, p.beta, p.do):
        x[:, 30:] = math.nan
    got = gradients(p)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, 30:].any() and got[name][:, :30].any(), name
    assert torch.isfinite(got["dA_log"]).all() and torch.isfinite(got["ddt_bias"]).all()


@pytest.mark.parametrize("case", [CASE.replace(T=0), PACKED.replace(lengths=(0, 0), T=0)], ids=["batch", "packed"])
def test_no_tokens_give_empty_gradients_and_pass_the_state_gradient_on(case: Case) -> None:
    p = make(case)
    got = gradients(p)
    assert bits_equal(got["dh0"], p.dht)
    for name in ("dA_log", "ddt_bias"):
        assert got[name] is None or not got[name].any()


def test_zero_length_sequences_pass_the_state_gradient_on() -> None:
    p = make(PACKED)
    assert bits_equal(gradients(p)["dh0"][0], p.dht[0])


@pytest.mark.parametrize("T", [1, 16, 64, 65])
@pytest.mark.parametrize("gate", ["mild", "sigmoid", "bound"])
def test_gradients_of_state_only(T: int, gate: str) -> None:
    p = make(CASE.replace(T=T, gate=gate))
    assert_right(p, gradients(p, ("h0",)), reference(p))


def test_a_forced_pair_of_implementations(on_chunk) -> None:
    p = make(CASE.replace(dtype="bf16", K=64, V=64), on_chunk.device)
    name = on_chunk.name
    try:
        plain = gradients(p, implementation=name)
    except cula.NotSupportedError as error:
        pytest.skip(str(error))
    for pair in ({"forward": name, "backward": name}, {"forward": name}, {"backward": name}, {}):
        for key, grad in gradients(p, implementation=pair).items():
            if len(pair) == 2 or name == "eager":
                assert bits_equal(grad, plain[key]), (pair, key)
            assert torch.isfinite(grad).all()


def test_backward_after_the_inputs_were_changed_is_an_error_not_a_wrong_number() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    o, _ = chunk(p.map(lambda x: x, **leaves))
    with torch.no_grad():
        leaves["k"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_backward_twice_over_one_graph() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    o, state = chunk(p.map(lambda x: x, **leaves))
    first = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht], retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad([o, state], list(leaves.values()), [p.do, p.dht])
    assert all(bits_equal(a, b) and bits_equal(a, c) for a, b, c in zip(first, second, kept))


def test_double_backward_is_a_clear_error() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    o, _ = chunk(p.map(lambda x: x, **leaves))
    grads = torch.autograd.grad(o.square().sum(), [leaves["q"]], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"twice|double"):
        grads[0].sum().backward()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_autocast_changes_nothing(dtype: str) -> None:
    p = make(CASE.replace(dtype=dtype, K=32, V=32))
    leaves = leaves_of(p)
    expected = chunk(p.map(lambda x: x, **leaves))
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), [p.do, p.dht])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chunk(p.map(lambda x: x, **leaves))
    grads = torch.autograd.grad(got, list(leaves.values()), [p.do, p.dht])
    for a, b in zip([*got, *grads], [*expected, *expected_grads]):
        assert bits_equal(a, b)


def test_a_layer_under_autocast_trains() -> None:
    p = make(CASE.replace(dtype="fp32", K=32, V=32))
    x = torch.randn(2, 37, 24, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Linear(24, 32 * 2 + 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = weight(x)
        q, k, v = y[..., :32].unflatten(-1, (1, 32)), y[..., 32:64].unflatten(-1, (1, 32)), y[..., 64:]
        o, _ = chunk(p.map(lambda t: t, q=q, k=k, v=v.unflatten(-1, (2, 32)), h0=None))
    assert o.dtype == torch.bfloat16
    o.float().square().mean().backward()
    for parameter in weight.parameters():
        assert parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all()
        assert parameter.grad.any()


def test_no_grad_and_inference_mode_give_the_same_bits_without_a_graph() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    with_graph = chunk(p.map(lambda x: x, **leaves))
    assert all(x.requires_grad for x in with_graph)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            plain = chunk(p.map(lambda x: x, **leaves))
        assert not any(x.requires_grad for x in plain)
        assert all(bits_equal(a, b) for a, b in zip(plain, with_graph))


def test_intermediate_states_need_no_grad() -> None:
    p = make(CASE)
    leaves = leaves_of(p)
    with pytest.raises(cula.CulaError, match="return_intermediate_states"):
        chunk(p.map(lambda x: x, **leaves), return_intermediate_states=True)
    with torch.no_grad():
        assert len(chunk(p.map(lambda x: x, **leaves), return_intermediate_states=True)) == 3
    assert len(chunk(p, return_intermediate_states=True)) == 3


def test_gradients_accumulate_over_microbatches() -> None:
    p = make(CASE.replace(B=2, dtype="fp64", state=False))
    leaves = leaves_of(p)
    whole = torch.autograd.grad(chunk(p.map(lambda x: x, **leaves))[0], list(leaves.values()), p.do, allow_unused=True)
    summed = {name: torch.zeros_like(x) for name, x in leaves.items()}
    for b in range(2):
        part = {n: x[b : b + 1] if n not in ("A_log", "dt_bias") else x for n, x in leaves.items()}
        o = chunk(p.map(lambda x: x, **part))[0]
        for name, grad in zip(leaves, torch.autograd.grad(o, list(leaves.values()), p.do[b : b + 1])):
            summed[name] += grad
    for name, expected in zip(leaves, whole):
        assert relative_error(summed[name], expected) <= 1e-10, name


@pytest.mark.parametrize("group, heads", list(itertools.product((2, 4), (1, 2))))
def test_value_heads_of_one_query_head_sum_their_gradients(group: int, heads: int) -> None:
    p = make(Case(B=1, T=33, H=heads, HV=heads * group, K=8, V=8, dtype="fp64", gate="mild"))
    grouped = gradients(p)
    wide = p.map(lambda x: x, q=p.q.repeat_interleave(group, 2), k=p.k.repeat_interleave(group, 2))
    each = gradients(wide)
    for name in ("dq", "dk"):
        summed = each[name].unflatten(2, (heads, group)).sum(3)
        assert relative_error(grouped[name], summed) <= 1e-10, name
    for name in ("dv", "dg", "dbeta", "dh0"):
        assert relative_error(grouped[name], each[name]) <= 1e-10, name
