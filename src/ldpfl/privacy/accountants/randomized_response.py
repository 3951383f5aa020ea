"""Randomised response without a shuffler: exact epsilon and delta of any number of reports.

k reports of one client at epsilon each have the privacy loss epsilon * (2 B - k), B ~ Bin(k, e^epsilon / (1 + e^epsilon)). That is also the
worst case over all k-fold adaptive compositions of pure epsilon-DP mechanisms (Kairouz, Oh, Viswanath 2015). So the same functions compose
every pure mechanism. For reports of several epsilons the worst case is a product of randomised responses, so their losses add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from math import ceil, expm1, floor, inf, nextafter, prod, sqrt

import numpy as np

from ldpfl.privacy.accountants.binomial import TAIL, Array, Binomial, sigmoid
from ldpfl.privacy.accountants.losses import connect_the_dots, delta_of, epsilon_of
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment

HUGE_BUDGET = 700.0
"""Epsilon above which e^epsilon overflows; nothing is protected there anyway."""

MOST_REPORTS = 10**10
"""Largest number of reports that is composed exactly. Time and memory grow with its square root."""

MOST_EPSILONS = 64
"""Largest number of different epsilons whose reports are composed by convolution."""

_ENUMERATED = 1 << 18
"""Largest number of combined losses of several groups that are all kept. More are put on a grid, which takes a tenth of a second."""

_GRID_POINTS = 1 << 14
"""Number of grid points for the losses of several groups."""


def report_delta(epsilon0: float, epsilon: float) -> float:
    """Return delta(``epsilon``) of one report at ``epsilon0``: max(0, p1 - e^epsilon p0), p1 = 1 - p0 = 1 / (1 + e^-epsilon0)."""
    return -expm1(epsilon - epsilon0) * sigmoid(epsilon0) if epsilon < epsilon0 else 0.0


def log_moment(epsilon0: float, order: float | Array) -> Array:
    """Return log E[e^(order * loss)] of one report, order > 0. It is ``order`` times the Rényi divergence of order 1 + ``order``.

    The loss is ``epsilon0`` with the probability sigmoid(``epsilon0``), and else -``epsilon0``.
    """
    order = np.asarray(order, dtype=np.float64)
    p0 = sigmoid(-epsilon0)
    x = order * epsilon0
    far = x + np.log(sigmoid(epsilon0) + p0 * np.exp(-2 * x))
    # Near 0 the moment is almost 1, so its logarithm is computed from the moment less 1.
    near = np.log1p(sigmoid(epsilon0) * np.expm1(np.minimum(x, 1.0)) + p0 * np.expm1(-x))  # the minimum only prevents overflow
    return np.asarray(np.where(x < 1.0, near, far))


def composed_delta(epsilon0: float, reports: int, epsilon: float) -> float:
    """Return delta(``epsilon``) of ``reports`` reports of one client at ``epsilon0`` each, exact."""
    losses, masses = _losses(epsilon0, reports)
    return delta_of(losses, masses, epsilon)


_TINY_DELTA = 1e-12  # below this delta, epsilon is rounded up by a relative 1e-12

_MASS_ROUNDED = 2e-13
"""Relative rounding error of the probabilities of losses, which are products of as many ratios as there are reports. The largest error
that was found is a quarter of it, for 1,000 reports."""
_DELTA_ROUNDED = 1e-10
"""Relative rounding error of delta at epsilon 0, whose terms are all positive."""

ROUNDED = 2e-15
"""Allowance for rounding: an epsilon from n losses may be wrong by this times sqrt(n).

