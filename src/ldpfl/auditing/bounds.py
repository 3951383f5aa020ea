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

_NEIGHBOURS = (1, 16, 256)
"""Numbers of neighbouring bins that share one likelihood ratio: few to find narrow leaks, many to reduce chance effects."""


def clopper_pearson(hits: int, trials: int, error: float) -> tuple[float, float]:
    """Return the exact two-sided confidence interval for a probability, ``error / 2`` on either side.

    It also holds for the mean probability of trials that differ from each other, except where the count is within one
    of what that mean predicts, which no useful ``error`` reaches (Hoeffding 1956).

    Source: Clopper & Pearson 1934.
    """
    low = float(special.betaincinv(hits, trials - hits + 1, error / 2)) if hits > 0 else 0.0
    high = float(special.betainccinv(hits + 1, trials - hits, error / 2)) if hits < trials else 1.0
    return low, high


def epsilon_lower_bound(hits: tuple[int, int], trials: tuple[int, int], delta: float, error: float) -> float:
    """Return a lower bound of epsilon in an (epsilon, ``delta``) guarantee, from one event under two inputs.

    It is ``log((p - delta) / q)``, with p the lower bound of the event's probability under the first input, and q the upper bound under the
    second. The event must have been chosen without looking at these trials. Minus infinity if nothing can be concluded.

    Source: the definition of differential privacy, read as a statistical test (Jagielski et al. 2020; Nasr et al. 2021).
    """
    first = clopper_pearson(hits[0], trials[0], error)[0] - delta
    second = clopper_pearson(hits[1], trials[1], error)[1]
    return log(first / second) if first > 0 else -inf


def telling_bins(ordered_by: tuple[Counts, Counts], chosen_by: tuple[Counts, Counts], error: float) -> Mask:
    """Choose the bins (B,) whose union best distinguishes the first input from the second.

    Both arguments are counts (B,) under the first and under the second input. The bins are sorted in several orders: from the left, from
    the right, and by likelihood ratio, of single bins or with their neighbours. So half-lines, intervals and single values are all found.
    Among the first n bins of each order, for every n, the set with the largest lower bound of epsilon is chosen. Orders and choice use
    different trials; otherwise bins that differ by chance would be chosen.
    """
    best, chosen = -inf, np.zeros(ordered_by[0].size, dtype=np.bool_)
    for order in _orders(*ordered_by):
        low = wilson(np.cumsum(chosen_by[0][order]), int(chosen_by[0].sum()), error)[0]
        high = wilson(np.cumsum(chosen_by[1][order]), int(chosen_by[1].sum()), error)[1]
        end = int(np.argmax(low / high))
        if low[end] / high[end] > best:
            best = float(low[end] / high[end])
            chosen = np.zeros(order.size, dtype=np.bool_)
            chosen[order[: end + 1]] = True
    return chosen


def event_epsilon(first: Counts, second: Counts, tested: int, delta: float, error: float) -> float:
    """Return a lower bound of epsilon from the event that best distinguishes two inputs with counts (3, B) of their outcomes.

    Rows 0 and 1 of the counts choose the event. Row ``tested`` gives the bound, which is valid only for row 2.
    """
    event = telling_bins((first[0], second[0]), (first[1], second[1]), error)
    hits = int(first[tested][event].sum()), int(second[tested][event].sum())
    return epsilon_lower_bound(hits, (int(first[tested].sum()), int(second[tested].sum())), delta, error)


def _orders(first: Counts, second: Counts) -> Iterator[NDArray[np.intp]]:
    """Yield orders of the bins: from the left, from the right, and by falling likelihood ratio of single bins or of neighbours together."""
    yield np.arange(first.size)
    yield np.arange(first.size)[::-1]
    for width in _NEIGHBOURS:
        starts = np.arange(0, first.size, width)
        ratio = (np.add.reduceat(first, starts) + 0.5) / (np.add.reduceat(second, starts) + 0.5)
        yield np.argsort(-np.repeat(ratio, width)[: first.size], kind="stable")


def wilson(hits: Any, trials: int, error: float) -> tuple[Floats, Floats]:
    """Return approximate confidence limits of probabilities (Wilson's). They are fast, and used only for choosing events."""
    z2 = float(special.ndtri(error / 2)) ** 2
    center = (hits + z2 / 2) / (trials + z2)
    spread = np.sqrt(z2 * (hits * (trials - hits) / trials + z2 / 4)) / (trials + z2)
    return center - spread, center + spread


@dataclass(frozen=True, eq=False)
class Bins:
    """Cuts the real line at E ``edges`` into 2 E + 1 bins: the edges themselves, and the intervals between and outside them.

    So a frequent value that is an edge has its own bin.
    """

    edges: Floats

    @classmethod
    def covering(cls, samples: list[Floats], levels: int) -> Bins:
        """Put the edges at ``levels`` quantiles of each sample: any value with more than 1 / levels of one becomes an edge."""
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
        """Return the bin (n,) of each of ``values``."""
        below = np.searchsorted(self.edges, values)
        on_edge = self.edges[np.minimum(below, self.edges.size - 1)] == values
        bins: Counts = 2 * below + on_edge
        return bins


