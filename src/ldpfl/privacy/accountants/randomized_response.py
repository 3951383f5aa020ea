"""Randomised response without a shuffler: exact epsilon and delta of any number of reports.

k reports of one client at epsilon each have the privacy loss epsilon * (2 B - k), B ~ Bin(k, e^epsilon / (1 + e^epsilon)). That is also the
worst case over all k-fold adaptive compositions of pure epsilon-DP mechanisms (Kairouz, Oh, Viswanath 2015). So the same functions compose
every pure mechanism.
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
"""Epsilon above which e^epsilon overflows; nothing is protected there anyway."""


def report_delta(epsilon0: float, epsilon: float) -> float:
    """Return delta(``epsilon``) of one report at ``epsilon0``: max(0, p1 - e^epsilon p0), p1 = 1 - p0 = 1 / (1 + e^-epsilon0)."""
    return -expm1(epsilon - epsilon0) * sigmoid(epsilon0) if epsilon < epsilon0 else 0.0


def log_moment(epsilon0: float, order: float | Array) -> Array:
    """Return log E[e^(order * loss)] of one report, order > 0. It is ``order`` times the Rényi divergence of order 1 + ``order``."""
    order = np.asarray(order, dtype=np.float64)
    p0 = sigmoid(-epsilon0)
    x = order * epsilon0
    far = x + np.log(sigmoid(epsilon0) + p0 * np.exp(-2 * x))
    # Near 0 the moment is almost 1, so its logarithm is computed from the moment less 1.
    near = np.log1p(sigmoid(epsilon0) * np.expm1(np.minimum(x, 1.0)) + p0 * np.expm1(-x))
    return np.asarray(np.where(x < 1.0, near, far))


def composed_delta(epsilon0: float, reports: int, epsilon: float) -> float:
    """Return delta(``epsilon``) of ``reports`` reports of one client at ``epsilon0`` each, exact."""
    losses, masses = _losses(epsilon0, reports)
    return delta_of(losses, masses, epsilon)


_TINY_DELTA = 1e-12

_DELTA_ROUNDED = 1e-10
"""Relative rounding error of delta at epsilon 0, whose terms are all positive."""

ROUNDED = 2e-15
"""Allowance for rounding: an epsilon from n losses may be wrong by this times sqrt(n).

The largest error that a comparison with 50 digits found is half as large.
"""


def composed_epsilon(epsilon0: float, reports: int, delta: float) -> float:
    """Return the smallest epsilon for ``delta`` of ``reports`` reports of one client at ``epsilon0`` each, exact.

    ``delta`` = 0 gives the pure sum. Up to 1e10 reports; time and memory grow with the square root of their number.
    """
    if reports == 0 or epsilon0 == 0:
        return 0.0
    # The probability outside the window may exceed a tiny delta. For a huge epsilon0 the pure sum is right to all digits.
    if delta <= TAIL or epsilon0 > HUGE_BUDGET:
        return pure_sum(epsilon0, reports)
    losses, masses = _losses(epsilon0, reports)
    computed = epsilon_of(losses, masses, delta - TAIL)
    # Round up by more than the rounding error. Near the pure sum half a unit in the last place changes delta by a relative 1e-4, and a tiny
    # delta by more. The masses sum to 1, so the rounding error of their sums affects many digits of a tiny epsilon: hence ROUNDED.
    rounded_up = computed * (1 + 1e-12) if delta < _TINY_DELTA else nextafter(nextafter(computed, inf), inf)
    # A positive epsilon below the rounding error comes out as 0. Whether it is positive is decided by delta at epsilon 0.
    is_tiny = computed == 0 and delta_of(losses, masses, 0.0) * (1 + _DELTA_ROUNDED) > delta - TAIL
    return min(pure_sum(epsilon0, reports), rounded_up + ROUNDED * sqrt(losses.size)) if computed > 0 or is_tiny else 0.0


def pure_sum(epsilon0: float, reports: int) -> float:
    """Return ``reports`` times ``epsilon0``, rounded up."""
    product = epsilon0 * reports
    return product if product == inf or Fraction(product) >= Fraction(epsilon0) * reports else nextafter(product, inf)


def _losses(epsilon0: float, reports: int) -> tuple[Array, Array]:
    """Return the possible losses of k = ``reports`` reports, ascending, and their probabilities."""
    first, logs = Binomial(reports, epsilon0).log_pmf()
    ones = first + np.arange(logs.size, dtype=np.float64)
    return epsilon0 * (2 * ones - reports), np.exp(logs)


def sum_of_reports_epsilon(reports: Sequence[tuple[float, int]], delta: float) -> float:
    """Return epsilon at ``delta`` of one client's reports, given as (epsilon, number) groups. Exact for one group.

    Several groups are composed by Rényi divergences; the result is never larger than the pure sum.
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
