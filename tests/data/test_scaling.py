"""What histograms tell of a column is enough to bring it to about [-1, 1]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ldpfl.data import Dataset, Samples
from ldpfl.data.scaling import STAGES, beyond, center_and_spread, coarse_edges, fine_edges, place, scaled, unscaled_values

GENERATOR = np.random.default_rng(5)
COLUMNS = {
    "far from 0": GENERATOR.normal(1e4, 1, 5000),
    "ages": GENERATOR.normal(62, 14, 5000).round(),
    "years": GENERATOR.integers(2005, 2024, 5000).astype(float),
    "flags": GENERATOR.integers(0, 2, 5000).astype(float),
    "below zero": GENERATOR.normal(-0.003, 0.001, 5000),
    "incomes": GENERATOR.lognormal(10, 0.6, 5000),
}


def counted(values: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    found = place(values[:, None], edges)[:, 0]
    return np.bincount(found[found >= 0], minlength=edges.shape[1] - 1)[None].astype(float)


def measured(values: NDArray[np.float64], noise: float = 0.0) -> tuple[float, float]:
    generator = np.random.default_rng(1)
    edges = coarse_edges(1)
    for _ in range(STAGES - 1):
        edges = fine_edges(counted(values, edges) + generator.normal(0, noise, (1, edges.shape[1] - 1)), edges, noise)
    center, spread = center_and_spread(counted(values, edges) + generator.normal(0, noise, (1, edges.shape[1] - 1)), edges, noise)
    return float(center[0]), float(spread[0])


@pytest.mark.parametrize("noise", [0.0, 20.0])
@pytest.mark.parametrize("name", COLUMNS)
def test_middle_and_spread_are_about_right(name: str, noise: float) -> None:
    """Of 5,000 values, with noise as of a run at epsilon 4 or so."""
    values = COLUMNS[name]
    center, spread = measured(values, noise)
    assert abs(center - values.mean()) < 0.4 * values.std()
    assert 0.6 < spread / values.std() < 2


def test_a_column_of_one_value_and_one_of_gaps_are_borne() -> None:
    for values in (np.full(100, 7.0), np.zeros(100)):
        center, spread = measured(values)
        assert np.isfinite(center)
        assert spread > 0
    assert np.isnan(measured(np.full(100, np.nan))).all()
    assert np.isnan(measured(COLUMNS["ages"][:30], noise=100.0)).all()  # too few to be seen
    assert abs(measured(np.full(100, 7.0))[0] - 7.0) < 0.1


def test_every_value_has_a_place_and_a_gap_has_none() -> None:
    edges = coarse_edges(1)
    values = np.array([[-1e300], [-1.5], [0.0], [3.0], [1e300], [np.nan]])
    found = place(values, edges)[:, 0]
    assert found[0] == 0
    assert found[4] == edges.shape[1] - 2
    assert found[5] == -1
    for value, own in zip(values[1:4, 0], found[1:4], strict=True):
        assert edges[0, own] <= value < edges[0, own + 1]


def test_scaling_changes_those_columns_alone() -> None:
    inputs, targets = torch.tensor([[10.0, 1.0], [float("nan"), 0.0], [30.0, 1.0]]), torch.tensor([100.0, 200.0, 900.0])
    samples = Samples(inputs, targets)
    own = Dataset("x", samples, samples, 1, (), (), "x", unscaled=(0,), target_unscaled=True)
    np.testing.assert_array_equal(unscaled_values(own)[:, 1], [100, 200, 900])
    found = scaled(own, np.array([20.0, 200.0]), np.array([10.0, 100.0]))
    assert found.train.tensor.tolist() == [[-1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert (found.is_scaled, found.unit) == (True, 100.0)
    assert found.train.targets.tolist() == [-1.0, 0.0, 6.0]  # a far one counts as if it lay nearer
    assert found.test.targets.tolist() == [-1.0, 0.0, 7.0]  # and is measured as it is
    assert inputs[0, 0] == 10.0
    only = scaled(replace(own, target_unscaled=False), np.array([20.0]), np.array([10.0]))
    assert (only.train.targets.tolist(), only.unit) == ([100.0, 200.0, 900.0], 1.0)


@pytest.mark.parametrize(("scale", "far"), [(1.0, False), (1e9, True), (-1e9, True)])
@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_numbers_too_large_to_be_told_apart_are_told_of(scale: float, far: bool, noise: float) -> None:
    values = GENERATOR.normal(1.7e3, 1, 5000) * scale
    counts = counted(values, coarse_edges(1))
    found = beyond(counts + np.random.default_rng(2).normal(0, noise, counts.shape), noise)
    assert found.tolist() == [far]