def mean_bound(count: int, variance: float, largest: float, error: float) -> float:
    """Return a bound of the distance between the mean of ``count`` independent values and its expectation.

    ``largest`` bounds the distance of a value from its expectation. The bound is close to that of a normal distribution if many values
    differ from the expectation. It also holds for rare large values, for which a z-test fails.

    Source: Bernstein 1924, both sides.
    """
    logarithm = log(2 / error)
    rare = logarithm * largest / 3
    return (rare + sqrt(rare**2 + 2 * count * logarithm * variance)) / count


def mean_bound_empirical(count: int, sample_variance: float, largest: float, error: float) -> float:
    """Return the bound of :func:`mean_bound` from the sample's variance instead of a known one; ``largest`` bounds the values' range.

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
        return self.figure <= self.bound  # False for NaN


def worst_pair(first: Floats, second: Floats | None, error: float) -> Correlation:
    """Correlate every row of ``first`` with every row of ``second``, (K, n) each; with ``None``, all pairs within ``first``.

    Rows are standardised: mean 0 and variance 1. ``place`` is the flat index (row of first) * K + row of second.
    """
    products = first @ (first if second is None else second).T
    if second is None:
        products = np.triu(products, k=1)
    rows, count = first.shape
    compared = rows * (rows - 1) // 2 if second is None else rows**2
    place = int(np.argmax(np.abs(products)))
    bound = sqrt(count) * mean_bound(count, 1.0, _largest_product(first, second), error / max(1, compared))
    return Correlation(float(np.abs(products).flat[place]) / sqrt(count), bound, place)


def worst_lag(rows: Floats, error: float) -> Correlation:
    """Correlate each of the standardised rows (K, n) with itself, shifted by every lag from 1 to 3 n / 4; rows add up.

    ``place`` is the lag. All lags at once by the Fourier transform.
    """
    count, length = rows.shape
    padded = 1 << ceil(log(2 * length, 2))
    spectrum = np.zeros(padded // 2 + 1)
    for row in rows:
        spectrum += np.abs(np.fft.rfft(row, padded)) ** 2
    lags = np.arange(1, max(2, 3 * length // 4))
    terms = count * (length - lags)
    figures = np.abs(np.fft.irfft(spectrum, padded)[lags]) / np.sqrt(terms)
    largest = _largest_product(rows, None)
    bounds = np.array([sqrt(n) * mean_bound(int(n), 1.0, largest, error / lags.size) for n in terms])
    place = int(np.argmax(figures / bounds))
    return Correlation(float(figures[place]), float(bounds[place]), int(lags[place]))


def _largest_product(first: Floats, second: Floats | None) -> float:
    """Return an upper bound of the size of a product of one value of each array."""
    return float(np.abs(first).max()) * float(np.abs(first if second is None else second).max())


def threshold_epsilon(chosen_by: tuple[Floats, Floats], judged_by: tuple[Floats, Floats], delta: float, error: float) -> float:
    """Return a lower bound on epsilon from one threshold, above and not above it; 0 where nothing was shown.

    Both arguments are samples of a statistic: under the input that makes it large, and under the one that makes it
    small. Thresholds are chosen on the first two, the bound is computed from the last two.
    """
    high, low = judged_by
    above = _telling_threshold(*chosen_by, error / 2)
    below = -_telling_threshold(-chosen_by[1], -chosen_by[0], error / 2)
    upper = epsilon_lower_bound((int((high > above).sum()), int((low > above).sum())), (high.size, low.size), delta, error / 2)
    lower = epsilon_lower_bound((int((low < below).sum()), int((high < below).sum())), (low.size, high.size), delta, error / 2)
    return max(0.0, upper, lower)


def _telling_threshold(high: Floats, low: Floats, error: float) -> float:
    """Return the threshold above which ``high`` is most surely more likely than ``low``."""
    cuts = _cuts(np.concatenate([high, low]))[:-1]
    above_high = high.size - np.searchsorted(np.sort(high), cuts, side="right")
    above_low = low.size - np.searchsorted(np.sort(low), cuts, side="right")
    surely, at_most = wilson(above_high, high.size, error)[0], wilson(above_low, low.size, error)[1]
    return float(cuts[int(np.argmax(surely / at_most))])


def best_threshold(high: Floats, low: Floats) -> float:
    """Return the threshold t for which "above t means the first sample" is right most often."""
    cuts = _cuts(np.concatenate([high, low]))
    wrong = np.searchsorted(np.sort(high), cuts, side="right") - np.searchsorted(np.sort(low), cuts, side="right")
    return float(cuts[int(np.argmin(wrong))])


def _cuts(values: Floats) -> Floats:
    """Return a point below all distinct values, one half-way between any two neighbours, and one above all."""
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
