"""Secret participation: enumeration below the bound, certain participation as none, amplification and its inverse."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ldpfl import ConfigError
from ldpfl.privacy.accountants.participation import self_sampled_epsilon, self_sampled_round_delta, unamplified_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_epsilon, report_delta
from ldpfl.privacy.accountants.shuffled_bits import single_delta
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, certified_epsilon
from oracles import amplified_epsilon, self_sampled_delta, self_sampled_delta_exact

Law = dict[tuple[int, int], float]


def law(probabilities: list[float], rate: float) -> Law:
    """Return the law of (number of +, number of -) when each client stays away with probability 1 - ``rate``."""
    total: Law = defaultdict(float)
    for seen in itertools.product((None, True, False), repeat=len(probabilities)):
        chances = (1 - rate if s is None else rate * (p if s else 1 - p) for s, p in zip(seen, probabilities, strict=True))
        total[seen.count(True), seen.count(False)] += math.prod(chances)
    return total


@pytest.mark.parametrize("clients", [1, 2, 3, 5])
@pytest.mark.parametrize(("rate", "epsilon0"), [(0.5, 1.0), (0.7, 0.3), (0.9, 3.0)])
def test_the_exact_delta_is_that_of_enumeration_and_below_the_bound(clients: int, rate: float, epsilon0: float) -> None:
    p1 = 1 / (1 + math.exp(-epsilon0))
    for epsilon in (0.0, 0.2 * epsilon0, 0.8 * epsilon0):
        worst = 0.0
        for others in itertools.product((p1, 1 - p1), repeat=clients - 1):
            one, other = law([p1, *others], rate), law([1 - p1, *others], rate)
            for first, second in ((one, other), (other, one)):
                worst = max(worst, sum(max(p - math.exp(epsilon) * second[seen], 0.0) for seen, p in first.items()))
        exact = self_sampled_delta_exact(epsilon0, clients, rate, epsilon)
        assert exact == pytest.approx(worst, rel=1e-9, abs=1e-15)
        assert exact <= self_sampled_delta(epsilon0, clients, rate, epsilon) + 1e-14
        assert exact <= rate * report_delta(epsilon0, epsilon) + 1e-14


@given(clients=st.integers(1, 12), rate=st.floats(0.05, 1.0), epsilon0=st.floats(0.05, 4.0), share=st.floats(0.0, 1.0))
@settings(max_examples=settings().max_examples // 2)
def test_the_bound_is_never_below_the_exact_delta(clients: int, rate: float, epsilon0: float, share: float) -> None:
    arguments = epsilon0, clients, rate, share * epsilon0
    assert self_sampled_delta_exact(*arguments) <= self_sampled_delta(*arguments) + 1e-13


@pytest.mark.slow
def test_certain_participation_is_no_sampling() -> None:
    assert self_sampled_delta(1.0, 12, 1.0, 0.3) == single_delta(1.0, 12, 0.3)
    assert self_sampled_delta_exact(1.0, 12, 1.0, 0.3) == pytest.approx(single_delta(1.0, 12, 0.3), rel=1e-10)
    setting = ShuffledRounds(1.0, 150, 300, 3)
    # The same bounds within a round and convolution over rounds, on half as fine a grid.
    assert self_sampled_epsilon(setting, 1.0, 1e-5) == pytest.approx(certified_epsilon([setting], 1e-5)[1], rel=2e-3)


@pytest.mark.slow
def test_one_bit_in_one_round_is_the_same_by_both_ways() -> None:
    one_bit = self_sampled_round_delta(ShuffledRounds(1.0, 10, 1), 0.7, 0.3)
    assert one_bit == pytest.approx(self_sampled_delta(1.0, 10, 0.7, 0.3), rel=1e-6)


@pytest.mark.slow
def test_rounds_cover_enumeration_and_cost_less_than_no_crowd() -> None:
    clients, rate, epsilon0, delta = 3, 0.6, 1.0, 0.02
    p1 = 1 / (1 + math.exp(-epsilon0))
    cases = []
    for others in ((p1, p1), (p1, 1 - p1), (1 - p1, 1 - p1)):
        one, other = law([p1, *others], rate), law([1 - p1, *others], rate)
        cases.append((np.array([one[seen] for seen in one]), np.array([other[seen] for seen in one])))
        cases.append(cases[-1][::-1])
    bound = self_sampled_epsilon(ShuffledRounds(epsilon0, clients, 1, 2), rate, delta)
    worst = 0.0
    for first, second in itertools.product(cases, repeat=2):
        one_two, other_two = np.outer(first[0], second[0]), np.outer(first[1], second[1])
        worst = max(worst, float(np.maximum(one_two - math.exp(bound) * other_two, 0.0).sum()))
    assert worst <= delta
    assert bound <= composed_epsilon(epsilon0, 2, delta) * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.thorough
def test_staying_away_costs_more_than_it_hides() -> None:
    # Fewer reports to hide among: at a large epsilon a rate in (0.5, 1) never pays.
    setting = ShuffledRounds(1.0, 150, 11_000)
    assert self_sampled_epsilon(setting, 0.7, 1e-5) > 1.1 * self_sampled_epsilon(setting, 1.0, 1e-5)


# --- amplification ----------------------------------------------------------------------------------------------------


@given(exponent=st.floats(-9.0, 6.0), share=st.floats(0.001, 1.0))
def test_amplification_equals_its_formula_and_has_an_inverse(exponent: float, share: float) -> None:
    epsilon = 10**exponent
    amplified = amplified_epsilon(epsilon, share)
    with mpmath.workdps(40):
        expected = float(mpmath.log1p(mpmath.mpf(share) * mpmath.expm1(mpmath.mpf(epsilon)))) if epsilon < 1e5 else amplified
    assert amplified == pytest.approx(expected, rel=1e-12, abs=3e-16)
    assert amplified <= epsilon * (1 + 1e-12) + 3e-16
    assert float(unamplified_epsilon(amplified, share)) == pytest.approx(epsilon, rel=1e-10, abs=1e-15 / share)


def test_amplification_keeps_a_huge_epsilon_and_a_zero() -> None:
    assert amplified_epsilon(1e6, 0.25) == pytest.approx(1e6 + math.log(0.25), rel=1e-15)
    assert float(unamplified_epsilon(1e6, 0.25)) == pytest.approx(1e6 - math.log(0.25), rel=1e-15)
    assert amplified_epsilon(0.0, 0.3) == float(unamplified_epsilon(0.0, 0.3)) == 0.0
    assert amplified_epsilon(1405.4, 1.0) == float(unamplified_epsilon(1405.4, 1.0)) == 1405.4
    many = unamplified_epsilon(np.array([0.0, 0.1, 0.9999999, 1.0, 1.0000001, 900.0]), 0.4)
    assert np.all(np.diff(many) > 0)
    assert many[2:5] == pytest.approx([math.log1p(math.expm1(1.0) / 0.4)] * 3, rel=1e-6)


def test_an_epsilon_beyond_every_loss_costs_nothing() -> None:
    # An epsilon of 800 and more is what whole vectors have.
    assert self_sampled_delta(1.0, 5, 0.5, 800.0) == 0.0
    assert self_sampled_delta_exact(1.0, 5, 0.5, 800.0) == 0.0


def test_enumeration_refuses_what_it_cannot_enumerate() -> None:
    with pytest.raises(ConfigError, match="up to 64 clients, got 65") as refusal:
        self_sampled_delta_exact(1.0, 65, 0.7, 0.1)
    assert "\n" not in str(refusal.value)
