"""Randomised response without a shuffler: 50-digit sums, the optimal composition theorem, and its extremes."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import binom

from grids import each
from ldpfl.privacy.accountants import randomized_response
from ldpfl.privacy.accountants.randomized_response import composed_delta, composed_epsilon, log_moment, report_delta, sum_of_reports_epsilon
from oracles import (
    advanced_composition_epsilon,
    composed_rdp_epsilon,
    enumerated_reports_delta,
    optimal_composition_epsilon,
    report_rdp,
    report_zcdp,
    zcdp_epsilon,
)

DELTAS = st.floats(min_value=1e-12, max_value=0.5)
COUNTS = st.integers(min_value=1, max_value=3000)
EPSILONS = st.floats(min_value=1e-3, max_value=8.0)


@pytest.fixture(autouse=True)
def _fifty_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpmath.mp, "dps", 50)


def precise_delta(epsilon0: float, reports: int, epsilon: Any) -> Any:
    """sum over b with loss e0 (2b - k) > epsilon of Bin(b; k, p1) (1 - e^(epsilon - loss)), to 50 digits."""
    base = mpmath.mpf(epsilon0)
    p1 = 1 / (1 + mpmath.exp(-base))
    total = mpmath.mpf(0)
    for ones in range(reports + 1):
        loss = base * (2 * ones - reports)
        if loss > epsilon:
            total += mpmath.binomial(reports, ones) * p1**ones * (1 - p1) ** (reports - ones) * (1 - mpmath.exp(epsilon - loss))
    return total


# --- one report -------------------------------------------------------------------------------------------------------


@each("epsilon0", [1e-9, 1e-6, 0.1, 1.0, 4.0, 40.0, 700.0, 5000.0])
@each("share", [0.0, 0.3, 0.999, 1.0, 1.5])
def test_delta_of_one_report_has_all_its_digits(epsilon0: float, share: float) -> None:
    epsilon = share * epsilon0
    x = mpmath.mpf(epsilon0)
    expected = max(mpmath.mpf(0), 1 / (1 + mpmath.exp(-x)) - mpmath.exp(mpmath.mpf(epsilon)) / (1 + mpmath.exp(x)))
    assert report_delta(epsilon0, epsilon) == pytest.approx(float(expected), rel=1e-12, abs=1e-45)


@each("epsilon0", [1e-6, 1e-3, 0.1, 1.0, 4.0, 40.0, 700.0])
@each("alpha", [1.001, 1.5, 2.0, 10.0, 1e4])
def test_renyi_divergence_of_one_report_has_all_its_digits(epsilon0: float, alpha: float) -> None:
    x, a = mpmath.mpf(epsilon0), mpmath.mpf(alpha)
    p1, p0 = 1 / (1 + mpmath.exp(-x)), 1 / (1 + mpmath.exp(x))
    expected = mpmath.log(p1**a * p0 ** (1 - a) + p0**a * p1 ** (1 - a)) / (a - 1)
    # alpha - 1 itself is rounded, by 1e-13 of itself near 1; at small epsilon0 two terms of about epsilon0^2 remain of epsilon0.
    assert float(report_rdp(epsilon0, alpha)) == pytest.approx(float(expected), rel=1e-9 if epsilon0 > 1e-5 else 1e-4, abs=0)


@pytest.mark.parametrize("epsilon0", [1e-3, 0.1, 1.0, 4.0, 40.0])
def test_zcdp_is_the_supremum_over_orders(epsilon0: float) -> None:
    alphas = 1 + np.logspace(-5, 4, 400)
    ratios = report_rdp(epsilon0, alphas) / alphas
    assert np.max(ratios) <= report_zcdp(epsilon0) * (1 + 1e-9)
    assert np.max(ratios) >= report_zcdp(epsilon0) * (1 - 1e-3), "no order comes near: rho is too large"
    assert report_zcdp(epsilon0) <= epsilon0**2 / 2


def test_log_moment_takes_a_number_and_an_array_alike() -> None:
    orders = np.array([1e-6, 0.5, 3.0, 1e5])
    assert log_moment(1.0, orders) == pytest.approx([float(log_moment(1.0, order)) for order in orders.tolist()], rel=1e-15)


# --- many reports -----------------------------------------------------------------------------------------------------


@each(
    ("epsilon0", "reports"),
    [(1e-6, 5), (1e-6, 200), (0.01, 200), (0.1, 100), (0.5, 37), (1.0, 1), (1.0, 2), (1.0, 200), (4.0, 50), (40.0, 7), (700.0, 20)],
)
@each("delta", [1e-12, 1e-5, 0.1])
def test_composition_equals_the_fifty_digit_sum(epsilon0: float, reports: int, delta: float) -> None:
    epsilon = composed_epsilon(epsilon0, reports, delta)
    if epsilon == 0:
        assert precise_delta(epsilon0, reports, mpmath.mpf(0)) <= delta * (1 + 1e-9)
        return
    # Relative in delta: a test of epsilon's digits that also says how many of them matter.
    assert float(precise_delta(epsilon0, reports, mpmath.mpf(epsilon))) == pytest.approx(delta, rel=1e-7 if epsilon0 < 100 else 1e-6)
    assert composed_delta(epsilon0, reports, 0.7 * epsilon) == pytest.approx(
        float(precise_delta(epsilon0, reports, mpmath.mpf(0.7) * epsilon)), rel=1e-9
    )


@each(
    ("epsilon0", "reports", "delta"),
    [
        (0.24797966545711478, 1000, 0.48288767730225285),
        (1.103075017958259, 200, 0.011905984699726839),
        (3.4577313659024806, 1000, 0.09316126674074261),
    ],
)
def test_an_epsilon_of_many_reports_is_never_below_what_fifty_digits_say(epsilon0: float, reports: int, delta: float) -> None:
    """Their rounding error was the largest of some thousand settings."""
    epsilon = composed_epsilon(epsilon0, reports, delta)
    assert precise_delta(epsilon0, reports, mpmath.mpf(epsilon)) <= delta
    assert precise_delta(epsilon0, reports, mpmath.mpf(epsilon * (1 - 1e-12))) > delta


@pytest.mark.parametrize("epsilon0", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("reports", [1, 2, 7, 30, 59, 60])
def test_it_is_the_optimal_composition_of_kairouz_oh_viswanath(epsilon0: float, reports: int) -> None:
    # Theorem 3.3: at epsilon = (k - 2i) e0, delta = sum_{l < i} C(k, l) (e^{(k - l) e0} - e^{(k - 2i + l) e0}) / (1 + e^e0)^k.
    growth = mpmath.exp(mpmath.mpf(epsilon0))
    for i in range(reports // 2 + 1):
        terms = (
            mpmath.binomial(reports, below) * (growth ** (reports - below) - growth ** (reports - 2 * i + below)) for below in range(i)
        )
        delta = float(mpmath.fsum(terms) / (1 + growth) ** reports)
        at = (reports - 2 * i) * epsilon0
        # at is a lattice point up to its rounding, so what lies on it may or may not count; it would add no more than 1e-14
        assert composed_delta(epsilon0, reports, at) == pytest.approx(delta, rel=1e-9, abs=1e-18)
        if 1e-15 < delta < 0.99 and at > 0:  # a delta next to 1 does not determine epsilon to so many digits
            assert composed_epsilon(epsilon0, reports, delta) == pytest.approx(at, rel=1e-9)


def test_delta_zero_gives_the_pure_sum() -> None:
    assert composed_epsilon(1.0, 218_400, 0.0) == 218_400.0
    assert composed_epsilon(0.3, 7, 0.0) == pytest.approx(2.1, rel=1e-15)
    assert composed_epsilon(math.inf, 3, 1e-5) == math.inf
    assert composed_epsilon(1.0, 0, 1e-5) == composed_epsilon(0.0, 5, 0.0) == 0.0


@pytest.mark.parametrize("epsilon0", [1e-6, 1.0, 40.0])
def test_ten_thousand_million_reports_take_a_second(epsilon0: float) -> None:
    reports, delta = 10**10, 1e-5
    start = time.process_time()
    epsilon = composed_epsilon(epsilon0, reports, delta)
    assert time.process_time() - start < 10  # a table of all reports would not fit any memory
    # P(loss > x) - e^-1 P(loss > x) <= delta(x - 1): the quantile of a binomial, less one, is attained; the quantile is a bound.
    p1 = 1 / (1 + math.exp(-epsilon0))
    certain = epsilon0 * (2 * binom.isf(delta / (1 - math.exp(-1)), reports, p1) - reports) - 1 - 2 * epsilon0
    enough = epsilon0 * (2 * (binom.isf(delta, reports, p1) + 1) - reports)
    assert max(certain, 0.0) <= epsilon <= enough
    assert enough - max(certain, 0.0) < 1e-3 * epsilon or epsilon0 == 1e-6, "the bounds say nothing"


def test_ten_thousand_million_tiny_reports_are_a_gaussian() -> None:
    # e0 sqrt(k) = 0.1: the loss is normal with variance 0.01 up to 1e-5 of itself, so epsilon is that of mu = 0.1.
    assert composed_epsilon(1e-6, 10**10, 1e-5) == pytest.approx(0.340669367, rel=1e-5)


@pytest.mark.parametrize("reports", [1, 10, 1000])
def test_huge_epsilons_neither_overflow_nor_vanish(reports: int) -> None:
    # Beyond e0 = 40 everything but k times + is rarer than 1e-14, so epsilon = k e0 + log(1 - delta).
    for epsilon0 in (40.0, 700.0):
        assert composed_epsilon(epsilon0, reports, 1e-5) == pytest.approx(epsilon0 * reports + math.log1p(-1e-5), rel=1e-12)


@pytest.mark.parametrize("epsilon0", [701.0, 1e4, 1e300])
def test_beyond_what_can_be_computed_the_pure_sum_stands(epsilon0: float) -> None:
    assert composed_epsilon(epsilon0, 3, 1e-5) == 3 * epsilon0


def test_tiny_epsilon() -> None:
    # One report at 1e-6 has delta(0) = tanh(e0 / 2) = 5e-7: below 1e-5, so nothing is spent.
    assert composed_epsilon(1e-6, 1, 1e-5) == 0.0
    assert composed_epsilon(1e-6, 1, 1e-7) == pytest.approx(8e-7, rel=1e-5)


# --- order ------------------------------------------------------------------------------------------------------------


@given(epsilon0=EPSILONS, reports=COUNTS, delta=DELTAS, factor=st.floats(min_value=1.0, max_value=2.0))
def test_more_reports_a_larger_epsilon_or_a_smaller_delta_cost_more(epsilon0: float, reports: int, delta: float, factor: float) -> None:
    epsilon = composed_epsilon(epsilon0, reports, delta)
    floor = epsilon * (1 - 1e-9) - 1e-12
    assert composed_epsilon(epsilon0 * factor, reports, delta) >= floor
    assert composed_epsilon(epsilon0, math.ceil(reports * factor), delta) >= floor
    assert composed_epsilon(epsilon0, reports, delta / factor) >= floor


@given(epsilon0=EPSILONS, reports=COUNTS, delta=DELTAS)
def test_no_published_bound_is_below_the_exact_one(epsilon0: float, reports: int, delta: float) -> None:
    exact = composed_epsilon(epsilon0, reports, delta) * (1 - 1e-9)
    assert exact <= epsilon0 * reports
    assert exact <= zcdp_epsilon(epsilon0, reports, delta)
    assert exact <= optimal_composition_epsilon(epsilon0, reports, delta)
    assert exact <= advanced_composition_epsilon(epsilon0, reports, delta)
    assert exact <= composed_rdp_epsilon(epsilon0, reports, delta)


@given(epsilon0=EPSILONS, delta=DELTAS)
def test_one_report_composed_is_one_report(epsilon0: float, delta: float) -> None:
    epsilon = composed_epsilon(epsilon0, 1, delta)
    if epsilon > 0:
        assert report_delta(epsilon0, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert report_delta(epsilon0, 0.0) <= delta * (1 + 1e-12)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_equal_groups_are_one_group() -> None:
    assert sum_of_reports_epsilon([(1.0, 300), (1.0, 700)], 1e-5) == composed_epsilon(1.0, 1000, 1e-5)


def test_unequal_groups_lie_between_their_extremes() -> None:
    mixed = sum_of_reports_epsilon([(1.0, 500), (0.5, 500)], 1e-5)
    assert composed_epsilon(0.5, 1000, 1e-5) < mixed < composed_epsilon(1.0, 1000, 1e-5)
    assert mixed >= composed_epsilon(1.0, 500, 1e-5)


@each(
    "groups",
    [
        [(2.0, 6), (0.7, 9)],
        [(1.0, 1), (2.0, 1)],
        [(0.1, 30), (0.1001, 30)],
        [(0.3, 5), (0.5, 4), (3.0, 3)],
        [(1e-9, 8), (2.5e-9, 3)],
        [(0.01, 12), (9.0, 2)],
    ],
)
@each("delta", [1e-18, 1e-12, 1e-5, 0.1])
def test_unequal_groups_are_enumerated(groups: list[tuple[float, int]], delta: float) -> None:
    """Above the smallest epsilon, by rounding alone."""
    epsilon = sum_of_reports_epsilon(groups, delta)
    assert enumerated_reports_delta(groups, epsilon) <= delta
    assert epsilon < 1e-13 or enumerated_reports_delta(groups, epsilon * (1 - 1e-9) - 1e-13) > delta


@each("groups", [[(0.1, 900), (0.17, 700)], [(0.02, 90), (0.03, 80), (0.05, 70)], [(3.0, 900), (1.0, 900)]])
@each("delta", [1e-12, 1e-5])
def test_losses_on_a_grid_bound_enumerated_ones_closely(
    monkeypatch: pytest.MonkeyPatch, groups: list[tuple[float, int]], delta: float
) -> None:
    monkeypatch.setattr(randomized_response, "_ENUMERATED", 10**6)
    enumerated = randomized_response._convolved_epsilon(tuple(groups), delta)
    monkeypatch.setattr(randomized_response, "_ENUMERATED", 0)
    randomized_response._sums_of_losses.cache_clear()
    assert enumerated * (1 - 1e-11) <= randomized_response._convolved_epsilon(tuple(groups), delta) <= enumerated * (1 + 1e-4)
    randomized_response._sums_of_losses.cache_clear()


@each("numbers", [(30, 30), (20_000, 30_000), (400, 10**6)])
@each("factor", [1.0001, 1.01, 1.5])
def test_a_larger_epsilon_of_some_reports_costs_more_and_at_most_as_if_all_had_it(numbers: tuple[int, int], factor: float) -> None:
    base = 1 / math.sqrt(sum(numbers))
    equal, mixed, larger = (
        sum_of_reports_epsilon([(base * first, numbers[0]), (base * second, numbers[1])], 1e-5)
        for first, second in ((1, 1), (1, factor), (factor, factor))
    )
    assert equal < mixed <= larger


def test_many_different_epsilons_cost_at_most_as_if_all_had_the_largest() -> None:
    """Too many to be convolved."""
    mixed = sum_of_reports_epsilon([(0.1 + 1e-6 * index, 3) for index in range(100)], 1e-5)
    assert composed_epsilon(0.1, 300, 1e-5) <= mixed <= composed_epsilon(0.1 + 99e-6, 300, 1e-5)


def test_groups_never_count_more_than_their_pure_sum() -> None:
    assert sum_of_reports_epsilon([(1.0, 1), (2.0, 1)], 1e-12) <= 3.0
    assert sum_of_reports_epsilon([(1.0, 1), (2.0, 1)], 0.0) == 3.0
    assert sum_of_reports_epsilon([], 1e-5) == 0.0
    assert sum_of_reports_epsilon([(math.inf, 1), (2.0, 1)], 1e-5) == math.inf


@pytest.mark.parametrize("epsilon0", [1e-12, 1e-9, 1e-7, 1e-5, 0.03])
@pytest.mark.parametrize("reports", [1, 3, 100])
def test_an_epsilon_is_never_below_what_fifty_digits_say_however_small_it_is(epsilon0: float, reports: int) -> None:
    """Rounding sums of masses, which are 1 in all, moves an epsilon of 1e-12 by many of its digits."""
    one = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon0)))
    masses = [mpmath.binomial(reports, ones) * one**ones * (1 - one) ** (reports - ones) for ones in range(reports, -1, -1)]
    uppers = [mpmath.fsum(masses[: size + 1]) for size in range(reports + 1)]
    lowers = [mpmath.fsum(masses[reports - size :]) for size in range(reports + 1)]
    for delta in (1e-25, 1e-20, 1e-16, 1e-13, 1e-12, 1e-10, 1e-8):
        pairs = [(upper - delta) / lower for upper, lower in zip(uppers, lowers, strict=True) if upper > delta]
        exact = max([mpmath.log(ratio) for ratio in pairs if ratio > 1], default=mpmath.mpf(0))
        found = composed_epsilon(epsilon0, reports, delta)
        assert exact <= found <= exact * (1 + mpmath.mpf(1e-6)) + mpmath.mpf(1e-13)


def test_a_pure_sum_is_never_rounded_down() -> None:
    epsilons = np.random.default_rng(3).uniform(1e-3, 10, 300)
    for epsilon, reports in zip(epsilons.tolist(), range(1, 301), strict=True):
        assert Fraction(composed_epsilon(epsilon, reports, 0.0)) >= Fraction(epsilon) * reports
