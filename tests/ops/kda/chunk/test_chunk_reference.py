"""The chunked reference is the recurrence, for every gate, length and chunk size; its parts are what they claim."""

from __future__ import annotations

import pytest
import torch

from cula.checks.cases import BETAS, GATES, Case, Problem, make
from cula.checks.grid import LENGTHS
from cula.checks.runs import floors, gradients_of
from cula.checks.tolerance import relative_error
from cula.kda import kda_chunk_reference, kda_recurrent_reference
from cula.ops.kda.chunk import reference as parts


def both(p: Problem, **options) -> list[dict[str, torch.Tensor]]:
    results = []
    for function in (kda_recurrent_reference, kda_chunk_reference):
        leaves = {name: x.clone().requires_grad_() for name, x in p.inputs().items()}
        named = {"A_log": leaves.get("A_log"), "dt_bias": leaves.get("dt_bias"), "initial_state": leaves.get("h0")}
        five = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
        o, state = function(*five, **p.flags(), **named, **options)
        grads = gradients_of([o, state], [p.do, p.dht], list(leaves.values()))
        found = {f"d{name}": grad for name, grad in zip(leaves, grads)}
        results.append({"o": o.detach(), "final_state": state.detach(), **found})
    return results


def assert_same(p: Problem, **options) -> None:
    truth, got = both(p, **options)
    floor = floors(p, truth)
    for name, expected in truth.items():
        error = relative_error(got[name], expected, floor=floor[name])
        assert error <= 1e-10, f"{name}: {error:.2e}"


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_is_the_recurrence(gate: str) -> None:
    assert_same(make(Case(B=1, T=70, H=1, HV=2, K=4, V=3, dtype="fp64", gate=gate, beta="logits")))


@pytest.mark.parametrize("T", LENGTHS)
def test_every_length_is_the_recurrence(T: int) -> None:
    assert_same(make(Case(B=2, T=T, H=2, HV=2, K=4, V=5, dtype="fp64", gate="softplus", l2norm=True)))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_every_chunk_size_and_beta_is_the_recurrence(chunk_size: int, beta: str) -> None:
    case = Case(T=67, K=4, V=4, dtype="fp64", beta=beta, lengths=(0, 33, 1, 30), v_first=chunk_size == 32)
    assert_same(make(case), chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_h_of_both_references_is_the_same(chunk_size: int) -> None:
    p = make(Case(T=130, K=4, V=4, dtype="fp64"))
    hs = [
        f(p.q, p.k, p.v, p.g, p.beta, initial_state=p.h0, chunk_size=chunk_size, return_intermediate_states=True)[2]
        for f in (kda_recurrent_reference, kda_chunk_reference)
    ]
    assert hs[0].shape[1] == -(-130 // chunk_size)
    assert relative_error(hs[1], hs[0]) < 1e-10


def test_inverse_is_the_inverse() -> None:
    rng = torch.Generator().manual_seed(1)
    L = torch.randn(2, 16, 16, generator=rng, dtype=torch.float64).tril(-1)
    A = parts.inverse(L)
    eye = torch.eye(16, dtype=torch.float64)
    assert torch.allclose(A @ (eye + L), eye.expand_as(L), atol=1e-9)
    assert not A.triu(1).any()


def test_decay_between_tokens_is_causal_and_never_above_one() -> None:
    G = torch.tensor([[-1000.0], [-1000.0], [-2000.0]], dtype=torch.float64)
    D = parts.decay_between(G)[..., 0]
    assert D.tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
