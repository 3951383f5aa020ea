"""The best of a random number of trials: exact laws by enumeration, against the bound; published bounds; calibration."""

from __future__ import annotations

from itertools import product
from math import exp, inf, log, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.best_of_trials import (
    Law,
    TrialCount,
    best_of_gaussian_epsilon,
    best_of_trials_epsilon,
    trial_mu,
)
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.util.randomness import Purpose, stream_key

Probabilities = NDArray[np.float64]

LAWS: tuple[Law, ...] = ("geometric", "logarithmic", "poisson")


def numbers_of(count: TrialCount) -> Probabilities:
    """Probabilities of 1, 2, ... trials."""
    weights = np.array(count.weights, dtype=np.float64)
    return np.asarray(weights / weights.sum())


def best_of(trial: Probabilities, count: TrialCount) -> Probabilities:
    """Law of the best of the trials, whose outcomes are listed from the worst to the best: by enumeration over the number of trials."""
    up_to = np.concatenate([[0.0], np.cumsum(trial)])
    return np.asarray(np.sum([share * np.diff(up_to**number) for number, share in enumerate(numbers_of(count), start=1)], axis=0))


def delta_of(one: Probabilities, other: Probabilities, epsilon: float) -> float:
    return float(np.maximum(one - exp(epsilon) * other, 0).sum())


def epsilon_of(one: Probabilities, other: Probabilities, delta: float) -> float:
    """Return the smallest exact epsilon of two laws at delta, in both directions."""
    found = 0.0
    for first, second in ((one, other), (other, one)):
        if delta_of(first, second, 0.0) > delta:
            found = max(found, brentq(lambda epsilon, a=first, b=second: delta_of(a, b, epsilon) - delta, 0.0, 60.0))
    return found


def power_of(one: Probabilities, other: Probabilities) -> tuple[Probabilities, Probabilities]:
    """Return the corners (p, T(p)) of the most powerful tests of two laws, the larger T of both directions at each p."""
    grid = np.unique(
        np.concatenate([np.linspace(0, 1, 2001), *(corner for pair in ((one, other), (other, one)) for corner in [_p(*pair)])])
    )
    return grid, np.maximum(*(np.interp(grid, _p(a, b), _t(a, b)) for a, b in ((one, other), (other, one))))


def _order(one: Probabilities, other: Probabilities) -> NDArray[np.int64]:
    return np.asarray(np.argsort(-other / one, kind="stable"))


def _p(one: Probabilities, other: Probabilities) -> Probabilities:
    return np.asarray(np.minimum(np.concatenate([[0.0], np.cumsum(one[_order(one, other)])]), 1.0))


def _t(one: Probabilities, other: Probabilities) -> Probabilities:
    return np.asarray(np.minimum(np.concatenate([[0.0], np.cumsum(other[_order(one, other)])]), 1.0))


def bound_of(one: Probabilities, other: Probabilities, count: TrialCount, delta: float) -> float:
    corners = power_of(one, other)
    return best_of_trials_epsilon(lambda p: np.interp(p, *corners), lambda at: epsilon_of(one, other, at), count, delta)


def binned(mu: float, bins: int) -> tuple[Probabilities, Probabilities]:
    """Gaussian noise as a finite mechanism: a trial that tells in which of some bins the noisy value lies, for values 0 and mu."""
    edges = np.concatenate([[-inf], np.linspace(-4.5, 4.5 + mu, bins - 1), [inf]])
    return np.diff(ndtr(edges - mu)), np.diff(ndtr(edges))


@pytest.mark.parametrize("law", LAWS)
def test_the_law_of_the_best_is_that_of_all_sequences_of_trials(law: Law) -> None:
    """Four outcomes, at most four trials: every sequence by itself, of equal scores the first."""
    count, trial = TrialCount(2, 4, law), np.array([0.4, 0.3, 0.2, 0.1])
    found = np.zeros(4)
    for number, share in enumerate(numbers_of(count), start=1):
        for outcomes in product(range(4), repeat=number):
            found[max(outcomes)] += share * np.prod(trial[list(outcomes)])
    assert best_of(trial, count) == pytest.approx(found, abs=1e-14)


