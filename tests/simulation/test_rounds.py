"""Rounds of a federation: what decides their outcome, and what must not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ldpfl import LayerRanges
from ldpfl.data import Dataset
from ldpfl.errors import PrivacyError
from ldpfl.server import Checkpoint, initial_checkpoint, round_cohort, sample_cohort
from ldpfl.simulation import Federation, LoopTrainer, simulate
from simulated import CLIENTS, federation_of


def outcome(federation: Federation, start: Checkpoint, rounds: int = 2) -> tuple[str, list[object]]:
    """All that a run leaves: the model, and each round's figures."""
    *_, last = simulate(federation, start, rounds)
    return hashlib.sha256(last.state.weights.numpy().tobytes()).hexdigest(), [metrics.reproducible() for metrics in last.history]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, None])
@pytest.mark.parametrize("mechanism", ["duchi", "none"])
@pytest.mark.parametrize("scheme", ["iid", "quantity"])
@pytest.mark.thorough_for(
    *(f"iid-{mechanism}-{size}" for mechanism in ("duchi", "none") for size in (1, 2, 7)),
    *(f"quantity-{mechanism}-{size}" for mechanism in ("duchi", "none") for size in (3, 7)),
    *("iid-none-3", "iid-duchi-None", "quantity-none-2", "quantity-duchi-1"),
)
def test_chunking_changes_no_bit(chunk_size: int | None, mechanism: str, scheme: str, tiny_task: Dataset) -> None:
    """``None`` lets the timing probe choose; batches are larger than the smallest client of ``quantity``."""
    federation, start = federation_of(tiny_task, mechanism=mechanism, scheme=scheme, batch_size=12)
    reference = outcome(replace(federation, chunk_size=CLIENTS), start)
    assert outcome(replace(federation, chunk_size=chunk_size), start) == reference


def test_chunking_changes_no_bit_of_a_convolutional_model(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, model="two-layer-cnn")
    outcomes = [outcome(replace(federation, chunk_size=size), start, 1) for size in (1, 2, CLIENTS)]
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_seed_decides_the_outcome(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    first = outcome(federation, start)
    assert outcome(federation, start) == first
    assert outcome(replace(federation, seed=6), start)[0] != first[0]


def test_global_random_state_has_no_influence_and_is_left_alone(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    first = outcome(federation, start)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert outcome(federation, start) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_going_on_from_a_checkpoint_ends_where_the_whole_run_ends(tiny_task: Dataset, tmp_path: Path) -> None:
    federation, start = federation_of(tiny_task)
    *_, halfway = simulate(federation, start, 2)
    halfway.save(tmp_path / "checkpoint")
    assert outcome(federation, Checkpoint.load(tmp_path / "checkpoint"), 4) == outcome(federation, start, 4)


def test_a_finished_checkpoint_trains_nothing_more(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(federation, start, 1)
    assert list(simulate(federation, last, 1)) == []


def test_the_order_in_which_the_cohort_comes_changes_no_bit(tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """After shuffling nobody can tell who came first, so neither can the model."""
    federation, start = federation_of(tiny_task)
    straight = outcome(federation, start)

    def reversed_cohort(seed: int, number: int, clients: int, fraction: float, lowest: float | None) -> NDArray[np.int64]:
        return round_cohort(seed, number, clients, fraction, lowest)[::-1].copy()

    monkeypatch.setattr("ldpfl.simulation.federation.round_cohort", reversed_cohort)
    assert outcome(federation, start) == straight


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 9), (0.5, 5), (1 / 3, 3), (0.01, 1)])
def test_a_fraction_of_the_clients_takes_part(fraction: float, expected: int, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(replace(federation, participation=replace(federation.participation, fraction=fraction)), start, 1)
    assert last.history[0].clients == expected


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7, 1.0])
def test_the_cohort_is_ceil_of_the_fraction_distinct_and_new_each_round(fraction: float) -> None:
    """0.1 * 70 is a hair above 7 in floating point; that must not invite an eighth client."""
    cohorts = [sample_cohort(1, number, 70, fraction) for number in (1, 2)]
    for cohort in cohorts:
        assert cohort.size == round(fraction * 70)
        assert np.unique(cohort).size == cohort.size
        assert cohort.min() >= 0
        assert cohort.max() < 70
    assert np.array_equal(cohorts[0], cohorts[1]) == (fraction == 1.0)
    assert np.array_equal(cohorts[0], sample_cohort(1, 1, 70, fraction))


