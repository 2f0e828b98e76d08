"""What the `torch.library` ops of every algorithm need: arguments that may be symbols, and errors under tracing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from cula.host.errors import CulaError

Tensor = torch.Tensor


def number(value: Any, parse: Callable[[Any], Any]) -> Any:
    """None, or a number as it is: the tracer may hold it as a symbol, unfit for `parse`, which refuses the rest."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    return parse(value)


def left_to_eager(fake: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """`fake`, whose errors count as NotImplementedErrors as well.

    With those torch.compile leaves the call to eager mode, which raises the error itself (with fullgraph it quotes
    it); any other error it would replace by one of its own.
    """

    @wraps(fake)
    def run(*args: Any) -> list[Tensor]:
        try:
            return fake(*args)
        except CulaError as error:
            if isinstance(error, NotImplementedError):
                raise
            kind = type(error)
            raise type(kind.__name__, (kind, NotImplementedError), {})(*error.args) from None

    return run
