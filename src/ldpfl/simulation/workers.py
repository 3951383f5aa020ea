"""Who does the shares of a round: this process, or several of one thread each. Results are the same, to the last bit.

Worker processes are new ones (never forked) and hold the federation as this process does, with all clients' data: privacy stands where it
stands in one process. Data are in a file that they map, in memory where there is room, readable for this user alone, and gone with the run.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import psutil
import torch
from loky import ProcessPoolExecutor
from loky.backend import get_context, resource_tracker
from torch import Tensor

from ldpfl.errors import ConfigError, LdpflError
from ldpfl.simulation.cohort_training import ClientsDone
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.local_training import AT_ONCE, evaluated
from ldpfl.simulation.ray_workers import is_ray, ray_workers
from ldpfl.simulation.shared_objects import place, placed
from ldpfl.simulation.shares import ONE_PROCESS, Collected, RoundStart, Share, Workers, collect, for_shares

PAYS_S = 20.0
"""Seconds that all that is left of a run must be expected to take in one process before ``auto`` begins others, which takes 3 to 6."""

_TOLD_S = 0.5
"""Seconds after which a display is told how far a round is, whether a share was finished or not."""

_DEATHS = 3
"""How many worker processes may die in a row, with no share done in between, before a run ends."""


_SCORED = 2000
"""Evaluation samples from which on processes share them."""

_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
"""Memory that a process keeps when it is free (glibc): to ask for it anew in each step took up to a third of a worker's time."""


def cores() -> int:
    """Return how many processes of one thread this machine runs at once: OMP_NUM_THREADS if set, else the cores there are for this one."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """``count`` processes of one thread each, for any number of rounds and federations. Close it.

    Args:
        warn: called with what a user should know.
    """

    def __init__(self, count: int, warn: Callable[[str], None] = lambda message: None) -> None:
        self._count, self._warn = count, warn
        self._folder = _private_folder()
        self._placed: dict[int, tuple[Federation, Path]] = {}
        self._files = 0
        self._pool = self._started()

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        own, told = self._of(federation), self._written(start)
        done: dict[int, Collected] = {}
        deaths = 0
        try:
            while len(done) < len(shares):
                before = len(done)
                try:
                    self._collect(own, told, shares, done, clients_done)
                except BrokenProcessPool:
                    deaths = 1 if len(done) > before else deaths + 1
                    self._begin_again(deaths)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            told.unlink(missing_ok=True)
        return [done[place] for place in range(len(shares))]

    def _collect(self, own: Path, told: Path, shares: Sequence[Share], done: dict[int, Collected], clients_done: ClientsDone) -> None:
        asked: dict[Future[Collected], int] = {}
        for place_, share in enumerate(shares):
            if place_ not in done:
                asked[self._pool.submit(_collected, own, told, share)] = place_
        total, waiting = sum(len(share.clients) for share in shares), set(asked)
        while waiting:
            finished, waiting = wait(waiting, timeout=_TOLD_S, return_when=FIRST_COMPLETED)
            for future in finished:
                if not isinstance(future.exception(), BrokenProcessPool):
                    done[asked[future]] = future.result()
            clients_done(sum(part.clients for part in done.values()), total)  # which may end the run
            for future in finished:
                future.result()

    def score(self, federation: Federation, weights: Tensor) -> float:
        samples = len(federation.evaluation.samples)
        if samples < _SCORED:
            return ONE_PROCESS.score(federation, weights)
        own, told = self._of(federation), self._written(weights)
        piece = AT_ONCE * -(-samples // (AT_ONCE * self._count))  # whole batches, for these decide how figures are rounded
        try:
            asked = [self._pool.submit(_outputs, own, told, slice(start, start + piece)) for start in range(0, samples, piece)]
            return federation.score_of(batch for future in asked for batch in future.result())
        except BrokenProcessPool:
            self._begin_again(1)
            return ONE_PROCESS.score(federation, weights)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            told.unlink(missing_ok=True)

    def _begin_again(self, deaths: int) -> None:
        if deaths == _DEATHS:
            raise LdpflError(
                f"worker processes ended {deaths} times in a row, as when memory runs out: ask for fewer (--workers), or for one; finished "
                "rounds are kept"
            )
        self._warn("a worker process ended (killed, or out of memory): others take its place, and its clients are trained again")
        self._pool.shutdown(wait=False, kill_workers=True)
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return ProcessPoolExecutor(
            self._count, context=get_context("loky"), initializer=_begin, initargs=(os.getpid(),), env=threads | _KEPT
        )

    def _of(self, federation: Federation) -> Path:
        """Return where the ``federation`` is placed."""
        if id(federation) not in self._placed:
            self._placed[id(federation)] = federation, self._written(for_shares(federation))
        return self._placed[id(federation)][1]

    def _written(self, value: object) -> Path:
        self._files += 1
        path = self._folder / str(self._files)
        place(value, path)
        return path

    def close(self, *, kill: bool = False) -> None:
        """End the processes, at once where ``kill`` says so, and remove what they read."""
        self._pool.shutdown(wait=True, kill_workers=kill)
        shutil.rmtree(self._folder, ignore_errors=True)
        resource_tracker.unregister(str(self._folder), "folder")


def _private_folder() -> Path:
    """Return a new folder for this user alone, in memory where half of that is free; it is removed even if this process is killed."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > psutil.virtual_memory().available / 2
    folder = Path(tempfile.mkdtemp(prefix="ldpfl-", dir=memory if roomy else None))
    resource_tracker.register(str(folder), "folder")
    return folder


