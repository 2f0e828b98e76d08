"""The portable chunk rows on CPU tensors, under Triton's interpreter; and the BOUNDED path with float32 tiles."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch

from cula.host import env
from cula.ops.kda.chunk import policy


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

    from cula.ops.kda.chunk.portable.intra import intra_kernel

    assert isinstance(intra_kernel, InterpretedFunction), "triton was imported before TRITON_INTERPRET was set"
    forward, backward = without_gpu(policy.FORWARD_ROWS), without_gpu(policy.BACKWARD_ROWS)
    monkeypatch.setattr(policy, "FORWARD_ROWS", forward)
    monkeypatch.setattr(policy, "BACKWARD_ROWS", backward)
    monkeypatch.setattr(policy, "STAGES", {policy.FORWARD: forward, policy.BACKWARD: backward})
    snapshot = env.snapshot
    monkeypatch.setattr(env, "snapshot", lambda: (*snapshot(), "interpreted"))  # decisions kept by this hold here alone
    with torch.device("cpu"):
        yield


@pytest.fixture
def bounded(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with lower_bound >= -5 take the BOUNDED path (bf16's, whose products the interpreter cannot do)."""
    from cula.ops.kda.chunk.portable import config

    monkeypatch.setattr(config, "is_bounded", lambda p: p.gate == "lower_bound" and p.lower_bound >= -5.0)
