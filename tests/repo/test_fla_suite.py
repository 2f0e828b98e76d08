"""tools/fla_suite.py: FLA's names are replaced before its tests are collected, and the outcome is told truly."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "fla_suite.py"

#: A package with FLA's module names whose functions must never be called.
FAKE = {
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/kda/__init__.py": (
        "from .chunk import chunk_kda as chunk_kda\n"
        "from .fused_recurrent import fused_recurrent_kda as fused_recurrent_kda\n"
    ),
    "fla/ops/kda/chunk.py": "def chunk_kda(*a, **k): raise AssertionError('FLA ran')\n",
    "fla/ops/kda/fused_recurrent.py": (
        "def fused_recurrent_kda(*a, **k): raise AssertionError('FLA ran')\n"
        "def fused_recurrent_kda_fwd(*a, **k): raise AssertionError('FLA ran')\n"
    ),
    "fla/ops/kda/gate.py": "def fused_kda_gate(*a, **k): raise AssertionError('FLA ran')\n",
    "fla/ops/kda/naive.py": "def naive_chunk_kda(*a, **k): raise AssertionError('FLA ran')\n",
}

TESTS = """
import pytest, torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.naive import naive_chunk_kda

def five():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, 8, 2, 16), "beta": torch.rand(1, 8, 2)}

def test_agree():
    o, state = chunk_kda(**five(), output_final_state=True)
    torch.testing.assert_close(o, fused_recurrent_kda(**five())[0])
    torch.testing.assert_close(o.double(), naive_chunk_kda(**five())[0], rtol=1e-4, atol=1e-5)

def test_old_name():
    with pytest.warns(DeprecationWarning):
        fused_recurrent_kda(**five(), transpose_state_layout=True)
    with pytest.raises(ValueError):
        fused_recurrent_kda(**five(), state_v_first=True, transpose_state_layout=True)

def test_chunk_invalid_chunk_size():
    with pytest.raises(ValueError):
        chunk_kda(**five(), chunk_size=16)

def test_skipped():
    pytest.skip("not here")
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = spec_from_file_location("fla_suite", TOOL)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(folder: Path, more: str = "", *arguments: str) -> tuple[int, str]:
    for where, text in FAKE.items():
        path = folder / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "test_kda.py").write_text(TESTS + more)
    done = subprocess.run(
        [sys.executable, str(TOOL), str(folder / "test_kda.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_known_difference_alone_is_success(tmp_path: Path) -> None:
    code, out = _run(tmp_path)
    assert "passed 2, failed 1, skipped 1" in out
    assert "known difference: test_chunk_invalid_chunk_size: cula takes chunks of 16" in out
    assert "calls of cula: chunk_kda 2, fused_recurrent_kda 3, naive_chunk_kda 1" in out
    assert "FAILED" not in out.partition("calls of cula")[2]
    assert code == 0, out


def test_another_failure_is_listed_and_is_exit_code_1(tmp_path: Path) -> None:
    code, out = _run(tmp_path, "\ndef test_more(): assert False\n", "--implementation", "eager")
    assert code == 1
    assert out.endswith("FAILED test_more\n"), out


def test_a_run_that_never_reaches_cula_is_no_success(tmp_path: Path) -> None:
    code, out = _run(tmp_path, "\ndef test_more(): pass\n", "--", "-k", "more")
    assert code == 1 and "passed 1, failed 0" in out and "calls of cula: none" in out


def test_a_file_that_is_not_there_is_exit_code_2(tmp_path: Path, tool: ModuleType) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main([str(tmp_path / "test_kda.py")])
    assert stopped.value.code == 2


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
def test_decode_over_a_pool_advances_the_states_in_place(tool: ModuleType, v_first: bool) -> None:
    from cula.kda import kda_recurrent_reference

    torch.manual_seed(0)
    N, H, D = 3, 2, 16
    q, k, v, raw = (torch.randn(1, N, H, D) for _ in range(4))
    beta, A_log, slots = torch.rand(1, N, H), torch.randn(H), torch.tensor([4, 0, 2], dtype=torch.int32)
    k_first = torch.randn(6, H, D, D)
    pool = (k_first.transpose(-1, -2) if v_first else k_first).clone().contiguous()
    out, same = tool.recurrent_forward(
        q=q, k=k, v=v, g=raw, beta=beta, A_log=A_log, initial_state=pool, scale=0.5, output_final_state=False,
        inplace_final_state=True, cu_seqlens=torch.arange(N + 1), ssm_state_indices=slots, num_accepted_tokens=None,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0, state_v_first=v_first,
    )  # fmt: skip
    o, final = kda_recurrent_reference(
        q, k, v, raw, beta, scale=0.5, initial_state=k_first[slots.long()], output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0, A_log=A_log,
        cu_seqlens=torch.arange(N + 1),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), o, rtol=1e-4, atol=1e-5)
    left = same.transpose(-1, -2) if v_first else same
    torch.testing.assert_close(left[slots.long()].double(), final, rtol=1e-4, atol=1e-5)
    others = [1, 3, 5]
    assert torch.equal(left[others], k_first[others])
