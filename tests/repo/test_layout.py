"""The placement rule of REPO_LAYOUT.md: a file's path under cula/ops says what it depends on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAGES = {"chunk", "decode", "gate"}
ARCHS = {"eager", "portable", "sm90", "sm100"}
DSLS = {"triton", "cutlass", "cuda", "tilelang"}
COMPILERS = DSLS | {"numba"}  # numba is no GPU language, but it too belongs to one implementation
ALLOWED_DSLS = {"eager": {"numba"}, "portable": {"triton"}, "sm90": DSLS, "sm100": DSLS}
FORBIDDEN_WORDS = {
    "hopper", "blackwell", "cute", "triton", "wip", "util", "utils", "helper", "helpers", "misc", "new", "old", "tmp",
}  # fmt: skip


# ---- the checker -------------------------------------------------------------------------------------------------


def violations(root: Path) -> list[str]:
    """Everything in the tree under `root` that breaks the placement rule, one sentence each."""
    found = [*_names(root), *_packages(root), *_test_paths(root)]
    for path in sorted((root / "cula").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        imports = list(imported_modules(path, where))
        found += [f"{where}: {problem}" for problem in _placement(where)]
        found += [f"{where}: {problem}" for problem in _imports(where, imports)]
        if path.name == "__init__.py":
            found += [f"{where}: {problem}" for problem in _door(path)]
    return found


def imported_modules(path: Path, where: str) -> Iterator[tuple[str, bool]]:
    """(absolute module name, True if it is imported as soon as the file is) for each import but TYPE_CHECKING ones."""
    package = where.removesuffix(".py").removesuffix("/__init__").split("/")
    if path.name != "__init__.py":
        package = package[:-1]

    def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes: list[ast.AST] = list(node.orelse)
        else:
            nodes = list(ast.iter_child_nodes(node))
        for child in nodes:
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield module, at_load
                yield from ((f"{module}.{alias.name}", at_load) for alias in child.names)
            elif isinstance(child, ast.Call) and _called(child) in ("import_module", "__import__"):
                if child.args and isinstance(child.args[0], ast.Constant):
                    yield str(child.args[0].value), at_load
                yield from walk(child, at_load)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_load and not inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _cell(parts: list[str]) -> tuple[str, str | None, str | None]:
    """(algorithm, stage, arch) of a path or module below cula/ops, None from the level where it is cut."""
    folders = [part for part in parts if part in STAGES | ARCHS]
    stage = next((part for part in folders if part in STAGES), None)
    arch = next((part for part in folders if part in ARCHS), None)
    return parts[0], stage, arch


def _placement(where: str) -> Iterator[str]:
    """What is wrong with the path itself."""
    parts = where.split("/")
    if parts[:2] != ["cula", "ops"]:
        wrong = sorted((set(parts) & ARCHS) | {p for p in parts if re.fullmatch(r"sm\d+", p)})
        if wrong:
            yield f"an arch folder ({wrong[0]}) belongs to cula/ops/<algorithm>/<stage>"
        return
    folders = parts[2:-1]
    if not folders:
        if parts[-1] != "__init__.py":
            yield "a module right under cula/ops depends on no algorithm: cula/ops/common or cula/host"
        return
    if folders[0] in ARCHS | STAGES:
        yield f"{folders[0]} stands where an algorithm's name must stand"
        return
    if folders[0] == "common":
        if len(folders) > 1:
            yield "cula/ops/common has no subfolders"
        return
    for depth, folder in enumerate(folders[1:], 1):
        if (folder in ARCHS or re.fullmatch(r"sm\d+", folder)) and depth != 2:
            yield f"arch folder {folder} must be the third level: algorithm/stage/arch"
        if folder in STAGES and depth != 1:
            yield f"stage folder {folder} must be the second level: algorithm/stage"
    if len(folders) > 1 and folders[1] not in STAGES | ARCHS:
        yield f"{folders[1]} is no stage; the stages are {', '.join(sorted(STAGES))}"
    if len(folders) > 2 and re.fullmatch(r"sm\d+", folders[2]) and folders[2] not in ARCHS:
        yield f"{folders[2]} is no known arch; the archs are {', '.join(sorted(ARCHS))}"
    if len(folders) > 3:
        yield "nothing lies below an arch folder or a stage's shared folder but files"


def _imports(where: str, imports: list[tuple[str, bool]]) -> Iterator[str]:
    """What the file imports that its path does not allow."""
    parts = where.removesuffix(".py").split("/")
    in_ops = parts[:2] == ["cula", "ops"] and len(parts) > 3
    algorithm, stage, arch = _cell(parts[2:-1]) if in_ops else ("", None, None)
    for module, at_load in dict.fromkeys(imports):
        top = module.split(".")[0]
        allowed = ALLOWED_DSLS.get(arch, COMPILERS if algorithm == "common" else set())
        if in_ops and stage is None and arch is None and algorithm != "common":
            allowed = {"numba"}  # CPU loops that the eager rows of several stages share stand above the stages
        if top in COMPILERS and top not in allowed:
            yield f"imports {top}, which only {_who_may(top)} may"
        if at_load and top == "torch" and _is_torch_free(parts):
            yield "imports torch at module level; import it inside the function that needs it"
        if in_ops and module.startswith("cula.ops."):
            yield from _cross_import(parts, (algorithm, stage, arch), module, at_load)
        foreign = module.startswith("cula.") and not module.startswith("cula.host")
        if at_load and foreign and parts[:2] == ["cula", "host"]:
            yield f"cula/host imports {module} at module level, but depends on no algorithm"


def _who_may(dsl: str) -> str:
    return ", ".join(arch for arch, allowed in ALLOWED_DSLS.items() if dsl in allowed) + " folders"


def _is_torch_free(parts: list[str]) -> bool:
    """cula/host, policies, plans and the context-parallel vocabulary are pure Python: they answer for any arch."""
    if parts[:2] == ["cula", "host"] or parts == ["cula", "__init__"] or parts == ["cula", "__main__"]:
        return True
    return parts[:2] == ["cula", "ops"] and parts[-1] in ("policy", "plan", "cp_mode", "__init__")


def _cross_import(
    parts: list[str], cell: tuple[str, str | None, str | None], module: str, at_load: bool
) -> Iterator[str]:
    """An import within cula.ops must go up or down its own path, never to a sibling cell."""
    algorithm, stage, arch = cell
    names = module.split(".")[2:]
    other_algorithm, other_stage, other_arch = _cell(names)
    if other_algorithm == "common":
        return
    if other_algorithm != algorithm:
        yield f"imports {module}, another algorithm's; what two share belongs to cula/ops/common or cula/host"
    elif other_arch and arch and (other_arch, other_stage) != (arch, stage):
        yield f"imports {module} of another cell; what two share moves up"
    elif other_arch and not arch and at_load and "policy" not in names and names[-1] != other_arch:
        yield f"imports {module} at module level; rows of the table are loaded when they run"
    elif other_stage and not stage:
        yield f"imports {module}, but lies above the stages"


def _names(root: Path) -> Iterator[str]:
    for top in ("cula", "benchmarks", "tools"):
        for path in sorted((root / top).rglob("*")):
            where = path.relative_to(root)
            if "__pycache__" in where.parts or (path.is_file() and path.suffix not in (".py", ".sh")):
                continue
            words = set(re.split(r"[_\-.]", where.stem.lower()))
            bad = (words & FORBIDDEN_WORDS) | {word for word in words if re.fullmatch(r"v\d+", word)}
            for word in sorted(bad):
                yield f"{where.as_posix()}: {word!r} says nothing about what the file depends on; name the job"


def _packages(root: Path) -> Iterator[str]:
    for path in sorted((root / "cula").rglob("*.py")):
        if not (path.parent / "__init__.py").exists():
            yield f"{path.parent.relative_to(root).as_posix()}: has no __init__.py, so that no wheel would contain it"


def _test_paths(root: Path) -> Iterator[str]:
    """tests/ops repeats cula/ops, and every stage that has a table has tests."""
    tests, ops = root / "tests" / "ops", root / "cula" / "ops"
    for folder in sorted(path for path in tests.rglob("*") if path.is_dir() and path.name != "__pycache__"):
        inside = folder.relative_to(tests)
        if any(folder.glob("*.py")) and not (ops / inside).is_dir():
            yield f"{folder.relative_to(root).as_posix()}: there is no cula/ops/{inside.as_posix()}"
    for policy in sorted(ops.glob("*/*/policy.py")):
        inside = policy.parent.relative_to(ops)
        if not any((tests / inside).rglob("test_*.py")):
            yield f"cula/ops/{inside.as_posix()}: has no test under tests/ops/{inside.as_posix()}"


def _door(path: Path) -> Iterator[str]:
    """A lazy name must not equal a submodule: it would be the function first and the module later."""
    for name in lazy_names(path):
        if (path.parent / name).is_dir() or (path.parent / f"{name}.py").exists():
            yield f"lazy name {name!r} equals a submodule's name"


def lazy_names(path: Path) -> dict[str, str]:
    """The `_NAMES` table of a door."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_NAMES":
            return ast.literal_eval(node.value)
    return {}


