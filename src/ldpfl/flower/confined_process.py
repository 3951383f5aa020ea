"""Run work in a process of its own, so that only this node sees how the work ends, which processes it starts and how long it runs.

Processes are forked: the work needs no import path, and it shares the memory that it reads. Only the forking thread survives in the child.
A parallel operation of PyTorch hangs in the child if the parent has ever run one, so code before a fork runs under :func:`one_thread`.
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
from ldpfl.errors import ConfigError, Declined, LdpflError, ProtocolError

_LENGTH_BYTES = 8  # they state a message's length, before the message
_BLOCK_BYTES = 1 << 20
_DONE, _FAILED = b"+", b"-"  # first byte of a message: a result follows, or the reason why there is none
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # options of Linux's prctl: a signal at the parent's death; adoption of orphans
TOO_LONG, NO_ANSWER = "the app took too long", "the app's process ended without a result"
"""Reasons why work gave no result although it raised no exception."""

_MAX_PASSES = 1000  # over an app's processes, which may start others in between
_MAX_STOPPED = 256
"""Maximum number of an app's processes that are stopped for now and killed later. If there are more, they are killed at once: otherwise
Flower may be unable to start the thread that sends the reply."""

CAN_FORK = hasattr(os, "fork")
"""Whether this system can fork processes."""

_LDPFL_FOLDER = Path(ldpfl.__file__).parent
_FOLDERS_WITHOUT_DATA = frozenset(_LDPFL_FOLDER / package for package in ("flower", "mechanisms", "privacy", "relay", "transport"))
"""Folders of ldpfl's packages that read no data."""


@dataclass(frozen=True, repr=False)
class Outcome:
    """Result of the work, or the reason why there is none.

    Attributes:
        value: bytes that the work returned: PRIVATE. None if it did not return, or not in time.
        trouble: reason why ``value`` is None, for the node's operator. It repeats no private value. Empty otherwise.
    """

    value: memoryview | None
    trouble: str = ""


