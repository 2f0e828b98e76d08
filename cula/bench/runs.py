"""What a timed implementation is: a class that says what it can do, and the runs that it hands out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from cula.bench.cases import Case
    from cula.bench.inputs import Inputs


@dataclass
class Run:
    """One implementation bound to one row's inputs, everything that is not the call itself already done.

    step: the timed work, `calls` calls of the op. first: makes the first call alone (the same as `step` where that
    is one call). outputs: what the last call of the first buffer left, by name, in the layout of the reference:
    o `[B,T,HV,V]`, final_state `[N,HV,K,V]`, and dq, dk, dv, dg, dbeta of a training row. repeatable: a second
    `step` gives the same outputs (no state moves on).
    """

    step: Callable[[], object]
    outputs: Callable[[], dict[str, torch.Tensor]]
    calls: int = 1
    first: Callable[[], object] | None = None
    repeatable: bool = True

    def call_once(self) -> None:
        """Make one call of the op."""
        (self.first or self.step)()


class Implementation(Protocol):
    """One thing to time. Nothing of its host package is imported before `run`."""

    name: str

    def available(self) -> tuple[bool, str]:
        """(True, "") or (False, why not and what to install); imports nothing."""
        ...

    def version(self) -> str | None:
        """The installed version, None where the package is not there."""
        ...

    def refusal(self, case: Case) -> str | None:
        """Why this implementation has no run for `case`, None where it has one."""
        ...

    def mechanism(self, case: Case) -> str | None:
        """Which of its own ways it takes for `case`, None where there is one way only."""
        ...

    def run(self, case: Case, inputs: Inputs, threads: int) -> Run:
        """Bind `inputs`; the call itself is left to `Run.step`."""
        ...


def training_run(
    call: Callable[..., tuple], inputs: Inputs, *, names: tuple[str, ...] = ("q", "k", "v", "g", "beta")
) -> Run:
    """A forward + backward of `call(q, k, v, g, beta) -> (o, ...)` with the cotangent `inputs.do`.

    Every step starts without gradients and leaves fresh ones. The leaves share the inputs' memory.
    """
    leaves = [x.detach().requires_grad_() for x in inputs.operands]
    held: dict[str, torch.Tensor] = {}

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        o = call(*leaves)[0]
        o.backward(inputs.do)
        held["o"] = o.detach()

    def outputs() -> dict[str, torch.Tensor]:
        return {**held, **{f"d{name}": leaf.grad for name, leaf in zip(names, leaves)}}

    return Run(step=step, outputs=outputs)


def forward_run(call: Callable[..., tuple], inputs: Inputs) -> Run:
    """A forward of `call(q, k, v, g, beta) -> (o, final_state K-first)` without autograd."""
    import torch

    held: list[tuple] = []

    def step() -> None:
        held.clear()
        with torch.no_grad():
            held.append(call(*inputs.operands)[:2])

    return Run(step=step, outputs=lambda: dict(zip(("o", "final_state"), held[-1])))
