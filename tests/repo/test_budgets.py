"""Size budgets, and what a public function owes its reader: annotations and a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FILE_LINES = 800
FUNCTION_LINES = 60
KERNEL_LINES = 150  # a kernel or one warp's role
KERNEL_FOLDERS = {"portable", "sm90", "sm100"}
PARAMETERS = 12
WINDOW = 10  # consecutive lines of code
DUPLICATES = 0.03  # part of all windows of the package that may stand elsewhere too
#: What makes a function compiled code: these decorate it or are called on it.
COMPILERS = {"jit", "kernel", "njit", "compiled"}  # the last one is cula.ops.common.loops' own

Function = ast.FunctionDef | ast.AsyncFunctionDef


def over_budget(root: Path, public: set[str]) -> list[str]:
    """Files, functions and parameter lists over budget. `public`: "module:name" of what the doors offer."""
    found = []
    for path in sorted((root / "cula").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > FILE_LINES:
            found.append(f"{where}: {len(lines)} lines, the budget is {FILE_LINES}")
        in_kernels = bool(set(path.parts) & KERNEL_FOLDERS)
        module = where.removesuffix(".py").replace("/", ".")
        tree = ast.parse("\n".join(lines))
        compiled = _compiled_names(tree)
        for name, node, in_class in _functions(tree):
            is_kernel = node.name in compiled
            length, budget = _code_lines(node, lines), KERNEL_LINES if in_kernels or is_kernel else FUNCTION_LINES
            if length > budget:
                found.append(f"{where}:{node.lineno}: {name} has {length} lines of code, the budget is {budget}")
            count = _parameters(node, in_class)
            if count > PARAMETERS and f"{module}:{name.partition('.')[0]}" not in public and not is_kernel:
                found.append(f"{where}:{node.lineno}: {name} has {count} parameters, the budget is {PARAMETERS}")
    return found


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, node, True if it is a method) of every function, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node, isinstance(tree, ast.ClassDef)
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _code_lines(node: Function, lines: list[str]) -> int:
    """Lines of the body that hold code: no signature, docstring, blank line, comment or nested function."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        return 0
    nested = {
        line
        for leaf in ast.walk(node)
        if isinstance(leaf, Function) and leaf is not node
        for line in range(leaf.lineno, (leaf.end_lineno or leaf.lineno) + 1)
    }
    own = [lines[n - 1].strip() for n in range(body[0].lineno, (node.end_lineno or 0) + 1) if n not in nested]
    return sum(bool(line) and not line.startswith("#") for line in own)


def _parameters(node: Function, in_class: bool) -> int:
    """How many parameters a caller passes: without self, cls and autograd's ctx."""
    args = [*node.args.posonlyargs, *node.args.args]
    if in_class and args and args[0].arg in ("self", "cls", "ctx"):
        args = args[1:]
    return len(args) + len(node.args.kwonlyargs)


def _compiled_names(tree: ast.Module) -> set[str]:
    """Names of the functions that a compiler decorates (@jit) or is called on (jit(...)(f)).

    A function of the file that calls a compiler is one itself, such as a decorator with the project's options.
    """
    own = {node.name for node in tree.body if isinstance(node, Function) and _mentions(node, COMPILERS)}
    compilers, found = COMPILERS | own, set()
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(_mentions(decorator, compilers) for decorator in node.decorator_list):
            found.add(node.name)
        if isinstance(node, ast.Call) and _mentions(node.func, compilers):
            found |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
    return found


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(getattr(leaf, "attr", getattr(leaf, "id", "")) in names for leaf in ast.walk(node))


def duplicate_windows(root: Path) -> tuple[float, list[str]]:
    """(part of all windows of `WINDOW` code lines in cula/ that stand elsewhere too, where they begin)."""
    places: dict[str, list[str]] = {}
    for path in sorted((root / "cula").rglob("*.py")):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        code = [(n, x) for n, x in enumerate(lines, 1) if x and not x.startswith(("#", "import ", "from "))]
        for first in range(len(code) - WINDOW + 1):
            window = "\n".join(line for _, line in code[first : first + WINDOW])
            places.setdefault(window, []).append(f"{path.relative_to(root).as_posix()}:{code[first][0]}")
    twice = [where for found in places.values() if len(found) > 1 for where in found]
    return len(twice) / max(1, sum(map(len, places.values()))), twice


def public_objects() -> dict[str, str]:
    """ "door.name" -> "module:attribute" of everything the doors offer."""
    found = {}
    for path in sorted((ROOT / "cula").rglob("__init__.py")):
        door = ".".join(path.relative_to(ROOT).parts[:-1])
        names = getattr(import_module(door), "_NAMES", {})
        found |= {f"{door}.{name}": target for name, target in names.items()}
    return found


PUBLIC = public_objects()


def test_everything_is_within_budget() -> None:
    assert over_budget(ROOT, set(PUBLIC.values())) == []


