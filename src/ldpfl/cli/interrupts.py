"""Reliable handling of Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells: 128 plus the number of the signal."""


class Interrupts:
    """Context that remembers Ctrl-C, in the main thread.

    Python drops a KeyboardInterrupt that is raised inside a destructor or a weak reference's callback, and a long run would continue. So
    the next :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pressed:
            raise KeyboardInterrupt

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt
