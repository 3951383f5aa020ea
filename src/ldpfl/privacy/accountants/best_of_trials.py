"""The cost of releasing the best of a random number of private trials, and of nothing else.

A *trial* is a mechanism Q: it draws a setting at random, trains, and scores the model with noise. A tuning draws a number of trials K from
a public law, runs K independent trials, and releases the outcome with the best score. K and the other outcomes stay secret.

The bound follows the proof of Papernot and Steinke 2022 ("Hyperparameter Tuning with Rényi Differential Privacy", ICLR), with hockey-stick
divergences in place of Rényi divergences, as Koskela, Redberg and Wang 2024 ("Privacy Profiles for Private Selection", ICML). Outcomes are
totally ordered; of equal scores the first one is taken, which has the same law as a tie broken by a uniform number for each trial. Let q(y)
be the probability that a trial's outcome is worse than y, and f(x) = E[x^K]. The best outcome is y if one of K trials gives y and all
others a worse one, so its density is

    a(y) = Q(y) f'(q(y)),    f'(x) = sum over k of k P[K = k] x^(k - 1).

For a neighbouring data set it is a'(y) = Q'(y) f'(q'(y)). Let T(p) be the largest probability under Q' of an event with probability p under
Q. An outcome better than y is such an event, with p = 1 - q. So q' >= 1 - T(p). Since f' increases, f'(q) <= C f'(q') with

    C = max over p of f'(1 - p) / f'(1 - T(p)).

Hence a - e^eps a' <= f'(q) (Q - e^(eps - log C) Q'). f' is at most f'(1) = E[K]. The sum over all y where the right side is positive gives

    delta of the release at eps <= E[K] times delta of a trial at (eps - log C),
    eps of the release at delta <= log C + eps of a trial at (delta / E[K]).

A pure trial has T(p) <= e^eps p. A geometric K then gives 3 eps, as in Liu and Talwar 2019 (STOC), and a logarithmic K gives 2 eps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, isfinite, log
from typing import Literal, get_args

import numpy as np
from numpy.polynomial.polynomial import polyval
from scipy.special import gammaln, ndtr, ndtri

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.gaussian import ROUNDED, gaussian_epsilon, gaussian_mu
from ldpfl.util.lazy_imports import optimize

Law = Literal["geometric", "logarithmic", "poisson"]
"""Law of the number of trials: truncated negative binomial with eta = 1 or eta = 0 (Papernot and Steinke), or Poisson without 0."""

MAX_TRIALS = 10_000
"""Maximum number of trials that a law may allow."""

DEFAULT_LIMIT_FACTOR = 4
"""Default for the maximum number of trials, as a multiple of the mean number."""

_WEIGHT_BITS = 64
"""Bits of the integers that a law's probabilities are stored as. The law that is accounted is the one that is drawn from."""

_PROBABILITIES = np.concatenate([[0.0], ndtr(np.linspace(-12, 12, 20_001)), [1.0]])
"""Grid of p. Between two grid points C is bounded by the values at both ends, so the grid makes it larger, never smaller."""

_ROUNDING = 1e-9
"""Margin for rounding errors of log C."""

_HALVINGS = 40
"""Number of bisection steps for mu: twelve digits."""


