"""Privacy loss of one report whose sender is known: any epsilon-LDP report, and a vector with Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from scipy.special import log_ndtr

from ldpfl_verify.composition import Array

MOMENT_ERROR = 4e-16
"""Bound on what rounding may take from the delta of one release, or from the logarithm of a moment."""


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