@pytest.mark.thorough_for("5.0-logarithmic", "10.0-geometric", "10.0-logarithmic", "10.0-poisson")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [2.0, 5.0, 10.0])
def test_no_order_of_outcomes_costs_more_than_the_bound(law: Law, mean: float) -> None:
    """Random finite trials (settings and scores) in random orders, and Gaussian ones in the order that costs most."""
    count, draws = TrialCount.of(mean, law=law), np.random.default_rng(5)
    for size, closeness in product((2, 3, 6, 12), (0.05, 0.5, 2.0)):
        one = draws.dirichlet(np.ones(size))
        other = one * np.exp(closeness * draws.uniform(-1, 1, size))
        other /= other.sum()
        for delta in (1e-6, 1e-3, 0.05):
            assert epsilon_of(best_of(one, count), best_of(other, count), delta) <= bound_of(one, other, count, delta) * (1 + 1e-9)


@pytest.mark.thorough_except("0.4-logarithmic-1.06")
@pytest.mark.parametrize(("law", "factor"), [("geometric", 1.08), ("logarithmic", 1.06), ("poisson", 1.16)])
@pytest.mark.parametrize("mu", [0.15, 0.4])
def test_the_bound_is_nearly_attained(law: Law, factor: float, mu: float) -> None:
    """A Gaussian trial whose scores are in the worst order: best are the outcomes that speak for the second data set, and just below them
    those that speak most for the first one."""
    count, delta = TrialCount.of(10, law=law), 1e-5
    one, other = binned(mu, 400)
    attained = 0.0
    for above in range(1, 400, 4):  # from the worst outcome to the best
        order = [*range(above, 400), *range(above)]
        attained = max(attained, epsilon_of(best_of(one[order], count), best_of(other[order], count), delta))
    bound = best_of_gaussian_epsilon(mu, count, delta)
    assert attained <= bound <= factor * attained


@pytest.mark.thorough
def test_pure_trials_cost_what_liu_and_talwar_prove() -> None:
    """Geometric: at most 3 epsilon; logarithmic: at most 2 epsilon; nearly so for many trials. The grid adds up to 0.005."""
    laws: tuple[tuple[Law, int], ...] = (("geometric", 3), ("logarithmic", 2))
    for law, times in laws:
        for epsilon, mean in product((0.1, 1.0), (10.0, 1000.0)):
            count = TrialCount(mean, 10_000, law)
            found = best_of_trials_epsilon(lambda p, e=epsilon: np.minimum(1.0, exp(e) * p), lambda _, e=epsilon: e, count, 0.0)  # type: ignore[misc]
            assert found <= times * epsilon + 0.005
            assert found >= (0.9 if mean == 1000 else 0.5) * times * epsilon


def papernot_steinke(order: Probabilities, mu: float, mean: float, eta: int) -> Probabilities:
    """Rényi divergence by Papernot and Steinke 2022, Theorem 2, of trials with Gaussian noise, whose own at order a is a mu^2 / 2."""
    gamma = 1 / mean if eta else brentq(lambda g: (1 / g - 1) / log(1 / g) - mean, 1e-9, 1 - 1e-9)
    hat = max(1.0, sqrt(2 * log(1 / gamma)) / mu)  # the order that makes the bound smallest
    choice = (1 + eta) * ((1 - 1 / hat) * hat * mu**2 / 2 + log(1 / gamma) / hat)
    return order * mu**2 / 2 + choice + log(mean) / (order - 1)


def test_the_enumeration_keeps_the_published_renyi_divergences() -> None:
    order = np.array([1.5, 2.0, 8.0, 30.0])
    for mu, eta in product((0.2, 0.8), (0, 1)):
        count = TrialCount(10, 2_000, "geometric" if eta else "logarithmic")
        one, other = (best_of(trial, count) for trial in binned(mu, 60))
        for first, second in ((one, other), (other, one)):
            exact = [log(float(np.sum(first**a * second ** (1 - a)))) / (a - 1) for a in order]
            assert (exact <= papernot_steinke(order, mu, 10, eta)).all()


