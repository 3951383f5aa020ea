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

import psutil
import torch

from ldpfl.errors import ConfigError, LdpflError

_LENGTH_BYTES = 8
_BLOCK = 1 << 20
_DONE, _FAILED = b"+", b"-"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS_OF_KILLING = 20


@dataclass(frozen=True, repr=False)
class Outcome:
    """What came of the work.

    Attributes:
        value: what it returned: PRIVATE. None if it did not return in time, or at all.
        trouble: then why, for the node's operator; it repeats no value.
    """

    value: memoryview | None
    trouble: str = ""


class Child:
    """A forked process; made by :func:`start`. Leaving its context ends it."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it, at once; what the system needs for that is not waited for."""
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
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
        kind, said = held[_LENGTH_BYTES : _LENGTH_BYTES + 1], memoryview(held)[_LENGTH_BYTES + 1 :]
        return Outcome(said) if kind == _DONE else Outcome(None, bytes(said).decode(errors="replace"))


def start(work: Callable[[], bytes]) -> Child:
    """Fork a process that does ``work``.

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
        os.close(receiving)
        _live(work, sending)
    os.close(sending)
    return Child(pid, receiving)


@contextmanager
def nothing_left() -> Iterator[None]:
    """End all processes that are started in the meantime, also those that have left their group or their parent (the latter on Linux).

    Then orphans become this process's children, by which they are found.
    """
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    me = psutil.Process()
    before = set(me.children(recursive=True))
    try:
        yield
    finally:
        for _ in range(_ROUNDS_OF_KILLING):  # a process that is killed may just have started another one
            left = [child for child in me.children(recursive=True) if child not in before and _lives(child)]
            if not left:
                break
            for child in left:
                with suppress(psutil.Error):
                    child.kill()
        _control(_PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread for a while; yields how many it used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def place_of(error: BaseException) -> str:
    """Return an exception's kind and the line that raised it. Its text may repeat private values."""
    if isinstance(error, LdpflError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else type(error).__name__


def _live(work: Callable[[], bytes], sending: int) -> None:
    """Be the forked process, from its first step to its last."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the parent
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):  # where memory runs out, this process goes, and not what answers for it
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
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


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
