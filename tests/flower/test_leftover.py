"""What a stopped run leaves open is named, and closed at the relay; the run can go on all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flower_parts import app_of, config_of, start_arrays
from relayed_parts import CLIENTS, World, world_in

from conftest import CommandLine
from ldpfl import ConfigError
from ldpfl.deploy import stopped_runs
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpStrategy

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """Stands for ``flwr stop``: nothing in between handles it."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


def stopped_in_round_2(world: World, folder: RunFolder) -> None:
    """Run a round, and stop in the next when three of five clients have uploaded."""

    def stop(client: int) -> None:
        if client == 3 and (folder.path / "metrics.jsonl").exists():
            raise Killed

    world.before_upload = stop
    with pytest.raises(Killed):
        world.run(3, folder=folder)
    world.before_upload = lambda client: None


@pytest.mark.thorough
def test_a_round_that_was_begun_is_named_cancelled_and_counted_as_lost(world: World) -> None:
    folder = RunFolder(world.folder / "run")
    stopped_in_round_2(world, folder)
    left = stopped_runs.read_left_open(folder)
    assert (left.finished, left.begun, left.asked, left.over_relay) == (1, 2, CLIENTS, True)
    relay = world.collector().relay
    said = "\n".join([*stopped_runs.progress_lines(left), *stopped_runs.relay_lines(relay, left, folder.path)])
    assert "round 2 was begun with 5 nodes and is not finished" in said
    assert (
        "round 2 at the relay is open, with 3 uploads so far; it releases the round from 3 uploads on; nodes told to train may still upload"
        in said
    )
    assert "left-open" in said
    assert stopped_runs.cancel_at_relay(relay, left) == [
        "the relay has deleted what it held of round 2. The reports of round 2 are lost, and stay charged"
    ]
    assert relay.round_status(left.run, 2).state == "gone"
    assert stopped_runs.cancel_at_relay(relay, left) == ["the relay has no data of this run: there was nothing to cancel"]
    assert stopped_runs.relay_lines(relay, left, folder.path) == [
        "the relay has no data of this run",
        "so the reports of round 2 are lost. To go on with the next round: submit the same app again, with the same folder",
    ]
    last = world.run(3, folder=folder)
    assert [metrics.clients for metrics in last.history] == [CLIENTS, 0, CLIENTS]
    assert [event.round for event in last.ledger.events] == [1, 2, 3]
    after = stopped_runs.read_left_open(folder)
    assert (after.finished, after.begun) == (3, None)
    assert stopped_runs.relay_lines(relay, after, folder.path) == ["the relay has no data of this run"]


@pytest.mark.thorough
def test_records_of_a_finished_round_that_were_not_acknowledged_are_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(world.folder / "run")

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("ldpfl.flower.relay_collection.RelayCollector.delete_round", killed)
        with pytest.raises(Killed):
            world.run(1, folder=folder)
    left, relay = stopped_runs.read_left_open(folder), world.collector().relay
    assert left.begun is None
    assert stopped_runs.relay_lines(relay, left, folder.path) == [
        "the relay has released round 1, made of 5 uploads",
        "the run folder already has this round, so the relay's copy is not needed. To delete it there: "
        f"ldpfl deploy left-open {folder.path} --cancel",
    ]
    assert stopped_runs.cancel_at_relay(relay, left) == ["the relay has deleted what it held of round 1"]


def test_a_run_without_a_relay_and_one_under_way(ldpfl: CommandLine) -> None:
    folder = RunFolder(Path("run"))
    with pytest.raises(ConfigError, match="holds no run"):
        stopped_runs.read_left_open(folder)
    LdpStrategy(config_of(), folder=folder).start(InProcessGrid(app_of(), 3), start_arrays(), 2)
    outcome = ldpfl("deploy", "left-open", folder.path)
    assert outcome.code == 0
    assert outcome.out.rstrip().endswith("2 of 2 rounds finished")
    LdpStrategy(config_of("training.rounds=2"), folder=RunFolder(Path("more"))).start(InProcessGrid(app_of(), 3), start_arrays(), 3)
    assert ldpfl("deploy", "left-open", "more").out.rstrip().endswith("3 rounds finished, more than the 2 of the config")
    assert "the run's reports go over no relay, so there is nothing to cancel" in ldpfl("deploy", "left-open", folder.path, "--cancel").out
    with folder.locked():
        said = ldpfl.refused("deploy", "left-open", folder.path)
        assert "a ServerApp still works in run" in said
        assert "stopping, which takes up to 60 s after flwr stop" in said
