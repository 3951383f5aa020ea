"""Vectors with Gaussian noise behind a shuffler: against data sets of few clients, by integration, and against closed forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from math import exp, inf, log, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from ldpfl import ConfigError
from ldpfl.privacy import GaussianRelease, Ledger, RoundEvent
from ldpfl.privacy.accountants.gaussian import gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accountants.registry import accountant, behind_shuffler
from ldpfl.privacy.accountants.shuffled_gaussian import Vectors, common_share, shuffled_gaussian_epsilon, vector_delta
from ldpfl.privacy.accounting import account
from ldpfl.privacy.charged_rounds import RoundGroup, charged_groups
from ldpfl.privacy.events import OURS

Floats = NDArray[np.float64]
Points = Sequence[Sequence[float]]

EPSILONS = (0.0, 0.1, 0.4, 1.0, 2.0)
NOISE = GaussianRelease("full-dp", 0.3, alike=True, author=OURS)
DELTA = 1e-5


def bound(mu: float, clients: int, share: float, epsilon: float) -> float:
    """What is certified of one round if reports are taken to have ``share`` in common."""
    apart = share * gaussian_delta(mu / 2, log(1 / share))
    return vector_delta(mu, clients, share, epsilon) + (1 + exp(epsilon)) * (clients - 1) * apart


def log_density(seen: Floats, means: Points) -> Floats:
    """Return the logarithm of the density, but for a factor that all share, of shuffled reports ``seen`` (N, n, d) around ``means``."""
    orders = [-0.5 * sum(((seen[:, place] - np.asarray(means[one])) ** 2).sum(1) for place, one in enumerate(order))
              for order in permutations(range(len(means)))]  # fmt: skip
    return np.asarray(np.logaddexp.reduce(orders, axis=0))


def reached(inputs: tuple[Points, Points], epsilons: Sequence[float], draws: int, seed: int) -> list[tuple[float, float]]:
    """Return delta at each epsilon between two data sets of reports, and its standard error, from draws under the first."""
    first, second = inputs
    generator = np.random.default_rng(seed)
    seen = np.asarray(first, dtype=float)[None] + generator.standard_normal((draws, len(first), len(first[0])))
    losses = log_density(seen, first) - log_density(seen, second)
    found = [np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0) for epsilon in epsilons]
    return [(float(one.mean()), float(one.std()) / sqrt(draws)) for one in found]


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.5])
@pytest.mark.parametrize("other", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.thorough_for("-1.0-2.5", "0.0-2.5", "0.5-2.5")
def test_no_pair_of_clients_exceeds_the_bound(mu: float, other: float) -> None:
    """By integration over both reports, on a line: a client at one end or the other of the ball, and a second one anywhere."""
    a, grid = mu / 2, np.linspace(-9, 9, 601)
    one, two = (np.ravel(axis) for axis in np.meshgrid(grid, grid))

    def density(mean: float, other: float) -> Floats:
        both = np.exp(-((one - mean) ** 2 + (two - other) ** 2) / 2) + np.exp(-((two - mean) ** 2 + (one - other) ** 2) / 2)
        return np.asarray(both / (4 * np.pi) * (grid[1] - grid[0]) ** 2)

    first, second = density(a, a * other), density(-a, a * other)
    for epsilon in EPSILONS:
        true = float(np.maximum(first - exp(epsilon) * second, 0).sum())
        for share in (0.9, 0.5, 0.1, 0.01):
            assert true <= bound(mu, 2, share, epsilon) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thorough_for("0", "1", "2", "3", "4")
def test_no_data_set_in_a_ball_exceeds_the_bound(seed: int) -> None:
    """Four clients anywhere in a ball of three dimensions, two of them at most in its middle; 5 standard errors, 30 checks a data set."""
    generator = np.random.default_rng(seed)
    mu = float(generator.uniform(0.3, 2.0))
    ends = generator.standard_normal((2, 3))
    ends *= mu / 2 / np.linalg.norm(ends, axis=1, keepdims=True) * (1 if seed % 2 else generator.uniform(0.3, 1, (2, 1)))
    others = generator.standard_normal((3, 3))
    others *= mu / 2 / np.linalg.norm(others, axis=1, keepdims=True)
    first, second = ([end.tolist(), *others.tolist()] for end in ends)
    for (true, error), epsilon in zip(reached((first, second), EPSILONS, 40_000, seed), EPSILONS, strict=True):
        for share in (0.8, 0.3, 0.05):
            assert true - 5 * error <= bound(mu, 4, share, epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("follow", [lambda sign: (sign, sign), lambda sign: (1.0, -sign), lambda sign: (sign, 0.0)])
@pytest.mark.thorough_for("<lambda>0", "<lambda>2")
def test_the_second_round_may_be_chosen_by_the_first(follow: Callable[[float], tuple[float, float]]) -> None:
    """Three clients on a line; what the first round showed says which way the client's second input goes, and where others stand."""
    mu, draws, generator = 0.8, 100_000, np.random.default_rng(8)
    a, local = mu / 2, gaussian_epsilon(mu * sqrt(2), 0.05)
    epsilon = shuffled_gaussian_epsilon([Vectors(mu, 3, 2)], 0.05, local)
    assert epsilon < local

    def losses(seen: Floats, own: float, other: float) -> Floats:
        first, second = ([[own * a], [other * a], [other * a]], [[-own * a], [other * a], [other * a]])
        return log_density(seen, first) - log_density(seen, second)

    before = generator.standard_normal((draws, 3, 1)) + np.array([[a], [-a], [-a]])
    total = losses(before, 1.0, -1.0)
    for sign in (-1.0, 1.0):
        chosen = np.flatnonzero(np.sign(before.sum(axis=(1, 2))) == sign)
        own, other = follow(sign)
        after = generator.standard_normal((chosen.size, 3, 1)) + np.array([[own * a], [other * a], [other * a]])
        total[chosen] += losses(after, own, other)
    gained = np.maximum(-np.expm1(np.minimum(epsilon - total, 0.0)), 0.0)
    assert gained.mean() - 5 * gained.std() / sqrt(draws) <= 0.05


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0])
def test_a_client_alone_has_the_curve_of_its_noise(mu: float) -> None:
    for epsilon in (0.0, 0.3 * mu, mu, 3 * mu):
        exact = gaussian_delta(mu, epsilon)
        found = vector_delta(mu, 1, 1.0, epsilon)
        assert exact <= found <= exact * 1.06 + 1e-9
    assert shuffled_gaussian_epsilon([Vectors(mu, 1, 3)], DELTA, 7.0) == 7.0


