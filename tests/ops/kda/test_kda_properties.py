"""The four properties, for every implementation that this machine can run, with one thread and with two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cula
from cula.checks import properties, rows


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_property(subject, threads: int, name: str) -> None:
    properties.check(name, subject.label, subject.device)


def test_every_implementation_of_the_table_is_a_subject() -> None:
    found = {row.name for row, reason in cula.available().rows if reason is None and row.algorithm == "kda"}
    labels = [label for device in rows.devices() for label in rows.subjects(device)]
    assert {rows.name_of(label) for label in labels} >= found
    for stage in {row.stage for row, _ in cula.available().rows}:
        count = sum(row.stage == stage and reason is None for row, reason in cula.available().rows)
        functions = [function for function, s in rows.STAGES.items() if s == stage]
        if functions:
            assert len({x for d in rows.devices() for x in rows.labels(functions[0], d)}) == count, stage
