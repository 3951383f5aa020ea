"""Work in a process of its own: how it ends, what it takes with it and how long it runs are seen by this node alone.

Processes are forked, so what is done needs no import path and what it reads is shared. Only the forking thread lives on in one: a
parallel operation of PyTorch hangs there if the parent has ever run one, and so :func:`one_thread` is for what runs before a fork.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

import ldpfl
from ldpfl.errors import ConfigError, LdpflError

_LENGTH_BYTES = 8
_BLOCK = 1 << 20
_DONE, _FAILED = b"+", b"-"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
TOO_LONG, NO_ANSWER = "it took too long", "its process has ended without an answer"
"""Troubles of work that gave nothing, beside what it raised."""

_MOST_PASSES = 1000
_MOST_STOPPED = 256
"""Processes of an app that are stopped rather than killed: beyond, Flower may find no room for the thread that replies."""

POSSIBLE = hasattr(os, "fork")
"""Whether this system can fork processes."""

_PACKAGE = Path(ldpfl.__file__).parent
_OWN = frozenset(_PACKAGE / room for room in ("flower", "mechanisms", "privacy", "relay", "shuffling", "summing"))
"""Rooms that read no data."""


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
    """A forked process; made by :func:`start` or :func:`start_guarded`. Leaving its context ends it."""

    def __init__(self, pid: int, pipe: int, end: signal.Signals) -> None:
        self._pid, self.pipe, self._end = pid, pipe, end

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Tell it to end. How long that takes, and what has to be ended with it, is not waited for: it may depend on data."""
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            os.kill(self._pid, self._end)
            os.kill(self._pid, signal.SIGCONT)  # should its work have stopped it
        with suppress(RuntimeError):  # its work has used up the threads; then it stays a zombie for as long as this process lives
            threading.Thread(target=_reap, args=(self._pid,), daemon=True).start()

    def outcome(self, until: float = inf) -> Outcome:
        """Return what came of the work, at the time ``until`` (of ``time.monotonic``) at the latest."""
        held, expected, waiting = bytearray(), inf, select.poll()
        waiting.register(self.pipe, select.POLLIN)
        while len(held) < expected:
            left = max(0.0, until - time.monotonic())
            if left == 0:
                return Outcome(None, TOO_LONG)
            if not waiting.poll(min(left, 1.0) * 1000):  # in turns, so that a node that is told to stop is not held up
                continue
            block = os.read(self.pipe, _BLOCK)
            if not block:
                return Outcome(None, NO_ANSWER)
            held += block
            if len(held) >= _LENGTH_BYTES:
                expected = _LENGTH_BYTES + int.from_bytes(held[:_LENGTH_BYTES], "big")
        kind, said = held[_LENGTH_BYTES : _LENGTH_BYTES + 1], memoryview(held)[_LENGTH_BYTES + 1 :]
        return Outcome(said) if kind == _DONE else Outcome(None, bytes(said).decode(errors="replace"))


def start(work: Callable[[], bytes], asks: Child | None = None) -> Child:
    """Fork a process that does ``work``, which must start no other one; ``asks`` is whose outcome it asks for.

    Raises:
        ConfigError: this system cannot fork processes.
    """
    return _forked(lambda sending: _alone(work, sending), signal.SIGKILL, asks)


def start_guarded(work: Callable[[], bytes], freed: float = 0.0) -> Child:
    """Fork a process that does ``work``, under a guard that ends it, and all processes that it has started, whatever became of them.

    On Linux also those that have left their group, session or parent: orphans are the guard's. Until the time ``freed`` (of
    ``time.monotonic``) they are only stopped, for as long as this process lives: to give back what they hold takes processor time, and
    where that has a limit, a reply would be late for it. Errors as for :func:`start`.
    """
    parent = os.getpid()
    return _forked(lambda sending: _guard(work, sending, parent, freed), signal.SIGTERM)


def _forked(live: Callable[[int], NoReturn], end: signal.Signals, asks: Child | None = None) -> Child:
    if not POSSIBLE:
        raise ConfigError("replies at a stated time need a system that can fork processes, such as Linux")
    receiving, sending = os.pipe()
    sys.stdout.flush()  # else the child would print it once more
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has dropped the parent's handlers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads: see above
            pid = os.fork()
        if pid == 0:
            os.close(receiving)
            _be_apart(live, sending, mask, set() if asks is None else {asks.pipe})
    except OSError:
        os.close(receiving)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(sending)
    return Child(pid, receiving, end)