class Child:
    """A forked process, made by :func:`start` or :func:`start_guarded`. It ends when its context is left."""

    def __init__(self, pid: int, pipe: int, end_signal: signal.Signals) -> None:
        self._pid, self.pipe, self._end_signal = pid, pipe, end_signal

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Signal the process to end, without waiting: how long it takes, and how many processes end with it, may depend on data."""
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            os.kill(self._pid, self._end_signal)
            os.kill(self._pid, signal.SIGCONT)  # a stopped process would not handle the signal
        with suppress(RuntimeError):  # no thread is left, because the work used them up: the child stays a zombie until this process ends
            threading.Thread(target=_reap, args=(self._pid,), daemon=True).start()

    def outcome(self, deadline: float = inf) -> Outcome:
        """Wait for the work and return its outcome, by the time ``deadline`` (of ``time.monotonic``) at the latest.

        The pipe brings one message: the length of what follows, one byte for its kind (a result, or the reason why there is none), and the
        result or reason.
        """
        received, expected = bytearray(), inf  # expected number of bytes: inf until the message's length is read
        poller = select.poll()
        poller.register(self.pipe, select.POLLIN)
        while len(received) < expected:
            seconds_left = max(0.0, deadline - time.monotonic())
            if seconds_left == 0:
                return Outcome(None, TOO_LONG)
            # A second at most: if the system gives a stop signal to another thread, the main thread runs its handler only after this call.
            if not poller.poll(min(seconds_left, 1.0) * 1000):
                continue
            block = os.read(self.pipe, _BLOCK_BYTES)
            if not block:
                return Outcome(None, NO_ANSWER)
            received += block
            if len(received) >= _LENGTH_BYTES:
                expected = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "big")
        kind, content = received[_LENGTH_BYTES : _LENGTH_BYTES + 1], memoryview(received)[_LENGTH_BYTES + 1 :]
        return Outcome(content) if kind == _DONE else Outcome(None, bytes(content).decode(errors="replace"))


def start(work: Callable[[], bytes], pipe_owner: Child | None = None) -> Child:
    """Fork a process that does ``work``, which must start no other process: only this one is ended when the child's context is left.

    Args:
        pipe_owner: another child whose outcome ``work`` reads. The new process keeps that child's pipe open.

    Raises:
        ConfigError: this system cannot fork processes.
    """
    return _fork(lambda sending: _run_unguarded(work, sending), signal.SIGKILL, pipe_owner)


def start_guarded(work: Callable[[], bytes], killed_at: float = 0.0) -> Child:
    """Fork a process that does ``work``, and a guard that ends this process and all processes that it has started.

    On Linux the guard also ends processes that have left their group, session or parent, because orphans become the guard's children.

    Args:
        killed_at: time of ``time.monotonic`` until which ended processes are only stopped, as long as the caller's process lives. Killing
            them frees their memory, which takes processor time, and under a CPU limit this would delay the reply.

    Raises:
        ConfigError: this system cannot fork processes.
    """
    parent = os.getpid()
    return _fork(lambda sending: _guard(work, sending, parent, killed_at), signal.SIGTERM)


def _fork(run: Callable[[int], NoReturn], end_signal: signal.Signals, pipe_owner: Child | None = None) -> Child:
    """Fork a process that calls ``run`` with the pipe for its result.

    ``end_signal`` is the signal that will end the process. The process can read the outcome of ``pipe_owner``: it keeps that pipe open.
    """
    if not CAN_FORK:
        raise ConfigError("replies after a set time (reply_s) need a system that can fork processes: use Linux, or set reply_s to 0")
    receiving, sending = os.pipe()
    sys.stdout.flush()  # otherwise the child would print the buffered text again
    sys.stderr.flush()
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # until the child has removed the parent's handlers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads: see the module's docstring
            pid = os.fork()
        if pid == 0:
            os.close(receiving)
            _run_child(run, sending, mask_before, set() if pipe_owner is None else {pipe_owner.pipe})
    except OSError:
        os.close(receiving)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        os.close(sending)
    return Child(pid, receiving, end_signal)


def _run_child(run: Callable[[int], NoReturn], sending: int, mask: set[Any], kept_pipes: set[int]) -> NoReturn:
    """Run the forked process to its end. Whatever happens, it never continues with the parent's code.

    Args:
        sending: descriptor of the pipe for the result, which ``run`` is called with.
        mask: signals that the parent blocked before the fork.
        kept_pipes: descriptors of further pipes that stay open.
    """
    try:
        _drop_parents_handlers_and_pipes({sending, *kept_pipes})
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, signal.SIGTERM})  # the guard waits for SIGTERM; the worker unblocks it
        run(sending)
    finally:
        os._exit(1)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let PyTorch use one thread within the block. Yield the number of threads that it used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def has_public_text(error: BaseException) -> bool:
    """Tell whether the text of ``error`` repeats no private value: ldpfl raised it, in a package that reads no data."""
    frames = traceback.extract_tb(error.__traceback__)
    # An error without frames was made by ldpfl, and not raised. Otherwise, the last frame is that of the line that raised it.
    raised_without_data = not frames or not _FOLDERS_WITHOUT_DATA.isdisjoint(Path(frames[-1].filename).parents)
    return isinstance(error, LdpflError) and raised_without_data


@contextmanager
def errors_may_be_shown() -> Iterator[None]:
    """Let the node's log show the texts of errors that ldpfl raises in the block. The block must read the server's message alone.

    An error of ldpfl is raised anew in this module, so that :func:`has_public_text` accepts it. Its text is safe, whichever package raised
    it, because no data have been read yet. Errors that other code raises are not changed.

    Raises:
        ProtocolError: the block raised an error of ldpfl other than ``Declined``.
    """
    try:
        yield
    except Declined:
        raise
    except LdpflError as error:
        if _LDPFL_FOLDER not in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents:
            raise
        raise ProtocolError(str(error)[:_MAX_SHOWN]) from error


_MAX_SHOWN = 1000
"""Maximum number of characters of an error about a server's message, which may quote the message."""

_KNOWN_MODULES = ("builtins", "torch", "numpy", "pandas", "json.decoder", "ldpfl.errors", "ldpfl.flower.arrays")
"""Modules whose classes are named to a node's operator. Other code may make classes whose names repeat private values."""


