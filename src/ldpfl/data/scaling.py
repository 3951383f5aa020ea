"""Scale a table's columns by quantiles that noisy histograms estimate.

A column goes through :data:`STAGES` histograms. The first one of a column without public bounds has a bin for each power of two, so that
it finds the column's magnitude whatever its unit; that of a column with bounds has equal bins within them, finer ones near 0 and wide
ones beyond, so that bounds say where to look closely and hide nothing. Each later one has bins that
hold about as many rows each, by the histogram before it. The last one gives the quantiles, and a value becomes the standard normal
deviate of its quantile: skewed columns and columns in any unit end on one scale, and no value lies far from 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from ldpfl.data.encoder import Knots, scaled_by
from ldpfl.data.samples import Dataset, Samples
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import DataError

Floats = NDArray[np.float64]

STAGES = 4
"""Histograms that are taken of each column, one after another."""

_POWERS = 2.0 ** np.arange(-30, 65)
"""Ends of the bins of the first histogram, on either side of 0; the bin in the middle holds what is nearly 0."""
_BINS, _FEWEST = 16, 4
"""Bins of each later histogram, and of one whose noise is large."""
_FINER = 4
"""Within wide bounds the first histogram has so many bins more on either side of 0, each a sixteenth as wide as the one before."""
_ROUGH = 0.35
"""Share of a column's rows in one bin of its last histogram beyond which a noisy one may be much wider than the column's values lie."""
_FAINT = 12.0
"""Standard deviations of noise that the last histogram of a column should hold; with less, its bins may be noise for the most part."""
_CLEAR = 6.0
"""Standard deviations of noise that a bin of a later histogram should hold; with less, there are fewer bins."""
_TAIL = 0.01
"""Quantiles nearer to 0 or 1 are not told apart: an outlier becomes about the deviate of this one, 2.3."""
_FALSE_ALARM = 0.005
"""Probability that, in a whole table, some empty bin of the first histograms looks as if it held rows."""
_REACH = 6.0
"""Standard deviations beyond which a target that is trained on counts as if it lay there."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """The noisy counts of one column.

    Attributes:
        edges: (bins + 1,) ascending.
        counts: (bins,) rows in each bin, with noise.
        noise: standard deviation of that noise.
    """

    edges: Floats
    counts: Floats
    noise: float

    def cumulative(self) -> Floats | None:
        """Return the share of rows below each edge (bins + 1,), or None where no bin holds anything."""
        below: Floats = np.zeros(self.counts.size + 1)
        below[1:] = np.cumsum(np.maximum(self.counts, 0.0))
        if not below[-1] > 0:
            return None
        below /= below[-1]
        return below

    def standing_out(self, bins: int, *, together: bool) -> Histogram | None:
        """Return the histogram without the bins that may be empty, or None where all may be.

        A bin that surely holds rows vouches for its neighbours.

        Args:
            bins: in all histograms of the table, among which hardly ever one is to seem to hold rows by chance.
            together: whether it vouches for all bins up to the next such one, too.
        """
        sure = np.flatnonzero(self.counts > max(-float(ndtri(_FALSE_ALARM / bins)) * self.noise, 0.5))
        if not sure.size:
            return None
        near = np.zeros(self.counts.size, dtype=bool)
        for first, last in [(sure[0], sure[-1])] if together else [(bin_, bin_) for bin_ in sure]:
            near[max(0, first - 1) : last + 2] = True
        return replace(self, counts=np.where(near, np.maximum(self.counts, 0.0), 0.0))


def first_edges(column: Unscaled) -> Floats:
    """Return the edges of a column's first histogram."""
    if column.classes:
        return np.arange(column.classes + 1, dtype=np.float64) - 0.5
    if column.bounds is None:
        return np.concatenate([-_POWERS[::-1], _POWERS])
    low, high = column.bounds
    width = (high - low) / _BINS
    near_zero = width / 16.0 ** np.arange(1, _FINER + 1)
    near_zero = np.concatenate([-near_zero, near_zero])
    near_zero = near_zero[(near_zero > low) & (near_zero < high)]
    beyond = np.concatenate([-_POWERS[::-4], _POWERS[::4]])
    beyond = beyond[(beyond < low - width) | (beyond > high + width)] if column.place is not None else beyond[:0]
    return np.unique(np.concatenate([np.linspace(low, high, _BINS + 1), near_zero, beyond]))


def next_edges(histogram: Histogram) -> Floats:
    """Return edges between which about as many rows lie each; those of ``histogram`` where it shows none."""
    below = histogram.cumulative()
    if below is None:
        return histogram.edges
    first = int(np.flatnonzero(np.diff(below) > 0)[0])
    rows = np.maximum(histogram.counts, 0.0).sum()
    bins = int(np.clip(rows / max(_CLEAR * histogram.noise, 1e-9), _FEWEST, _BINS))
    wanted = np.minimum(np.linspace(0, 1, bins + 1)[1:], below[-1])
    after = np.searchsorted(below, wanted)  # the bin that ends there holds rows, so that it is no gap between others
    within_bin = (wanted - below[after - 1]) / (below[after] - below[after - 1])
    found = histogram.edges[after - 1] + within_bin * (histogram.edges[after] - histogram.edges[after - 1])
    edges = np.unique(np.concatenate([histogram.edges[first : first + 1], found]))
    return edges if edges.size > 2 else histogram.edges


