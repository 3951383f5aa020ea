"""Scale a table's columns by quantiles that noisy histograms estimate.

A column goes through :data:`STAGES` histograms. The first one of a column without public bounds has a bin for each power of two, so that
it finds the column's magnitude whatever its unit; that of a column with bounds has equal bins within them, finer ones near 0 and wide
ones beyond, so that bounds say where to look closely and hide nothing. Each later one has bins that
hold about as many rows each, by the histogram before it. The last one gives the quantiles, and a value becomes the standard normal
deviate of its quantile: skewed columns and columns in any unit end on one scale, and no value lies far from 0. A column that is not skewed
is scaled by a straight line instead, through two of the quantiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from ldpfl.data.encoder import Encoder, Knots, scaled_by
from ldpfl.data.samples import Dataset, Samples
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import DataError
from ldpfl.tasks import Targets, without_answer
from ldpfl.tasks.outcomes import by_interval, with_times

Floats = NDArray[np.float64]

STAGES = 4
"""Histograms that are taken of each column, one after another."""

_POWERS = 2.0 ** np.arange(-30, 65)
"""Ends of the bins of the first histogram, on either side of 0; the bin in the middle holds what is nearly 0."""
_BINS, _FEWEST = 16, 4
"""Bins of each later histogram, and of one whose noise is large."""
_FINER = 4
"""Within wide bounds the first histogram has so many bins more on either side of 0, each a sixteenth as wide as the one before."""
_NARROW = 0.05
"""Least variance of a column's deviates, as its histograms show it beyond doubt, below which a note says that they may be too narrow."""
_DOUBT = 3.0
"""Standard deviations of noise that are taken off that variance."""
_MEANS = np.linspace(-3, 3, 61)
"""Deviates among which the mean of a column is sought."""
_FAINT = 10.0
"""Standard deviations of noise that the last histogram of a column should hold; with less, its bins may be noise for the most part."""
_SMALL = 40.0
"""The same for all columns of a table: with less, in about one column of ten there is a wrong scale that nothing else shows."""
_CLEAR = 6.0
"""Standard deviations of noise that a bin of a later histogram should hold; with less, there are fewer bins."""
_TAIL = 0.01
"""Quantiles nearer to 0 or 1 are not told apart: an outlier becomes about the deviate of this one, 2.3."""
_SHOULDER, _FARTHEST = 1.28, 3.0
"""Deviates of the quantiles 0.1 and 0.9, which say where a column that is not skewed lies, and the farthest of its deviates."""
_SKEWED = 0.4
"""Distance of the median from the middle between these quantiles, as a share of half of theirs, from which on a column is skewed."""
_FALSE_ALARM = 0.005
"""Probability that, in a whole table, some empty bin of the first histograms looks as if it held rows."""
_REACH = 6.0
"""Standard deviations beyond which a target that is trained on counts as if it lay there."""
_LEAST_MEAN = 1e-3
"""Least mean of a count, in its spreads, and least hazard, at which training begins."""


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
    middle one of them; and the outer edges, as far beyond the last middle as half of the way to the one before. Of a column that is not
    skewed they are the two ends of a straight line.
    """
    below = histogram.cumulative()
    if below is None:
        return None
    shares, edges = np.diff(below), histogram.edges
    deviates = ndtri(np.clip(below[:-1] + shares / 2, _TAIL, 1 - _TAIL))
    deviates -= shares @ deviates
    low, high = (deviates[0] - (deviates[1] - deviates[0]) / 2, deviates[-1] + (deviates[-1] - deviates[-2]) / 2)
    values = np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    found = tuple(values.tolist()), (float(low), *deviates.tolist(), float(high))
    return _straight(found) or found


def _straight(knots: Knots) -> Knots | None:
    """Return a straight line in the place of ``knots`` of a column that is not skewed; None for one that is.

    Noise has little to bend there: two quantiles decide in the place of many, and equal steps of a column stay equal.
    """
    low, middle, high = np.interp(np.array([-_SHOULDER, 0.0, _SHOULDER]), knots[1], knots[0])
    center, reach = (high + low) / 2, (high - low) / 2 * _FARTHEST / _SHOULDER
    if not (isfinite(reach) and abs(center - middle) < _SKEWED * (high - low) / 2):
        return None
    return (float(center - reach), float(center + reach)), (-_FARTHEST, _FARTHEST)


def is_rough(histograms: Sequence[Histogram], knots: Knots) -> bool:
    """Tell whether the ``histograms`` of a column leave open that its deviates, by ``knots``, are much narrower than they should be.

    Its rows are then hardly more than the noise, or nothing shows that they lie apart. Each histogram bounds from below how far they do,
    and the best of these bounds counts: two values of a 0/1 column lie in different bins of one of them, however wide these bins are.
    """
    held, noise = np.maximum(histograms[-1].counts, 0.0).sum(), histograms[-1].noise
    if noise == 0:
        return False
    return bool(held < _FAINT * noise) or max(_least_variance(own, knots) for own in histograms) < _NARROW


def is_small(histograms: Sequence[Histogram]) -> bool:
    """Tell whether a table's last ``histograms`` hold so little beside the noise that some column may well be scaled wrongly."""
    return all(np.maximum(own.counts, 0.0).sum() < _SMALL * own.noise for own in histograms)


def _least_variance(histogram: Histogram, knots: Knots) -> float:
    """Return the variance that a column's deviates have at least, wherever in their bins its rows lie, and whatever the noise did.

    For each mean that they may have, a row counts with the squared distance of the mean from its bin; the least such sum is taken.
    """
    held, ends = np.maximum(histogram.counts, 0.0), np.interp(histogram.edges, *knots)
    means = _MEANS[:, None]
    squares = np.maximum(np.maximum(ends[:-1] - means, means - ends[1:]), 0.0) ** 2
    doubt = _DOUBT * histogram.noise * np.sqrt((squares[:, held > 0] ** 2).sum(axis=1))
    return float(((squares @ held - doubt) / held.sum()).min())


def within(bounds: tuple[float, float]) -> Knots:
    """Return the points that bring a column from its public ``bounds`` to [-1, 1]."""
    return bounds, (-1.0, 1.0)


def center_and_spread(histogram: Histogram, *, whole: bool = False) -> tuple[float, float]:
    """Return the mean and the standard deviation of a column, whose values lie evenly within each bin; NaN where it shows no rows.

    ``whole`` numbers are the whole ones of each bin: many counts are 0 or 1, at the low end of theirs.
    """
    held = np.maximum(histogram.counts, 0.0)
    if not held.sum() > 0:
        return np.nan, np.nan
    share = held / held.sum()
    low, high = histogram.edges[:-1], histogram.edges[1:]
    middles, variances = (low + high) / 2, (high - low) ** 2 / 12
    if whole:
        first, last = np.ceil(low), np.ceil(high) - 1
        some = last >= first
        middles = np.where(some, (first + last) / 2, middles)
        variances = np.where(some, ((last - first + 1) ** 2 - 1) / 12, 0.0)
    center = float(share @ middles)
    return center, float(np.sqrt(share @ ((middles - center) ** 2 + variances)))


@dataclass(frozen=True)
class TargetScale:
    """How a target of numbers is told.

    Attributes:
        center, spread: in the column's own unit.
        cuts: ascending times at which intervals end; empty for targets that are no times.
        reach: spreads beyond which a target that is trained on counts as if it lay there.
    """

    center: float = 0.0
    spread: float = 1.0
    cuts: tuple[float, ...] = ()
    reach: float = _REACH

    def told(self, targets: Tensor, *, exactly: bool) -> Tensor:
        """Return ``targets`` (N, ...) as a task takes them; ``exactly``, however far they lie from the center.

        Times are told ``exactly`` behind the intervals in which they lie.
        """
        if self.cuts:
            times, events = targets.unbind(dim=1)
            found = by_interval(times, events, torch.tensor(self.cuts))
            return with_times(found, times, events) if exactly else found
        reach = float("inf") if exactly else self.reach
        return ((targets.double() - self.center) / self.spread).clamp(-reach, reach).float()


def measured_target(histogram: Histogram | None, targets: Targets, bounds: tuple[float, float] | None) -> tuple[TargetScale, float]:
    """Return how a number or a count is told, by its histogram or else its ``bounds``, and the mean of a count, in its spreads."""
    center, spread = (np.nan, np.nan) if histogram is None else center_and_spread(histogram, whole=targets == "count")
    if not spread > 0 and bounds is not None:
        return public_target(targets, bounds, _REACH)
    if not (isfinite(center) and spread > 0):
        raise DataError("the target was not seen above the noise of measuring: give data.bounds for it, or more rows, or a larger epsilon")
    return TargetScale(0.0 if targets == "count" else center, spread), max(center / spread, _LEAST_MEAN)


def public_target(targets: Targets, bounds: tuple[float, float], reach: float) -> tuple[TargetScale, float]:
    """Return the same by public ``bounds`` alone: a count is about a quarter of its bound, and spreads by as much."""
    if targets == "count":
        return TargetScale(0.0, bounds[1] / 4, reach=max(reach, 4.0)), 1.0
    return TargetScale((bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2, reach=reach), 1.0


def measured_cuts(histogram: Histogram | None, dataset: Dataset, bounds: tuple[float, float] | None) -> tuple[TargetScale, list[float]]:
    """Return the intervals of a time to an event, and the share of all times that lies in each.

    They end at ``data.cut_points``, or at quantiles; at equal distances within ``bounds`` where noise hides the quantiles.

    Raises:
        DataError: nothing says where times lie.
    """
    cuts, below = public_cuts(dataset, bounds), None if histogram is None else histogram.cumulative()
    if histogram is None or below is None:
        if not cuts:
            raise DataError("times were not seen above the noise of measuring: give data.cut_points, or more rows, or a larger epsilon")
        return TargetScale(cuts=tuple(cuts)), [1 / (len(cuts) + 1)] * len(cuts)
    if not cut_points(dataset):
        # Where no time lies between two edges, the quantile is the upper one.
        rising = below + np.linspace(0, 1e-9, below.size)
        cuts = np.interp(np.arange(1, dataset.outputs + 1) / (dataset.outputs + 1), rising, histogram.edges).tolist()
    return TargetScale(cuts=tuple(cuts)), np.diff(np.interp(cuts, histogram.edges, below), prepend=0.0).tolist()


def cut_points(dataset: Dataset) -> list[float]:
    """Return the public ends of intervals; none where they are measured."""
    return [] if dataset.encoder is None else dataset.encoder.data.cut_points


def public_cuts(dataset: Dataset, bounds: tuple[float, float] | None) -> list[float]:
    """Return where intervals end by public settings alone; none where these do not say it."""
    return cut_points(dataset) or ([] if bounds is None else np.linspace(0, bounds[1], dataset.outputs + 1)[1:].tolist())


def hazards(ended: Sequence[float], events: float) -> tuple[float, ...]:
    """Return about the hazard of each interval, in which ``ended`` are the shares of times, of which ``events`` are those of events."""
    shares = np.asarray(ended)
    left = 1 - np.cumsum(shares) + shares
    found = np.clip(events * shares / np.maximum(left, _LEAST_MEAN), _LEAST_MEAN, 0.9)
    return tuple(found.tolist())


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
    return targets.double().where(~without_answer(samples.targets), torch.nan).numpy()


def scaled_as(dataset: Dataset, measured: Encoder) -> Dataset:
    """Return ``dataset`` scaled as a finished run has ``measured`` it; nothing is measured again.

    Raises:
        DataError: the run measured other columns.
    """
    places = tuple(column.place for column in dataset.unscaled if column.place is not None)
    if measured.places != places:
        raise DataError(
            f"the encoding of the run has {len(measured.places)} columns of numbers, and the data have {len(places)}: expected the same "
            "columns; give the run's own data, or put its encoding.json back"
        )
    is_number = any(column.place is None and not column.classes for column in dataset.unscaled)
    target = TargetScale(measured.target_center, measured.target_spread, measured.cuts) if is_number else None
    return scaled(dataset, measured.knots, target, measured.shares)


def by_bounds(dataset: Dataset) -> Dataset:
    """Return ``dataset`` with each column brought from its public bounds to [-1, 1]; nothing is measured.

    Raises:
        DataError: a column of numbers has no bounds.
    """
    numbers = [column for column in dataset.unscaled if not column.classes]
    timed = targets_in(dataset) == "survival"
    for column in numbers:
        if column.bounds is None and not (timed and column.place is None and cut_points(dataset)):
            raise DataError(f"the column {column.name!r} has no data.bounds, and nothing measures where its numbers lie: give them")
    knots = [within(column.bounds) for column in numbers if column.place is not None and column.bounds is not None]
    own = next((column.bounds for column in numbers if column.place is None), None)
    if timed:
        return scaled(dataset, knots, TargetScale(cuts=tuple(public_cuts(dataset, own))), ())
    if own is None:
        return scaled(dataset, knots, None, ())
    return scaled(dataset, knots, public_target(targets_in(dataset), own, 1.0)[0], ())


def targets_in(dataset: Dataset) -> Targets:
    """Return what is told of each row; a number where nothing says so."""
    return "number" if dataset.encoder is None else dataset.encoder.targets


def scaled(dataset: Dataset, knots: Sequence[Knots | None], target: TargetScale | None, shares: tuple[float, ...]) -> Dataset:
    """Return ``dataset`` with its unscaled inputs brought to deviates by ``knots``, in their order; None leaves a column out.

    Args:
        target: how a target of numbers is told; None where it is none.
        shares: of the classes, as they were measured; empty where they were not. See :class:`ldpfl.data.encoder.Encoder`.
    """
    places = tuple(column.place for column in dataset.unscaled if column.place is not None)

    def changed(samples: Samples, *, exactly: bool) -> Samples:
        inputs, targets = samples.inputs, samples.targets
        if places:  # tokens of texts have no scale
            inputs = scaled_by(samples.tensor, places, knots)
        if target is not None:
            targets = target.told(targets, exactly=exactly)
        return Samples(inputs, targets)

    target_scale = target or TargetScale()
    encoder = dataset.encoder
    if encoder is not None:
        scale = {"target_center": target_scale.center, "target_spread": target_scale.spread, "cuts": target_scale.cuts}
        encoder = encoder.model_copy(update={"places": places, "knots": tuple(knots), "shares": shares, **scale})
    # What was measured is a part of what is trained on: a run goes on with it, or not at all, for to measure anew would cost anew.
    content = f"{dataset.fingerprint} {list(knots)} {target_scale} {shares}"
    return replace(
        dataset,
        train=changed(dataset.train, exactly=False),
        test=changed(dataset.test, exactly=True),  # what is measured on is told as it is
        unscaled=(),
        shares=shares,
        unit=target_scale.spread,
        encoder=encoder,
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:16],
    )