def public_type_name(value: object) -> str:
    """Return the name of the type of ``value`` if a known module defines this type, else that of its nearest base class in such a module.

    A module counts only if it holds the class under that name, because a class can claim any module and name.
    """
    known = (kind for kind in type(value).__mro__ if kind.__module__ in _KNOWN_MODULES)  # never empty: the last one is `object`
    return next(str(kind.__name__) for kind in known if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind)


def describe_error(error: BaseException) -> str:
    """Return the text of ``error`` for the node's log if it :func:`has_public_text`, else its type and the line that raised it.

    Any other text may repeat private values. Even the text of ldpfl's own errors may, because an app can raise them, or they quote a file.
    """
    if has_public_text(error):
        return str(error)
    all_frames = traceback.extract_tb(error.__traceback__)
    # Without Python's own import code, unless there is no other frame.
    frames = [frame for frame in all_frames if not frame.filename.startswith("<frozen importlib")] or all_frames
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{public_type_name(error)}{place}"


def _run_unguarded(work: Callable[[], bytes], sending: int) -> NoReturn:
    """Run the body of a process that works without a guard."""
    _leave_session(signal.SIGKILL)
    _run_worker(work, sending)


def _run_worker(work: Callable[[], bytes], sending: int, *, stops_itself: bool = False) -> NoReturn:
    """Run the body of the process that does ``work`` and sends its result.

    With ``stops_itself``, the process then stops itself by SIGSTOP instead of ending. It keeps its memory until it is killed, because
    freeing memory could delay the reply.
    """
    code = 1
    try:
        _set_process_option(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):  # if memory runs out, the kernel kills this process rather than the one that replies
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _log_exceptions_without_text()
        _send(sending, _result_or_error_message(work))
        code = 0
        while stops_itself:  # in a loop, because another process may wake it
            os.kill(os.getpid(), signal.SIGSTOP)
    finally:
        # os._exit, not sys.exit: the parent's exit handlers must not run here, and the parent's connections must not be closed here.
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _log_exceptions_without_text() -> None:
    """Log uncaught exceptions, in threads and in destructors, without their text, which may repeat private values."""

    def hook(args: Any) -> None:
        """Print the exception in ``args``, which both of Python's hooks below hand over, without its text."""
        print(f"not caught: {describe_error(args.exc_value)}" if args.exc_value else "not caught", file=sys.stderr)

    threading.excepthook = sys.unraisablehook = hook


def _guard(work: Callable[[], bytes], sending: int, parent: int, killed_at: float) -> NoReturn:
    """Run the body of the guard: wait for SIGTERM, then freeze all of the guard's descendants, and kill them at the time ``killed_at``.

    The time of the kill is fixed, so that others on the machine do not see by it how the work ended. SIGTERM also comes when the
    ``parent`` dies. Then the descendants are killed at once. The process that does ``work`` is the guard's grandchild, so that nothing it
    does to its parent and its group reaches the guard.
    """
    try:
        _leave_session(signal.SIGTERM)
        _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
        # A process that is killed leaves its temporary files, which may hold raw data: they go to a folder that the guard removes.
        scratch = tempfile.mkdtemp(prefix="ldpfl-")
        leader = os.fork()
        if leader == 0:
            _run_group_leader(work, sending, scratch)
        os.close(sending)  # otherwise the pipe would stay open when the worker has ended without a result
        signal.sigwait({signal.SIGTERM})  # blocked since before the fork, and so never missed
        if time.monotonic() < killed_at:
            _freeze_all(leader)
        while time.monotonic() < killed_at and os.getppid() == parent:
            time.sleep(0.1)
        _kill_all(leader)
        _remove_folder(scratch)
    finally:
        os._exit(0)


def _run_group_leader(work: Callable[[], bytes], sending: int, scratch: str) -> NoReturn:
    """Run the body of the worker's parent, the leader of its process group. The worker's temporary files go to the folder ``scratch``."""
    try:
        _leave_session(signal.SIGKILL)
        worker = os.fork()
        if worker == 0:
            tempfile.tempdir = os.environ["TMPDIR"] = scratch
            _run_worker(work, sending, stops_itself=True)
        _, status = os.waitpid(worker, 0)
        if status != 0:  # a message is sent, because processes that the work has started may keep the pipe open after the worker's end
            _send(sending, _FAILED + NO_ANSWER.encode())
    finally:
        os._exit(0)


