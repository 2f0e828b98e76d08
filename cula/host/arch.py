"""What a device is, in the words that policies use. Pure Python unless a live device is probed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from cula.host.errors import RangeError

#: SM counts of the cards that `explain` is asked about without one being there.
_TYPICAL_SM_COUNT = {(8, 0): 108, (8, 9): 142, (9, 0): 132, (10, 0): 148, (10, 3): 152, (12, 0): 170, (12, 1): 48}


@dataclass(frozen=True)
class Target:
    """A device as policies see it.

    kind: "cpu", "cuda" or another torch device type. capability: (major, minor) of a CUDA device.
    sm_count: its multiprocessors. live: it is really there (not a device that `explain` only imagines).
    """

    kind: str
    capability: tuple[int, int] | None = None
    sm_count: int = 0
    live: bool = True

    @property
    def name(self) -> str:
        """ "cpu", "sm90", ...: the name that `explain --device` takes."""
        if self.capability is None:
            return self.kind
        return f"sm{self.capability[0]}{self.capability[1]}"


CPU = Target("cpu")


def parse_target(device: Any = None) -> Target:
    """A Target from "cpu", "sm90", "cuda", "cuda:1", a torch.device, a Target, or None (this machine's best).

    RangeError for a name that means no device. "smXY" needs no GPU: it describes one.
    """
    if isinstance(device, Target):
        return device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    text = str(device)
    match = re.fullmatch(r"sm_?(\d+)(\d)a?", text)
    if match:
        capability = (int(match[1]), int(match[2]))
        return Target("cuda", capability, _TYPICAL_SM_COUNT.get(capability, 100), live=False)
    if text == "cpu":
        return CPU
    if re.fullmatch(r"cuda(:\d+)?", text):
        import torch

        if not torch.cuda.is_available():
            raise RangeError(f"device {text!r} is not there; name an architecture such as 'sm90' to ask about one")
        return cuda_target(torch.device(text).index or 0)
    if re.fullmatch(r"[a-z]+(:\d+)?", text):
        import torch

        try:
            return Target(torch.device(text).type)
        except RuntimeError:
            pass
    raise RangeError(f"device must be cpu, cuda, cuda:N or an architecture such as sm90; got {text!r}")


@lru_cache(maxsize=64)
def cuda_target(index: int) -> Target:
    """The Target of CUDA device `index`, probed once per process."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Target("cuda", (properties.major, properties.minor), properties.multi_processor_count)


def target_of(device: Any) -> Target:
    """The Target of a torch.device."""
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        import torch

        return cuda_target(torch.cuda.current_device() if device.index is None else device.index)
    return Target(device.type)


@lru_cache(maxsize=1)
def has_numba() -> bool:
    """Numba can be imported here."""
    return find_spec("numba") is not None


@lru_cache(maxsize=1)
def has_cute_dsl() -> bool:
    """The CuTe DSL and the TVM-FFI that its kernels are called through can be imported here."""
    return find_spec("cutlass") is not None and find_spec("tvm_ffi") is not None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Triton can be imported here."""
    return find_spec("triton") is not None
