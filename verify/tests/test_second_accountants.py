"""The second accountants against enumeration, in fractions or floats; none of them may be compared with the first ones to be right."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from math import comb, exp, log
from typing import Any

import numpy as np
import pytest

from ldpfl_verify.closed_forms import gaussian_delta, least_epsilon, pure_sum, randomised_response_delta
from ldpfl_verify.composition import ReleaseBound, composed_epsilon, convolved_epsilon, renyi_epsilon
from ldpfl_verify.shuffled_bits import CountedBit, CountedRound
from ldpfl_verify.shuffled_reports import ClonedReport
from ldpfl_verify.unshuffled_reports import GaussianReport, PureReport, different_reports_delta

DELTA = 1e-3


def deltas_at(release: ReleaseBound, *epsilons: float) -> list[float]:
    """Return delta of ``release`` at each of ``epsilons``."""
    return [float(delta) for delta in release.delta(np.array(epsilons, dtype=np.longdouble))]


def delta_of(first: dict[Any, float], second: dict[Any, float], epsilon: float) -> float:
    """Return delta at ``epsilon`` of two laws, given as the probability of each outcome."""
    return sum(max(0.0, mass - exp(epsilon) * second.get(outcome, 0.0)) for outcome, mass in first.items())


def law_of_ones(inputs: tuple[int, ...], truth: float) -> dict[Any, float]:
    """Return the probability of each number of ones. A bit equals its input with probability ``truth``."""
    law: dict[Any, float] = {0: 1.0}
    for bit in inputs:
        one = truth if bit else 1 - truth
        grown: dict[int, float] = {}
        for count, mass in law.items():
            grown[count + 1] = grown.get(count + 1, 0.0) + mass * one
            grown[count] = grown.get(count, 0.0) + mass * (1 - one)
        law = grown
    return law


def repeated_law(law: dict[Any, float], times: int) -> dict[Any, float]:
    """Return the joint law of ``times`` independent outcomes."""
    joint_law: dict[Any, float] = {}
    for outcomes in itertools.product(law.items(), repeat=times):
        joint_law[tuple(outcome for outcome, _ in outcomes)] = float(np.prod([mass for _, mass in outcomes]))
    return joint_law


@pytest.mark.parametrize(("epsilon0", "reports"), [(1.0, 1), (0.3, 7), (2.5, 20), (0.05, 40), (9.0, 3)])
def test_randomised_response_is_summed_exactly(epsilon0: float, reports: int) -> None:
    """Against the same sum in fractions, e^epsilon0 being a fraction too; from above, and by no more than rounding."""
    odds = Fraction(exp(epsilon0))
    truth = odds / (1 + odds)
    for share in (0.0, 0.2, 0.5, 0.9, 0.999):
        epsilon = share * epsilon0 * reports
        masses = [(comb(reports, ones) * truth**ones * (1 - truth) ** (reports - ones), ones) for ones in range(reports + 1)]
        expected = float(sum(mass for mass, ones in masses) * 0) + sum(
            max(0.0, float(mass) * (1 - exp(epsilon - epsilon0 * (2 * ones - reports)))) for mass, ones in masses
        )
        delta = randomised_response_delta(epsilon0, reports, epsilon)
        assert delta == pytest.approx(expected, rel=1e-9, abs=1e-18)
    assert randomised_response_delta(epsilon0, reports, epsilon0 * reports * (1 + 1e-12)) < 1e-12


@pytest.mark.parametrize(
    "groups", [[(1.0, 3), (0.4, 6)], [(0.1, 8), (0.1001, 9)], [(2.0, 2), (0.7, 3), (0.2, 4), (0.7, 1)], [(9.0, 2), (1e-3, 9)]]
)
def test_different_reports_are_enumerated(groups: list[tuple[float, int]]) -> None:
    truths = [(epsilon, 1 / (1 + exp(-epsilon))) for epsilon, number in groups for _ in range(number)]
    for share in (0.0, 0.3, 0.9, 0.9999):
        epsilon = share * sum(epsilon for epsilon, _ in truths)
        losses, masses = np.zeros(1), np.ones(1)  # of all outcomes: each report doubles them
        for epsilon0, truth in truths:
            losses = np.concatenate([losses + epsilon0, losses - epsilon0])
            masses = np.concatenate([masses * truth, masses * (1 - truth)])
        expected = np.maximum(0.0, masses * (1 - np.exp(epsilon - losses))).sum()
        assert different_reports_delta(groups, epsilon) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert different_reports_delta(groups, 1e300) < 1e-25
    assert different_reports_delta([(1.0, 10**6), (0.1, 10**6), (0.2, 10**6)], 1.0) == 1.0, "too many outcomes"


def test_pure_costs_are_added_without_rounding() -> None:
    assert pure_sum([(0.1, 10), (0.3, 1)]) == 10 * Fraction(0.1) + Fraction(0.3)


@pytest.mark.parametrize("mu", [1e-9, 0.01, 1.0, 40.0])
def test_gaussian_noise_is_what_its_two_laws_say(mu: float) -> None:
    """By integrating the difference of the densities where it is positive."""
    for epsilon in (0.0, 0.5 * mu**2, mu**2 / 2 + mu):
        border = epsilon / mu - mu / 2 + mu  # under N(mu, 1), of a place where the density is e^epsilon times that of N(0, 1)
        grid = np.linspace(border, max(border, mu) + 12, 400_001)
        density = np.exp(-((grid - mu) ** 2) / 2) - np.exp(epsilon - grid**2 / 2)
        expected = float(np.sum((density[1:] + density[:-1]) / 2) * (grid[1] - grid[0]) / np.sqrt(2 * np.pi))
        assert gaussian_delta(mu, epsilon) == pytest.approx(expected, rel=2e-5, abs=1e-12)
        assert deltas_at(GaussianReport(mu), epsilon)[0] == pytest.approx(gaussian_delta(mu, epsilon), rel=1e-6, abs=2e-15)


@pytest.mark.parametrize(("epsilon0", "clients"), [(1.0, 1), (1.0, 2), (0.2, 5), (3.0, 6)])
def test_a_counted_bit_is_the_worst_of_all_that_others_may_hold(epsilon0: float, clients: int) -> None:
    truth = 1 / (1 + exp(-epsilon0))
    bit = CountedBit(epsilon0, clients)
    for epsilon in np.linspace(0, epsilon0, 7).tolist():
        worst = 0.0
        for others in itertools.product((0, 1), repeat=clients - 1):
            laws = [law_of_ones((own, *others), truth) for own in (0, 1)]
            worst = max(worst, delta_of(laws[0], laws[1], epsilon), delta_of(laws[1], laws[0], epsilon))
        assert deltas_at(bit, epsilon)[0] == pytest.approx(worst, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize(("epsilon0", "clients"), [(0.5, 2), (1.0, 4), (3.0, 7)])
def test_a_cloned_report_is_the_pair_of_its_theorem(epsilon0: float, clients: int) -> None:
    """Clones are counted, and half of them look like either report."""
    share, truth = exp(-epsilon0), 1 / (1 + exp(-epsilon0))
    laws: list[dict[Any, float]] = []
    for own in (truth, 1 - truth):
        law: dict[Any, float] = {}
        for clones in range(clients):
            mass = comb(clients - 1, clones) * share**clones * (1 - share) ** (clients - 1 - clones)
            for heads in range(clones + 1):
                for mine, chance in ((1, own), (0, 1 - own)):
                    place = (clones, heads + mine)
                    law[place] = law.get(place, 0.0) + mass * comb(clones, heads) / 2**clones * chance
        laws.append(law)
    for epsilon in np.linspace(0, epsilon0, 5).tolist():
        assert deltas_at(ClonedReport(epsilon0, clients), epsilon)[0] == pytest.approx(
            delta_of(laws[0], laws[1], epsilon), rel=1e-9, abs=1e-14
        )


@pytest.mark.parametrize(("epsilon0", "clients", "times"), [(1.0, 1, 6), (0.7, 3, 5), (2.0, 4, 3)])
def test_composition_is_above_enumeration_and_near_it(epsilon0: float, clients: int, times: int) -> None:
    """All outcomes of several counted bits: for one data set, which cannot be worse than what is proved for all of them."""
    truth = 1 / (1 + exp(-epsilon0))
    kinds = [(CountedBit(epsilon0, clients), times)]
    attained = []
    for others in range(clients):
        inputs = (1,) * others + (0,) * (clients - 1 - others)
        laws = [repeated_law(law_of_ones((own, *inputs), truth), times) for own in (0, 1)]
        for first, second in (laws, laws[::-1]):
            attained.append(least_epsilon(partial(delta_of, first, second), DELTA, 1.0))
    found = convolved_epsilon(kinds, DELTA, max(attained))
    assert max(attained) * (1 - 1e-9) <= found <= times * epsilon0 * (1 + 1e-6)
    assert renyi_epsilon(kinds, DELTA) >= max(attained) * (1 - 1e-8)
    if clients == 1:
        assert found == pytest.approx(max(attained), rel=1e-6)


@pytest.mark.parametrize("guess", [0.01, *(pytest.param(guess, marks=pytest.mark.thorough) for guess in (1.0, 1e4))])
@pytest.mark.slow
def test_a_bad_guess_costs_nothing_in_safety(guess: float) -> None:
    exact = least_epsilon(lambda epsilon: randomised_response_delta(0.3, 100, epsilon), 1e-5, 1.0)
    assert exact <= composed_epsilon([(PureReport(0.3), 100)], 1e-5, guess) <= exact * 1.02


def test_different_kinds_are_composed_together() -> None:
    """Ten reports and a Gaussian vector: below the sum of both, above either; and Gaussians alone are what adds up in squares."""
    together = composed_epsilon([(PureReport(0.5), 10), (GaussianReport(0.4), 1)], 1e-5, 3.0)
    reports = composed_epsilon([(PureReport(0.5), 10)], 1e-5, 3.0)
    noise = least_epsilon(lambda epsilon: gaussian_delta(0.4, epsilon), 1e-5, 1.0)
    assert max(reports, noise) < together < reports + noise
    many = composed_epsilon([(GaussianReport(0.1), 16)], 1e-5, noise)
    assert noise <= many <= noise * 1.001


@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_of_many_bits_is_above_what_one_data_set_attains_and_below_its_convolution() -> None:
    bit, reports = CountedBit(0.5, 3), 400
    truth = 1 / (1 + exp(-0.5))
    pair = [law_of_ones((own, 1, 0), truth) for own in (0, 1)]
    losses = [(log(mass / pair[1][outcome]), mass) for outcome, mass in pair[0].items()]
    mean = sum(loss * mass for loss, mass in losses)
    width = sum((loss - mean) ** 2 * mass for loss, mass in losses) ** 0.5
    attained = reports * mean + 2 * reports**0.5 * width  # a loss that some data set exceeds in more than one case of a hundred
    found = convolved_epsilon([(CountedRound(bit, reports), 1)], 1e-3, attained)
    assert attained < found <= renyi_epsilon([(bit, reports)], 1e-3) * (1 + 1e-6)