def _be_apart(live: Callable[[int], NoReturn], sending: int, mask: set[Any], kept: set[int]) -> NoReturn:
    """Be the forked process; whatever happens, it never goes on as the parent."""
    try:
        _drop_what_speaks_for_the_parent({sending, *kept})
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGTERM})  # the guard waits for it; who works unblocks it
        live(sending)
    finally:
        os._exit(1)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread for a while; yields how many it used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def repeats_nothing(error: BaseException) -> bool:
    """Tell whether ``error`` was raised where ldpfl itself judges what it was asked or given: then its text repeats no value."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, LdpflError) and (not frames or bool(_OWN.intersection(Path(frames[-1].filename).parents)))


def place_of(error: BaseException) -> str:
    """Return an exception's kind and the line that raised it, for the node's log. Its text may repeat private values.

    So may that of one of ours, which an app can raise, and which may quote what a file holds, unless it :func:`repeats_nothing`.
    """
    if repeats_nothing(error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else type(error).__name__


def _alone(work: Callable[[], bytes], sending: int) -> NoReturn:
    """Be a process that works without a guard."""
    _part(signal.SIGKILL)
    _live(work, sending)


def _live(work: Callable[[], bytes], sending: int, *, stays: bool = False) -> NoReturn:
    """Be the process that works, from its first step to its last, which is to stop if it ``stays``: what it holds is held until its end."""
    code = 1
    try:
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):  # where memory runs out, this process goes, and not what answers for it
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _repeat_no_texts()
        _send(sending, _said(work))
        code = 0
        while stays:
            os.kill(os.getpid(), signal.SIGSTOP)
    finally:
        # Not sys.exit: what the parent would do at its end, and connections that it holds, are not this process's.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _repeat_no_texts() -> None:
    """Have exceptions that nobody catches, in threads and where objects are freed, logged without their text."""

    def hook(args: Any) -> None:
        print(f"not caught: {place_of(args.exc_value)}" if args.exc_value else "not caught", file=sys.stderr)

    threading.excepthook = sys.unraisablehook = hook


def _guard(work: Callable[[], bytes], sending: int, parent: int, freed: float) -> NoReturn:
    """Be the guard: wait for the signal to end, which also comes when the parent dies, stop all that there is, then end it.

    The process that works is a grandchild: what it does to its parent and its group leaves the guard alone.
    """
    try:
        _part(signal.SIGTERM)
        _control(_PR_SET_CHILD_SUBREAPER, 1)
        # What is ended in the middle of something leaves its scratch files, and these may be raw data.
        scratch = tempfile.mkdtemp(prefix="ldpfl-")
        between = os.fork()
        if between == 0:
            _stand_between(work, sending, scratch)
        os.close(sending)
        signal.sigwait({signal.SIGTERM})  # blocked since before the fork, and so never missed
        if time.monotonic() < freed:
            _stop_all(between)
        while time.monotonic() < freed and os.getppid() == parent:
            time.sleep(0.1)
        _end_all(between)
        _remove(scratch)
    finally:
        os._exit(0)


def _stand_between(work: Callable[[], bytes], sending: int, scratch: str) -> NoReturn:
    """Be the parent of the process that works, and lead its group."""
    try:
        _part(signal.SIGKILL)
        worker = os.fork()
        if worker == 0:
            tempfile.tempdir = os.environ["TMPDIR"] = scratch
            _live(work, sending, stays=True)
        _, status = os.waitpid(worker, 0)
        if status != 0:  # said here, for what the work has started may hold the pipe open for as long as it likes
            _send(sending, _FAILED + NO_ANSWER.encode())
    finally:
        os._exit(0)


def _drop_what_speaks_for_the_parent(kept: set[int]) -> None:
    """Leave this process nothing by which the parent's others would hear of it: neither handlers of signals, nor connections and pipes.

    Flower's handlers, for one, report that the task has failed. Descriptors are turned to nothing rather than closed: objects that
    own them may close them later, and must not close what has their numbers then.
    """
    signal.set_wakeup_fd(-1)
    for caught in signal.valid_signals():
        if callable(signal.getsignal(caught)):
            signal.signal(caught, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in sorted(int(entry.name) for entry in Path("/dev/fd").iterdir()):
        with suppress(OSError):  # that of the listing itself
            if number > 2 and number not in {nothing, *kept} and _speaks(os.fstat(number).st_mode):
                os.dup2(nothing, number)
    os.close(nothing)


def _speaks(mode: int) -> bool:
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def _part(on_death: signal.Signals) -> None:
    """Leave the parent's session, so that its Ctrl-C is not for this process; be told when it dies."""
    os.setsid()
    _control(_PR_SET_PDEATHSIG, on_death)


def _stop_all(leader: int) -> None:
    """Stop all descendants, over and over as below. What is stopped starts nothing."""
    with suppress(OSError):
        os.killpg(leader, signal.SIGSTOP)
    me, stopped = psutil.Process(), set[psutil.Process]()
    for _ in range(_MOST_PASSES):
        left = set(me.children(recursive=True)) - stopped
        if not left or len(stopped) > _MOST_STOPPED:
            break
        for child in left:
            with suppress(psutil.Error):
                child.suspend()
        stopped |= left
    if len(stopped) > _MOST_STOPPED:
        _end_all(leader)


def _end_all(leader: int) -> None:
    """Kill all descendants: over and over, since one that is killed may just have started another.

    First the group that ``leader`` leads, all at once: they may be so many that to list them takes too long, and Flower needs a thread of
    its own for the reply, which it does not get while they use up what there may be.
    """
    with suppress(OSError):  # there is no group yet, or no longer
        os.killpg(leader, signal.SIGKILL)
    _reap_all()
    me = psutil.Process()
    for _ in range(_MOST_PASSES):
        left = me.children(recursive=True)
        if not left:
            return
        for child in left:
            with suppress(psutil.Error):
                child.kill()
        _reap_all()


def _remove(folder: str) -> None:
    """Remove a folder with all that it holds, also folders in it that its owner may not write to, as unpacked archives have them."""
    for place, names, _ in os.walk(folder):
        for name in names:
            inside = Path(place, name)
            if not inside.is_symlink():
                with suppress(OSError):
                    inside.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _reap_all() -> None:
    """Forget those that have ended, which count as processes until then; also orphans, which are the guard's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
