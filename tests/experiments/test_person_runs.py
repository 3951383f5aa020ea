"""Runs on a table in which persons have several rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ldpfl
from ldpfl import ConfigError
from ldpfl.data.persons import uniform_by_name
from ldpfl.experiments.build import build
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import CallerObjects, load_dataset
from ldpfl.experiments.planned_ledger import check_settings_fit_together, planned_ledger
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_config import check_same_protected
from ldpfl.mechanisms.record_clipping import STEPS
from ldpfl.report.methods import methods
from ldpfl.simulation import BatchSchedule, Federation, simulate
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.local_steps import full_batch

HOSPITALS = 2

BOUNDED = (
    "data.columns=['sodium','urea','glucose']",
    "data.bounds={sodium=[0,100],urea=[0,100],glucose=[0,100]}",
    "data.scaling=bounds",
    "data.class_shares=[0.6,0.4]",
)
"""Nothing is measured: what training starts from does not depend on rows."""


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
    given = CallerObjects(frame)
    config = resolve_settings(config_of(*more), given)
    return build(config, load_dataset(config, None, caller_objects=given), torch.device("cpu"))[0]


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
    assert 50 < sum(own.size for own in federation.samples) < 76  # about four of five of 80, one of whom may count as two
    assert int(persons.counts.sum()) + len(federation.evaluation.samples) == len(frame)
    assert federation.mechanism.release(federation_ranges(federation)).unit == "person"


def federation_ranges(federation: Federation) -> ldpfl.LayerRanges:
    return ldpfl.LayerRanges(torch.tensor(0.0), torch.tensor(1.0), federation.task.layout.sizes)


@pytest.mark.thorough_except("iid")
@pytest.mark.parametrize("scheme", ["iid", "quantity"])
def test_persons_are_dealt_out_whole_by_their_names_alone(scheme: str) -> None:
    """Rows in another order: everybody is where he was, at the same client and in the same place of the computation."""
    frame = table()
    changed = frame.sample(frac=1, random_state=9).reset_index(drop=True)
    found, places = [], []
    for one in (frame, changed):
        federation = federation_of(one, *BOUNDED, f"data.partition={scheme}", "data.alpha=5", "clients.count=3")
        trainer = federation.trainer
        assert isinstance(trainer, RecordGradientTrainer)
        assert trainer.persons is not None
        rows = [trainer.persons.all_rows_of(own)[0] for own in federation.samples]
        places.append([(trainer.persons.counts[own].tolist(), trainer.persons.lanes[own].tolist()) for own in federation.samples])
        found.append([sorted(map(tuple, federation.task.data.tensor[torch.from_numpy(own)].tolist())) for own in rows])
    assert [len(own) for own in found[0]] == [len(own) for own in found[1]]
    assert found[0] == found[1]
    assert places[0] == places[1]
    with pytest.raises(ConfigError, match="protects single records"):
        federation_of(frame, "data.partition=labels", "clients.count=3")


def test_a_partition_of_one_s_own_is_for_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "deal.py").write_text("def deal(samples, clients, seed):\n    return [place % clients for place in range(samples)]\n")
    expected = (
        r"data\.partition is .*, but with data\.person set all rows of a person go to one client: set data\.partition to iid or quantity"
    )
    with pytest.raises(ConfigError, match=expected):
        federation_of(table(), f"data.partition={tmp_path}/deal.py:deal", "clients.count=3")


def sums_of(frame: pd.DataFrame, *more: str) -> torch.Tensor:
    """Return the sum of each client, (K, d), in clipping norms."""
    federation = federation_of(frame, *BOUNDED, "mechanism.clip_norm=0.5", *more)
    weights = torch.zeros(federation.task.layout.dimension)
    schedule = whole_schedule(federation)
    return federation.trainer.train(weights, schedule).double() / STEPS


def whole_schedule(federation: Federation) -> BatchSchedule:
    largest = max(own.size for own in federation.samples)
    return full_batch(list(federation.samples), largest)


@pytest.mark.thorough_except("more1")
@pytest.mark.parametrize("more", [["data.client=hospital"], ["data.client=hospital", "data.evaluate_on=holdout"], ["clients.count=2"]])
def test_another_person_in_the_place_of_one_moves_one_client_s_sum_by_two_norms_at_most(more: list[str]) -> None:
    """Also where the first of the two is known at other clients as well, and has its first row here."""
    frame = table()
    train = [name for name in dict.fromkeys(frame.patient) if is_trained_on(name)]
    at_both = frame[frame.patient == train[0]].head(1).assign(hospital=lambda rows: 1 - rows.hospital)
    before = pd.concat([at_both, frame], ignore_index=True)
    others = [f"Q{number}" for number in range(200) if is_trained_on(f"Q{number}")]
    here = before.hospital == at_both.hospital.iloc[0] if "data.client=hospital" in more else pd.Series(True, index=before.index)
    moved = before.patient.eq(train[0]) & here
    if "clients.count=2" in more:
        owner = uniform_by_name([train[0], *others], "client 0") < 0.5
        others = [name for name, same in zip(others, owner[1:] == owner[0], strict=True) if same]
    after = before.assign(patient=before.patient.where(~moved, others[0]), outcome=before.outcome.where(~moved, "yes"))
    for places in (after, pd.concat([after[~moved], after[moved]], ignore_index=True)):  # in the same places, or at the end
        distances = (sums_of(before, *more) - sums_of(places, *more)).norm(dim=1)
        assert sorted(distances.tolist())[0] == 0
        assert distances.max() <= 2


def is_trained_on(name: str) -> bool:
    return bool(uniform_by_name([name], "test") >= 0.2 and uniform_by_name([name], "holdout") >= 0.1)


def test_mechanisms_that_protect_clients_take_rows_as_they_are() -> None:
    frame = table()
    own = ["data.client=hospital", "mechanism.name=duchi", "mechanism.perturbed=update", "data.scaling=bounds", "ranges.radius=0.1"]
    bounds = ["data.bounds.sodium=[0, 100]", "data.bounds.urea=[0, 100]", "data.bounds.glucose=[0, 100]", "privacy.target_epsilon=off"]
    plain = ["mechanism.epsilon=1", "training.server_learning_rate=1", "training.server_weight_decay=0"]
    federation = federation_of(frame, *own, *bounds, *plain)
    assert sum(own.size for own in federation.samples) == len(federation.task.data)
    assert federation.mechanism.release(federation_ranges(federation)).unit == "weight"
    with pytest.raises(
        ConfigError, match=r"data\.partition is 'labels', .*but with data\.person set all rows of a person go to one client"
    ):
        federation_of(frame, *own[1:], *bounds, *plain, "data.partition=labels", "clients.count=3")


@pytest.mark.slow
def test_a_run_leaves_the_ledger_that_was_planned_and_says_what_it_protects(tmp_path: Path) -> None:
    frame = table()
    result = run(frame, person="patient", rounds=4, seed=3, folder=tmp_path / "run")
    given = CallerObjects(frame)
    assert planned_ledger(resolve_settings(config_of("data.client=hospital"), given), given) == result.ledger
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
    given = CallerObjects(table())
    config = resolve_settings(config_of("data.client=hospital", "data.person_rows=3"), given)
    federation, start = build(config, load_dataset(config, None, caller_objects=given), torch.device("cpu"))
    *_, whole = simulate(federation, start, 4)
    *_, half = simulate(federation, start, 2)
    *_, resumed = simulate(federation, half, 4)
    assert torch.equal(whole.state.weights, resumed.state.weights)
    assert not torch.equal(half.state.weights, resumed.state.weights)


@pytest.mark.slow
@pytest.mark.thorough
def test_protecting_persons_costs_little_where_there_are_many() -> None:
    """Persons with 1 to 20 rows, epsilon 4: AUROC within 0.01 of what protecting single rows gives."""
    frame = table(2500)
    by_person = run(frame, person="patient", seed=1)
    assert by_person.privacy.protected == "person"
    assert by_person.score > 0.75
    assert by_person.score > run(frame, seed=1).score - 0.01


def test_persons_are_named_by_a_column_of_a_table_or_not_at_all() -> None:
    """Else a ledger would say that persons are protected, where built-in images or a caller's tensors are protected one by one."""
    built_in = load_recipe("quickstart", ["data.person=patient", "mechanism.name=dp-sgd", "mechanism.perturbed=gradient"])
    for refused in (ldpfl.run, ldpfl.account, check_settings_fit_together, lambda config: load_dataset(config, None)):
        with pytest.raises(
            ConfigError, match=r"data\.person names the column 'patient', but 'mnist-5k' is not a table: leave data\.person out"
        ):
            refused(built_in)
    config = config_of()
    task = replace(load_dataset(config, None, caller_objects=CallerObjects(table())), persons=None)
    with pytest.raises(ConfigError, match=r"data\.person is 'patient', but the data have no such column"):
        build(config, task, torch.device("cpu"))


