"""The Python examples of the Markdown files run as they stand, on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

EXAMPLES = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for number, block in enumerate(_BLOCK.findall(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_runs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
