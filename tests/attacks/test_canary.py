"""What a server learns of one client from the pool alone, on runs small enough to know the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from conftest import TINY_TOML
from ldpfl import LayerRanges
from ldpfl.attacks import canary
from ldpfl.attacks.canary import CONFIDENCE, FEWEST_TRIALS, RunAudit, audit_run
from ldpfl.data import Dataset, load
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.mechanisms import BitReports
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.server import sample_cohort
from ldpfl.simulation import simulate, train_cohort
from ldpfl.transport.shuffling import ReportPool, mix
from ldpfl.util.randomness import RandomSource

CPU = torch.device("cpu")
CLIENTS, WEIGHTS, EPSILON = 8, 4010, 2.0
"""Of TINY_TOML: 400 pixels and a bias for each of ten classes."""


def run_in(path: Path, data: Path, *overrides: str, rounds: int = 1) -> RunFolder:
    """Run TINY_TOML for some rounds and leave a folder as an interrupted run does."""
    folder, config = RunFolder(path), parse_config(TINY_TOML, overrides, origin="test")
    folder.open(config, resume=False)
    federation, start = build(config, load("mnist", data), CPU)
    for checkpoint in simulate(federation, start, rounds):
        folder.save_round(checkpoint)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> RunFolder:
    return run_in(tmp_path_factory.mktemp("run") / "tiny", tiny_data)


def audit(folder: RunFolder, data: Path, *, trials: int = 400, seed: int = 1) -> RunAudit:
    return audit_run(folder, data, CPU, trials=trials, seed=seed)


@pytest.fixture(scope="module")
def audited(finished: RunFolder, tiny_data: Path) -> RunAudit:
    return audit(finished, tiny_data, trials=1000, seed=5)


# --- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("audited")
def test_a_whole_report_is_recognised_although_each_weight_is_private(audited: RunAudit) -> None:
    found = audited
    assert (found.name, found.clients, found.weights, found.mechanism) == ("tiny", CLIENTS, WEIGHTS, "duchi")
    assert (found.epsilon_per_unit, found.trials, found.confidence) == (EPSILON, 1000, CONFIDENCE)
    assert [row.weights for row in found.rows] == [1, 10, 100, 1000, WEIGHTS]
    claim = math.e**EPSILON / (1 + math.e**EPSILON)
    assert all(row.best_possible_if_claim_held == pytest.approx(claim) for row in found.rows)
    # The sum over all weights lies 34 standard deviations apart for the two reports: no trial goes wrong.
    assert found.rows[-1].accuracy == 1.0
    assert found.rows[-1].accuracy_low > claim
    assert found.rows[-1].epsilon_lower > EPSILON


@pytest.mark.slow
@pytest.mark.thorough
def test_the_bounds_keep_what_is_proved_of_a_single_weight(finished: RunFolder, tiny_data: Path) -> None:
    """Each fails by chance with probability 5 % at most, if the guarantee of one weight holds; 20 fixed seeds."""
    claim, broken = math.e**EPSILON / (1 + math.e**EPSILON), 0
    for seed in range(20):
        one = audit(finished, tiny_data, trials=100, seed=seed).rows[0]
        assert one.accuracy_low <= one.accuracy <= one.accuracy_high
        broken += one.epsilon_lower > EPSILON or one.accuracy_low > claim
    assert broken <= 3


@pytest.mark.slow
@pytest.mark.xdist_group("audited")
def test_accuracy_is_what_the_noise_allows(audited: RunAudit) -> None:
    """Two normals, 2 sqrt(w) / (sqrt(n) A) standard deviations apart.

    For 100 weights that is 5.4 and an accuracy of 99.6 %, for 10 weights 1.7 and 80.3 %. The other clients hold less
    than the canary's extreme, so their noise is A itself; the canary's is smaller, by an eighth. Five standard errors
    either way, a false alarm below 1e-6.
    """
    found = {row.weights: row.accuracy for row in audited.rows}
    gain = (math.e**EPSILON + 1) / (math.e**EPSILON - 1)
    for weights in (10, 100):
        variance = (CLIENTS * gain**2 - 1) * weights
        expected = float(stats.norm.cdf(math.sqrt(weights**2 / variance)))
        # Half a point more for the threshold, which is learned, and for few values being no normal.
        assert abs(found[weights] - expected) < 5 * math.sqrt(expected * (1 - expected) / 500) + 0.01


def test_without_noise_one_weight_is_enough(tmp_path: Path, tiny_data: Path) -> None:
    found = audit(run_in(tmp_path / "none", tiny_data, "mechanism.name='none'"), tiny_data, trials=100)
    assert all(row.accuracy == 1.0 for row in found.rows)
    assert found.epsilon_per_unit == math.inf
    assert all(row.best_possible_if_claim_held == 1.0 for row in found.rows)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["epsilon_per_unit"] == "infinity"


def blind(self: Duchi, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
    return ENCODE(self, ranges.expand()[0].float().expand(values.shape).contiguous(), ranges, generator)


def empty_pool(reports: list[BitReports], generator: np.random.Generator) -> ReportPool:
    """A shuffler that lets nothing but random bits through."""
    packed = generator.integers(0, 256, (sum(batch.clients for batch in reports), reports[0].bytes_per_client), dtype=np.uint8)
    packed[:, -1] &= (1 << (reports[0].dimension % 8 or 8)) - 1
    return ReportPool(BitReports(packed, reports[0].dimension))


ENCODE = Duchi.encode


@pytest.mark.parametrize(
    ("place", "substitute"), [("ldpfl.mechanisms.duchi.Duchi.encode", blind), ("ldpfl.attacks.canary.mix", empty_pool)]
)
@pytest.mark.slow
@pytest.mark.thorough_except("ldpfl.attacks.canary.mix-empty_pool")
def test_nothing_is_found_where_nothing_gets_through(
    place: str, substitute: Callable[..., Any], finished: RunFolder, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the encoder or the shuffler cut off all is chance, so the attack has no other way to the answer.

    All intervals cover 1/2 and no epsilon is shown, except with probability 5 %.
    """
    monkeypatch.setattr(place, substitute)
    for row in audit(finished, tiny_data, trials=200).rows:
        assert row.accuracy_low <= 0.5 <= row.accuracy_high
        assert row.epsilon_lower == 0.0


