"""The implementation table: rows, their legality, and the choice among them. Pure Python, no torch.

A row serves one stage of one algorithm. Its legality is a tuple of `Rule`s, one condition each, with the reason
that a refused caller reads. `choose` is the only place that decides; executors run or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from cula.host import env
from cula.host.arch import Target
from cula.host.errors import NotSupportedError, RangeError


@dataclass(frozen=True)
class Rule:
    """One condition of legality: `holds(problem, target)`; `reason` is formatted with p=problem, t=target."""

    holds: Callable[[Any, Target], bool]
    reason: str


@dataclass(frozen=True)
class Row:
    """One implementation of one stage.

    name: what `implementation=` takes. mechanism: tells apart two rows of one name ("batched", "fused").
    arch: the devices it supports, for people. stage: e.g. "chunk forward". dsl: what it is written in.
    status: "measured on ..." or "compiled, not run". entry: "module:function", imported when it runs.
    verified: it ran on hardware of its arch; auto skips rows where it did not.
    kept: "module:function" that says from the problem alone what a forward row leaves for its backward row, as a list
    of (name, shape, torch dtype); None: nothing that a traced call could count on (`cula.ops.kda.chunk.library`).
    """

    name: str
    mechanism: str
    algorithm: str
    stage: str
    arch: str
    dsl: str
    status: str
    entry: str
    rules: tuple[Rule, ...] = field(default=(), repr=False)
    verified: bool = True
    kept: str | None = None

    def refusal(self, problem: Any, target: Target) -> str | None:
        """None where the row accepts, else the first reason."""
        for rule in self.rules:
            if not rule.holds(problem, target):
                return rule.reason.format(p=problem, t=target)
        return None

    def load(self) -> Callable[..., Any]:
        """The function that runs this row."""
        module, _, attribute = self.entry.partition(":")
        return getattr(import_module(module), attribute)


@dataclass(frozen=True)
class Verdict:
    """What the table says of one row for one problem; reason is None where it accepts."""

    row: Row
    reason: str | None


def check_name(name: Any, argument: str = "implementation") -> str | None:
    """`name` if it is an implementation's name, None for None; RangeError otherwise."""
    if name is None or name == "auto" or name in env.IMPLEMENTATION_NAMES:
        return name
    raise RangeError(f"{argument} must be one of auto, {', '.join(env.IMPLEMENTATION_NAMES)}; got {name!r}")


def request_for(implementation: Any, direction: str) -> str | None:
    """The name asked for in one direction ("forward", "backward") of a plain name or a dict of both."""
    if isinstance(implementation, Mapping):
        unknown = sorted(set(implementation) - {"forward", "backward"})
        if unknown:
            raise RangeError(f"implementation has the keys 'forward' and 'backward'; got {unknown[0]!r}")
        for key in ("forward", "backward"):
            check_name(implementation.get(key), f"implementation[{key!r}]")
        return implementation.get(direction)
    return check_name(implementation)


def forward_only_name(implementation: Any, function: str) -> str | None:
    """The name asked for, of a function that has no backward to name apart."""
    if isinstance(implementation, dict):
        raise NotSupportedError(f"{function} has no backward: implementation must be a name; got a dict")
    return check_name(implementation)


def verdicts(rows: Iterable[Row], problem: Any, target: Target) -> list[Verdict]:
    """Every row with its reason, in the order in which auto tries them."""
    result = []
    for row in rows:
        reason = row.refusal(problem, target)
        if reason is None and not row.verified and not env.allow_unverified():
            reason = f"{row.status}: auto skips it unless CULA_ALLOW_UNVERIFIED=1"
        result.append(Verdict(row, reason))
    return result


def choose(rows: Sequence[Row], problem: Any, target: Target, name: str | None = None) -> Row:
    """The row that serves `problem` on `target`.

    name: None (CULA_IMPLEMENTATION is a preference, then the first that accepts), "auto" (the first that accepts)
    or a row's name, which runs or raises NotSupportedError with the reason.
    """
    env.check_all()
    if name is not None and name != "auto":
        return _forced(rows, problem, target, name)
    preferred = env.preferred_implementation() if name is None else None
    if preferred is not None:
        for row in rows:
            if row.name == preferred and row.refusal(problem, target) is None:
                return row
    found = verdicts(rows, problem, target)
    for verdict in found:
        if verdict.reason is None:
            return verdict.row
    stage = rows[0].stage if rows else "stage"
    reasons = "; ".join(f"{v.row.name} {v.reason}" for v in found) or "it has no rows yet"
    raise NotSupportedError(f"no implementation of {stage} accepts this call: {reasons}")


def _forced(rows: Sequence[Row], problem: Any, target: Target, name: str) -> Row:
    reason = None
    for row in rows:
        if row.name == name:
            reason = row.refusal(problem, target)
            if reason is None:
                return row
    stage = rows[0].stage if rows else "stage"
    if reason is None:
        known = ", ".join(dict.fromkeys(row.name for row in rows)) or "none"
        raise NotSupportedError(f"implementation={name!r} has no row for {stage}; it has {known}")
    raise NotSupportedError(f"{name} {reason}")
