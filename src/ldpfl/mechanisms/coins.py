"""Biased coins with exact probabilities, drawn for many clients with few random bits.

A coin is true if a uniform random number lies below a threshold. The first 16 bits decide this, unless they equal those of the threshold:
once in 65,536 draws, whatever the threshold. Only then are more bits drawn. So neither the number of random bits nor the time reveals the
result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ldpfl.util.randomness import RandomSource, draw_block, draw_each

FIRST = 16
"""Bits of a random number that are compared first."""

Places = NDArray[np.int64]
Decision = Callable[[Places, Places], NDArray[np.bool_]]


def words_below(
    first: NDArray[np.int16], exact: Callable[[Places, Places], Places], source: RandomSource, rows: range
) -> NDArray[np.bool_]:
    """Draw signed 32-bit words for the clients in ``rows``, and return which lie below their thresholds, (k, b) bool.

    Args:
        first: the first 16 bits of each threshold, (k, b). If rounding makes them slightly wrong, the probability is that of a threshold
            between the rounded and the exact one.
        exact: returns the exact thresholds (m,) at the given rows (m,) and columns (m,).
    """

    def decide(row: Places, column: Places) -> NDArray[np.bool_]:
        return decided(first[row, column], exact(row, column), source, row + rows.start)

    return _toss(first, decide, source, rows)


def decided(first: NDArray[np.int16], exact: Places, source: RandomSource, rows: Places) -> NDArray[np.bool_]:
    """Draw the remaining bits of words whose first 16 bits are ``first`` (m,), and return which words lie below ``exact`` (m,).

    Args:
        rows: client of each word, (m,), in ascending order. A client draws the remaining bits of its words in this order.
    """
    rest = 32 - FIRST
    low = draw_each(source, rows) & ((1 << rest) - 1)
    return np.asarray(low < exact - (first.astype(np.int64) << rest))


def happens(probability: int, source: RandomSource, rows: range, count: int) -> NDArray[np.bool_]:
    """Draw ``count`` booleans for each client in ``rows``, (k, count). Each is true with probability exactly ``probability`` / 2^64 < 1."""
    rest = 64 - FIRST
    first = np.full((len(rows), count), (probability >> rest) - (1 << (FIRST - 1)), dtype=np.int16)  # less 2^15: the words are signed

    def decide(row: Places, column: Places) -> NDArray[np.bool_]:
        words = draw_each(source, np.repeat(row, 2) + rows.start).view(np.uint64)  # of their 64 bits, ``rest`` are used
        return np.asarray((words >> np.uint64(FIRST)) < np.uint64(probability & ((1 << rest) - 1)))

    return _toss(first, decide, source, rows)


def _toss(first: NDArray[np.int16], decide: Decision, source: RandomSource, rows: range) -> NDArray[np.bool_]:
    """Draw 16-bit words and return which lie below ``first`` (k, b). Where both are equal, ``decide`` draws further bits and decides."""
    width = first.shape[1]
    drawn = draw_block(source, rows, -(-width // 2)).view(np.int16)[:, :width]  # a 32-bit word is two of 16 bits
    below: NDArray[np.bool_] = drawn < first
    row, column = np.divmod(np.flatnonzero(drawn == first), width)
    below[row, column] = decide(row, column)
    return below
