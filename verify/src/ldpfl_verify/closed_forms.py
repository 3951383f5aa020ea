"""Accountants that have a closed form, computed to fifty digits. A long sum is taken in interval arithmetic, which bounds its own error."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import floor, inf, log

import mpmath
from mpmath import iv
from scipy.optimize import brentq

DIGITS = 50
"""Decimal digits of the arithmetic. Gaussian tails are computed to three times as many, because nearly equal numbers are subtracted."""

_LAST_DIGITS = mpmath.mpf(10) ** -40


def pure_sum(reports: list[tuple[float, int]]) -> Fraction:
    """Return the sum of epsilon * number over all ``reports``, as an exact fraction: basic composition."""
    return sum((Fraction(epsilon) * number for epsilon, number in reports), Fraction(0))


def randomised_response_delta(epsilon0: float, reports: int, epsilon: float) -> float:
    """Return delta(``epsilon``) of ``reports`` reports of randomised response at ``epsilon0`` each, rounded up.

    Randomised response is the worst case of all adaptive compositions of ``epsilon0``-DP mechanisms (Kairouz, Oh and Viswanath 2015). The
    privacy loss is epsilon0 (2 B - k) with a binomial number B of true answers out of k. The sum begins at the smallest B whose loss
    exceeds epsilon. It ends where a geometric series bounds the remaining terms. Each figure is an interval with the ends ``a`` and ``b``.
    """
    with mpmath.workdps(DIGITS):
        iv.dps = DIGITS
        if epsilon >= epsilon0 * reports:
            return 0.0
        first_count = max(floor((reports + epsilon / epsilon0) / 2) - 1, 0)  # too low by one or two counts, whose terms are left out below
        one, exact_epsilon0 = iv.mpf(1), iv.mpf(epsilon0)
        odds = iv.exp(exact_epsilon0)
        truth = odds / (one + odds)
        # A count adds its probability times 1 - discount, where discount is e^(epsilon - loss of the count).
        discount = iv.exp(iv.mpf(epsilon) - exact_epsilon0 * (2 * first_count - reports))
        combinations = mpmath.binomial(reports, first_count)  # computed by gamma functions: nearly all digits are right
        combinations_interval = iv.mpf([combinations * (1 - _LAST_DIGITS), combinations * (1 + _LAST_DIGITS)])
        term = combinations_interval * truth**first_count * (one - truth) ** (reports - first_count)
        discount_ratio, total = iv.exp(-2 * exact_epsilon0), iv.mpf(0)
        for count in range(first_count, reports + 1):
            gain = one - discount
            if gain.b > 0:
                total += term * (gain if gain.a > 0 else iv.mpf([0, gain.b]))
            ratio = odds * (reports - count) / (count + 1)  # of the next count's probability to this one's
            if ratio.b < 1 and term.b * ratio.b / (1 - ratio.b) < _LAST_DIGITS * max(total.b, _LAST_DIGITS):
                total += iv.mpf([0, term.b * ratio.b / (1 - ratio.b)])
                break
            term, discount = term * ratio, discount * discount_ratio
        return _rounded_up(total.b)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(``epsilon``) of the Gaussian mechanism (Balle and Wang 2018, Theorem 8), rounded up.

    ``mu`` is the sensitivity over the standard deviation of the noise.
    """
    with mpmath.workdps(3 * DIGITS):
        exact_epsilon, exact_mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        first_tail = mpmath.ncdf(exact_mu / 2 - exact_epsilon / exact_mu)
        second_tail = mpmath.exp(exact_epsilon) * mpmath.ncdf(-exact_mu / 2 - exact_epsilon / exact_mu)
        return _rounded_up((first_tail - second_tail) * (1 + _LAST_DIGITS) + mpmath.mpf(10) ** -DIGITS)


def least_epsilon(delta_at: Callable[[float], float], delta: float, start: float, sufficient_epsilon: float = inf) -> float:
    """Return the smallest epsilon, to nine digits and rounded up, at which the falling function ``delta_at`` is at most ``delta``.

    Args:
        start: where the search begins.
        sufficient_epsilon: an epsilon that is known to suffice. It is returned if the search comes to it.
    """
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, start
    while delta_at(high) > delta:
        if high >= sufficient_epsilon:
            return sufficient_epsilon
        low, high = high, 2 * high + 1e-6
    # In logarithms delta is nearly straight. 1e-300 is added because 0 has no logarithm.
    root = float(brentq(lambda epsilon: log(delta_at(epsilon) + 1e-300) - log(delta), low, high, xtol=1e-10 * high))
    while delta_at(root) > delta:  # the root may be slightly too small
        root *= 1 + 1e-9
    return root


def _rounded_up(value: mpmath.mpf) -> float:
    """Return ``value`` as a float that is no smaller."""
    return float(value) * (1 + 1e-15) + 5e-324
