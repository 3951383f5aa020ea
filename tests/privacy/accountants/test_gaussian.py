"""Gaussian noise: published numbers, 50-digit curves, and calibration that is inverse to evaluation."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, strategies as st

from grids import each
from ldpfl import ConfigError
from ldpfl.privacy.accountants.gaussian import (
    classical_sigma,
    composed_mu,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_sigma,
    ladp_constant,
)
from ldpfl.privacy.accountants.local import GaussianAccountant
from ldpfl.privacy.accountants.registry import epsilon_of
from ldpfl.privacy.events import GaussianRelease, PureRelease
from oracles import gaussian_mironov_epsilon, gaussian_rdp_epsilon


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 7.0318), (1.0, 3.7306), (2.0, 1.9938), (4.0, 1.0812), (8.0, 0.6002)])
def test_sigma_equals_the_published_one(epsilon: float, sigma: float) -> None:
    assert gaussian_sigma(epsilon, 1e-5) == pytest.approx(sigma, abs=6e-5)
    assert gaussian_sigma(epsilon, 1e-5, 2.0) == pytest.approx(2 * gaussian_sigma(epsilon, 1e-5), rel=1e-14)


def test_epsilon_equals_the_published_one() -> None:
    assert gaussian_epsilon(0.460, 1e-5) == pytest.approx(1.815, abs=2.5e-3)  # mu is given to 5e-4, which is 2e-3 in epsilon
    for epsilon, mu in ((1.0, 0.2681), (2.0, 0.5016), (4.0, 0.9249)):
        assert gaussian_mu(epsilon, 1e-5) == pytest.approx(mu, abs=6e-5)


@each("mu", [1e-15, 1e-9, 9.9e-6, 1.01e-5, 1e-3, 0.1, 1.0, 5.0, 100.0, 1e4])
@each("shift", [-5.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 5.0, 20.0])
def test_the_curve_has_all_its_digits(mu: float, shift: float) -> None:
    epsilon = max(mu * mu / 2 + shift * mu, 0.0)  # ``shift`` deviations from the mean of the loss
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        expected = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        # The size of the error of epsilon itself, a double: delta moves by up to phi of it.
        noise = 4e-16 * (epsilon / mu + mu / 2 + 1)
    # Two neighbouring values a distance mu apart are subtracted.
    rel = 1e-10 + 40 * noise + 2e-15 / max(mu, 1e-5)
    assert gaussian_delta(mu, epsilon) == pytest.approx(float(expected), rel=rel, abs=noise if shift < 0 else 1e-300)


def test_the_ends_of_the_curve() -> None:
    assert gaussian_delta(0.0, 1.0) == 0.0
    assert gaussian_delta(math.inf, 1.0) == 1.0
    assert gaussian_delta(1.0, 0.0) == pytest.approx(2 * 0.19146246127401312, rel=1e-12)  # 2 Phi(1/2) - 1
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(1.0, 0.0) == math.inf
    assert gaussian_epsilon(1e-6, 1e-5) == 0.0, "delta(0) = 4e-7 is below delta already"
    assert gaussian_epsilon(1.0, 0.4) == 0.0


@given(epsilon=st.floats(0.01, 50.0), delta=st.floats(1e-12, 0.3))
def test_calibration_evaluated_again_gives_delta(epsilon: float, delta: float) -> None:
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-6)
    assert gaussian_sigma(epsilon, delta, 3.0) * mu == pytest.approx(3.0, rel=1e-12)


@given(mu=st.floats(1e-3, 300.0), delta=st.floats(1e-12, 0.3), factor=st.floats(1.001, 3.0))
def test_less_noise_or_a_smaller_delta_cost_more(mu: float, delta: float, factor: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
        assert gaussian_epsilon(mu * factor, delta) > epsilon
        assert gaussian_epsilon(mu, delta / factor) > epsilon


@given(mu=st.floats(1e-2, 300.0), delta=st.floats(1e-12, 0.3))
def test_looser_conversions_are_above_the_exact_curve(mu: float, delta: float) -> None:
    exact = gaussian_epsilon(mu, delta)
    assert exact <= gaussian_rdp_epsilon(mu, delta) * (1 + 1e-9)
    assert gaussian_rdp_epsilon(mu, delta) <= gaussian_mironov_epsilon(mu, delta) * (1 + 1e-9)


def test_the_published_composition() -> None:
    mu = composed_mu([0.1] * 10)
    assert mu == pytest.approx(math.sqrt(0.1), rel=1e-14)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(1.1994, abs=6e-5)
    assert gaussian_rdp_epsilon(mu, 1e-5) == pytest.approx(1.3081, abs=6e-5)
    assert gaussian_mironov_epsilon(mu, 1e-5) == pytest.approx(1.5674, abs=6e-5)


def test_composition_is_the_root_of_the_sum_of_squares() -> None:
    assert composed_mu([3.0, 4.0]) == pytest.approx(5.0, rel=1e-15)
    assert composed_mu([]) == 0.0
    assert composed_mu([1.0, math.inf]) == math.inf
    assert composed_mu(iter([1e200, 1e200])) == pytest.approx(math.sqrt(2) * 1e200, rel=1e-14)


@given(epsilon=st.floats(0.01, 0.999), delta=st.floats(1e-12, 1e-3))
def test_the_classical_formula_is_safe_where_it_is_proved(epsilon: float, delta: float) -> None:
    sigma = classical_sigma(epsilon, delta, 2.0)
    assert sigma >= gaussian_sigma(epsilon, delta, 2.0)
    assert sigma == pytest.approx(2 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon, rel=1e-14)


@pytest.mark.parametrize("epsilon", [1.0, 1.5, 100.0])
def test_the_classical_formula_refuses_where_it_is_not(epsilon: float) -> None:
    with pytest.raises(ConfigError, match="proved for epsilon < 1") as refusal:
        classical_sigma(epsilon, 1e-5)
    assert "\n" not in str(refusal.value)
    assert "gaussian_sigma" in str(refusal.value)


def test_why_it_refuses() -> None:
    # At epsilon = 100 the classical noise is too small: its delta is not the one that was asked for.
    sigma = math.sqrt(2 * math.log(1.25 / 1e-5)) / 100
    assert gaussian_delta(1 / sigma, 100.0) > 0.5


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_epsilon_is_refused(epsilon: float) -> None:
    for function in (gaussian_mu, gaussian_sigma, classical_sigma):
        with pytest.raises(ConfigError, match="epsilon must be positive and finite") as refusal:
            function(epsilon, 1e-5)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("epsilon", [1e101, 1e200, 1.7e308])
def test_an_epsilon_whose_square_no_float_holds_is_refused(epsilon: float) -> None:
    for function in (gaussian_mu, gaussian_sigma, classical_sigma):
        with pytest.raises(ConfigError, match=r"epsilon must be at most 1e\+100, got"):
            function(epsilon, 1e-5)
    assert gaussian_mu(1e100, 1e-5) == pytest.approx(math.sqrt(2) * 1e50)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_an_impossible_delta_is_refused(delta: float) -> None:
    for function in (gaussian_mu, gaussian_sigma, classical_sigma):
        with pytest.raises(ConfigError, match="delta must lie between 0 and 1") as refusal:
            function(0.5, delta)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("epsilon", "delta", "theorem", "exact"), [(0.2, 0.02, 2.75157, 0.97048), (0.2, 1e-5, 4.7722, 3.2608)])
def test_the_constant_of_ladp_fl_and_the_exact_one(epsilon: float, delta: float, theorem: float, exact: float) -> None:
    assert ladp_constant(epsilon, delta) == pytest.approx(theorem, abs=5e-5 if delta < 1e-3 else 5e-6)
    assert epsilon * gaussian_sigma(epsilon, delta) == pytest.approx(exact, abs=5e-5 if delta < 1e-3 else 5e-6)


def test_the_constant_of_ladp_fl_has_two_cases() -> None:
    assert ladp_constant(1.5, 0.9) == pytest.approx(1.5, rel=1e-15)  # (1 + sqrt(1 + 2 * 1.5)) / 2
    largest = math.sqrt(2 / math.pi)
    assert ladp_constant(2.0, largest) == pytest.approx((1 + math.sqrt(5)) / 2, rel=1e-15)
    assert ladp_constant(2.0, largest * (1 - 1e-15)) == pytest.approx(1.0, rel=1e-6)  # (0 + sqrt(0 + 4)) / 2


def test_the_noise_of_theorem_3_satisfies_epsilon_and_delta() -> None:
    for exponent in range(-30, 21):
        epsilon = 10 ** (exponent / 10)
        for delta in [10 ** (-k / 2) for k in range(1, 21)] + [0.45, 0.6, 0.79, 0.8, 0.89]:
            assert gaussian_delta(epsilon / ladp_constant(epsilon, delta), epsilon) <= delta


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (math.nan, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.0), (1.0, math.nan)])
def test_an_impossible_budget_has_no_constant(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="must") as refusal:
        ladp_constant(epsilon, delta)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("mu", "epsilon", "times"), [(0.05, 1e-4, 1), (1.0, 1e-3, 20), (0.01, 1e-9, 10**11)])
def test_faint_reports_beside_noise_cost_no_more_than_their_sum(mu: float, epsilon: float, times: int) -> None:
    """The rest is the epsilon of the noise alone, whose delta is 1e-5. Rényi divergences would give more."""
    found = epsilon_of([(GaussianRelease("noise", mu), 1), (PureRelease("reports", epsilon, 1, "vector"), times)], 1e-5)
    noise = found - epsilon * times
    with mpmath.workdps(50):
        delta = mpmath.ncdf(mu / 2 - noise / mu) - mpmath.exp(noise) * mpmath.ncdf(-mu / 2 - noise / mu)
    assert float(delta) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.slow
def test_units_of_a_sampled_release_add_up_as_those_of_another_do() -> None:
    """Four vectors under one coin are one of twice the mu."""
    four, one = (GaussianRelease("noise", mu, units=units, rate=0.1) for mu, units in ((0.5, 4), (1.0, 1)))
    assert GaussianAccountant({four: 3}).epsilon(1e-5) == pytest.approx(GaussianAccountant({one: 3}).epsilon(1e-5), rel=1e-12)