def _drop_parents_handlers_and_pipes(kept_descriptors: set[int]) -> None:
    """Remove the parent's signal handlers, connections and pipes from this process, except ``kept_descriptors``.

    Otherwise this process could speak in the parent's name: Flower's handlers, for example, report that the task has failed. Descriptors
    are redirected to ``/dev/null`` rather than closed. Objects that own them may close them later, and by then a closed descriptor's number
    could belong to another file.
    """
    signal.set_wakeup_fd(-1)
    for signal_number in signal.valid_signals():
        if callable(signal.getsignal(signal_number)):
            signal.signal(signal_number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in sorted(int(entry.name) for entry in Path("/dev/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            # 0 to 2 are standard input, output and error.
            if number > 2 and number not in {nothing, *kept_descriptors} and _is_socket_or_pipe(os.fstat(number).st_mode):
                os.dup2(nothing, number)
    os.close(nothing)


def _is_socket_or_pipe(mode: int) -> bool:
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def _leave_session(death_signal: signal.Signals) -> None:
    """Leave the parent's session, so that Ctrl-C there does not reach this process. ``death_signal`` comes when the parent dies."""
    os.setsid()
    _set_process_option(_PR_SET_PDEATHSIG, death_signal)


def _freeze_all(leader: int) -> None:
    """Freeze (SIGSTOP) all of the guard's descendants, repeatedly as in :func:`_kill_all`. A frozen process starts no other.

    ``leader`` is the process group of the worker. If there are too many descendants, they are killed at once.
    """
    with suppress(OSError):
        os.killpg(leader, signal.SIGSTOP)
    guard, stopped = psutil.Process(), set[psutil.Process]()
    for _ in range(_MAX_PASSES):
        descendants = set(guard.children(recursive=True)) - stopped
        if not descendants or len(stopped) > _MAX_STOPPED:
            break
        for child in descendants:
            with suppress(psutil.Error):
                child.suspend()
        stopped |= descendants
    if len(stopped) > _MAX_STOPPED:
        _kill_all(leader)


def _kill_all(leader: int) -> None:
    """Kill all of the guard's descendants, repeatedly, because a process may have started another one just before it was killed.

    The group of ``leader`` is killed first, by one call. It may have so many processes that listing them takes too long. As long as they
    use up the limit on processes, Flower cannot start the thread that sends the reply.
    """
    with suppress(OSError):  # the group does not exist yet, or no longer
        os.killpg(leader, signal.SIGKILL)
    _reap_all()
    guard = psutil.Process()
    for _ in range(_MAX_PASSES):
        descendants = guard.children(recursive=True)
        if not descendants:
            return
        for child in descendants:
            with suppress(psutil.Error):
                child.kill()
        _reap_all()


def _remove_folder(folder: str) -> None:
    """Remove a folder and its content, including read-only folders, which unpacked archives may contain."""
    for place, names, _ in os.walk(folder):
        for name in names:
            inside = Path(place, name)
            if not inside.is_symlink():
                with suppress(OSError):
                    inside.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _reap_all() -> None:
    """Reap all children that have ended, orphans included. Until then they count as processes."""
    with suppress(ChildProcessError):  # no child is left
        while os.waitpid(-1, os.WNOHANG) != (0, 0):  # (0, 0): no further child has ended
            pass


def _result_or_error_message(work: Callable[[], bytes]) -> bytes:
    """Do ``work`` and return the message for the parent: a byte that tells success from failure, then the result or the error."""
    try:
        return _DONE + work()
    except BaseException as error:  # SystemExit as well: the parent decides when this process ends
        return _FAILED + describe_error(error).encode()


def _send(pipe: int, message: bytes) -> None:
    """Write the length of ``message``, and the message, to ``pipe``."""
    unsent = memoryview(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    while unsent:
        unsent = unsent[os.write(pipe, unsent) :]  # a pipe may take only a part


def _set_process_option(option: int, value: int) -> None:
    """Set an option of this process by Linux's prctl. Other systems have no such options, and do without."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _reap(pid: int) -> None:
    """Wait until the child ``pid`` has ended, so that it does not stay a zombie."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
