"""Reliable handling of Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class Interrupts:
    """Context that remembers Ctrl-C, in the main thread.

    Python drops a KeyboardInterrupt that is raised inside a destructor or a weak reference's callback, and a long run would go on. So
    the next :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt
