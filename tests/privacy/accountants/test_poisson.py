"""Noise on the sum of a secret sample: against the curve of one pair of data sets, against dp-accounting, and against Opacus."""

from __future__ import annotations

from math import exp, inf, log, sqrt

import numpy as np
import pytest
from scipy.stats import norm

from ldpfl import ConfigError
from ldpfl.privacy import GaussianRelease, Ledger, RoundEvent
from ldpfl.privacy.accountants.gaussian import gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves
from ldpfl.privacy.accountants.poisson import added_epsilon, sampled_delta, sampled_epsilon
from ldpfl.privacy.accounting import account


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("mu", [0.2, 1.0, 4.0])
@pytest.mark.thorough_for("0.2-0.3", "4.0-0.3", "0.2-0.9", "1.0-0.9", "1.0-0.01", "4.0-0.01")
def test_opposite_gradients_do_not_exceed_the_curve(mu: float, rate: float) -> None:
    """The law of a batch's sum for g and for -g, integrated; of all data sets these two are the natural suspects."""
    x = np.linspace(-40, 40, 400_001)
    density = [(1 - rate) * norm.pdf(x) + rate * norm.pdf(x, sign * mu / 2) for sign in (1, -1)]
    for epsilon in (0.0, 0.01, 0.1, 0.5, 1.0, 3.0):
        real = float(np.sum(np.maximum(density[0] - exp(epsilon) * density[1], 0.0)) * (x[1] - x[0]))
        assert real <= sampled_delta(mu, rate, epsilon) + 1e-9
    assert sampled_delta(mu, rate, 0.0) == pytest.approx(rate * gaussian_delta(mu, 0.0))  # the total variation, exactly


@pytest.mark.parametrize("mu", [50.0, 200.0, 1e5, 1e9])
def test_next_to_no_noise_costs_what_an_observer_sees_of_it(mu: float) -> None:
    """Also where e^epsilon is more than a float holds: who sees a sum above mu / 2 knows whose it is but for a tail of the normal law."""
    told = log((0.05 - 1e-5) / 0.9) - float(norm.logsf(mu / 2))
    assert told <= sampled_epsilon([(mu, 0.1, 1)], 1e-5) <= gaussian_epsilon(mu, 1e-5)
    assert added_epsilon([(mu, 0.1, 1)], 1e-5) <= gaussian_epsilon(mu / 2, 1e-5) * (1 + 1e-9)


def test_the_curve_goes_on_where_its_exponential_overflows() -> None:
    assert sampled_delta(37.0, 0.1, 700.0001) == pytest.approx(sampled_delta(37.0, 0.1, 699.9999), rel=1e-3)


@pytest.mark.parametrize(("mu", "rate", "rounds"), [(100.0, 1e-6, 100), (200.0, 1e-8, 5000)])
def test_a_record_that_is_seldom_there_costs_what_is_seen_when_it_is(mu: float, rate: float, rounds: int) -> None:
    """Also where e^epsilon fits a float, and divided by the rate does not: of one round, who sees a sum above mu / 2 knows whose it is."""
    found = sampled_epsilon([(mu, rate, rounds)], rate / 10)
    assert found >= log(rate / 2 - rate / 10) - float(norm.logsf(mu / 2))
    for epsilon in (690.0, 697.0, 699.9):
        assert sampled_delta(mu, rate, epsilon) > 0


