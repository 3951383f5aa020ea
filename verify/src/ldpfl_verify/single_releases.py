"""Single releases, for ``composition``, in extended precision. What they say holds in both orders of the two inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, floor, inf, log, log1p, pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr
from scipy.stats import binom, norm

from ldpfl.verifying.composition import Array, convolved_deltas

_ALL, _CELLS = 1024, 512
"""Clients up to which each worst case is looked at by itself, and how many cells of them beyond."""

_FEW = 20_000
"""Bits of a round up to which their convolution is looked at beside the theorem of Berry and Esseen."""

_FEWEST_CELLS, _LARGE = 64, 100_000
"""Where there are more clients than that, there are fewer cells: each takes longer."""

_CLONES = 512
"""Different numbers of clones that are told apart: fewer of them hide less."""

_ROUNDING = 4e-16
"""What rounding may hide of the delta of one release, and of the logarithm of its moments."""

_STATED = 2e-9
"""Part by which the ends of an interval of densities may be rounded."""

_LARGEST_TABLE, _MOST_ENTRIES, _FEWEST_TABLES = 10**6, 2 * 10**8, 16
"""Numbers of two kinds of reports that are looked at for one number of others, and in all."""

_TAIL = 1e-28
"""What is left out of a binomial; added to delta."""


@dataclass(frozen=True)
class PureReport:
    """Any epsilon0-LDP report: randomised response has the largest delta everywhere (Kairouz, Oh and Viswanath 2015)."""

    epsilon0: float
    outside: float = 0.0

    @property
    def limit(self) -> float:
        return self.epsilon0

    def delta(self, epsilons: Array) -> Array:
        truth, lie = _response(self.epsilon0)
        return np.asarray(np.maximum(truth - np.exp(epsilons) * lie, 0))

    def log_moment(self, order: float) -> float:
        truth, lie = _response(self.epsilon0)
        x = order * self.epsilon0
        return x + float(np.log(truth + lie * np.exp(np.longdouble(-2 * x)))) + _ROUNDING * max(1.0, x)


@dataclass(frozen=True)
class GaussianReport:
    """A vector with Gaussian noise: ``mu`` is what replacing its input moves, over the noise's standard deviation."""

    mu: float
    limit: float = inf
    outside: float = 0.0

    def delta(self, epsilons: Array) -> Array:
        at = epsilons.astype(np.float64)
        near, far = log_ndtr(self.mu / 2 - at / self.mu), at + log_ndtr(-self.mu / 2 - at / self.mu)
        return np.asarray(np.maximum(-np.exp(near) * np.expm1(far - near), 0) + 1e-15).astype(np.longdouble)

    def log_moment(self, order: float) -> float:
        return order * (order + 1) * self.mu**2 / 2


