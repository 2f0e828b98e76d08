"""What the Markdown files name exists: repo-relative paths, and modules and public names of cula."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import cula

ROOT = Path(__file__).resolve().parents[2]

#: Top folders that a path may begin with even where the folder itself is missing.
TOP_FOLDERS = {"cula", "tests", "benchmarks", "docs", "tools", "examples", ".ci"}
FREE = {"CHANGELOG.md"}  # it names what was, too
SKIPPED_FOLDERS = {"build", "dist", "node_modules"}

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s)>\"'`]+")
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_PATH = re.compile(
    r"(?<![\w/.@$~-])(?:\./)?(\.?[A-Za-z0-9_][\w.-]*(?:/[\w.*{}<>$\[\]-]+)+/?|\.?[\w-]+\.(?:md|toml|ya?ml))"
)
_MODULE = re.compile(r"(?<![\w/.-])cula(?:\.[A-Za-z_]\w*)+")


def markdown_files(root: Path) -> list[Path]:
    """Every Markdown file of the repository, environments and builds left out."""
    found = []
    for path in sorted(root.rglob("*.md")):
        folders = path.relative_to(root).parts[:-1]
        if not any(part.startswith(".") or part in SKIPPED_FOLDERS for part in folders):
            found.append(path)
    return found


def missing_paths(root: Path) -> list[str]:
    """ "file: path" for each repo-relative path in a Markdown file that does not exist."""
    found = []
    for file in markdown_files(root):
        where = file.relative_to(root).as_posix()
        if where in FREE:
            continue
        text = _URL.sub(" ", _COMMENT.sub(" ", file.read_text(encoding="utf-8")))
        for target in _link_targets(text):
            if not (file.parent / target).exists():
                found.append(f"{where}: link to {target}")
        for path in _named_paths(_LINK.sub("] ", text), root):
            if not (root / path).exists() and not (file.parent / path).exists():
                found.append(f"{where}: {path}")
    return found


def _link_targets(text: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        target = match[1].partition("#")[0]
        if target and not _is_placeholder(target):
            yield target


def _named_paths(text: str, root: Path) -> Iterator[str]:
    tops = TOP_FOLDERS | {path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."}
    for match in _PATH.finditer(text):
        path = match[1].rstrip(".")
        if not _is_placeholder(path) and ("/" not in path or path.split("/")[0] in tops):
            yield path


def _is_placeholder(path: str) -> bool:
    return any(mark in path for mark in "<>{}*$[]") or "..." in path


def missing_modules(text: str) -> list[str]:
    """Each dotted name that begins with `cula.` and is neither a module nor an attribute of one."""
    return sorted({name for name in _MODULE.findall(_URL.sub(" ", _COMMENT.sub(" ", text))) if not _resolves(name)})


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            spec = find_spec(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        if spec is None or spec.origin is None:
            continue
        return cut == len(parts) or _defines(Path(spec.origin), parts[cut])
    return False


def _defines(file: Path, name: str) -> bool:
    """True if a module's source binds `name` at its top level; read, not imported: the module may need a GPU."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for leaf in (leaf for target in targets for leaf in ast.walk(target)):
                if isinstance(leaf, ast.Name) and leaf.id == name:
                    return True
                if getattr(leaf, "id", "") == "_NAMES" and name in ast.literal_eval(node.value):
                    return True
    return False


def test_every_path_in_a_markdown_file_exists() -> None:
    assert markdown_files(ROOT), "the repository has Markdown files"
    assert missing_paths(ROOT) == []


@pytest.mark.parametrize("path", [p for p in markdown_files(ROOT) if p.name not in FREE], ids=lambda path: path.name)
def test_every_module_in_a_markdown_file_exists(path: Path) -> None:
    assert missing_modules(path.read_text(encoding="utf-8")) == []


GOOD = """
[text](docs/here.md#part) and ![picture](docs/here.md), `cula/__init__.py`, cula/, `tests/<gpu>/x.py`,
benchmarks/*.json, [site](https://example.org/docs/none.md), https://example.org/cula/none.py,
and/or, K/V, README.md, .venv/bin/python. <!-- docs/images/later.png -->
"""

BAD = {
    "a [link](docs/none.md)": "link to docs/none.md",
    "code `cula/none.py`": "cula/none.py",
    "plain tools/none.sh.": "tools/none.sh",
    "benchmarks/run.py where the folder is missing": "benchmarks/run.py",
    "a test id `tests/repo/test_none.py::test_x`": "tests/repo/test_none.py",
    "top-level NONE.md": "NONE.md",
    "```\npython cula/none.py --x\n```": "cula/none.py",
    "hidden .ci/none": ".ci/none",
}


def _tree(root: Path, text: str) -> None:
    (root / "docs").mkdir()
    (root / ".venv").mkdir()
    (root / "cula").mkdir()
    (root / "cula" / "__init__.py").touch()
    (root / "docs" / "here.md").touch()
    (root / "CHANGELOG.md").write_text("- removed `cula/gone.py`\n")
    (root / "README.md").write_text(text)


def test_existing_paths_and_placeholders_pass(tmp_path: Path) -> None:
    _tree(tmp_path, GOOD)
    assert missing_paths(tmp_path) == []


@pytest.mark.parametrize("text", BAD)
def test_the_checker_finds_a_missing_path(tmp_path: Path, text: str) -> None:
    _tree(tmp_path, text)
    assert missing_paths(tmp_path) == [f"README.md: {BAD[text]}"]


def test_links_are_relative_to_their_file(tmp_path: Path) -> None:
    _tree(tmp_path, "")
    (tmp_path / "docs" / "here.md").write_text("[up](../README.md) [wrong](README.md)")
    assert missing_paths(tmp_path) == ["docs/here.md: link to README.md"]


def test_the_checker_finds_a_missing_module() -> None:
    text = "cula.explain, cula.kda, `cula.kda.chunk_kda`, cula.host.table.Row; cula.none, `cula.kda.no_such_name`"
    assert missing_modules(text) == ["cula.kda.no_such_name", "cula.none"]
    assert cula.__name__ == "cula"
