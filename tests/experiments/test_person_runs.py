"""Runs on a table in which persons have several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ldpfl
from ldpfl import ConfigError
from ldpfl.experiments.build import build
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import Given, load_dataset
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.methods import methods
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.gradients import RecordGradientTrainer

HOSPITALS = 2


def table(persons: int = 80, seed: int = 0) -> pd.DataFrame:
    """One to twenty rows a person, whose values and outcomes go together; a person is at one hospital, but for one who is at both."""
    generator = np.random.default_rng(seed)
    who = np.repeat(np.arange(persons), generator.integers(1, 21, persons))
    usual = generator.normal(size=(persons, 3))
    labs = 0.8 * usual[who] + 0.6 * generator.normal(size=(len(who), 3))
    ill = labs @ np.array([1.2, -1.0, 0.8]) + generator.normal(size=persons)[who]
    frame = pd.DataFrame(50 + 10 * labs, columns=["sodium", "urea", "glucose"])
    frame["patient"], frame["hospital"] = [f"P{number}" for number in who], who % HOSPITALS
    frame["outcome"] = np.where(generator.random(len(who)) < 1 / (1 + np.exp(0.7 - ill)), "yes", "no")
    frame.loc[np.flatnonzero(who == who.max())[:1], "hospital"] = 1 - who.max() % HOSPITALS
    return frame.sample(frac=1, random_state=seed).reset_index(drop=True)


def config_of(*more: str) -> RunConfig:
    given = ['data.name="given"', "data.target=outcome", "data.person=patient", "privacy.target_epsilon=4.0", "training.rounds=4"]
    return load_recipe("own", [*given, *more])


def federation_of(frame: pd.DataFrame, *more: str) -> Federation:
    given = Given(frame)
    config = settled(config_of(*more), given)
    return build(config, load_dataset(config, None, given=given), torch.device("cpu"))[0]


def run(frame: pd.DataFrame, **more: Any) -> ldpfl.RunResult:
    plain = {"data": frame, "target": "outcome", "client": "hospital", "target_epsilon": 4.0, "baseline": False, "progress": False}
    return ldpfl.run(**{**plain, **more})


def test_clients_have_persons_and_each_has_all_rows_of_one_name() -> None:
    frame = table()
    federation = federation_of(frame, "data.client=hospital")
    assert isinstance(federation.trainer, RecordGradientTrainer)
    persons = federation.trainer.persons
    assert persons is not None
    assert sorted(np.concatenate(federation.samples).tolist()) == list(range(len(persons)))
    assert sum(own.size for own in federation.samples) in (64, 65)  # four of five of 80, one of whom may count as two
    assert int(persons.counts.sum()) + len(federation.evaluation) == len(frame)
    assert federation.mechanism.release(federation_ranges(federation)).unit == "person"


def federation_ranges(federation: Federation) -> ldpfl.LayerRanges:
    return ldpfl.LayerRanges(torch.tensor(0.0), torch.tensor(1.0), federation.task.layout.sizes)


@pytest.mark.parametrize("scheme", ["iid", "quantity"])
def test_persons_are_dealt_out_whole_by_their_number_alone(scheme: str) -> None:
    """Another person's rows in the place of one: everybody else stays where he was."""
    frame = table()
    changed = frame[~((frame.patient == frame.patient[0]) & (frame.index > 0))].reset_index(drop=True)
    parts = [federation_of(one, f"data.partition={scheme}", "clients.count=3").samples for one in (frame, changed)]
    assert all(np.array_equal(one, other) for one, other in zip(*parts, strict=True))
    assert len(changed) < len(frame)
    with pytest.raises(ConfigError, match="protects single records"):
        federation_of(frame, "data.partition=labels", "clients.count=3")


def test_a_partition_of_one_s_own_deals_persons_out(tmp_path: Path) -> None:
    (tmp_path / "deal.py").write_text("def deal(samples, clients, seed):\n    return [place % clients for place in range(samples)]\n")
    federation = federation_of(table(), f"data.partition={tmp_path}/deal.py:deal", "clients.count=3")
    assert [own.tolist()[:2] for own in federation.samples] == [[0, 3], [1, 4], [2, 5]]


def test_mechanisms_that_protect_clients_take_rows_as_they_are() -> None:
    frame = table()
    own = ["data.client=hospital", "mechanism.name=duchi", "mechanism.perturbed=update", "data.scaling=bounds", "ranges.radius=0.1"]
    bounds = ["data.bounds.sodium=[0, 100]", "data.bounds.urea=[0, 100]", "data.bounds.glucose=[0, 100]", "privacy.target_epsilon=off"]
    plain = ["mechanism.epsilon=1", "training.server_learning_rate=1", "training.server_weight_decay=0"]
    federation = federation_of(frame, *own, *bounds, *plain)
    assert sum(own.size for own in federation.samples) == len(federation.task.data)
    assert federation.mechanism.release(federation_ranges(federation)).unit == "weight"
    with pytest.raises(ConfigError, match="whatever the labels of their rows"):
        federation_of(frame, *own[1:], *bounds, *plain, "data.partition=labels", "clients.count=3")


@pytest.mark.slow
def test_a_run_leaves_the_ledger_that_was_planned_and_says_what_it_protects(tmp_path: Path) -> None:
    frame = table()
    result = run(frame, person="patient", rounds=4, seed=3, folder=tmp_path / "run")
    given = Given(frame)
    assert planned_ledger(settled(config_of("data.client=hospital"), given), given) == result.ledger
    row = result.privacy.find("local", "run")
    assert row is not None
    assert (row.unit, row.epsilon <= 4.0, row.epsilon > 3.9) == ("person", True, True)
    kept = RunFolder(tmp_path / "run")
    figures = kept.result()
    assert figures is not None
    said = methods(kept.config(), figures, kept.ledger(), result.privacy, kept.kind())
    assert f"The clients held {figures['records']} training persons in all" in said
    assert "bounds the L2 norm of the mean gradient of each person's records" in said
    assert figures["records"] < len(frame) / 5


def test_a_run_that_goes_on_ends_in_the_same_model() -> None:
    """Whose turn it is follows from the number of the round, and from nothing that a checkpoint would lack."""
    given = Given(table())
    config = settled(config_of("data.client=hospital", "data.person_rows=3"), given)
    federation, start = build(config, load_dataset(config, None, given=given), torch.device("cpu"))
    *_, whole = simulate(federation, start, 4)
    *_, half = simulate(federation, start, 2)
    *_, resumed = simulate(federation, half, 4)
    assert torch.equal(whole.state.weights, resumed.state.weights)
    assert not torch.equal(half.state.weights, resumed.state.weights)


@pytest.mark.slow
def test_protecting_persons_costs_little_where_there_are_many() -> None:
    """Persons with 1 to 20 rows, epsilon 4: AUROC within 0.01 of what protecting single rows gives."""
    frame = table(2500)
    by_person = run(frame, person="patient", seed=1)
    assert by_person.privacy.protected == "person"
    assert by_person.score > 0.75
    assert by_person.score > run(frame, seed=1).score - 0.01
