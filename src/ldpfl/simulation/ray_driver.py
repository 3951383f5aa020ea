"""Ray's driver, which runs in a process beside the simulation, and the tasks that it gives to the cluster's nodes.

The driver has its own process because Ray ends its driver's process when a cluster's head is lost, and prints to its output. Neither may
happen to the simulation.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, LdpflError, error_without_data
from ldpfl.simulation.shares import Collected, collect, one_thread

ANY_CLUSTER = "ray"
"""Name for the cluster of RAY_ADDRESS, else for the one that this user started here by ``ray start``, else for a new one here."""

_RETRIES = 10
"""How often a share is restarted on another node or in another process before the run ends."""

LOST = (
    "lost the connection to the Ray cluster or its head node ({}): start the cluster again, and resume the run. Finished rounds are saved"
)

_CHECK_S = 1.0
"""Number of seconds between two checks that the simulating process still runs."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class ValueHeader:
    """A message that announces a value for Ray's object store. Its pickle and its ``arrays``, a number, follow as bytes."""

    name: str
    arrays: int


@dataclass(frozen=True)
class RoundRequest:
    """A message that requests all ``shares`` of a round, each pickled. The federation and the start are names in the object store."""

    federation: str
    start: str
    shares: Sequence[bytes]
    on_gpu: bool


@dataclass(frozen=True, eq=False)
class Answer:
    """A message with the result of the share at ``index``, and the kind of processor that trained it, which decides about rounding."""

    index: int
    result: Collected
    processor: str


def run_ray_driver(where: str, folder: Path, pipe: Connection) -> None:
    """Run Ray's driver until the other end of ``pipe`` is closed. An error is sent through ``pipe`` as the last message.

    Args:
        where: address of a cluster, or ``ANY_CLUSTER``.
        folder: folder for the files of a new cluster on this machine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the simulating process handles interrupts, and then closes the pipe
    devnull = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # standard output and error, to which Ray prints
        os.dup2(devnull, output)
    with suppress(EOFError, OSError):
        try:
            _connect(where, folder)
            pipe.send(None)  # says that the cluster is connected
            _serve(pipe)
        except LdpflError as error:
            pipe.send(error)
        except Exception as error:  # an error of Ray, whose text may be pages long
            if not isinstance(error, EOFError | BrokenPipeError):  # else the other end is closed, so nobody reads a message
                pipe.send(LdpflError(LOST.format(type(error).__name__)))


def _connect(where: str, folder: Path) -> None:
    """Connect to the cluster that ``where`` names.

    Raises:
        LdpflError: no cluster answers there.
    """
    address = _address(where)
    if address == "local":
        # The ports of a new cluster are open to all who have this token: the processes of this run.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    new_cluster: dict[str, Any] = {}
    if address == "local":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        new_cluster = {"num_cpus": cores, "include_dashboard": False, "_temp_dir": str(folder)}
    try:
        ray.init(address, log_to_driver=False, logging_level="critical", **new_cluster)
    except Exception as error:
        raise LdpflError(
            f"no Ray cluster can be used at {address!r} ({_what_and_why(error)}): check that it runs, that this "
            "machine reaches it, that Ray and Python have the same versions there and here, and, where the cluster asks for a token, that "
            "RAY_AUTH_MODE=token is set here and ~/.ray/auth_token holds the cluster's token"
        ) from error


def _what_and_why(error: Exception) -> str:
    """Return an error's type and its text without the traceback that a server of Ray puts between the first line and the last."""
    lines = str(error).strip().splitlines()
    return " ".join([f"{type(error).__name__}:", *lines[:1], *lines[1:][-1:]])


def _address(where: str) -> str:
    """Return the address for ``ray.init`` of the cluster that ``where`` names.

    If it names any cluster, that is the one in RAY_ADDRESS, else this user's own on this machine, else ``local``, which starts a new one.
    """
    if where != ANY_CLUSTER:
        return where
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    # Ray itself would connect to the cluster that was started last on this machine, even another user's, and send it all data.
    address_file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with suppress(OSError, ValueError):
        if address_file.stat().st_uid == os.getuid():
            address = address_file.read_text().strip()
            if _own_process_listens(int(address.rpartition(":")[2])):
                return address
    return "local"


def _own_process_listens(port: int) -> bool:
    """Whether a process of this user listens at ``port`` of this machine. A killed cluster leaves its address file behind."""
    with suppress(psutil.Error):
        for socket in psutil.net_connections(kind="tcp"):
            if socket.status == psutil.CONN_LISTEN and socket.laddr and socket.laddr.port == port and socket.pid:
                return bool(psutil.Process(socket.pid).uids().real == os.getuid())
    return False


def _serve(pipe: Connection) -> None:
    """Answer the messages from ``pipe``: store values, and let the cluster train rounds, until the other end is closed (EOFError)."""
    import ray

    references: dict[str, Any] = {}
    while True:
        message = pipe.recv()
        if isinstance(message, ValueHeader):
            pickled = pipe.recv_bytes()
            arrays = [np.frombuffer(pipe.recv_bytes(), np.uint8) for _ in range(message.arrays)]
            references[message.name] = ray.put((message.name, pickled, arrays))
        else:
            _train_round_on_cluster(pipe, message, references)
            del references[message.start]  # so that Ray frees it; the federation is needed again in the next round


