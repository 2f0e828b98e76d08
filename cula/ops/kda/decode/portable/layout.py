"""How tensors and states lie, as the integers and constants that the kernels of this folder take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from cula.host.errors import NotSupportedError
from cula.ops.kda.decode.portable import step
from cula.ops.kda.decode.portable.config import Config
from cula.ops.kda.problem import KDAProblem

Tensor = torch.Tensor

NONE, ROW, INDEX, COLUMN, SAME = (mode.value for mode in (step.NONE, step.ROW, step.INDEX, step.COLUMN, step.SAME))
MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class States:
    """How the states at one end of a walk lie.

    rows: how many there are, for slots that are out of range. unit divides `strides`, those of rows, heads and V (K
    where `inner` is 0: K-first), which count units. inner: K's stride.
    """

    rows: int = 0
    strides: tuple[int, int, int] = (0, 0, 0)
    unit: int = 16
    inner: int = 1


def states(mode: int, tensor: Tensor, k_first: bool) -> States:
    """Where states `[rows, HV, V, K]`, or K-first ones `[rows, HV, K, V]` of innermost stride 1, lie."""
    if mode == NONE:
        return States()
    n, h, row, inner = tensor.stride()
    n, h = n if tensor.shape[0] > 1 else 0, h if tensor.shape[1] > 1 else 0
    unit = gcd(16, n, h, row)
    return States(tensor.shape[0], (n // unit, h // unit, row // unit), unit, 0 if k_first else inner)


def rows_of(t: Tensor) -> Tensor:
    """An input whose innermost dimension is contiguous: itself, but for odd views."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def programs_of(p: KDAProblem, c: Config) -> int:
    """Programs of a launch: one per sequence, value head and BV rows."""
    programs = p.N * p.HV * -(-p.V // c.BV)
    if programs > MAX_PROGRAMS:
        raise NotSupportedError(f"portable needs fewer than 2^31 programs, got {programs}: split the sequences")
    return programs


def on_device_of(t: Tensor) -> Any:
    """Launches within go to the device of a tensor."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(t.device)
