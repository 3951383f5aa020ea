"""The in-process grid: one client after another, in order, as their replies are wanted."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from flower_parts import app_of, instruction, shift, terms_of
from flwr.app import Context, Message, RecordDict
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
