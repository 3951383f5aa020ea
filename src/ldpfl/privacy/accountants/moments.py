"""From moments of the privacy loss to epsilon: sharpened Chernoff bounds, minimised over their order."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log, log10

import numpy as np

from ldpfl.privacy.accountants.binomial import Array

OfOrder = Callable[[Array], Array]
"""An elementwise function of an array of orders."""

_LOWEST, _HIGHEST, _POINTS = -8.0, 6.0, 281
"""Smallest and largest logarithm (base 10) of the orders that are tried, and their number."""

_NEAR, _NEAR_POINTS = 1.5, 31
"""Number of decades searched on each side of a given order, and number of orders tried in both together."""


def renyi_factor(order: Array) -> Array:
    """Return log(t^t / (1 + t)^(1 + t)) for t = ``order``: the logarithm of the largest value of e^(-t y) (1 - e^-y), y > 0.

    Then delta <= E[e^(t (loss - epsilon))] times this factor. It is the conversion of Canonne, Kamath, Steinke 2020, Proposition 12, with
    alpha = 1 + t. It holds for adaptive composition.
    """
    return -order * np.log1p(1 / order) - np.log1p(order)


def epsilon_from_log_moment(log_moment: OfOrder, delta: float, log_factor: OfOrder = renyi_factor, near: float | None = None) -> float:
    """Return the epsilon at ``delta``: min over t > 0 of (log E[e^(t loss)] + log_factor(t) - log delta) / t, or 0 if that is negative.

    Args:
        log_moment: returns log E[e^(t loss)] for orders t.
        log_factor: returns the logarithm of the factor of the Chernoff bound for orders t.
        near: as in :func:`best_order`.
    """
    return best_order(log_moment, delta, log_factor, near)[0]


def best_order(log_moment: OfOrder, delta: float, log_factor: OfOrder = renyi_factor, near: float | None = None) -> tuple[float, float]:
    """Return the smallest bound on epsilon of :func:`epsilon_from_log_moment`, and the order t that gives it.

    Any order gives a valid bound, so the search need not be exact: it uses a coarse grid, then three finer grids around the best point.
    If an order ``near`` is given, only orders close to it are searched.
    """
    if delta <= 0:
        return inf, inf
    low, high, points = _LOWEST, _HIGHEST, _POINTS
    if near is not None:
        low, high, points = log10(near) - _NEAR, log10(near) + _NEAR, _NEAR_POINTS
    exponents = np.linspace(low, high, points)
    width = (high - low) / (points - 1)  # distance of neighbouring points
    best, best_exponent = inf, exponents[0]
    for _ in range(4):
        order = 10**exponents
        bounds = (log_moment(order) + log_factor(order) - log(delta)) / order
        index = int(np.argmin(np.where(np.isnan(bounds), inf, bounds)))  # a NaN bounds nothing
        if bounds[index] < best:
            best, best_exponent = float(bounds[index]), exponents[index]
        exponents = np.linspace(best_exponent - width, best_exponent + width, 11)
        width /= 5
    return max(0.0, best), float(10**best_exponent)
