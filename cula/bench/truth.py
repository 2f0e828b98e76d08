"""What a row's outputs must be: the float64 recurrence, its gradients included, and the tolerance of each output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cula.bench.inputs import DTYPES
from cula.checks.tolerance import relative_error, tolerance

if TYPE_CHECKING:
    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs

#: Gradients of the recurrence are taken this many tokens at a time, so that autograd holds few states.
SEGMENT = 64


@dataclass(frozen=True)
class Check:
    """The worst output of one implementation: the one whose error is the largest share of its tolerance."""

    output: str
    error: float
    tolerance: float
    errors: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether the worst output is within its tolerance."""
        return self.error <= self.tolerance


def expected(case: Case, inputs: Inputs, reference: Callable[..., tuple] | None = None) -> dict[str, torch.Tensor]:
    """The float64 outputs of `case` by name: o, final_state (K-first), and the gradients of a training row.

    reference: a function with the arguments of the algorithm's recurrence, which is the default.
    """
    if reference is None and case.lightning:
        from cula.ops.lightning.reference import lightning_recurrent_reference as reference
    elif reference is None:
        from cula.kda import kda_recurrent_reference as reference
    if case.trains:
        return _with_gradients(inputs, reference)
    state = None if inputs.state is None else inputs.state.double().transpose(-1, -2)
    with torch.no_grad():
        o, final = reference(
            *(x.double() for x in inputs.operands), initial_state=state, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens, **inputs.options,
        )[:2]  # fmt: skip
    return {"o": o, "final_state": final}


def _with_gradients(inputs: Inputs, reference: Callable[..., tuple]) -> dict[str, torch.Tensor]:
    """Outputs and gradients for the cotangent `inputs.do`, segment by segment from the states between them."""
    if inputs.cu_seqlens is not None:
        raise ValueError("a packed training row has no reference yet: unpack it first")
    operands = [x.double() for x in inputs.operands]
    do = inputs.do.double()
    T = operands[0].shape[1]
    cuts = list(range(0, T, SEGMENT))
    B, _, HV, V = do.shape
    entry = [do.new_zeros(B, HV, operands[0].shape[-1], V)]
    parts = []
    with torch.no_grad():
        for a in cuts:
            piece = [x[:, a : a + SEGMENT] for x in operands]
            o, state = reference(*piece, initial_state=entry[-1], output_final_state=True, **inputs.options)[:2]
            entry.append(state)
            parts.append(o)
    grads = [torch.empty_like(x) for x in operands]
    carried = torch.zeros_like(entry[0])
    for i, a in reversed(list(enumerate(cuts))):
        piece = [x[:, a : a + SEGMENT].clone().requires_grad_() for x in operands]
        state = entry[i].clone().requires_grad_()
        o, final = reference(*piece, initial_state=state, output_final_state=True, **inputs.options)[:2]
        *found, carried = torch.autograd.grad([o, final], [*piece, state], [do[:, a : a + SEGMENT], carried])
        for grad, part in zip(grads, found):
            grad[:, a : a + SEGMENT] = part
    names = ("dq", "dk", "dv", "dg", "dbeta")
    return {"o": torch.cat(parts, 1), **dict(zip(names, grads))}


def check(case: Case, outputs: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> Check:
    """Compare every output that is in `outputs`; o must be there. A shape that differs is an AssertionError."""
    assert "o" in outputs, "an implementation that returns no o"
    dtype = DTYPES[case.dtype]
    errors = {name: relative_error(got, truth[name]) for name, got in outputs.items()}
    limits = {name: tolerance(name, dtype, case.device) for name in errors}
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    return Check(output=worst, error=errors[worst], tolerance=limits[worst], errors=errors)
