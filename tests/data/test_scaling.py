"""Noisy histograms of a column are enough to bring it to one scale, in whatever unit it comes; or its noise is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from ldpfl.data import Dataset, Samples
from ldpfl.data.encoder import Knots
from ldpfl.data.scaling import (
    STAGES,
    Histogram,
    TargetScale,
    apply_scale,
    bin_indices,
    center_and_spread,
    cuts_from_histogram,
    estimate_hazards,
    first_edges,
    next_edges,
    quantile_knots,
    scaled_by_bounds,
    target_scale_from_histogram,
    unscaled_values,
)
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import DataError

GENERATOR = np.random.default_rng(5)
COLUMNS = {
    "far from 0": GENERATOR.normal(1e4, 1, 5000),
    "ages": GENERATOR.normal(62, 14, 5000).round(),
    "years": GENERATOR.integers(2005, 2024, 5000).astype(float),
    "flags": GENERATOR.integers(0, 2, 5000).astype(float),
    "below zero": GENERATOR.normal(-0.003, 0.001, 5000),
    "incomes": GENERATOR.lognormal(10, 0.6, 5000),
    "moments": GENERATOR.uniform(1.5e12, 1.7e12, 5000),
}


def measured(values: NDArray[np.float64], noise: float = 0.0, bounds: tuple[float, float] | None = None, seed: int = 1) -> Histogram | None:
    """Return the last histogram of a column, as a run takes them."""
    generator, found = np.random.default_rng(seed), None
    edges = first_edges(Unscaled("x", 0, bounds))
    for stage in range(STAGES):
        places = bin_indices(values, edges)
        counts = np.bincount(places[places >= 0], minlength=edges.size - 1) + generator.normal(0, noise, edges.size - 1)
        own = Histogram(edges, counts, noise)
        found = own.without_insignificant_bins(300, together=stage > 0) or (own if stage else None)
        if found is None:
            return None
        edges = next_edges(found)
    return found


def deviates(values: NDArray[np.float64], histogram: Histogram | None) -> NDArray[np.float64]:
    assert histogram is not None
    knots = quantile_knots(histogram)
    assert knots is not None
    found: NDArray[np.float64] = np.interp(values, *knots)
    return found


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("noise", [0.0, 20.0])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_becomes_deviates_of_its_quantiles(name: str, noise: float, bounded: bool) -> None:
    """Of 5,000 values, with noise as of a run at epsilon 4 or so; bounds are ten times as wide as need be."""
    values = COLUMNS[name]
    width = values.max() - values.min()
    found = deviates(values, measured(values, noise, (values.min() - 4 * width, values.max() + 5 * width) if bounded else None))
    assert abs(found.mean()) < 0.7
    assert 0.4 < found.std() < 2
    assert np.abs(found).max() <= 3
    assert np.corrcoef(rankdata(found), rankdata(values))[0, 1] > 0.97


def test_equal_steps_stay_equal_where_a_column_is_not_skewed() -> None:
    """A scale from 1 to 5: where in its bin a frequent value lies would bend a line through many quantiles."""
    generator = np.random.default_rng(3)
    grades = generator.choice(5, 5000, p=[0.1, 0.25, 0.3, 0.25, 0.1]).astype(np.float64) + 1
    lines = [np.diff(deviates(np.arange(1.0, 6.0), measured(grades, noise, seed=seed))) for noise in (0.0, 20.0) for seed in range(20)]
    assert sum(np.ptp(steps) < 1e-6 for steps in lines) >= 32  # noise makes a column look skewed now and then
    assert all(0.4 < steps.mean() < 1.5 for steps in lines)
    skewed = generator.lognormal(10, 1.2, 5000)
    found = deviates(np.quantile(skewed, [0.1, 0.5, 0.9]), measured(skewed, 20.0))
    assert found == pytest.approx([-1.28, 0.0, 1.28], abs=0.35)


def test_columns_that_noise_hides_are_noticed() -> None:
    """In 300 tables whose rows the noise hides, at most 1 % by design may have a column that seems to be seen: 8 of 300 has p < 0.01."""
    few = COLUMNS["ages"][:30]
    assert sum(measured(few, 100.0, seed=seed) is not None for seed in range(300)) < 8
    assert measured(np.full(100, np.nan)) is None
    assert measured(few, 1.0) is not None


def test_a_column_of_one_value_is_borne() -> None:
    for values in (np.full(100, 7.0), np.zeros(100)):
        assert np.isfinite(deviates(values, measured(values))).all()


@pytest.mark.parametrize("name", COLUMNS)
def test_where_a_target_lies_is_measured(name: str) -> None:
    found = measured(COLUMNS[name], 20.0)
    assert found is not None
    center, spread = center_and_spread(found)
    values = COLUMNS[name]
    assert abs(center - values.mean()) < 0.7 * values.std()
    assert 0.5 < spread / values.std() < 2.5


def test_every_value_has_a_place_and_a_gap_has_none() -> None:
    edges = first_edges(Unscaled("x", 0))
    values = np.array([-1e300, -1.5, 0.0, 3.0, 1e300, np.nan])
    found = bin_indices(values, edges)
    assert (found[0], found[4], found[5]) == (0, edges.size - 2, -1)
    for value, own in zip(values[1:4], found[1:4], strict=True):
        assert edges[own] <= value < edges[own + 1]


def test_edges_follow_the_rows_and_leave_gaps_alone() -> None:
    counts = np.array([0.0, 30.0, 0.0, 0.0, 10.0, 0.0])
    edges = next_edges(Histogram(np.arange(7.0), counts, 0.0))
    assert (edges[0], edges[-1]) == (1.0, 5.0)
    within = ((edges >= 1) & (edges <= 2)) | ((edges >= 4) & (edges <= 5))
    assert within.all()
    assert ((edges >= 1) & (edges <= 2)).sum() == 13  # three quarters of the rows, and the left end


KNOTS: Knots = ((10.0, 30.0), (-1.0, 1.0))


def test_scaling_changes_those_columns_alone() -> None:
    inputs, targets = torch.tensor([[10.0, 1.0], [float("nan"), 0.0], [90.0, 1.0]]), torch.tensor([100.0, 200.0, 900.0])
    samples = Samples(inputs, targets)
    own = Dataset("x", samples, samples, 1, (), (), "x", unscaled=(Unscaled("a", 0), Unscaled("b, the target")))
    np.testing.assert_array_equal(unscaled_values(own)[1], [100, 200, 900])
    found = apply_scale(own, [KNOTS], TargetScale(200.0, 100.0), ())
    assert found.train.tensor.tolist() == [[-1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]  # what lies beyond the last knot counts as if it lay there
    assert (found.is_scaled, found.unit) == (True, 100.0)
    assert found.train.targets.tolist() == [-1.0, 0.0, 6.0]  # a far one counts as if it lay nearer
    assert found.test.targets.tolist() == [-1.0, 0.0, 7.0]  # and is measured as it is
    assert inputs[0, 0] == 10.0
    assert apply_scale(own, [None], TargetScale(200.0, 100.0), ()).train.tensor[:, 0].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(DataError, match="the noise was too large to measure the target's range"):
        target_scale_from_histogram(None, "number", None)


def test_bounds_alone_need_no_measuring() -> None:
    samples = Samples(torch.tensor([[10.0], [35.0], [20.0]]), torch.tensor([0.0, 5.0, 20.0]))
    own = Dataset("x", samples, samples, 1, (), (), "x", unscaled=(Unscaled("a", 0, (10.0, 30.0)), Unscaled("b", bounds=(0.0, 10.0))))
    found = scaled_by_bounds(own)
    assert found.train.tensor[:, 0].tolist() == [-1.0, 1.0, 0.0]
    assert (found.train.targets.tolist(), found.test.targets.tolist(), found.unit) == ([-1.0, 0.0, 1.0], [-1.0, 0.0, 3.0], 5.0)


def test_counts_begin_at_0_and_are_told_in_spreads() -> None:
    counts = np.random.default_rng(0).poisson(1.5, 4000).astype(float)
    scale, mean = target_scale_from_histogram(measured(counts, noise=5.0), "count", None)
    assert scale.center == 0.0
    assert scale.spread == pytest.approx(1.5**0.5, rel=0.15)
    assert mean * scale.spread == pytest.approx(1.5, rel=0.15)
    assert target_scale_from_histogram(None, "count", (0.0, 8.0)) == (TargetScale(0.0, 2.0), 1.0)


def test_counts_far_from_0_are_not_clipped_below_their_mean() -> None:
    """Poisson counts with mean 30,000 lie 173 standard deviations from 0, and a count for training reaches about 55 units."""
    counts = np.random.default_rng(0).poisson(30_000, 4000).astype(float)
    scale, mean = target_scale_from_histogram(measured(counts, noise=5.0), "count", None)
    assert mean == pytest.approx(10.0)
    scaled_counts = scale.scaled(torch.from_numpy(counts), for_evaluation=False)
    assert scaled_counts.mean().item() == pytest.approx(10.0, rel=0.01)
    assert scaled_counts.max() < scale.reach


def test_times_are_cut_at_quantiles_and_hazards_follow_from_the_share_of_events() -> None:
    times = np.random.default_rng(0).exponential(100, 4000)
    samples = Samples(torch.zeros(2, 1), torch.zeros(2, 2))
    scale, ended = cuts_from_histogram(measured(times, noise=5.0), Dataset("x", samples, samples, 4, (), (), "x"), None)
    assert list(scale.cuts) == pytest.approx(np.quantile(times, [0.2, 0.4, 0.6, 0.8]).tolist(), rel=0.15)
    assert ended == pytest.approx([0.2] * 4, abs=1e-6)
    assert list(estimate_hazards(ended, 0.5)) == pytest.approx([0.1, 0.125, 1 / 6, 0.25])
    assert cuts_from_histogram(None, Dataset("x", samples, samples, 4, (), (), "x"), (0.0, 8.0))[0].cuts == (2.0, 4.0, 6.0, 8.0)
    with pytest.raises(DataError, match=r"set data.cut_points, add rows"):
        cuts_from_histogram(None, Dataset("x", samples, samples, 4, (), (), "x"), None)
