"""Devices by name: what each spelling means on a machine that may have no GPU."""

from __future__ import annotations

import pytest
import torch

import cula
from cula.host.arch import CPU, Target, parse_target, target_of

ARCHS = {
    "sm80": (8, 0),
    "sm89": (8, 9),
    "sm90": (9, 0),
    "sm100": (10, 0),
    "sm103": (10, 3),
    "sm110": (11, 0),
    "sm120": (12, 0),
    "sm121": (12, 1),
}


@pytest.mark.parametrize("name", ARCHS)
def test_an_architecture_needs_no_gpu(name: str) -> None:
    for spelling in (name, f"{name[:2]}_{name[2:]}", f"{name}a"):
        target = parse_target(spelling)
        assert (target.kind, target.capability, target.live) == ("cuda", ARCHS[name], False)
        assert target.name == name and target.sm_count > 0


def test_the_cpu() -> None:
    assert parse_target("cpu") is CPU is target_of(torch.device("cpu"))
    assert parse_target(torch.device("cpu")) is CPU
    assert (CPU.name, CPU.capability) == ("cpu", None)
    assert parse_target(CPU) is CPU


def test_none_is_the_best_device_here() -> None:
    assert parse_target(None).kind == ("cuda" if torch.cuda.is_available() else "cpu")


def test_other_torch_devices_have_their_own_name() -> None:
    assert parse_target("meta") == Target("meta") == target_of(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
def test_a_gpu_that_is_not_there(name: str) -> None:
    with pytest.raises(cula.RangeError, match="not there"):
        parse_target(name)


@pytest.mark.parametrize("name", ["gpu", "hopper", "sm", "sm9", "SM90", "90", "", "cuda:x", "cpu:", 90])
def test_a_name_that_means_nothing(name) -> None:
    with pytest.raises(cula.RangeError, match="device"):
        parse_target(name)
