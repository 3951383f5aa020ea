"""Vectors with Gaussian noise, and linked bits, behind a shuffler, for ``composition``: a second way to the same bounds, in other steps.

Told which of the other reports came from the law that all have in common, each with probability g, and that the client in question hides
among m in all, one sees m draws of that law, of which one is the client's own. So many are told of one by one here; what one of them gains
is put on a lattice. Of vectors the law is a standard normal number, and the lattice takes the probabilities between those values of it at
which the gain has lattice values.
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

from ldpfl.verifying.composition import Array
from ldpfl.verifying.laws import GaussianReport, PureReport, binomial, fewer

_CROWDS, _CROWDS_OF_BITS = 100, 256
"""Numbers of reports to hide among that are told apart."""

_PLACES = 385
"""Of a curve; between them it lies below its chords."""

_LARGEST = 40.0
"""Epsilon from which on what holds without the shuffler is all that is said, and logarithm of the smallest 1 / g."""

_CUT = 7.75
"""Where the normal law ends: P(Z > 7.75) < 5e-15, and the gain beyond has no larger mean under its own shift."""

_OUTSIDE, _OUTSIDE_OF_BITS = 6e-15, 1e-15
_LONGEST = 1 << 15
_STEPS = 12
"""To a standard deviation of one gain."""
_STEPS_OF_BITS = 32
_COARSE = 512
"""Values of one gain that are told apart where the sum's reach is looked for."""
_FAR = 66.0
"""Logarithm of the probability that is left beyond the lattice of sums, on each side."""
_ROUNDING = 4e-16
"""Of a Fourier coefficient of one gain, and of a transform for each doubling of its length."""

Floats = NDArray[np.float64]


