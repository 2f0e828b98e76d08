"""One place for each fact: the version, ruff's pin, what the extras promise, the modes of scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import cula

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", cula.__version__)
    assert 'version = { attr = "cula.__version__" }' in PYPROJECT
    assert cula.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ruff_has_one_pin() -> None:
    pins = set(re.findall(r"ruff==([\d.]+)", PYPROJECT))
    pins |= set(re.findall(r'required-version = "==([\d.]+)"', PYPROJECT))
    pins |= set(re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")))
    assert len(pins) == 1, pins


def test_pre_commit_hooks_are_local() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}


def test_every_extra_is_documented() -> None:
    section = PYPROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = ", section, re.MULTILINE)
    assert {"triton", "cute", "fla", "transformers", "cli", "cpu", "demo", "test", "dev"} <= set(extras)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [extra for extra in extras if f"`{extra}`" not in readme] == []


def test_torch_is_the_only_dependency() -> None:
    assert re.search(r'^dependencies = \["torch>=[\d.]+"\]$', PYPROJECT, re.MULTILINE)


def test_scripts_are_executable() -> None:
    for path in [ROOT / ".ci" / "run", *(ROOT / "tools").glob("*.sh")]:
        assert os.access(path, os.X_OK), path
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0, path


def test_every_make_target_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    described = set(re.findall(r"^([a-z-]+):.*## .+$", makefile, re.MULTILINE))
    assert described == set(phony[1].split())


@pytest.mark.parametrize(
    ("python", "sentence"), [("/no/python", "no interpreter '/no/python'"), ("false", "'false' does not run")]
)
def test_a_wrong_interpreter_is_one_sentence(tmp_path: Path, python: str, sentence: str) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "venv.sh"), "test"],
        env={**os.environ, "PYTHON": python, "VENV": str(tmp_path / "venv")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here")
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "cula", source / "cula", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob(f"cula-{cula.__version__}-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cula").rglob("*.py")}
    assert modules <= names
    assert "cula/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]
