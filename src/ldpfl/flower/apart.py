"""Work in a process of its own: how it ends, what it takes with it and how long it runs are seen by this node alone.

Processes are forked, so what is done needs no import path and what it reads is shared. Only the forking thread lives on in one: a
parallel operation of PyTorch hangs there if the parent has ever run one, and so :func:`one_thread` is for what runs before a fork.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from ldpfl.errors import ConfigError, LdpflError

_LENGTH_BYTES = 8
_BLOCK = 1 << 20
_DONE, _FAILED = b"+", b"-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, repr=False)
class Outcome:
    """What came of the work.

    Attributes:
        value: what it returned: PRIVATE. None if it did not return in time, or at all.
        trouble: then why, for the node's operator; it repeats no value.
    """

    value: bytes | None
    trouble: str = ""


class Child:
    """A forked process; made by :func:`start`. Leaving its context ends it, with all that it has started."""

    def __init__(self, pid: int, pipe: int, *, leader: bool) -> None:
        self._pid, self._pipe, self._leader = pid, pipe, leader

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, at once; what the system needs for that is not waited for."""
        os.close(self._pipe)
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of which nothing but a dead process is left
            os.killpg(self._pid, signal.SIGKILL) if self._leader else os.kill(self._pid, signal.SIGKILL)
        threading.Thread(target=_reap, args=(self._pid,), daemon=True).start()

    def outcome(self, until: float = inf) -> Outcome:
        """Return what came of the work, at the time ``until`` (of ``time.monotonic``) at the latest."""
        held, expected, waiting = bytearray(), inf, select.poll()
        waiting.register(self._pipe, select.POLLIN)
        while len(held) < expected:
            left = None if until == inf else max(0.0, until - time.monotonic()) * 1000
            if not waiting.poll(left):
                return Outcome(None, "it took too long")
            block = os.read(self._pipe, _BLOCK)
            if not block:
                return Outcome(None, "its process has ended without an answer")
            held += block
            if len(held) >= _LENGTH_BYTES:
                expected = _LENGTH_BYTES + int.from_bytes(held[:_LENGTH_BYTES], "big")
        kind, said = held[_LENGTH_BYTES : _LENGTH_BYTES + 1], bytes(held[_LENGTH_BYTES + 1 :])
        return Outcome(said) if kind == _DONE else Outcome(None, said.decode(errors="replace"))


def start(work: Callable[[], bytes], *, leader: bool) -> Child:
    """Fork a process that does ``work``.

    Args:
        leader: whether it leads a group of its own, with which all processes end that ``work`` starts.

    Raises:
        ConfigError: this system cannot fork processes.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("replies at a stated time need a system that can fork processes, such as Linux")
    receiving, sending = os.pipe()
    sys.stdout.flush()  # else the child would print it once more
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads: see above
        pid = os.fork()
    if pid == 0:
        _live(work, sending, receiving, leader=leader)
    os.close(sending)
    return Child(pid, receiving, leader=leader)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread for a while; yields how many it used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def place_of(error: BaseException) -> str:
    """Return an exception's kind and the line that raised it. Its text may repeat private values."""
    if isinstance(error, LdpflError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else type(error).__name__


def _live(work: Callable[[], bytes], sending: int, receiving: int, *, leader: bool) -> None:
    """Be the forked process, from its first step to its last."""
    code = 1
    try:
        os.close(receiving)
        if leader:
            os.setsid()
        _die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # Flower's handlers speak for the parent
        _send(sending, _said(work))
        code = 0
    finally:
        # Not sys.exit: what the parent would do at its end, and connections that it holds, are not this process's.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _said(work: Callable[[], bytes]) -> bytes:
    try:
        return _DONE + work()
    except BaseException as error:  # also what asks to exit: the parent decides when this process ends
        return _FAILED + place_of(error).encode()


def _send(pipe: int, said: bytes) -> None:
    left = memoryview(len(said).to_bytes(_LENGTH_BYTES, "big") + said)
    while left:
        left = left[os.write(pipe, left) :]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
