"""Context-parallel vocabulary that every arch shares."""

from __future__ import annotations

from enum import Enum
from typing import Any

from cula.host import env
from cula.host.errors import NotSplittableError, RangeError

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
