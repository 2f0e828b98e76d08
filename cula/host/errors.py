"""Typed errors of cula. Every message names the argument, what it needs and what it got."""

from __future__ import annotations


class CulaError(Exception):
    """Base of every error that cula raises on purpose."""


class ShapeError(CulaError, ValueError):
    """A tensor has a shape, stride or head count that the call cannot have."""


class DtypeError(CulaError, TypeError):
    """A tensor or argument has a type that the call cannot take."""


class DeviceError(CulaError, ValueError):
    """A tensor lives on another device than the call needs."""


class RangeError(CulaError, ValueError):
    """A value lies outside its legal range."""


class NotSupportedError(CulaError, NotImplementedError):
    """No implementation accepts the call; the message says why."""


class NotSplittableError(CulaError, ValueError):
    """Context parallelism was forced on a problem that has nothing to split."""