def with_doctors() -> pd.DataFrame:
    frame = table()
    return frame.assign(doctor="D" + frame["patient"].str[1:].astype(int).floordiv(3).astype(str))


@pytest.mark.thorough
@pytest.mark.parametrize("varied", [{"data.person": ["patient", "doctor"]}, {"data.client": ["", "hospital"]}])
def test_runs_that_protect_different_persons_have_no_guarantee_together(varied: dict[str, list[str]], tmp_path: Path) -> None:
    person = [] if "data.person" in varied else ["data.person=patient"]
    settings = ["data.target=outcome", *person, *BOUNDED, "shuffling.channel=secure-sum"]
    how: dict[str, Any] = {"data": with_doctors(), "axes": varied, "settings": settings}
    with pytest.raises(ConfigError, match="protect different persons or clients"):
        ldpfl.sweep(folder=tmp_path / "sweep", **how)
    with pytest.raises(ConfigError, match="protect different persons or clients"):
        ldpfl.tune(folder=tmp_path / "tuning", trials=2, target_epsilon=4, **how)
    assert not list(tmp_path.rglob("ledger.json"))


def planned(**data: str) -> RunConfig:
    named = {f"data.{key}": value for key, value in data.items()}
    kind = {"mechanism.name": "dp-fedavg", "mechanism.perturbed": "update", "mechanism.clip_norm": 1.0}
    if data.get("person"):
        kind = {"mechanism.name": "dp-sgd", "mechanism.perturbed": "gradient", "mechanism.clip_norm": 1.0}
    return ldpfl.configure("own", settings={"data.path": "t.csv", "data.target": "outcome", **named, **kind})


