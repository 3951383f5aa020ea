"""Figures at the ends of what can be asked for: a bound, or an error of ours, and never less for a mechanism that tells more."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, isnan

import numpy as np
import pytest

from grids import each
from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.adaptive import filter_order, filtered_epsilon, hidden_epsilon
from ldpfl.privacy.accountants.blanket import Bits, Hidden, Report, blanket_epsilon
from ldpfl.privacy.accountants.clones import clone_delta, clone_epsilon, clone_log_moment, clone_probability, composed_clone_epsilon
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accountants.losses import GridLosses, PrivacyCurve, composed_curves, epsilon_of, from_curve
from ldpfl.privacy.accountants.participation import self_sampled_epsilon
from ldpfl.privacy.accountants.poisson import added_epsilon, sampled_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import single_epsilon
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, attained_epsilon, certified_epsilon
from ldpfl.privacy.accountants.shuffled_gaussian import Vectors, shuffled_gaussian_epsilon
from ldpfl.privacy.events import BinaryRelease

Of = Callable[[float, float], float]
"""An epsilon of what a mechanism's parameter is, at a delta."""

EPSILONS = (1e-12, 1e-6, 0.1, 5.0, 29.9, 31.0, 600.0, 656.0, 690.0, 699.0, 701.0, 710.0, 1e6, 1e12)
DELTAS = (0.0, 1e-300, 1e-25, 1e-5, 0.5)


def check(of: Of, parameters: tuple[float, ...], deltas: tuple[float, ...], precise: float = 1e-9) -> None:
    """What comes out is a number of 0 or more that does not fall as the parameter grows, but by what the bound is precise to."""
    for delta in deltas:
        before = 0.0
        for parameter in parameters:
            found = of(parameter, delta)
            assert not isnan(found), (parameter, delta)
            assert found >= 0, (parameter, delta)
            assert found >= before * (1 - precise), (parameter, delta)
            before = found


def linked(epsilon: float, delta: float) -> float:
    return blanket_epsilon([Hidden(Bits(epsilon / 2, 2), 10, 1)], delta)


def blanketed(epsilon: float, delta: float) -> float:
    return blanket_epsilon([Hidden(Report(epsilon, (1 + exp(-min(epsilon, 600.0))) / 2), 10, 1)], delta)


def counted(clients: int, reports: int, rounds: int) -> Of:
    return lambda epsilon, delta: certified_epsilon([ShuffledRounds(epsilon, clients, reports, rounds)], delta)[1]


FAST: dict[str, tuple[Of, float]] = {
    "one report": (lambda epsilon, delta: composed_epsilon(epsilon, 1, delta), 1e-9),
    "a billion reports": (lambda epsilon, delta: composed_epsilon(epsilon, 10**9, delta), 1e-9),
    "clones": (lambda epsilon, delta: clone_epsilon(epsilon, 50, delta, clone_probability(epsilon)), 1e-6),
    "a filter": (lambda epsilon, delta: filtered_epsilon([(BinaryRelease("duchi", epsilon, 7), 10**6)], 1.0, delta), 1e-9),
}


@pytest.mark.slow
@each("name", FAST)
def test_no_epsilon_is_less_for_reports_that_tell_more(name: str) -> None:
    of, precise = FAST[name]
    check(of, EPSILONS, DELTAS, precise)


def test_no_epsilon_is_less_for_less_noise() -> None:
    check(gaussian_epsilon, (1e-300, 1e-155, 1e-12, *EPSILONS), DELTAS)
    for delta in DELTAS[1:]:
        check(lambda epsilon, delta: gaussian_mu(epsilon, delta), EPSILONS, (delta,))


@pytest.mark.slow
@pytest.mark.thorough
@each("epsilon0", (656.0, 701.0))
def test_bits_behind_a_shuffler_have_a_figure_at_any_epsilon(epsilon0: float) -> None:
    rounds = [ShuffledRounds(epsilon0, 3, 2, 2)]
    fixed, adaptive = certified_epsilon(rounds, 1e-5)
    assert 0 <= fixed <= adaptive <= 4 * epsilon0
    assert 0 <= attained_epsilon(rounds, 1e-5) <= fixed * (1 + 1e-9)
    assert adaptive >= epsilon0 / 2 or epsilon0 < 1  # there is next to nobody to hide among


@pytest.mark.slow
@pytest.mark.thorough
def test_a_tiny_epsilon_of_very_many_bits_is_no_number_that_rounding_made() -> None:
    fixed, adaptive = certified_epsilon([ShuffledRounds(1e-12, 1000, 1000, 5)], 1e-5)
    assert 0 <= fixed <= adaptive <= 5e-9