class Automatic:
    """This process, until what is left of a run is expected to take ``PAYS_S`` or more; then ``count`` processes. Close it."""

    def __init__(self, count: int, warn: Callable[[str], None] = lambda message: None) -> None:
        self._count, self._warn = count, warn
        self._processes: Processes | None = None

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        total, done = sum(len(share.clients) for share in shares), list[Collected]()
        began = time.perf_counter()
        while self._processes is None and len(done) < len(shares):
            trained = sum(part.clients for part in done)
            told = partial(_told, clients_done, trained, total)
            done += ONE_PROCESS.collect(federation, start, [shares[len(done)]], told)
            trained = sum(part.clients for part in done)
            left = total - trained + total * start.rounds_left
            if (time.perf_counter() - began) / trained * left > PAYS_S:
                self._processes = Processes(self._count, self._warn)
        rest = shares[len(done) :]
        if self._processes is not None and rest:
            trained = sum(part.clients for part in done)
            done += self._processes.collect(federation, start, rest, partial(_told, clients_done, trained, total))
        return done

    def score(self, federation: Federation, weights: Tensor) -> float:
        return (self._processes or ONE_PROCESS).score(federation, weights)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


def _told(clients_done: ClientsDone, before: int, total: int, done: int, _: int) -> None:
    """Tell ``clients_done`` of some shares of a round, when ``before`` clients had been trained."""
    clients_done(before + done, total)


def _begin(parent: int) -> None:
    """Prepare a worker process: an interrupt is for the process that began it, which ends it; without that it ends by itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


_federation = lru_cache(maxsize=2)(placed)
_start = lru_cache(maxsize=1)(placed)


def _collected(federation: Path, start: Path, share: Share) -> Collected:
    return collect(_federation(federation), _start(start), share)


def _outputs(federation: Path, weights: Path, piece: slice) -> list[tuple[Tensor, Tensor]]:
    """Return what the model makes of a ``piece`` of the evaluation samples, and their targets."""
    own: Federation = _federation(federation)
    return list(evaluated(own.task, placed(weights), own.evaluation.samples.take(piece)))


Count = int | str
"""How many processes; ``auto``: one a core, once a run turns out to be long enough; ``ray`` or ``ray://HOST:PORT``: tasks of Ray."""


def checked_count(count: object) -> Count:
    """Return ``count`` if it says how many processes there may be.

    Raises:
        ConfigError: it is no whole number from 1 on, not ``auto``, and names no Ray cluster.
    """
    if isinstance(count, str) and (count == "auto" or is_ray(count)):
        return count
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    raise ConfigError(f"workers must be auto, a whole number from 1 on, ray or ray://HOST:PORT, got {count!r}")


@contextmanager
def workers(count: Count, device: torch.device, warn: Callable[[str], None] = lambda message: None) -> Iterator[Workers]:
    """Give ``count`` workers for as long as the block lasts; one process, on a device that is no CPU and without Ray.

    Raises:
        ConfigError: Ray is asked for, and is not installed.
        LdpflError: there is no such cluster.
    """
    if isinstance(count, str) and count != "auto":
        with ray_workers(count, device, warn) as tasks:
            yield tasks
        return
    if device.type != "cpu" or count == 1 or (count == "auto" and (cores() == 1 or not _may_begin_processes())):
        yield ONE_PROCESS
        return
    several = Processes(count, warn) if isinstance(count, int) else Automatic(cores(), warn)
    try:
        yield several
    finally:
        several.close()


def _may_begin_processes() -> bool:
    """Whether this process may have others: not one that is itself a worker of somebody's."""
    return not multiprocessing.current_process().daemon and multiprocessing.parent_process() is None