# ---- the tests ---------------------------------------------------------------------------------------------------


def test_the_tree_follows_the_placement_rule() -> None:
    assert violations(ROOT) == []


BAD_TREES = {
    "dsl-in-eager": ("cula/ops/kda/chunk/eager/fwd.py", "def f():\n    import triton\n", "imports triton"),
    "cutlass-in-portable": ("cula/ops/kda/chunk/portable/fwd.py", "import cutlass.cute\n", "imports cutlass"),
    "dsl-in-stage": ("cula/ops/kda/chunk/op.py", "from triton import jit\n", "imports triton"),
    "numba-in-stage": ("cula/ops/kda/decode/op.py", "import numba\n", "imports numba"),
    "dsl-in-host": ("cula/host/probe.py", "def f():\n    import cuda.bindings\n", "imports cuda"),
    "dsl-by-import-module": (
        "cula/host/probe.py",
        "from importlib import import_module\nimport_module('triton')\n",
        "imports triton",
    ),
    "dsl-in-door": ("cula/kda/extra.py", "import triton\n", "imports triton"),
    "torch-in-host": ("cula/host/probe.py", "import torch\n", "imports torch at module level"),
    "torch-in-host-try": (
        "cula/host/probe.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    nn = 0\n",
        "torch",
    ),
    "torch-in-policy": ("cula/ops/kda/chunk/policy.py", "import torch\n", "imports torch at module level"),
    "host-knows-kda": ("cula/host/probe.py", "from cula.ops.kda import problem\n", "depends on no algorithm"),
    "arch-before-stage": ("cula/ops/kda/sm90/fused.py", "", "must be the third level"),
    "arch-as-algorithm": ("cula/ops/eager/kda.py", "", "where an algorithm's name must stand"),
    "unknown-stage": ("cula/ops/kda/training/op.py", "", "training is no stage"),
    "unknown-arch": ("cula/ops/kda/chunk/sm80/fused.py", "", "sm80 is no known arch"),
    "too-deep": ("cula/ops/kda/chunk/sm90/parts/fused.py", "", "nothing lies below an arch folder"),
    "loose-module": ("cula/ops/gate.py", "", "right under cula/ops"),
    "arch-outside-ops": ("cula/layers/sm90/kda.py", "", "belongs to cula/ops"),
    "sibling-arch": (
        "cula/ops/kda/chunk/sm100/fwd_o.py",
        "from ..sm90.fwd_o import f\n",
        "another cell",
    ),
    "sibling-algorithm": ("cula/ops/kda/problem.py", "import cula.ops.lightning.slopes\n", "another algorithm's"),
    "eager-row-at-load": ("cula/ops/kda/chunk/op.py", "from cula.ops.kda.chunk.eager import fwd\n", "at module level"),
    "stage-from-above": ("cula/ops/kda/problem.py", "from cula.ops.kda.chunk import op\n", "above the stages"),
    "forbidden-word": ("cula/ops/kda/chunk/portable/utils.py", "", "'utils'"),
    "forbidden-part-of-name": ("cula/ops/kda/chunk/portable/fwd_new.py", "", "'new'"),
    "version-in-name": ("cula/ops/kda/chunk/portable/fwd_v2.py", "", "'v2'"),
    "hopper": ("cula/ops/kda/chunk/hopper/fwd.py", "", "'hopper'"),
    "lazy-name-is-module": ("cula/kda/decode.py", "", "lazy name 'decode'"),
    "stage-without-tests": ("cula/ops/kda/decode/policy.py", "", "has no test under"),
    "tests-without-stage": ("tests/ops/kda/verify/test_verify.py", "", "there is no cula/ops/kda/verify"),
}


