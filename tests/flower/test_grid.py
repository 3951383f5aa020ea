"""The in-process grid: one client after another, in order, as their replies are wanted."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_parts import app_of, instruction, shift, terms_of
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ldpfl.errors import ConfigError, TooFewTakePart
from ldpfl.flower import InProcessGrid
from ldpfl.flower.apps import server_app
from ldpfl.flower.terms import digest_of


def messages(grid: InProcessGrid) -> list[Message]:
    found = [instruction() for _ in grid.get_node_ids()]
    for message, node in zip(found, grid.get_node_ids(), strict=True):
        message.metadata.dst_node_id = node
    return found


def noting(ran: list[int]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        ran.append(int(context.node_config["partition-id"]))
        return Message(RecordDict(), reply_to=message)

    return app


def test_replies_come_one_by_one_in_the_order_of_the_messages() -> None:
    ran: list[int] = []
    grid = InProcessGrid(noting(ran), 5)
    replies = grid.send_and_receive(reversed(messages(grid)))
    assert ran == []
    for done, reply in enumerate(replies, start=1):
        assert len(ran) == done  # nobody runs ahead of the one who reads
        assert reply.metadata.reply_to_message_id == str(done)
    assert ran == [4, 3, 2, 1, 0]


def test_workers_keep_the_order_and_run_at_once() -> None:
    app, together = ClientApp(), multiprocessing.get_context("fork").Barrier(2, timeout=10)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        together.wait()  # ends only if two clients run at the same time
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 6, workers=2)
    replies = list(grid.send_and_receive(messages(grid)))
    assert [reply.metadata.src_node_id for reply in replies] == grid.get_node_ids()
    assert not any(reply.has_error() for reply in replies)


@pytest.mark.slow
def test_workers_bring_back_what_nodes_keep() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        rounds = context.state.setdefault("rounds", ConfigRecord({"done": 0}))
        assert isinstance(rounds, ConfigRecord)
        rounds["done"] = int(str(rounds["done"])) + int(context.node_id)
        return Message(RecordDict({"told": ConfigRecord(dict(rounds))}), reply_to=message)

    grid = InProcessGrid(app, 5, workers=2)
    for number in (1, 2, 3):
        replies = list(grid.send_and_receive(messages(grid)))
        told = [reply.content.config_records["told"]["done"] for reply in replies]
        assert told == [number * node for node in grid.get_node_ids()]


def test_a_worker_that_is_killed_takes_only_its_own_replies_along() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 6, workers=2)  # the first one has the even places
    sent = messages(grid)
    places = {message.metadata.dst_node_id: place for place, message in enumerate(sent)}
    replies = list(grid.send_and_receive(sent))
    assert [places[reply.metadata.src_node_id] for reply in replies] == [0, 1, 2, 3, 4, 5]
    assert [reply.has_error() for reply in replies] == [False, False, True, False, True, False]


@pytest.mark.slow
def test_a_worker_that_hangs_is_left_out_when_the_time_is_over() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            time.sleep(60)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 4, workers=2)
    began = time.monotonic()
    replies = list(grid.send_and_receive(messages(grid), timeout=1.5))
    assert time.monotonic() - began < 30
    assert len(replies) == 2  # those of the other worker


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_late_node_keeps_is_its_own() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            time.sleep(1.5)
        context.state["own"] = ConfigRecord({"node": context.node_id})
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 4, workers=2)
    nodes = grid.get_node_ids()
    replies = iter(grid.send_and_receive(messages(grid), timeout=0.5))
    came = [next(replies).metadata.src_node_id]
    time.sleep(0.7)  # the time is over, and the second node still at work
    came.append(next(replies).metadata.src_node_id)
    time.sleep(4.0)  # now it has answered, where the fourth one's answer would be
    came += [reply.metadata.src_node_id for reply in replies]
    assert came == [nodes[0], nodes[2], nodes[1]]
    assert [context.state.get("own") for context in grid._contexts.values()] == [
        *(ConfigRecord({"node": node}) for node in nodes[:3]),
        None,
    ]


def test_workers_do_not_share_global_random_numbers() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(1))]
        return Message(RecordDict({"drawn": ConfigRecord({"all": drawn})}), reply_to=message)

    grid = InProcessGrid(app, 4, workers=2)
    drawn = [reply.content.config_records["drawn"]["all"] for _ in range(2) for reply in grid.send_and_receive(messages(grid))]
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 8


@pytest.mark.slow
@pytest.mark.thorough
def test_workers_stop_when_who_forked_them_is_killed(tmp_path: Path) -> None:
    """Clients that nobody hears any more would train, and be charged, for nothing."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(0.2)
        (tmp_path / str(context.node_id)).touch()
        return Message(RecordDict(), reply_to=message)

    def serve() -> None:
        grid = InProcessGrid(app, 40, workers=2)
        for _ in grid.send_and_receive(messages(grid)):
            os.kill(os.getpid(), signal.SIGKILL)

    server = multiprocessing.get_context("fork").Process(target=serve)
    server.start()
    server.join(60)
    assert server.exitcode == -signal.SIGKILL
    time.sleep(1.5)
    assert len(list(tmp_path.iterdir())) < 10


