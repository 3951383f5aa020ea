"""Shares of rounds as tasks of Ray: the bits of one process, and what happens when nodes, the head or Ray itself are not there."""

from __future__ import annotations

import hashlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import pytest
import torch
from loky.backend import get_context
from torch import Tensor

from ldpfl.data import Dataset
from ldpfl.errors import ConfigError, LdpflError, PrivacyError
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.local_steps import BatchSchedule
from ldpfl.simulation.local_training import Trainer
from ldpfl.simulation.ray_workers import is_ray, ray_workers
from ldpfl.simulation.shares import ONE_PROCESS, Workers
from simulated import federation_of

CPU = torch.device("cpu")
CLIENTS = 96
SHARES = 6
SLOW_MACHINE = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "300"}  # Ray gives a client's server 30 s to start

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers import no tests


@dataclass(frozen=True)
class TwoNodes:
    """A cluster of two nodes of one CPU each, which live in a process of their own: Ray leaves files open."""

    pipe: Connection

    def ask(self, what: str) -> str:
        self.pipe.send(what)
        return str(self.pipe.recv())


def be_cluster(pipe: Connection) -> None:
    """Have a cluster, and lose of it what ``pipe`` asks for, until its other end is closed."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "ray_client_server_port": free_port()})
    head, second = cluster.head_node, cluster.add_node(**node)
    answers: dict[str, Callable[[], object]] = {
        "address": lambda: cluster.address,
        "client": lambda: f"ray://{head.node_ip_address}:{head._ray_params.ray_client_server_port}",
        "lose the second node": lambda: second.kill_all_processes(check_alive=False, allow_graceful=False),
        "lose the head": lambda: head.kill_all_processes(check_alive=False, allow_graceful=False),
    }
    with suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())
    for left in (second, head):
        left.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    """The last test breaks it."""
    pytest.importorskip("ray")
    context = get_context("loky")
    here, there = context.Pipe()
    host = context.Process(target=be_cluster, args=(there,), env={"RAY_USAGE_STATS_ENABLED": "0", **SLOW_MACHINE})
    host.start()
    there.close()
    nodes = TwoNodes(here)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", nodes.ask("address"))
        yield nodes
    here.close()
    host.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs ``cluster``: one worker of pytest has all of them, for a cluster takes a core and a gigabyte.

    Ray starts processes, which takes minutes on a busy machine.
    """
    of_ray = (pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster"), pytest.mark.timeout(1200))
    for mark in (pytest.mark.thorough, pytest.mark.slow, *of_ray):
        test = mark(test)
    return test


@dataclass(frozen=True)
class Changed:
    """A trainer whose values are changed by ``also``."""

    trainer: Trainer
    also: Callable[[Tensor], Tensor]

    def train(self, broadcast: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        return self.also(self.trainer.train(broadcast, schedule, round_number))


@dataclass(frozen=True)
class Held:
    """A trainer that writes down on which node it begins, and waits there until a node is lost."""

    trainer: Trainer
    folder: Path

    def train(self, broadcast: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        import ray

        with (self.folder / "begun").open("a") as file:
            file.write(f"{ray.get_runtime_context().get_node_id()}\n")
        wait_for((self.folder / "lost").exists)
        return self.trainer.train(broadcast, schedule, round_number)


class OnGpu(Federation):
    """A federation that says it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 600  # Ray starts a process for each task's node, on a machine that other tests use too
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def connect(where: str, stack: ExitStack) -> Workers:
    """Connect to a cluster until ``stack`` is closed, at the third try at the latest: Ray starts a server for each client, and that server
    may miss a time limit of Ray on a machine that other tests use too."""
    for _ in range(2):
        with suppress(LdpflError):
            return stack.enter_context(ray_workers(where, CPU))
    return stack.enter_context(ray_workers(where, CPU))


def changed(task: Dataset, also: Callable[[Tensor], Tensor]) -> tuple[Federation, Checkpoint]:
    federation, start = federation_of(task)
    return replace(federation, trainer=Changed(federation.trainer, also)), start


def outcome(last: Checkpoint) -> tuple[str, list[object]]:
    """All that a run leaves: the model, and each round's figures."""
    return hashlib.sha256(last.state.weights.numpy().tobytes()).hexdigest(), [metrics.reproducible() for metrics in last.history]


@pytest.mark.parametrize(("workers", "expected"), [("ray", True), ("ray://head:10001", True), ("auto", False), (2, False), ("rays", False)])
def test_the_name_of_a_cluster(workers: object, expected: bool) -> None:
    assert is_ray(workers) == expected


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ldpfl\[ray\]'"), ray_workers("ray", CPU):
        pass


@on_cluster
@pytest.mark.parametrize("client", [False, True], ids=["driver", "client"])
def test_results_are_those_of_one_process(client: bool, cluster: TwoNodes, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, clients=CLIENTS)
    other, begin = federation_of(tiny_task, clients=CLIENTS, mechanism="none", scheme="quantity")
    seen: list[tuple[int, int]] = []
    with ExitStack() as stack:
        tasks = connect(cluster.ask("client") if client else "ray", stack)
        *_, last = simulate(federation, start, 2, lambda done, total: seen.append((done, total)), tasks)
        *_, second = simulate(other, begin, 1, workers=tasks)
    assert outcome(last) == outcome([*simulate(federation, start, 2)][-1])
    assert outcome(second) == outcome([*simulate(other, begin, 1)][-1])
    assert seen[-1] == (CLIENTS, CLIENTS)
    assert len(seen) == 2 * SHARES


@on_cluster
def test_values_that_must_not_leave_are_said_as_in_one_process(tiny_task: Dataset, capfd: Any) -> None:
    federation, start = changed(tiny_task, lambda trained: trained * torch.nan)
    texts = []
    with ray_workers("ray", CPU) as tasks:
        for workers in (ONE_PROCESS, tasks):
            with pytest.raises(PrivacyError) as raised:
                next(simulate(federation, start, 1, workers=workers))
            texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert capfd.readouterr() == ("", "")


@on_cluster
def test_an_unexpected_error_repeats_no_value(tiny_task: Dataset) -> None:
    def private(trained: Tensor) -> Tensor:
        raise ValueError(f"value {float(trained[0, 0])}")

    federation, start = changed(tiny_task, private)
    with ray_workers("ray", CPU) as tasks, pytest.raises(LdpflError, match=r"unexpected ValueError.*--workers 1") as raised:
        next(simulate(federation, start, 1, workers=tasks))
    assert "value" not in str(raised.value)
    assert raised.value.__cause__ is None


@on_cluster
def test_a_run_on_a_gpu_needs_a_node_with_one(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    on_gpu = OnGpu(**{field.name: getattr(federation, field.name) for field in fields(federation)})
    with ray_workers("ray", torch.device("cuda")) as tasks, pytest.raises(ConfigError, match=r"no node of the Ray cluster has one"):
        next(simulate(on_gpu, start, 1, workers=tasks))


@on_cluster
def test_a_node_costs_time_and_the_head_an_error(
    cluster: TwoNodes, tiny_task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # 60 otherwise
    federation, start = federation_of(tiny_task, clients=CLIENTS)
    federation = replace(federation, chunk_size=CLIENTS)
    expected = [outcome(checkpoint) for checkpoint in simulate(federation, start, 2)]
    held = replace(federation, trainer=Held(federation.trainer, tmp_path))
    begun = tmp_path / "begun"

    def lose_the_node() -> None:
        wait_for(lambda: begun.exists() and len(set(begun.read_text().split())) == 2)
        cluster.ask("lose the second node")
        (tmp_path / "lost").touch()

    def lose_the_head() -> None:
        wait_for((tmp_path / "later" / "begun").exists)
        cluster.ask("lose the head")

    with ray_workers("ray", CPU) as tasks:
        losing = Thread(target=lose_the_node)
        losing.start()
        first = next(simulate(held, start, 1, workers=tasks))
        losing.join()
        assert outcome(first) == expected[0]
        assert len(begun.read_text().split()) == SHARES + 1
        (tmp_path / "later").mkdir()
        held = replace(federation, trainer=Held(federation.trainer, tmp_path / "later"))
        losing = Thread(target=lose_the_head)
        losing.start()
        with pytest.raises(LdpflError, match=r"Ray cluster or its head node.*resume the run"):
            next(simulate(held, first, 2, workers=tasks))
        losing.join()
    assert [outcome(last) for last in simulate(federation, first, 2)] == expected[1:]