@pytest.mark.parametrize(
    ("runs", "is_joint"),
    [
        ([{"client": "hospital"}, {"client": "hospital"}], True),
        ([{"client": "hospital"}, {"client": "patient"}], False),
        ([{"client": "hospital"}, {}], False),
        ([{}, {}], True),
        ([{"person": "patient", "client": "hospital"}, {"client": "hospital"}], True),
        ([{"person": "patient", "client": "hospital"}, {"client": "ward"}], False),
        ([{"person": "patient"}, {"client": "ward"}], False),
        ([{"person": "patient"}, {}], False),
        ([{"person": "patient", "client": "hospital"}, {"person": "patient", "client": "ward"}], False),
    ],
)
def test_runs_have_a_joint_guarantee_if_the_same_columns_name_persons_and_clients(runs: list[dict[str, str]], is_joint: bool) -> None:
    configs = [planned(**run) for run in runs]
    if is_joint:
        check_same_protected(configs)
        return
    with pytest.raises(ConfigError, match="protect different persons or clients"):
        check_same_protected(configs)


@pytest.mark.slow
@pytest.mark.thorough
def test_ledgers_of_runs_that_protect_different_persons_are_not_added_up(tmp_path: Path) -> None:
    for person in ("patient", "doctor"):
        settings = ["data.target=outcome", f"data.person={person}", "data.client=hospital", "training.rounds=1", *BOUNDED]
        ldpfl.run(data=with_doctors(), settings=settings, folder=tmp_path / person, target_epsilon=2, progress=False)
        assert ldpfl.account(tmp_path / person).protected == "person"
    with pytest.raises(ConfigError, match=r"protect different persons or clients, .* 'patient' at 'hospital'; 'doctor' at 'hospital'"):
        ldpfl.account(tmp_path / "patient", tmp_path / "doctor")
    with pytest.raises(ConfigError, match="protect different persons or clients"):
        ldpfl.account(tmp_path / "patient" / "ledger.json", tmp_path / "doctor" / "ledger.json")
