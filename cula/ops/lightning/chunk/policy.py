"""The implementation table of the chunk stages and their choice. Pure Python: every arch is testable on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cula.host.arch import Target, has_numba, has_triton
from cula.host.table import Row, Rule, choose, request_for

FORWARD = "lightning forward"
BACKWARD = "lightning backward"

_REAL_DEVICE = Rule(lambda p, t: t.kind != "meta", "needs tensors with values, got {t.kind} tensors")
_EAGER_RULES = (
    _REAL_DEVICE,
    Rule(lambda p, t: p.host_lengths, "needs the sequence lengths on the host; pass cu_seqlens_cpu"),
)
_EAGER_STATUS = "measured on CPU (x86-64, AVX-512); not run on a GPU"

_PORTABLE_RULES = (
    Rule(lambda p, t: t.kind == "cuda", "needs a GPU that Triton supports, got {t.name}"),
    Rule(lambda p, t: has_triton() or not t.live, "needs triton; it comes with torch for CUDA, or: pip install triton"),
    Rule(lambda p, t: p.dtype != "fp64", "needs bf16, fp16 or fp32 inputs, got {p.dtype}"),
    Rule(lambda p, t: max(p.K, p.V) <= 256 or not p.grad, "needs K and V <= 256 for gradients, got {p.K} and {p.V}"),
    Rule(lambda p, t: p.K <= 256, "needs K <= 256, got {p.K}"),
    Rule(lambda p, t: not p.wide_rows, "needs strides below 2^25 elements from token to token; copy the input first"),
)
_PORTABLE_STATUS = "compiled, not run: compiled for sm80, sm90, sm100, interpreted on a CPU"

FORWARD_ROWS: tuple[Row, ...] = (
    Row(
        name="portable",
        mechanism="walk",
        algorithm="lightning",
        stage=FORWARD,
        arch="any GPU of Triton's",
        dsl="triton",
        status=_PORTABLE_STATUS,
        entry="cula.ops.lightning.chunk.portable.forward:run",
        verified=False,
        rules=(
            *_PORTABLE_RULES,
            Rule(lambda p, t: not p.position_offsets, "takes no position_offsets; checkpoints count from 0"),
        ),
    ),
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
        name="portable",
        mechanism="three walks",
        algorithm="lightning",
        stage=BACKWARD,
        arch="any GPU of Triton's",
        dsl="triton",
        status=_PORTABLE_STATUS,
        entry="cula.ops.lightning.chunk.portable.backward:run",
        verified=False,
        rules=_PORTABLE_RULES,
    ),
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
