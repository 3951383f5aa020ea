"""One shuffled bit: enumeration of every input, the right maximum over worst cases, cells, and the windows it computes with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy.stats import binom

from ldpfl.privacy.accountants.binomial import TAIL, Binomial, log_pmf_of_sum, log_sigmoid, sigmoid
from ldpfl.privacy.accountants.clones import clone_epsilon
from ldpfl.privacy.accountants.losses import curve_of, delta_of
from ldpfl.privacy.accountants.randomized_response import HUGE_BUDGET, composed_epsilon, report_delta
from ldpfl.privacy.accountants.shuffled_bits import EXACT_CLIENTS, attained_losses, shuffled_losses, single_delta, single_epsilon

Floats = NDArray[np.float64]


def plus_probability(epsilon0: float) -> float:
    return 1 / (1 + math.exp(-epsilon0))


def count_law(probabilities: Sequence[Fraction]) -> list[Fraction]:
    """Return the law of the number of + among independent clients, by going through all 2^n answers."""
    law = [Fraction(0)] * (len(probabilities) + 1)
    for answers in itertools.product((False, True), repeat=len(probabilities)):
        law[sum(answers)] += math.prod((p if plus else 1 - p) for plus, p in zip(answers, probabilities, strict=True))
    return law


def float_law(probabilities: Sequence[float]) -> Floats:
    law: Floats = np.ones(1)
    for p in probabilities:
        law = np.convolve(law, [1 - p, p])
    return law


def hockey_stick(first: Floats, second: Floats, epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def pair(epsilon0: float, clients: int, uppers: int) -> tuple[Floats, Floats]:
    """Return the count's two laws when ``uppers`` of the others are at the upper extreme, by one direct convolution."""
    p1 = plus_probability(epsilon0)
    others = np.convolve(binom.pmf(np.arange(uppers + 1), uppers, p1), binom.pmf(np.arange(clients - uppers), clients - 1 - uppers, 1 - p1))
    return np.convolve(others, [1 - p1, p1]), np.convolve(others, [p1, 1 - p1])


# --- enumeration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("epsilon0", [0.2, 1.0, 3.0])
@pytest.mark.thorough_for("1.0-6", "0.2-6", "3.0-6", "1.0-5", "3.0-5")
def test_it_is_the_worst_over_all_vertices_in_exact_arithmetic(clients: int, epsilon0: float) -> None:
    p1 = Fraction(plus_probability(epsilon0))
    for epsilon in (0.0, 0.15 * epsilon0, 0.7 * epsilon0, 0.98 * epsilon0, 1.1 * epsilon0):
        factor = Fraction(math.exp(epsilon))
        worst = Fraction(0)
        for others in itertools.product((p1, 1 - p1), repeat=clients - 1):
            one, other = count_law([p1, *others]), count_law([1 - p1, *others])
            for first, second in ((one, other), (other, one)):
                worst = max(worst, sum((max(p - factor * r, Fraction(0)) for p, r in zip(first, second, strict=True)), Fraction(0)))
        assert single_delta(epsilon0, clients, epsilon) == pytest.approx(float(worst), rel=1e-10, abs=1e-15)


@given(data=st.data(), clients=st.integers(2, 12), epsilon0=st.floats(0.01, 6.0), share=st.floats(0.0, 1.0))
def test_no_inner_input_exceeds_it(data: st.DataObject, clients: int, epsilon0: float, share: float) -> None:
    low, high = 1 - plus_probability(epsilon0), plus_probability(epsilon0)
    inputs = data.draw(st.lists(st.floats(low, high), min_size=clients + 1, max_size=clients + 1))
    one, other = float_law([inputs[0], *inputs[2:]]), float_law([inputs[1], *inputs[2:]])
    epsilon = share * epsilon0
    assert hockey_stick(one, other, epsilon) <= single_delta(epsilon0, clients, epsilon) + 1e-14


def test_one_client_is_not_hidden_and_two_are_a_little() -> None:
    assert single_delta(1.0, 1, 0.3) == report_delta(1.0, 0.3)
    assert single_epsilon(1.0, 1, 1e-3) == composed_epsilon(1.0, 1, 1e-3)
    p1 = plus_probability(1.0)
    two = max(p1 * p1 - math.exp(0.3) * p1 * (1 - p1), p1 * p1 + 2 * p1 * (1 - p1) - math.exp(0.3) * (p1 * p1 + (1 - p1)))
    assert single_delta(1.0, 2, 0.3) == pytest.approx(two, rel=1e-12)
    assert single_delta(1.0, 2, 0.3) < report_delta(1.0, 0.3)


# --- which worst case -------------------------------------------------------------------------------------------------


def test_one_data_set_in_one_direction_is_not_enough() -> None:
    # What an accountant that looks at m = 0 alone would say, by a factor of nine too little.
    deltas = {uppers: hockey_stick(*pair(1.0, 100, uppers), 0.3) for uppers in range(100)}
    assert deltas[0] == pytest.approx(2.0e-5, rel=0.05)
    assert single_delta(1.0, 100, 0.3) == pytest.approx(max(deltas.values()), rel=1e-9)
    assert single_delta(1.0, 100, 0.3) == pytest.approx(1.8e-4, rel=0.05)


def test_the_worst_data_set_depends_on_epsilon() -> None:
    # m = 98 at 0.3, and others elsewhere: neither m = n - 1 nor any other one would do for all.
    at_98 = hockey_stick(*pair(1.0, 100, 98), 0.3)
    assert at_98 > hockey_stick(*pair(1.0, 100, 99), 0.3) * (1 + 1e-6)
    assert single_delta(1.0, 100, 0.3) == pytest.approx(at_98, rel=1e-9)
    worst = {int(np.argmax([hockey_stick(*pair(1.0, 100, m), epsilon) for m in range(100)])) for epsilon in (0.05, 0.1, 0.3, 0.31, 0.5)}
    assert len(worst) > 1


@pytest.mark.parametrize(("epsilon0", "clients"), [(0.3, 3), (1.0, 40), (4.0, 200), (4.0, 7), (8.0, 60)])
@pytest.mark.thorough_for("4.0-200")
def test_epsilon_and_delta_are_inverse(epsilon0: float, clients: int) -> None:
    for delta in (1e-9, 1e-5, 1e-2):
        epsilon = single_epsilon(epsilon0, clients, delta)
        assert 0 <= epsilon <= epsilon0
        if epsilon > 0:
            assert single_delta(epsilon0, clients, epsilon) == pytest.approx(delta, rel=1e-6)
            assert single_delta(epsilon0, clients, 0.99 * epsilon) > delta
        else:
            assert single_delta(epsilon0, clients, 0.0) <= delta * (1 + 1e-9)