class CountedBit:
    """One bit of each of ``clients``, by randomised response, of which the number of ones is seen.

    With the other bits' probabilities given, delta is the largest of functions that are affine in each of them: so it is largest where
    each is at one end of its interval, and what counts is how many are at the upper one. Beyond 1,024 clients these numbers are taken
    in cells; a client that may be at either end shows a fair coin with probability 2 p0, whichever it is, and else is given away.
    """

    def __init__(self, epsilon0: float, clients: int) -> None:
        self.limit = epsilon0
        width = 1 if clients <= _ALL else ceil(clients / max(_FEWEST_CELLS, min(_CELLS, _CELLS * _LARGE // clients)))
        truth, lie = map(float, _response(epsilon0))
        self.rows = []
        for low in range(0, clients, width):
            either = min(low + width, clients) - 1 - low
            coins = int(binom.ppf(_TAIL, either, 2 * lie)) if either else 0
            self.rows.append(_Count(epsilon0, [(low, truth), (clients - 1 - low - either, lie), (coins, 0.5)]))
        self.outside = 4 * _TAIL + _ROUNDING

    def delta(self, epsilons: Array) -> Array:
        return np.asarray(np.max([row.delta(epsilons) for row in self.rows], axis=0) + self.outside)

    def log_moment(self, order: float) -> float:
        return max(row.log_moment(order) for row in self.rows) + _ROUNDING


class CountedRound:
    """``reports`` such bits of each client, all of whose inputs are fixed before the first is drawn.

    Under the weights e^(t loss) their sum is nearly normal; how nearly, the theorem of Berry and Esseen says, for independent terms that
    need not be alike (constant 0.56, Shevtsova 2010). Losses above epsilon weigh e^(-t y) (1 - e^-y), y being by how much: that
    integrates to 1 / (t (1 + t)) and has one peak, so that an error of the distribution counts at most twice its height.
    """

    limit = inf

    def __init__(self, bit: CountedBit, reports: int) -> None:
        self._bit, self._reports = bit, reports
        self.outside = reports * bit.outside
        self._known: dict[float, tuple[float, float]] = {}

    def log_moment(self, order: float) -> float:
        return self._reports * self._bit.log_moment(order)

    def delta(self, epsilons: Array) -> Array:
        at = epsilons.astype(np.float64)
        logs = np.zeros_like(at)
        for order in np.logspace(-4, 2.5, 131).tolist():
            if order not in self._known:
                self._known[order] = self.log_moment(order), self._log_factor(order)
            moment, factor = self._known[order]
            logs = np.minimum(logs, moment - order * at + factor)
        found = np.minimum(np.exp(logs), self._around_the_mean(at)).astype(np.longdouble)
        if self._reports <= _FEW:  # of which the theorem does not say enough
            found = np.minimum(found, convolved_deltas(self._bit, self._reports, epsilons))
        return np.asarray(found + self.outside)

    def _log_factor(self, order: float) -> float:
        peak = exp(order * log(order) - (1 + order) * log1p(order))
        _, low, _, apart = self._moments(order)
        return log(min(peak, 1 / (sqrt(2 * pi) * low * order * (1 + order)) + 2 * peak * apart) if low > 1e-50 else peak)

    def _around_the_mean(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bound without weights: that of a normal loss whose mean is the largest there is, and its deviation in an interval.

        E[(1 - e^-y) +] = Phi(a / s) - phi(a / s) m(s - a / s), a = mean - epsilon and m Mills' ratio; each term is taken at its worst.
        """
        mean, low, high, apart = self._moments(0.0)
        if low <= 1e-50:
            return np.ones_like(epsilons)
        above = mean - epsilons
        furthest = np.maximum(low - above / low, high - above / high)
        ratio = sqrt(pi / 2) * erfcx(np.maximum(furthest, -20.0) / sqrt(2))
        second = np.where(furthest > -20, norm.pdf(above / low) * ratio, 0.0)
        return np.asarray(np.minimum(np.maximum(ndtr(above / low), ndtr(above / high)) - second + apart, 1.0))

    def _moments(self, order: float) -> tuple[float, float, float, float]:
        """Return the largest mean of the sum, its least and largest deviation, and how far from normal its distribution may be."""
        means, variances, thirds = zip(*(row.central_moments(order) for row in self._bit.rows), strict=True)
        low, high = (sqrt(self._reports * end) for end in (min(variances), max(variances)))
        return self._reports * max(means), low, high, 0.56 * self._reports * max(thirds) / low**3 if low > 1e-50 else 1.0


class ClonedReport:
    """One epsilon0-LDP report of each of ``clients``, shuffled (Feldman, McMillan and Talwar 2021, Theorem 3.1).

    Each other report is, with probability e^-epsilon0, a fair draw of the two that the client in question may have sent.
    """

    def __init__(self, epsilon0: float, clients: int) -> None:
        self.limit = epsilon0
        counts, self._chances = fewer(*binomial(clients - 1, exp(-epsilon0)))
        self._rows = [_Count(epsilon0, [(int(count), 0.5)]) for count in counts]
        self.outside = 3 * _TAIL + _ROUNDING

    def delta(self, epsilons: Array) -> Array:
        total = np.full_like(epsilons, self.outside)
        for row, chance in zip(self._rows, self._chances, strict=True):
            total += chance * row.delta(epsilons)
        return total

    def log_moment(self, order: float) -> float:
        logs = [row.log_moment(order) + log(chance) for row, chance in zip(self._rows, self._chances, strict=True) if chance > 0]
        return float(np.logaddexp.reduce(logs)) + _ROUNDING


class BlanketedReport:
    """One epsilon0-LDP report of each of ``clients``, shuffled, of which a ``share`` follows one law whatever its input.

    Told which of the others are draws of that law, and which m of them the client in question hides among, one still sees three kinds of
    reports, at worst: a part w of the law that is as likely as can be under one input and as unlikely under the other, a part w the other
    way round, and the rest. Their numbers (i, j, k) are multinomial, times (high i + low j + both k) / m under the one input and (low i +
    high j + both k) / m under the other.
    """

    def __init__(self, epsilon0: float, share: float, clients: int) -> None:
        self.limit = epsilon0
        self._low, self._high = share * (1 - _STATED), share * exp(epsilon0) * (1 + _STATED)
        large = (1 - self._low) / (self._high - self._low)
        self._both, self._apart = (self._high, 1 - large) if large > 0.5 else (self._low, large)
        others, chances = binomial(clients - 1, self._low)
        table = (2 * _reach(clients * self._low, 2 * self._apart)) ** 2
        self.takes_long = table > _LARGEST_TABLE
        cells = max(_FEWEST_TABLES, _MOST_ENTRIES // max(1, int(table)))
        self._crowds = fewer(others + 1, chances, cells)
        self.outside = 4 * _TAIL + _ROUNDING

    def delta(self, epsilons: Array) -> Array:
        order = np.argsort(epsilons)
        at = epsilons[order]
        own, other = np.zeros(at.size + 1, dtype=np.longdouble), np.zeros(at.size + 1, dtype=np.longdouble)
        for crowd, chance in zip(*self._crowds, strict=True):
            first, second, losses = self._table(int(crowd))
            places = np.searchsorted(at, losses, side="left")
            own += chance * np.bincount(places, first, at.size + 1)
            other += chance * np.bincount(places, second, at.size + 1)
        # What lies in place p has a loss above the first p of them.
        above, below = (np.cumsum(part[::-1])[::-1][1:] for part in (own, other))
        found = np.empty_like(epsilons)
        found[order] = np.maximum(above - np.exp(at) * below, 0) * (1 + 1e-12) + self.outside
        return found

    def log_moment(self, order: float) -> float:
        return order * self.limit

    def _table(self, crowd: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the probabilities under both inputs and the losses, for all numbers (i, j) that matter."""
        telling, chances = binomial(crowd, 2 * self._apart)
        halves = [_halves(int(number)) for number in telling]
        i = np.concatenate([values for values, _ in halves])
        number = np.repeat(telling, [values.size for values, _ in halves])
        mass = np.concatenate([chance * own for chance, (_, own) in zip(chances, halves, strict=True)])
        rest = self._both * (crowd - number)
        first, second = self._high * i + self._low * (number - i) + rest, self._low * i + self._high * (number - i) + rest
        return mass * first / crowd, mass * second / crowd, np.log(first / second)


@lru_cache(maxsize=4096)
def _halves(count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return binomial(count, 0.5)


def _reach(count: float, share: float) -> float:
    """Return how far from its mean a binomial may be, but for :data:`_TAIL`."""
    far = log(2 / _TAIL)
    return far / 3 + sqrt(far**2 / 9 + 2 * count * share * far)


class _Count:
    """How many ones there are, of the client in question and of ``others``: (number, probability of a one) each."""

    def __init__(self, epsilon0: float, others: list[tuple[int, float]]) -> None:
        pmf = np.ones(1)
        for count, share in others:
            if count:
                pmf = np.convolve(pmf, binomial(count, share)[1])  # of positive terms: each digit is right
        one, none = np.append(0.0, pmf).astype(np.longdouble), np.append(pmf, 0.0).astype(np.longdouble)
        truth, lie = _response(epsilon0)
        first, second = truth * one + lie * none, lie * one + truth * none
        kept = (first > 0) & (second > 0)
        self._first, second = first[kept][::-1], second[kept][::-1]
        self._losses = np.minimum.accumulate(np.log(self._first / second))  # of P against Q, descending
        self._above = np.cumsum(self._first), np.cumsum(second)

    def delta(self, epsilons: Array) -> Array:
        """Return P(S) - e^epsilon Q(S), S being the counts whose loss is above epsilon."""
        number = np.searchsorted(-self._losses, -epsilons, side="left")
        own, other = (above[np.maximum(number - 1, 0)] for above in self._above)
        return np.where(number > 0, np.maximum(own - np.exp(epsilons) * other, 0), np.longdouble(0))

    def log_moment(self, order: float) -> float:
        exponents = order * self._losses
        return float(exponents[0] + np.log(np.dot(self._first, np.exp(exponents - exponents[0]))))

    def central_moments(self, order: float) -> tuple[float, float, float]:
        """Return mean, variance and third absolute central moment of the loss under the weights e^(order * loss)."""
        exponents = order * self._losses
        weights = self._first * np.exp(exponents - exponents[0])
        weights /= weights.sum()
        mean = np.dot(weights, self._losses)
        apart = np.abs(self._losses - mean)
        return float(mean), float(np.dot(weights, apart**2)), float(np.dot(weights, apart**3))


def fewer(counts: np.ndarray, chances: np.ndarray, most: int = _CLONES) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of those one hides among, and their probabilities, rounded down to a few."""
    if counts.size <= most:
        return counts, chances
    starts = np.linspace(0, counts.size, most, endpoint=False).astype(np.int64)
    return counts[starts], np.add.reduceat(chances, starts)


def _response(epsilon0: float) -> tuple[np.longdouble, np.longdouble]:
    """Return the probabilities of the truth and of a lie."""
    lie = 1 / (1 + np.exp(np.longdouble(epsilon0)))
    return 1 - lie, lie


def binomial(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a binomial and their probabilities, but for tails below ``_TAIL``, by Bernstein's inequality."""
    far = log(2 / _TAIL)
    reach = ceil(far / 3 + sqrt(far**2 / 9 + 2 * count * share * (1 - share) * far))
    values = np.arange(max(0, floor(count * share) - reach), min(count, ceil(count * share) + reach) + 1)
    return values, binom.pmf(values, count, share)
