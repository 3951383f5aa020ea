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
"""Bound on the error of rounding in the delta of one release, or in the logarithm of a moment."""

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
        """Return delta of randomised response at each of ``epsilons``."""
        truth, lie = randomised_response(self.epsilon0)
        return np.asarray(np.maximum(truth - np.exp(epsilons) * lie, 0))

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)] of randomised response."""
        truth, lie = randomised_response(self.epsilon0)
        x = order * self.epsilon0
        return x + float(np.log(truth + lie * np.exp(np.longdouble(-2 * x)))) + MOMENT_ERROR * max(1.0, x)


@dataclass(frozen=True)
class GaussianReport:
    """A vector with Gaussian noise. ``mu`` is the sensitivity under replacement over the standard deviation of the noise."""

    mu: float
    max_loss: float = inf
    neglected: float = 0.0

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons`` (Balle and Wang 2018, Theorem 8); 1e-15 is added for rounding."""
        epsilon = epsilons.astype(np.float64)
        log_first, log_second = log_ndtr(self.mu / 2 - epsilon / self.mu), epsilon + log_ndtr(-self.mu / 2 - epsilon / self.mu)
        return np.asarray(np.maximum(-np.exp(log_first) * np.expm1(log_second - log_first), 0) + 1e-15).astype(np.longdouble)

    def log_moment(self, order: float) -> float:
        """Return log E[e^(order * loss)]. The loss is normal with mean mu^2 / 2 and variance mu^2."""
        return order * (order + 1) * self.mu**2 / 2


def randomised_response(epsilon0: float) -> tuple[np.longdouble, np.longdouble]:
    """Return the probabilities that randomised response at ``epsilon0`` tells the truth, and that it lies."""
    lie = 1 / (1 + np.exp(np.longdouble(epsilon0)))
    return 1 - lie, lie


def different_reports_delta(reports: Sequence[tuple[float, int]], epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of reports at several epsilons, given as (epsilon, number). It is 1 if it takes long.

    The worst case is randomised response for every report. Reports at one epsilon are a group, whose losses are binomial. The losses of all
    groups but the longest are enumerated. Each combination leaves a part of ``epsilon`` to the longest group, whose delta at that part is a
    difference of two tails. The mean over all combinations is delta.
    """
    numbers: Counter[float] = Counter()
    for epsilon0, number in reports:
        numbers[epsilon0] += number
    groups = [_losses(epsilon0, number) for epsilon0, number in numbers.items()]
    *others, (losses, masses) = sorted(groups, key=lambda losses_and_masses: losses_and_masses[0].size)  # the longest group comes last
    if prod(group_losses.size for group_losses, _ in others) > MAX_OUTCOMES:
        return 1.0
    epsilon_left = epsilon - reduce(np.add.outer, [group_losses for group_losses, _ in others], np.zeros((), np.longdouble)).ravel()
    chances = reduce(np.multiply.outer, [group_chances for _, group_chances in others], np.ones((), np.longdouble)).ravel()
    # Probability of the n largest losses of the longest group, and its logarithm under the other input.
    mass_above = np.append(0, np.cumsum(masses))
    with np.errstate(divide="ignore"):
        log_other = np.append(-np.inf, np.logaddexp.accumulate(np.log(masses) - losses))
    losses_above = np.searchsorted(-losses, -epsilon_left)  # how many of the longest group's losses exceed the part that is left
    gains = np.maximum(mass_above[losses_above] - np.exp(np.minimum(epsilon_left + log_other[losses_above], 0)), 0)
    rounding = np.finfo(np.longdouble).eps * (losses.size + np.abs(losses).max() + np.abs(epsilon_left).max()) * mass_above[losses_above]
    return float(chances @ (gains + rounding)) * (1 + 1e-10) + len(numbers) * TAIL


def _losses(epsilon0: float, number: int) -> tuple[Array, Array]:
    """Return the losses of ``number`` reports of randomised response at ``epsilon0``, largest first, and their probabilities."""
    lies, chances = binomial(number, float(randomised_response(epsilon0)[1]))
    return np.longdouble(epsilon0) * (number - 2 * lies), chances.astype(np.longdouble)
