"""The implementation table of the decode stages (decode, verify) and their choice. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

from cula.host.arch import has_numba, has_triton
from cula.host.table import Row, Rule

DECODE = "lightning decode"
VERIFY = "lightning verify"

_FUSED = (
    Rule(lambda p, t: t.kind == "cpu", "(fused) needs a CPU, got {t.name}"),
    Rule(lambda p, t: has_numba(), "(fused) needs numba; install cula[cpu]"),
    Rule(lambda p, t: p.state_dtype == p.compute_dtype, "(fused) needs {p.compute_dtype} states, got {p.state_dtype}"),
)
_PORTABLE = (
    Rule(lambda p, t: t.kind == "cuda", "needs a GPU that Triton supports, got {t.name}"),
    Rule(lambda p, t: has_triton() or not t.live, "needs triton; it comes with torch for CUDA, or: pip install triton"),
    Rule(lambda p, t: p.dtype != "fp64", "needs bf16, fp16 or fp32 inputs, got {p.dtype}"),
    Rule(lambda p, t: p.state_dtype != "fp64", "needs fp32 or bf16 states, got {p.state_dtype}"),
    Rule(lambda p, t: p.K <= 1024, "needs K <= 1024, got {p.K}"),
)
_STEPWISE = (Rule(lambda p, t: t.kind != "meta", "needs tensors with values, got {t.kind} tensors"),)


def _rows(stage: str) -> tuple[Row, ...]:
    return (
        Row(
            name="portable",
            mechanism="step",
            algorithm="lightning",
            stage=stage,
            arch="any GPU of Triton's",
            dsl="triton",
            status="compiled, not run: compiled for sm80, sm90, sm100, interpreted on a CPU",
            entry="cula.ops.lightning.decode.portable.step:run",
            verified=False,
            rules=_PORTABLE,
        ),
        Row(
            name="eager",
            mechanism="fused",
            algorithm="lightning",
            stage=stage,
            arch="CPU",
            dsl="numba",
            status="measured on CPU (x86-64, AVX-512)",
            entry="cula.ops.lightning.decode.eager.fused:run",
            rules=_FUSED,
        ),
        Row(
            name="eager",
            mechanism="stepwise",
            algorithm="lightning",
            stage=stage,
            arch="any device",
            dsl="torch",
            status="measured on CPU (x86-64, AVX-512); not run on a GPU",
            entry="cula.ops.lightning.decode.eager.stepwise:run",
            rules=_STEPWISE,
        ),
    )


STAGES: dict[str, Sequence[Row]] = {DECODE: _rows(DECODE), VERIFY: _rows(VERIFY)}
