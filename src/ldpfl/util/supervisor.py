"""Run one command, and leave none of its processes behind. This is a program of its own, started by its path.

    python -I supervisor.py SECONDS COMMAND...

The supervisor ends when the command ends, when it is told to stop (SIGTERM, SIGINT, SIGHUP), or when its standard input ends. That is a
pipe from the process that started the supervisor, so not even ``kill -9`` of that process leaves anything running. With the supervisor
ends every process that the command started, also those in other sessions. The command gets SIGTERM first, and SECONDS to end by itself;
all other processes are killed. On Linux the supervisor adopts orphaned descendants, and the command dies if the supervisor is killed.

It imports nothing of ldpfl, which would load PyTorch into each supervisor.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CODE_STOPPED = 143
_CODE_UNKNOWN = 125
"""Exit codes if the supervisor was stopped (as after SIGTERM), and if the exit code of the command is not known."""


class Supervised:
    """The command and its descendants."""

    def __init__(self, command: list[str]) -> None:
        """Start ``command``, which dies with this process, and adopt its descendants whose parents end."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()

        def die_with_parent() -> None:  # called in the child process, before the command begins
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent ended before the line above
                os._exit(_CODE_UNKNOWN)

        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.code: int | None = None

    def reap(self) -> None:
        """Reap children that have ended, including adopted ones."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there is no child any more
                self.code = _CODE_UNKNOWN if self.code is None else self.code
                return
            if pid == 0:  # no other child has ended
                return
            if pid == self._process.pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = self._process.returncode = code if code >= 0 else 128 - code  # as shells count a signal

    def stop(self, grace: float) -> None:
        """Ask the command to end, wait up to ``grace`` seconds, then kill it and all of its descendants."""
        family = _descendants()  # before its members are orphaned: without a subreaper they could not be found later
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.02)
            self.reap()
        while family := {process for process in family | _descendants() if process.is_running() and not _is_dead(process)}:
            for process in family:
                _kill(process)
            time.sleep(0.02)
            self.reap()
        self.reap()


def main() -> int:
    """Run the command that the arguments name; return its exit code, or 143 if it was stopped."""
    grace, command = float(sys.argv[1]), sys.argv[2:]  # grace: seconds in which a stopped command must end
    wake_reader, wake_writer = os.pipe()  # through it, a signal wakes ``select``
    for end in (wake_reader, wake_writer):
        os.set_blocking(end, False)
    stopped: list[int] = []  # no longer empty once the supervisor must stop
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # ignored signals would not wake ``select``
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopped.append(number))
    try:
        supervised = Supervised(command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127  # as a shell does
    while True:
        supervised.reap()
        if supervised.code is not None or stopped:
            break
        ready, _, _ = select.select([sys.stdin, wake_reader], [], [])
        if wake_reader in ready:
            os.read(wake_reader, 512)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 512):  # the process that started the supervisor has ended
            stopped.append(0)
    supervised.stop(grace)
    return _CODE_STOPPED if stopped else supervised.code or 0


def _descendants() -> set[psutil.Process]:
    """Return all processes that this one has started, directly or indirectly."""
    return set(psutil.Process().children(recursive=True))


def _is_dead(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _kill(process: psutil.Process) -> None:
    """Kill ``process`` unless it has ended."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process on Linux; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
