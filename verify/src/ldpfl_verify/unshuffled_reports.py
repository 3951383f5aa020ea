"""Privacy loss of one report whose sender is known: any epsilon-LDP report, and a vector with Gaussian noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod

import numpy as np
from scipy.special import log_ndtr

from ldpfl_verify.binomials import TAIL, binomial
from ldpfl_verify.composition import Array

MOMENT_ERROR = 4e-16
"""Bound on what rounding may take from the delta of one release, or from the logarithm of a moment."""

MAX_OUTCOMES = 1 << 21
"""Number of outcomes of the reports that are enumerated. So many take half a second and 200 MB."""


@dataclass(frozen=True)
class PureReport:
    """Any ``epsilon0``-LDP report. Randomised response has the largest delta at every epsilon (Kairouz, Oh and Viswanath 2015)."""

    epsilon0: float
    neglected: float = 0.0

    @property
    def max_loss(self) -> float:
        return self.epsilon0

    def delta(self, epsilons: Array) -> Array:
        truth, lie = response(self.epsilon0)
        return np.asarray(np.maximum(truth - np.exp(epsilons) * lie, 0))

    def log_moment(self, order: float) -> float:
        truth, lie = response(self.epsilon0)
        x = order * self.epsilon0
        return x + float(np.log(truth + lie * np.exp(np.longdouble(-2 * x)))) + MOMENT_ERROR * max(1.0, x)


@dataclass(frozen=True)
class GaussianReport:
    """A vector with Gaussian noise. ``mu`` is the sensitivity under replacement over the standard deviation of the noise."""

    mu: float
    max_loss: float = inf
    neglected: float = 0.0

    def delta(self, epsilons: Array) -> Array:
        at = epsilons.astype(np.float64)
        near, far = log_ndtr(self.mu / 2 - at / self.mu), at + log_ndtr(-self.mu / 2 - at / self.mu)
        return np.asarray(np.maximum(-np.exp(near) * np.expm1(far - near), 0) + 1e-15).astype(np.longdouble)

    def log_moment(self, order: float) -> float:
        return order * (order + 1) * self.mu**2 / 2


def response(epsilon0: float) -> tuple[np.longdouble, np.longdouble]:
    """Return the probabilities that randomised response at ``epsilon0`` tells the truth, and that it lies."""
    lie = 1 / (1 + np.exp(np.longdouble(epsilon0)))
    return 1 - lie, lie


def different_reports_delta(reports: Sequence[tuple[float, int]], epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of reports at several epsilons, given as (epsilon, number). It is 1 if it takes long.

    The worst case is randomised response for every report. The losses of all groups but the longest are enumerated. For each of them, the
    longest group has to stay below the rest of ``epsilon``, and its delta there is a difference of two tails. The mean over all is delta.
    """
    numbers: Counter[float] = Counter()
    for epsilon0, number in reports:
        numbers[epsilon0] += number
    *others, (losses, masses) = sorted((_losses(*group) for group in numbers.items()), key=lambda law: law[0].size)
    if prod(given.size for given, _ in others) > MAX_OUTCOMES:
        return 1.0
    rest = epsilon - reduce(np.add.outer, [given for given, _ in others], np.zeros((), np.longdouble)).ravel()
    chances = reduce(np.multiply.outer, [chance for _, chance in others], np.ones((), np.longdouble)).ravel()
    # Tails of the losses above each one, largest first: their probability, and the logarithm of it under the other input.
    own = np.append(0, np.cumsum(masses))
    with np.errstate(divide="ignore"):
        log_other = np.append(-np.inf, np.logaddexp.accumulate(np.log(masses) - losses))
    above = np.searchsorted(-losses, -rest)
    gains = np.maximum(own[above] - np.exp(np.minimum(rest + log_other[above], 0)), 0)
    rounding = np.finfo(np.longdouble).eps * (losses.size + np.abs(losses).max() + np.abs(rest).max()) * own[above]
    return float(chances @ (gains + rounding)) * (1 + 1e-10) + len(numbers) * TAIL


def _losses(epsilon0: float, number: int) -> tuple[Array, Array]:
    """Return the losses of ``number`` reports of randomised response at ``epsilon0``, largest first, and their probabilities."""
    lies, chances = binomial(number, float(response(epsilon0)[1]))
    return np.longdouble(epsilon0) * (number - 2 * lies), chances.astype(np.longdouble)