def knots_of(histogram: Histogram) -> Knots | None:
    """Return the points between which a column's values become deviates of mean 0, or None where the histogram shows no rows.

    They are the middles of the bins, each with the deviate of its middle quantile, so that many rows of one value get the deviate of the
    middle one of them; and the outer edges, as far beyond the last middle as half of the way to the one before.
    """
    below = histogram.cumulative()
    if below is None:
        return None
    shares, edges = np.diff(below), histogram.edges
    deviates = ndtri(np.clip(below[:-1] + shares / 2, _TAIL, 1 - _TAIL))
    deviates -= shares @ deviates
    low, high = (deviates[0] - (deviates[1] - deviates[0]) / 2, deviates[-1] + (deviates[-1] - deviates[-2]) / 2)
    values = np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    return tuple(values.tolist()), (float(low), *deviates.tolist(), float(high))


def is_rough(histogram: Histogram) -> bool:
    """Tell whether the last histogram of a column may tell its scale wrongly.

    Its rows are then hardly more than the noise, or one bin holds many of them where noise forbade narrower bins.
    """
    held, noise = np.maximum(histogram.counts, 0.0), histogram.noise
    return bool(held.sum() < _FAINT * noise or (held.max() > _ROUGH * held.sum() and held.sum() < _CLEAR * _BINS * noise))


def within(bounds: tuple[float, float]) -> Knots:
    """Return the points that bring a column from its public ``bounds`` to [-1, 1]."""
    return bounds, (-1.0, 1.0)


def center_and_spread(histogram: Histogram) -> tuple[float, float]:
    """Return the mean and the standard deviation of a column, whose values lie evenly within each bin; NaN where it shows no rows."""
    held = np.maximum(histogram.counts, 0.0)
    if not held.sum() > 0:
        return np.nan, np.nan
    share = held / held.sum()
    middles, widths = (histogram.edges[1:] + histogram.edges[:-1]) / 2, np.diff(histogram.edges)
    center = float(share @ middles)
    return center, float(np.sqrt(share @ ((middles - center) ** 2 + widths**2 / 12)))


def place(values: Floats, edges: Floats) -> NDArray[np.int64]:
    """Return the bin of each value (N,), with what lies beyond in the bins at the ends; -1 for NaN."""
    found = np.searchsorted(edges, values, side="right") - 1
    return np.where(np.isnan(values), -1, np.clip(found, 0, edges.size - 2)).astype(np.int64)


def unscaled_values(dataset: Dataset) -> list[Floats]:
    """Return the values (N,) that each unscaled column has in the train samples."""
    return [_values(dataset.train, column) for column in dataset.unscaled]


def _values(samples: Samples, column: Unscaled) -> Floats:
    if column.place is not None:
        return samples.tensor[:, column.place].double().numpy()
    targets = samples.targets if samples.targets.dim() == 1 else samples.targets[:, column.label]
    return targets.double().numpy()


def by_bounds(dataset: Dataset) -> Dataset:
    """Return ``dataset`` with each column brought from its public bounds to [-1, 1]; nothing is measured.

    Raises:
        DataError: a column of numbers has no bounds.
    """
    numbers = [column for column in dataset.unscaled if not column.classes]
    for column in numbers:
        if column.bounds is None:
            raise DataError(f"the column {column.name!r} has no data.bounds, and nothing measures where its numbers lie: give them")
    knots = [within(column.bounds) for column in numbers if column.place is not None and column.bounds is not None]
    target = next((column.bounds for column in numbers if column.place is None), None)
    middle = None if target is None else ((target[0] + target[1]) / 2, (target[1] - target[0]) / 2)
    return scaled(dataset, knots, middle, (), reach=1.0)


def scaled(
    dataset: Dataset, knots: Sequence[Knots | None], target: tuple[float, float] | None, shares: tuple[float, ...], reach: float = _REACH
) -> Dataset:
    """Return ``dataset`` with its unscaled inputs brought to deviates by ``knots``, in their order; None leaves a column out.

    Args:
        target: center and spread of a target that is a number; None where it is none.
        shares: of the classes, as they were measured; empty where they were not.
        reach: spreads beyond which a target that is trained on counts as if it lay there.

    Raises:
        DataError: the target was not seen above the noise.
    """
    if target is not None and not (isfinite(target[0]) and target[1] > 0):
        raise DataError("the target was not seen above the noise of measuring: give data.bounds for it, or more rows, or a larger epsilon")
    places = tuple(column.place for column in dataset.unscaled if column.place is not None)

    def changed(samples: Samples, reach: float) -> Samples:
        inputs, targets = samples.inputs, samples.targets
        if places:  # tokens of texts have no scale
            inputs = scaled_by(samples.tensor, places, knots)
        if target is not None:
            targets = ((targets.double() - target[0]) / target[1]).clamp(-reach, reach).float()
        return Samples(inputs, targets)

    center, spread = target or (0.0, 1.0)
    encoder = dataset.encoder
    if encoder is not None:
        encoder = encoder.model_copy(
            update={"places": places, "knots": tuple(knots), "target_center": center, "target_spread": spread, "shares": shares}
        )
    # What was measured is a part of what is trained on: a run goes on with it, or not at all, for to measure anew would cost anew.
    content = f"{dataset.fingerprint} {list(knots)} {target} {shares}"
    return replace(
        dataset,
        train=changed(dataset.train, reach),
        test=changed(dataset.test, float("inf")),  # what is measured on is told as it is
        unscaled=(),
        shares=shares,
        unit=spread,
        encoder=encoder,
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:16],
    )
