"""Cases make the same numbers everywhere, and every kind of gate, beta, packing and dtype that their names say."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from cula.checks.cases import BETAS, CLIFFS, DTYPES, GATES, Case, make, natural_gate
from cula.checks.tolerance import bits_equal

CASE = Case(B=2, T=70, H=1, HV=2, K=16, V=12)


def test_a_case_names_its_numbers() -> None:
    a, b = make(CASE), make(CASE)
    for name, x in a.inputs().items():
        assert bits_equal(x, getattr(b, name))
    other = make(CASE.replace(seed=1))
    assert not any(torch.equal(a.inputs()[n], other.inputs()[n]) for n in ("q", "k", "v", "g", "beta", "h0"))


def test_the_same_numbers_in_another_process() -> None:
    code = "from cula.checks.cases import *; p = make(Case(T=5, seed=3)); print(float(p.q.sum()), float(p.h0.sum()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    p = make(Case(T=5, seed=3))
    assert done.stdout.split() == [str(float(p.q.sum())), str(float(p.h0.sum()))]


def test_dtype_and_layout_draw_the_same_numbers() -> None:
    wide = make(CASE.replace(dtype="fp64"))
    for change in ({"dtype": "bf16"}, {"v_first": True}, {"chunk_size": 16}, {"dtype": "bf16", "gates": "same"}):
        p = make(CASE.replace(**change))
        assert bits_equal(p.q, wide.q.to(p.q.dtype)) and bits_equal(p.g, wide.g.to(p.g.dtype))
        h0 = p.h0.mT if p.case.v_first else p.h0
        assert torch.equal(h0.double(), wide.h0.to(p.h0.dtype).double())
        dht = p.dht.mT if p.case.v_first else p.dht
        assert torch.equal(dht.double(), wide.dht.to(p.dht.dtype).double())


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_what_their_names_say(gate: str) -> None:
    p = make(CASE.replace(gate=gate, dtype="fp64"))
    g = natural_gate(p.g, p.A_log, p.dt_bias, p.lower_bound) if p.raw_gate else p.g
    assert bool((g <= 0).all()) and bool(torch.isfinite(g).all())
    constants = {"zero": 0.0, "tiny": -1e-6, "tenth": -0.1, "bound": -5.0, "steep": -20.0, "wall": -1000.0}
    if gate in constants:
        assert bool((g == constants[gate]).all())
    if gate.startswith("cliff"):
        where = int(gate.removeprefix("cliff"))
        assert bool((g[:, where] == -1000.0).all()) and int((g != 0).sum()) == g[:, 0].numel()
    if gate.startswith("sigmoid"):
        assert bool((g >= p.lower_bound).all())
        assert (p.A_log is None) == (gate in ("sigmoid_no_A", "sigmoid_bare"))
    if gate == "softplus_hard":
        assert -90 < float(g.mean()) < -70
    if gate == "softplus_wall":
        assert -1050 < float(g.mean()) < -950
    if gate == "sigmoid_full":
        assert bool((g == -5.0).all())
    if gate == "channels":
        rates = -g.mean((0, 1)).flatten()
        assert float(rates.min()) < 1e-2 and float(rates.max()) > 1.0


def test_cliffs_stand_at_the_edges() -> None:
    assert CLIFFS == (0, 15, 16, 63, 64)
    assert all(f"cliff{position}" in GATES for position in CLIFFS)


@pytest.mark.parametrize("beta", BETAS)
def test_betas(beta: str) -> None:
    p = make(CASE.replace(beta=beta))
    low, high, logits, doubled = BETAS[beta]
    assert float(p.beta.min()) >= low - 1e-9 and float(p.beta.max()) <= high + 1e-9
    assert p.flags()["use_beta_sigmoid_in_kernel"] == p.serving_flags()["beta_is_logits"] == logits
    assert p.flags()["allow_neg_eigval"] == p.serving_flags()["allow_neg_eigval"] == doubled


@pytest.mark.parametrize("seed", [0, 1])
def test_keys_are_of_norm_one_or_less_unless_the_call_normalises_them(seed: int) -> None:
    p = make(CASE.replace(dtype="fp64", seed=seed))
    assert float(p.k.norm(dim=-1).max()) <= 1.0 + 1e-12
    assert (float(p.k.norm(dim=-1).min()) > 1.0 - 1e-12) == (seed % 2 == 0)
    raw = make(CASE.replace(l2norm=True)).k.norm(dim=-1)
    assert float(raw.max()) > 2.0 and float(raw.min()) < 1.0


def test_dtypes_of_gates_and_states() -> None:
    for name, dtype in DTYPES.items():
        p = make(CASE.replace(dtype=name, gate="softplus"))
        own = torch.float64 if name == "fp64" else torch.float32
        assert p.q.dtype == p.k.dtype == p.v.dtype == p.do.dtype == dtype
        assert p.g.dtype == p.beta.dtype == p.A_log.dtype == p.dt_bias.dtype == p.h0.dtype == p.dht.dtype == own
        same = make(CASE.replace(dtype=name, gates="same"))
        assert same.g.dtype == same.beta.dtype == dtype and same.h0.dtype == own


def test_packed_and_unpacked_spans() -> None:
    p = make(CASE.replace(B=1, lengths=(3, 0, 60)))
    assert p.case.N == 3 and p.cu_seqlens.tolist() == [0, 3, 3, 63] and p.h0.shape[0] == 3
    assert p.spans() == [(0, 0, 3), (0, 3, 3), (0, 3, 63)]
    assert make(CASE).spans() == [(0, 0, 70), (1, 0, 70)]


def test_everything_is_finite_so_that_a_nan_is_the_kernels() -> None:
    for gate in GATES:
        p = make(CASE.replace(gate=gate))
        tensors = [*p.inputs().values(), p.do, p.dht]
        assert all(bool(torch.isfinite(x).all()) for x in tensors), gate


def test_cutting_tokens() -> None:
    p = make(CASE)
    cut = p.tokens(3, 9)
    assert cut.case.T == 6 and torch.equal(cut.q, p.q[:, 3:9]) and torch.equal(cut.h0, p.h0)


def test_ids_are_readable_and_tell_cases_apart() -> None:
    assert Case(B=2, T=63, H=4, HV=4, K=128, V=128, dtype="bf16").id.startswith("B2-T63-H4-K128-bf16")
    changes = [{"HV": 3}, {"V": 5}, {"beta": "two"}, {"lengths": (1, 2)}, {"v_first": True}, {"l2norm": True}]
    changes += [{"state": False}, {"chunk_size": 16}]
    names = {CASE.replace(**change).id for change in changes}
    assert len(names) == len(changes) and CASE.id not in names


def test_natural_gate_by_hand() -> None:
    g = torch.tensor([[[[2.0]]]])
    got = natural_gate(g, torch.tensor([0.5]), torch.tensor([[1.0]]))
    assert got.item() == pytest.approx(-math.exp(0.5) * math.log1p(math.exp(3.0)))
    got = natural_gate(g, torch.tensor([0.5]), None, -5.0)
    assert got.item() == pytest.approx(-5.0 / (1.0 + math.exp(-2.0 * math.exp(0.5))))