def test_every_client_is_sampled_about_equally_often() -> None:
    """Binomial(400, 0.2): six standard deviations either way, false alarm below 1e-7 for 20 clients."""
    counts = np.bincount(np.concatenate([sample_cohort(3, number, 20, 0.2) for number in range(400)]), minlength=20)
    assert counts.sum() == 400 * 4
    assert np.abs(counts - 80).max() < 6 * 8


def test_progress_reaches_the_whole_cohort(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    seen: list[tuple[int, int]] = []
    list(simulate(federation, start, 1, lambda done, total: seen.append((done, total))))
    assert seen == sorted(seen)
    assert seen[-1] == (CLIENTS, CLIENTS)


def test_a_round_s_figures_are_those_of_the_mechanism(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(federation, start, 1)
    metrics = last.history[0]
    dimension = federation.task.layout.dimension
    assert metrics.uplink_bytes_per_client == -(-dimension // 8)
    assert set(metrics.radius) == set(metrics.noise_std) == set(metrics.clipped_fraction) == set(federation.task.layout.names)
    assert metrics.radius == dict.fromkeys(federation.task.layout.names, 0.02)
    gain = (np.e**2 + 1) / (np.e**2 - 1)
    assert metrics.noise_std["1.weight"] == pytest.approx(0.02 * gain / 3)
    assert "seconds" not in metrics.reproducible()


def test_the_clipped_fraction_counts_values_outside_the_range(tiny_task: Dataset) -> None:
    """With ranges nobody leaves it is 0, with ranges nobody keeps it is nearly 1."""

    def clipped(radius: float) -> float:
        federation, start = federation_of(tiny_task)
        ranges = LayerRanges(torch.zeros(2), torch.full((2,), radius), start.state.ranges.sizes)
        *_, last = simulate(federation, initial_checkpoint(start.state.weights, ranges), 1)
        return last.history[0].clipped_fraction["1.weight"]

    assert clipped(100.0) == 0.0
    assert clipped(1e-7) > 0.95


def test_without_noise_a_round_is_the_mean_of_what_clients_trained(tiny_task: Dataset) -> None:
    """Federated averaging, written out with the plain loop."""
    federation, start = federation_of(tiny_task, mechanism="none")
    *_, vectorised = simulate(federation, start, 1)
    *_, loop = simulate(replace(federation, trainer=LoopTrainer(federation.task)), start, 1)
    torch.testing.assert_close(vectorised.state.weights, loop.state.weights, atol=1e-5, rtol=0)
    assert not torch.equal(vectorised.state.weights, start.state.weights)


def test_nan_in_a_client_stops_the_round_by_number_and_keeps_the_rounds_before(tiny_task: Dataset) -> None:
    """Nothing un-noised or meaningless leaves; what was reached stays resumable."""
    healthy, start = federation_of(tiny_task, model="two-layer-cnn")
    (first,) = simulate(healthy, start, 1)
    sick, _ = federation_of(tiny_task, model="two-layer-cnn", learning_rate=1e30)
    rounds = simulate(sick, first, 3)
    with pytest.raises(PrivacyError, match=r"round 2 stopped.*NaN"):
        next(rounds)
    assert outcome(healthy, first, 2) == outcome(healthy, start, 2)


def test_training_learns(tiny_task: Dataset) -> None:
    """Ten easy classes under noise: chance is 10 %, and half of them right is a low bar."""
    federation, start = federation_of(tiny_task)
    accuracies: Sequence[float] = [checkpoint.history[-1].score for checkpoint in simulate(federation, start, 6)]
    assert accuracies[-1] > 0.5


def test_noise_on_own_data_follows_from_the_ranges_too(tiny_task: Dataset) -> None:
    """The same values under other ranges: two reports by the same bits would tell of each other."""
    federation, start = federation_of(tiny_task)
    own, values = replace(federation, own_data=True), start.state.weights[None]

    def words(ranges: LayerRanges) -> tuple[int, ...]:
        source = own.streams(replace(start.state, ranges=ranges), np.array([0]), values, own.mechanism)
        return tuple(source.int32(0, 8).tolist())

    ranges, sizes = start.state.ranges, start.state.ranges.sizes
    assert words(LayerRanges(0.0, 0.02, sizes)) == words(ranges)
    others = [LayerRanges(0.0, 0.03, sizes), LayerRanges(0.01, 0.02, sizes)]
    assert len({words(ranges), *map(words, others)}) == 3
