"""Statistical bounds for audits: of probabilities, of a privacy loss, of means and of correlations.

All functions work on counts and sums, and assume independent trials. ``error`` is always the probability that the whole statement is wrong,
over both sides of a two-sided bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, isnan, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ldpfl.privacy.guarantee import json_number

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

FLOAT32 = 2.0**-23
"""Distance of 1 from the next larger float32."""

_NEIGHBOURS = (1, 16, 256)
"""Numbers of neighbouring bins that share one likelihood ratio: few to find narrow leaks, many to reduce chance effects."""


def clopper_pearson(hits: int, trials: int, error: float) -> tuple[float, float]:
    """Return the exact two-sided confidence interval for a probability, ``error / 2`` on either side.

    It also holds for the mean probability of trials that differ from each other (Hoeffding 1956). His theorem leaves out counts that are
    within one of the expected count, but for any useful ``error`` these lie well inside of the interval.

    Source: Clopper & Pearson 1934.
    """
    low = float(special.betaincinv(hits, trials - hits + 1, error / 2)) if hits > 0 else 0.0
    high = float(special.betainccinv(hits + 1, trials - hits, error / 2)) if hits < trials else 1.0
    return low, high


def epsilon_lower_bound(hits: tuple[int, int], trials: tuple[int, int], delta: float, error: float) -> float:
    """Return a lower bound of epsilon in an (epsilon, ``delta``) guarantee, from one event under two inputs.

    It is ``log((p - delta) / q)``, with p the lower bound of the event's probability under the first input, and q the upper bound under the
    second. The event must have been chosen without looking at these trials. Return minus infinity if nothing can be concluded.

    Source: the definition of differential privacy, read as a statistical test (Jagielski et al. 2020; Nasr et al. 2021).
    """
    (hits_first, hits_second), (trials_first, trials_second) = hits, trials
    p, _ = clopper_pearson(hits_first, trials_first, error)
    _, q = clopper_pearson(hits_second, trials_second, error)
    return log((p - delta) / q) if p - delta > 0 else -inf


def most_distinguishing_bins(ordered_by: tuple[Counts, Counts], chosen_by: tuple[Counts, Counts], error: float) -> Mask:
    """Return a mask (B,) of the bins whose union best distinguishes the first input from the second.

    ``ordered_by`` and ``chosen_by`` are pairs of counts (B,), under the first and under the second input. The bins are sorted in several
    orders: from the left, from the right, and by likelihood ratio, of single bins or with their neighbours. So half-lines, intervals and
    single values are all found. Candidates are the first n bins of each order, for every n. The candidate with the largest lower bound of
    epsilon is chosen. Orders and choice use different trials; otherwise bins that differ by chance would be chosen.
    """
    first, second = chosen_by
    best, chosen = -inf, np.zeros(first.size, dtype=np.bool_)
    for order in _bin_orders(*ordered_by):
        low, _ = wilson_limits(np.cumsum(first[order]), int(first.sum()), error)
        _, high = wilson_limits(np.cumsum(second[order]), int(second.sum()), error)
        end = int(np.argmax(low / high))  # the first end + 1 bins; epsilon at delta 0 is the logarithm of this ratio
        if low[end] / high[end] > best:
            best = float(low[end] / high[end])
            chosen = np.zeros(order.size, dtype=np.bool_)
            chosen[order[: end + 1]] = True
    return chosen


def event_epsilon(first: Counts, second: Counts, test_row: int, delta: float, error: float) -> float:
    """Return a lower bound of epsilon from the event that best distinguishes two inputs with counts (3, B) of their outcomes.

    Rows 0 and 1 of the counts choose the event, and the row ``test_row`` gives the bound: valid for row 2, a mere guess for row 1.
    """
    ordered_by, chosen_by = (first[0], second[0]), (first[1], second[1])
    event = most_distinguishing_bins(ordered_by, chosen_by, error)
    tested_first, tested_second = first[test_row], second[test_row]
    hits = int(tested_first[event].sum()), int(tested_second[event].sum())
    return epsilon_lower_bound(hits, (int(tested_first.sum()), int(tested_second.sum())), delta, error)


def _bin_orders(first: Counts, second: Counts) -> Iterator[NDArray[np.intp]]:
    """Yield orders of the bins: from the left, from the right, and by falling likelihood ratio of single bins or of neighbours together."""
    yield np.arange(first.size)
    yield np.arange(first.size)[::-1]
    for width in _NEIGHBOURS:
        starts = np.arange(0, first.size, width)
        ratio = (np.add.reduceat(first, starts) + 0.5) / (np.add.reduceat(second, starts) + 0.5)
        yield np.argsort(-np.repeat(ratio, width)[: first.size], kind="stable")


def wilson_limits(hits: Any, trials: int, error: float) -> tuple[Floats, Floats]:
    """Return approximate lower and upper confidence limits of probabilities (Wilson 1927). They are fast, and only choose events."""
    z_squared = float(special.ndtri(error / 2)) ** 2
    center = (hits + z_squared / 2) / (trials + z_squared)
    spread = np.sqrt(z_squared * (hits * (trials - hits) / trials + z_squared / 4)) / (trials + z_squared)
    return center - spread, center + spread


@dataclass(frozen=True, eq=False)
class Bins:
    """Cuts the real line at E ``edges`` into 2 E + 1 bins: the edges themselves, and the intervals between and outside them.

    So a frequent value that is an edge has its own bin.
    """

    edges: Floats

    @classmethod
    def covering(cls, samples: list[Floats], levels: int) -> Bins:
        """Put the edges at ``levels`` quantiles of each sample. So any value that is more than 1 / ``levels`` of a sample is an edge."""
        edges = []
        for sample in samples:
            ordered = np.sort(sample)
            edges.append(ordered[np.linspace(0, ordered.size - 1, min(levels, ordered.size)).astype(np.int64)])
        return cls(np.unique(np.concatenate(edges)))

    @property
    def count(self) -> int:
        return 2 * self.edges.size + 1

    def histogram(self, values: Floats) -> Counts:
        """Return how many of ``values`` (n,) fall in each bin, (count,)."""
        return np.bincount(self.places(values), minlength=self.count)

    def places(self, values: Floats) -> Counts:
        """Return the bin (n,) of each of ``values``. Bin 2 i is the gap below edge i, bin 2 i + 1 the edge itself."""
        edges_below = np.searchsorted(self.edges, values)  # number of edges below each value
        is_edge = self.edges[np.minimum(edges_below, self.edges.size - 1)] == values
        bins: Counts = 2 * edges_below + is_edge
        return bins


def mean_bound(count: int, variance: float, largest: float, error: float) -> float:
    """Return a bound of the distance between the mean of ``count`` independent values and its expectation.

    The bound fails with a probability of at most ``error``. ``variance`` bounds the variance of one value, and ``largest`` the distance of
    a value from its expectation. If many values differ from the expectation, the bound is close to that of a normal distribution. It also
    holds for rare large values, for which a z-test fails.

    Source: Bernstein 1924, both sides.
    """
    logarithm = log(2 / error)
    rare = logarithm * largest / 3
    return (rare + sqrt(rare**2 + 2 * count * logarithm * variance)) / count


def mean_bound_empirical(count: int, sample_variance: float, largest: float, error: float) -> float:
    """Return the bound of :func:`mean_bound` from the sample's variance instead of a known one.

    ``largest`` bounds the width of the range of values.

    Source: Maurer & Pontil 2009, theorem 4, both sides.
    """
    logarithm = log(4 / error)
    return sqrt(2 * sample_variance * logarithm / count) + 7 * largest * logarithm / (3 * (count - 1))


@dataclass(frozen=True)
class Correlation:
    """The most suspicious of many correlations: its ``figure`` and ``bound``, in standard errors, and its index ``place``."""

    figure: float
    bound: float
    place: int

    @property
    def accepted(self) -> bool:
        """Whether chance explains the correlation."""
        return self.figure <= self.bound  # False for NaN


def most_correlated_pair(first: Floats, second: Floats | None, error: float) -> Correlation:
    """Return the largest absolute correlation of a row of ``first`` and a row of ``second``, (K, n) each, times sqrt(n).

    With ``None`` for ``second``, pairs of rows within ``first`` are correlated. Rows are standardised: mean 0 and variance 1. If all rows
    are independent, the figure exceeds the result's ``bound`` with a probability of at most ``error`` (a union bound over all pairs).
    ``place`` is the flat index (row of first) * K + row of second.
    """
    products = first @ (first if second is None else second).T
    if second is None:
        products = np.triu(products, k=1)
    rows, count = first.shape
    compared = rows * (rows - 1) // 2 if second is None else rows**2
    place = int(np.argmax(np.abs(products)))
    bound = sqrt(count) * mean_bound(count, variance=1.0, largest=_largest_product(first, second), error=error / max(1, compared))
    return Correlation(float(np.abs(products).flat[place]) / sqrt(count), bound, place)


def most_correlated_lag(rows: Floats, error: float) -> Correlation:
    """Correlate the standardised rows (K, n) with themselves, shifted by every lag from 1 to 3 n / 4. The correlations of all rows add up.

    ``place`` of the result is the lag that is largest relative to its bound. The Fourier transform computes all lags at once.
    """
    count, length = rows.shape
    padded = 1 << ceil(log(2 * length, 2))  # a power of two of at least 2 n, so that no shifted row wraps around
    spectrum = np.zeros(padded // 2 + 1)
    for row in rows:
        spectrum += np.abs(np.fft.rfft(row, padded)) ** 2
    lags = np.arange(1, max(2, 3 * length // 4))
    terms = count * (length - lags)  # number of products that each lag's correlation adds up
    figures = np.abs(np.fft.irfft(spectrum, padded)[lags]) / np.sqrt(terms)
    largest = _largest_product(rows, None)
    bounds = np.array([sqrt(n) * mean_bound(int(n), variance=1.0, largest=largest, error=error / lags.size) for n in terms])
    place = int(np.argmax(figures / bounds))
    return Correlation(float(figures[place]), float(bounds[place]), int(lags[place]))


def _largest_product(first: Floats, second: Floats | None) -> float:
    """Return the largest absolute product of a value of ``first`` and one of ``second``; without ``second``, of two values of ``first``."""
    return float(np.abs(first).max()) * float(np.abs(first if second is None else second).max())


def threshold_epsilon(choosing: tuple[Floats, Floats], testing: tuple[Floats, Floats], delta: float, error: float) -> float:
    """Return a lower bound on epsilon from the events that a statistic lies above, or below, a threshold; 0 if nothing was shown.

    Both arguments are pairs of samples of the statistic: under the input that makes it large, and under the input that makes it small.
    Thresholds are chosen on ``choosing``, and the bound is computed from ``testing``. It is wrong with probability ``error`` at most.
    """
    (high_for_choice, low_for_choice), (high, low) = choosing, testing
    above = _most_distinguishing_threshold(high_for_choice, low_for_choice, error / 2)
    below = -_most_distinguishing_threshold(-low_for_choice, -high_for_choice, error / 2)  # mirrored: the small sample lies above
    from_above = epsilon_lower_bound((int((high > above).sum()), int((low > above).sum())), (high.size, low.size), delta, error / 2)
    from_below = epsilon_lower_bound((int((low < below).sum()), int((high < below).sum())), (low.size, high.size), delta, error / 2)
    return max(0.0, from_above, from_below)


def _most_distinguishing_threshold(high: Floats, low: Floats, error: float) -> float:
    """Return the threshold that values of ``high`` exceed most often, compared with values of ``low``.

    It maximises the ratio of two confidence limits, at the error rate ``error`` each: the lower limit of the probability that a value of
    ``high`` exceeds it, and the upper limit for ``low``.
    """
    thresholds = _candidate_thresholds(np.concatenate([high, low]))[:-1]  # no value exceeds the last one
    above_high = high.size - np.searchsorted(np.sort(high), thresholds, side="right")
    above_low = low.size - np.searchsorted(np.sort(low), thresholds, side="right")
    at_least, _ = wilson_limits(above_high, high.size, error)
    _, at_most = wilson_limits(above_low, low.size, error)
    return float(thresholds[int(np.argmax(at_least / at_most))])


def best_threshold(high: Floats, low: Floats) -> float:
    """Return the threshold t for which "a value above t is from the sample ``high``, others are from ``low``" is right most often."""
    thresholds = _candidate_thresholds(np.concatenate([high, low]))
    high_below, low_below = (np.searchsorted(np.sort(sample), thresholds, side="right") for sample in (high, low))
    return float(thresholds[int(np.argmin(high_below - low_below))])  # high_below + (low.size - low_below) values are judged wrongly


def _candidate_thresholds(values: Floats) -> Floats:
    """Return a threshold below all ``values``, one half-way between any two neighbouring values, and one above all."""
    distinct = np.unique(values)
    return np.concatenate([[distinct[0] - 1.0], (distinct[1:] + distinct[:-1]) / 2, [distinct[-1] + 1.0]])


def json_safe(value: Any) -> Any:
    """Return ``value`` as JSON can hold it, dicts, lists and tuples inside too: an infinite float as "infinity", NaN as None."""
    if isinstance(value, dict):
        return {key: json_safe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry) for entry in value]
    if isinstance(value, float) and isnan(value):
        return None
    return json_number(value) if isinstance(value, float) else value