@given(clients=st.integers(1, 200), epsilon0=st.floats(0.01, 6.0), delta=st.floats(1e-9, 0.1))
@settings(max_examples=settings().max_examples // 4)
@pytest.mark.slow
@pytest.mark.thorough
def test_a_larger_cohort_never_costs_more(clients: int, epsilon0: float, delta: float) -> None:
    # One more client is noise added to the count, which is post-processing.
    assert single_epsilon(epsilon0, clients + 1, delta) <= single_epsilon(epsilon0, clients, delta) * (1 + 1e-9) + 1e-12


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon0", [40.0, 1000.0])
@pytest.mark.parametrize("clients", [2, 100, 3000])
@pytest.mark.thorough_for("3000-1000.0")
def test_an_almost_certain_bit_is_not_hidden(epsilon0: float, clients: int) -> None:
    assert single_epsilon(epsilon0, clients, 1e-5) == pytest.approx(epsilon0 + math.log1p(-1e-5), rel=1e-12)
    assert single_delta(epsilon0, clients, 0.5) == pytest.approx(1.0, rel=1e-12)
    assert shuffled_losses(epsilon0, clients).log_moment(np.array([2.0]))[0] == pytest.approx(2 * epsilon0, rel=1e-9)


def test_a_tiny_epsilon_is_hidden_and_keeps_its_digits() -> None:
    epsilon0, clients = 1e-6, 50
    # To first order P - R = tanh(e0/2) times the increments of a fair binomial over n - 1: the largest one is the delta.
    expected = math.tanh(epsilon0 / 2) * float(binom.pmf((clients - 1) // 2, clients - 1, 0.5))
    assert single_delta(epsilon0, clients, 0.0) == pytest.approx(expected, rel=1e-5)
    assert single_epsilon(epsilon0, clients, 1e-5) == 0.0
    small = single_epsilon(epsilon0, clients, 1e-12)
    assert 0 < small < epsilon0
    assert single_delta(epsilon0, clients, small) == pytest.approx(1e-12, rel=1e-3)


# --- cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [EXACT_CLIENTS + 1, 1500])
@pytest.mark.parametrize("epsilon0", [0.5, 1.0, 4.0])
@pytest.mark.slow
@pytest.mark.thorough_for("0.5-1025", "0.5-1500", "1.0-1025", "4.0-1025", "4.0-1500")
def test_cells_are_sound_and_cost_less_than_one_percent(clients: int, epsilon0: float) -> None:
    exact = [pair(epsilon0, clients, m) for m in (0, 1, clients // 2, clients - 40, clients - 9, clients - 3, clients - 2, clients - 1)]
    for delta in (1e-7, 1e-3):
        epsilon = single_epsilon(epsilon0, clients, delta)
        worst = max(hockey_stick(*laws, epsilon) for laws in exact)
        assert worst <= delta, "the bound lies below one of the data sets it covers"
        assert worst <= single_delta(epsilon0, clients, epsilon)
        # At 1 % less, some data set is already worse than delta: the bound is no more than 1 % above the exact number.
        assert max(hockey_stick(*laws, 0.99 * epsilon) for laws in exact) > delta


@pytest.mark.slow
def test_exact_and_cells_join_without_a_step() -> None:
    before, after = single_epsilon(1.0, EXACT_CLIENTS, 1e-6), single_epsilon(1.0, EXACT_CLIENTS + 1, 1e-6)
    assert before * 0.999 < after < before * 1.01


@pytest.mark.parametrize("clients", [1, 2, 30, 2000])
@pytest.mark.parametrize("epsilon0", [0.1, 1.0, 5.0])
@pytest.mark.slow
@pytest.mark.thorough_for("1.0-30", "0.1-30", "5.0-30", "5.0-2000", "1.0-2000", "0.1-2000")
def test_grid_losses_dominate_every_data_set(clients: int, epsilon0: float) -> None:
    losses = shuffled_losses(epsilon0, clients)
    epsilons = np.linspace(0.0, 1.05, 8) * min(epsilon0, losses.half * losses.step)
    joint = losses.dominating
    assert joint.masses.sum() + joint.infinite == pytest.approx(1.0, abs=1e-9)
    for epsilon in epsilons.tolist():
        worst = max(hockey_stick(*pair(epsilon0, clients, m), epsilon) for m in {0, clients // 2, max(clients - 2, 0), clients - 1})
        best_row = max(delta_of(losses.losses, row, epsilon) for row in losses.masses)
        assert worst <= best_row + 1e-13
        assert best_row <= delta_of(joint.losses, joint.masses, epsilon) + joint.infinite + 1e-13
        # and none of them is far too large
        shifted = max(epsilon - 0.02 * losses.half * losses.step, 0.0)
        assert delta_of(joint.losses, joint.masses, epsilon) <= single_delta(epsilon0, clients, shifted) * 1.02 + 1e-12


def test_the_dominating_pair_may_be_swapped() -> None:
    joint = shuffled_losses(1.0, 50).dominating
    epsilons = np.linspace(0.0, 0.8, 30)
    forward = curve_of(joint.losses, joint.masses, epsilons)
    backward = curve_of(-joint.losses[::-1], (joint.masses * np.exp(-joint.losses))[::-1], epsilons)
    assert backward == pytest.approx(forward, rel=1e-9, abs=1e-15)


def test_attained_losses_are_those_of_one_data_set() -> None:
    losses = attained_losses(1.0, 60)
    one, other = pair(1.0, 60, 59)
    for epsilon in (0.05, 0.2, 0.6):
        assert delta_of(losses.losses, losses.masses[0], epsilon) == pytest.approx(hockey_stick(one, other, epsilon), rel=2e-3)
    assert losses.log_moment(np.array([3.0]))[0] == pytest.approx(math.log(float((one**4 / other**3).sum())), rel=1e-5)
    assert losses.outside == 0.0


@pytest.mark.parametrize("order", [0.0, 0.5, 4.0])
def test_tilted_moments_bound_those_of_a_data_set(order: float) -> None:
    losses = shuffled_losses(1.0, 20)
    mean, variance, third = (rows[1] for rows in losses.tilted(np.array([1.0, order])))
    for row in range(20):
        weights = losses.masses[row] * np.exp(order * losses.losses)
        weights /= weights.sum()
        exact = float(weights @ losses.losses)
        assert mean[row] == pytest.approx(exact, rel=1e-9)
        assert variance[row] == pytest.approx(float(weights @ (losses.losses - exact) ** 2), rel=1e-7)
        assert third[row] >= float(weights @ np.abs(losses.losses - exact) ** 3) * (1 - 1e-9)


# --- windows ----------------------------------------------------------------------------------------------------------


def precise_log_probability(first: Binomial, second: Binomial, value: int) -> float:
    """log Pr[first + second = value]: one term to 40 digits, all others relative to it by sums of logarithms.

    Term j + 1 over term j is (m - j) / (j + 1) * (s - j) / (l - s + j + 1) * odds ratio; over a few thousand terms that add up
    this is right to some 1e-12.
    """

    def steps(j: Floats) -> Floats:
        odds = first.log_odds - second.log_odds
        return np.asarray(np.log((first.count - j) / (j + 1)) + np.log((value - j) / (second.count - value + j + 1)) + odds)

    low, high = max(0, value - second.count), min(first.count, value)
    below, above = low, high
    while above - below > 1:  # the terms rise to one top and fall again
        middle = (below + above) // 2
        below, above = (middle, above) if steps(np.array([float(middle)]))[0] > 0 else (below, middle)
    top, half = above, 50 + math.ceil(8 * math.sqrt(min(first.count, second.count)))  # at least 16 standard deviations
    falling = np.cumsum(steps(np.arange(top, min(high, top + half), dtype=np.float64)))
    rising = -np.cumsum(steps(np.arange(max(low, top - half), top, dtype=np.float64))[::-1])
    relative = math.fsum(np.exp(rising)) + math.fsum(np.exp(falling)) + 1
    with mpmath.workdps(40):
        total = mpmath.mpf(0)
        for part, ones in ((first, top), (second, value - top)):
            odds = mpmath.mpf(part.log_odds)
            total += mpmath.loggamma(part.count + 1) - mpmath.loggamma(ones + 1) - mpmath.loggamma(part.count - ones + 1)
            total += ones * odds - part.count * mpmath.log1p(mpmath.exp(odds))
        return float(total + mpmath.log(relative))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Binomial(100_000, 1.0), Binomial(100_000, -1.0)),
        (Binomial(195_000, 1.0), Binomial(5_000, -1.0)),
        (Binomial(400_000, 4.0), Binomial(300_000, -4.0)),
        (Binomial(300_000, 8.0), Binomial(40_000_000, -8.0)),
        (Binomial(50_000_000, 1.0), Binomial(50_000_000, -1.0)),
        (Binomial(80_000, 0.1), Binomial(120_000, -0.1)),
    ],
)
@pytest.mark.thorough_for("first3-second3", "first4-second4")
def test_the_tilted_convolution_is_relatively_exact_far_into_both_tails(first: Binomial, second: Binomial) -> None:
    low, logs = log_pmf_of_sum([first, second])
    center, deviation = first.mean + second.mean, math.sqrt(first.variance + second.variance)
    borders = (2.5, 5.0, 7.5, 10.0)  # where stretches meet and where they are centred: errors would show beside them
    for z in (-12.0, -10.1, -7.6, -7.4, -5.0, -2.6, -2.4, -1.0, 0.0, 0.7, *borders, 9.0, 11.0, 12.0):
        value = round(center + z * deviation)
        assert logs[value - low] == pytest.approx(precise_log_probability(first, second, value), abs=1e-9), z
        ratio = precise_log_probability(first, second, value) - precise_log_probability(first, second, value + 1)
        # The loss is a difference of neighbours: an error common to both would not matter, one of its own would.
        assert logs[value - low] - logs[value + 1 - low] == pytest.approx(ratio, abs=1e-9), z


@pytest.mark.parametrize("parts", [(Binomial(30, 1.0), Binomial(12, -1.0)), (Binomial(400, 2.0), Binomial(300, -2.0), Binomial(50, 0.0))])
@pytest.mark.thorough_for("parts1")
def test_small_sums_are_convolved_exactly(parts: tuple[Binomial, ...]) -> None:
    low, logs = log_pmf_of_sum(parts)
    with mpmath.workdps(30):
        law: list[Any] = [mpmath.mpf(1)]
        for part in parts:
            p = 1 / (1 + mpmath.exp(-mpmath.mpf(part.log_odds)))
            coins = [mpmath.binomial(part.count, i) * p**i * (1 - p) ** (part.count - i) for i in range(part.count + 1)]
            law = [
                mpmath.fsum(law[i - j] * coins[j] for j in range(max(0, i - len(law) + 1), min(i, part.count) + 1))
                for i in range(len(law) + part.count)
            ]
        expected = [float(mpmath.log(p)) for p in law]
    wanted = np.array(expected[low : low + logs.size])
    # Each part is itself cut off far out, so the very ends are less sharp; nothing there amounts to TAIL.
    inside = wanted > 2 * math.log(TAIL)
    assert logs[inside] == pytest.approx(wanted[inside], abs=1e-11)
    assert logs == pytest.approx(wanted, abs=1e-6)
    assert math.fsum(math.exp(value) for value in expected[:low] + expected[low + logs.size :]) < TAIL


@pytest.mark.parametrize("part", [Binomial(10**6, 1.0), Binomial(10**8, -9.0), Binomial(10**5, 0.0), Binomial(37, 3.0), Binomial(1, -2.0)])
def test_one_binomial_equals_scipys(part: Binomial) -> None:
    low, logs = part.log_pmf()
    values = low + np.arange(logs.size)
    # scipy's own log-gamma loses 1e-16 of n log n
    expected = binom.logpmf(values, part.count, sigmoid(part.log_odds))
    assert logs == pytest.approx(expected, abs=1e-6, rel=1e-9)
    assert np.exp(logs).sum() == pytest.approx(1.0, rel=1e-12)
    outside = binom.cdf(low - 1, part.count, sigmoid(part.log_odds)) + binom.sf(values[-1], part.count, sigmoid(part.log_odds))
    assert outside < TAIL


def test_empty_sums_and_tilts() -> None:
    assert log_pmf_of_sum([Binomial(0, 1.0)])[1].tolist() == [0.0]
    assert log_pmf_of_sum([])[0] == 0
    assert Binomial(5, 1.0).tilted(0.5) == Binomial(5, 1.5)
    assert Binomial(5, 0.0).mean == 2.5
    assert Binomial(5, 0.0).variance == 1.25


@pytest.mark.parametrize("x", [-5000.0, -40.0, -1e-9, 0.0, 1e-9, 2.0, 40.0, 5000.0])
def test_sigmoids_have_all_their_digits(x: float) -> None:
    exact = 1 / (1 + mpmath.exp(-mpmath.mpf(x)))
    assert sigmoid(x) == pytest.approx(float(exact), rel=1e-14, abs=1e-320)
    with mpmath.workdps(40):
        assert log_sigmoid(x) == pytest.approx(float(-mpmath.log1p(mpmath.exp(-mpmath.mpf(x)))), rel=1e-14, abs=0)


def _precise_laws(epsilon0: float, others: int, plus: Any) -> tuple[list[Any], list[Any]]:
    """Return the laws of the count with either input, where each of ``others`` adds 1 with probability ``plus``; to all digits."""
    p1 = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon0)))
    law = [0, *(mpmath.binomial(others, k) * plus**k * (1 - plus) ** (others - k) for k in range(others + 1)), 0]
    with_one = [p1 * law[k] + (1 - p1) * law[k + 1] for k in range(others + 2)]
    return with_one, [(1 - p1) * law[k] + p1 * law[k + 1] for k in range(others + 2)]


def _precise_delta(first: list[Any], second: list[Any], epsilon: Any) -> Any:
    return mpmath.fsum(max(mpmath.mpf(0), p - mpmath.exp(epsilon) * r) for p, r in zip(first, second, strict=True))


@pytest.mark.thorough_except("2-1e-12-0.9", "24-0.01-0.001", "300-1e-15-0.1")
@pytest.mark.parametrize("share", [1 - 1e-6, 0.9, 0.1, 1e-3, 1e-9])
@pytest.mark.parametrize("epsilon0", [1e-15, 1e-12, 1e-9, 1e-7, 1e-4, 1e-2])
@pytest.mark.parametrize("clients", [2, 24, 300])
def test_a_tiny_epsilon_is_rounded_up(clients: int, epsilon0: float, share: float) -> None:
    """Differences of sums that are almost 1 lose all digits of it: some came out a quarter too small."""
    with mpmath.workdps(50):
        half, p1 = mpmath.mpf(1) / 2, 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon0)))
        for plus, is_clones in ((p1, False), (half, True)):
            laws = _precise_laws(epsilon0, clients - 1, plus)
            delta = float(share * _precise_delta(*laws, 0))
            found = clone_epsilon(epsilon0, clients, delta, 1.0) if is_clones else single_epsilon(epsilon0, clients, delta)
            assert _precise_delta(*laws, mpmath.mpf(found)) <= delta
            assert found <= epsilon0


