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

FIRST_BITS = 16
"""Number of bits of a random number that are compared first."""

Places = NDArray[np.int64]
"""Row or column numbers, or the integers at these places."""

Decision = Callable[[Places, Places], NDArray[np.bool_]]
"""Returns a boolean for each place, given the places' rows and columns."""


def compare_random_words(
    first_bits: NDArray[np.int16], exact_thresholds: Callable[[Places, Places], Places], source: RandomSource, rows: range
) -> NDArray[np.bool_]:
    """Draw signed 32-bit words for the clients in ``rows``, and return which words lie below their thresholds, (k, b) bool.

    Args:
        first_bits: the first 16 bits of each threshold, (k, b): b thresholds for each of k clients. If rounding makes them slightly wrong,
            the probability is that of a threshold between the rounded and the exact one.
        exact_thresholds: returns the exact thresholds (m,) at the given rows (m,) and columns (m,). It is called only for the words whose
            first 16 bits equal those of their thresholds.
    """

    def decide(row: Places, column: Places) -> NDArray[np.bool_]:
        """Decide for the words at these rows (m,) and columns (m,), whose first 16 bits equal those of their thresholds."""
        return compare_remaining_bits(first_bits[row, column], exact_thresholds(row, column), source, row + rows.start)

    return _compare_first_bits(first_bits, decide, source, rows)


def compare_remaining_bits(first_bits: NDArray[np.int16], thresholds: Places, source: RandomSource, rows: Places) -> NDArray[np.bool_]:
    """Draw the last 16 bits of words whose first 16 bits are ``first_bits`` (m,), and return which words lie below ``thresholds`` (m,).

    Args:
        rows: client of each word, (m,), in ascending order. A client draws the remaining bits of its words in this order.
    """
    remaining_bits = 32 - FIRST_BITS
    drawn = draw_each(source, rows) & ((1 << remaining_bits) - 1)
    return np.asarray(drawn < thresholds - (first_bits.astype(np.int64) << remaining_bits))  # the last 16 bits of word and threshold


def toss_coins(probability: int, source: RandomSource, rows: range, count: int) -> NDArray[np.bool_]:
    """Draw ``count`` booleans for each client in ``rows``, (k, count). Each is true with probability exactly ``probability`` / 2^64 < 1."""
    remaining_bits = 64 - FIRST_BITS
    signed_first = (probability >> remaining_bits) - (1 << (FIRST_BITS - 1))  # less 2^15: the words that are compared with it are signed
    first_bits = np.full((len(rows), count), signed_first, dtype=np.int16)

    def decide(row: Places, column: Places) -> NDArray[np.bool_]:
        """Decide for the coins at these rows (m,) and columns (m,), whose first 16 bits equal those of ``probability``."""
        words = draw_each(source, np.repeat(row, 2) + rows.start).view(np.uint64)  # two draws of 32 bits make a word of 64 bits
        # 48 bits of each word are compared with the last 48 bits of ``probability``.
        return np.asarray((words >> np.uint64(FIRST_BITS)) < np.uint64(probability & ((1 << remaining_bits) - 1)))

    return _compare_first_bits(first_bits, decide, source, rows)


def _compare_first_bits(first_bits: NDArray[np.int16], decide: Decision, source: RandomSource, rows: range) -> NDArray[np.bool_]:
    """Draw 16-bit words for the clients in ``rows``, and return which words lie below ``first_bits`` (k, b), as (k, b) bool.

    For words that equal their entry of ``first_bits``, ``decide`` draws more bits: it gets their rows (m,) and columns (m,), and returns
    (m,) bool.
    """
    width = first_bits.shape[1]
    drawn = draw_block(source, rows, (width + 1) // 2).view(np.int16)[:, :width]  # a drawn word of 32 bits is two words of 16 bits
    below: NDArray[np.bool_] = drawn < first_bits
    row, column = np.divmod(np.flatnonzero(drawn == first_bits), width)
    below[row, column] = decide(row, column)
    return below
