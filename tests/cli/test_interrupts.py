"""Ctrl-C in an unlucky moment is not lost."""

from __future__ import annotations

import os
import signal

import pytest

from ldpfl.cli.interrupts import Interrupts


class Unlucky:
    """Is interrupted while it is destroyed, where Python can only print the exception and go on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two instructions of this loop
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_comes_back_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.check()
        one = Unlucky()
        del one
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_in_a_lucky_moment_is_raised_at_once() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
