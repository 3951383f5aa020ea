"""Every round of a simulation leaves its event: who took part, how often, and what was released."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ldpfl.data import Dataset
from ldpfl.errors import DataError
from ldpfl.privacy import BinaryRelease, UnprotectedRelease
from ldpfl.privacy.authors import released
from ldpfl.server import Checkpoint, round_event, sample_cohort
from ldpfl.simulation import simulate
from simulated import CLIENTS, federation_of

ROUNDS = 6


def joined_by_hand(seed: int, clients: int, fraction: float) -> list[int]:
    """How often the client that came most often had come, after each round."""
    cohorts = [sample_cohort(seed, number, clients, fraction) for number in range(1, ROUNDS + 1)]
    return [int(np.bincount(np.concatenate(cohorts[:number]), minlength=clients).max()) for number in range(1, ROUNDS + 1)]


@pytest.mark.parametrize(("fraction", "cohort"), [(1.0, 9), (0.3, 3), (0.01, 1)])
def test_each_round_is_charged_with_its_cohort_and_who_came_most_often(fraction: float, cohort: int, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(replace(federation, participation=replace(federation.participation, fraction=fraction)), start, ROUNDS)
    events = last.ledger.events
    assert [event.round for event in events] == list(range(1, ROUNDS + 1))
    assert {(event.cohort, event.population) for event in events} == {(cohort, CLIENTS)}
    assert {event.sampling for event in events} == {"everyone" if fraction == 1 else "visible"}
    assert [event.joined for event in events] == joined_by_hand(federation.seed, CLIENTS, fraction)
    assert {event.release for event in events} == {released(federation.mechanism, start.state.ranges)}
    assert {event.release.units for event in events} == {federation.task.layout.dimension}


@pytest.mark.thorough_except("5")
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_after_a_resume_the_ledger_goes_on_as_if_nothing_had_happened(stop: int, tiny_task: Dataset, tmp_path: Path) -> None:
    """How often each client joined is not saved: it is counted anew from the seed."""
    federation, start = federation_of(tiny_task)
    federation = replace(federation, participation=replace(federation.participation, fraction=0.3))
    *_, whole = simulate(federation, start, ROUNDS)
    *_, halfway = simulate(federation, start, stop)
    halfway.save(tmp_path / "checkpoint")
    loaded = Checkpoint.load(tmp_path / "checkpoint")
    assert loaded.ledger == halfway.ledger
    assert len(loaded.ledger.events) == stop
    *_, resumed = simulate(federation, loaded, ROUNDS)
    assert resumed.ledger == whole.ledger


def test_the_channel_reaches_the_ledger_and_changes_nothing_else(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, shuffled = simulate(federation, start, 1)
    *_, delayed = simulate(replace(federation, participation=replace(federation.participation, channel="random-delay")), start, 1)
    assert shuffled.ledger.events[0].channel == "ideal-shuffler"
    assert delayed.ledger.events == (replace(shuffled.ledger.events[0], channel="random-delay"),)
    assert delayed.state.weights.equal(shuffled.state.weights)


def test_a_run_without_noise_confesses_it(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, mechanism="none")
    *_, last = simulate(federation, start, 1)
    assert isinstance(last.ledger.events[0].release, UnprotectedRelease)


def test_a_cohort_that_is_smaller_than_the_population_is_visible() -> None:
    """The server draws it, so it is no secret, also where clients dropped out of it."""
    release = BinaryRelease("duchi", 1.0, 5)
    event = round_event(3, release, 4, np.array([1, 0, 2, 1, 1]), "direct")
    assert (event.cohort, event.population, event.joined, event.sampling, event.rate) == (4, 5, 2, "visible", 1.0)
    assert round_event(3, release, 5, np.array([3, 3, 3, 3, 3]), "direct").sampling == "everyone"


@pytest.mark.parametrize("damage", ['"kind": "binary"', '"round": 2'])
def test_a_checkpoint_with_a_damaged_ledger_is_refused_by_name(damage: str, tiny_task: Dataset, tmp_path: Path) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(federation, start, 2)
    path = tmp_path / "checkpoint.safetensors"
    last.save(path)
    log = path.with_suffix(".jsonl")
    content = log.read_text(encoding="utf-8")
    assert damage in content
    log.write_text(content.replace(damage, damage.replace("binary", "trinar").replace("2", "0")), encoding="utf-8")
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged: checkpoint\.jsonl beside it was changed"):
        Checkpoint.load(path)
