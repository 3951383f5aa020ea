"""Randomised response without a shuffler: one report, and any number of them, exactly.

k reports of one client at epsilon each have the loss epsilon * (2 B - k), B ~ Bin(k, e^epsilon / (1 + e^epsilon)). That is
also the worst case over all k-fold adaptive compositions of pure epsilon-DP mechanisms (Kairouz, Oh, Viswanath 2015),
so every pure mechanism is composed by the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import expm1, inf, nextafter, sqrt

import numpy as np

from ldpfl.privacy.accountants.binomial import TAIL, Array, Binomial, sigmoid
from ldpfl.privacy.accountants.losses import delta_of, epsilon_of
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment

HUGE_BUDGET = 700.0
"""Above this budget e^epsilon overflows, and nothing is protected anyway."""


def report_delta(epsilon0: float, epsilon: float) -> float:
    """delta(``epsilon``) of one report at ``epsilon0``: max(0, p1 - e^epsilon p0)."""
    return -expm1(epsilon - epsilon0) * sigmoid(epsilon0) if epsilon < epsilon0 else 0.0


def log_moment(epsilon0: float, order: float | Array) -> Array:
    """log E[e^(order * loss)] of one report, order > 0; ``order`` times the Renyi divergence of order 1 + ``order``."""
    order = np.asarray(order, dtype=np.float64)
    p0 = sigmoid(-epsilon0)
    x = order * epsilon0
    far = x + np.log(sigmoid(epsilon0) + p0 * np.exp(-2 * x))
    # Near 0 the logarithm is that of almost 1: sum what is missing to 1 instead.
    near = np.log1p(sigmoid(epsilon0) * np.expm1(np.minimum(x, 1.0)) + p0 * np.expm1(-x))
    return np.asarray(np.where(x < 1.0, near, far))


def composed_delta(epsilon0: float, reports: int, epsilon: float) -> float:
    """delta(``epsilon``) of ``reports`` reports of one client at ``epsilon0`` each, exact."""
    losses, masses = _losses(epsilon0, reports)
    return delta_of(losses, masses, epsilon)


_TINY_DELTA = 1e-12

_DELTA_ROUNDED = 1e-10
"""Part of a delta at epsilon 0 that may be rounded off: all its terms are positive."""

ROUNDED = 2e-15
"""Allowance for rounding: an epsilon of a list of losses may be off by this, times the square root of their number.

The largest error that a comparison with 50 digits found is half as large.
"""


def composed_epsilon(epsilon0: float, reports: int, delta: float) -> float:
    """Return the smallest epsilon for ``delta`` of ``reports`` reports of one client at ``epsilon0`` each, exact.

    ``delta`` = 0 gives the pure sum. Up to 1e10 reports; time and memory grow with the square root of their number.
    """
    if reports == 0 or epsilon0 == 0:
        return 0.0
    # What the window leaves out may be as large as delta; and a huge budget is its pure sum to all digits.
    if delta <= TAIL or epsilon0 > HUGE_BUDGET:
        return pure_sum(epsilon0, reports)
    losses, masses = _losses(epsilon0, reports)
    found = epsilon_of(losses, masses, delta - TAIL)
    # Up, by more than can have been rounded down: near the pure sum half a digit is a ten-thousandth of delta, or many of a tiny one; and
    # what is rounded in sums of the masses, which are 1 in all, is many digits of a tiny epsilon.
    up = found * (1 + 1e-12) if delta < _TINY_DELTA else nextafter(nextafter(found, inf), inf)
    # The smallest budgets are smaller than what is rounded, so that nothing is found: whether something is there, delta at 0 tells.
    hidden = found == 0 and delta_of(losses, masses, 0.0) * (1 + _DELTA_ROUNDED) > delta - TAIL
    return min(pure_sum(epsilon0, reports), up + ROUNDED * sqrt(losses.size)) if found > 0 or hidden else 0.0


def pure_sum(epsilon0: float, reports: int) -> float:
    """Return ``reports`` times ``epsilon0``, rounded up."""
    product = epsilon0 * reports
    return product if product == inf or Fraction(product) >= Fraction(epsilon0) * reports else nextafter(product, inf)


def _losses(epsilon0: float, reports: int) -> tuple[Array, Array]:
    first, logs = Binomial(reports, epsilon0).log_pmf()
    ones = first + np.arange(logs.size, dtype=np.float64)
    return epsilon0 * (2 * ones - reports), np.exp(logs)


def sum_of_reports_epsilon(reports: Sequence[tuple[float, int]], delta: float) -> float:
    """Return epsilon for ``delta`` of (epsilon, number) groups of reports of one client; exact where there is one group.

    Several groups are composed by Renyi divergences, and never count more than their pure sum.
    """
    counts: Counter[float] = Counter()
    for epsilon0, number in reports:
        if number > 0:
            counts[epsilon0] += number
    pure = sum(epsilon0 * number for epsilon0, number in counts.items())
    if len(counts) == 1:
        return composed_epsilon(*next(iter(counts.items())), delta)
    if delta <= 0 or pure == 0 or max(counts) > HUGE_BUDGET:
        return pure
    return min(
        pure,
        epsilon_from_log_moment(
            lambda order: np.sum([number * log_moment(epsilon0, order) for epsilon0, number in counts.items()], axis=0), delta
        ),
    )
