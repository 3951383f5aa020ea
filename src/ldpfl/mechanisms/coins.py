"""Biased coins of many clients, tossed with few random bits and exact probabilities.

A coin shows heads when a random number lies below a threshold. Their first 16 bits decide for all but one number in 65,536, whatever the
threshold; more bits are drawn for the others alone. So neither the number of random bits nor the time tells which side came up.
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
    """Return which random words of 32 bits, signed, lie below thresholds (k, b), of the clients in ``rows``.

    Args:
        first: the first 16 bits of each threshold, or nearly: then the probability is that of a threshold between both.
        exact: returns the thresholds at some rows (m,) and places (m,).
    """

    def decide(row: Places, place: Places) -> NDArray[np.bool_]:
        return decided(first[row, place], exact(row, place), source, row + rows.start)

    return _tossed(first, decide, source, rows)


def decided(first: NDArray[np.int16], exact: Places, source: RandomSource, rows: Places) -> NDArray[np.bool_]:
    """Return which random words lie below ``exact`` thresholds (m,), given that their first 16 bits are ``first`` (m,).

    Args:
        rows: clients (m,) in ascending order; each draws the other bits of its words in the order that they have here.
    """
    rest = 32 - FIRST
    low = draw_each(source, rows) & ((1 << rest) - 1)
    return np.asarray(low < exact - (first.astype(np.int64) << rest))


def happens(probability: int, source: RandomSource, rows: range, count: int) -> NDArray[np.bool_]:
    """Return ``count`` booleans for each of the clients in ``rows``, (k, count), true with ``probability`` / 2^64, below 1. Exact."""
    rest = 64 - FIRST
    first = np.full((len(rows), count), (probability >> rest) - (1 << (FIRST - 1)), dtype=np.int16)

    def decide(row: Places, place: Places) -> NDArray[np.bool_]:
        words = draw_each(source, np.repeat(row, 2) + rows.start).view(np.uint64)
        return np.asarray((words >> np.uint64(FIRST)) < np.uint64(probability & ((1 << rest) - 1)))

    return _tossed(first, decide, source, rows)


def _tossed(first: NDArray[np.int16], decide: Decision, source: RandomSource, rows: range) -> NDArray[np.bool_]:
    """Return which random bytes lie below ``first`` (k, b); where both are equal, what ``decide`` says of the row and the place."""
    width = first.shape[1]
    drawn = draw_block(source, rows, -(-width // 2)).view(np.int16)[:, :width]
    heads: NDArray[np.bool_] = drawn < first
    row, place = np.divmod(np.flatnonzero(drawn == first), width)
    heads[row, place] = decide(row, place)
    return heads