@pytest.mark.slow
def test_the_real_encoder_and_shuffler_handle_every_client_in_every_trial(
    finished: RunFolder, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, list[BitReports]]] = []
    mixed: list[list[BitReports]] = []

    def encode(self: Duchi, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        reports = ENCODE(self, values, ranges, generator)
        seen.append((values.clone(), [reports]))
        return reports

    def noting_mix(reports: list[BitReports], generator: np.random.Generator) -> ReportPool:
        mixed.append(reports)
        return mix(reports, generator)

    monkeypatch.setattr(Duchi, "encode", encode)
    monkeypatch.setattr(canary, "mix", noting_mix)
    audit(finished, tiny_data, trials=100)
    assert len(seen) == len(mixed) == 100
    values = [held for held, _ in seen]
    assert all(a is b for (_, (a,)), (b,) in zip(seen, mixed, strict=True))
    for trial, held in enumerate(values):
        assert held.shape == (CLIENTS, WEIGHTS)
        assert torch.equal(held[1:], values[0][1:])
        assert torch.equal(held[0], values[trial % 2][0])
    torch.testing.assert_close(values[0][0].abs(), torch.full((WEIGHTS,), 0.02))  # center 0, radius 0.02
    assert torch.equal(values[0][0], -values[1][0])
    assert 0.4 < float((values[0][0] > 0).double().mean()) < 0.6
    packed = [reports[0].packed for _, reports in seen]
    assert not any(np.array_equal(packed[0], other) for other in packed[1:])  # fresh noise in every trial


def test_ranges_and_weights_are_those_of_the_last_checkpoint(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_in(tmp_path / "moving", tiny_data, "ranges.rule='noisy-minmax'", rounds=2)
    last = folder.checkpoint()
    assert last is not None
    assert not torch.allclose(last.state.ranges.radius, torch.tensor(0.02, dtype=torch.float64))
    seen: list[LayerRanges] = []

    def encode(self: Duchi, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        seen.append(ranges)
        return ENCODE(self, values, ranges, generator)

    monkeypatch.setattr(Duchi, "encode", encode)
    found = audit(folder, tiny_data, trials=100)
    assert all(torch.equal(ranges.radius, last.state.ranges.radius) for ranges in seen)
    assert found.rows[-1].accuracy == 1.0  # the statistic counts in radii, whatever they are


# --- how it goes about it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_seeds_give_equal_audits(finished: RunFolder, tiny_data: Path) -> None:
    first, again, other = (audit(finished, tiny_data, trials=100, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.rows != other.rows


def test_the_folder_is_only_read(finished: RunFolder, tiny_data: Path) -> None:
    before = {path.name: path.read_bytes() for path in finished.path.iterdir()}
    audit(finished, tiny_data, trials=100)
    assert {path.name: path.read_bytes() for path in finished.path.iterdir()} == before


def test_progress_is_told_after_every_trial(finished: RunFolder, tiny_data: Path) -> None:
    seen: list[tuple[int, int]] = []
    audit_run(finished, tiny_data, CPU, trials=103, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 100) for done in range(1, 101)]


def test_a_part_of_the_clients_is_audited_where_a_part_takes_part(tmp_path: Path, tiny_data: Path) -> None:
    found = audit(run_in(tmp_path / "half", tiny_data, "clients.fraction=0.5"), tiny_data, trials=100)
    assert found.clients == CLIENTS // 2


def test_a_cohort_of_one_is_all_canary(tmp_path: Path, tiny_data: Path) -> None:
    found = audit(run_in(tmp_path / "one", tiny_data, "clients.fraction=0.01"), tiny_data, trials=100)
    assert found.clients == 1
    assert found.rows[-1].accuracy == 1.0


def test_fewer_trials_are_made_where_they_take_long(finished: RunFolder, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "MOST_REPORTS", 123 * CLIENTS * WEIGHTS)
    assert audit(finished, tiny_data).trials == 120
    assert audit(finished, tiny_data, trials=100).trials == 100
    monkeypatch.setattr(canary, "MOST_REPORTS", FEWEST_TRIALS * CLIENTS * WEIGHTS - 1)
    with pytest.raises(ConfigError, match="8 clients and 4010 weights is too large to audit"):
        audit(finished, tiny_data)


@pytest.mark.parametrize("trials", [0, 99, -1, True, 1e3, "400"])
def test_too_few_trials_are_refused(trials: Any, finished: RunFolder, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match="at least 100"):
        audit_run(finished, tiny_data, CPU, trials=trials)


def test_a_folder_without_a_finished_round_is_refused(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        audit(RunFolder(tmp_path / "nothing"), tiny_data)
    folder = RunFolder(tmp_path / "begun")
    folder.open(parse_config(TINY_TOML, (), origin="test"), resume=False)
    with pytest.raises(ConfigError, match="no finished round"):
        audit(folder, tiny_data)


def test_other_data_than_the_run_s_are_refused(finished: RunFolder, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_data(config: RunConfig, data_dir: Path | None) -> Dataset:
        return replace(load(config.data.name, data_dir), fingerprint="something else")

    monkeypatch.setattr(canary, "load_dataset", other_data)
    with pytest.raises(ConfigError, match="the data loaded now are"):
        audit(finished, tiny_data)


def test_a_run_from_another_device_can_be_audited(finished: RunFolder, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = finished.checkpoint()
    assert last is not None
    moved = replace(last, origin=last.origin.replace("on cpu", "on cuda"))
    assert moved.origin != last.origin
    monkeypatch.setattr(RunFolder, "checkpoint", lambda self: moved)
    assert audit(finished, tiny_data, trials=100).rows[-1].accuracy == 1.0


def test_a_canary_hides_among_those_of_one_round_alone(tmp_path: Path, tiny_data: Path) -> None:
    """Where each client takes part once, a round has a part of them, also the one that is looked at after the last."""
    folder = run_in(tmp_path / "once", tiny_data, "clients.once=true", "clients.count=12", "training.rounds=3")
    assert audit(folder, tiny_data, trials=100).clients == 4


# --- the values of a cohort -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_a_cohort_s_values_are_those_that_the_next_round_would_send(chunk_size: int | None, tiny_task: Dataset) -> None:
    """Quantity skew puts the clients in another order while they train; a row must still belong to its client."""
    overrides = ["mechanism.name='none'", "data.partition='quantity'", "clients.count=6"]
    federation, start = build(parse_config(TINY_TOML, overrides, origin="test"), tiny_task, CPU)
    cohort = sample_cohort(federation.seed, 1, 6, 1.0)
    seen: list[tuple[int, int]] = []
    values = train_cohort(federation, start.state, cohort, chunk_size, lambda done, total: seen.append((done, total)))
    assert values.shape == (6, WEIGHTS)
    assert seen[-1] == (6, 6)
    for row, client in enumerate(cohort):
        alone = train_cohort(federation, start.state, np.array([client]), 1)
        assert torch.equal(alone[0], values[row])
    assert torch.unique(values[:, 0]).numel() == 6
