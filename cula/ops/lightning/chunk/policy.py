"""The implementation table of the chunk stages and their choice. Pure Python: every arch is testable on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cula.host.arch import Target, has_numba
from cula.host.table import Row, Rule, choose, request_for

FORWARD = "lightning forward"
BACKWARD = "lightning backward"

_REAL_DEVICE = Rule(lambda p, t: t.kind != "meta", "needs tensors with values, got {t.kind} tensors")
_EAGER_RULES = (
    _REAL_DEVICE,
    Rule(lambda p, t: p.host_lengths, "needs the sequence lengths on the host; pass cu_seqlens_cpu"),
)
_EAGER_STATUS = "measured on CPU (x86-64, AVX-512); not run on a GPU"

FORWARD_ROWS: tuple[Row, ...] = (
    Row(
        name="eager",
        mechanism="fused",
        algorithm="lightning",
        stage=FORWARD,
        arch="CPU",
        dsl="numba",
        status="measured on CPU (x86-64, AVX-512)",
        entry="cula.ops.lightning.chunk.eager.fused:run",
        rules=(
            _REAL_DEVICE,
            Rule(lambda p, t: t.kind == "cpu", "(fused) needs a CPU, got {t.name}"),
            Rule(lambda p, t: has_numba(), "(fused) needs numba; install cula[cpu]"),
        ),
    ),
    Row(
        name="eager",
        mechanism="batched",
        algorithm="lightning",
        stage=FORWARD,
        arch="any device",
        dsl="torch",
        status=_EAGER_STATUS,
        entry="cula.ops.lightning.chunk.eager.forward:run",
        rules=(
            *_EAGER_RULES,
            Rule(lambda p, t: p.host_offsets, "needs checkpoint_offsets and position_offsets on the CPU"),
        ),
    ),
)
BACKWARD_ROWS: tuple[Row, ...] = (
    Row(
        name="eager",
        mechanism="batched",
        algorithm="lightning",
        stage=BACKWARD,
        arch="any device",
        dsl="torch",
        status=_EAGER_STATUS,
        entry="cula.ops.lightning.chunk.eager.backward:run",
        rules=_EAGER_RULES,
    ),
)

#: What each public function runs: stage -> its rows.
STAGES: dict[str, Sequence[Row]] = {FORWARD: FORWARD_ROWS, BACKWARD: BACKWARD_ROWS}


def choose_rows(problem: Any, target: Target, implementation: Any) -> tuple[Row, Row | None]:
    """(forward row, backward row or None where no gradient is needed)."""
    forward = choose(FORWARD_ROWS, problem, target, request_for(implementation, "forward"))
    backward = None
    if problem.grad:
        backward = choose(BACKWARD_ROWS, problem, target, request_for(implementation, "backward"))
    return forward, backward
