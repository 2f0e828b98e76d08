"""Ctrl-C that lets the running step and a running save finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, the first SIGINT only sets `asked`; a second one raises KeyboardInterrupt as usual.

    Python delivers signals to the main thread; in another one this does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