def test_the_share_is_the_largest_that_costs_no_more() -> None:
    for mu in (0.02, 0.5, 3.0):
        share = common_share(mu, 1e-9)
        assert share is not None
        assert share * gaussian_delta(mu / 2, log(1 / share)) <= 1e-9
        assert 1.01 * share * gaussian_delta(mu / 2, log(1 / share / 1.01)) > 1e-9
    assert common_share(40.0, 1e-18) is None
    assert common_share(1e-12, 1e-9) == 1.0


REACHED = [(100, 0.3, 10, 0.53), (1000, 1.0, 1, 0.51), (10, 0.3, 10, 1.93), (100, 0.03, 400, 0.21)]


@pytest.mark.parametrize(("clients", "mu", "rounds", "most"), REACHED)
@pytest.mark.slow
@pytest.mark.thorough_for("10-0.3-10-1.93", "100-0.03-400-0.21")
def test_it_is_between_what_the_sum_tells_and_what_holds_without_a_shuffler(clients: int, mu: float, rounds: int, most: float) -> None:
    group = RoundGroup(replace(NOISE, mu=mu), clients, clients, rounds)
    found = behind_shuffler([group])
    assert found is not None
    bounds = found.bounds(DELTA)
    assert bounds.attained == pytest.approx(gaussian_epsilon(mu * sqrt(rounds / clients), DELTA), rel=1e-3)
    assert bounds.attained is not None
    assert bounds.attained <= bounds.adaptive <= most
    assert accountant([(group.release, rounds)]).epsilon(DELTA) > 2 * bounds.adaptive


@pytest.mark.slow
@pytest.mark.thorough
def test_more_clients_hide_better_and_more_noise_too() -> None:
    def epsilon(mu: float, clients: int, times: int = 2) -> float:
        return shuffled_gaussian_epsilon([Vectors(mu, clients, times)], DELTA, gaussian_epsilon(mu * sqrt(times), DELTA))

    assert epsilon(0.5, 50) > epsilon(0.5, 500) > epsilon(0.4, 500) > epsilon(0.4, 500, 1)


@pytest.mark.thorough
def test_many_cohorts_and_noises_are_rounded_to_few_outwards() -> None:
    kinds = [Vectors(0.2 + 0.01 * place, 500 - place, 1) for place in range(20)]
    rounded = shuffled_gaussian_epsilon(kinds, DELTA, 3.0)
    some = [Vectors(kind.mu, kind.clients, 5) for kind in kinds[2::5]]
    assert 0.9 * shuffled_gaussian_epsilon(some, DELTA, 3.0) < rounded < shuffled_gaussian_epsilon([Vectors(0.39, 481, 20)], DELTA, 9.0)


