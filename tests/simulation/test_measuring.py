"""Histograms before the first round: a record moves them by no more than a clipped gradient would, and they are charged as rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ldpfl.data import Dataset, Samples
from ldpfl.data.scaling import Histogram, target_scale_from_histogram
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import DataError
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.lattice import Lattice
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.privacy.authors import released
from ldpfl.simulation.measuring import NOT_SEEN_TO_VARY, ColumnStages, Measuring
from ldpfl.util.randomness import RandomSource

Parts = tuple[NDArray[np.int64], ...]


class Recording(DpSgd):
    """Keeps what clients put into it."""

    def encode(self, values: torch.Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> object:  # type: ignore[override]
        SEEN.append(values.clone())
        return super().encode(values, ranges, generator)


SEEN: list[torch.Tensor] = []
Tables = Mapping[tuple[int, ...], NDArray[np.int64]]


def federation(values: NDArray[np.float64], clients: int) -> tuple[Dataset, Parts]:
    samples = Samples(torch.from_numpy(values).float(), torch.zeros(len(values), dtype=torch.int64))
    columns = tuple(Unscaled(str(column), column) for column in range(values.shape[1]))
    dataset = Dataset("x", samples, samples, 2, (), (), "x", unscaled=columns)
    return dataset, tuple(np.array_split(np.arange(len(values)), clients))


def sent(values: NDArray[np.float64], clients: int, mechanism: DpSgd) -> NDArray[np.int64]:
    """Return what each client puts into the first histogram, (clients, bins): later ones' bins follow from what was released."""
    SEEN.clear()
    dataset, parts = federation(values, clients)
    Measuring(0, mechanism, "direct").scaled(dataset, parts)
    return SEEN[0].numpy()


def farthest(one: Tables, other: Tables, steps: int) -> float:
    """Return by how much sums differ at most, in multiples of ``steps``, of tables of which ``other`` has one record not in ``one``."""
    pairs = [(own, others) for (a, own), (b, others) in product(one.items(), other.items()) if sum((Counter(b) - Counter(a)).values()) == 1]
    return max(float(np.linalg.norm((own - others).astype(float))) for own, others in pairs) / steps


@pytest.mark.thorough_except("2")
@pytest.mark.parametrize("columns", [1, 2])
def test_neighbouring_tables_differ_by_what_is_charged_and_by_no_less(columns: int) -> None:
    """All pairs of tables of up to three records of three kinds. A record that is replaced moves a sum by 2 C at most, and the largest
    distance is 2 C; one that is added or removed by sqrt(2) C at most, and the largest distance is sqrt(2) C."""
    mechanism = Recording(RecordClip(0.5), 10.0, records=2.0)
    kinds = np.array([-3.0, 5.0, np.nan])[:, None].repeat(columns, axis=1)
    two, three = ({table: sent(kinds[list(table)], 1, mechanism)[0] for table in product(range(3), repeat=count)} for count in (2, 3))
    assert 2 - 1e-5 < farthest(three, three, STEPS) <= 2
    assert 2**0.5 - 1e-5 < farthest(two, three, STEPS) <= 2**0.5


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_sum_s_lattice_holds_histograms_of_records_that_are_all_alike(columns: int, records: int) -> None:
    """Proof of the lattice: no coordinate of the sum of N records lies beyond N ``steps`` points. In one bin there may be all of them."""
    lattice = Lattice.for_sum(40, float(records), 8.0, 16)
    mechanism = Recording(RecordClip(0.5, lattice.steps), 8.0, summed=True, bits=lattice.bits, records=float(records))
    for value in (5.0, float("nan")):
        assert np.abs(sent(np.full((40 * records, columns), value), 40, mechanism).sum(axis=0)).max() <= 40 * records * lattice.steps
    values = np.full(40 * records, 5.0)
    _, parts = federation(values[:, None], 40)
    measuring, stages = Measuring(0, mechanism, "secure-sum"), ColumnStages.before_first_stage([Unscaled("x", 0)])
    found, point = measuring._release_histograms([values], stages, parts, [np.ones_like(own) for own in parts], stage=1)
    counts, noise = found.points / point, found.noise / point
    assert counts.max() == pytest.approx(40 * records, abs=6 * noise)
    assert abs(np.delete(counts, counts.argmax())).max() < 6 * noise


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 2, 3, 7])
@pytest.mark.thorough_for("3")
def test_a_record_moves_its_client_s_sum_by_no_more_than_a_gradient(columns: int) -> None:
    """Any record by any other: by 2 C at most, which is 2^21 steps, as a sum of clipped gradients may move."""
    choices = [-3.0, 0.0, 5.0, float("nan")]
    mechanism = Recording(RecordClip(0.5), 10.0)
    sums = []
    for record in [*list(product(choices, repeat=columns))[:40], (5.0,) * columns]:
        SEEN.clear()
        dataset, parts = federation(np.array([record, [1.0] * columns]), 1)
        Measuring(0, mechanism, "direct").scaled(dataset, parts)
        sums.append(SEEN[0][0])  # later ones' bins follow from what the first one sent
    for one, other in product(sums, sums):
        assert float((one - other).double().norm()) <= 2 * STEPS
    farthest = max(float((one - other).double().norm()) for one, other in product(sums, sums))
    assert farthest > 1.99 * STEPS  # and the room is used


