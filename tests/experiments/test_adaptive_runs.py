"""Runs whose clipping norm follows a quantile: the guarantee of a fixed norm, the same bytes however they run, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import CommandLine
from ldpfl import ConfigError, audit_run, certify, verify
from ldpfl.attacks.canary import FEWEST_TRIALS
from ldpfl.data import Dataset
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import build, mechanism_of
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.planned_ledger import initial_weights_and_ranges, planned_ledger
from ldpfl.flower.ignored_settings import setting_notes
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.accounting import account
from ldpfl.server import Checkpoint
from ldpfl.simulation import simulate
from ldpfl.simulation.workers import Processes

RANGES = LayerRanges(0.0, 1.0, (2000,))
SHARED = ["model.name=linear", "clients.count=24", "training.rounds=4", "shuffling.channel=secure-sum"]
ADAPTIVE = ["clipping.target_quantile=0.5", "clipping.learning_rate=1.0"]
CLIENTS = [*SHARED, "mechanism.name=dp-fedavg", "mechanism.clip_norm=0.01", "mechanism.noise_multiplier=1.0"]
RECORDS = [*SHARED, "mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.clip_norm=0.01", "mechanism.noise_multiplier=1.0"]
UNITS = pytest.mark.parametrize("unit", [CLIENTS, RECORDS, [*RECORDS, "mechanism.sample_rate=0.5"]], ids=["clients", "records", "sampled"])


def config_of(*overrides: str) -> RunConfig:
    return parse_config("", overrides, origin="test")


def run(task: Dataset, *overrides: str, rounds: int = 4) -> Checkpoint:
    federation, start = build(config_of(*overrides), task, torch.device("cpu"))
    *_, last = simulate(federation, start, rounds)
    return last


def norms(checkpoint: Checkpoint) -> list[float]:
    return [max(metrics.radius.values()) for metrics in checkpoint.history]


@pytest.mark.thorough_except("records")
@UNITS
def test_a_norm_that_is_too_small_grows_and_one_that_is_too_large_shrinks(unit: list[str], tiny_task: Dataset) -> None:
    """Of 24 clients, noise in a share is 0.4 for clients and a tenth of that for records; steps of 0.5 in four rounds are 2 in log C."""
    quiet = [*unit, *ADAPTIVE, "mechanism.noise_multiplier=0.1"]
    small, large = (run(tiny_task, *quiet, f"mechanism.clip_norm={norm}") for norm in (1e-4, 1e4))
    assert norms(small) == sorted(norms(small))
    assert norms(small)[-1] > 2e-4
    assert norms(large) == sorted(norms(large), reverse=True)
    assert norms(large)[-1] < 5e3
    if small.history[0].clipped_records is not None:
        assert (small.history[0].clipped_records, large.history[0].clipped_records) == (1.0, 0.0)


@pytest.mark.thorough_except("records")
@UNITS
def test_the_ledger_is_that_of_a_fixed_norm_and_that_of_the_plan(unit: list[str], tiny_task: Dataset) -> None:
    adaptive, fixed = run(tiny_task, *unit, *ADAPTIVE), run(tiny_task, *unit)
    assert adaptive.ledger == fixed.ledger
    assert {metrics.uplink_bytes_per_client for metrics in adaptive.history} == {fixed.history[0].uplink_bytes_per_client + 4}
    named = [*unit, "data.name=mnist-5k"]
    planned = [account(planned_ledger(config_of(*named, *more))).to_dict() for more in (ADAPTIVE, [])]
    assert planned[0] == planned[1]


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    pool = Processes(2)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("adaptive processes")  # which take seconds to start
@UNITS
def test_two_processes_end_in_the_bytes_of_one(unit: list[str], tiny_task: Dataset, two: Processes) -> None:
    federation, start = build(config_of(*unit, *ADAPTIVE), tiny_task, torch.device("cpu"))
    *_, together = simulate(federation, start, 3, workers=two)
    *_, alone = simulate(federation, start, 3)
    assert torch.equal(alone.state.weights, together.state.weights)
    assert torch.equal(alone.state.ranges.radius, together.state.ranges.radius)
    assert [replace(one, seconds=0.0) for one in alone.history] == [replace(one, seconds=0.0) for one in together.history]


@pytest.mark.thorough_for("clients")
@UNITS
def test_a_run_goes_on_from_a_checkpoint_with_the_norm_that_it_had(unit: list[str], tiny_task: Dataset, tmp_path: Path) -> None:
    federation, start = build(config_of(*unit, *ADAPTIVE), tiny_task, torch.device("cpu"))
    halfway, *_, last = list(simulate(federation, start, 3))
    halfway.save(tmp_path / "checkpoint.safetensors")
    *_, resumed = simulate(federation, Checkpoint.load(tmp_path / "checkpoint.safetensors"), 3)
    assert torch.equal(resumed.state.weights, last.state.weights)
    assert norms(resumed) == norms(last)


@pytest.mark.slow
def test_evaluation_at_clients_keeps_a_norm_of_its_own(tiny_task: Dataset) -> None:
    evaluated = [*ADAPTIVE, "evaluation.epsilon=1.0", "evaluation.share=0.3", "evaluation.every=2"]
    for unit in (CLIENTS, RECORDS):
        last = run(tiny_task, *unit, *evaluated)
        assert last.history[-1].at_clients is not None
        assert len(set(norms(last))) == 4


@pytest.mark.slow
@pytest.mark.thorough_except("records")
@pytest.mark.parametrize("unit", [CLIENTS, RECORDS], ids=["clients", "records"])
def test_a_certificate_of_such_a_run_is_confirmed(unit: list[str], ldpfl: CommandLine, tiny_data: Path, tmp_path: Path) -> None:
    changes = [part for change in (*unit, *ADAPTIVE, "data.name=mnist") for part in ("--set", change)]
    done = ldpfl("run", "--data-dir", str(tiny_data), "--out", str(tmp_path / "run"), "--no-baseline", "--workers", "1", *changes)
    assert done.code == 0, done.err
    assert verify(certify(tmp_path / "run"), ledger=tmp_path / "run").holds
    if unit is RECORDS:
        with pytest.raises(ConfigError, match=r"clipping\.target_quantile cannot be audited"):
            audit_run(tmp_path / "run", trials=FEWEST_TRIALS, data_dir=tiny_data)
    else:
        assert audit_run(tmp_path / "run", trials=FEWEST_TRIALS, data_dir=tiny_data).clients == 24
    layer = next(iter(json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["radius"].values()))
    assert layer != 0.01


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["mechanism.name=duchi"], "has no clipping norm that could be adapted"),
        (["mechanism.name=dp-sgd", "training.method=least-squares", "mechanism.perturbed=gradient"], "clips no gradients"),
        ([*RECORDS, "training.server_learning_rate=auto"], "give training.server_learning_rate a number"),
        ([*RECORDS, "training.compile=on"], "clipping.target_quantile"),
    ],
)
def test_what_has_no_norm_to_adapt_is_refused_before_a_run(changes: list[str], expected: str, tiny_task: Dataset) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(config_of(*changes, *ADAPTIVE), tiny_task, torch.device("cpu"))


def test_records_are_refused_on_flower_and_clients_are_not() -> None:
    with pytest.raises(ConfigError, match=r"mechanism 'dp-sgd' supports in simulations but not on Flower"):
        deployable_mechanism(config_of(*RECORDS, "mechanism.records=10", *ADAPTIVE), RANGES)
    assert any("clipping.target_quantile = 0.5: refused" in line for line in setting_notes(config_of(*RECORDS, *ADAPTIVE), at_nodes=False))
    config = config_of(*CLIENTS, *ADAPTIVE)
    assert not any("clipping" in line for line in setting_notes(config, at_nodes=False))
    assert deployable_mechanism(config, RANGES) == mechanism_of(config, RANGES)


def test_the_first_norm_is_the_mechanisms() -> None:
    _, ranges = initial_weights_and_ranges(config_of(*CLIENTS, *ADAPTIVE, "data.name=mnist-5k"))
    assert set(ranges.radii.tolist()) == {0.01}
