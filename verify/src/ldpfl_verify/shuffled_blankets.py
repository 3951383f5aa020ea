"""Privacy loss of vectors with Gaussian noise, and of bits that stay together, behind a shuffler.

Both are bounded by a blanket: with probability g a report of another client is a draw of one law U, the same for all clients. The bound
gives the observer more than it sees, namely which reports these are. The client under attack then hides among m reports, all of them draws
of U, and delta is a mean over the sizes m. For one size, delta is the mean of the positive part of a sum of m independent gains. The
distribution of one gain is put on a lattice, and a Fourier transform gives the distribution of the sum.

For vectors, U is a standard normal number. The lattice takes the probabilities of the intervals of this number whose ends have gains on the
lattice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil, exp, inf, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from ldpfl_verify.binomials import binomial, with_fewer_sizes
from ldpfl_verify.composition import Array
from ldpfl_verify.unshuffled_reports import GaussianReport, PureReport

SET_SIZES_OF_VECTORS, SET_SIZES_OF_BITS = 100, 256
"""Numbers of anonymity-set sizes that the bounds are tabulated for."""

CURVE_POINTS = 385
"""Number of epsilons at which delta is computed. Delta is convex in e^epsilon, so that chords between them are upper bounds."""

MAX_SHUFFLED_EPSILON = 40.0
"""Epsilon from which on only the bound without the shuffler is used. It is the logarithm of the largest 1 / g as well."""

NORMAL_END = 7.75
"""Number of standard deviations where the normal law is cut: P(Z > 7.75) < 5e-15, and the mean gain beyond is no larger."""

NEGLECTED_OF_VECTORS, NEGLECTED_OF_BITS = 6e-15, 1e-15
"""Probabilities that are left out of a delta, and added to it."""

MAX_GAIN_POINTS = 1 << 15
"""Number of lattice points of one gain, and of the sum of all gains."""

STEPS_OF_VECTORS, STEPS_OF_BITS = 12, 32
"""Numbers of lattice steps in a standard deviation of one gain."""

COARSE_GAINS = 512
"""Number of values of one gain that are told apart in the search for the largest likely sum."""

LOG_TAIL = 66.0
"""Minus the logarithm of the probability beyond the lattice of sums, on each side."""

FOURIER_ERROR = 4e-16
"""Error of a Fourier coefficient of one gain, and of a transform for each doubling of its length."""

Floats = NDArray[np.float64]


class _Blanketed(ABC):
    """One report of each of ``clients``, of which a ``share`` g is a draw of one law U, the same for all clients.

    Attributes:
        max_loss: largest possible privacy loss.
        neglected: probability that is left out of a delta, and added to it.
    """

    max_loss: float
    neglected: float

    def __init__(self, clients: int, share: float, set_sizes: int) -> None:
        others, self._chances = with_fewer_sizes(*binomial(clients - 1, share), set_sizes)
        self._set_sizes = others + 1

    @abstractmethod
    def unshuffled_delta(self, epsilons: Array) -> Array:
        """Return delta of the report without a shuffler."""

    @abstractmethod
    def _gains(self, epsilon: float, min_step: float) -> tuple[Floats, Floats, float]:
        """Return the distribution of one gain on a lattice: values, their probabilities, and the lattice step, at least ``min_step``.

        It is at least as spread as the true one (larger in convex order), so that the mean positive part of a sum is no smaller either.
        """

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``: the smaller one of the bounds with and without the shuffler."""
        deltas = self.unshuffled_delta(epsilons)
        small_enough = np.flatnonzero(epsilons < min(MAX_SHUFFLED_EPSILON, self.max_loss))
        if small_enough.size:
            small_epsilons = epsilons[small_enough].astype(np.float64)
            deltas[small_enough] = np.minimum(deltas[small_enough], self._interpolated_delta(small_epsilons))
        return deltas

    def _interpolated_delta(self, epsilons: Floats) -> Floats:
        """Return delta at each of ``epsilons``, by chords if there are many."""
        points = np.unique(epsilons)
        if points.size > 2 * CURVE_POINTS:
            points = points[np.unique(np.linspace(0, points.size - 1, CURVE_POINTS).astype(np.int64))]
        values = np.array([self._shuffled_delta(epsilon) for epsilon in points.tolist()])
        return np.asarray(np.interp(np.exp(epsilons), np.exp(points), values) * (1 + 1e-12))

    def _shuffled_delta(self, epsilon: float) -> float:
        """Return delta at ``epsilon``: the mean over all anonymity-set sizes m of E[(sum of m gains)+] / m."""
        values, chances, step = self._gains(epsilon, 0.0)
        if values[chances > 0].max() <= 0:
            return self.neglected
        max_sum = self._max_sum(values, chances)
        while 2 * max_sum > MAX_GAIN_POINTS * step:  # a coarser lattice makes the largest likely sum larger
            values, chances, step = self._gains(epsilon, 2.1 * max_sum / MAX_GAIN_POINTS)
            max_sum = self._max_sum(values, chances)
        size = 1 << ceil(log2(2 * max_sum / step + 2))
        places = np.rint(values / step).astype(np.int64) % size  # the transform is periodic: negative gains lie in the upper half
        transform_minus_one = fft.rfft(np.bincount(places, chances, size)) - 1  # log1p keeps the digits of a transform near 1
        with np.errstate(divide="ignore"):
            log_transform = np.log1p(transform_minus_one)
        total = np.zeros_like(transform_minus_one)
        for size_of_set, chance in zip(self._set_sizes.tolist(), self._chances.tolist(), strict=True):
            present = log_transform.real * size_of_set > -LOG_TAIL
            total[present] += chance / size_of_set * np.exp(size_of_set * log_transform[present])  # a sum's transform is a power
        sum_distribution = fft.irfft(total, size)
        # An error relative to the norm counts most at the ends.
        largest_error = sqrt(float(np.dot(sum_distribution, sum_distribution)) * size) * max_sum
        rounding = FOURIER_ERROR * (log2(size) + float(self._set_sizes[-1])) * largest_error
        mean_positive_part = float(np.dot(np.maximum(sum_distribution[: size // 2], 0), np.arange(size // 2))) * step
        return min(1.0, mean_positive_part + rounding + self.neglected)

    def _max_sum(self, values: Floats, chances: Floats) -> float:
        """Return a bound on the absolute sum of gains, which the largest set exceeds with negligible probability."""
        largest = float(self._set_sizes[-1])
        return max(_likely_max_sum(values, chances, largest), _likely_max_sum(-values, chances, largest))


class LinkedBits(_Blanketed):
    """``count`` bits of each of ``clients`` that stay together in one message. U is uniform; in the worst case all bits differ."""

    def __init__(self, bit_epsilon: float, count: int, clients: int) -> None:
        lie = 1 / (1 + exp(bit_epsilon))
        super().__init__(clients, (2 * lie) ** count, SET_SIZES_OF_BITS)
        self._bit, self._count, self.max_loss = bit_epsilon, count, bit_epsilon * count
        alike = np.arange(count + 1)  # number of bits that equal those of the first input; all others equal those of the second
        right, wrong = 2 * (1 - lie), 2 * lie  # likelihood ratios of a bit to a fair coin
        self._first, self._second = right**alike * wrong ** (count - alike), wrong**alike * right ** (count - alike)
        self._law = binom.pmf(alike, count, 0.5)
        self.neglected = NEGLECTED_OF_BITS

    def unshuffled_delta(self, epsilons: Array) -> Array:
        """Return delta of the ``count`` bits of one client, without a shuffler, at each of ``epsilons``."""
        gains = np.maximum(self._first - np.exp(epsilons.astype(np.longdouble))[:, None] * self._second, 0)
        return np.asarray(gains @ self._law + self.neglected)

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], which does not count on the shuffler."""
        return self._count * PureReport(self._bit).log_moment(order)

    def _gains(self, epsilon: float, min_step: float) -> tuple[Floats, Floats, float]:
        """Return the distribution of one gain on a lattice. A gain between two points is divided between them, which keeps its mean."""
        gains = self._first - exp(epsilon) * self._second
        spread = sqrt(max(float(np.dot(self._law, gains**2)), 1e-300))
        step = max(spread / STEPS_OF_BITS, float(np.ptp(gains)) / MAX_GAIN_POINTS, min_step)
        low = np.floor(gains / step)
        fraction = gains / step - low
        first = int(low.min())
        places, size = (low - first).astype(np.int64), int(low.max()) - first + 2
        chances = np.bincount(places, self._law * (1 - fraction), size) + np.bincount(places + 1, self._law * fraction, size)
        return np.asarray((first + np.arange(size)) * step, dtype=np.float64), np.asarray(chances, dtype=np.float64), step


class ShuffledVector(_Blanketed):
    """One vector with Gaussian noise of each of ``clients``, clipped to a ball of ``mu`` / 2 standard deviations.

    A vector has only nearly a ``share`` of U in common with all others; :func:`common_share` says what the difference costs.
    """

    max_loss, neglected = inf, NEGLECTED_OF_VECTORS

    def __init__(self, mu: float, clients: int, share: float) -> None:
        super().__init__(clients, share, SET_SIZES_OF_VECTORS)
        self._unshuffled, self._radius = GaussianReport(mu), mu / 2

    def unshuffled_delta(self, epsilons: Array) -> Array:
        """Return delta of one vector without a shuffler."""
        return self._unshuffled.delta(epsilons)

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], which does not count on the shuffler."""
        return self._unshuffled.log_moment(order)

    def _gains(self, epsilon: float, min_step: float) -> tuple[Floats, Floats, float]:
        """Return the distribution of one gain on a lattice; each interval between lattice points keeps its probability and its mean gain.

        For a standard normal z, the gain is e^(-a^2 / 2) (e^(a z) - e^(epsilon - a z)), with the radius a: the density of N(a, 1), less
        e^epsilon times that of N(-a, 1), over that of z.
        """
        radius = self._radius
        shrunk = exp(-(radius**2) / 2)
        # The standard deviation of a gain, whose mean is 1 - e^epsilon.
        spread = sqrt(max(exp(radius**2) * (1 + exp(2 * epsilon)) - 2 * exp(epsilon - radius**2) - (1 - exp(epsilon)) ** 2, 1e-300))
        min_gain, max_gain = (shrunk * (exp(radius * z) - exp(epsilon - radius * z)) for z in (-NORMAL_END - radius, NORMAL_END + radius))
        step = max(spread / STEPS_OF_VECTORS, (max_gain - min_gain) / MAX_GAIN_POINTS, min_step)
        values = np.arange(np.floor(min_gain / step), np.ceil(max_gain / step) + 1) * step
        # The z of each gain v: e^(a z) is the positive root of x^2 - (v / shrunk) x - e^epsilon, in the form that keeps digits.
        half = values / shrunk / 2
        root = np.sqrt(half**2 + exp(epsilon))
        z = np.log(np.where(half > 0, half + root, exp(epsilon) / (root - half))) / radius
        interval_probabilities = _normal_probabilities(z)
        # Mean gain of each interval, times its probability.
        interval_gains = _normal_probabilities(z - radius) - exp(epsilon) * _normal_probabilities(z + radius)
        # Each interval's probability is divided between its ends so that they have the same mean gain.
        mass_at_upper_end = np.clip((interval_gains - interval_probabilities * values[:-1]) / step, 0.0, interval_probabilities)
        chances = np.zeros_like(values)
        chances[:-1] += interval_probabilities - mass_at_upper_end
        chances[1:] += mass_at_upper_end
        zero = int(np.argmin(np.abs(values)))
        chances[zero] += max(0.0, 1 - float(chances.sum()))  # the probability beyond the ends, where the gain is cut
        return values, chances, step


def common_share(mu: float, variation: float) -> float | None:
    """Return a share g of U that a vector has in common with all others, if a total variation distance of ``variation`` is paid for.

    ``variation`` bounds the probability of the part of g U that lies above the vector's law. Return None if g would be too small to help.
    """
    report = GaussianReport(mu / 2)  # U is the law of the ball's center, mu / 2 away

    def excess(budget: float) -> float:
        """Return the logarithm of the probability of that part, g delta(``budget``), over ``variation``, for g = e^-``budget``."""
        return log(float(report.delta(np.array([budget], dtype=np.longdouble))[0]) + 1e-300) - budget - log(variation)

    if excess(MAX_SHUFFLED_EPSILON) > 0:
        return None
    return exp(-float(brentq(excess, 0.0, MAX_SHUFFLED_EPSILON)) * (1 + 1e-9)) if excess(0.0) > 0 else 1.0


def _normal_probabilities(places: Floats) -> Floats:
    """Return the normal probabilities between neighbouring ``places``. Above 0 they are differences of upper tails, to keep digits."""
    sides = np.where(places[:-1] > 0, -1.0, 1.0)
    return np.asarray(sides * (ndtr(sides * places[1:]) - ndtr(sides * places[:-1])))


def _likely_max_sum(values: Floats, chances: Floats, count: float) -> float:
    """Return a value that the sum of ``count`` gains exceeds with a probability of at most e^-``LOG_TAIL``, by Chernoff's inequality."""
    max_gain = float(values.max())
    if max_gain <= 0:
        return 0.0
    cell_size = ceil(values.size / COARSE_GAINS)
    starts = np.arange(0, values.size, cell_size)
    # Gains are rounded up to the largest of their cell, which makes the sum larger.
    cell_values, cell_chances = np.maximum.reduceat(values, starts), np.add.reduceat(chances, starts)
    best = max_gain * count
    for order in np.logspace(-5, 2, 99) / max_gain:
        moment_minus_one = float(np.dot(cell_chances, np.expm1(np.minimum(order * cell_values, 600.0))))
        best = min(best, (count * np.log1p(moment_minus_one) + LOG_TAIL) / order)
    return float(max(best, max_gain))
