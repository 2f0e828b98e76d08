"""explain and available: every row with its reason, for any arch, on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cula
from cula.host.table import Row, Verdict

DEVICES = ["cpu", "sm80", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"]
FUNCTIONS = {
    "chunk_kda": ["chunk forward"],
    "kda_prefill": ["chunk forward"],
    "fused_recurrent_kda": ["recurrent"],
    "kda_decode": ["decode"],
    "kda_verify": ["verify"],
    "kda_rollback": ["rollback"],
    "kda_decode_fused": ["decode fused"],
    "fused_kda_gate": ["gate"],
    "chunk_lightning_attn": ["lightning forward"],
    "lightning_prefill": ["lightning forward"],
    "lightning_decode": ["lightning decode"],
    "lightning_verify": ["lightning verify"],
}
BACKWARDS = {"chunk backward", "lightning backward"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_row_that_accepts_on_every_device(device: str, name: str) -> None:
    stages = cula.explain(name, device=device).stages
    assert [stage for stage, _ in stages] == FUNCTIONS[name]
    for _, found in stages:
        assert any(v.reason is None for v in found), f"nothing serves {name} on {device}"
        for verdict in found:
            assert isinstance(verdict, Verdict) and isinstance(verdict.row, Row)
            assert verdict.reason is None or verdict.reason.strip()
            assert "{" not in (verdict.reason or ""), "an unformatted reason"


def test_grad_adds_the_backward_of_the_chunk_functions_alone() -> None:
    found = [s for s, _ in cula.explain("chunk_lightning_attn", grad=True).stages]
    assert found == ["lightning forward", "lightning backward"]
    assert [s for s, _ in cula.explain("chunk_kda", grad=True).stages] == ["chunk forward", "chunk backward"]
    assert [s for s, _ in cula.explain("kda_prefill", grad=True).stages] == ["chunk forward"]


def test_no_name_is_every_function() -> None:
    found = [stage for stage, _ in cula.explain(device="sm90", grad=True).stages]
    expected = {stage for stages in FUNCTIONS.values() for stage in stages} | BACKWARDS
    assert set(found) == expected and len(found) == len(expected)


def test_it_prints_a_table_with_the_row_that_serves() -> None:
    text = str(cula.explain("chunk_kda", device="cpu", B=2, T=63, H=4, K=64, dtype="fp32"))
    lines = text.splitlines()
    assert "eager" in text and "accepted" in text and "cpu" in lines[0]
    assert len(lines) > 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64", torch.bfloat16, torch.float64, "float32"], ids=str)
def test_dtypes(dtype) -> None:
    assert cula.explain("chunk_kda", dtype=dtype).stages


def test_it_says_what_a_call_then_does() -> None:
    """What explain accepts runs, and the first accepted row is what the call would take."""
    from cula.checks.cases import Case, make
    from cula.checks.runs import chunk

    stage, found = cula.explain("chunk_kda", device="cpu", B=1, T=5, H=1, K=16, V=8, dtype="fp32").stages[0]
    first = next(v.row for v in found if v.reason is None)
    p = make(Case(T=5, K=16, V=8))
    assert torch.equal(chunk(p, implementation=first.name)[0], chunk(p)[0]) and stage == "chunk forward"
    accepted = {v.row.name for v in found if v.reason is None}
    for verdict in found:
        if verdict.row.name not in accepted:
            with pytest.raises(cula.NotSupportedError):
                chunk(p, implementation=verdict.row.name)


def test_packed_lengths_and_flags() -> None:
    flags = {"use_gate_in_kernel": True, "lower_bound": -5.0, "state_v_first": True, "chunk_size": 32}
    assert cula.explain("chunk_kda", lengths=[3, 0, 70], T=73, flags=flags).stages
    assert cula.explain("kda_prefill", lengths=[3, 0, 70], T=80, flags={"gate_is_raw": False}).stages


@pytest.mark.parametrize("name, flag", [
    ("chunk_kda", "transpose_state_layout"), ("chunk_kda", "gate_is_raw"), ("kda_decode", "use_gate_in_kernel"),
    ("kda_verify", "chunk_size"), ("fused_kda_gate", "beta"), ("lightning_verify", "rollback"),
])  # fmt: skip
def test_a_flag_that_the_function_does_not_have_is_a_type_error(name: str, flag: str) -> None:
    with pytest.raises(TypeError, match=flag):
        cula.explain(name, flags={flag: True})


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        cula.explain("chunk_kda", tokens=5)
    with pytest.raises(TypeError):
        cula.available(device="cpu")


BAD = [
    ({"name": "chunk_gdn"}, ValueError, "chunk_gdn"),
    ({"device": "hopper"}, ValueError, "hopper"),
    ({"dtype": "int8"}, ValueError, "int8"),
    ({"H": 2, "HV": 3}, ValueError, "HV"),
    ({"H": 0}, ValueError, "H"),
    ({"T": -1}, ValueError, "T"),
    ({"K": 1.5}, (ValueError, TypeError), "K"),
    ({"B": 2, "lengths": [3, 4]}, ValueError, "B"),
    ({"lengths": [-1]}, ValueError, "lengths"),
]


@pytest.mark.parametrize("change, error, name", BAD, ids=str)
def test_bad_arguments_are_cula_errors(change: dict, error, name: str) -> None:
    with pytest.raises(cula.CulaError, match=name) as caught:
        cula.explain(**{"name": "chunk_kda", **change})
    assert isinstance(caught.value, error)


def test_unknown_environment_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_IMPLEMENTATION", "fastest")
    with pytest.raises(cula.RangeError, match="CULA_IMPLEMENTATION"):
        cula.explain("chunk_kda")


def test_available_lists_every_row_of_every_table() -> None:
    found = cula.available()
    assert "eager" in found.names
    stages = {row.stage for row, _ in found.rows}
    assert stages == {stage for names in FUNCTIONS.values() for stage in names} | BACKWARDS
    explained = {v.row for _, vs in cula.explain(grad=True).stages for v in vs}
    assert {row for row, _ in found.rows} == explained
    assert set(found.names) == {row.name for row, reason in found.rows if reason is None}
    assert all(row.name in str(found) for row, _ in found.rows)


def test_rows_say_what_they_are() -> None:
    for row, _ in cula.available().rows:
        assert row.name in ("eager", "portable", "sm90", "sm100")
        assert row.algorithm in ("kda", "lightning") and row.mechanism and row.arch and row.dsl
        assert row.status.startswith(("measured on", "compiled, not run")), row
        assert row.verified or row.status.startswith("compiled, not run")
        assert ":" in row.entry


def test_every_row_that_is_available_can_be_loaded() -> None:
    for row, reason in cula.available().rows:
        if reason is None:
            assert callable(row.load())


def test_eager_serves_every_stage_on_a_cpu() -> None:
    stages = {row.stage for row, reason in cula.available().rows if row.name == "eager" and reason is None}
    assert stages == {row.stage for row, _ in cula.available().rows}


def test_explaining_loads_no_kernel_language_and_no_kernel() -> None:
    code = (
        "import sys, torch\n"
        "own = set(sys.modules)\n"  # torch loads what it finds of cuda.bindings
        "import cula\n"
        "for device in ('cpu', 'sm90', 'sm100', 'sm120'): cula.explain(device=device, grad=True)\n"
        "found = [m for m in set(sys.modules) - own if m.split('.')[0] in ('triton', 'cutlass', 'cuda', 'numba')]\n"
        "found += [m for m in sys.modules if m.startswith('cula.ops') and m.split('.')[-2:-1] == ['eager']]\n"
        "print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