The largest error that a comparison with 50 digits found is half as large.
"""


def composed_epsilon(epsilon0: float, reports: int, delta: float) -> float:
    """Return the smallest epsilon for ``delta`` of ``reports`` reports of one client at ``epsilon0`` each, exact but for rounding upwards.

    ``delta`` = 0 gives the pure sum. ``reports`` may be at most :data:`MOST_REPORTS`.
    """
    if reports == 0 or epsilon0 == 0:
        return 0.0
    # Below, losses of a total probability of at most TAIL are left out, and a tiny delta may be smaller than that. For a huge epsilon0 the
    # pure sum is right to all digits.
    if delta <= TAIL or epsilon0 > HUGE_BUDGET:
        return pure_sum((epsilon0, reports))
    losses, masses = _losses(epsilon0, reports)
    computed = epsilon_of(losses, masses, (delta - TAIL) * (1 - min(_MASS_ROUNDED, 1e-14 * reports)))
    # A positive epsilon below the rounding error comes out as 0. Whether it is positive is decided by delta at epsilon 0.
    if computed == 0 and delta_of(losses, masses, 0.0) * (1 + _DELTA_ROUNDED) <= delta - TAIL:
        return 0.0
    # Round up by more than the rounding error: by two units in the last place, and by more for a tiny delta.
    rounded_up = computed * (1 + 1e-12) if delta < _TINY_DELTA else nextafter(nextafter(computed, inf), inf)
    # Sums of probabilities near 1 have a rounding error that spoils many digits of a tiny epsilon, so ROUNDED is added.
    return min(pure_sum((epsilon0, reports)), rounded_up + ROUNDED * sqrt(losses.size))


def pure_sum(*groups: tuple[float, int]) -> float:
    """Return the sum of epsilon times number of reports over all ``groups``, rounded up: never below the exact sum of fractions."""
    total = sum(epsilon0 * number for epsilon0, number in groups)
    exact = sum(Fraction(epsilon0) * number for epsilon0, number in groups) if total < inf else 0
    while total < inf and Fraction(total) < exact:
        total = nextafter(total, inf)
    return total


def _losses(epsilon0: float, reports: int) -> tuple[Array, Array]:
    """Return the possible losses of k = ``reports`` reports, ascending, and their probabilities."""
    first, logs = Binomial(reports, epsilon0).log_pmf()
    ones = first + np.arange(logs.size, dtype=np.float64)
    return epsilon0 * (2 * ones - reports), np.exp(logs)


def sum_of_reports_epsilon(reports: Sequence[tuple[float, int]], delta: float) -> float:
    """Return epsilon at ``delta`` of one client's reports, given as (epsilon, number) groups.

    Exact for one group, and for several groups whose losses are few enough to enumerate. Otherwise it is the smallest of the bounds by
    convolution on a grid, by Rényi divergences, by the pure sum, and by taking every report to have the largest epsilon.
    """
    counts: Counter[float] = Counter()
    for epsilon0, number in reports:
        if number > 0 and epsilon0 > 0:
            counts[epsilon0] += number
    pure = pure_sum(*counts.items())
    if len(counts) == 1:
        return composed_epsilon(*next(iter(counts.items())), delta)
    if delta <= 0 or pure == 0 or max(counts) > HUGE_BUDGET:
        return pure
    by_moments = epsilon_from_log_moment(
        lambda order: np.sum([number * log_moment(epsilon0, order) for epsilon0, number in counts.items()], axis=0), delta
    )
    if counts.total() > MOST_REPORTS:
        return min(pure, by_moments)
    convolved = _convolved_epsilon(tuple(sorted(counts.items())), delta) if len(counts) <= MOST_EPSILONS else inf
    return min(pure, by_moments, composed_epsilon(max(counts), counts.total(), delta), convolved)


def _convolved_epsilon(groups: tuple[tuple[float, int], ...], delta: float) -> float:
    """Return an upper bound of epsilon at ``delta`` of all reports, given as (epsilon, number) ``groups``, by the sum of their losses.

    Return infinity if ``delta`` is smaller than the probabilities that are left out.
    """
    inside = delta - len(groups) * TAIL
    if inside <= 0:
        return inf
    losses, masses = _sums_of_losses(groups)
    computed = epsilon_of(losses, masses, inside)
    if computed == 0 and delta_of(losses, masses, 0.0) * (1 + _DELTA_ROUNDED) <= inside:
        return 0.0
    # Round up as in composed_epsilon. Sums of losses are rounded relative to the largest of them.
    return computed * (1 + 1e-12) + ROUNDED * (sqrt(losses.size) + max(-float(losses[0]), float(losses[-1])))


@lru_cache(maxsize=4)  # for searches over delta
def _sums_of_losses(groups: tuple[tuple[float, int], ...]) -> tuple[Array, Array]:
    """Return the possible losses of the reports of all ``groups``, (epsilon, number) each, ascending, and their probabilities.

    Too many losses are moved to a grid so that delta is nowhere lower. All terms are positive, so the probabilities are precise.
    """
    parts = [_losses(epsilon0, number) for epsilon0, number in groups]
    if prod(losses.size for losses, _ in parts) <= _ENUMERATED:
        sums = reduce(np.add.outer, [losses for losses, _ in parts]).ravel()
        masses = reduce(np.multiply.outer, [masses for _, masses in parts]).ravel()
        order = np.argsort(sums)
        return sums[order], masses[order]
    step = sum(float(losses[-1] - losses[0]) for losses, _ in parts) / _GRID_POINTS
    firsts = [floor(losses[0] / step) for losses, _ in parts]
    on_grid = [
        connect_the_dots(losses, masses, step, first, ceil(losses[-1] / step) - first + 2)
        for (losses, masses), first in zip(parts, firsts, strict=True)
    ]
    total = reduce(np.convolve, on_grid)
    return step * (sum(firsts) + np.arange(total.size, dtype=np.float64)), total
