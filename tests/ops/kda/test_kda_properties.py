"""The four properties, for every implementation that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cula
from cula.checks import properties, rows


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_property(subject, name: str) -> None:
    properties.check(name, subject.label, subject.device, "kda")


@pytest.mark.parametrize("name", ["prefix stability", "sequence isolation"])
def test_property_with_two_threads(subject, two_threads, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """How work is cut over threads changes no bit either."""
    monkeypatch.setattr(properties, "CASES", properties.CASES[0:4:3])
    properties.check(name, subject.label, subject.device, "kda")


def test_every_implementation_of_the_table_is_a_subject() -> None:
    found = {row.name for row, reason in cula.available().rows if reason is None and row.algorithm == "kda"}
    labels = [label for device in rows.devices() for label in rows.subjects(device)]
    assert {rows.name_of(label) for label in labels} >= found
    for stage in {row.stage for row, _ in cula.available().rows}:
        count = sum(row.stage == stage and reason is None for row, reason in cula.available().rows)
        functions = [function for function, s in rows.STAGES.items() if s == stage]
        if functions:
            assert len({x for d in rows.devices() for x in rows.labels(functions[0], d)}) == count, stage
