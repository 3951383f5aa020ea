"""Least squares: without noise it is ridge regression on the records as they are shortened; with noise it is what the noise leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.record_sums import NoisySum


def test_without_noise_it_is_numpy_s_ridge_on_shortened_records() -> None:
    generator = np.random.default_rng(0)
    inputs, targets = generator.normal(0, 1, (400, 5)), generator.integers(0, 3, 400)
    for bias in (False, True):
        head = LeastSquares(5, 3, classes=True, bias=bias, norm=2.0, floor=0.0, ridge=0.7)
        total = head.vectors(torch.from_numpy(inputs), torch.from_numpy(targets)).sum(dim=0).numpy()
        weights = head.solved(NoisySum(total, 2.0), 400).double().numpy()
        shortened = inputs * np.minimum(1, 2.0 / np.linalg.norm(inputs, axis=1))[:, None]
        features = np.concatenate([shortened, np.ones((400, int(bias)))], axis=1)
        told = np.eye(3)[targets] - 1 / 3
        longest = 4 + bias
        ridge = 0.7 * np.sqrt(2 * features.shape[1]) * 2.0 / head._feature_weight * longest  # of the sum of products, not of unit features
        expected = 3 * np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ told)
        found = np.concatenate([weights[:15].reshape(3, 5).T, weights[15:].reshape(int(bias), 3)])
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_number_is_cut_to_its_bound_and_told_in_its_own_unit() -> None:
    generator = np.random.default_rng(1)
    inputs = generator.normal(0, 0.3, (5000, 3))
    targets = inputs @ [1.0, -2.0, 0.5] + 0.1
    head = LeastSquares(3, 1, classes=False, bias=True, norm=3.0, bound=4.0)
    total = head.vectors(torch.from_numpy(inputs), torch.from_numpy(targets)).sum(dim=0).numpy()
    assert head.solved(NoisySum(total, 0.0), 5000).numpy() == pytest.approx([1.0, -2.0, 0.5, 0.1], abs=1e-4)


def test_directions_without_records_do_not_blow_up_the_noise() -> None:
    """Features that are always 0: the noise alone has negative eigenvalues there, and the head stays short in each of 20 draws."""
    generator = np.random.default_rng(2)
    inputs = np.zeros((1000, 30))
    inputs[:, :3] = generator.normal(0, 0.5, (1000, 3))
    targets = (inputs[:, 0] > 0).astype(np.int64)
    head = LeastSquares(30, 2, classes=True, bias=False)
    total = head.vectors(torch.from_numpy(inputs), torch.from_numpy(targets)).sum(dim=0).numpy()
    for _ in range(20):
        noisy = head.solved(NoisySum(total + generator.normal(0, 15.0, total.size), 15.0), 1000).numpy()
        right = (inputs @ noisy.reshape(2, 30).T).argmax(axis=1) == targets
        assert np.abs(noisy).max() < 20  # not so for NaN
        assert right.mean() > 0.75


@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_the_log_odds_of_two_classes_are_those_of_scikit_learn_s_linear_discriminant(share: float) -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    generator = np.random.default_rng(3)
    targets = (generator.random(4000) < share).astype(np.int64)
    inputs = generator.normal(size=(4000, 4)) + targets[:, None] * [1.0, 0.5, 0.0, -0.2]
    head = LeastSquares(4, 2, classes=True, bias=True, norm=20.0)
    total = head.vectors(torch.from_numpy(inputs), torch.from_numpy(targets)).sum(dim=0).numpy()
    weights = head.solved(NoisySum(total, 0.0), 4000).numpy()
    slopes, offset = weights[4:8] - weights[:4], weights[9] - weights[8]
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(inputs, targets)
    assert slopes == pytest.approx(expected.coef_[0], rel=1e-3, abs=1e-3)
    assert offset == pytest.approx(float(expected.intercept_[0]), rel=1e-3, abs=1e-3)


def test_noise_leaves_the_risks_near_the_share_of_a_class() -> None:
    """A small sample: in each of 20 draws the mean risk lies within 0.06 of the share, whatever the noise makes of the features."""
    generator = np.random.default_rng(4)
    targets = (generator.random(4000) < 0.1).astype(np.int64)
    inputs = generator.normal(size=(4000, 4)) + targets[:, None] * [1.0, 0.5, 0.0, -0.2]
    head = LeastSquares(4, 2, classes=True, bias=True, norm=4.0)
    total = head.vectors(torch.from_numpy(inputs), torch.from_numpy(targets)).sum(dim=0).numpy()
    for _ in range(20):
        weights = head.solved(NoisySum(total + generator.normal(0, 10.0, total.size), 10.0), 4000).numpy()
        logits = inputs @ (weights[4:8] - weights[:4]) + weights[9] - weights[8]
        assert float((1 / (1 + np.exp(-logits))).mean()) == pytest.approx(0.1, abs=0.06)


def test_a_record_without_an_answer_adds_nothing() -> None:
    head = LeastSquares(2, 3, classes=True, bias=True)
    assert not head.vectors(torch.ones(1, 2), torch.tensor([-100])).any()
