"""Train the shares of a round as tasks on a Ray cluster. Results are those of one process, to the last bit.

Every node that trains shares holds the federation with all clients' data, unprotected, as one process does; see ``docs/ray.md``.
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
from ldpfl.simulation.ray_driver import ANY_CLUSTER, LOST, Answer, RoundRequest, ValueHeader, run_ray_driver
from ldpfl.simulation.shared_objects import pickle_and_arrays
from ldpfl.simulation.shares import ONE_PROCESS, Collected, RoundStart, Share, Workers, without_parts_for_this_process

_DRIVER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns for each worker
}

_MAX_END_S = 10.0
"""Number of seconds in which Ray's driver must end before it is killed."""


def is_ray(workers: object) -> bool:
    """Whether ``workers`` names a Ray cluster: ``ray``, or ``ray://HOST:PORT``."""
    return isinstance(workers, str) and (workers == ANY_CLUSTER or workers.startswith(f"{ANY_CLUSTER}://"))


class RayTasks:
    """Trains shares as tasks on the Ray cluster ``where``, for any number of rounds and federations. Close it after use.

    The loss of a node costs only time. The loss of the cluster's head ends the run, which can be resumed.

    Args:
        where: see :func:`is_ray`.
        warn: called with messages for the user.

    Raises:
        ConfigError: Ray is not installed.
        LdpflError: the cluster cannot be used.
    """

    def __init__(self, where: str, warn: Callable[[str], None] = lambda message: None) -> None:
        """Start Ray's driver, a process beside this one, and wait until it is connected to the cluster ``where``."""
        if find_spec("ray") is None:
            raise ConfigError(f"workers {where!r} need Ray: pip install 'ldpfl[ray]'")
        self._warn = warn
        self._stored_count = 0  # number of values in Ray's object store, where each has its number as its name
        # By ``id(federation)``, which stays unique while the federation is referenced here; with its name in Ray's object store.
        self._federations: dict[int, tuple[Federation, str]] = {}
        self._processors_not_to_warn_of = [torch.backends.cpu.get_cpu_capability()]  # this machine's, then those that a warning named
        self._folder = Path(tempfile.mkdtemp(prefix="ldpfl-", dir="/tmp"))  # paths of Ray's sockets must be short
        resource_tracker.register(str(self._folder), "folder")  # which removes it even if this process is killed
        context = get_context("loky")
        self._pipe, driver_end = context.Pipe()
        self._driver = context.Process(target=run_ray_driver, args=(where, self._folder / "ray", driver_end), env=_DRIVER_ENV)
        self._driver.start()
        driver_end.close()
        try:
            self._receive()  # waits for the connection to the cluster
        except BaseException:
            self.close(kill=True)
            raise

    def score(self, federation: Federation, weights: Tensor) -> float:
        """Return the main metric of the model with ``weights``. It is computed in this process."""
        return ONE_PROCESS.score(federation, weights)

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Return the result of each of ``shares`` (groups of clients), in their order. After an error the cluster is disconnected."""
        total = sum(len(share.clients) for share in shares)
        done: dict[int, Collected] = {}
        try:
            self._request(federation, start, shares)
            while len(done) < len(shares):
                answer = self._receive()
                if answer is None:  # it does not occur here: the driver says only once, at its start, that it is connected
                    continue
                done[answer.index] = answer.result
                self._warn_of_other_processor(answer.processor)
                clients_done(sum(part.clients for part in done.values()), total)
        except BaseException:
            self.close(kill=True)
            raise
        return [done[index] for index in range(len(shares))]

    def _request(self, federation: Federation, start: RoundStart, shares: Sequence[Share]) -> None:
        """Ask the driver for all ``shares`` of a round. The federation is sent once, and the start for each round."""
        on_gpu = federation.device.type == "cuda"
        pickled = [pickle.dumps(share, protocol=5) for share in shares]
        try:
            if id(federation) not in self._federations:
                self._federations[id(federation)] = federation, self._store(without_parts_for_this_process(federation))
            _, federation_name = self._federations[id(federation)]
            self._pipe.send(RoundRequest(federation_name, self._store(start), pickled, on_gpu))
        except OSError:
            pass  # the driver has ended: the caller's next :meth:`_receive` raises the reason

    def _store(self, value: object) -> str:
        """Have the driver put ``value`` into Ray's object store, and return its name there."""
        self._stored_count += 1
        pickled, arrays = pickle_and_arrays(value)
        self._pipe.send(ValueHeader(str(self._stored_count), len(arrays)))
        for part in (pickled, *arrays):
            self._pipe.send_bytes(part)
        return str(self._stored_count)

    def _receive(self) -> Answer | None:
        """Return the next message of Ray's driver: an answer, or None, which says that it is connected.

        Raises:
            LdpflError: the driver has stopped; it is the error that stopped it.
        """
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            raise LdpflError(LOST.format("Ray ended its driver")) from None
        if isinstance(message, LdpflError):
            raise message
        return message if isinstance(message, Answer) else None

    def _warn_of_other_processor(self, processor: str) -> None:
        """Warn once for each kind of ``processor`` that a node has and this machine has not."""
        if processor not in self._processors_not_to_warn_of:
            here = self._processors_not_to_warn_of[0]
            self._warn(
                f"a node of the Ray cluster computes with {processor}, this machine with {here}: results may differ "
                "from those of one process in their last bits; for equal results use nodes with the same kind of processor"
            )
            self._processors_not_to_warn_of.append(processor)

    def close(self, *, kill: bool = False) -> None:
        """Disconnect from the cluster, which ends this run's tasks there: at once with ``kill``."""
        self._pipe.close()
        if not kill:
            self._driver.join(_MAX_END_S)
        if self._driver.is_alive():
            os.kill(self._driver.pid, signal.SIGKILL)
            self._driver.join()
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            resource_tracker.unregister(str(self._folder), "folder")


@contextmanager
def ray_workers(where: str, device: torch.device, warn: Callable[[str], None] = lambda message: None) -> Iterator[Workers]:
    """Yield workers on the Ray cluster ``where`` for as long as the block lasts, or one process if Ray does not manage the ``device``.

    Raises:
        ConfigError: Ray is not installed.
        LdpflError: the cluster cannot be used.
    """
    if device.type not in ("cpu", "cuda"):
        yield ONE_PROCESS
        return
    tasks = RayTasks(where, warn)
    try:
        yield tasks
    finally:
        tasks.close()
