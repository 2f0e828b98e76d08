"""The implementation table of the decode stages (recurrent, decode, verify) and their choice. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cula.host.arch import Target, has_numba, has_triton
from cula.host.table import Row, Rule

RECURRENT = "recurrent"
DECODE = "decode"
VERIFY = "verify"
ROLLBACK = "rollback"
FUSED = "decode fused"


def _rule(holds: Callable[[Any, Target], bool], reason: str) -> Rule:
    return Rule(holds, reason)


_FUSED = (
    _rule(lambda p, t: t.kind == "cpu", "(fused) needs a CPU, got {t.name}"),
    _rule(lambda p, t: has_numba(), "(fused) needs numba; install cula[cpu]"),
    _rule(lambda p, t: p.state_dtype == p.compute_dtype, "(fused) needs {p.compute_dtype} states, got {p.state_dtype}"),
)
_STEPWISE = (_rule(lambda p, t: t.kind != "meta", "needs tensors with values, got {t.kind} tensors"),)
_LENGTHS = _rule(lambda p, t: p.host_lengths, "needs the sequence lengths on the host")


_PORTABLE = (
    _rule(lambda p, t: t.kind == "cuda", "needs a GPU that Triton supports, got {t.name}"),
    _rule(
        lambda p, t: has_triton() or not t.live, "needs triton; it comes with torch for CUDA, or: pip install triton"
    ),
    _rule(lambda p, t: p.dtype != "fp64", "needs bf16, fp16 or fp32 inputs, got {p.dtype}"),
    _rule(lambda p, t: p.K <= 512, "needs K <= 512, got {p.K}"),
)


def _portable(stage: str, mechanism: str, entry: str, *rules: Rule) -> Row:
    return Row(
        name="portable",
        mechanism=mechanism,
        algorithm="kda",
        stage=stage,
        arch="any GPU of Triton's",
        dsl="triton",
        status="compiled, not run (sm80, sm90, sm100)",
        entry=f"cula.ops.kda.decode.portable.{entry}",
        rules=(*_PORTABLE, *rules),
        verified=False,
    )


_MEASURED = "measured on CPU (x86-64, AVX-512); checked on one H200"
_TESTED = "measured on no machine; tested on CPU (x86-64, AVX-512)"


def _torch(stage: str, mechanism: str, entry: str, *rules: Rule, status: str = _MEASURED) -> Row:
    return Row(
        name="eager",
        mechanism=mechanism,
        algorithm="kda",
        stage=stage,
        arch="any device",
        dsl="torch",
        status=status,
        entry=f"cula.ops.kda.decode.eager.{entry}",
        rules=(*_STEPWISE, *rules),
    )


def _rows(stage: str, extra: tuple[Rule, ...]) -> tuple[Row, ...]:
    portable = _portable(stage, "one warp per tile", "launch:run")
    fused = Row(
        name="eager",
        mechanism="fused",
        algorithm="kda",
        stage=stage,
        arch="CPU",
        dsl="numba",
        status="measured on CPU (x86-64, AVX-512)",
        entry="cula.ops.kda.decode.eager.fused:run",
        rules=(*_FUSED, *extra),
    )
    stepwise = _torch(stage, "stepwise", "stepwise:run", *extra)
    return portable, fused, stepwise


STAGES: dict[str, Sequence[Row]] = {
    RECURRENT: _rows(RECURRENT, (_LENGTHS,)),
    DECODE: _rows(DECODE, ()),
    VERIFY: _rows(VERIFY, ()),
    ROLLBACK: (
        _portable(ROLLBACK, "one warp per tile", "commit:run"),
        _torch(ROLLBACK, "stepwise", "commit:run", status=_TESTED),
    ),
    FUSED: (
        _portable(
            FUSED,
            "four warps per head",
            "serving_step:run",
            _rule(lambda p, t: p.conv_width <= 8, "needs a convolution width of 1 to 8, got {p.conv_width}"),
            _rule(lambda p, t: p.V <= 1024, "needs V <= 1024, got {p.V}"),
        ),
        _torch(FUSED, "convolution and step", "serving_step:run", status=_TESTED),
    ),
}
