"""What importing costs: `import cula` loads next to nothing, a door loads torch alone, kernels load when they run."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import cula

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "cutlass", "cuda", "numba", "numpy", "click", "rich", "transformers", "fla")
IMPORT_CULA_SECONDS = 0.030

#: Packages whose names are lazy.
DOORS = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for path in (ROOT / "cula").rglob("__init__.py")
    if "_NAMES = " in path.read_text(encoding="utf-8")
)
MODULES = sorted({module.name for module in pkgutil.walk_packages(cula.__path__, "cula.", onerror=lambda name: None)})

#: Put before a program: these imports fail as if nothing were installed.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by a test)", name=name)
sys.meta_path.insert(0, Block())
"""


def run_python(program: str, **env: str) -> str:
    """The last line that `program` prints in a fresh interpreter that has only this repository on its path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CULA_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def loaded_by(statement: str) -> set[str]:
    """Which of `HEAVY` are loaded after `statement`, in a fresh interpreter."""
    program = f"import json, sys\n{statement}\nprint(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    return set(json.loads(run_python(program)))


@cache
def loaded_by_torch() -> frozenset[str]:
    """What torch itself brings in on this machine: cula is not to blame for that."""
    return frozenset(loaded_by("import torch"))


def test_import_cula_loads_nothing_heavy() -> None:
    assert loaded_by("import cula") == set()


def test_import_cula_is_fast() -> None:
    program = "import time\nt = time.perf_counter()\nimport cula\nprint(time.perf_counter() - t)"
    best = min(float(run_python(program)) for _ in range(5))
    assert best < IMPORT_CULA_SECONDS


@pytest.mark.parametrize("door", [door for door in DOORS if door != "cula"])
def test_a_door_alone_loads_nothing_heavy(door: str) -> None:
    assert loaded_by(f"import {door}\ndir({door})") == set()


def test_the_kda_functions_load_torch_alone() -> None:
    loaded = loaded_by("from cula.kda import *\nassert chunk_kda and kda_prefill and kda_decode and kda_verify")
    assert "torch" in loaded
    assert loaded - loaded_by_torch() == set()


def test_no_optional_package_is_needed_outside_the_arch_folders() -> None:
    """Every module outside the arch folders imports where triton, cutlass and numba are missing."""
    outside = [m for m in MODULES if not set(m.split(".")) & {"portable", "sm90", "sm100"} and _needs_no_extra(m)]
    blocked = ("triton", "cutlass", "cuda", "numba", "fla", "transformers")
    program = BLOCK.format(names=blocked) + "from importlib import import_module\n"
    program += f"for name in {outside}:\n    import_module(name)\nprint(len({outside}))"
    assert int(run_python(program)) == len(outside) > 20


def _needs_no_extra(module: str) -> bool:
    """False for kernels in numba or triton, loaded when they run, and for what CuTe DSL kernels share."""
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else "")
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    kernels = {"numba", "triton"} | ({"cutlass"} if module.startswith("cula.ops.common.") else set())
    return not kernels & {name.split(".")[0] for name in imported}


def test_policies_load_without_torch() -> None:
    """The tables and every arch's thresholds are plain Python: they can be asked about any device anywhere."""
    policies = [m for m in MODULES if m.rpartition(".")[2] in ("policy", "plan") and m.startswith("cula.ops.")]
    program = BLOCK.format(names=(*HEAVY,)) + "from importlib import import_module\n"
    program += f"for name in {policies}:\n    import_module(name)\nprint('done')"
    assert policies
    assert run_python(program) == "done"


@pytest.mark.parametrize("door", DOORS)
def test_a_door_lists_and_finds_every_name(door: str) -> None:
    module = import_module(door)
    names = _table(door)
    assert set(names) <= set(dir(module))
    assert set(names) <= set(module.__all__)
    program = (
        f"import {door} as d\nfor n in {sorted(names)}:\n    assert getattr(d, n) is getattr(d, n), n\nprint('done')"
    )
    assert run_python(program) == "done"


@pytest.mark.parametrize("door", DOORS)
def test_type_checkers_see_what_the_door_loads(door: str) -> None:
    """The TYPE_CHECKING imports name the same objects as the lazy table."""
    path = Path(import_module(door).__file__ or "")
    seen = {}
    for block in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom), "a door's TYPE_CHECKING block holds from-imports alone"
                seen |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    submodules = {name: f"{door}:{name}" for name in import_module(door).__all__ if name not in _table(door)}
    assert seen == {**_table(door), **submodules}


@pytest.mark.parametrize("door", DOORS)
def test_absent_names_say_what_to_use(door: str) -> None:
    module = import_module(door)
    for name, sentence in getattr(module, "_ABSENT", {}).items():
        with pytest.raises(AttributeError, match=r"use |not in this version") as caught:
            getattr(module, name)
        assert sentence in str(caught.value)
        assert name not in _table(door), f"{name} is both there and absent"


def test_a_misspelt_name_gets_a_suggestion() -> None:
    kda = import_module("cula.kda")
    with pytest.raises(AttributeError, match="did you mean 'chunk_kda'"):
        _ = kda.chunk_kdaa
    with pytest.raises(AttributeError, match="did you mean 'explain'"):
        _ = cula.explian
    with pytest.raises(AttributeError, match=r"it has .*chunk_kda"):
        _ = kda.zzzzzz
    with pytest.raises(ImportError):
        from cula.kda import chunk_kdaa  # noqa: F401


def test_a_private_probe_is_answered_quietly() -> None:
    """Tools ask modules for dunder names all the time; they must get a plain AttributeError."""
    assert not hasattr(cula, "__wrapped__")
    assert not hasattr(import_module("cula.kda"), "__path_hook__")


def _table(door: str) -> dict[str, str]:
    return import_module(door)._NAMES
