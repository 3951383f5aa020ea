"""The rule that keeps a budget against a server that chooses by what it saw: brute force over all it can do, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, inf

import pytest
from hypothesis import given, settings, strategies as st

from ldpfl.privacy.accountants.adaptive import epsilon_needed, filter_order, filtered_epsilon
from ldpfl.privacy.accountants.registry import epsilon_of
from ldpfl.privacy.events import GaussianRelease, PureRelease, Release, UnprotectedRelease


def report(epsilon: float) -> PureRelease:
    return PureRelease("a", epsilon, 1, "vector")


def best_attack(menu: tuple[float, ...], admits: Callable[[tuple[int, ...]], bool], epsilon: float) -> float:
    """Return the largest delta at ``epsilon`` that a server brings about which, after each report, chooses the next by all it saw.

    Reports are randomised response, the worst pure mechanism. Exact: by the expectation under one input of (1 - e^(epsilon - loss))+, over
    how often each epsilon of the menu was taken and answered with its rarer bit. ``admits`` says which numbers of reports may leave.
    """

    @cache
    def value(taken: tuple[int, ...], rare: tuple[int, ...]) -> float:
        loss = sum(each * (count - 2 * less) for each, count, less in zip(menu, taken, rare, strict=True))
        found = max(0.0, 1 - exp(epsilon - loss))
        for place, each in enumerate(menu):
            more = (*taken[:place], taken[place] + 1, *taken[place + 1 :])
            if admits(more):
                chance = 1 / (1 + exp(-each))
                rarer = (*rare[:place], rare[place] + 1, *rare[place + 1 :])
                found = max(found, chance * value(more, rare) + (1 - chance) * value(more, rarer))
        return found

    none = (0,) * len(menu)
    return value(none, none)


def admits_by_rule(menu: tuple[float, ...], epsilon: float, delta: float) -> Callable[[tuple[int, ...]], bool]:
    order = filter_order(epsilon, delta)

    @cache
    def admits(counts: tuple[int, ...]) -> bool:
        return filtered_epsilon([(report(e), n) for e, n in zip(menu, counts, strict=True) if n], order, delta) <= epsilon

    return admits


@pytest.mark.parametrize(
    ("menu", "epsilon", "delta"),
    [
        ((0.5, 1.8), 12.984, 1e-5),
        ((0.5, 1.8), 6.0, 1e-3),
        ((0.3, 0.7, 2.5), 4.0, 0.01),
        ((0.1, 0.7), 2.135, 1e-5),
        ((1.0, 3.0), 9.5, 1e-5),
        ((0.2, 4.0), 5.0, 0.05),
    ],
)
def test_no_choice_of_reports_spends_more_than_the_budget(menu: tuple[float, ...], epsilon: float, delta: float) -> None:
    assert best_attack(menu, admits_by_rule(menu, epsilon, delta), epsilon) <= delta


def test_exact_accounting_of_what_has_left_is_no_such_rule() -> None:
    """Thirty reports of 0.5 cost 12.984; who may switch to 1.8 where the exact figure still fits gets half as much delta again."""
    menu = (0.5, 1.8)
    budget = epsilon_of([(report(0.5), 30)], 1e-5)

    @cache
    def admits(counts: tuple[int, ...]) -> bool:
        return epsilon_of([(report(e), n) for e, n in zip(menu, counts, strict=True) if n], 1e-5) <= budget

    assert best_attack(menu, admits, budget) > 1.4e-5


@pytest.mark.slow
@pytest.mark.thorough
def test_one_of_two_orders_afterwards_is_no_such_rule_and_one_order_or_the_pure_sum_is() -> None:
    """What the proof is about: the pure sum bounds each path by itself, a second order does not."""
    menu, delta, epsilon = (0.05, 2.0), 1e-3, 3.0
    pure_or_one = best_attack(menu, admits_by_rule(menu, epsilon, delta), epsilon)
    assert 0 < pure_or_one <= delta


releases: st.SearchStrategy[list[tuple[Release, int]]] = st.lists(
    st.tuples(st.one_of(st.floats(1e-3, 5).map(report), st.floats(1e-2, 3).map(lambda mu: GaussianRelease("g", mu))), st.integers(1, 50)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=settings().max_examples // 4)
@given(releases, st.sampled_from([1e-9, 1e-5, 0.01]))
@pytest.mark.slow
def test_the_rule_never_charges_less_than_a_schedule_fixed_beforehand_costs(found: list[tuple[Release, int]], delta: float) -> None:
    exact, needed = epsilon_of(found, delta), epsilon_needed(found, delta)
    assert exact * (1 - 1e-6) <= needed <= 3 * exact + 3
    assert filtered_epsilon(found, filter_order(needed, delta), delta) <= needed * (1 + 1e-9)


def test_the_order_is_fixed_by_the_budget() -> None:
    assert filter_order(8.0, 0.0) == inf
    assert filter_order(0.0, 1e-5) == inf
    orders = [filter_order(epsilon, 1e-5) for epsilon in (0.1, 1.0, 10.0, 1e3, 1e6)]
    assert orders == sorted(orders, reverse=True)
    # As zero-concentrated privacy has it: 1 + sqrt(ln(1 / delta) / rho), for the rho that such a budget allows.
    assert filter_order(1e3, 1e-5) == pytest.approx((11.51 / 790) ** 0.5, rel=0.1)


def test_what_is_unprotected_fits_no_budget_and_nothing_costs_nothing() -> None:
    assert filtered_epsilon([(UnprotectedRelease("none", "all of it"), 1)], 2.0, 1e-5) == inf
    assert filtered_epsilon([(report(1.0), 1), (UnprotectedRelease("none", "all of it"), 1)], 2.0, 1e-5) == inf
    assert filtered_epsilon([], 2.0, 1e-5) == 0.0
    assert filtered_epsilon([(report(0.5), 3)], inf, 1e-5) == 1.5
    assert filtered_epsilon([(GaussianRelease("g", 1.0), 1)], inf, 1e-5) == inf
