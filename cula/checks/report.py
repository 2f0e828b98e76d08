"""What a sweep found, condensed for people and written for machines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cula.checks.grid import Outcome
from cula.checks.runs import FUNCTIONS

#: Columns that people read; both fp32 columns are one, since a line names its device.
GROUPS = {"fp64": "fp64", "fp32 cpu": "fp32", "fp32 gpu": "fp32", "16 bit": "bf16, fp16"}
HEAD = ("function", "implementation", "device", "quantity", *dict.fromkeys(GROUPS.values()), "verdict")


@dataclass
class Line:
    """The worst errors of one quantity of one function: column -> (error, tolerance), and all misses."""

    function: str
    implementation: str
    device: str
    quantity: str
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)
    compared: int = 0
    misses: int = 0

    def add(self, outcome: Outcome) -> None:
        """Take one more outcome in."""
        self.compared += 1
        self.misses += not outcome.passed
        group = GROUPS[outcome.column]
        if math.isfinite(outcome.tolerance) and outcome.error >= self.worst.get(group, (-1.0, 0.0))[0]:
            self.worst[group] = (outcome.error, outcome.tolerance)

    def cells(self) -> tuple[str, ...]:
        """The line as text, in the order of `HEAD`."""
        errors = []
        for group in dict.fromkeys(GROUPS.values()):
            found = self.worst.get(group)
            errors.append("-" if found is None else f"{found[0]:.1e} of {found[1]:.0e}")
        verdict = "pass" if not self.misses else f"MISS ({self.misses} of {self.compared})"
        return (self.function, self.implementation, self.device, self.quantity, *errors, verdict)


@dataclass(frozen=True)
class Held:
    """One property of one implementation: held, or the sentence that says where it broke."""

    name: str
    implementation: str
    device: str
    reason: str | None = None


@dataclass
class Report:
    """All outcomes and properties of one run of `cula check`."""

    outcomes: list[Outcome] = field(default_factory=list)
    properties: list[Held] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def misses(self) -> list[Outcome]:
        """Outcomes beyond their tolerance, refused without right, or raised."""
        return [x for x in self.outcomes if not x.passed]

    @property
    def passed(self) -> bool:
        """Something was compared, nothing missed and every property held."""
        held = all(x.reason is None for x in self.properties)
        return held and not self.misses and any(not x.refused for x in self.outcomes)

    def lines(self) -> list[Line]:
        """One line per function, implementation and quantity that was compared, function by function."""
        found: dict[tuple[str, str, str, str], Line] = {}
        for x in self.outcomes:
            if not x.refused:
                key = (x.function, x.implementation, x.device, x.quantity)
                found.setdefault(key, Line(*key)).add(x)
        return [line for function in FUNCTIONS for line in found.values() if line.function == function]

    def refusals(self) -> dict[str, int]:
        """How many calls each reason turned away."""
        counts: dict[str, int] = {}
        for x in self.outcomes:
            if x.refused:
                text = f"{x.function} {x.implementation}: {x.reason}"
                counts[text] = counts.get(text, 0) + 1
        return counts

    def write(self, path: Path) -> None:
        """JSON or Markdown, by the file's ending."""
        text = self.as_json() if path.suffix == ".json" else self.as_markdown()
        path.write_text(text, encoding="utf-8")

    def as_json(self) -> str:
        """Facts, verdict, every outcome (an infinite number is null) and every property."""
        outcomes = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in dataclasses.asdict(x).items()}
            for x in self.outcomes
        ]
        properties = [dataclasses.asdict(x) for x in self.properties]
        content = {**self.facts, "passed": self.passed, "properties": properties, "outcomes": outcomes}
        return json.dumps(content, indent=1) + "\n"

    def as_markdown(self) -> str:
        """The table that the command prints, the properties, and every miss."""
        facts = [f"- {name}: {value}" for name, value in self.facts.items()]
        parts = ["# cula check", "", f"{'Passed' if self.passed else 'FAILED'}.", "", *facts, ""]
        parts += markdown_table(HEAD, [line.cells() for line in self.lines()])
        held = [(x.name, x.implementation, x.device, x.reason or "holds") for x in self.properties]
        parts += ["", *markdown_table(("property", "implementation", "device", "verdict"), held)]
        parts += ["", *[f"- {sentence(x)}" for x in self.misses]] if self.misses else []
        parts += ["", *[f"- refused {n} times: {reason}" for reason, n in self.refusals().items()]]
        return "\n".join(parts).rstrip() + "\n"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table, one string per line."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def sentence(x: Outcome) -> str:
    """One miss in words."""
    place = f"{x.function} {x.implementation} {x.device} {x.case}"
    if x.reason is not None:
        return f"{place}: {x.reason}"
    return f"{place}: {x.quantity} has error {x.error:.2e}, allowed {x.tolerance:.0e}"