EPSILONS = [10.0**power for power in range(-17, 4)]
PART_OF_DELTA = [0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.001, 3.0]


@pytest.mark.parametrize("epsilon0", EPSILONS)
def test_one_report_of_one_client_costs_the_closed_form_and_never_less(epsilon0: float) -> None:
    """log((p1 - delta) / p0), by 60 digits, from the smallest budgets to the largest; what is added for rounding is below 1e-14."""
    with mpmath.workdps(60):
        p0 = 1 / (1 + mpmath.exp(epsilon0))
        largest = 1 - 2 * p0  # delta at epsilon 0
        for part in PART_OF_DELTA:
            delta = float(min(largest * part, 0.999))
            truth = float(mpmath.log((1 - p0 - delta) / p0)) if delta < largest else 0.0
            for found in (single_epsilon(epsilon0, 1, delta), composed_epsilon(epsilon0, 1, delta)):
                most = epsilon0 if epsilon0 > HUGE_BUDGET else min(epsilon0, truth * (1 + 1e-11) + 1e-14)
                assert truth * (1 - 1e-15) <= found <= most


@pytest.mark.thorough_except("2-1e-17", "2-1e-05", "3-0.1", "3-1000.0")
@pytest.mark.parametrize("epsilon0", EPSILONS[::4])
@pytest.mark.parametrize("clients", [2, 3, 50])
def test_a_shuffled_report_never_costs_less_than_what_the_count_tells(epsilon0: float, clients: int) -> None:
    """Against the exact curve of every worst case by 60 digits: above it where delta is smaller than what is told, and at most epsilon0."""
    with mpmath.workdps(500):  # beside 1, e^-1000 has its first digit there
        largest = max(exact_delta(epsilon0, clients, ones, 0.0) for ones in range(clients))
        for part in (1e-9, 0.1, 0.5, 0.9, 1.001):
            delta = float(largest * part)
            found = single_epsilon(epsilon0, clients, delta)
            assert 0.0 <= found <= epsilon0
            if found < epsilon0:  # delta at what was found is no larger than delta
                at = max(exact_delta(epsilon0, clients, ones, found) for ones in range(clients))
                assert at <= delta * (1 + mpmath.mpf("1e-10"))