def test_little_stands_twice() -> None:
    part, places = duplicate_windows(ROOT)
    assert part <= DUPLICATES, places


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_object_is_documented_and_annotated(name: str) -> None:
    module, _, attribute = PUBLIC[name].partition(":")
    path = Path(import_module(module).__file__ or "")
    node = _definition(ast.parse(path.read_text(encoding="utf-8")), attribute)
    if node is None:
        return  # a constant, or an alias of an object that is checked under its own name
    assert ast.get_docstring(node), f"{name} has no docstring"
    functions = [node] if isinstance(node, Function) else _public_methods(node)
    for function in functions:
        assert _unannotated(function, isinstance(node, ast.ClassDef)) == [], f"{name}: {function.name}"
        assert function.args.kwarg is None, f"{name} takes **{function.args.kwarg.arg}: an unknown name must fail"


def _definition(tree: ast.Module, name: str) -> Function | ast.ClassDef | None:
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return node
    return None


def _public_methods(node: ast.ClassDef) -> list[Function]:
    return [n for n in node.body if isinstance(n, Function) and (n.name == "__init__" or not n.name.startswith("_"))]


def _unannotated(node: Function, in_class: bool) -> list[str]:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if in_class and args and args[0].arg in ("self", "cls"):
        args = args[1:]
    bare = [arg.arg for arg in args if arg.annotation is None]
    return [*bare, "return"] if node.returns is None and node.name != "__init__" else bare


def _write(root: Path, text: str, where: str = "cula/part.py") -> None:
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_checker_finds_a_long_file(tmp_path: Path) -> None:
    _write(tmp_path, "x = 1\n" * (FILE_LINES + 1))
    assert over_budget(tmp_path, set()) == [f"cula/part.py: {FILE_LINES + 1} lines, the budget is {FILE_LINES}"]


def test_the_checker_counts_code_alone(tmp_path: Path) -> None:
    doc = '    """Title.\n' + "\n    more\n" * 80 + '    """\n'
    _write(tmp_path, f"def f():\n{doc}" + "    # note\n\n    x = 1\n" * FUNCTION_LINES)
    assert over_budget(tmp_path, set()) == []
    _write(tmp_path, f"def f():\n{doc}" + "    x = 1\n" * (FUNCTION_LINES + 1))
    assert len(over_budget(tmp_path, set())) == 1


def test_kernels_have_a_larger_budget(tmp_path: Path) -> None:
    _write(tmp_path, "def f():\n" + "    x = 1\n" * KERNEL_LINES, "cula/ops/kda/chunk/portable/part.py")
    assert over_budget(tmp_path, set()) == []
    _write(tmp_path, "def f():\n" + "    x = 1\n" * (KERNEL_LINES + 1), "cula/ops/kda/chunk/portable/part.py")
    assert len(over_budget(tmp_path, set())) == 1


def test_the_checker_finds_copies(tmp_path: Path) -> None:
    _write(tmp_path, "".join(f"x{i} = {i}\n" for i in range(WINDOW + 1)))
    assert duplicate_windows(tmp_path) == (0.0, [])
    _write(tmp_path, "".join(f"x{i} = {i}\n\n" for i in range(1, WINDOW + 1)), "cula/copy.py")
    assert duplicate_windows(tmp_path) == (2 / 3, ["cula/copy.py:1", "cula/part.py:2"])


def test_a_nested_function_has_a_budget_of_its_own(tmp_path: Path) -> None:
    half = FUNCTION_LINES // 2 + 1
    inner = "    def g():\n" + "        x = 1\n" * half
    _write(tmp_path, "def f():\n" + inner + "    x = 1\n" * half)
    assert over_budget(tmp_path, set()) == []
    _write(tmp_path, "def f():\n" + inner + "        x = 1\n" * half + "    return g\n")
    assert [found.split(": ")[1].split(" has")[0] for found in over_budget(tmp_path, set())] == ["f.g"]


def test_the_checker_finds_a_long_parameter_list(tmp_path: Path) -> None:
    names = ", ".join(f"a{i}" for i in range(PARAMETERS + 1))
    _write(tmp_path, f"def f({names}): ...\n")
    assert len(over_budget(tmp_path, set())) == 1
    assert over_budget(tmp_path, {"cula.part:f"}) == []
    kernels = (
        f"@triton.jit\ndef f({names}): ...\n",
        f"def f({names}): ...\nrun = njit(nogil=True)(f)\n",
        f"def fast(f):\n    return numba.njit(f)\n@fast\ndef f({names}): ...\n",
    )
    for kernel in kernels:
        _write(tmp_path, kernel)
        assert over_budget(tmp_path, set()) == []
    _write(tmp_path, f"class C:\n    def f(self, {names}): ...\n")
    assert len(over_budget(tmp_path, set())) == 1
