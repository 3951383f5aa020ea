"""Trouble at the relay: what it still holds is not given up, what it never had is not waited for, and nobody pays for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flower_parts import config_of, instruction, shift, start_arrays, terms_of
from flwr.app import Message
from relayed_parts import CLIENTS, KEY, World, world_in

from ldpfl.errors import ConfigError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, LdpStrategy, RelayCollector
from ldpfl.relay import Patience, RelayAggregator, RelayRefused, RelayUnreachable, RoundStatus
from ldpfl.transport.shuffling.sealing import generate_key


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


class Troubled(httpx.BaseTransport):
    """Hands requests to the relay, unless ``trouble`` answers them, or raises."""

    def __init__(self, world: World, trouble: Callable[[httpx.Request], httpx.Response | None]) -> None:
        self._world, self._trouble = world, trouble

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._trouble(request) or self._world.wire.handle_request(request)


def collector_with(world: World, trouble: Callable[[httpx.Request], httpx.Response | None]) -> RelayCollector:
    relay = RelayAggregator(
        "http://127.0.0.1",
        world.tokens["aggregator"],
        transport=Troubled(world, trouble),
        patience=Patience(2, 1.0, 1.0),
        sleep=world.sleep,
        clock=lambda: world.now[0],
    )
    return RelayCollector(relay=relay, key=KEY, min_clients=world.min_clients, window_s=30.0)


def started(world: World, collector: RelayCollector, folder: RunFolder, rounds: int = 1) -> LdpStrategy:
    strategy = LdpStrategy(config_of(), collector=collector, folder=folder)
    strategy.start(world.grid(), start_arrays(), rounds, timeout=100.0)
    return strategy


def reference(tmp_path: Path) -> torch.Tensor:
    """The model after a round without any trouble: the random bits are the same."""
    (tmp_path / "reference").mkdir()
    with world_in(tmp_path / "reference") as calm:
        return calm.run().state.weights


def away(request: httpx.Request) -> httpx.Response | None:
    raise httpx.ConnectError("away")


def busy(request: httpx.Request) -> httpx.Response | None:
    return httpx.Response(503, json={"error": "the relay is busy; try again later"})


@pytest.mark.parametrize("trouble", [away, busy])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_that_the_relay_holds_outlasts_its_outage(
    trouble: Callable[[httpx.Request], httpx.Response | None], world: World, tmp_path: Path
) -> None:
    """Away when the records are to be fetched, and again when the run is started anew; then back."""
    folder, uploaded = RunFolder(tmp_path / "run"), [False]

    def after_uploads(request: httpx.Request) -> httpx.Response | None:
        return trouble(request) if uploaded[0] else None

    def note(client: int) -> None:
        uploaded[0] = True

    world.before_upload = note
    for _ in range(2):
        with pytest.raises((RelayUnreachable, RelayRefused)):
            started(world, collector_with(world, after_uploads), folder)
    last = started(world, world.collector(), folder).checkpoint
    assert torch.equal(last.state.weights, reference(tmp_path))
    assert [(event.round, event.cohort) for event in last.ledger.events] == [(1, CLIENTS)]
    assert world.charges() == [1] * CLIENTS


@pytest.mark.slow
@pytest.mark.thorough
def test_a_relay_that_is_away_when_a_round_would_begin_costs_no_round(world: World, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for _ in range(3):
        with pytest.raises(RelayUnreachable):
            started(world, collector_with(world, away), folder)
    last = started(world, world.collector(), folder).checkpoint
    assert [(event.round, event.joined) for event in last.ledger.events] == [(1, 1)]


@pytest.mark.slow
def test_a_server_killed_while_it_opened_a_round_goes_on_with_other_nodes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay has the round with terms that no other message will have again: it is given up, charged, and the next one begins."""
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patched:

        def killed(self: RelayCollector, *args: Any) -> None:
            opening(self, *args)
            raise KeyboardInterrupt

        opening = RelayCollector.open
        patched.setattr(RelayCollector, "open", killed)
        with pytest.raises(KeyboardInterrupt):
            started(world, world.collector(), folder, 2)

    class Fewer(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return super().get_node_ids()[1:]

    strategy = LdpStrategy(config_of(), collector=world.collector(), folder=folder)
    strategy.start(Fewer(LdpClientApp(shift, node=world.node, source=world.source), CLIENTS), start_arrays(), 2, timeout=100.0)
    assert [metrics.clients for metrics in strategy.checkpoint.history] == [0, CLIENTS - 1]
    assert [event.round for event in strategy.checkpoint.ledger.events] == [1, 2]


@pytest.mark.parametrize("what", ["key", "linked", "min_clients"])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_under_way_is_closed_on_its_own_terms_only(what: str, world: World, tmp_path: Path) -> None:
    """With another key its reports would be thrown away, with other numbers charged as what they are not."""
    folder, uploaded = RunFolder(tmp_path / "run"), [False]

    def after_uploads(request: httpx.Request) -> httpx.Response | None:
        return away(request) if uploaded[0] else None

    world.before_upload = lambda client: uploaded.__setitem__(0, True)
    with pytest.raises(RelayUnreachable):
        started(world, collector_with(world, after_uploads), folder)
    own = world.collector()
    others = {"key": replace(own, key=generate_key()), "linked": replace(own, linked=4), "min_clients": replace(own, min_clients=4)}
    with pytest.raises(ConfigError, match="was begun with other settings"):
        started(world, others[what], folder)
    last = started(world, own, folder).checkpoint
    assert torch.equal(last.state.weights, reference(tmp_path))
    assert started(world, replace(own, min_clients=4), folder, 2).checkpoint.state.round == 2  # between rounds they may change


@pytest.mark.slow
@pytest.mark.thorough
def test_a_finished_run_needs_no_relay(world: World, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    started(world, world.collector(), folder)
    assert started(world, collector_with(world, away), folder).checkpoint.state.round == 1
    with pytest.raises(RelayUnreachable):
        started(world, collector_with(world, away), folder, 2)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_upload_that_came_in_after_the_wait_counts(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The relay takes uploads until it releases; what it said of their number before may be one too few."""
    waiting = RelayAggregator.wait

    def early(self: RelayAggregator, *args: Any, **kwargs: Any) -> RoundStatus:
        status = waiting(self, *args, **kwargs)
        return status.model_copy(update={"uploads": CLIENTS - 1})

    monkeypatch.setattr(RelayAggregator, "wait", early)
    last = world.run()
    monkeypatch.undo()
    assert torch.equal(last.state.weights, reference(tmp_path))
    assert [event.cohort for event in last.ledger.events] == [CLIENTS]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_that_is_over_at_the_relay_is_neither_trained_for_nor_charged(world: World) -> None:
    messages: list[Message] = []

    class Keeping(InProcessGrid):
        def send_and_receive(self, messages_: Any, *, timeout: float | None = None) -> Any:
            messages[:] = messages_  # those that were sent last
            return super().send_and_receive(messages, timeout=timeout)

    trained: list[int] = []
    world.before_upload = trained.append
    grid = world.grid()
    grid.__class__ = type("Kept", (Keeping, type(grid)), {})
    LdpStrategy(config_of(), collector=world.collector()).start(grid, start_arrays(), 1, timeout=100.0)
    assert len(trained) == CLIENTS
    again = list(InProcessGrid.send_and_receive(grid, messages))
    assert [reply.error.reason for reply in again] == ["declined: the round was charged before"] * CLIENTS
    assert len(trained) == CLIENTS
    assert world.charges() == [1] * CLIENTS


@pytest.mark.parametrize("run", ["../../admin/x?y=", "a/b", "", "r" * 65, "run\n"])
def test_the_name_of_a_run_is_no_path_at_the_relay(run: str, world: World) -> None:
    terms = replace(terms_of(), run=run, transport="relay", key=KEY.public_key().public_bytes_raw(), asked=CLIENTS)
    grid = InProcessGrid(LdpClientApp(shift, node=world.node), CLIENTS)
    (reply,) = grid.send_and_receive([instruction(terms)])
    assert reply.error.reason == "failed"
    assert world.wire.replies == []


def test_what_the_policy_refuses_is_not_asked_of_the_relay(world: World) -> None:
    terms = replace(terms_of(), config=config_of("mechanism.name=piecewise"), transport="relay", key=bytes(32), asked=CLIENTS)
    grid = InProcessGrid(LdpClientApp(shift, node=world.node), CLIENTS)
    (reply,) = grid.send_and_receive([instruction(terms)])
    assert reply.error.reason == "declined: its policy's mechanisms does not allow the round"
    assert world.wire.replies == []
