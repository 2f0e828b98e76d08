"""The continuous-batching example: it reuses slots and prefixes, drafts, and would notice a wrong output."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "continuous_batching.py"
SMALL = ["--prompts", "12", "--slots", "5", "--prefixes", "12", "--length", "12"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    module = sys.modules["continuous_batching"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("extra", [[], ["--draft", "0"], ["--prefixes", "0"], ["--slots", "1"]], ids=str)
def test_outputs_equal_those_of_each_prompt_alone(example: ModuleType, extra: list[str], capsys) -> None:
    assert example.main([*SMALL, *extra]) == 0
    said = capsys.readouterr().out
    assert "all outputs equal" in said
    assert (", 0 from the prefix cache" in said) == ("--prefixes" in extra)
    assert ("0 of 0 drafted" in said) == ("--draft" in extra)


@pytest.mark.parametrize("broken", ["copy", "reset", "commit"])
def test_a_fault_in_the_bookkeeping_is_found(example: ModuleType, broken: str, monkeypatch, capsys) -> None:
    if broken == "copy":
        monkeypatch.setattr(example.Engine, "copy", lambda *_: None)
    elif broken == "reset":
        monkeypatch.setattr("cula.layers.KDACache.reset", lambda *_: None)
    else:
        commit = importlib.import_module("cula.layers").KDADraft.commit
        monkeypatch.setattr("cula.layers.KDADraft.commit", lambda d, c, n: commit(d, c, [max(x - 1, 0) for x in n]))
    assert example.main(SMALL) == 1
    assert "differ" in capsys.readouterr().out


def test_drafts_and_ties(example: ModuleType) -> None:
    assert example.ngram_draft(b"abcd abcd ab", 4) == b"cd a"
    assert example.ngram_draft(b"abc", 4) == b"" and example.ngram_draft(b"a", 4) == b""
    assert example.ngram_draft(b"aaaa", 2) == b"a"
    assert example.first_difference([1, 2, 3], [1, 2, 3], [1.0] * 3) is None
    assert example.first_difference([1, 9, 3], [1, 2, 3], [1.0] * 3) == 1
    assert example.first_difference([1, 9, 4], [1, 2, 3], [1.0, 1e-4, 1.0]) is None


def test_a_wrong_option_is_one_line(example: ModuleType, capsys) -> None:
    for wrong in (["--slots", "0"], ["--draft", "16"], ["--prefixes", "-1"]):
        with pytest.raises(SystemExit) as caught:
            example.main(wrong)
        assert caught.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(example: ModuleType) -> None:
    assert example.main(["--device", "cuda"]) == 0