@dataclass(frozen=True)
class TrialCount:
    """The law of the random number of trials.

    Attributes:
        mean: mean number of trials.
        limit: maximum number of trials.
        law: shape of the law. Each number up to ``limit`` keeps the probability of the named law up to a common factor, and a parameter
            that is chosen for the ``mean``.

    Raises:
        ConfigError: the mean is below 1 or above half of the limit, the law is unknown, or it is Poisson with a mean above some 45.
    """

    mean: float
    limit: int
    law: Law = "poisson"

    def __post_init__(self) -> None:
        if self.law not in get_args(Law):
            raise ConfigError(f"law is {self.law!r}: expected one of {', '.join(get_args(Law))}")
        if not 1 <= self.limit <= MAX_TRIALS:
            raise ConfigError(f"the maximum number of trials is {self.limit}: set it from 1 to {MAX_TRIALS:,}")
        if self.mean != 1 and not 1 < self.mean <= self.limit / 2:
            raise ConfigError(
                f"the mean number of trials is {self.mean:g} and the maximum {self.limit}: set the mean from 1 to half of the maximum"
            )
        if not self.weights[0]:  # f'(0) is the probability of a single trial, and divides
            raise ConfigError(
                f"with {self.mean:g} trials on average, the law {self.law!r} so rarely draws the number 1 that no bound is known: set "
                "fewer trials (about 40), or the law to 'geometric' (--law geometric)"
            )

    @classmethod
    def of(cls, mean: float, limit: int | None = None, law: Law = "poisson") -> TrialCount:
        """Return the law with a ``mean`` and a ``limit``, which is four times the mean by default."""
        usual = ceil(DEFAULT_LIMIT_FACTOR * mean) if isfinite(mean) else MAX_TRIALS
        return cls(mean, min(usual, MAX_TRIALS) if limit is None else limit, law)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Integers proportional to the probabilities of 1, 2, ... trials, with the law's parameter chosen for the :attr:`mean`."""
        numbers = np.arange(1, self.limit + 1, dtype=np.float64)
        # log P[K = k] of each law, up to a constant and to a multiple of k, which the parameter adds.
        logs = {"geometric": 0.0 * numbers, "logarithmic": -np.log(numbers), "poisson": -gammaln(numbers + 1)}[self.law]

        def probabilities(parameter: float) -> Array:
            """Return the probabilities (limit,) of the law whose terms have the factor e^``parameter`` for each trial after the first."""
            exponents = logs + (numbers - 1) * parameter
            unscaled = np.exp(exponents - exponents.max())
            return np.asarray(unscaled / unscaled.sum())

        if self.mean == 1:
            return (1,)
        parameter = optimize.brentq(lambda value: float(probabilities(value) @ numbers) - self.mean, -50.0, 50.0)
        return tuple(int(share * 2.0**_WEIGHT_BITS) for share in probabilities(parameter))

    @property
    def exact_mean(self) -> float:
        """The mean number of trials of the integer :attr:`weights`."""
        return sum(number * weight for number, weight in enumerate(self.weights, start=1)) / sum(self.weights)

    def drawn(self, word: int) -> int:
        """Return the number of trials that a uniformly random ``word`` of 256 bits draws from the law."""
        remaining = word % sum(self.weights)  # uniform but for 2^-190, since the weights add up to some 2^64
        for number, weight in enumerate(self.weights, start=1):
            if remaining < weight:
                return number
            remaining -= weight
        raise AssertionError("the remainder is below the sum of the weights, so the loop has returned")

    def slope(self, points: Array) -> Array:
        """Return f'(x) at the ``points`` x, where f(x) = E[x^K] and K is the number of trials."""
        total = sum(self.weights)
        return np.asarray(polyval(points, [number * weight / total for number, weight in enumerate(self.weights, start=1)]))


def best_of_trials_epsilon(power: Callable[[Array], Array], epsilon: Callable[[float], float], count: TrialCount, delta: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for releasing the best of a random number K of trials.

    With f(x) = E[x^K], the bound is log max over p of f'(1 - p) / f'(1 - T(p)), plus the trial's epsilon at delta / E[K]; the module's
    docstring has the source.

    Args:
        power: increasing function T of the trial: maps the probability p of an event to the largest probability that the event can have for
            a neighbouring data set.
        epsilon: maps a delta to the epsilon of one trial at this delta.
        count: law of the number K of trials.
    """
    largest_probabilities = power(_PROBABILITIES)
    # f' increases in x: between two grid points, the ratio is at most its numerator at the lower one over its denominator at the upper.
    ratios = count.slope(1 - _PROBABILITIES[:-1]) / count.slope(1 - largest_probabilities[1:])
    margin = _ROUNDING if count.limit > 1 else 0.0  # the slope of a single trial is constant, so its ratio of 1 is exact
    return log(float(ratios.max())) + margin + epsilon(delta / (count.exact_mean * (1 + _ROUNDING)))


def best_of_gaussian_epsilon(mu: float, count: TrialCount, delta: float) -> float:
    """Return the bound of :func:`best_of_trials_epsilon` for trials that are mu-GDP (Gaussian DP), or sums of rounded Gaussians."""

    def power(probabilities: Array) -> Array:
        """Return Phi(Phi^-1(p) + mu), the power of mu-GDP."""
        return np.asarray(ndtr(ndtri(probabilities) + mu))

    # The rest of delta is for the difference between sums of rounded Gaussians and one Gaussian.
    return best_of_trials_epsilon(power, partial(gaussian_epsilon, mu), count, delta * (1 - ROUNDED))


def trial_mu(epsilon: float, count: TrialCount, delta: float) -> float:
    """Return the largest mu of a trial, up to rounding down, with which the release keeps (``epsilon``, ``delta``).

    Raises:
        ConfigError: epsilon is not positive and finite, or delta is not between 0 and 1.
    """
    low, high = 0.0, gaussian_mu(epsilon, delta)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if best_of_gaussian_epsilon(middle, count, delta) <= epsilon else (low, middle)
    return low
