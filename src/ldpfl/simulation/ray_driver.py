"""What runs beside the process that simulates: Ray's driver, a process of its own, and the tasks that it gives to nodes.

Ray ends the process of its driver when the head of a cluster is lost, and prints to it: both must not happen to a run.
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

from ldpfl.errors import ConfigError, LdpflError, first_line, in_short
from ldpfl.simulation.shares import Collected, collect, one_thread

ANY_CLUSTER = "ray"
"""Names the cluster of RAY_ADDRESS; else the one that this user began on this machine by ``ray start``; else a new one on this machine."""

_RETRIES = 10
"""How often a share is begun again on another node or in another process, before a run ends."""

LOST = "the Ray cluster was lost, or its head ({}): start it again, and resume the run, whose finished rounds are kept"

_LOOK_S = 1.0
"""Seconds between two looks at whether the process that simulates is still there."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Held:
    """Announces a value, whose pickle and arrays follow as bytes, and which is then held in Ray's object store."""

    name: str
    arrays: int


@dataclass(frozen=True)
class RoundAsked:
    """Asks for all ``shares`` of a round, each pickled; federation and start of the round are named as they were announced."""

    federation: str
    start: str
    shares: Sequence[bytes]
    on_gpu: bool


@dataclass(frozen=True, eq=False)
class Answer:
    """What came of the share at ``place``, and the kind of the processor that did it, on which it depends how sums are rounded."""

    place: int
    done: Collected
    processor: str