class _Hidden(ABC):
    """One report of each of ``clients``, of which a ``share`` is a draw of one law, the same for all.

    Attributes:
        limit: no loss is larger.
        outside: what is left out of a delta.
    """

    limit: float
    outside: float

    def __init__(self, clients: int, share: float, crowds: int) -> None:
        others, self._chances = fewer(*binomial(clients - 1, share), crowds)
        self._crowds = others + 1

    @abstractmethod
    def alone(self, epsilons: Array) -> Array:
        """Return delta of the report without the shuffler."""

    @abstractmethod
    def _gains(self, epsilon: float, least: float) -> tuple[Floats, Floats, float]:
        """Return lattice values, their probabilities, and the step, of ``least`` or more: no smaller in convex order than the gain."""

    def delta(self, epsilons: Array) -> Array:
        found = self.alone(epsilons)
        near = np.flatnonzero(epsilons < min(_LARGEST, self.limit))
        if near.size:
            at = epsilons[near].astype(np.float64)
            found[near] = np.minimum(found[near], self._curve(at))
        return found

    def _curve(self, epsilons: Floats) -> Floats:
        known = np.unique(epsilons)
        if known.size > 2 * _PLACES:
            known = known[np.unique(np.linspace(0, known.size - 1, _PLACES).astype(np.int64))]
        values = np.array([self._at(epsilon) for epsilon in known.tolist()])
        return np.asarray(np.interp(np.exp(epsilons), np.exp(known), values) * (1 + 1e-12))

    def _at(self, epsilon: float) -> float:
        values, chances, step = self._gains(epsilon, 0.0)
        if values[chances > 0].max() <= 0:
            return self.outside
        reach = self._reach(values, chances)
        while 2 * reach > _LONGEST * step:  # the coarser the lattice, the further the sum may be
            values, chances, step = self._gains(epsilon, 2.1 * reach / _LONGEST)
            reach = self._reach(values, chances)
        size = 1 << ceil(log2(2 * reach / step + 2))
        places = np.rint(values / step).astype(np.int64) % size
        small = fft.rfft(np.bincount(places, chances, size)) - 1
        with np.errstate(divide="ignore"):
            logs = np.log1p(small)
        total = np.zeros_like(small)
        for crowd, chance in zip(self._crowds.tolist(), self._chances.tolist(), strict=True):
            present = logs.real * crowd > -_FAR
            total[present] += chance / crowd * np.exp(crowd * logs[present])
        mass = fft.irfft(total, size)
        worst = sqrt(float(np.dot(mass, mass)) * size) * reach  # of an error relative to the norm, at the places where it counts most
        rounding = _ROUNDING * (log2(size) + float(self._crowds[-1])) * worst
        return min(1.0, float(np.dot(np.maximum(mass[: size // 2], 0), np.arange(size // 2))) * step + rounding + self.outside)

    def _reach(self, values: Floats, chances: Floats) -> float:
        largest = float(self._crowds[-1])
        return max(_beyond(values, chances, largest), _beyond(-values, chances, largest))


class HiddenBits(_Hidden):
    """``count`` bits of each of ``clients`` that stay together: what they have in common is uniform, and all of them differ at worst."""

    def __init__(self, bit_epsilon: float, count: int, clients: int) -> None:
        lie = 1 / (1 + exp(bit_epsilon))
        super().__init__(clients, (2 * lie) ** count, _CROWDS_OF_BITS)
        self._bit, self._count, self.limit = bit_epsilon, count, bit_epsilon * count
        alike = np.arange(count + 1)
        right, wrong = 2 * (1 - lie), 2 * lie
        self._first, self._second = right**alike * wrong ** (count - alike), wrong**alike * right ** (count - alike)
        self._law = binom.pmf(alike, count, 0.5)
        self.outside = _OUTSIDE_OF_BITS

    def alone(self, epsilons: Array) -> Array:
        at = epsilons.astype(np.float64)[:, None]
        return np.asarray((np.maximum(self._first - np.exp(at) * self._second, 0) @ self._law) + self.outside).astype(np.longdouble)

    def log_moment(self, order: float) -> float:
        return self._count * PureReport(self._bit).log_moment(order)

    def _gains(self, epsilon: float, least: float) -> tuple[Floats, Floats, float]:
        gains = self._first - exp(epsilon) * self._second
        spread = sqrt(max(float(np.dot(self._law, gains**2)), 1e-300))
        step = max(spread / _STEPS_OF_BITS, float(np.ptp(gains)) / _LONGEST, least)
        low = np.floor(gains / step)
        part = gains / step - low
        first = int(low.min())
        places, size = (low - first).astype(np.int64), int(low.max()) - first + 2
        chances = np.bincount(places, self._law * (1 - part), size) + np.bincount(places + 1, self._law * part, size)
        return np.asarray((first + np.arange(size)) * step, dtype=np.float64), np.asarray(chances, dtype=np.float64), step


class HiddenVector(_Hidden):
    """One vector of each of ``clients``, in a ball of ``mu`` / 2 standard deviations; each has ``share`` of U, the rest is paid for."""

    limit, outside = inf, _OUTSIDE

    def __init__(self, mu: float, clients: int, share: float) -> None:
        super().__init__(clients, share, _CROWDS)
        self._alone, self._radius = GaussianReport(mu), mu / 2

    def alone(self, epsilons: Array) -> Array:
        return self._alone.delta(epsilons)

    def log_moment(self, order: float) -> float:
        return self._alone.log_moment(order)

    def _gains(self, epsilon: float, least: float) -> tuple[Floats, Floats, float]:
        a = self._radius
        shrunk = exp(-(a**2) / 2)
        spread = sqrt(max(exp(a**2) * (1 + exp(2 * epsilon)) - 2 * exp(epsilon - a**2) - (1 - exp(epsilon)) ** 2, 1e-300))
        low, high = (shrunk * (exp(a * z) - exp(epsilon - a * z)) for z in (-_CUT - a, _CUT + a))
        step = max(spread / _STEPS, (high - low) / _LONGEST, least)
        values = np.arange(np.floor(low / step), np.ceil(high / step) + 1) * step
        half = values / shrunk / 2
        root = np.sqrt(half**2 + exp(epsilon))
        grown = np.where(half > 0, half + root, exp(epsilon) / (root - half))  # e^(a z), the root that is above 0
        z = np.log(grown) / a
        between = _normal(z)
        means = _normal(z - a) - exp(epsilon) * _normal(z + a)
        upper = np.clip((means - between * values[:-1]) / step, 0.0, between)
        chances = np.zeros_like(values)
        chances[:-1] += between - upper
        chances[1:] += upper
        zero = int(np.argmin(np.abs(values)))
        chances[zero] += max(0.0, 1 - float(chances.sum()))  # beyond the ends
        return values, chances, step


def common_share(mu: float, variation: float) -> float | None:
    """Return a g for which replacing all that lies above U / g costs at most ``variation``; None where there is none of any use."""
    report = GaussianReport(mu / 2)

    def excess(budget: float) -> float:
        return log(float(report.delta(np.array([budget], dtype=np.longdouble))[0]) + 1e-300) - budget - log(variation)

    if excess(_LARGEST) > 0:
        return None
    return exp(-float(brentq(excess, 0.0, _LARGEST)) * (1 + 1e-9)) if excess(0.0) > 0 else 1.0


def _normal(places: Floats) -> Floats:
    """Return the normal probabilities between each two places; far above 0, as those below it."""
    sides = np.where(places[:-1] > 0, -1.0, 1.0)
    return np.asarray(sides * (ndtr(sides * places[1:]) - ndtr(sides * places[:-1])))


def _beyond(values: Floats, chances: Floats, count: float) -> float:
    """Return what the sum of ``count`` gains exceeds with a probability of e^-:data:`_FAR` at most (Chernoff)."""
    top = float(values.max())
    if top <= 0:
        return 0.0
    wide = ceil(values.size / _COARSE)
    starts = np.arange(0, values.size, wide)
    values, chances = np.maximum.reduceat(values, starts), np.add.reduceat(chances, starts)  # a little larger, and so is the sum
    best = top * count
    for order in np.logspace(-5, 2, 99) / top:
        moment = float(np.dot(chances, np.expm1(np.minimum(order * values, 600.0))))
        best = min(best, (count * np.log1p(moment) + _FAR) / order)
    return float(max(best, top))
