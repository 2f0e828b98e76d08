"""The portable rows on CPU tensors, under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch

from cula.host import env
from cula.ops.lightning.chunk import policy as chunk
from cula.ops.lightning.decode import policy as decode


def without_gpu(rows: tuple) -> tuple:
    """The rows, the portable ones without their first rule, which asks for a GPU."""
    free = []
    for row in rows:
        if row.name == "portable":
            assert row.rules[0].reason.startswith("needs a GPU")
            row = dataclasses.replace(row, rules=row.rules[1:])
        free.append(row)
    return tuple(free)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While a test runs, implementation="portable" takes CPU tensors."""
    pytest.importorskip("triton")
    assert os.environ.get("TRITON_INTERPRET") == "1", "these tests need TRITON_INTERPRET=1, or a machine without GPU"
    from triton.runtime.interpreter import InterpretedFunction

    from cula.ops.lightning.chunk.portable.walk import walk_kernel

    assert isinstance(walk_kernel, InterpretedFunction), "triton was imported before TRITON_INTERPRET was set"
    forward, backward = without_gpu(chunk.FORWARD_ROWS), without_gpu(chunk.BACKWARD_ROWS)
    monkeypatch.setattr(chunk, "FORWARD_ROWS", forward)
    monkeypatch.setattr(chunk, "BACKWARD_ROWS", backward)
    monkeypatch.setattr(chunk, "STAGES", {chunk.FORWARD: forward, chunk.BACKWARD: backward})
    for stage, rows in decode.STAGES.items():
        monkeypatch.setitem(decode.STAGES, stage, without_gpu(rows))
    snapshot = env.snapshot
    monkeypatch.setattr(env, "snapshot", lambda: (*snapshot(), "interpreted"))  # decisions kept by this hold here alone
    with torch.device("cpu"):
        yield
