"""Sums of independent binomials, accurate far into both tails.

A privacy loss is the logarithm of a ratio of neighbouring probabilities, so these must be right relative to their own
size, however small they are. A plain Fourier transform is right only relative to the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import bdtr, expit, log_expit, logsumexp

from ldpfl.util.lazy_imports import optimize

Array = NDArray[np.floating[Any]]

TAIL = 1e-30
"""Upper bound of the probability that lies outside a window."""

_PART_WIDTH, _SUM_WIDTH, _SLACK = 14.0, 12.5, 60
"""Half-widths of windows in standard deviations, and the number of values added for skewed laws. Outside lies less than ``TAIL``."""

_PIECE_HALF_WIDTH, _TILTED_MEANS = 2.5, (5.0, 10.0)
"""Half-width of the piece that one transform gives, and distances of the tilted means from the mean, in standard deviations."""

_DIRECT = 1 << 22
"""Largest product of window widths for direct convolution. It adds only positive terms, so its relative error is tiny."""


@dataclass(frozen=True)
class Binomial:
    """``count`` coins that show 1 with probability e^l / (1 + e^l), l = ``log_odds``."""

    count: int
    log_odds: float

    def tilted(self, theta: float) -> Binomial:
        """Return the law reweighted by e^(theta * value), which is binomial again."""
        return Binomial(self.count, self.log_odds + theta)

    @property
    def mean(self) -> float:
        return self.count * sigmoid(self.log_odds)

    @property
    def variance(self) -> float:
        return self.count * sigmoid(self.log_odds) * sigmoid(-self.log_odds)

    def log_pmf(self) -> tuple[int, Array]:
        """Return (first value, log probabilities) of a window of values. Values outside have a total probability below ``TAIL``."""
        half = _PART_WIDTH * sqrt(self.variance) + _SLACK
        low, high = max(0, floor(self.mean - half)), min(self.count, ceil(self.mean + half))
        values = np.arange(low + 1, high + 1, dtype=np.float64)
        log_ratio = np.log((self.count - values + 1) / values) + self.log_odds  # log P(k) / P(k - 1) for each k of ``values``
        # Sum the logarithms of the ratios from the first value on, whose probability is set to 1; then normalise.
        logs = np.concatenate([[0.0], np.cumsum(log_ratio)])
        logs -= logs.max()
        return low, logs - np.log(np.exp(logs).sum())


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), without overflow and accurate where it is tiny."""
    return float(expit(x))


def log_sigmoid(x: float) -> float:
    """log(1 / (1 + e^-x))."""
    return float(log_expit(x))


@lru_cache(maxsize=16)
def binomial_quantile(probability: float, count: int, share: float) -> int:
    """Return the smallest k with P(Bin(``count``, ``share``) <= k) >= ``probability``.

    Same as ``scipy.stats.binom.ppf``, whose import takes half a second.
    """
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bdtr(middle, count, share) >= probability else (middle, high)
    return high


def convolved(first: Array, second: Array) -> Array:
    """Return the convolution (N + M - 1,) of two laws. Replaces ``scipy.signal.fftconvolve``, whose import takes a second."""
    size = first.size + second.size - 1
    fast_size = fft.next_fast_len(size, real=True)
    return np.asarray(fft.irfft(fft.rfft(first, fast_size) * fft.rfft(second, fast_size), fast_size)[:size])


def log_pmf_of_sum(parts: Sequence[Binomial]) -> tuple[int, Array]:
    """Return (first value, log probabilities) of the sum of independent ``parts``. Other values have a total probability below ``TAIL``."""
    parts = [part for part in parts if part.count > 0]
    if not parts:
        return 0, np.zeros(1)
    low, logs = _convolve_directly(parts) if _is_direct_convolution_quick(parts) else _convolve_by_tilting(parts)
    center, half = sum(part.mean for part in parts), _SUM_WIDTH * _standard_deviation(parts) + _SLACK
    first = max(0, floor(center - half) - low)
    logs = logs[first : max(0, ceil(center + half) - low) + 1]
    representable = np.flatnonzero(logs > -650)  # e^-650 is near float64's smallest number, below which digits are lost
    return low + first + int(representable[0]), logs[representable[0] : representable[-1] + 1]