def test_noise_is_what_the_mechanism_says() -> None:
    """Of empty bins, 188 of a histogram in 50 runs: the deviation is within 5 % (false alarm below 1e-6)."""
    values, noise = np.full(40, 3.0), []
    _, parts = federation(values[:, None], 4)
    stages = ColumnStages.before_first_stage([Unscaled("x", 0)])
    empty = stages.bins[0] - 1
    for seed in range(50):
        measuring = Measuring(seed, DpSgd(RecordClip(0.5), 5.0, records=10.0), "direct")
        found, point = measuring._release_histograms([values], stages, parts, [np.ones_like(own) for own in parts], stage=1)
        noise.append(np.delete(found.points, found.points.argmax()) / point)
    assert found.noise / point == pytest.approx(5.0 * 2 / np.sqrt(2))  # of four clients, each 5 C; a record's count is of length sqrt(2) C
    assert np.concatenate(noise).std() == pytest.approx(found.noise / point, rel=0.05)
    assert abs(np.concatenate(noise).mean()) < 5 * found.noise / point / np.sqrt(50 * empty)


def test_all_histograms_are_charged_as_rounds() -> None:
    dataset, parts = federation(np.random.default_rng(0).normal(5, 2, (2000, 3)), 4)
    mechanism = DpSgd(RecordClip(1.0), 8.0, records=500.0)
    found, ledger = Measuring(0, mechanism, "direct").scaled(dataset, parts)
    assert [(event.round, event.joined, event.cohort) for event in ledger.events] == [(number, number, 4) for number in range(1, 5)]
    assert {event.release for event in ledger.events} == {released(mechanism, LayerRanges(torch.zeros(1), torch.ones(1), (3,)))}
    assert run_epsilon(ledger, 1e-5) > 0
    assert found.is_scaled
    assert float(found.train.tensor.std()) == pytest.approx(1.0, abs=0.6)
    again, _ = Measuring(0, mechanism, "direct").scaled(dataset, parts)
    assert torch.equal(found.train.tensor, again.train.tensor)
    other, _ = Measuring(1, mechanism, "direct").scaled(dataset, parts)
    assert not torch.equal(found.train.tensor, other.train.tensor)


def test_without_a_mechanism_counts_are_exact_and_nothing_is_charged() -> None:
    values = np.random.default_rng(0).normal(100, 1, (1000, 1))
    dataset, parts = federation(values, 4)
    found, ledger = Measuring(0, None, "direct").scaled(dataset, parts)
    assert ledger.events == ()
    assert abs(float(found.train.tensor.mean())) < 0.1
    assert float(found.train.tensor.std()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("rows", "noted"), [(400, True), (40_000, False)])
def test_a_table_with_few_rows_for_its_noise_says_so(rows: int, noted: bool) -> None:
    dataset, parts = federation(np.random.default_rng(0).normal(5, 2, (rows, 3)), 4)
    found, _ = Measuring(0, DpSgd(RecordClip(1.0), 8.0, records=rows / 4), "direct").scaled(dataset, parts)
    assert ("measured on few rows" in " ".join(found.notes)) == noted


def _notes_on_target(targets: NDArray[np.float64], noise: float) -> str:
    """Return all notes of measuring a number with these ``targets`` (N,) alone."""
    samples = Samples(torch.zeros(len(targets), 1), torch.from_numpy(targets))
    dataset = Dataset("x", samples, samples, 1, (), (), "x", unscaled=(Unscaled("y, the target"),))
    mechanism, parts = DpSgd(RecordClip(1.0), noise, records=len(targets) / 4), tuple(np.array_split(np.arange(len(targets)), 4))
    return " ".join(Measuring(0, mechanism, "direct").scaled(dataset, parts)[0].notes)


def test_a_target_that_was_not_seen_to_vary_gets_a_note() -> None:
    drawn = np.random.default_rng(0).normal(size=2000)
    for targets in (np.full(2000, 3.0), np.zeros(2000), 1e9 + drawn):
        assert NOT_SEEN_TO_VARY in _notes_on_target(targets, 4.0)
    zeros = _notes_on_target(np.zeros(2000), 4.0)
    assert "to lie close to 0: " in zeros
    assert "If it has two values, set --task classification" in zeros
    for targets in (drawn, drawn + 100, (drawn > 1).astype(float), np.exp(2 * drawn)):
        assert _notes_on_target(targets, 4.0) == ""


def test_targets_beyond_the_largest_measured_value_are_named() -> None:
    drawn = np.random.default_rng(0).normal(size=2000)
    for targets in (3e38 * (1 + 0.5 * drawn), np.full(2000, -1e30)):
        assert "values of y, the target reach 1.8e+19, and larger values count as this number" in _notes_on_target(targets, 4.0)
    assert "1.8e+19" not in _notes_on_target(1e18 * drawn, 4.0)


def test_a_target_in_large_noise_is_named_as_seen_only_roughly() -> None:
    generator = np.random.default_rng(0)
    mostly_zero = np.where(generator.random(2000) < 0.2, generator.normal(size=2000) * 50, 0.0)
    assert "since they were seen only roughly above the noise of measuring: y, the target" in _notes_on_target(mostly_zero, 40.0)


def test_a_count_that_has_one_value_is_refused_with_the_value() -> None:
    edges = np.array([2.5, 5.0, 5.5, 9.0])
    with pytest.raises(DataError, match="all targets were measured to be 5"):
        target_scale_from_histogram(Histogram(edges, np.array([0.0, 900.0, 0.0]), 4.0), "count", None)
