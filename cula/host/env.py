"""The environment variables that cula reads, each parsed strictly and afresh at every call.

An argument beats the environment, the environment beats the default. An unknown value is a RangeError that
names the known ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cula.host.errors import RangeError

IMPLEMENTATION_NAMES = ("eager", "portable", "sm90", "sm100")

VARIABLES: dict[str, tuple[str, ...]] = {
    "CULA_IMPLEMENTATION": ("auto", *IMPLEMENTATION_NAMES),
    "CULA_CP": ("off", "auto", "force"),
    "CULA_DEBUG": ("0", "1"),
    "CULA_ALLOW_UNVERIFIED": ("0", "1"),
}


def _fast_lookup() -> Callable[[], tuple[object, ...]]:
    """A reader of the raw values. On CPython the mapping behind os.environ saves 3 us of encoding per call."""
    names = tuple(VARIABLES)
    raw, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if isinstance(raw, dict) and encode is not None:
        keys = tuple(encode(name) for name in names)
        return lambda: tuple([raw.get(key) for key in keys])
    return lambda: tuple([os.environ.get(name) for name in names])


#: The raw values of all variables, cheap to read and compare: a key for anything decided from them.
snapshot = _fast_lookup()


def read(name: str) -> str | None:
    """The value of variable `name`, None where it is unset or empty; RangeError where it is unknown."""
    value = os.environ.get(name)
    if not value:
        return None
    known = VARIABLES[name]
    if value not in known:
        raise RangeError(f"environment variable {name} must be one of {', '.join(known)}; got {value!r}")
    return value


def check_all() -> None:
    """Raise a RangeError for the first variable that has an unknown value."""
    for name in VARIABLES:
        read(name)


def preferred_implementation() -> str | None:
    """CULA_IMPLEMENTATION, None where it is unset or "auto"."""
    value = read("CULA_IMPLEMENTATION")
    return None if value == "auto" else value


def debug() -> bool:
    """CULA_DEBUG=1: check device-side values at the price of a sync."""
    return read("CULA_DEBUG") == "1"


def allow_unverified() -> bool:
    """CULA_ALLOW_UNVERIFIED=1: auto may choose rows that never ran on hardware."""
    return read("CULA_ALLOW_UNVERIFIED") == "1"
