"""The reference against loops written here from the formulas alone, in numpy, one head and one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cula.checks.cases import BETAS, GATES, Case, Problem, make
from cula.checks.runs import reference
from cula.checks.tolerance import relative_error
from cula.kda import kda_chunk_reference, kda_recurrent_reference


def loop(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """KDA by its definition: o `[B,T,HV,V]` and K-first states `[N,HV,K,V]`."""
    case = p.case
    q, k, v, g, beta = (x.double().numpy() for x in (p.q, p.k, p.v, p.g, p.beta))
    _, _, logits, doubled = BETAS[case.beta]
    scale = case.K**-0.5 if case.scale is None else case.scale
    o = np.zeros((case.B, case.T, case.HV, case.V))
    states = np.zeros((case.N, case.HV, case.K, case.V))
    for n, (b, start, end) in enumerate(p.spans()):
        for j in range(case.HV):
            if p.h0 is not None:
                h = p.h0[n, j].double().numpy()
                states[n, j] = h.T if case.v_first else h
            head = j * case.H // case.HV
            for t in range(start, end):
                qt, kt = q[b, t, head], k[b, t, head]
                if case.l2norm:
                    qt = qt / math.sqrt(sum(x * x for x in qt) + 1e-6)
                    kt = kt / math.sqrt(sum(x * x for x in kt) + 1e-6)
                strength = beta[b, t, j]
                if logits:
                    strength = (2.0 if doubled else 1.0) / (1.0 + math.exp(-strength))
                gate = [log_decay(p, float(g[b, t, j, c]), j, c) for c in range(case.K)]
                S = np.exp(np.array(gate))[:, None] * states[n, j]
                S = S + strength * np.outer(kt, v[b, t, j] - kt @ S)
                o[b, t, j] = scale * (qt @ S)
                states[n, j] = S
    return o, states


def log_decay(p: Problem, value: float, head: int, channel: int) -> float:
    if not p.raw_gate:
        return value
    x = value + (0.0 if p.dt_bias is None else float(p.dt_bias[head, channel]))
    rate = 1.0 if p.A_log is None else math.exp(float(p.A_log[head]))
    if p.lower_bound is None:
        return -rate * (x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)))
    return p.lower_bound / (1.0 + math.exp(min(-rate * x, 700.0)))


SMALL = Case(B=2, T=5, H=2, HV=4, K=3, V=4, dtype="fp64")


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_matches_the_loop(gate: str) -> None:
    p = make(SMALL.replace(gate=gate, beta="logits"))
    o, states = loop(p)
    got = reference(p, gradients=False)
    assert relative_error(got["o"], torch.tensor(o)) < 1e-12
    assert relative_error(got["final_state"], torch.tensor(states)) < 1e-12


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("v_first", [False, True])
def test_every_beta_norm_layout_and_scale_matches_the_loop(beta: str, v_first: bool) -> None:
    p = make(SMALL.replace(beta=beta, v_first=v_first, l2norm=v_first, scale=0.7 if v_first else None, gate="softplus"))
    o, states = loop(p)
    got = reference(p, gradients=False)
    assert relative_error(got["o"], torch.tensor(o)) < 1e-12
    assert relative_error(got["final_state"], torch.tensor(states)) < 1e-12


@pytest.mark.parametrize("lengths", [(0, 3, 0, 4), (7,), (1, 1, 1, 1, 3), (0,), (0, 0)])
@pytest.mark.parametrize("state", [False, True])
def test_packed_sequences_match_the_loop(lengths: tuple[int, ...], state: bool) -> None:
    p = make(SMALL.replace(B=1, T=9, lengths=lengths, state=state, gate="channels"))
    o, states = loop(p)
    got = reference(p, gradients=False)
    assert relative_error(got["o"], torch.tensor(o)) < 1e-12
    assert relative_error(got["final_state"], torch.tensor(states)) < 1e-12


def test_inputs_of_any_dtype_give_float64() -> None:
    p = make(SMALL.replace(dtype="bf16"))
    for function in (kda_recurrent_reference, kda_chunk_reference):
        o, state = function(p.q, p.k, p.v, p.g, p.beta, **{**p.flags(), "output_final_state": True})
        assert o.dtype == state.dtype == torch.float64
        exact = [x.double() for x in (p.q, p.k, p.v, p.g, p.beta)]
        assert torch.equal(o, function(*exact, **p.flags())[0])


@pytest.mark.parametrize("function", [kda_recurrent_reference, kda_chunk_reference])
def test_final_state_is_none_unless_asked_for(function) -> None:
    p = make(SMALL)
    assert function(p.q, p.k, p.v, p.g, p.beta)[1] is None
    assert len(function(p.q, p.k, p.v, p.g, p.beta)) == 2


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 0, 17)])
@pytest.mark.parametrize("function", [kda_recurrent_reference, kda_chunk_reference])
def test_h_is_the_state_before_each_chunk(function, lengths: tuple[int, ...] | None, v_first: bool) -> None:
    p = make(Case(T=22, H=1, HV=2, K=3, V=4, dtype="fp64", lengths=lengths, v_first=v_first))
    call = {**p.flags(), "initial_state": p.h0, "chunk_size": 16}
    h = function(p.q, p.k, p.v, p.g, p.beta, **call, return_intermediate_states=True)[2]
    expected = []
    for n, (b, start, end) in enumerate(p.spans()):
        for cut in range(start, end, 16):
            part = [x[b : b + 1, start:cut] for x in (p.q, p.k, p.v, p.g, p.beta)]
            call.update(cu_seqlens=None, initial_state=p.h0[n : n + 1])
            expected.append(kda_recurrent_reference(*part, **call)[1])
    expected = torch.stack(expected, 1)
    assert relative_error(h, expected) < 1e-12
    assert torch.equal(h[:, 0], p.h0[:1])


GRADCHECK = [
    Case(B=1, T=3, H=1, HV=2, K=2, V=3, dtype="fp64", gate="softplus", beta="logits", l2norm=True),
    Case(B=1, T=3, H=1, HV=1, K=2, V=2, dtype="fp64", gate="sigmoid", beta="logits_doubled", v_first=True),
    Case(B=1, T=4, H=1, HV=1, K=2, V=2, dtype="fp64", gate="sigmoid_bare", beta="half"),
    Case(B=1, T=5, H=1, HV=1, K=2, V=2, dtype="fp64", gate="mild", lengths=(2, 0, 3)),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=lambda case: case.id)
@pytest.mark.parametrize("function", [kda_recurrent_reference, kda_chunk_reference])
def test_gradients_match_finite_differences(function, case: Case) -> None:
    p = make(case)
    names = list(p.inputs())
    leaves = tuple(x.clone().requires_grad_() for x in p.inputs().values())

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(names, values))
        five = [given.pop(name) for name in ("q", "k", "v", "g", "beta")]
        named = {"initial_state": given.pop("h0", None), **given}
        return function(*five, **p.flags(), **named)

    assert torch.autograd.gradcheck(run, leaves)


def test_rows_after_the_last_sequence_are_zero_with_zero_gradients() -> None:
    p = make(Case(T=9, K=3, V=3, dtype="fp64", lengths=(2, 3)))
    got = reference(p)
    assert not got["o"][:, 5:].any()
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, 5:].any()
        assert got[name][:, :5].any()