def _standard_deviation(parts: Sequence[Binomial]) -> float:
    """Return the standard deviation of the sum of ``parts``."""
    return sqrt(sum(part.variance for part in parts))


def _is_direct_convolution_quick(parts: Sequence[Binomial]) -> bool:
    """Whether direct convolution of the parts' windows stays within ``_DIRECT`` products."""
    widths = sorted(min(part.count, 2 * (_PART_WIDTH * sqrt(part.variance) + _SLACK)) + 1 for part in parts)
    return len(widths) == 1 or sum(widths[:-1]) * widths[-1] <= _DIRECT


def _convolve_directly(parts: Sequence[Binomial]) -> tuple[int, Array]:
    """Return (first value, log probabilities) of the sum of ``parts``, with a tiny relative error."""
    low, total = 0, np.ones(1)
    for part in parts:
        start, logs = part.log_pmf()
        low, total = low + start, np.convolve(total, np.exp(logs))
    with np.errstate(divide="ignore"):
        return low, np.log(total)


def _convolve_by_tilting(parts: Sequence[Binomial]) -> tuple[int, Array]:
    """Return (first value, log probabilities) of the sum of ``parts``, by Fourier transforms at several exponential tilts.

    A transform is accurate only near the mean. A tilt moves the mean, so each tilt gives the piece around its own mean, and the pieces are
    joined. The normaliser of a tilt would be a difference of huge numbers. Instead, a piece is shifted to agree with its neighbour where
    they meet.
    """
    low, logs = _convolve_by_transform(parts)
    center, deviation = sum(part.mean for part in parts), _standard_deviation(parts)
    largest_value = sum(part.count for part in parts)
    # ``joined`` are the log probabilities of the values from ``left`` on: first the piece around the mean, then two more on each side.
    left, right = (min(max(round(center + side * _PIECE_HALF_WIDTH * deviation), 0), largest_value) for side in (-1, 1))
    joined = logs[left - low : right - low + 1]
    for side in (-1, 1):
        for distance in _TILTED_MEANS:
            tilted_mean = center + side * distance * deviation
            if not 0.5 < tilted_mean < largest_value - 0.5:
                break  # the sum has no values so far out on this side
            tilted = _tilted_to(parts, tilted_mean)
            low, logs = _convolve_by_transform(tilted)
            # The piece reaches from the value where it meets its neighbour to ``end``, if the transform has these values.
            meeting_value = round(center + side * (distance - _PIECE_HALF_WIDTH) * deviation)
            end = round(tilted_mean + side * _PIECE_HALF_WIDTH * deviation)
            first, last = max(low, min(meeting_value, end)), min(low + logs.size - 1, max(meeting_value, end))
            theta = tilted[0].log_odds - parts[0].log_odds  # the tilt, which is undone up to a constant: shifting the piece removes that
            piece = logs[first - low : last - low + 1] - theta * (np.arange(first, last + 1) - meeting_value)
            if side < 0:
                joined = np.concatenate([(piece - piece[-1] + joined[0])[:-1], joined])
                left = first
            else:
                joined = np.concatenate([joined, (piece - piece[0] + joined[-1])[1:]])
    return left, joined - logsumexp(joined)


def _tilted_to(parts: Sequence[Binomial], target: float) -> list[Binomial]:
    """Return ``parts`` with the common tilt that makes ``target`` the mean of their sum. A tilt is added to the log odds of all coins."""

    def excess(theta: float) -> float:
        """Return the tilted mean of the sum, less ``target``."""
        return sum(part.tilted(theta).mean for part in parts) - target

    theta = float(optimize.brentq(excess, -100.0, 100.0, xtol=1e-12))
    return [part.tilted(theta) for part in parts]


def _convolve_by_transform(parts: Sequence[Binomial]) -> tuple[int, Array]:
    """Return (first value, log probabilities) of the sum of ``parts`` by Fourier transforms, accurate only near its mean."""
    low = 0
    total: Array = np.ones(1)
    for part in parts:
        start, logs = part.log_pmf()
        low, total = low + start, convolved(total, np.exp(logs))
    return low, np.log(np.maximum(total, 1e-300))  # rounding may make a tiny probability 0 or negative
