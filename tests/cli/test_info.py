"""`cula info` tells what is here without importing what it only reports on."""

from __future__ import annotations

import sys

import pytest
import torch

import cula
from cula.__main__ import main
from cula.cli import info

Capture = pytest.CaptureFixture[str]


def test_info_shows_every_section(capsys: Capture) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for title in ("Versions", "Devices", "Environment", "Implementations on this machine"):
        assert title in out
    assert cula.__version__ in out
    assert torch.__version__ in out
    assert "CULA_IMPLEMENTATION" in out
    assert "eager" in out


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    find = info.find_spec
    monkeypatch.setattr(info, "find_spec", lambda name: None if name == "triton" else find(name))
    assert main(["info"]) == 0
    assert "not found: pip install 'cula[triton]'" in capsys.readouterr().out


def test_versions_are_looked_up_without_an_import() -> None:
    before = set(sys.modules)
    assert dict(info.package_versions())["torch"] == torch.__version__
    assert {name.split(".")[0] for name in set(sys.modules) - before} & {
        "triton",
        "cutlass",
        "fla",
        "transformers",
    } == set()


def test_info_shows_values_of_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CULA_IMPLEMENTATION", "eager")
    assert main(["info"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "CULA_IMPLEMENTATION" in line)
    assert "not set" not in line


def test_a_wrong_value_in_the_environment_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CULA_CP", "sometimes")
    assert main(["info"]) in (0, 2)
    assert "sometimes (not a known value)" in capsys.readouterr().out


def test_every_implementation_that_refuses_has_a_reason() -> None:
    rows = list(info.implementations())
    assert rows
    for row in rows:
        assert row[4] == "yes" or row[4].startswith("no: ")
    assert any(row[1] == "eager" and row[4] == "yes" for row in rows)
