"""Many shuffled bits: enumeration of small cases, the order of the bounds, adaptive adversaries, and the large cases that matter."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy.stats import binom

from ldpfl.privacy.accountants import shuffled_composition
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accountants.losses import GridLosses
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import ShuffledLosses, attained_losses, shuffled_losses, single_epsilon
from ldpfl.privacy.accountants.shuffled_composition import (
    ShuffledRounds,
    attained_epsilon,
    certified_epsilon,
    round_curve,
    round_limit,
)
from oracles import Bracket, shuffled_epsilon

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats]

GRID = 1e-5
"""What is attained is computed on a grid with losses rounded up: at most so much above the truth in the cases below."""


def law(probabilities: Iterable[float]) -> Floats:
    total: Floats = np.ones(1)
    for p in probabilities:
        total = np.convolve(total, [1 - p, p])
    return total


def worst_cases(epsilon0: float, clients: int) -> list[Pair]:
    """Return the count's laws for every vertex of the others' inputs and both directions."""
    p1 = 1 / (1 + math.exp(-epsilon0))
    pairs = []
    for uppers in range(clients):
        others = [p1] * uppers + [1 - p1] * (clients - 1 - uppers)
        one, other = law([*others, p1]), law([*others, 1 - p1])
        pairs += [(one, other), (other, one)]
    return pairs


def product(parts: Sequence[Pair]) -> Pair:
    one = functools.reduce(lambda left, right: np.outer(left, right).ravel(), (part[0] for part in parts))
    other = functools.reduce(lambda left, right: np.outer(left, right).ravel(), (part[1] for part in parts))
    return one, other


def hockey_stick(laws: Pair, epsilon: float) -> float:
    return float(np.maximum(laws[0] - math.exp(epsilon) * laws[1], 0.0).sum())


def smallest_epsilon(cases: Sequence[Pair], delta: float, top: float) -> float:
    """Return the smallest epsilon at which none of ``cases`` exceeds ``delta``, by bisection."""
    low, high = 0.0, top
    if max(hockey_stick(case, 0.0) for case in cases) <= delta:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if max(hockey_stick(case, middle) for case in cases) > delta else (low, middle)
    return high


@functools.cache
def mnist() -> Bracket:
    """The case that the paper calls epsilon = 1: 10 rounds of 21,840 weights, 100 clients; as one release of all of them."""
    return shuffled_epsilon([ShuffledRounds(1.0, 100, 218_400)], 1e-5)


@functools.cache
def one_group(group: ShuffledRounds, delta: float = 1e-6) -> Bracket:
    """The bracket of a group that several tests compare with."""
    return shuffled_epsilon([group], delta)


# --- enumeration ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("clients", "count", "epsilon0", "delta"),
    [(2, 2, 0.1, 0.01), (2, 3, 1.0, 0.1), (3, 2, 1.0, 0.1), (3, 3, 0.1, 0.01), (3, 3, 1.0, 0.1), (3, 3, 3.0, 0.01)],
)
def test_it_covers_every_data_set(clients: int, count: int, epsilon0: float, delta: float) -> None:
    # Others may hold something else for every weight, and the target may move either way in each of them.
    cases = [product(parts) for parts in itertools.combinations_with_replacement(worst_cases(epsilon0, clients), count)]
    truth = smallest_epsilon(cases, delta, epsilon0 * count)
    fixed = shuffled_epsilon([ShuffledRounds(epsilon0, clients, count)], delta)
    rounds = shuffled_epsilon([ShuffledRounds(epsilon0, clients, 1, count)], delta)
    for bracket in (fixed, rounds):
        assert truth <= bracket.upper * (1 + 1e-9)
        assert truth <= bracket.adaptive * (1 + 1e-9)
        assert bracket.lower <= truth * (1 + GRID)
        # A good bound, not any bound: composition of the worst curve costs at most 15 % even here, where delta is 0.1.
        assert bracket.adaptive <= truth * 1.15


@pytest.mark.parametrize(("epsilon0", "delta"), [(0.5, 0.02), (1.0, 1e-3), (2.0, 0.1)])
def test_what_is_attained_is_that_of_the_one_data_set(epsilon0: float, delta: float) -> None:
    p1 = 1 / (1 + math.exp(-epsilon0))
    pair = law([p1] * 4), law([p1] * 3 + [1 - p1])
    truth = smallest_epsilon([product([pair] * 5)], delta, 5 * epsilon0)
    found = attained_epsilon([ShuffledRounds(epsilon0, 4, 5)], delta)
    # From below by what a convolution's tails may hide, from above by the grid.
    assert truth * (1 - 1e-6) <= found <= truth * (1 + GRID)


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize(("epsilon0", "delta"), [(0.3, 0.02), (1.0, 0.1), (2.5, 0.05)])
@pytest.mark.slow
@pytest.mark.thorough_for("0.3-0.02-3", "2.5-0.05-2", "1.0-0.1-2", "1.0-0.1-3", "2.5-0.05-3")
def test_it_covers_adversaries_who_look_at_the_first_round(clients: int, epsilon0: float, delta: float) -> None:
    # The second round's data set is any function of the first round's count: all of these functions, for two rounds of one bit.
    pairs = worst_cases(epsilon0, clients)
    cases = []
    for first in pairs[: clients + clients % 2]:  # the other half is the mirror image
        for second in itertools.product(pairs, repeat=clients + 1):
            one = np.concatenate([first[0][seen] * then[0] for seen, then in enumerate(second)])
            other = np.concatenate([first[1][seen] * then[1] for seen, then in enumerate(second)])
            cases.append((one, other))
    ones, others = np.stack([case[0] for case in cases]), np.stack([case[1] for case in cases])

    def worst(epsilon: float) -> float:
        return float(np.maximum(ones - math.exp(epsilon) * others, 0.0).sum(axis=1).max())

    adaptive = certified_epsilon([ShuffledRounds(epsilon0, clients, 1, 2)], delta)[1]
    assert worst(adaptive) <= delta * (1 + 1e-9)
    assert worst(adaptive * 0.85) > delta or adaptive == 0


@given(data=st.data(), epsilon0=st.floats(0.1, 3.0), delta=st.floats(1e-3, 0.1))
@settings(max_examples=4)
@pytest.mark.slow
@pytest.mark.thorough
def test_it_covers_inner_inputs(data: st.DataObject, epsilon0: float, delta: float) -> None:
    p1 = 1 / (1 + math.exp(-epsilon0))
    inner = st.floats(1 - p1, p1)
    parts = []
    for _ in range(3):
        others = data.draw(st.lists(inner, min_size=2, max_size=2))
        parts.append((law([data.draw(inner), *others]), law([data.draw(inner), *others])))
    upper, _ = certified_epsilon([ShuffledRounds(epsilon0, 3, 3)], delta)
    assert hockey_stick(product(parts), upper) <= delta * (1 + 1e-9)


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    clients=st.integers(1, 400),
    epsilon0=st.floats(0.01, 6.0),
    reports=st.integers(1, 3000),
    rounds=st.integers(1, 5),
    delta=st.floats(-9.0, -2.0).map(lambda exponent: 10**exponent),
)
@settings(max_examples=5)
@pytest.mark.thorough
def test_the_bounds_are_in_order(clients: int, epsilon0: float, reports: int, rounds: int, delta: float) -> None:
    group = ShuffledRounds(epsilon0, clients, reports, rounds)
    upper, adaptive = certified_epsilon([group], delta)
    # shuffled_epsilon would hide a lower number above the upper one, so the two are compared as they are computed.
    assert attained_epsilon([group], delta) <= upper * (1 + 1e-4) + 1e-9
    assert upper <= adaptive
    assert adaptive <= composed_epsilon(epsilon0, group.releases, delta) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "smaller", "larger"),
    [
        ("epsilon0", ShuffledRounds(0.5, 150, 400, 2), ShuffledRounds(0.65, 150, 400, 2)),
        ("reports", ShuffledRounds(0.5, 150, 400, 2), ShuffledRounds(0.5, 150, 520, 2)),
        ("rounds", ShuffledRounds(0.5, 150, 400, 3), ShuffledRounds(0.5, 150, 400, 4)),
        ("clients", ShuffledRounds(0.5, 195, 400, 2), ShuffledRounds(0.5, 150, 400, 2)),
        ("cells", ShuffledRounds(1.0, 1950, 400, 2), ShuffledRounds(1.0, 1500, 400, 2)),
    ],
)
@pytest.mark.slow
@pytest.mark.thorough_for("epsilon0-smaller0-larger0", "rounds-smaller2-larger2", "clients-smaller3-larger3", "cells-smaller4-larger4")
def test_a_third_more_costs_more(name: str, smaller: ShuffledRounds, larger: ShuffledRounds) -> None:
    less, more = one_group(smaller), one_group(larger)
    assert less.lower < more.lower, name
    assert less.upper < more.upper, name
    assert less.adaptive < more.adaptive, name


@pytest.mark.parametrize("near", [ShuffledRounds(0.505, 150, 400, 2), ShuffledRounds(0.5, 149, 400, 2), ShuffledRounds(0.5, 150, 404, 2)])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_little_more_costs_at_most_one_percent_less(near: ShuffledRounds) -> None:
    # Bounds are certified one by one; each rests on a grid of its own, so neighbours need not be in order to the last digit.
    base, more = one_group(ShuffledRounds(0.5, 150, 400, 2)), one_group(near)
    for first, second in ((base.lower, more.lower), (base.upper, more.upper), (base.adaptive, more.adaptive)):
        assert first * 0.99 <= second <= first * 1.03


@pytest.mark.slow
@pytest.mark.thorough
def test_a_smaller_delta_costs_more() -> None:
    found = [one_group(ShuffledRounds(0.5, 150, 400, 2), delta) for delta in (1e-3, 1e-6)]
    assert found[0].lower < found[1].lower
    assert found[0].adaptive < found[1].adaptive
    pure = shuffled_epsilon([ShuffledRounds(0.5, 150, 400, 2)], 0.0)
    assert pure == Bracket(400.0, 400.0, 400.0)


# --- the edges of the question ----------------------------------------------------------------------------------------


def test_nothing_released_costs_nothing() -> None:
    assert shuffled_epsilon([], 1e-5) == Bracket(0.0, 0.0, 0.0)
    assert shuffled_epsilon([ShuffledRounds(1.0, 100, 0, 5), ShuffledRounds(1.0, 50, 5, 0)], 1e-5) == Bracket(0.0, 0.0, 0.0)
    assert shuffled_epsilon([ShuffledRounds(0.0, 100, 9)], 1e-5) == Bracket(0.0, 0.0, 0.0)


def test_a_client_alone_is_not_hidden() -> None:
    local = composed_epsilon(0.7, 300, 1e-5)
    assert shuffled_epsilon([ShuffledRounds(0.7, 1, 100, 3)], 1e-5) == Bracket(local, local, local)


def test_one_bit_is_one_bit() -> None:
    single = single_epsilon(1.0, 80, 1e-4)
    assert shuffled_epsilon([ShuffledRounds(1.0, 80, 1)], 1e-4) == Bracket(single, single, single)


@pytest.mark.parametrize("epsilon0", [40.0, 1000.0])
@pytest.mark.slow
@pytest.mark.thorough_for("40.0")
def test_almost_certain_bits_are_not_hidden(epsilon0: float) -> None:
    bracket = shuffled_epsilon([ShuffledRounds(epsilon0, 20, 20, 2)], 1e-5)
    for value in (bracket.lower, bracket.upper, bracket.adaptive):
        assert value == pytest.approx(40 * epsilon0, rel=1e-4)


@pytest.mark.slow
@pytest.mark.thorough
def test_tiny_epsilons_are_hidden() -> None:
    bracket = shuffled_epsilon([ShuffledRounds(1e-6, 50, 6000, 2)], 1e-5)
    assert 0 <= bracket.lower <= bracket.upper <= bracket.adaptive < 1e-4


# --- different rounds -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_equal_groups_are_merged_and_their_order_is_irrelevant() -> None:
    first, second = ShuffledRounds(0.5, 140, 50, 2), ShuffledRounds(0.5, 140, 50, 3)
    assert shuffled_epsilon([first, second], 1e-5) == shuffled_epsilon([ShuffledRounds(0.5, 140, 50, 5)], 1e-5)
    other = ShuffledRounds(0.7, 170, 200)
    one, two = shuffled_epsilon([first, other], 1e-5), shuffled_epsilon([other, first], 1e-5)
    assert (one.lower, one.upper, one.adaptive) == pytest.approx((two.lower, two.upper, two.adaptive), rel=1e-6)


@pytest.mark.slow
@pytest.mark.thorough
def test_unequal_groups_lie_between_equal_ones() -> None:
    mixed = shuffled_epsilon([ShuffledRounds(1.0, 130, 2000, 2), ShuffledRounds(1.0, 169, 2000, 2)], 1e-5)
    few = shuffled_epsilon([ShuffledRounds(1.0, 130, 2000, 4)], 1e-5)
    many = shuffled_epsilon([ShuffledRounds(1.0, 169, 2000, 4)], 1e-5)
    assert many.adaptive < mixed.adaptive < few.adaptive
    assert many.upper < mixed.upper < few.upper
    # The lower number of a mixture comes from a cruder theorem, but must be below all upper ones and say something.
    assert 0.9 * many.lower < mixed.lower <= few.lower * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.thorough
def test_unequal_groups_cover_enumeration() -> None:
    groups = [ShuffledRounds(1.0, 2, 2), ShuffledRounds(0.6, 3, 1, 2)]
    first, second = worst_cases(1.0, 2), worst_cases(0.6, 3)
    cases = [
        product([*left, *right])
        for left in itertools.combinations_with_replacement(first, 2)
        for right in itertools.combinations_with_replacement(second, 2)
    ]
    for delta in (1e-3, 0.05):
        truth = smallest_epsilon(cases, delta, 3.2)
        bracket = shuffled_epsilon(groups, delta)
        assert truth <= bracket.upper * (1 + 1e-9)
        assert bracket.lower <= truth * (1 + GRID)
        assert bracket.adaptive <= 3.2


@pytest.mark.slow
@pytest.mark.thorough
def test_a_group_without_a_crowd_counts_in_full() -> None:
    # One round that a client spent alone: nothing hides it, and the others cannot make it cheaper.
    alone = composed_epsilon(1.0, 30, 1e-5)
    bracket = shuffled_epsilon([ShuffledRounds(1.0, 1, 30), ShuffledRounds(1.0, 100, 30)], 1e-5)
    assert alone < bracket.upper <= bracket.adaptive


@pytest.mark.slow
@pytest.mark.thorough
def test_many_budgets_are_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a ledger of somebody else does not take an hour; and what is attained stays below."""
    groups = [ShuffledRounds(epsilon, 200, 3) for epsilon in (0.2, 0.25, 0.5)]
    exact = certified_epsilon(groups, 1e-5)
    attained = attained_epsilon(groups, 1e-5)
    monkeypatch.setattr(shuffled_composition, "_MAX_EPSILONS", 2)
    rounded = certified_epsilon(groups, 1e-5)
    assert all(a < b for a, b in zip(exact, rounded, strict=True))
    assert rounded[1] < certified_epsilon([ShuffledRounds(0.5, 200, 9)], 1e-5)[1]
    assert attained_epsilon(groups, 1e-5) <= attained < exact[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_many_cohort_sizes_are_rounded_down() -> None:
    sizes = list(range(100, 150, 5))
    # 12,000 reports: the finer grid that fewer of them get would take most of this file's time.
    groups = [ShuffledRounds(0.8, size, 12_000) for size in sizes]
    assert len(sizes) > 8
    many = certified_epsilon(groups, 1e-5)
    # Rounding down hides less: never below the same rounds with all cohorts rounded up to at most eight sizes, which are right.
    up = certified_epsilon([ShuffledRounds(0.8, 10 * math.ceil(size / 10), 12_000) for size in sizes], 1e-5)
    smallest = certified_epsilon([ShuffledRounds(0.8, sizes[0], 12_000, len(sizes))], 1e-5)
    assert up[0] <= many[0] <= smallest[0] * (1 + 1e-3)
    assert up[1] <= many[1] <= smallest[1] * (1 + 1e-3)


@pytest.mark.thorough
def test_of_many_cohort_sizes_what_is_attained_is_that_of_a_few_larger_ones() -> None:
    groups = [ShuffledRounds(0.8, size, 200) for size in range(100, 140)]
    found = attained_epsilon(groups, 1e-5)
    assert attained_epsilon([ShuffledRounds(0.8, 139, 200, 40)], 1e-5) <= found <= certified_epsilon(groups, 1e-5)[1]
    assert found == pytest.approx(attained_epsilon([ShuffledRounds(0.8, 121, 200, 40)], 1e-5), rel=0.02)


# --- large cases ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_the_papers_mnist_run_is_known_within_half_a_percent() -> None:
    bracket = mnist()
    assert bracket.lower == pytest.approx(1405.44, rel=1e-4)
    assert bracket.lower <= bracket.upper <= 1.005 * bracket.lower


@pytest.mark.slow
@pytest.mark.thorough
def test_the_papers_mnist_run_by_rounds_is_nearly_as_good() -> None:
    upper, adaptive = certified_epsilon([ShuffledRounds(1.0, 100, 21_840, 10)], 1e-5)
    assert upper == pytest.approx(mnist().upper, rel=1e-6)
    assert mnist().lower <= upper <= adaptive <= 1412.5


@pytest.mark.slow
@pytest.mark.thorough
def test_the_cohort_that_epsilon_four_needs() -> None:
    bracket = shuffled_epsilon([ShuffledRounds(1.0, 278_000, 218_400)], 1e-5)
    assert 3.98 < bracket.lower <= bracket.upper <= 1.01 * bracket.lower
    assert bracket.upper == pytest.approx(4.0, rel=0.005)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_million_clients_and_a_million_weights() -> None:
    start = time.process_time()
    bracket = shuffled_epsilon([ShuffledRounds(1.0, 10**6, 10**6)], 1e-5)
    assert time.process_time() - start < 30
    # So many reports hide in so many that the loss is normal up to a thousandth; mu = sqrt(k) tanh(e0/2) / sqrt(n p0 p1).
    p1 = 1 / (1 + math.exp(-1.0))
    normal = gaussian_epsilon(math.tanh(0.5) / math.sqrt(p1 * (1 - p1)), 1e-5)
    assert 0.94 * normal < bracket.lower <= normal * 1.001
    assert normal * 0.999 <= bracket.upper <= bracket.adaptive <= 1.01 * normal


@pytest.mark.slow
@pytest.mark.thorough
def test_importance_sampling_confirms_what_is_attained() -> None:
    # All others at +: the count is Bin(100, p1) for the one input. Draw it 218,400 times under weights e^(t loss), with t such
    # that the total loss is around epsilon, and weigh back. Five standard errors: a false alarm in two million, the seed is fixed.
    epsilon, count, samples = mnist().lower, 218_400, 40_000
    p1 = 1 / (1 + math.exp(-1.0))
    others = np.append(binom.logpmf(np.arange(100), 99, p1), -np.inf)
    one_less = np.roll(others, 1)
    log_one = np.logaddexp(math.log(p1) + one_less, math.log1p(-p1) + others)
    losses = log_one - np.logaddexp(math.log1p(-p1) + one_less, math.log(p1) + others)
    low, high = 1e-4, 1.0
    for _ in range(60):
        t = (low + high) / 2
        weights = np.exp(log_one + t * losses)
        low, high = (t, high) if count * float(weights @ losses) / weights.sum() < epsilon else (low, t)
    draws = np.random.default_rng(5).multinomial(count, weights / weights.sum(), size=samples)
    above = np.maximum(draws @ losses - epsilon, 0.0)
    log_scale = count * math.log(float(weights.sum())) - t * epsilon
    values = np.exp(log_scale - t * above) * -np.expm1(-above)
    error = float(values.std()) / math.sqrt(samples)
    assert error < 2e-7, "too few samples to say anything"
    assert abs(float(values.mean()) - 1e-5) < 5 * error


# --- one round --------------------------------------------------------------------------------------------------------


@functools.cache
def small_losses() -> ShuffledLosses:
    return shuffled_losses(1.0, 30, 256)


@pytest.mark.parametrize("reports", [1, 6, 400])
def test_the_curve_of_a_round_is_above_that_of_its_rows(reports: int) -> None:
    losses = small_losses()
    epsilons = np.linspace(0.0, round_limit(losses, reports, 1e-9), 60)
    curve = round_curve(losses, reports, epsilons, 1e-9)
    assert np.all(np.diff(curve) <= 1e-12)
    assert np.all(curve <= 1.0)
    assert curve[-1] <= 1e-9 * (1 + 1e-6) + 2e-15
    for row in (0, 15, 29):
        own = GridLosses(losses.step, -losses.half, losses.masses[row]).composed(reports, 1e-6)
        assert own is not None
        for epsilon, bound in zip(epsilons.tolist(), curve.tolist(), strict=True):
            above = own.losses > epsilon
            delta = float(own.masses[above] @ -np.expm1(epsilon - own.losses[above]))
            assert delta <= bound + 1e-14 * reports


def test_where_nobody_hides_a_data_set_attains_what_one_budget_costs_by_itself() -> None:
    """Of several budgets no data set is known to attain what they are composed to."""
    groups = [ShuffledRounds(0.2285, 1, 100), ShuffledRounds(0.0918, 1, 50)]
    alone = attained_epsilon(groups[:1], 1e-5)
    assert alone == pytest.approx(composed_epsilon(0.2285, 100, 1e-5), rel=1e-6)
    assert attained_epsilon(groups, 1e-5) == alone
    assert shuffled_epsilon(groups, 1e-5).upper > alone


@pytest.mark.thorough
@pytest.mark.parametrize("clients", [10**6, 10**9])
def test_many_kinds_of_bits_among_very_many_clients_take_bounded_work(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each distinct bit takes seconds at 1e9 clients. Here losses are those of few clients, so that only their number is tested."""
    upper, lower = list[tuple[float, int]](), list[tuple[float, int]]()

    def counted(kept: list[tuple[float, int]], made: Any) -> Any:
        def losses(epsilon0: float, clients: int, *half: int) -> Any:
            kept.append((epsilon0, clients))
            return made(epsilon0, 50, *half)

        return losses

    monkeypatch.setattr(shuffled_composition, "shuffled_losses", counted(upper, shuffled_losses))
    monkeypatch.setattr(shuffled_composition, "attained_losses", counted(lower, attained_losses))
    groups = [ShuffledRounds(0.1 + place / 1000, clients - place * (clients // 100), 3) for place in range(40)]
    shuffled_epsilon(groups, 1e-5)
    for kept in (upper, lower):
        assert sum(own**0.5 for _, own in set(kept)) <= 2.1e5
        assert len(set(kept)) > 1
