"""Context-parallel vocabulary that every algorithm and arch shares."""

from __future__ import annotations

from enum import Enum
from typing import Any

from cula.host import env
from cula.host.errors import NotSplittableError, NotSupportedError, RangeError

__all__ = ["CPMode", "NotSplittableError"]


class CPMode(Enum):
    """Whether one long sequence may be split into segments that run at once."""

    OFF = "off"
    AUTO = "auto"
    FORCE = "force"

    @classmethod
    def parse(cls, value: Any, *, grad: bool = False) -> CPMode:
        """A mode from None, False or "off", "auto", True or "force".

        None means CULA_CP where it is set, else AUTO without gradients and OFF with them.
        """
        if isinstance(value, cls):
            return value
        if value is None:
            value = env.read("CULA_CP") or ("off" if grad else "auto")
        if value is False:
            return cls.OFF
        if value is True:
            return cls.FORCE
        if isinstance(value, str) and value in ("off", "auto", "force"):
            return cls(value)
        raise RangeError(f"cp_mode must be None, False, True, 'off', 'auto' or 'force'; got {value!r}")


def parse_context_parallel(cp_mode: Any, plan: Any, cp_context: Any, grad: bool) -> CPMode:
    """The CP mode of a call; plans and contexts have no implementation in this version and are refused."""
    if cp_context is not None:
        raise NotSupportedError("cp_context is not supported by any implementation in this version; pass None")
    if plan is not None:
        raise NotSupportedError("plan is not supported by any implementation in this version; pass None")
    mode = CPMode.parse(cp_mode, grad=grad)
    if mode is CPMode.FORCE:
        raise NotSplittableError("cp_mode='force' needs an implementation that splits a sequence; there is none yet")
    return mode
