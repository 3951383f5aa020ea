"""Relay and aggregator killed in the middle of a round: what is learned is the mean of the reports that arrived, each once."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from faults_parts import CONFIG, Halfway, Relay, World, everyone, expected

from ldpfl.experiments.run_folder import RunFolder

pytestmark = pytest.mark.xdist_group("faults")  # whose processes fork from one that has PyTorch loaded


def same(weights: torch.Tensor, reference: torch.Tensor) -> bool:
    """One report more, less or twice would move a weight by more than 0.05."""
    return torch.allclose(weights, reference, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_relay_killed_in_uploads_and_in_the_release(tmp_path: Path) -> None:
    """Killed in two uploads, and twice in the release: before records have their parts, and when uploads are deleted."""
    with Relay(tmp_path, dies=[0, 0, 1, 2, 0]) as relay:
        world = World.new(tmp_path, relay)
        world.transports = {client: lambda: Halfway(relay.kill) for client in (1, 3)}
        last = world.run(1)
        assert relay.starts == 5  # two killed in uploads, two in the release
        assert same(last.state.weights, expected(everyone(5)))
        assert [event.cohort for event in last.ledger.events] == [5]
        assert world.charges() == [1] * 5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("where", ["ldpfl.flower.round_closing.close_round", "ldpfl.flower.relay_collection.RelayCollector.delete_round"])
def test_an_aggregator_killed_after_it_pulled(where: str, tmp_path: Path) -> None:
    """Killed before its checkpoint, and between this and the acknowledgement; then the relay is killed as well."""
    with Relay(tmp_path) as relay:
        world = World.new(tmp_path, relay)
        running = multiprocessing.get_context("fork").Process(target=_aggregate_and_die, args=(world, where))
        running.start()
        running.join(120)
        assert running.exitcode == -9
        relay.kill()
        last = world.run(2, RunFolder(tmp_path / "run"))
        assert same(last.state.weights, expected(everyone(5), everyone(5)))
        assert [(event.round, event.cohort, event.joined) for event in last.ledger.events] == [(1, 5, 1), (2, 5, 2)]
        assert world.charges() == [2] * 5  # nobody was asked again for the first round
        log = (tmp_path / "relay.log").read_text()
        assert log.count("round_released") == log.count("round_acknowledged") == 2


def _aggregate_and_die(world: World, where: str) -> None:
    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), 9)

    with mock.patch(where, die):
        world.run(2, RunFolder(world.folder / "run"))


@pytest.mark.slow
def test_three_of_ten_clients_gone_in_their_uploads(tmp_path: Path) -> None:
    """What they had sent so far is dropped; the round is that of the other seven."""

    def gone() -> None:
        raise RuntimeError("power cut")

    with Relay(tmp_path) as relay:
        world = World.new(tmp_path, relay, clients=10, min_clients=7)
        world.transports = {client: lambda: Halfway(gone) for client in (0, 4, 8)}
        last = world.run(1)
        assert same(last.state.weights, expected(everyone(10, but=[0, 4, 8])))
        assert [(event.cohort, event.population) for event in last.ledger.events] == [(7, 10)]
        assert world.charges() == [1] * 10  # who was cut off has counted it: half a report may be one
        assert '"uploads": 7, "incomplete": 3' in (tmp_path / "relay.log").read_text()


def test_the_reference_tells_reports_apart() -> None:
    """The comparison above is worth something: without one client, or with one report less, it is another mean."""
    whole = expected(everyone(5))
    fewer = everyone(5)
    fewer[3, 7] = False
    assert not same(expected(everyone(5, but=[4])), whole)
    assert [place for place in range(len(whole)) if abs(expected(fewer)[place] - whole[place]) > 0.05] == [7]
    assert CONFIG.mechanism.name == "duchi"