def test_workers_that_nobody_listens_to_any_more_are_ended() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] != 0:
            time.sleep(600)  # so that both are still at work, however slow this process is
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 6, workers=2)
    replies = grid.send_and_receive(messages(grid))
    next(iter(replies))
    assert len(multiprocessing.active_children()) == 2
    replies.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_at_least_one(workers: int) -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        InProcessGrid(ClientApp(), 1, workers=workers)


def test_pushed_messages_are_answered_once() -> None:
    ran: list[int] = []
    grid = InProcessGrid(noting(ran), 3)
    names = grid.push_messages(messages(grid))
    assert len(list(grid.pull_messages(names[:2]))) == 2
    assert len(list(grid.pull_messages(names))) == 1
    assert list(grid.pull_messages([*names, "unknown"])) == []
    assert ran == [0, 1, 2]


def test_no_client_is_started_after_the_timeout() -> None:
    app = ClientApp()

    @app.train()
    def slow(message: Message, context: Context) -> Message:
        time.sleep(0.05)
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 50)
    assert 1 <= len(list(grid.send_and_receive(messages(grid), timeout=0.12))) <= 4


def test_an_app_that_raises_is_answered_with_an_error_as_flower_does() -> None:
    app = ClientApp()

    @app.train()
    def broken(message: Message, context: Context) -> Message:
        raise ZeroDivisionError("division by zero")

    grid = InProcessGrid(app, 1)
    (reply,) = grid.send_and_receive(messages(grid))
    assert reply.error.reason == "<class 'ZeroDivisionError'>:<'division by zero'>"


def test_nodes_are_told_what_flower_s_simulation_tells_them() -> None:
    told: list[dict[str, object]] = []

    def train(message: Message, context: Context) -> Message:
        told.append({**context.node_config, **context.run_config})
        return shift(message, context)

    grid = InProcessGrid(app_of(train), 2, run_config={"lr": 0.1}, node_config={"data-dir": "/data"})
    terms = terms_of(run_config=digest_of({"lr": 0.1}))
    for node in grid.get_node_ids():
        list(grid.send_and_receive([Message(instruction(terms).content, node, "train")]))
    assert told == [{"partition-id": i, "num-partitions": 2, "data-dir": "/data", "lr": 0.1} for i in (0, 1)]
    assert dict(grid.server_context().run_config) == {"lr": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ldpfl.recipe": "no-such-recipe"}, "no-such-recipe"),
        ({"ldpfl.set": "training.round=3"}, "rounds"),
        ({"ldpfl.set": "training"}, "key=value"),
        ({"ldpfl.transport": "pigeon"}, "'relay', 'sum' or 'direct'"),
        ({"ldpfl.transport": "relay"}, "LDPFL_RELAY"),
        ({"ldpfl.wait-s": "long"}, "valid number, got 'long'"),
        ({"ldpfl.min-client": 20}, "did you mean 'min-clients'"),
        ({"ldpfl.nodes": 3, "ldpfl.wait-s": 0.0, "ldpfl.set": "clients.count=2"}, "2 of the 3 nodes"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_line(settings: dict[str, str | float], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LDPFL_RELAY", raising=False)
    grid = InProcessGrid(app_of(), 2, run_config=settings)
    with pytest.raises((ConfigError, TooFewTakePart), match=named):
        server_app(grid, grid.server_context())


@pytest.mark.slow
@pytest.mark.thorough
def test_flower_is_loaded_only_where_it_is_used() -> None:
    code = "import sys, ldpfl, ldpfl.simulation, ldpfl.experiments; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
