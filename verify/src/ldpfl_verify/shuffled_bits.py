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
from ldpfl_verify.unshuffled_reports import MOMENT_ERROR, randomised_response

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
        truth, lie = map(float, randomised_response(epsilon0))
        self.worst_cases = []
        # A worst case of a cell: this many clients at the upper end, the rest of the cell at either end, and all others at the lower end.
        for at_upper_end in range(0, clients, width):
            at_either_end = min(at_upper_end + width, clients) - 1 - at_upper_end
            fair_coins = int(binom.ppf(TAIL, at_either_end, 2 * lie)) if at_either_end else 0
            self.worst_cases.append(
                CountOfOnes(epsilon0, [(at_upper_end, truth), (clients - 1 - at_upper_end - at_either_end, lie), (fair_coins, 0.5)])
            )
        self.neglected = 4 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``: the largest of all worst cases."""
        return np.asarray(np.max([worst_case.delta(epsilons) for worst_case in self.worst_cases], axis=0) + self.neglected)

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)]: the largest of all worst cases."""
        return max(worst_case.log_moment(order) for worst_case in self.worst_cases) + MOMENT_ERROR


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
        self._bound_by_order: dict[float, tuple[float, float]] = {}

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)]; the moments of independent bits multiply."""
        return self._reports * self._bit.log_moment(order)

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``: the smallest of several, with weights of 131 orders and without."""
        float_epsilons = epsilons.astype(np.float64)
        logs = np.zeros_like(float_epsilons)  # of bounds on delta, which is at most 1
        for order in np.logspace(-4, 2.5, 131).tolist():
            if order not in self._bound_by_order:
                self._bound_by_order[order] = self.log_moment(order), self._log_factor(order)
            moment, factor = self._bound_by_order[order]
            logs = np.minimum(logs, moment - order * float_epsilons + factor)
        deltas = np.minimum(np.exp(logs), self._delta_without_weights(float_epsilons)).astype(np.longdouble)
        if self._reports <= MAX_CONVOLVED_BITS:  # for few bits the theorem alone is too coarse
            deltas = np.minimum(deltas, convolved_deltas(self._bit, self._reports, epsilons))
        return np.asarray(deltas + self.neglected)

    def _log_factor(self, order: float) -> float:
        """Return the logarithm of a bound on the mean of (1 - e^-y) e^(-order y), if weighted losses exceed epsilon by y > 0.

        Under a normal distribution the mean is at most the integral, 1 / (order (1 + order)), times the largest normal density.
        """
        peak = exp(order * log(order) - (1 + order) * log1p(order))  # the largest value, where e^-y = order / (1 + order)
        _, min_deviation, _, normal_error = self._moments(order)
        if min_deviation <= 1e-50:  # the normal distribution would have no width
            return log(peak)
        return log(min(peak, 1 / (sqrt(2 * pi) * min_deviation * order * (1 + order)) + 2 * peak * normal_error))

    def _delta_without_weights(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bound without weights: the largest delta of a normal loss with the largest mean and a deviation s from an interval.

        E[(1 - e^-y)+] = Phi(a / s) - phi(a / s) m(s - a / s), with a = mean - epsilon and Mills' ratio m. Each of the two terms is taken at
        its worst deviation. Where the ratio would overflow, the second term is left out, which makes the bound larger.
        """
        mean, min_deviation, max_deviation, normal_error = self._moments(0.0)
        if min_deviation <= 1e-50:
            return np.ones_like(epsilons)
        mean_excess = mean - epsilons
        furthest = np.maximum(min_deviation - mean_excess / min_deviation, max_deviation - mean_excess / max_deviation)
        ratio = sqrt(pi / 2) * erfcx(np.maximum(furthest, -20.0) / sqrt(2))
        second_term = np.where(furthest > -20, norm.pdf(mean_excess / min_deviation) * ratio, 0.0)
        first_term = np.maximum(ndtr(mean_excess / min_deviation), ndtr(mean_excess / max_deviation))
        return np.asarray(np.minimum(first_term - second_term + normal_error, 1.0))

    def _moments(self, order: float) -> tuple[float, float, float, float]:
        """Return the largest mean of the sum, its smallest and largest deviation, and its largest distance from a normal distribution."""
        means, variances, thirds = zip(*(worst_case.central_moments(order) for worst_case in self._bit.worst_cases), strict=True)
        min_deviation, max_deviation = (sqrt(self._reports * end) for end in (min(variances), max(variances)))
        normal_error = 0.56 * self._reports * max(thirds) / min_deviation**3 if min_deviation > 1e-50 else 1.0
        return self._reports * max(means), min_deviation, max_deviation, normal_error


class CountOfOnes:
    """Number of ones among the bit of one client and the bits of ``others``, given as (number of clients, probability of a one)."""

    def __init__(self, epsilon0: float, others: list[tuple[int, float]]) -> None:
        # Probabilities of each count under both inputs of the client, whose bit shifts the count of the others by 0 or 1.
        others_pmf = np.ones(1)
        for count, share in others:
            if count:
                _, chances = binomial(count, share)  # at which count they begin does not matter
                others_pmf = np.convolve(others_pmf, chances)  # all terms are positive, so that no digits are lost
        shifted_by_one, not_shifted = np.append(0.0, others_pmf).astype(np.longdouble), np.append(others_pmf, 0.0).astype(np.longdouble)
        truth, lie = randomised_response(epsilon0)
        first, second = truth * shifted_by_one + lie * not_shifted, lie * shifted_by_one + truth * not_shifted
        possible = (first > 0) & (second > 0)
        self._first, second = first[possible][::-1], second[possible][::-1]  # the largest count, which has the largest loss, comes first
        self._losses = np.minimum.accumulate(np.log(self._first / second))  # of first against second, falling
        self._above = np.cumsum(self._first), np.cumsum(second)

    def delta(self, epsilons: Array) -> Array:
        """Return delta at each of ``epsilons``: P(S) - e^epsilon Q(S), where S holds the counts whose loss is above epsilon."""
        outcomes_above = np.searchsorted(-self._losses, -epsilons, side="left")
        first_above, second_above = (cumulative[np.maximum(outcomes_above - 1, 0)] for cumulative in self._above)
        return np.where(outcomes_above > 0, np.maximum(first_above - np.exp(epsilons) * second_above, 0), np.longdouble(0))

    def log_moment(self, order: float) -> float:
        """Return log E[e^(order * loss)] under the first input."""
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
