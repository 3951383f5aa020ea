"""Train the shares of a round in this process, or in several worker processes of one thread each. Results are equal to the last bit.

Worker processes are new ones (never forked). They hold the federation with all clients' data, as this process does, so privacy is the same
as in one process. They map the data from a file, in memory if there is room. Only this user can read it. It is removed at the end.
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
from ldpfl.simulation.shared_objects import CannotShareError, read_shared, write_shared
from ldpfl.simulation.shares import ONE_PROCESS, Collected, RoundStart, Share, Workers, collect, without_parts_for_this_process

PAYS_S = 20.0
"""``auto`` starts worker processes once the rest of a run is expected to take this many seconds in one process. Starting takes 3 to 6."""

_PROGRESS_S = 0.5
"""Maximum number of seconds between two reports of a round's progress."""

_MAX_DEATHS = 3
"""Number of failures of worker processes in a row, with no share done in between, that ends a run."""

_MIN_SHARED_SAMPLES = 2000
"""Number of evaluation samples at which the worker processes share an evaluation. Fewer are faster in one process."""

_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
"""Settings with which glibc keeps freed memory for reuse. Asking for it anew in each step took up to a third of a worker's time."""


def cores() -> int:
    """Return how many processes of one thread run at once on this machine: OMP_NUM_THREADS, else the number of cores for this process."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Trains shares in ``count`` worker processes of one thread each, for any number of rounds and federations. Close it after use.

    Args:
        warn: called with messages for the user.
    """

    def __init__(self, count: int, warn: Callable[[str], None] = lambda message: None) -> None:
        self._count, self._warn = count, warn
        self._folder = _private_folder()
        # By ``id(federation)``, which stays unique while the federation is referenced here. The path is None if workers cannot load it.
        self._federations: dict[int, tuple[Federation, Path | None]] = {}
        self._file_count = 0  # number of files written so far, which names the next one
        self._pool = self._start_pool()

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Return the result of each of ``shares``, in their order. The shares of a worker that died are trained again.

        A federation that the workers cannot load, because of the user's code in it, is trained in this process.
        """
        federation_path = self._path_of(federation)
        if federation_path is None:
            return ONE_PROCESS.collect(federation, start, shares, clients_done)
        start_path = self._write(start)
        done: dict[int, Collected] = {}
        deaths = 0
        try:
            while len(done) < len(shares):
                done_before = len(done)
                try:
                    self._collect_missing(federation_path, start_path, shares, done, clients_done)
                except BrokenProcessPool:
                    deaths = 1 if len(done) > done_before else deaths + 1  # in a row, without a result in between
                    self._restart_pool(deaths)
        except CannotShareError as error:
            self._train_in_this_process(federation, error)
            return ONE_PROCESS.collect(federation, start, shares, clients_done)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            start_path.unlink(missing_ok=True)
        return [done[index] for index in range(len(shares))]

    def _collect_missing(
        self, federation: Path, start: Path, shares: Sequence[Share], done: dict[int, Collected], clients_done: ClientsDone
    ) -> None:
        """Add to ``done``, by index, the results of the ``shares`` that it lacks. Workers read the files ``federation`` and ``start``."""
        index_of: dict[Future[Collected], int] = {}
        for index, share in enumerate(shares):
            if index not in done:
                index_of[self._pool.submit(_collect_in_worker, federation, start, share)] = index
        total, waiting = sum(len(share.clients) for share in shares), set(index_of)
        while waiting:
            finished, waiting = wait(waiting, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
            for future in finished:
                if not isinstance(future.exception(), BrokenProcessPool):  # results that came before a worker died are kept
                    done[index_of[future]] = future.result()
            clients_done(sum(part.clients for part in done.values()), total)  # may raise to end the run
            for future in finished:
                future.result()  # raises if the pool is broken

    def score(self, federation: Federation, weights: Tensor) -> float:
        """Return the main metric of the model with ``weights``. The workers share the evaluation samples if there are enough."""
        samples = len(federation.evaluation.samples)
        if samples < _MIN_SHARED_SAMPLES:
            return ONE_PROCESS.score(federation, weights)
        federation_path = self._path_of(federation)
        if federation_path is None:
            return ONE_PROCESS.score(federation, weights)
        weights_path = self._write(weights)
        piece = AT_ONCE * -(-samples // (AT_ONCE * self._count))  # whole batches, since a batch decides how its figures are rounded
        try:
            slices = [slice(start, start + piece) for start in range(0, samples, piece)]
            futures = [self._pool.submit(_outputs_in_worker, federation_path, weights_path, samples_slice) for samples_slice in slices]
            return federation.score_of(batch for future in futures for batch in future.result())
        except BrokenProcessPool:
            self._restart_pool(1)
            return ONE_PROCESS.score(federation, weights)
        except CannotShareError as error:
            self._train_in_this_process(federation, error)
            return ONE_PROCESS.score(federation, weights)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            weights_path.unlink(missing_ok=True)

    def _restart_pool(self, deaths: int) -> None:
        """Replace the worker processes after one died for the ``deaths``-th time in a row, or raise a LdpflError if that is too often."""
        if deaths == _MAX_DEATHS:
            raise LdpflError(
                f"worker processes ended unexpectedly {deaths} times in a row, perhaps because memory ran out: resume the run with a "
                "smaller --workers, or --workers 1. Finished rounds are saved"
            )
        self._warn(
            "a worker process ended (killed, or out of memory): all worker processes are started anew, and unfinished clients trained again"
        )
        self._pool.shutdown(wait=False, kill_workers=True)
        self._pool = self._start_pool()

    def _start_pool(self) -> ProcessPoolExecutor:
        """Start the worker processes. Each has one thread, since more threads would round differently."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return ProcessPoolExecutor(
            self._count, context=get_context("loky"), initializer=_prepare_worker, initargs=(os.getpid(),), env=threads | _KEEP_MEMORY
        )

    def _path_of(self, federation: Federation) -> Path | None:
        """Return the file from which workers read the ``federation``; None if they cannot load it. It is written once."""
        if id(federation) not in self._federations:
            try:
                self._federations[id(federation)] = federation, self._write(without_parts_for_this_process(federation))
            except CannotShareError as error:
                self._train_in_this_process(federation, error)  # stores None as the path
        return self._federations[id(federation)][1]

    def _train_in_this_process(self, federation: Federation, error: CannotShareError) -> None:
        """Let later calls train the ``federation`` in this process, and tell the user the reason, which is the ``error``."""
        self._federations[id(federation)] = federation, None
        self._warn(f"{error}: this process trains alone, with the same results")

    def _write(self, value: object) -> Path:
        """Write ``value`` to a new file for the workers, and return its path."""
        self._file_count += 1
        path = self._folder / str(self._file_count)
        write_shared(value, path)
        return path

    def close(self, *, kill: bool = False) -> None:
        """End the worker processes, at once with ``kill``, and remove the files that they read."""
        self._pool.shutdown(wait=True, kill_workers=kill)
        if self._folder.exists():  # an error may have closed it before
            shutil.rmtree(self._folder, ignore_errors=True)
            resource_tracker.unregister(str(self._folder), "folder")


