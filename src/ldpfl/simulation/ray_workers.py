"""Who does the shares of a round, where one machine is not enough: tasks of Ray. Results are those of one process, to the last bit.

Every node that does shares holds the federation with all clients' data, unprotected, as one process does; see ``docs/ray.md``.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from loky.backend import get_context, resource_tracker
from torch import Tensor

from ldpfl.errors import ConfigError, LdpflError
from ldpfl.simulation.cohort_training import ClientsDone
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.ray_driver import ANY_CLUSTER, LOST, Answer, Held, RoundAsked, drive
from ldpfl.simulation.shared_objects import packed
from ldpfl.simulation.shares import ONE_PROCESS, Collected, RoundStart, Share, Workers, for_shares

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning for each worker
}

_END_S = 10.0
"""Seconds that Ray's driver has to end in."""


def is_ray(workers: object) -> bool:
    """Whether ``workers`` names a Ray cluster: ``ray``, or ``ray://HOST:PORT``."""
    return isinstance(workers, str) and (workers == ANY_CLUSTER or workers.startswith(f"{ANY_CLUSTER}://"))


class RayTasks:
    """Tasks on the Ray cluster ``where``, for any number of rounds and federations. Close it.

    A node that is lost costs time and nothing else. The head that is lost ends the run, which can be resumed.

    Args:
        where: see :func:`is_ray`.
        warn: called with what a user should know.

    Raises:
        ConfigError: Ray is not installed.
        LdpflError: there is no such cluster.
    """

    def __init__(self, where: str, warn: Callable[[str], None] = lambda message: None) -> None:
        if find_spec("ray") is None:
            raise ConfigError(f"workers {where!r} need Ray: pip install 'ldpfl[ray]'")
        self._warn, self._names = warn, 0
        self._held: dict[int, tuple[Federation, str]] = {}
        self._known_processors = [torch.backends.cpu.get_cpu_capability()]  # this machine's first, then those that were warned of
        self._folder = Path(tempfile.mkdtemp(prefix="ldpfl-", dir="/tmp"))  # paths of Ray's sockets must be short
        resource_tracker.register(str(self._folder), "folder")  # which removes it even if this process is killed
        context = get_context("loky")
        self._pipe, its_end = context.Pipe()
        self._driver = context.Process(target=drive, args=(where, self._folder / "ray", its_end), env=_QUIET)
        self._driver.start()
        its_end.close()
        try:
            self._next()
        except BaseException:
            self.close(kill=True)
            raise

    def score(self, federation: Federation, weights: Tensor) -> float:
        return ONE_PROCESS.score(federation, weights)

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        total = sum(len(share.clients) for share in shares)
        done: dict[int, Collected] = {}
        try:
            self._ask(federation, start, shares)
            while len(done) < len(shares):
                answer = self._next()
                if answer is None:
                    continue
                done[answer.place] = answer.done
                self._warn_of_other(answer.processor)
                clients_done(sum(part.clients for part in done.values()), total)
        except BaseException:
            self.close(kill=True)
            raise
        return [done[place] for place in range(len(shares))]

    def _ask(self, federation: Federation, start: RoundStart, shares: Sequence[Share]) -> None:
        on_gpu = federation.device.type == "cuda"
        pickled = [pickle.dumps(share, protocol=5) for share in shares]
        try:
            if id(federation) not in self._held:
                self._held[id(federation)] = federation, self._hold(for_shares(federation))
            self._pipe.send(RoundAsked(self._held[id(federation)][1], self._hold(start), pickled, on_gpu))
        except OSError:
            pass  # the driver has ended, and has said why

    def _hold(self, value: object) -> str:
        """Have ``value`` held in Ray's object store, and return its name there."""
        self._names += 1
        inside, arrays = packed(value)
        self._pipe.send(Held(str(self._names), len(arrays)))
        for part in (inside, *arrays):
            self._pipe.send_bytes(part)
        return str(self._names)

    def _next(self) -> Answer | None:
        """Return what Ray's driver says next; None once it is connected.

        Raises:
            LdpflError: what stopped it.
        """
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise LdpflError(LOST.format("Ray ended its driver")) from None
        if isinstance(said, LdpflError):
            raise said
        return said if isinstance(said, Answer) else None

    def _warn_of_other(self, processor: str) -> None:
        """Warn once of each kind of ``processor`` of a node that this machine has not."""
        if processor not in self._known_processors:
            self._warn(
                f"a node of the Ray cluster computes with {processor}, this machine with {self._known_processors[0]}: results may differ "
                "from those of one process in their last bits; use nodes with like processors for the same results"
            )
            self._known_processors.append(processor)

    def close(self, *, kill: bool = False) -> None:
        """Disconnect from the cluster; its tasks of this run end, at once where ``kill`` says so."""
        self._pipe.close()
        if not kill:
            self._driver.join(_END_S)
        if self._driver.is_alive():
            os.kill(self._driver.pid, signal.SIGKILL)
            self._driver.join()
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            resource_tracker.unregister(str(self._folder), "folder")


@contextmanager
def ray_workers(where: str, device: torch.device, warn: Callable[[str], None] = lambda message: None) -> Iterator[Workers]:
    """Give tasks on the Ray cluster ``where`` for as long as the block lasts; one process, on a device that no cluster lends.

    Raises:
        ConfigError: Ray is not installed.
        LdpflError: there is no such cluster.
    """
    if device.type not in ("cpu", "cuda"):
        yield ONE_PROCESS
        return
    tasks = RayTasks(where, warn)
    try:
        yield tasks
    finally:
        tasks.close()