def _train_round_on_cluster(pipe: Connection, request: RoundRequest, references: dict[str, Any]) -> None:
    """Have the cluster train all shares (groups of clients), and send each answer at once. ``references`` has Ray's values by name."""
    import ray

    if request.on_gpu and not ray.cluster_resources().get("GPU"):
        raise ConfigError("the run uses a GPU, but no node of the Ray cluster has one: set --device cpu, or start nodes with --num-gpus")
    train_on_node = ray.remote(
        num_cpus=1,
        num_gpus=1 if request.on_gpu else 0,
        max_retries=_RETRIES,
        retry_exceptions=False,  # only lost shares are trained again: an error of the training itself would recur
        runtime_env={"env_vars": _ONE_THREAD},
    )(share_task())
    waiting = {}  # the index of each share that is not done, by Ray's reference to its result
    for index, share in enumerate(request.shares):
        waiting[train_on_node.remote(references[request.federation], references[request.start], share)] = index
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=_CHECK_S)
        if pipe.poll():  # no message comes within a round, so the other end was closed
            raise EOFError
        for reference in ready:
            node, outcome = _fetch(reference)
            pipe.send(answer_from_outcome(waiting.pop(reference), node, outcome))


def _fetch(reference: Any) -> tuple[str, Any]:
    """Return the name of the node that had a share (a group of clients), and the pickled result, or the node's versions if they differ.

    Raises:
        LdpflError: the node cannot train, or the share was lost too often.
    """
    from ray import exceptions, get

    try:
        node, outcome = get(reference)
    except exceptions.RayTaskError as error:
        raise ConfigError(
            f"a node of the Ray cluster could not start to train its clients ({type(error.cause or error).__name__}): install the same "
            "packages on every node and on this machine"
        ) from error
    except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError, exceptions.ObjectLostError) as error:
        raise LdpflError(
            f"training a part of the round's clients failed {_RETRIES + 1} times on the Ray cluster ({type(error).__name__}), perhaps "
            "because memory ran out: give each of Ray's CPUs more memory, and resume the run. Finished rounds are saved"
        ) from error
    return str(node), outcome


def answer_from_outcome(index: int, node: str, outcome: dict[str, str] | bytes) -> Answer:
    """Return the answer for the share at ``index`` from the ``outcome`` on ``node``: a pickled result, or the node's different versions.

    Raises:
        ConfigError: the node has other versions than this machine.
        LdpflError: the share stopped; it is the error that stopped it.
    """
    if isinstance(outcome, dict):
        ours = versions_finder()()
        other = ", ".join(f"{name} {outcome[name]} (here {ours[name]})" for name in ours if outcome[name] != ours[name])
        raise ConfigError(f"node {node} of the Ray cluster has {other}: install the same versions on every node and on this machine")
    result, processor = pickle.loads(outcome)
    if isinstance(result, LdpflError):
        raise result
    return Answer(index, result, processor)


def versions_finder() -> Callable[[], dict[str, str]]:
    """Return a function that returns the versions of Python and packages on the machine that calls it, by name.

    It is a nested function so that Ray sends its code and not its name, since a node may lack ldpfl.
    """

    def versions() -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        version_of = {"python": platform.python_version()}
        for name in ("ldpfl", "torch", "numpy"):
            try:
                version_of[name] = version(name)
            except PackageNotFoundError:
                version_of[name] = "not installed"
        return version_of

    return versions


def share_task() -> Callable[[Any, Any, bytes], tuple[str, Any]]:
    """Return the task by which a node trains a share (a group of clients): a nested function, whose code is sent to nodes without ldpfl."""
    versions = versions_finder()
    driver_versions = versions()

    def train(federation: Any, start: Any, share: bytes) -> tuple[str, Any]:
        """Return the node's name, and the result of :func:`train_and_pickle`, or the node's versions if they differ from the driver's."""
        import platform

        node_versions = versions()
        if node_versions != driver_versions:
            return platform.node(), node_versions
        from ldpfl.simulation.ray_driver import train_and_pickle

        return platform.node(), train_and_pickle(federation, start, share)

    return train


@dataclass(frozen=True)
class _StoredValue:
    """A value in Ray's object store. Caches compare values by name alone, since no name is used twice in a run."""

    name: str
    pickled: bytes = field(compare=False)
    arrays: Sequence[NDArray[np.uint8]] = field(compare=False)


def _unpack(stored: _StoredValue) -> Any:
    """Return the ``stored`` value. Its arrays are not copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")  # nobody writes to it
        return pickle.loads(stored.pickled, buffers=stored.arrays)


_unpack_federation = lru_cache(maxsize=2)(_unpack)
_unpack_start = lru_cache(maxsize=1)(_unpack)


def train_and_pickle(federation: tuple[str, bytes, Any], start: tuple[str, bytes, Any], share: bytes) -> bytes:
    """Train a ``share`` (a group of clients). Return its result, or the error that stopped it, pickled with this processor's kind."""
    result: Collected | LdpflError
    try:
        unpacked = _unpack_federation(_StoredValue(*federation))
        with one_thread(unpacked.device):
            result = collect(unpacked, _unpack_start(_StoredValue(*start)), pickle.loads(share))
    except LdpflError as error:
        result = error
    except ImportError as error:
        result = ConfigError(
            f"a node of the Ray cluster lacks the module {error.name!r}: install it on every node, or put it on PYTHONPATH there"
        )
    except Exception as error:  # its text may repeat private values
        result = LdpflError(
            f"training failed on a node of the Ray cluster: {error_without_data(error)}. To see the whole error, run with --workers 1"
        )
    return pickle.dumps((result, torch.backends.cpu.get_cpu_capability()), protocol=5)
