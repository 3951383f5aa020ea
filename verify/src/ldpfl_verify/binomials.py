"""Binomial distributions without their far tails."""

from __future__ import annotations

from math import ceil, floor, log, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

TAIL = 1e-28
"""Probability of the tails that are left out of a binomial distribution. It is added to delta."""

MAX_ANONYMITY_SETS = 512
"""Number of anonymity-set sizes that a bound is tabulated for, unless told otherwise."""

Sizes = NDArray[np.int64]
Chances = NDArray[np.float64]


def binomial(count: int, share: float) -> tuple[Sizes, Chances]:
    """Return the values of a binomial distribution and their probabilities, without tails of at most :data:`TAIL` in all.

    ``count`` is the number of trials and ``share`` the probability of success. Bernstein's inequality says where the tails begin.
    """
    width = ceil(tail_distance(count, share * (1 - share)))
    values = np.arange(max(0, floor(count * share) - width), min(count, ceil(count * share) + width) + 1)
    return values, binom.pmf(values, count, share)


def with_fewer_sizes(counts: Sizes, chances: Chances, max_sizes: int = MAX_ANONYMITY_SETS) -> tuple[Sizes, Chances]:
    """Return at most ``max_sizes`` of the anonymity-set sizes ``counts``, and their probabilities.

    Other sizes count as the next smaller size, which hides less, so that a bound stays an upper bound.
    """
    if counts.size <= max_sizes:
        return counts, chances
    starts = np.linspace(0, counts.size, max_sizes, endpoint=False).astype(np.int64)
    return counts[starts], np.add.reduceat(chances, starts)


def tail_distance(count: float, variance: float) -> float:
    """Return a distance from the mean that a sum of ``count`` independent trials exceeds with a probability of at most :data:`TAIL`.

    Each trial lies between 0 and 1 and has a variance of at most ``variance`` (Bernstein's inequality).
    """
    log_inverse_tail = log(2 / TAIL)
    return log_inverse_tail / 3 + sqrt(log_inverse_tail**2 / 9 + 2 * count * variance * log_inverse_tail)