FEWER_EPSILONS = (1e-12, 0.1, 29.9, 31.0, 656.0, 699.0, 701.0, 1e12)
"""The ends, and each side of where the computation changes."""

LARGE: dict[str, tuple[Of, tuple[float, ...], float]] = {
    "linked bits": (linked, EPSILONS, 1e-2),
    "blankets": (blanketed, EPSILONS, 1e-2),
    "composed clones": (
        lambda epsilon, delta: composed_clone_epsilon(epsilon, 50, 3, delta, clone_probability(epsilon)),
        FEWER_EPSILONS,
        1e-2,
    ),
    "one shuffled bit": (lambda epsilon, delta: single_epsilon(epsilon, 1000, delta) if delta else 2 * epsilon, FEWER_EPSILONS, 1e-6),
    "few shuffled bits": (counted(2, 1, 2), FEWER_EPSILONS, 1e-3),
    "shuffled bits": (counted(1000, 1000, 5), FEWER_EPSILONS, 1e-3),
    "secret participation": (
        lambda epsilon, delta: self_sampled_epsilon(ShuffledRounds(epsilon, 50, 3, 2), 0.3, delta) if delta else inf,
        (1e-3, 1.0, 20.0),
        2e-2,
    ),
    "shuffled vectors": (
        lambda mu, delta: shuffled_gaussian_epsilon([Vectors(mu, 1000, 3)], delta, gaussian_epsilon(mu * 3**0.5, delta)),
        (1e-300, 1e-155, 1e-12, 1e-3, 1.0, 9.0, 11.0, 1e12),
        2e-2,
    ),
    "records added": (
        lambda mu, delta: added_epsilon([(mu, 1e-3, 10)], delta),
        (1e-300, 1e-155, 1e-12, 1e-3, 1.0, 9.0, 11.0, 1e12),
        2e-2,
    ),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", LARGE)
def test_no_epsilon_of_what_is_hidden_is_less_for_reports_that_tell_more(name: str) -> None:
    of, parameters, precise = LARGE[name]
    check(of, parameters, (0.0, 1e-300, 1e-5, 0.5), precise)


@pytest.mark.slow
def test_records_that_take_part_by_chance_have_a_figure_of_any_noise_and_any_number_of_rounds() -> None:
    rounds = [(mu, rate, count) for mu in (1e-300, 1e-12, 1e12) for rate, count in ((1e-12, 1), (0.01, 10**9))]
    for one in [*rounds, (0.5, 0.01, 10**9)]:
        whole = gaussian_epsilon(one[0] * one[2] ** 0.5, 1e-5)
        assert 0 <= sampled_epsilon([one], 1e-5) <= whole
        assert 0 <= added_epsilon([one], 1e-5) <= whole
    assert added_epsilon([(1.0, 0.1, 5)], 0.0) == inf


def test_what_a_budget_is_charged_is_never_below_nothing() -> None:
    for order in (1e-8, 1.0, 1e6, inf):
        for count in (1, 10**9):
            assert filtered_epsilon([(BinaryRelease("duchi", 1e-12, 1), count)], order, 0.5) >= 0
            assert hidden_epsilon([(BinaryRelease("duchi", 1e-12, 1), 1000, 1, count)], order, 0.5) >= 0
    assert clone_log_moment(1e-12, 1000, 1e-8, clone_probability(1e-12)) >= 0
    assert filter_order(1e-12, 1e-300) == inf


def test_far_away_there_is_a_delta_too() -> None:
    assert clone_delta(1.0, 10, 1e6, clone_probability(1.0)) == 0
    assert gaussian_delta(1e12, 1e-12) == 1
    assert central_limit_epsilon(1e12, 10, 1, 1e-5) == inf


def test_what_is_not_a_number_proves_nothing() -> None:
    nothing = np.array([np.nan, np.nan])
    losses = np.array([0.0, 1.0])
    assert epsilon_of(losses, nothing, 1e-5) == inf
    assert from_curve(np.array([0.5, np.nan, np.nan]), 0.1).infinite == 0.5
    assert from_curve(np.full(3, np.nan), 0.1).infinite == 1
    assert composed_curves([PrivacyCurve(lambda epsilon: np.nan, 3.0, 1)], 1e-5) == 3.0
    too_much = GridLosses(1e-15, 0, np.full(100, 0.02))
    assert too_much.composed(5000, 1e-5) is None


def test_what_cannot_be_asked_for_is_said() -> None:
    with pytest.raises(ConfigError, match="delta must lie between 0 and 1"):
        gaussian_mu(1.0, 0.0)
