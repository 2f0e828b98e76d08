"""CULA_* at the doors: a preference, strict values, read afresh at every call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cula
from cula.checks.cases import Case, make
from cula.checks.runs import chunk, fresh_pool, serve
from cula.kda import fused_kda_gate, fused_recurrent_kda

VARIABLES = ["CULA_IMPLEMENTATION", "CULA_CP", "CULA_DEBUG", "CULA_ALLOW_UNVERIFIED"]


def calls() -> dict:
    p = make(Case(B=2, T=1, gate="softplus", v_first=True))
    pool, index = fresh_pool(p)
    slots = {"state_pool": pool, "state_indices": index}
    return {
        "chunk_kda": lambda: chunk(p),
        "kda_prefill": lambda: serve("kda_prefill", p),
        "kda_decode": lambda: serve("kda_decode", p, **slots),
        "kda_verify": lambda: serve("kda_verify", p, **slots),
        "fused_recurrent_kda": lambda: fused_recurrent_kda(*p.five()),
        "fused_kda_gate": lambda: fused_kda_gate(p.g, p.A_log),
    }


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("function", calls())
def test_an_unknown_value_is_a_range_error_at_every_door(monkeypatch, variable: str, function: str) -> None:
    run = calls()[function]
    run()
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(cula.RangeError) as caught:
        run()
    assert variable in str(caught.value) and "must be one of" in str(caught.value)
    monkeypatch.delenv(variable)
    run()


@pytest.mark.parametrize("value", ["auto", "eager", "portable", "sm90", "sm100"])
@pytest.mark.parametrize("function", calls())
def test_a_preference_never_fails_a_call(monkeypatch, value: str, function: str) -> None:
    monkeypatch.setenv("CULA_IMPLEMENTATION", value)
    calls()[function]()


def test_an_argument_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    p = make(Case(T=3))
    monkeypatch.setenv("CULA_IMPLEMENTATION", "eager")
    with pytest.raises(cula.NotSupportedError, match="sm90"):
        chunk(p, implementation="sm90")
    monkeypatch.setenv("CULA_CP", "force")
    assert torch.equal(chunk(p, cp_mode=False)[0], chunk(p, cp_mode="off")[0])


def test_cp_from_the_environment_reaches_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from cula.kda import chunk_kda

    p = make(Case(T=3))
    monkeypatch.setenv("CULA_CP", "off")
    chunk_kda(*p.five())
    monkeypatch.setenv("CULA_CP", "force")
    with pytest.raises(cula.CulaError):
        chunk_kda(*p.five(), implementation="eager")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_debug_checks_what_only_a_device_knows(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    p = make(Case(B=2, T=1, v_first=True))
    pool, _ = fresh_pool(p, slots=4)
    pool.zero_()
    before = pool.clone()
    monkeypatch.setenv("CULA_DEBUG", debug)
    bad = {"state_pool": pool, "state_indices": torch.tensor([1, 99])}
    if debug == "0":
        assert not serve("kda_decode", p, **bad)[1].any()
        return
    for function in ("kda_decode", "kda_verify"):
        with pytest.raises(cula.RangeError, match="state_indices"):
            serve(function, p, **bad)
    with pytest.raises(cula.RangeError, match="read_indices"):
        serve("kda_prefill", p, state_pool=pool, read_indices=torch.tensor([1, 99]))
    assert torch.equal(pool, before)
    serve("kda_decode", p, state_pool=pool, state_indices=torch.tensor([1, -1]))


@pytest.mark.parametrize("function", calls())
def test_a_call_leaves_torchs_thread_count_alone(function: str) -> None:
    """In a fresh process, since a runtime that starts its threads at the first call may set everybody's."""
    code = f"""
import torch
torch.set_num_threads(1)
from cula.checks.cases import Case, make
from cula.checks.runs import chunk, fresh_pool, serve
from cula.kda import fused_kda_gate, fused_recurrent_kda
p = make(Case(B=2, T=1, H=4, HV=4, K=32, V=32, gate="softplus", v_first=True))
pool, index = fresh_pool(p)
slots = {{"state_pool": pool, "state_indices": index}}
run = {{
    "chunk_kda": lambda: chunk(p),
    "kda_prefill": lambda: serve("kda_prefill", p),
    "kda_decode": lambda: serve("kda_decode", p, **slots),
    "kda_verify": lambda: serve("kda_verify", p, **slots),
    "fused_recurrent_kda": lambda: fused_recurrent_kda(*p.five()),
    "fused_kda_gate": lambda: fused_kda_gate(p.g, p.A_log),
}}[{function!r}]
run()
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