@pytest.mark.thorough
def test_the_bound_is_below_that_by_renyi_divergences() -> None:
    order, delta = np.exp(np.linspace(log(1.01), log(1e5), 20_000)), 1e-5
    for mu, mean, eta in product((0.05, 0.25, 1.0), (2.0, 10.0, 50.0), (0, 1)):
        law: Law = "geometric" if eta else "logarithmic"
        ours = best_of_gaussian_epsilon(mu, TrialCount(mean, 10_000, law), delta)
        theirs = papernot_steinke(order, mu, mean, eta) + np.log1p(-1 / order) - (log(delta) + np.log(order)) / (order - 1)
        assert gaussian_epsilon(mu, delta) < ours < theirs.min(), (mu, mean, eta)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_has_the_stated_mean_and_shape(law: Law) -> None:
    count = TrialCount.of(7.5, law=law)
    shares, numbers = numbers_of(count), np.arange(1.0, 31.0)
    assert count.limit == len(shares) == 30
    assert float(shares @ numbers) == pytest.approx(7.5, rel=1e-9)
    assert count.exact_mean == pytest.approx(7.5, rel=1e-9)
    factors = {"geometric": np.ones(29), "logarithmic": numbers[1:] / numbers[:-1], "poisson": numbers[1:]}
    ratio = shares[1:] / shares[:-1] * factors[law]
    assert ratio == pytest.approx(np.full(29, ratio[0]), rel=1e-9)
    points = np.array([0.0, 0.3, 1.0])
    assert count.slope(points) == pytest.approx([float(shares @ (numbers * x ** (numbers - 1))) for x in points], rel=1e-12)


def test_numbers_of_trials_are_drawn_by_their_law() -> None:
    """Chi-squared over ten numbers and the rest: false alarm in one of a million."""
    count, draws = TrialCount.of(4, law="geometric"), 20_000
    found = np.bincount([count.drawn(int.from_bytes(stream_key(place, Purpose.TUNING))) for place in range(draws)], minlength=17)[1:]
    expected = draws * numbers_of(count)
    assert len(found) == len(expected) == 16
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert statistic < 59.6  # 15 degrees of freedom, 1 - 3e-7


@pytest.mark.thorough
@pytest.mark.parametrize("law", LAWS)
def test_a_trial_s_noise_is_the_least_that_keeps_the_target(law: Law) -> None:
    for epsilon, mean, delta in product((0.1, 2.0, 8.0), (1.0, 3.0, 20.0), (1e-5, 1e-9)):
        count = TrialCount.of(mean, law=law)
        mu = trial_mu(epsilon, count, delta)
        assert best_of_gaussian_epsilon(mu, count, delta) <= epsilon
        assert best_of_gaussian_epsilon(mu * 1.0001, count, delta) > epsilon
    assert gaussian_epsilon(trial_mu(2.0, TrialCount(1, 1), 1e-5), 1e-5) == pytest.approx(2.0, rel=1e-6)


def test_more_trials_cost_more() -> None:
    for law in LAWS:
        costs = [best_of_gaussian_epsilon(0.3, TrialCount.of(mean, law=law), 1e-5) for mean in (1, 1.5, 2, 5, 20)]
        assert costs == sorted(costs)
        assert costs[0] == pytest.approx(gaussian_epsilon(0.3, 1e-5), rel=1e-6)
    assert TrialCount.of(2.1).limit == 9


@pytest.mark.parametrize(
    ("mean", "limit", "law", "said"),
    [
        (0.5, 4, "geometric", "mean number of trials is 0.5"),
        (inf, 4, "geometric", "mean number of trials is inf"),
        (5, 1, "geometric", "and the maximum 1"),
        (5, 9, "geometric", "set the mean from 1 to half of the maximum"),
        (2, 20_000, "geometric", "from 1 to 10,000"),
        (2, 8, "uniform", "law is 'uniform'"),
    ],
)
def test_laws_that_there_are_not_are_refused(mean: float, limit: int, law: Law, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrialCount(mean, limit, law)


def test_a_wide_power_function_is_bounded_between_grid_points() -> None:
    """A trial that tells everything with a small probability: T jumps at 0, which no grid point hides."""
    found = best_of_trials_epsilon(lambda p: np.minimum(1.0, p + 0.01), lambda _: 0.0, TrialCount.of(10), 0.01)
    exact = TrialCount.of(10)
    p = np.linspace(0, 1, 100_001)
    least = log(float((exact.slope(1 - p) / exact.slope(1 - np.minimum(1.0, p + 0.01))).max()))
    assert least <= found <= least + 0.006


def test_a_poisson_number_with_a_large_mean_is_refused_with_a_law_that_does() -> None:
    """A single trial would have a probability below 2^-64, which counts as 0, and no bound is known then."""
    assert 0 < trial_mu(4.0, TrialCount.of(40), 1e-5) < trial_mu(4.0, TrialCount.of(50, law="geometric"), 1e-5)
    with pytest.raises(ConfigError, match=r"about 40.*--law geometric"):
        TrialCount.of(60)
