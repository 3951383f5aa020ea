"""What has a closed form, to fifty digits: interval arithmetic where a sum is long, and more digits than are asked for elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import floor, inf, log

import mpmath
from mpmath import iv
from scipy.optimize import brentq

_DIGITS = 50
_SMALLEST = mpmath.mpf(10) ** -40


def pure_sum(reports: list[tuple[float, int]]) -> Fraction:
    """Return the sum of (epsilon, number) exactly."""
    return sum((Fraction(epsilon) * number for epsilon, number in reports), Fraction(0))


def randomised_response_delta(epsilon0: float, reports: int, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of ``reports`` reports at ``epsilon0`` each, no wider than rounding.

    The loss is epsilon0 (2 B - k), B binomial: the worst case of all adaptive compositions of pure mechanisms (Kairouz, Oh and
    Viswanath 2015). The sum begins at the least B whose loss exceeds epsilon, and ends where a geometric series bounds the rest.
    """
    with mpmath.workdps(_DIGITS):
        iv.dps = _DIGITS
        if epsilon >= epsilon0 * reports:
            return 0.0
        least = max(floor((reports + epsilon / epsilon0) / 2) - 1, 0)  # one or two lower, where terms are negative and left out
        one, exact = iv.mpf(1), iv.mpf(epsilon0)
        odds = iv.exp(exact)
        truth = odds / (one + odds)
        shrink = iv.exp(iv.mpf(epsilon) - exact * (2 * least - reports))
        choices = mpmath.binomial(reports, least)  # of gamma functions: to nearly all digits
        near = iv.mpf([choices * (1 - _SMALLEST), choices * (1 + _SMALLEST)])
        term = near * truth**least * (one - truth) ** (reports - least)
        step, total = iv.exp(-2 * exact), iv.mpf(0)
        for ones in range(least, reports + 1):
            gain = one - shrink
            if gain.b > 0:
                total += term * (gain if gain.a > 0 else iv.mpf([0, gain.b]))
            ratio = odds * (reports - ones) / (ones + 1)
            if ratio.b < 1 and term.b * ratio.b / (1 - ratio.b) < _SMALLEST * max(total.b, _SMALLEST):
                total += iv.mpf([0, term.b * ratio.b / (1 - ratio.b)])
                break
            term, shrink = term * ratio, shrink * step
        return _up(total.b)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of Gaussian noise (Balle and Wang 2018, Theorem 8), to nearly all digits."""
    with mpmath.workdps(3 * _DIGITS):
        at, size = mpmath.mpf(epsilon), mpmath.mpf(mu)
        near, far = mpmath.ncdf(size / 2 - at / size), mpmath.exp(at) * mpmath.ncdf(-size / 2 - at / size)
        return _up((near - far) * (1 + _SMALLEST) + mpmath.mpf(10) ** -_DIGITS)


def least_epsilon(delta_at: Callable[[float], float], delta: float, near: float, most: float = inf) -> float:
    """Return an epsilon, to nine digits, at which ``delta_at``, which falls, is at most ``delta``, or ``most``, which is known to do."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, near
    while delta_at(high) > delta:
        if high >= most:
            return most
        low, high = high, 2 * high + 1e-6
    found = float(brentq(lambda at: log(delta_at(at) + 1e-300) - log(delta), low, high, xtol=1e-10 * high))
    while delta_at(found) > delta:  # the root may lie on either side
        found *= 1 + 1e-9
    return found


def _up(value: mpmath.mpf) -> float:
    return float(value) * (1 + 1e-15) + 5e-324
