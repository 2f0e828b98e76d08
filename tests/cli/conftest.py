"""The commands print as they do into a pipe: pytest-xdist tells its workers a terminal's width, which is removed."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "CULA_IMPLEMENTATION", "CULA_CP", "CULA_DEBUG", "CULA_ALLOW_UNVERIFIED"):
        monkeypatch.delenv(name, raising=False)