def _private_folder() -> Path:
    """Return a new folder that only this user can read, in memory if there is room. It is removed even if this process is killed.

    Its name holds this process's number.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > psutil.virtual_memory().available / 2
    folder = Path(tempfile.mkdtemp(prefix=f"ldpfl-{os.getpid()}-", dir=memory if has_room else None))
    resource_tracker.register(str(folder), "folder")
    return folder


class Automatic:
    """Trains shares in this process until the rest of a run is expected to take ``PAYS_S``, then in ``count`` processes. Close it."""

    def __init__(self, count: int, warn: Callable[[str], None] = lambda message: None) -> None:
        self._count, self._warn = count, warn
        self._processes: Processes | None = None

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Train ``shares`` in this process until the rest of the run is expected to take ``PAYS_S`` seconds, then in several."""
        total, done = sum(len(share.clients) for share in shares), list[Collected]()
        began = time.perf_counter()
        while self._processes is None and len(done) < len(shares):
            trained = sum(part.clients for part in done)
            progress = partial(_add_progress, clients_done, trained, total)
            done += ONE_PROCESS.collect(federation, start, [shares[len(done)]], progress)
            trained = sum(part.clients for part in done)
            remaining = total - trained + total * start.rounds_left  # clients of this round and of the next rounds
            if (time.perf_counter() - began) / trained * remaining > PAYS_S:
                self._processes = Processes(self._count, self._warn)
        missing_shares = shares[len(done) :]
        if self._processes is not None and missing_shares:
            trained = sum(part.clients for part in done)
            done += self._processes.collect(federation, start, missing_shares, partial(_add_progress, clients_done, trained, total))
        return done

    def score(self, federation: Federation, weights: Tensor) -> float:
        return (self._processes or ONE_PROCESS).score(federation, weights)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


