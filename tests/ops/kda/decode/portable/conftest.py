"""The portable decode rows on CPU tensors, under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch

from cula.host import env
from cula.ops.kda.decode import policy


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While a test runs, implementation="portable" takes CPU tensors."""
    pytest.importorskip("triton")
    assert os.environ.get("TRITON_INTERPRET") == "1", "these tests need TRITON_INTERPRET=1, or a machine without GPU"
    from triton.runtime.interpreter import InterpretedFunction

    from cula.ops.kda.decode.portable.step import step_kernel

    assert isinstance(step_kernel, InterpretedFunction), "triton was imported before TRITON_INTERPRET was set"
    for stage, rows in policy.STAGES.items():
        free = []
        for row in rows:
            if row.name == "portable":
                assert row.rules[0].reason.startswith("needs a GPU")
                row = dataclasses.replace(row, rules=row.rules[1:])
            free.append(row)
        monkeypatch.setitem(policy.STAGES, stage, tuple(free))
    snapshot = env.snapshot
    monkeypatch.setattr(env, "snapshot", lambda: (*snapshot(), "interpreted"))  # decisions kept by this hold here alone
    with torch.device("cpu"):
        yield
