"""Privacy loss of one report of each client behind a shuffler, by the theorems for any epsilon-LDP mechanism: clones and blankets."""

from __future__ import annotations

from functools import lru_cache
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from ldpfl_verify.binomials import TAIL, binomial, fewer, reach
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
        counts, self._chances = fewer(*binomial(clients - 1, exp(-epsilon0)))
        self._rows = [CountOfOnes(epsilon0, [(int(count), 0.5)]) for count in counts]
        self.neglected = 3 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        total = np.full_like(epsilons, self.neglected)
        for row, chance in zip(self._rows, self._chances, strict=True):
            total += chance * row.delta(epsilons)
        return total

    def log_moment(self, order: float) -> float:
        logs = [row.log_moment(order) + log(chance) for row, chance in zip(self._rows, self._chances, strict=True) if chance > 0]
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
        large = (1 - self._low) / (self._high - self._low)
        self._both, self._apart = (self._high, 1 - large) if large > 0.5 else (self._low, large)
        others, chances = binomial(clients - 1, self._low)
        table = (2 * reach(clients * self._low, 2 * self._apart)) ** 2
        self.takes_long = table > MAX_TABLE_ENTRIES
        cells = max(MIN_TABLES, MAX_ENTRIES_OF_TABLES // max(1, int(table)))
        self._set_sizes = fewer(others + 1, chances, cells)
        self.neglected = 4 * TAIL + MOMENT_ERROR

    def delta(self, epsilons: Array) -> Array:
        order = np.argsort(epsilons)
        at = epsilons[order]
        own, other = np.zeros(at.size + 1, dtype=np.longdouble), np.zeros(at.size + 1, dtype=np.longdouble)
        for size, chance in zip(*self._set_sizes, strict=True):
            first, second, losses = self._table(int(size))
            places = np.searchsorted(at, losses, side="left")
            own += chance * np.bincount(places, first, at.size + 1)
            other += chance * np.bincount(places, second, at.size + 1)
        # An outcome in place p has a loss above the first p epsilons, and above no other.
        above, below = (np.cumsum(part[::-1])[::-1][1:] for part in (own, other))
        found = np.empty_like(epsilons)
        found[order] = np.maximum(above - np.exp(at) * below, 0) * (1 + 1e-12) + self.neglected
        return found

    def log_moment(self, order: float) -> float:
        return order * self.max_loss

    def _table(self, size: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the probabilities under both inputs, and the losses, of all numbers (i, j) that are not too unlikely."""
        telling, chances = binomial(size, 2 * self._apart)
        halves = [_halves(int(number)) for number in telling]
        i = np.concatenate([values for values, _ in halves])
        number = np.repeat(telling, [values.size for values, _ in halves])
        mass = np.concatenate([chance * own for chance, (_, own) in zip(chances, halves, strict=True)])
        rest = self._both * (size - number)
        first, second = self._high * i + self._low * (number - i) + rest, self._low * i + self._high * (number - i) + rest
        return mass * first / size, mass * second / size, np.log(first / second)


@lru_cache(maxsize=4096)
def _halves(count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the distribution of the number of heads in ``count`` throws of a fair coin."""
    return binomial(count, 0.5)
