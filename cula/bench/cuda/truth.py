"""What a GPU row's outputs must be, on a few heads: heads do not touch each other, so theirs is the whole answer.

The float64 recurrence walks token by token, which takes too long for whole rows. The eager implementation in float64
computes the first and the last head over all tokens, states and gradients included, and is itself held to the
recurrence over the first tokens of the row. Everything else must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from cula.bench.cases import Case
from cula.bench.cuda.inputs import FLAGS, LEAVES, RawInputs, head_slice
from cula.bench.inputs import DTYPES, LOWER_BOUND
from cula.bench.truth import Check
from cula.checks.runs import floors
from cula.checks.tolerance import relative_error, tolerance

#: Tokens that the recurrence walks.
FIRST_TOKENS = 256

#: How far float64 eager may be from the recurrence.
EXACT = 1e-9

#: A peer has to compute the same thing, not to be as exact as we promise to be.
PEER_FACTOR = 3.0

Outputs = dict[str, torch.Tensor]


def call_kda(function: Callable[..., tuple], inputs: RawInputs, **options: Any) -> Outputs:
    """One forward of a function with chunk_kda's arguments, without autograd: o, and final_state if a state came in."""
    with torch.no_grad():
        o, final = function(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, A_log=inputs.A_log, dt_bias=inputs.dt_bias,
            initial_state=inputs.state, output_final_state=inputs.state is not None, **_packing(inputs), **FLAGS,
            **options,
        )[:2]  # fmt: skip
    return {"o": o} if final is None else {"o": o, "final_state": final}


def train_kda(function: Callable[..., tuple], inputs: RawInputs, leaves: Outputs, **options: Any) -> Outputs:
    """One forward and backward for the cotangent `inputs.do`: o and the gradient of every leaf (`leaves_of`)."""
    q, k, v, g, beta, A_log, dt_bias = (leaves[name] for name in LEAVES)
    o = function(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **_packing(inputs), **FLAGS, **options
    )[0]  # fmt: skip
    grads = torch.autograd.grad(o, tuple(leaves.values()), inputs.do)
    return {"o": o.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads)}}


def _packing(inputs: RawInputs) -> dict[str, torch.Tensor | None]:
    if inputs.cu_seqlens is None:
        return {}
    return {"cu_seqlens": inputs.cu_seqlens, "cu_seqlens_cpu": inputs.cu_seqlens_cpu}


def leaves_of(inputs: RawInputs) -> Outputs:
    """The tensors of a training row that gradients are taken of; they share the inputs' memory."""
    return {name: getattr(inputs, name).detach().requires_grad_() for name in LEAVES}


def checked_heads(case: Case) -> tuple[int, ...]:
    """The heads that are compared: the first and the last."""
    return tuple(sorted({0, case.H - 1}))


def expected(case: Case, inputs: RawInputs) -> tuple[Outputs, dict[str, float]]:
    """The float64 outputs of the checked heads, and the least denominator of each one's error.

    RuntimeError where the eager implementation is not the recurrence.
    """
    from cula.kda import chunk_kda

    part = head_slice(inputs, checked_heads(case), torch.float64)
    if case.op == "kda_train":
        truth = train_kda(chunk_kda, part, leaves_of(part), implementation="eager")
    else:
        truth = call_kda(chunk_kda, part, implementation="eager")
    hold_to_recurrence(part, truth["o"])
    problem = SimpleNamespace(
        q=part.q.to(DTYPES[case.dtype]), k=part.k, v=part.v, g=part.g, A_log=part.A_log,
        dt_bias=part.dt_bias.view(-1, case.K), lower_bound=LOWER_BOUND, raw_gate=True,
        case=SimpleNamespace(algorithm="kda", l2norm=True, K=case.K, V=case.value_dim),
    )  # fmt: skip
    return truth, floors(problem, truth)


def hold_to_recurrence(part: RawInputs, o: torch.Tensor, reference: Callable[..., tuple] | None = None) -> None:
    """Compare `o` with the recurrence over the first tokens of the row (of the first sequence where it is packed)."""
    if reference is None:
        from cula.kda import kda_recurrent_reference as reference
    T = part.q.shape[1] if part.cu_seqlens_cpu is None else int(part.cu_seqlens_cpu[1])
    first = {name: getattr(part, name)[:, : min(T, FIRST_TOKENS)] for name in ("q", "k", "v", "g", "beta")}
    state = part.state if part.state is None or part.cu_seqlens is None else part.state[:1]
    walked = call_kda(reference, replace(part, **first, state=state, cu_seqlens=None, cu_seqlens_cpu=None))["o"]
    error = relative_error(o[:, : walked.shape[1]], walked)
    if not error <= EXACT:
        raise RuntimeError(f"the float64 reference itself is off by {error:.1e}")


def checked(case: Case, outputs: Outputs) -> Outputs:
    """The part of full outputs that `expected` has."""
    heads = checked_heads(case)

    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "ddt_bias":
            return x.reshape(case.value_heads, case.K)[list(heads)].reshape(-1)
        dim = {"final_state": 1, "dA_log": 0}.get(name, 2)
        return (x.reshape(-1) if name == "dA_log" else x).index_select(dim, torch.tensor(heads, device=x.device))

    return {name: part(name, x) for name, x in outputs.items()}


def check(case: Case, outputs: Outputs, truth: Outputs, floor: dict[str, float], factor: float = 1.0) -> Check:
    """Compare every output of the truth, and look at every element of all outputs. factor: of the tolerances."""
    assert set(outputs) == set(truth), f"outputs are {sorted(outputs)}, not {sorted(truth)}"
    limits = {name: factor * tolerance(name, DTYPES[case.dtype], case.device) for name in truth}
    errors = {}
    for name, got in checked(case, outputs).items():
        whole = bool(torch.isfinite(outputs[name]).all())
        errors[name] = relative_error(got, truth[name], floor=floor[name]) if whole else math.inf
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    return Check(output=worst, error=errors[worst], tolerance=limits[worst], errors=errors)
