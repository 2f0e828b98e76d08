"""Calls seen before: a decode step pays for its checks and its choice once per form, not once per token.

A form is everything that the checks and the choice look at: shapes, dtypes, devices, strides, flags and the
environment. Values are not part of it, and nothing of a call's data is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cula.host import env
from cula.host.arch import Target
from cula.ops.kda.problem import KDAProblem, Operands

_LIMIT = 512
_seen: dict[tuple[Any, ...], Call] = {}


@dataclass
class Call:
    """One form: known once `remember` has filled it in."""

    key: tuple[Any, ...] | None
    problem: KDAProblem | None = None
    run: Callable[..., Any] | None = None
    target: Target | None = None
    null_index: int = -1
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """This form was checked and chosen before."""
        return self.run is not None

    def bind(self, q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any) -> Operands:
        """Operands of a known form."""
        p = self.problem
        if p.gate == "finished":
            A_log = dt_bias = None
        return Operands(
            q, k, v, g, beta, A_log=None if A_log is None else A_log.reshape(p.HV),
            dt_bias=None if dt_bias is None else dt_bias.reshape(p.HV, p.K), update_state=True,
            null_index=self.null_index, memo=self.memo, target=self.target,
        )  # fmt: skip

    def remember(self, problem: KDAProblem, x: Operands, run: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the outcome of the checks; returns `run`."""
        if self.key is not None:
            self.problem, self.run, self.target, self.null_index = problem, run, x.target, x.null_index
            x.memo = self.memo
            if len(_seen) >= _LIMIT:
                _seen.clear()
            _seen[self.key] = self
        return run


def find(
    stage: str, tensors: tuple[Any, ...], written: tuple[Any, ...], common: tuple[Any, ...], implementation: Any
) -> Call:
    """The form of a call, known or new; one that cannot be a key (a wrong type somewhere) is never remembered.

    written: those of `tensors` whose strides matter. common: A_log and dt_bias, then values.
    """
    try:
        key = (
            stage,
            env.snapshot(),
            *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors],
            *[None if x is None else (x.shape, x.dtype, x.device) for x in common[:2]],
            *[None if x is None else x.stride() for x in written],
            *common[2:],
            *[type(x) for x in common[2:]],
            implementation,
        )
        return _seen.get(key) or Call(None if env.debug() else key)
    except (AttributeError, TypeError):
        return Call(None)