def test_nothing_is_gained_where_all_is_told() -> None:
    for kinds, local in (([Vectors(9.0, 100, 1)], 25.0), ([], 1.0)):
        assert shuffled_gaussian_epsilon(kinds, DELTA, local) == local


def test_what_lies_below_all_rounding_is_not_said() -> None:
    """One vector among very many, for a delta that no floating point of this size tells from 0: what holds locally does."""
    local = gaussian_epsilon(3.2, 1e-22)
    assert shuffled_gaussian_epsilon([Vectors(3.2, 10**11, 1)], 1e-22, local) == local
    assert shuffled_gaussian_epsilon([Vectors(0.3, 100, 1)], 1e-22, local) == local


def test_what_is_in_common_of_wide_balls_is_counted_to_its_end() -> None:
    """Of one client alone nothing hides it, and the curve is that of its noise, also where a normal probability is next to 1."""
    for mu in (4.0, 6.0, 10.0):
        for epsilon in (0.0, mu, mu**2):
            assert vector_delta(mu, 1, 1.0, epsilon) >= gaussian_delta(mu, epsilon)


# --- in ledgers -------------------------------------------------------------------------------------------------------


def ledger_of(release: GaussianRelease, *cohorts: int, population: int = 400, **settings: object) -> Ledger:
    return Ledger(
        tuple(
            RoundEvent(number, release, cohort, population, number, **({"sampling": "visible"} | settings))  # type: ignore[arg-type]
            for number, cohort in enumerate(cohorts, start=1)
        )
    )


def shuffled_epsilon(ledger: Ledger) -> float | None:
    row = account(ledger, DELTA).find("shuffled", "run")
    return None if row is None else row.epsilon


def test_the_table_has_a_bracket_for_vectors_of_one_ball() -> None:
    row = account(ledger_of(NOISE, 100, 100, population=100, sampling="everyone"), DELTA).find("shuffled", "run")
    assert row is not None
    assert row.status == "proved"
    assert row.lower is not None
    assert 0 < row.lower < row.epsilon < 0.3


OTHERS = {
    "all clients add the same noise": replace(NOISE, alike=False),
    "the sums over records of two clients": replace(NOISE, alike=False, unit="record"),
}


@pytest.mark.parametrize("why", OTHERS)
def test_others_have_no_line_and_the_reason_is_said(why: str) -> None:
    statement = account(ledger_of(OTHERS[why], 100, 100), DELTA)
    assert statement.find("shuffled", "run") is None
    assert any(why in note for note in statement.notes)


def test_sums_over_records_are_in_no_ball() -> None:
    with pytest.raises(ConfigError, match="sums over records have no common bound"):
        ledger_of(replace(NOISE, unit="record"), 100)


def test_a_ledger_from_before_says_as_little_as_it_did() -> None:
    old, new = ledger_of(replace(NOISE, alike=False), 100), ledger_of(NOISE, 100)
    assert "alike" not in old.to_json()
    assert Ledger.from_json(old.to_json(), "old") == old
    assert Ledger.from_json(new.to_json(), "new") == new
    assert shuffled_epsilon(Ledger.from_json(new.to_json(), "new")) == shuffled_epsilon(new)


def test_of_rounds_that_differ_in_noise_and_cohort_all_are_charged() -> None:
    """The one with the larger mu may be hidden by more clients, and neither costs more under each trust model."""
    mixed = Ledger((*ledger_of(NOISE, 300).events, *(replace(e, round=2) for e in ledger_of(replace(NOISE, mu=0.25), 50).events)))
    assert sum(group.rounds for group in charged_groups(mixed)) == 2
    alike = Ledger((*ledger_of(NOISE, 300).events, *(replace(e, round=2) for e in ledger_of(replace(NOISE, mu=0.25), 300).events)))
    assert sum(group.rounds for group in charged_groups(alike)) == 2 - (300 * 2 <= 400)


def test_colluding_clients_hide_nobody() -> None:
    ledger = ledger_of(NOISE, 100)
    few = account(ledger, DELTA, colluding=90).find("shuffled", "run")
    assert few is not None
    assert few.epsilon > 2 * (shuffled_epsilon(ledger) or inf)
    assert few.epsilon == pytest.approx(shuffled_epsilon(ledger_of(NOISE, 10, population=310)), rel=1e-6)


def test_those_that_take_part_once_hide_among_all_of_the_run() -> None:
    once = Ledger(tuple(RoundEvent(number, NOISE, 100, 300, 1, sampling="once") for number in (1, 2, 3)))
    assert shuffled_epsilon(once) == pytest.approx(shuffled_epsilon(ledger_of(NOISE, 300)), rel=1e-9)
