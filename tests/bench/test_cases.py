"""Rows of shapes: their names, what must move, and the inputs made for them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cula.bench.cases import CASES, DECODE_BUFFERS, GATES, OPS, Case, names, select
from cula.bench.inputs import LOWER_BOUND, OFFSETS, finish_gate, make_inputs, raw_gate

NAMED = [
    (Case("kda_prefill", B=1, T=8192, H=64), "B1-T8192-H64"),
    (Case("kda_prefill", B=1, T=8192, H=16, HV=64), "B1-T8192-H16-HV64"),
    (Case("kda_prefill", T=8192, H=64, lengths=(1300, 547, 2048, 963, 271, 3063)), "packed6-8192-H64"),
    (Case("kda_prefill", T=8192, H=96, lengths=(1024,) * 8), "packed8x1024-H96"),
    (Case("kda_decode", N=64, H=64, buffers=40), "N64-H64"),
    (Case("kda_decode", N=1, H=32), "N1-H32-warm"),
]
SMALL = Case("kda_prefill", B=2, T=40, H=2, K=16)


@pytest.mark.parametrize(("case", "name"), NAMED, ids=[name for _, name in NAMED])
def test_names_are_those_of_the_result_files(case: Case, name: str) -> None:
    assert case.name == name


def test_the_cpu_rows() -> None:
    found = {(case.op, case.name) for case in select("cpu")}
    assert {("kda_prefill", "B1-T2048-H4"), ("kda_train", "B1-T2048-H4"), ("kda_decode", "N1-H32")} <= found
    assert len(found) == len(select("cpu")), "two rows of one name"
    assert {case.op for case in CASES} <= set(OPS)


def test_rows_are_selected_by_op_and_by_name() -> None:
    assert [case.op for case in select("cpu", ("kda_train",))] == ["kda_train"]
    assert {case.op for case in select("cpu", (), ("B1-T2048-H4",))} == {"kda_prefill", "kda_train"}
    assert select("cpu", ("kda_train",), ("N1-H32",)) == []
    assert names("cpu", ("kda_decode",)) == ["N1-H32", "N1-H32-warm"]


def test_bytes_that_must_move() -> None:
    per_token_head = 5 * 128
    forward = Case("kda_prefill", B=1, T=8192, H=64, dtype="bf16")
    assert forward.moved_bytes == 8192 * 64 * per_token_head * 2
    assert replace(forward, op="kda_train").moved_bytes == 8192 * 64 * (1280 + 2304)
    decode = Case("kda_decode", N=3, H=32)
    assert decode.state_bytes == 3 * 32 * 128 * 128 * 4
    assert decode.moved_bytes == 2 * decode.state_bytes + 3 * 32 * per_token_head * 4


def test_the_arithmetic_of_a_token_and_head_is_about_140_kflop() -> None:
    assert Case("kda_prefill").forward_flop == 139264


def test_a_decode_step_walks_over_all_states_or_repeats_one() -> None:
    assert Case("kda_decode", N=1, buffers=DECODE_BUFFERS).turns == tuple(range(DECODE_BUFFERS))
    assert Case("kda_decode", N=1).turns == (0,) * DECODE_BUFFERS
    assert not Case("kda_decode", N=1).from_memory
    assert Case("kda_prefill", T=5).turns == (0,)


@pytest.mark.parametrize("gate", GATES)
def test_inputs_are_seeded_and_never_zero(gate: str) -> None:
    a, b, other = (make_inputs(SMALL, gate, seed) for seed in (0, 0, 1))
    for x, y, z in zip(a.operands, b.operands, other.operands):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)
        assert x.dtype == torch.float32
        assert bool((x != 0).all())
    assert torch.allclose(a.q.norm(dim=-1), torch.ones(2, 40, 2))
    assert torch.allclose(a.k.norm(dim=-1), torch.ones(2, 40, 2))
    assert float(a.beta.min()) > 0 and float(a.beta.max()) < 1
    assert float(a.g.max()) < 0 and float(a.g.min()) > LOWER_BOUND


@pytest.mark.parametrize("gate", GATES)
def test_the_finished_gate_comes_from_the_raw_one(gate: str) -> None:
    made = make_inputs(SMALL, gate)
    again = LOWER_BOUND * torch.sigmoid(made.A_log.exp()[:, None] * (made.raw_g + made.dt_bias))
    torch.testing.assert_close(made.g, again, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(made.beta, torch.sigmoid(made.beta_logits))


@pytest.mark.parametrize("gate", GATES)
def test_raw_gates_have_unit_noise_around_an_offset_per_channel(gate: str) -> None:
    raw = raw_gate(gate, (1, 500, 8, 64), torch.Generator().manual_seed(3))
    centre = raw.mean(1)
    low, high = OFFSETS[gate]
    assert low - 0.3 < float(centre.min()) and float(centre.max()) < high + 0.3
    assert float((raw - centre[:, None]).std()) == pytest.approx(1.0, abs=0.02)
    spread = float(centre.max() - centre.min())
    assert spread == pytest.approx(high - low, abs=0.6)


def test_gates_forget_as_their_names_say() -> None:
    """The median channel's memory in tokens: below 16 when strong, far beyond when weak, both kinds when mixed."""
    memory = {}
    for gate in GATES:
        rng = torch.Generator().manual_seed(0)
        raw = raw_gate(gate, (1, 200, 8, 64), rng)
        g = finish_gate(raw, 0.5 * torch.randn(8, generator=rng), 0.1 * torch.randn(8, 64, generator=rng))
        memory[gate] = (-1.0 / g.mean(1)).flatten()
    assert float(memory["strong"].max()) < 16
    assert float(memory["mixed"].min()) < 16 and float(memory["mixed"].max()) > 1000
    assert float(memory["weak"].median()) > 500


def test_decode_inputs_have_a_state_per_sequence_and_one_token() -> None:
    case = Case("kda_decode", N=3, H=2, K=16)
    made = make_inputs(case, "mixed")
    assert made.q.shape == (3, 1, 2, 16)
    assert made.state is not None and made.state.shape == (3, 2, 16, 16)
    assert made.bytes == 4 * (4 * made.q.numel() + made.beta.numel() + made.state.numel())


def test_packed_inputs_have_their_boundaries() -> None:
    made = make_inputs(Case("kda_prefill", T=10, H=1, K=16, lengths=(3, 0, 7)), "strong")
    assert made.cu_seqlens is not None and made.cu_seqlens.tolist() == [0, 3, 3, 10]


def test_the_package_loads_without_torch_and_peers() -> None:
    code = (
        "import sys, cula.bench.cases, cula.bench.bars, cula.bench.peers, cula.bench.records, cula.cli.bench;"
        "print([m for m in ('torch', 'transformers', 'ggml', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