def drive(where: str, folder: Path, pipe: Connection) -> None:
    """Be Ray's driver until the other end of ``pipe`` is closed. An error goes through ``pipe`` as a value, and is the last one.

    Args:
        where: address of a cluster, or ``ANY_CLUSTER``.
        folder: where a new cluster on this machine keeps its files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that began this one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    with suppress(EOFError, OSError):
        try:
            _connect(where, folder)
            pipe.send(None)
            _serve(pipe)
        except LdpflError as error:
            pipe.send(error)
        except Exception as error:  # of Ray: its text may be pages long
            if not isinstance(error, EOFError | BrokenPipeError):
                pipe.send(LdpflError(LOST.format(type(error).__name__)))


def _connect(where: str, folder: Path) -> None:
    """Connect to the cluster that ``where`` names.

    Raises:
        LdpflError: none answers there.
    """
    address = _address(where)
    if address == "local":
        # The ports of a new cluster are open to all who have this token: the processes of this run.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    of_its_own: dict[str, Any] = {}
    if address == "local":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        of_its_own = {"num_cpus": cores, "include_dashboard": False, "_temp_dir": str(folder)}
    try:
        ray.init(address, log_to_driver=False, logging_level="critical", **of_its_own)
    except Exception as error:
        raise LdpflError(
            f"no Ray cluster can be used at {address!r} ({type(error).__name__}: {first_line(error)}): check that it runs, that this "
            "machine reaches it, that Ray and Python have the same versions there and here, and, where the cluster asks for a token, that "
            "RAY_AUTH_MODE=token is set here and ~/.ray/auth_token holds the cluster's token"
        ) from error


def _address(where: str) -> str:
    if where != ANY_CLUSTER:
        return where
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    # Ray itself would connect to whichever cluster was begun last on this machine, somebody else's too, and hand it all data.
    last = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    with suppress(OSError, ValueError):
        if last.stat().st_uid == os.getuid():
            address = last.read_text().strip()
            if _listens(int(address.rpartition(":")[2])):
                return address
    return "local"


def _listens(port: int) -> bool:
    """Whether a process of this user listens at ``port`` of this machine: the file of a cluster that was killed stays behind."""
    with suppress(psutil.Error):
        for found in psutil.net_connections(kind="tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port and found.pid:
                return bool(psutil.Process(found.pid).uids().real == os.getuid())
    return False


def _serve(pipe: Connection) -> None:
    import ray

    held: dict[str, Any] = {}
    while True:
        asked = pipe.recv()
        if isinstance(asked, Held):
            inside = pipe.recv_bytes()
            arrays = [np.frombuffer(pipe.recv_bytes(), np.uint8) for _ in range(asked.arrays)]
            held[asked.name] = ray.put((asked.name, inside, arrays))
        else:
            _do_round(pipe, asked, held)
            del held[asked.start]


def _do_round(pipe: Connection, asked: RoundAsked, held: dict[str, Any]) -> None:
    """Have all shares of a round done, and send what comes of each as soon as it is there."""
    import ray

    if asked.on_gpu and not ray.cluster_resources().get("GPU"):
        raise ConfigError("the run is on a GPU, but no node of the Ray cluster has one: set --device cpu, or start nodes with --num-gpus")
    done_on_node = ray.remote(
        num_cpus=1,
        num_gpus=1 if asked.on_gpu else 0,
        max_retries=_RETRIES,
        retry_exceptions=False,
        runtime_env={"env_vars": _ONE_THREAD},
    )(share_task())
    waiting = {}
    for place, share in enumerate(asked.shares):
        waiting[done_on_node.remote(held[asked.federation], held[asked.start], share)] = place
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=_LOOK_S)
        if pipe.poll():  # nothing is asked within a round: this is the end
            raise EOFError
        for reference in ready:
            node, found = _fetched(reference)
            pipe.send(answer_of(waiting.pop(reference), node, found))


def _fetched(reference: Any) -> tuple[str, Any]:
    """Return the name of the node that did a share, and what :func:`share_task` gave there."""
    from ray import exceptions, get

    try:
        node, found = get(reference)
    except exceptions.RayTaskError as error:
        raise ConfigError(
            f"a node of the Ray cluster cannot begin a share ({type(error.cause or error).__name__}): install on every node what this "
            "machine has"
        ) from error
    except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError, exceptions.ObjectLostError) as error:
        raise LdpflError(
            f"a share of the round was lost {_RETRIES + 1} times on the Ray cluster ({type(error).__name__}), as when memory runs out: "
            "give each of Ray's CPUs more memory, and resume the run, whose finished rounds are kept"
        ) from error
    return str(node), found


def answer_of(place: int, node: str, found: dict[str, str] | bytes) -> Answer:
    """Return what ``node`` gave for the share at ``place``.

    Raises:
        ConfigError: the node has other versions than this machine.
        LdpflError: what stopped the share.
    """
    if isinstance(found, dict):
        ours = versions_finder()()
        other = ", ".join(f"{name} {found[name]} (here {ours[name]})" for name in ours if found[name] != ours[name])
        raise ConfigError(f"node {node} of the Ray cluster has {other}: install the same versions on every node and on this machine")
    done, processor = pickle.loads(found)
    if isinstance(done, LdpflError):
        raise done
    return Answer(place, done, processor)


def versions_finder() -> Callable[[], dict[str, str]]:
    """Return a function that finds which versions a machine has.

    It is a function within a function so that Ray sends its code, not its name: a node may lack ldpfl.
    """

    def versions() -> dict[str, str]:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": platform.python_version()}
        for name in ("ldpfl", "torch", "numpy"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not installed"
        return found

    return versions


def share_task() -> Callable[[Any, Any, bytes], tuple[str, Any]]:
    """Return what a node does of a share: it gives what came of the share, or the node's versions where these are others."""
    versions = versions_finder()
    ours = versions()

    def done(federation: Any, start: Any, share: bytes) -> tuple[str, Any]:
        import platform

        found = versions()
        if found != ours:
            return platform.node(), found
        from ldpfl.simulation.ray_driver import collected

        return platform.node(), collected(federation, start, share)

    return done


@dataclass(frozen=True)
class _Sent:
    """A value as it lies in Ray's object store; its name alone tells it from others."""

    name: str
    inside: bytes = field(compare=False)
    arrays: Sequence[NDArray[np.uint8]] = field(compare=False)


def _unpacked(sent: _Sent) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")  # nobody writes to it
        return pickle.loads(sent.inside, buffers=sent.arrays)


_federation = lru_cache(maxsize=2)(_unpacked)
_start = lru_cache(maxsize=1)(_unpacked)


def collected(federation: tuple[str, bytes, Any], start: tuple[str, bytes, Any], share: bytes) -> bytes:
    """Return, pickled, what comes of a ``share``, or what stopped it; and the kind of this processor."""
    done: Collected | LdpflError
    try:
        own = _federation(_Sent(*federation))
        with one_thread(own.device):
            done = collect(own, _start(_Sent(*start)), pickle.loads(share))
    except LdpflError as error:
        done = error
    except ImportError as error:
        done = ConfigError(
            f"a node of the Ray cluster lacks the module {error.name!r}: install it on every node, or put it on PYTHONPATH there"
        )
    except Exception as error:  # its text may repeat private values
        done = LdpflError(f"a share of the round stopped on the Ray cluster: {in_short(error)}; see the whole error with --workers 1")
    return pickle.dumps((done, torch.backends.cpu.get_cpu_capability()), protocol=5)
