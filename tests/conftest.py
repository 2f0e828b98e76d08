"""Shared by all tests: hypothesis profiles, a clean environment, and one parameter per implementation that runs here.

A test that takes `on_chunk`, `on_prefill`, `on_recurrent`, `on_decode`, `on_verify`, `on_rollback`, `on_fused`,
`on_gate`, or one of four with `on_lightning_`, runs once for every implementation of that
stage that `cula.available()` lists, on every kind of device here; `subject` is any implementation with any stage. Each
is a `Subject`, and while the test runs, its name means its very row (`cula.checks.rows`) and its device is torch's
default (not for `subject`). Those on a GPU are marked `gpu`.
A module of CPU tests that name no implementation uses `each_chunk` or `each_prefill`: every row of that stage is
then what auto prefers.
Without a GPU Triton's kernels run in its interpreter, which is decided when triton is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings

from cula.checks import rows

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("ci", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("fuzz", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class Subject(NamedTuple):
    """An implementation on a device: the label of its row, what `implementation=` takes, and "cpu" or "cuda"."""

    label: str
    name: str
    device: str


_FUNCTIONS = {
    "on_chunk": "chunk_kda",
    "on_prefill": "kda_prefill",
    "on_recurrent": "fused_recurrent_kda",
    "on_decode": "kda_decode",
    "on_verify": "kda_verify",
    "on_rollback": "kda_rollback",
    "on_fused": "kda_decode_fused",
    "on_gate": "fused_kda_gate",
    "on_lightning_chunk": "chunk_lightning_attn",
    "on_lightning_prefill": "lightning_prefill",
    "on_lightning_decode": "lightning_decode",
    "on_lightning_verify": "lightning_verify",
}
_CPU = {"each_chunk": "chunk_kda", "each_prefill": "kda_prefill"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `long` run where they are asked for: by a marker expression, or in the fuzz profile."""
    if config.option.markexpr or os.environ.get("HYPOTHESIS_PROFILE") == "fuzz":
        return
    apart = [x for x in items if x.get_closest_marker("long")]
    config.hook.pytest_deselected(items=apart)
    items[:] = [x for x in items if x not in apart]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in metafunc.fixturenames:
        if fixture not in ("subject", *_FUNCTIONS, *_CPU):
            continue
        found = []
        for device in ("cpu",) if fixture in _CPU else rows.devices():
            function = _FUNCTIONS.get(fixture, _CPU.get(fixture))
            here = rows.subjects(device) if function is None else rows.labels(function, device)
            found += [Subject(label, rows.name_of(label), device) for label in here]
        assert found, f"no implementation for {fixture} on this machine"
        parameters = [
            pytest.param(x, id=f"{x.label}-{x.device}", marks=[pytest.mark.gpu] if x.device != "cpu" else [])
            for x in found
        ]
        metafunc.parametrize(fixture, parameters, indirect=True)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with rows.only(request.param.label):
        yield request.param


def _there(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with rows.only(request.param.label), torch.device(request.param.device):
        yield request.param


for _name in _FUNCTIONS:
    globals()[_name] = pytest.fixture(_there, name=_name)


def _preferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    monkeypatch.setenv("CULA_IMPLEMENTATION", request.param.name)
    with rows.only(request.param.label):
        yield request.param


each_chunk, each_prefill = (pytest.fixture(_preferred, name=name) for name in _CPU)


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with one thread (xdist runs a process per core) and without cula's variables."""
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith("CULA_"):
            monkeypatch.delenv(name)