def _grow(root: Path, where: str, text: str) -> None:
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in [path.parent, *path.parent.parents]:
        if folder == root or root not in folder.parents:
            break
        (folder / "__init__.py").touch()
    path.write_text(text)


def _good_tree(root: Path) -> None:
    _grow(root, "cula/kda/__init__.py", "_NAMES = {'decode': 'cula.ops.kda.decode.op:kda_decode'}\n")
    _grow(root, "cula/host/arch.py", "def f():\n    import torch\n    return torch\n")
    _grow(root, "cula/ops/kda/problem.py", "import torch\nfrom cula.host import arch\n")
    _grow(root, "cula/ops/kda/chunk/policy.py", "from cula.ops.kda.chunk.sm90 import policy\n")
    _grow(root, "cula/ops/kda/chunk/eager/fwd.py", "import torch\nfrom cula.ops.kda import problem\n")
    _grow(root, "cula/ops/kda/chunk/portable/fwd.py", "import triton\n")
    _grow(root, "cula/ops/kda/chunk/sm90/policy.py", "")
    _grow(root, "cula/ops/kda/chunk/sm90/fused.py", "import cutlass\nfrom cula.ops.common import tma\n")
    _grow(root, "cula/ops/common/tma.py", "import cutlass\n")
    _grow(root, "tests/ops/kda/chunk/test_forward.py", "")


def test_a_good_tree_passes(tmp_path: Path) -> None:
    _good_tree(tmp_path)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("name", BAD_TREES)
def test_the_checker_finds_a_bad_tree(tmp_path: Path, name: str) -> None:
    where, text, expected = BAD_TREES[name]
    _good_tree(tmp_path)
    _grow(tmp_path, where, text)
    found = violations(tmp_path)
    assert any(expected in sentence for sentence in found), found


def test_the_checker_finds_a_folder_without_init(tmp_path: Path) -> None:
    _good_tree(tmp_path)
    (tmp_path / "cula" / "ops" / "kda" / "chunk" / "eager" / "__init__.py").unlink()
    assert any("has no __init__.py" in sentence for sentence in violations(tmp_path))