def _add_progress(clients_done: ClientsDone, before: int, total: int, done: int, _: int) -> None:
    """Tell ``clients_done`` that ``done`` clients of the current shares are trained, besides ``before`` clients of earlier shares."""
    # The last argument, the number of clients of the current shares, is not used: ``total`` counts those of all shares.
    clients_done(before + done, total)


def _prepare_worker(parent: int) -> None:
    """Prepare this worker process: one thread, and an end together with its ``parent`` process. Only the parent handles interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_when_parent_ends, args=(parent,), daemon=True).start()


def _exit_when_parent_ends(parent: int) -> None:
    """Exit this worker process once its ``parent`` process is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


_read_federation = lru_cache(maxsize=2)(read_shared)
_read_start = lru_cache(maxsize=1)(read_shared)


def _collect_in_worker(federation: Path, start: Path, share: Share) -> Collected:
    """Train a ``share`` in this worker process. The two files are read once."""
    return collect(_read_federation(federation), _read_start(start), share)


def _outputs_in_worker(federation: Path, weights: Path, samples: slice) -> list[tuple[Tensor, Tensor]]:
    """Return the model's outputs for a slice of the evaluation ``samples``, and the targets, batch by batch."""
    loaded: Federation = _read_federation(federation)
    return list(evaluated(loaded.task, read_shared(weights), loaded.evaluation.samples.take(samples)))


Count = int | str
"""Number of processes, or ``auto``: one for each core once a run turns out to be long; ``ray`` or ``ray://HOST:PORT``: tasks of Ray."""


def checked_count(count: object) -> Count:
    """Return ``count`` if it is valid as a :data:`Count`.

    Raises:
        ConfigError: ``count`` is not a whole number from 1, not ``auto``, and names no Ray cluster.
    """
    if isinstance(count, str) and (count == "auto" or is_ray(count)):
        return count
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    raise ConfigError(f"workers must be auto, a whole number from 1 on, ray or ray://HOST:PORT, got {count!r}")


@contextmanager
def workers(count: Count, device: torch.device, warn: Callable[[str], None] = lambda message: None) -> Iterator[Workers]:
    """Yield ``count`` workers for as long as the block lasts. Without Ray, a device other than a CPU has one process.

    Raises:
        ConfigError: ``count`` names a Ray cluster, and Ray is not installed.
        LdpflError: the Ray cluster cannot be used.
    """
    if isinstance(count, str) and count != "auto":
        with ray_workers(count, device, warn) as tasks:
            yield tasks
        return
    if device.type != "cpu" or count == 1 or (count == "auto" and (cores() == 1 or not _may_start_processes())):
        yield ONE_PROCESS
        return
    several = Processes(count, warn) if isinstance(count, int) else Automatic(cores(), warn)
    try:
        yield several
    finally:
        several.close()


def _may_start_processes() -> bool:
    """Whether this process may start worker processes. A process that is itself a worker may not."""
    return not multiprocessing.current_process().daemon and multiprocessing.parent_process() is None
