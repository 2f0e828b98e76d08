"""The implementation table of the chunk stages and their choice. Pure Python: every arch is testable on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cula.host.arch import Target, has_cute_dsl, has_numba, has_triton
from cula.host.table import Row, Rule, choose, request_for

FORWARD = "chunk forward"
BACKWARD = "chunk backward"


def _real_device(p: Any, t: Target) -> bool:
    return t.kind != "meta"


def _host_lengths(p: Any, t: Target) -> bool:
    return p.host_lengths


def _host_offsets(p: Any, t: Target) -> bool:
    return p.host_offsets


_EAGER_RULES = (
    Rule(_real_device, "needs tensors with values, got {t.kind} tensors"),
    Rule(_host_lengths, "needs the sequence lengths on the host; pass cu_seqlens_cpu, and not use_graph without it"),
)
_EAGER_STATUS = "measured on CPU (x86-64, AVX-512); checked on one H200"

_PORTABLE_RULES = (
    Rule(lambda p, t: t.kind == "cuda", "needs a GPU that Triton supports, got {t.name}"),
    Rule(lambda p, t: has_triton() or not t.live, "needs triton; it comes with torch for CUDA, or: pip install triton"),
    Rule(lambda p, t: p.dtype != "fp64", "needs bf16, fp16 or fp32 inputs, got {p.dtype}"),
    Rule(lambda p, t: p.K <= 256, "needs K <= 256, got {p.K}"),
    Rule(lambda p, t: not p.wide_rows, "needs strides below 2^25 elements from token to token; copy the input first"),
)
_PORTABLE_STATUS = "measured on one H200 in an earlier state; compiled for sm80, sm90, sm100"

_SM90_RULES = (
    Rule(lambda p, t: t.capability == (9, 0), "needs a GPU of compute capability 9.0, got {t.name}"),
    Rule(
        lambda p, t: has_cute_dsl() or not t.live,
        "needs the CuTe DSL with TVM-FFI; install cula[cute]",
    ),
    Rule(lambda p, t: p.dtype == "bf16", "needs bf16 q, k and v, got {p.dtype}"),
    Rule(lambda p, t: p.K == p.V == 128, "needs K = V = 128, got K = {p.K}, V = {p.V}"),
    Rule(
        lambda p, t: p.gate == "lower_bound" and p.lower_bound >= -5.0,
        "needs the in-kernel gate with -5 <= lower_bound, got the {p.gate} gate, lower_bound {p.lower_bound}",
    ),
    Rule(lambda p, t: p.l2norm, "needs q and k normalized in the kernel"),
    Rule(lambda p, t: p.gate_dtype in ("bf16", "fp32"), "needs g in bf16 or fp32, got {p.gate_dtype}"),
    Rule(lambda p, t: p.beta_dtype in ("bf16", "fp32"), "needs beta in bf16 or fp32, got {p.beta_dtype}"),
    Rule(lambda p, t: p.rows_aligned, "needs q, k, v, g and out with contiguous channels, rows aligned to 16 bytes"),
    Rule(lambda p, t: not p.intermediate_states, "returns no intermediate states"),
    Rule(lambda p, t: not p.position_offsets, "takes no position_offsets; checkpoints count from 0"),
)

FORWARD_ROWS: tuple[Row, ...] = (
    Row(
        name="sm90",
        mechanism="fused",
        algorithm="kda",
        stage=FORWARD,
        arch="SM90 (H100, H200)",
        dsl="CuTe DSL",
        status="compiled, not run; its PTX is tested on a CPU",
        entry="cula.ops.kda.chunk.sm90.forward:run",
        verified=False,
        rules=_SM90_RULES,
    ),
    Row(
        name="portable",
        mechanism="two launches",
        algorithm="kda",
        stage=FORWARD,
        arch="any GPU of Triton's",
        dsl="triton",
        status=_PORTABLE_STATUS,
        entry="cula.ops.kda.chunk.portable.forward:run",
        kept="cula.ops.kda.chunk.portable.forward:kept",
        rules=(
            *_PORTABLE_RULES,
            Rule(lambda p, t: not p.position_offsets, "takes no position_offsets; checkpoints count from 0"),
            Rule(
                lambda p, t: p.host_lengths or not p.intermediate_states,
                "needs the sequence lengths on the host to shape h; pass cu_seqlens_cpu",
            ),
        ),
    ),
    Row(
        name="eager",
        mechanism="fused",
        algorithm="kda",
        stage=FORWARD,
        arch="CPU",
        dsl="numba",
        status="measured on CPU (x86-64, AVX-512)",
        entry="cula.ops.kda.chunk.eager.fused:run",
        rules=(
            Rule(_real_device, "needs tensors with values, got {t.kind} tensors"),
            Rule(lambda p, t: t.kind == "cpu", "(fused) needs a CPU, got {t.name}"),
            Rule(lambda p, t: has_numba(), "(fused) needs numba; install cula[cpu]"),
        ),
    ),
    Row(
        name="eager",
        mechanism="batched",
        algorithm="kda",
        stage=FORWARD,
        arch="any device",
        dsl="torch",
        status=_EAGER_STATUS,
        entry="cula.ops.kda.chunk.eager.forward:run",
        rules=(
            *_EAGER_RULES,
            Rule(_host_offsets, "needs checkpoint_offsets and position_offsets on the CPU"),
        ),
    ),
)
BACKWARD_ROWS: tuple[Row, ...] = (
    Row(
        name="portable",
        mechanism="walk back",
        algorithm="kda",
        stage=BACKWARD,
        arch="any GPU of Triton's",
        dsl="triton",
        status=_PORTABLE_STATUS,
        entry="cula.ops.kda.chunk.portable.backward:run",
        rules=_PORTABLE_RULES,
    ),
    Row(
        name="eager",
        mechanism="batched",
        algorithm="kda",
        stage=BACKWARD,
        arch="any device",
        dsl="torch",
        status=_EAGER_STATUS,
        entry="cula.ops.kda.chunk.eager.backward:run",
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
