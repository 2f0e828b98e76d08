"""The check grid: which problems, which functions, which implementations, and one judged `Outcome` for each.

Lengths, gates, dtypes, head ratios, layouts and packing are not multiplied out: every length meets every gate, every
gate meets every dtype, and the rest is drawn per case from a seeded stream. `test_grid.py` checks that cover.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cula.checks import rows, runs
from cula.checks.cases import BETAS, GATES, SLOPES, Case, Problem, make
from cula.checks.tolerance import column

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 200)
DTYPE_NAMES = ("fp64", "fp32", "bf16", "fp16")
HEADS = ((1, 1), (2, 2), (1, 2), (2, 4), (1, 3))
WIDTHS = ((16, 16), (32, 16), (16, 48), (32, 32), (60, 20), (64, 64))

#: What a row that has one head size is given instead, tried in this order where it refuses a case.
FALLBACKS: tuple[dict[str, Any], ...] = ({}, {"K": 64, "V": 64}, {"K": 128, "V": 128})

QUICK_GATES = ("zero", "bound", "channels", "softplus", "sigmoid_no_A", "cliff16")
QUICK_LENGTHS = (0, 1, 17, 65)
QUICK_SLOPES = ("slopes_zero", "slopes_last", "slopes_fla", "slopes_steep", "slopes_mixed")


def cases(quick: bool = False) -> list[Case]:
    """The grid's problems of KDA, the same list in every process."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    gates = QUICK_GATES if quick else tuple(GATES)
    result = []
    for i, T in enumerate(lengths):
        for j, gate in enumerate(gates):
            draw = random.Random(f"{T}/{gate}")
            H, HV = draw.choice(HEADS)
            K, V = draw.choice(WIDTHS)
            packed = (i + j) % 3 == 0
            result.append(
                Case(
                    B=1 if packed else draw.choice((1, 2)),
                    T=T,
                    H=H,
                    HV=HV,
                    K=K,
                    V=V,
                    dtype=DTYPE_NAMES[(i + j) % 4],
                    gate=gate,
                    beta=draw.choice(list(BETAS)),
                    lengths=cut(draw, T) if packed else None,
                    state=draw.random() < 0.75,
                    v_first=bool(j % 2 == i // 2 % 2),
                    l2norm=draw.random() < 0.5,
                    scale=draw.choice((None, None, 1.0, 0.25)),
                    chunk_size=draw.choice((64, 64, 32, 16)),
                    gates=draw.choice(("own", "same")),
                    seed=draw.randrange(1000),
                )
            )
    return result


def lightning_cases(quick: bool = False) -> list[Case]:
    """The grid's problems of Lightning Attention: every length meets every kind of slopes, these every dtype."""
    result = []
    for i, T in enumerate(QUICK_LENGTHS if quick else LENGTHS):
        for j, slopes in enumerate(QUICK_SLOPES if quick else SLOPES):
            draw = random.Random(f"{T}/{slopes}")
            H, HV = draw.choice(HEADS)
            K, V = draw.choice(WIDTHS)
            packed = (i + j) % 3 == 0
            result.append(
                Case(
                    B=1 if packed else draw.choice((1, 2)), T=T, H=H, HV=HV, K=K, V=V, gate=slopes,
                    dtype=DTYPE_NAMES[(i + j) % 4], lengths=cut(draw, T) if packed else None,
                    state=draw.random() < 0.75, v_first=bool(j % 2 == i // 2 % 2),
                    scale=draw.choice((None, None, 1.0, 0.25)), chunk_size=draw.choice((64, 64, 32, 16)),
                    seed=draw.randrange(1000),
                )
            )  # fmt: skip
    return result


def cut(draw: random.Random, total: int) -> tuple[int, ...]:
    """Lengths of one to four sequences that fill `total` or leave a few rows after the last; some are empty."""
    used = total - (draw.choice((0, 0, 3)) if total > 3 else 0)
    edges = sorted(draw.randrange(used + 1) for _ in range(draw.randrange(4)))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, used], strict=True))


@dataclass(frozen=True)
class Outcome:
    """One quantity of one call: its error, what the table allows, and the verdict.

    column: the column of the tolerance table. tolerance is inf where only finite numbers are promised.
    reason is set where the implementation refused the case (then nothing was compared) or raised.
    """

    function: str
    implementation: str
    device: str
    case: str
    column: str
    quantity: str
    error: float
    tolerance: float
    passed: bool
    reason: str | None = None

    @property
    def refused(self) -> bool:
        """The implementation does not serve the case, and said why: nothing was compared."""
        return self.reason is not None and self.passed


