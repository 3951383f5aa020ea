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
    exceeds epsilon. It ends where a geometric series bounds the remaining terms.
    """
    with mpmath.workdps(DIGITS):
        iv.dps = DIGITS
        if epsilon >= epsilon0 * reports:
            return 0.0
        least = max(floor((reports + epsilon / epsilon0) / 2) - 1, 0)  # one or two too low: these terms are left out below
        one, exact = iv.mpf(1), iv.mpf(epsilon0)
        odds = iv.exp(exact)
        truth = odds / (one + odds)
        shrink = iv.exp(iv.mpf(epsilon) - exact * (2 * least - reports))
        choices = mpmath.binomial(reports, least)  # computed by gamma functions: nearly all digits are right
        near = iv.mpf([choices * (1 - _LAST_DIGITS), choices * (1 + _LAST_DIGITS)])
        term = near * truth**least * (one - truth) ** (reports - least)
        step, total = iv.exp(-2 * exact), iv.mpf(0)
        for ones in range(least, reports + 1):
            gain = one - shrink
            if gain.b > 0:
                total += term * (gain if gain.a > 0 else iv.mpf([0, gain.b]))
            ratio = odds * (reports - ones) / (ones + 1)
            if ratio.b < 1 and term.b * ratio.b / (1 - ratio.b) < _LAST_DIGITS * max(total.b, _LAST_DIGITS):
                total += iv.mpf([0, term.b * ratio.b / (1 - ratio.b)])
                break
            term, shrink = term * ratio, shrink * step
        return _up(total.b)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(``epsilon``) of the Gaussian mechanism (Balle and Wang 2018, Theorem 8), rounded up.

    ``mu`` is the sensitivity over the standard deviation of the noise.
    """
    with mpmath.workdps(3 * DIGITS):
        at, size = mpmath.mpf(epsilon), mpmath.mpf(mu)
        near, far = mpmath.ncdf(size / 2 - at / size), mpmath.exp(at) * mpmath.ncdf(-size / 2 - at / size)
        return _up((near - far) * (1 + _LAST_DIGITS) + mpmath.mpf(10) ** -DIGITS)


def least_epsilon(delta_at: Callable[[float], float], delta: float, near: float, most: float = inf) -> float:
    """Return the smallest epsilon, to nine digits and rounded up, at which the falling function ``delta_at`` is at most ``delta``.

    Args:
        near: where the search begins.
        most: an epsilon that is known to suffice.
    """
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, near
    while delta_at(high) > delta:
        if high >= most:
            return most
        low, high = high, 2 * high + 1e-6
    found = float(brentq(lambda at: log(delta_at(at) + 1e-300) - log(delta), low, high, xtol=1e-10 * high))
    while delta_at(found) > delta:  # the root that was found may lie on either side of the true one
        found *= 1 + 1e-9
    return found


def _up(value: mpmath.mpf) -> float:
    """Return ``value`` as a float that is no smaller."""
    return float(value) * (1 + 1e-15) + 5e-324
