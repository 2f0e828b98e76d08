"""Which rows of the implementation table run here, as labels that checks can force one by one.

A label is an implementation's name, or "name/mechanism" for a further row of that name in one stage, which
`implementation=` cannot tell apart: "eager" is what a caller of eager gets, "eager/stepwise" is the row behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: The stage that each function needs under a forced name; a backward only where gradients are asked for.
STAGES = {
    "chunk_kda": "chunk forward",
    "kda_prefill": "chunk forward",
    "fused_recurrent_kda": "recurrent",
    "kda_decode": "decode",
    "kda_verify": "verify",
    "kda_rollback": "rollback",
    "kda_decode_fused": "decode fused",
    "fused_kda_gate": "gate",
    "chunk_lightning_attn": "lightning forward",
    "lightning_prefill": "lightning forward",
    "lightning_decode": "lightning decode",
    "lightning_verify": "lightning verify",
}

#: The function of each algorithm that has a backward, and the backward's stage.
BACKWARDS = {"chunk_kda": "chunk backward", "chunk_lightning_attn": "lightning backward"}

#: Sizes and dtypes one of which every row should take.
PROBES = tuple({"K": K, "dtype": dtype} for K in (32, 64, 128) for dtype in ("fp32", "bf16"))


def devices() -> tuple[str, ...]:
    """The kinds of device on this machine."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def name_of(label: str) -> str:
    """What `implementation=` takes for a label."""
    return label.partition("/")[0]


def labels(function: str, device: str) -> list[str]:
    """The labels of all rows that can serve some call of `function` on `device`, in the order of the table."""
    found, names = [], set()
    for row in _rows(function, device):
        found.append(f"{row.name}/{row.mechanism}" if row.name in names else row.name)
        names.add(row.name)
    return found


def _rows(function: str, device: str) -> list[Any]:
    with _everything():
        return _accepting(function, device)


def _accepting(function: str, device: str) -> list[Any]:
    from cula import available, explain

    here = [row for row, reason in available().rows if row.stage == STAGES[function] and reason is None]
    accepted = set()
    for probe in PROBES if here else ():
        for stage, verdicts in explain(function, device=device, T=1, **probe).stages:
            if stage == STAGES[function]:
                # A row that auto skips as unverified can still be forced.
                accepted |= {v.row.mechanism + v.row.name for v in verdicts if v.reason is None or not v.row.verified}
    return [row for row in here if row.mechanism + row.name in accepted]


def algorithm_of(function: str) -> str:
    """ "kda" or "lightning"."""
    return "lightning" if "lightning" in function else "kda"


def subjects(device: str) -> list[str]:
    """Every label of every function on `device`."""
    return list(dict.fromkeys(label for function in STAGES for label in labels(function, device)))


def has_backward(label: str, device: str, function: str = "chunk_kda") -> bool:
    """Whether the implementation has a row for the backward of `function` on `device`."""
    if function not in BACKWARDS:
        return False
    from cula import explain

    for probe in PROBES:
        for stage, verdicts in explain(function, device=device, T=1, grad=True, **probe).stages:
            if stage == BACKWARDS[function] and any(
                v.row.name == name_of(label) and v.reason is None for v in verdicts
            ):
                return True
    return False


#: The label that `only` forces now: (name, mechanism, stages that have such a row).
_forced: list[tuple[str, str, set[str]]] = []


@contextmanager
def only(label: str) -> Iterator[str]:
    """Within this, `implementation=name` runs the label's very row, wherever a stage has one. Yields the name."""
    from cula import available
    from cula.host import env
    from cula.host.table import Row

    name, _, mechanism = label.partition("/")
    if not mechanism:
        yield name
        return
    refusal, snapshot = Row.refusal, env.snapshot

    def passed_over(row: Row, problem: Any, target: Any) -> str | None:
        for forced, kind, stages in _forced:
            if row.name == forced and row.stage in stages and row.mechanism != kind:
                return f"({row.mechanism}) is passed over by a check of {forced}/{kind}"
        return refusal(row, problem, target)

    stages = {row.stage for row, _ in available().rows if (row.name, row.mechanism) == (name, mechanism)}
    Row.refusal = passed_over
    env.snapshot = lambda: (*snapshot(), label)  # what was decided before or is decided now holds for itself alone
    _forced.append((name, mechanism, stages))
    try:
        yield name
    finally:
        _forced.pop()
        Row.refusal, env.snapshot = refusal, snapshot


@contextmanager
def _everything() -> Iterator[None]:
    """Questions about the table are asked as if nothing were forced."""
    saved = _forced[:]
    _forced.clear()
    try:
        yield
    finally:
        _forced[:] = saved
