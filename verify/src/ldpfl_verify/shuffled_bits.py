"""Privacy loss of one bit of each client behind a shuffler or a sum, which show how many bits are 1 and nothing else.

No bound of the literature is used for a single bit: every worst case of the other clients' bits is computed.
"""

from __future__ import annotations

from math import ceil, exp, inf, log, log1p, pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr
from scipy.stats import binom, norm

from ldpfl_verify.binomials import TAIL, binomial
from ldpfl_verify.composition import Array, convolved_deltas
from ldpfl_verify.unshuffled_reports import MOMENT_ERROR, response

MAX_CLIENTS_ONE_BY_ONE, MAX_CELLS, MIN_CELLS = 1024, 512, 64
"""Number of clients up to which each worst case is computed by itself, and the numbers of cells of worst cases beyond."""

CLIENTS_OF_FEWER_CELLS = 100_000
"""Number of clients beyond which there are fewer than :data:`MAX_CELLS` cells, because each takes longer."""

MAX_CONVOLVED_BITS = 20_000
"""Number of bits in a round up to which their convolution is computed as well as the bound by Berry and Esseen."""


class CountedBit:
    """One bit of each of ``clients``, by randomised response at ``epsilon0``. An observer sees the number of ones.

    Delta depends on the other clients' inputs, which are not known. As a function of the probability of a one in each other bit, delta is
    the largest of several functions that are affine in each probability. So it is largest where each probability is at an end of its
    interval, and only the number of clients at the upper end matters: there are ``clients`` worst cases.

    Beyond :data:`MAX_CLIENTS_ONE_BY_ONE` clients, worst cases are taken together in cells. A client that may be at either end shows a fair
    coin with probability 2 p0, whichever end it is at (p0: probability of a lie). Otherwise the bound assumes that its bit is known.
    """

    def __init__(self, epsilon0: float, clients: int) -> None:
        self.max_loss = epsilon0
        cells = max(MIN_CELLS, min(MAX_CELLS, MAX_CELLS * CLIENTS_OF_FEWER_CELLS // clients))
        width = 1 if clients <= MAX_CLIENTS_ONE_BY_ONE else ceil(clients / cells)
        truth, lie = map(float, response(epsilon0))
        self.rows = []
        for low in range(0, clients, width):
            either = min(low + width, clients) - 1 - low
            coins = int(binom.ppf(TAIL, either, 2 * lie)) if either else 0
            self.rows.append(CountOfOnes(epsilon0, [(low, truth), (clients - 1 - low - either, lie), (coins, 0.5)]))
        self.neglected = 4 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        return np.asarray(np.max([row.delta(epsilons) for row in self.rows], axis=0) + self.neglected)

    def log_moment(self, order: float) -> float:
        return max(row.log_moment(order) for row in self.rows) + MOMENT_ERROR


class CountedRound:
    """``reports`` bits of each client in one round. All inputs are fixed before the first bit is drawn.

    Under the weights e^(t loss) the sum of the losses is nearly normal. The theorem of Berry and Esseen bounds the difference, for
    independent terms that need not be alike (constant 0.56, Shevtsova 2010). A loss that exceeds epsilon by y counts with the weight
    e^(-t y) (1 - e^-y). This weight integrates to 1 / (t (1 + t)) and has one peak, so that an error of the distribution function counts
    with at most twice the height of the peak.
    """

    max_loss = inf

    def __init__(self, bit: CountedBit, reports: int) -> None:
        self._bit, self._reports = bit, reports
        self.neglected = reports * bit.neglected
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
        if self._reports <= MAX_CONVOLVED_BITS:  # for few bits the theorem alone is too coarse
            found = np.minimum(found, convolved_deltas(self._bit, self._reports, epsilons))
        return np.asarray(found + self.neglected)

    def _log_factor(self, order: float) -> float:
        peak = exp(order * log(order) - (1 + order) * log1p(order))
        _, low, _, apart = self._moments(order)
        return log(min(peak, 1 / (sqrt(2 * pi) * low * order * (1 + order)) + 2 * peak * apart) if low > 1e-50 else peak)

    def _around_the_mean(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bound without weights: delta of a normal loss with the largest mean, and a deviation s from an interval.

        E[(1 - e^-y)+] = Phi(a / s) - phi(a / s) m(s - a / s), with a = mean - epsilon and Mills' ratio m. Each of the two terms is taken at
        its worst deviation.
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
        """Return the largest mean of the sum, its smallest and largest deviation, and its largest distance from a normal distribution."""
        means, variances, thirds = zip(*(row.central_moments(order) for row in self._bit.rows), strict=True)
        low, high = (sqrt(self._reports * end) for end in (min(variances), max(variances)))
        return self._reports * max(means), low, high, 0.56 * self._reports * max(thirds) / low**3 if low > 1e-50 else 1.0


class CountOfOnes:
    """Number of ones among the bit of one client and the bits of ``others``, given as (number of clients, probability of a one)."""

    def __init__(self, epsilon0: float, others: list[tuple[int, float]]) -> None:
        pmf = np.ones(1)
        for count, share in others:
            if count:
                pmf = np.convolve(pmf, binomial(count, share)[1])  # all terms are positive, so that no digits are lost
        one, none = np.append(0.0, pmf).astype(np.longdouble), np.append(pmf, 0.0).astype(np.longdouble)
        truth, lie = response(epsilon0)
        first, second = truth * one + lie * none, lie * one + truth * none
        kept = (first > 0) & (second > 0)
        self._first, second = first[kept][::-1], second[kept][::-1]
        self._losses = np.minimum.accumulate(np.log(self._first / second))  # of the first input against the second, descending
        self._above = np.cumsum(self._first), np.cumsum(second)

    def delta(self, epsilons: Array) -> Array:
        """Return delta at each of ``epsilons``: P(S) - e^epsilon Q(S), where S holds the counts whose loss is above epsilon."""
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
