"""Privacy loss of one report of each client behind a shuffler, by the theorems for any epsilon-LDP mechanism: clones and blankets."""

from __future__ import annotations

from functools import lru_cache
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from ldpfl_verify.binomials import TAIL, binomial, tail_distance, with_fewer_sizes
from ldpfl_verify.composition import Array
from ldpfl_verify.shuffled_bits import CountOfOnes
from ldpfl_verify.unshuffled_reports import MOMENT_ERROR

BLANKET_ERROR = 2e-9
"""Relative error that a stated blanket may have: it is rounded down by so much, and the upper end of the interval up."""

MAX_TABLE_ENTRIES = 10**6
MAX_ENTRIES_OF_TABLES, MIN_TABLES = 2 * 10**8, 16
"""Numbers of outcomes that are tabulated for one anonymity-set size, and over all sizes; and the smallest number of sizes."""


class ClonedReport:
    """One ``epsilon0``-LDP report of each of ``clients`` behind a shuffler (Feldman, McMillan and Talwar 2021, Theorem 3.1).

    With probability e^-epsilon0, the report of another client is a clone: it is distributed like a fair draw between the two reports that
    the client under attack may have sent.
    """

    def __init__(self, epsilon0: float, clients: int) -> None:
        self.max_loss = epsilon0
        counts, self._chances = with_fewer_sizes(*binomial(clients - 1, exp(-epsilon0)))
        self._counts_of_ones = [CountOfOnes(epsilon0, [(int(count), 0.5)]) for count in counts]
        self.neglected = 3 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``: the mean over the numbers of clones."""
        total = np.full_like(epsilons, self.neglected)
        for count_of_ones, chance in zip(self._counts_of_ones, self._chances, strict=True):
            total += chance * count_of_ones.delta(epsilons)
        return total

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], from the mean over the numbers of clones."""
        logs = [
            count_of_ones.log_moment(order) + log(chance)
            for count_of_ones, chance in zip(self._counts_of_ones, self._chances, strict=True)
            if chance > 0
        ]
        return float(np.logaddexp.reduce(logs)) + MOMENT_ERROR


class BlanketedReport:
    """One ``epsilon0``-LDP report of each of ``clients`` behind a shuffler, of which a ``share`` follows one law U whatever the input.

    The bound gives the observer more than it sees: which of the other reports are draws of U, so that the client under attack hides among
    m reports in all. In the worst case there are then three kinds of reports: a part w of U that is as likely as possible under one input
    and as unlikely as possible under the other; a part w where it is the other way round; and the rest. Let i, j and k be the numbers of
    reports of each kind. Their probabilities are multinomial, times (high i + low j + both k) / m under the first input, and times
    (low i + high j + both k) / m under the second.

    Attributes:
        takes_long: whether one table would have more than :data:`MAX_TABLE_ENTRIES` entries.
    """

    def __init__(self, epsilon0: float, share: float, clients: int) -> None:
        self.max_loss = epsilon0
        self._low, self._high = share * (1 - BLANKET_ERROR), share * exp(epsilon0) * (1 + BLANKET_ERROR)
        # The likelihood ratio to U is high on this share of U and low on the rest, so that its mean is 1. The shares of both inputs overlap
        # as little as possible: if they are above one half, the rest is high under both inputs, else it is low under both.
        high_share = (1 - self._low) / (self._high - self._low)
        self._both, self._informative_share = (self._high, 1 - high_share) if high_share > 0.5 else (self._low, high_share)
        others, chances = binomial(clients - 1, self._low)
        table_entries = (2 * tail_distance(clients * self._low, 2 * self._informative_share)) ** 2
        self.takes_long = table_entries > MAX_TABLE_ENTRIES
        max_tables = max(MIN_TABLES, MAX_ENTRIES_OF_TABLES // max(1, int(table_entries)))
        self._set_sizes = with_fewer_sizes(others + 1, chances, max_tables)
        self.neglected = 4 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``: the mean over anonymity-set sizes."""
        order = np.argsort(epsilons)
        sorted_epsilons = epsilons[order]
        first_mass, second_mass = np.zeros((2, sorted_epsilons.size + 1), dtype=np.longdouble)
        for size, chance in zip(*self._set_sizes, strict=True):
            first, second, losses = self._table(int(size))
            places = np.searchsorted(sorted_epsilons, losses, side="left")
            first_mass += chance * np.bincount(places, first, sorted_epsilons.size + 1)
            second_mass += chance * np.bincount(places, second, sorted_epsilons.size + 1)
        # An outcome in place p has a loss above the first p epsilons, and above no other.
        first_above, second_above = (np.cumsum(part[::-1])[::-1][1:] for part in (first_mass, second_mass))
        deltas = np.empty_like(epsilons)
        deltas[order] = np.maximum(first_above - np.exp(sorted_epsilons) * second_above, 0) * (1 + 1e-12) + self.neglected
        return deltas

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], by the largest possible loss."""
        return order * self.max_loss

    def _table(self, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the probabilities under both inputs, and the losses, of all likely numbers (i, j) among ``size`` reports."""
        informative, chances = binomial(size, 2 * self._informative_share)
        halves = [_heads_distribution(int(informative_count)) for informative_count in informative]
        i = np.concatenate([values for values, _ in halves])
        informative_count = np.repeat(informative, [values.size for values, _ in halves])
        base_mass = np.concatenate([chance * head_chances for chance, (_, head_chances) in zip(chances, halves, strict=True)])
        rest = self._both * (size - informative_count)
        first = self._high * i + self._low * (informative_count - i) + rest
        second = self._low * i + self._high * (informative_count - i) + rest
        return base_mass * first / size, base_mass * second / size, np.log(first / second)


@lru_cache(maxsize=4096)
def _heads_distribution(count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the distribution of the number of heads in ``count`` throws of a fair coin."""
    return binomial(count, 0.5)