@cache
def law_of_others(epsilon0: float, clients: int, ones: int) -> list[mpmath.mpf]:
    """Return the chances of each count of the other clients' bits, where ``ones`` of them hold one and the rest hold none."""
    high = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon0)))
    others = [mpmath.mpf(1)]
    for chance in [high] * ones + [1 - high] * (clients - 1 - ones):
        others = [a * (1 - chance) + b * chance for a, b in zip([*others, mpmath.mpf(0)], [mpmath.mpf(0), *others], strict=True)]
    return others


def exact_delta(epsilon0: float, clients: int, ones: int, epsilon: float) -> mpmath.mpf:
    """Return delta(``epsilon``) of the count where ``ones`` of the other clients hold one and the rest hold none."""
    high, factor = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon0))), mpmath.exp(epsilon)
    others, total = law_of_others(epsilon0, clients, ones), mpmath.mpf(0)
    for without, with_one in zip([*others, mpmath.mpf(0)], [mpmath.mpf(0), *others], strict=True):
        first, second = with_one * high + without * (1 - high), with_one * (1 - high) + without * high
        total += max(first - factor * second, mpmath.mpf(0))
    return total


@pytest.mark.parametrize("epsilon0", [1e-15, 1e-9, 1e-3])
def test_the_losses_of_a_tiny_report_keep_their_size(epsilon0: float) -> None:
    """A dominating pair of 1e-15 told that nothing is lost: 1 - e^-step has no digits there."""
    losses = shuffled_losses(epsilon0, 2)
    largest = single_delta(epsilon0, 2, 0.0)
    pair = losses.dominating
    assert float(np.dot(pair.masses, np.maximum(-np.expm1(-pair.losses), 0.0))) == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize("epsilon0", [1e-15, 1e-12])
def test_no_moment_of_a_tiny_report_is_below_1(epsilon0: float) -> None:
    for clients in (1, 2, 50):
        for losses in (shuffled_losses(epsilon0, clients), attained_losses(epsilon0, clients)):
            assert (losses.log_moment(np.array([0.5, 2.0, 1000.0])) >= 0).all()