def plan(function: str, case: Case) -> Case | None:
    """The case as `function` can take it: shortened for decode and verify, None where it says nothing."""
    if case.algorithm != rows.algorithm_of(function):
        return None
    if function.endswith("_decode"):
        return case.replace(T=min(case.T, runs.MAX_STEPS)) if case.lengths is None and case.T else None
    if function.endswith("_verify"):
        if case.lengths is not None:
            lengths = tuple(min(n, runs.MAX_DRAFT) for n in case.lengths)
            return case.replace(lengths=lengths, T=sum(lengths)) if sum(lengths) else None
        return case.replace(T=min(case.T, runs.MAX_DRAFT)) if case.T else None
    if function == "fused_kda_gate":
        raw = case.gate.startswith(("softplus", "sigmoid"))
        return case if raw and case.lengths is None else None
    return case


def run(function: str, problem: Problem, name: str, *, gradients: bool = True) -> runs.Quantities:
    """`function` on `problem` by the implementation `name`; 16-bit runs are poisoned with 1e30, others with NaN."""
    fill = 1e30 if problem.case.dtype in ("bf16", "fp16") else float("nan")
    if function in rows.BACKWARDS:
        return runs.run_chunk(problem, name, gradients=gradients, fill=fill)
    if function == "fused_recurrent_kda":
        return runs.run_recurrent(problem, name, fill=fill)
    if function.endswith("_prefill"):
        return runs.run_prefill(problem, name, fill=fill)
    if function.endswith("_decode"):
        return runs.run_decode(problem, name, fill=fill)
    if function.endswith("_verify"):
        return runs.run_verify(problem, name, fill=fill)
    return runs.run_gate(problem, fill=fill)


def judge(function: str, case: Case, label: str, device: str = "cpu") -> list[Outcome]:
    """Every quantity of one call against the recurrence; one refused Outcome where no variant is accepted.

    Gradients too, where the implementation has a backward. Refusing is a miss for eager: it takes every call.
    """
    from cula import NotSupportedError

    gradients = rows.has_backward(label, device, function)
    planned = plan(function, case)
    if planned is None:
        return []
    reason = ""
    for change in FALLBACKS:
        variant = planned.replace(**change)
        problem = make(variant, device)
        try:
            with rows.only(label) as name:
                got = run(function, problem, name, gradients=gradients)
        except NotSupportedError as error:
            reason = str(error)
            continue
        return _outcomes(function, problem, label, got, _truth(function, problem, gradients))
    where = (function, label, device, planned.id, column(planned.torch_dtype, device))
    return [Outcome(*where, "refused", 0.0, 0.0, label != "eager", reason)]


#: The last few references, so that the functions of one case share one.
_TRUTHS: dict[tuple[Case, str], tuple[bool, runs.Quantities]] = {}


def _truth(function: str, problem: Problem, gradients: bool) -> runs.Quantities:
    if function == "fused_kda_gate":
        return runs.gate_reference(problem)
    key = (problem.case, problem.q.device.type)
    known = _TRUTHS.get(key)
    if known is None or (gradients and not known[0]):
        if len(_TRUTHS) > 4:
            _TRUTHS.clear()
        _TRUTHS[key] = (gradients, runs.reference(problem, gradients=gradients))
    return _TRUTHS[key][1]


def _outcomes(
    function: str, problem: Problem, label: str, got: runs.Quantities, truth: runs.Quantities
) -> list[Outcome]:
    case, device = problem.case, problem.q.device.type
    where = (function, label, device, case.id, column(problem.q.dtype, device))
    found = runs.errors(problem, got, truth)
    allowed = runs.limits(problem, got)
    result = []
    for quantity, error in found.items():
        limit = allowed[quantity] if runs.promised(case, quantity) else float("inf")
        passed = error <= limit and error != float("inf")
        result.append(Outcome(*where, quantity, error, limit, passed))
    return result


def sweep(
    *,
    device: str | None = None,
    implementation: str | None = None,
    quick: bool = False,
) -> Iterator[tuple[int, int, list[Outcome]]]:
    """(done, total, outcomes) after every call of the grid, for each device, function and available name."""
    jobs = []
    for kind in rows.devices() if device is None else (device,):
        for function in runs.FUNCTIONS:
            for label in rows.labels(function, kind):
                if implementation in (None, label, rows.name_of(label)):
                    jobs.append((kind, function, label))
    todo = [
        (kind, function, label, case)
        for case in (*cases(quick), *lightning_cases(quick))
        for kind, function, label in jobs
        if plan(function, case) is not None
    ]
    for index, (kind, function, label, case) in enumerate(todo):
        try:
            outcomes = judge(function, case, label, kind)
        except Exception as error:  # a crash is a miss with its sentence, and the sweep goes on
            sentence = f"{type(error).__name__}: {error}"
            where = (function, label, kind, case.id, column(case.torch_dtype, kind))
            outcomes = [Outcome(*where, "call", float("inf"), 0.0, False, sentence)]
        yield index + 1, len(todo), outcomes
