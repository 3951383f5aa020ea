"""Published formulas: their numbers, their order, and that the normal approximation is not a bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon, central_limit_mu
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from oracles import advanced_composition_epsilon, optimal_composition_epsilon, zcdp_epsilon


def test_the_numbers_of_the_papers_mnist_run() -> None:
    arguments = 1.0, 218_400, 1e-5
    assert composed_epsilon(*arguments) == pytest.approx(102_690, abs=0.5)
    assert optimal_composition_epsilon(*arguments) == pytest.approx(103_169, abs=0.5)
    assert zcdp_epsilon(*arguments) == pytest.approx(103_082, abs=0.5)
    assert advanced_composition_epsilon(*arguments) == pytest.approx(377_515, abs=0.5)
    assert advanced_composition_epsilon(*arguments) > 218_400, "worse than the pure sum"


@pytest.mark.parametrize(("epsilon0", "count", "delta"), [(0.1, 100, 1e-5), (0.01, 10_000, 1e-3), (1.0, 1000, 1e-8), (2.0, 3, 1e-5)])
def test_the_optimal_composition_formula_is_theorem_3_4(epsilon0: float, count: int, delta: float) -> None:
    growth = math.exp(epsilon0)
    drift = (growth - 1) * epsilon0 * count / (growth + 1)
    first = drift + epsilon0 * math.sqrt(2 * count * math.log(math.e + math.sqrt(count * epsilon0**2) / delta))
    second = drift + epsilon0 * math.sqrt(2 * count * math.log(1 / delta))
    expected = min(count * epsilon0, first, second)
    assert optimal_composition_epsilon(epsilon0, count, delta) == pytest.approx(expected, rel=1e-12)


def test_each_of_its_three_expressions_is_the_smallest_somewhere() -> None:
    pure = optimal_composition_epsilon(2.0, 3, 1e-5)
    assert pure == 6.0
    usual = optimal_composition_epsilon(0.1, 100, 1e-5)
    assert usual == pytest.approx(10 * math.tanh(0.05) + 0.1 * math.sqrt(200 * math.log(1e5)), rel=1e-12)
    # e + e0 sqrt(k) / delta is below 1 / delta only where e0 sqrt(k) < 1 - e delta.
    tiny = optimal_composition_epsilon(0.01, 100, 1e-5)
    inner = math.log(math.e + 0.1 / 1e-5)
    assert tiny == pytest.approx(math.tanh(0.005) + 0.01 * math.sqrt(200 * inner), rel=1e-12)
    assert inner < math.log(1e5)


def test_the_other_two_formulas_by_hand() -> None:
    assert advanced_composition_epsilon(0.1, 100, 1e-5) == pytest.approx(
        math.sqrt(2 * 100 * math.log(1e5)) * 0.1 + 100 * 0.1 * (math.exp(0.1) - 1), rel=1e-12
    )
    rho = 100 * 0.1 * math.tanh(0.05)
    assert zcdp_epsilon(0.1, 100, 1e-5) == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)), rel=1e-12)


@given(epsilon0=st.floats(1e-3, 5.0), count=st.integers(1, 10**6), delta=st.floats(1e-12, 0.5))
def test_none_is_below_the_exact_composition(epsilon0: float, count: int, delta: float) -> None:
    exact = composed_epsilon(epsilon0, count, delta) * (1 - 1e-9)
    for formula in (optimal_composition_epsilon, advanced_composition_epsilon, zcdp_epsilon):
        assert formula(epsilon0, count, delta) >= exact, formula.__name__


def test_the_normal_law_of_shuffled_bits() -> None:
    # sqrt(k) tanh(1/2) / sqrt(100 p0 p1), with p0 p1 = 1 / (2 + e + 1/e).
    spread = 100 / (2 + math.e + 1 / math.e)
    assert central_limit_mu(1.0, 100, 1000) == pytest.approx(math.sqrt(1000 / spread) * math.tanh(0.5), rel=1e-12)
    assert central_limit_epsilon(1.0, 100, 1000, 1e-5) == pytest.approx(gaussian_epsilon(central_limit_mu(1.0, 100, 1000), 1e-5), rel=1e-12)


def test_the_normal_law_is_an_estimate_and_no_bound() -> None:
    # 5025 is attained by a data set; see vector 047.
    assert central_limit_epsilon(4.0, 200, 21_840, 1e-5) == pytest.approx(3195.17, abs=0.01)
    assert central_limit_epsilon(4.0, 200, 21_840, 1e-5) < 5025 * 0.65