def test_a_rate_of_one_is_no_sampling() -> None:
    for epsilon in (0.0, 0.3, 2.0):
        assert sampled_delta(0.7, 1.0, epsilon) == pytest.approx(gaussian_delta(0.7, epsilon), rel=1e-12)
    assert sampled_epsilon([(0.7, 1.0, 9)], 1e-5) == pytest.approx(gaussian_epsilon(2.1, 1e-5), rel=1e-12)


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(1.0, 0.01, 1000), (2.0, 0.1, 100), (10.0, 0.5, 40)])
@pytest.mark.slow
@pytest.mark.thorough_for("1.0-0.01-1000", "2.0-0.1-100")
def test_replacing_costs_between_one_step_of_adding_or_removing_and_what_the_whole_batch_costs(
    noise: float, rate: float, rounds: int
) -> None:
    replaced = sampled_epsilon([(2 / noise, rate, rounds)], 1e-5)
    added = added_epsilon([(2 / noise, rate, rounds)], 1e-5)
    assert added < replaced < 3 * added
    assert replaced < gaussian_epsilon(2 / noise * sqrt(rounds), 1e-5)
    # Removing is one half of some replacement: what one data set really loses is never above the bound, see the first test.
    assert sampled_epsilon([(2 / noise, rate, rounds // 2), (2 / noise, rate, rounds - rounds // 2)], 1e-5) >= 0.999 * replaced


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(1.0, 0.01, 300), (4.0, 0.2, 50)])
@pytest.mark.slow
@pytest.mark.thorough_for("1.0-0.01-300")
def test_opacus_states_the_same_epsilon(noise: float, rate: float, rounds: int) -> None:
    from opacus.accountants import PRVAccountant

    opacus = PRVAccountant()
    opacus.history = [(noise, rate, rounds)]
    stated = opacus.get_epsilon(1e-5, eps_error=4e-4)
    assert added_epsilon([(2 / noise, rate, rounds)], 1e-5) == pytest.approx(stated, abs=1e-3)


def test_the_ledger_states_both_adjacencies_and_a_whole_batch_is_not_cheaper() -> None:
    def statement(rate: float) -> tuple[float, tuple[str, ...]]:
        release = GaussianRelease("dp-sgd", 2 / 20.0, unit="record", rate=rate)
        ledger = Ledger()
        for number in range(1, 11):
            ledger = ledger.charge(RoundEvent(number, release, 5, 5, number, channel="direct"))
        found = account(Ledger.from_json(ledger.to_json()), 1e-5)
        assert found.best is not None
        return found.best.epsilon, found.notes

    sampled, notes = statement(0.25)
    whole, whole_notes = statement(1.0)
    assert sampled < whole == pytest.approx(gaussian_epsilon(0.1 * sqrt(10), 1e-5))
    assert any("left out" in note for note in notes)
    assert f"epsilon {gaussian_epsilon(0.05 * sqrt(10), 1e-5):.4g}" in " ".join(whole_notes)


def test_a_single_round_may_be_of_least_squares_whose_vectors_are_longer() -> None:
    """A record's products are at most 1.34 times as long as half of the distance of two records': sqrt(2) is counted."""

    def left_out(rounds: int) -> str:
        ledger, release = Ledger(), GaussianRelease("dp-sgd", 0.2, unit="record")
        for number in range(1, rounds + 1):
            ledger = ledger.charge(RoundEvent(number, release, 5, 5, number, channel="direct"))
        return next(note for note in account(ledger, 1e-5).notes if "left out" in note)

    assert f"epsilon {gaussian_epsilon(0.1 * sqrt(2), 1e-5):.4g} " in left_out(1)
    assert f"epsilon {gaussian_epsilon(0.1 * sqrt(2), 1e-5):.4g} " in left_out(2)  # two of gradients are charged as much


@pytest.mark.parametrize(("rate", "unit"), [(0.0, "record"), (1.5, "record"), (float("nan"), "record"), (0.5, "vector")])
def test_what_is_no_sample_of_records_is_refused(rate: float, unit: str) -> None:
    release = GaussianRelease("dp-sgd", 0.1, unit=unit, rate=rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"records|the sampling rate of records"):
        RoundEvent(1, release, 5, 5, 1, channel="direct")


def test_curves_of_different_kinds_add_up() -> None:
    """Two Gaussian curves, convolved, are the curve of both together: an upper bound, and a close one."""
    first, second = (PrivacyCurve(lambda epsilon, mu=mu: gaussian_delta(mu, epsilon), inf, times) for mu, times in ((0.1, 30), (0.4, 5)))  # type: ignore[misc]
    exact = gaussian_epsilon(sqrt(30 * 0.01 + 5 * 0.16), 1e-5)
    assert exact <= composed_curves([first, second], 1e-5) <= 1.003 * exact
    assert composed_curves([], 1e-5) == 0.0
    assert composed_curves([PrivacyCurve(lambda epsilon: 0.0, 1.0, 3)], 1e-5) == 0.0
