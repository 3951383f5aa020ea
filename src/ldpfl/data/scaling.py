"""Scale a table's columns by quantiles that noisy histograms estimate.

Each column is measured by :data:`STAGES` histograms, one after another.

- The first histogram of a column without public bounds has a bin for each power of two. It finds the column's magnitude in any unit.
- The first histogram of a column with bounds has equal bins within the bounds, finer ones near 0, and wide ones beyond. So bounds say
  where to look closely, and values beyond them are still seen.
- Each later histogram has bins that hold about equally many rows, by the histogram before it.

The last histogram gives the quantiles, and each value becomes the standard normal deviate of its quantile. So skewed columns and columns
in any unit end on one scale, and no value lies far from 0. A column that is not skewed is scaled by a straight line through two quantiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from ldpfl.data.dataset import Dataset
from ldpfl.data.encoder import Encoder, Knots, scale_columns
from ldpfl.data.samples import Samples
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import DataError
from ldpfl.tasks import Targets, absent_targets
from ldpfl.tasks.outcomes import LINEAR_FROM, interval_targets, with_times

Floats = NDArray[np.float64]

STAGES = 4
"""Number of histograms of each column, one after another."""

_POWERS = 2.0 ** np.arange(-30, 65)
"""Bin edges of the first histogram, on either side of 0. The bin in the middle holds values that are nearly 0."""
LARGEST = float(_POWERS[-1])
"""Values of a column without bounds are measured up to this one."""
_MAX_BINS, _MIN_BINS = 16, 4
"""Number of bins of a later histogram: the maximum, and the minimum, which large noise enforces."""
_EXTRA_BINS_NEAR_ZERO = 4
"""Number of additional edges on either side of 0 within bounds. Each bin is a sixteenth as wide as the one before."""
_MIN_VARIANCE = 0.05
"""A column whose deviates are not shown to have this variance gets a note that its scale may be too narrow."""
_VARIANCE_MARGIN = 3.0
"""Number of standard deviations of noise that are subtracted from the lower bound on that variance."""
_CANDIDATE_MEANS = np.linspace(-3, 3, 61)
"""Means over which the lower bound on a column's variance is minimised."""
_MIN_COLUMN_SIGNAL = 10.0
"""Rows in a column's last histogram, in standard deviations of its noise. With fewer, most of its bins may be noise."""
_MIN_TABLE_SIGNAL = 40.0
"""The same for all columns of a table. With fewer, about one column in ten gets a wrong scale that no other check detects."""
_MIN_BIN_SIGNAL = 6.0
"""Rows in a bin of a later histogram, in standard deviations of its noise. With fewer, the histogram gets fewer bins."""
_TAIL = 0.01
"""Quantiles are clipped to [0.01, 0.99]. So an outlier becomes at most about 2.3, the normal deviate of 0.99."""
_SHOULDER, _FARTHEST = 1.28, 3.0
"""Normal deviate of the quantile 0.9, which with that of 0.1 gives the straight line; and the largest deviate on that line."""
_SKEWED = 0.4
"""A column is skewed if its median is this far from the middle of its quantiles 0.1 and 0.9, as a share of half their distance."""
_FALSE_ALARM = 0.005
"""Probability that, in a whole table, some empty bin of the first histograms looks as if it held rows."""
_REACH = 6.0
"""Targets for training are clipped to this many standard deviations from their mean."""
_MAX_MEAN = 10.0
"""Largest initial mean of a count, in units of its spread. The unit of a count with a larger mean is a tenth of the mean."""
_MAX_BIN_SHARE = 0.95
"""Share of a target's rows in one bin of its last histogram above which the target gets a note that it was not seen to vary."""
_MIN_MEAN = 1e-3
"""Smallest initial mean of a count, in units of its spread, and smallest initial hazard."""
_MAX_HAZARD = 0.9
"""Largest initial hazard. A hazard of 1 would have infinite log odds."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """The noisy counts of one column.

    Attributes:
        edges: (bins + 1,) ascending bin edges.
        counts: (bins,) number of rows in each bin, with noise.
        noise: standard deviation of that noise.
    """

    edges: Floats
    counts: Floats
    noise: float

    def cumulative(self) -> Floats | None:
        """Return the share of rows below each edge (bins + 1,), or None if no bin has a positive count."""
        below: Floats = np.zeros(self.counts.size + 1)
        below[1:] = np.cumsum(np.maximum(self.counts, 0.0))
        if not below[-1] > 0:
            return None
        below /= below[-1]
        return below

    def without_insignificant_bins(self, bins: int, *, together: bool) -> Histogram | None:
        """Return the histogram with 0 in all bins that may be empty, or None if all may be.

        A bin is kept if its count stands out from the noise, or if a neighbour's does.

        Args:
            bins: number of bins in all histograms of the table. The more there are, the higher the threshold is, so that hardly ever any
                empty bin among them stands out.
            together: whether all bins between the first and the last one that stand out are kept too.
        """
        # A normal quantile of the noise. Without noise, a count of at least 1 stands out.
        threshold = max(-float(ndtri(_FALSE_ALARM / bins)) * self.noise, 0.5)
        above_noise = np.flatnonzero(self.counts > threshold)
        if not above_noise.size:
            return None
        is_kept = np.zeros(self.counts.size, dtype=bool)
        ranges = [(above_noise[0], above_noise[-1])] if together else [(index, index) for index in above_noise]
        for first, last in ranges:
            is_kept[max(0, first - 1) : last + 2] = True  # with a neighbour on either side
        return replace(self, counts=np.where(is_kept, np.maximum(self.counts, 0.0), 0.0))


def first_edges(column: Unscaled) -> Floats:
    """Return the edges of a column's first histogram: one bin for each class, or for numbers the bins that the module's docstring names."""
    if column.classes:
        return np.arange(column.classes + 1, dtype=np.float64) - 0.5
    if column.bounds is None:
        return np.concatenate([-_POWERS[::-1], _POWERS])
    low, high = column.bounds
    width = (high - low) / _MAX_BINS  # of a bin within the bounds
    near_zero = width / 16.0 ** np.arange(1, _EXTRA_BINS_NEAR_ZERO + 1)
    near_zero = np.concatenate([-near_zero, near_zero])
    near_zero = near_zero[(near_zero > low) & (near_zero < high)]
    beyond = np.concatenate([-_POWERS[::-4], _POWERS[::4]])  # every fourth power of two: these bins are wide
    # A target has no bins beyond its bounds.
    beyond = beyond[(beyond < low - width) | (beyond > high + width)] if column.place is not None else beyond[:0]
    return np.unique(np.concatenate([np.linspace(low, high, _MAX_BINS + 1), near_zero, beyond]))


def next_edges(histogram: Histogram) -> Floats:
    """Return the edges of the next histogram, whose bins hold about equally many rows; unchanged edges if ``histogram`` is empty."""
    below = histogram.cumulative()
    if below is None:
        return histogram.edges
    first = int(np.flatnonzero(np.diff(below) > 0)[0])  # the first bin with rows, whose lower edge becomes the first new edge
    rows = np.maximum(histogram.counts, 0.0).sum()
    bins = int(np.clip(rows / max(_MIN_BIN_SIGNAL * histogram.noise, 1e-9), _MIN_BINS, _MAX_BINS))  # 1e-9: the noise may be 0
    # Each new edge is the quantile of one of these shares, interpolated within the old bin in which it lies.
    shares = np.minimum(np.linspace(0, 1, bins + 1)[1:], below[-1])
    ends = np.searchsorted(below, shares)  # edges at which bins with rows end, so the division below is not by 0
    within_bin = (shares - below[ends - 1]) / (below[ends] - below[ends - 1])
    quantiles = histogram.edges[ends - 1] + within_bin * (histogram.edges[ends] - histogram.edges[ends - 1])
    edges = np.unique(np.concatenate([histogram.edges[first : first + 1], quantiles]))
    return edges if edges.size > 2 else histogram.edges


def quantile_knots(histogram: Histogram) -> Knots | None:
    """Return the knots that map a column's values to normal deviates of mean 0, or None if the histogram shows no rows.

    The knots are the middles of the bins, each with the deviate of its middle quantile. So many equal values get the deviate of their
    middle quantile. Two knots at the outer edges extrapolate by half a step. For a column that is not skewed, the knots are the two ends
    of a straight line.
    """
    below = histogram.cumulative()
    if below is None:
        return None
    shares, edges = np.diff(below), histogram.edges
    deviates = ndtri(np.clip(below[:-1] + shares / 2, _TAIL, 1 - _TAIL))
    deviates -= shares @ deviates  # makes the mean over the rows 0
    low = deviates[0] - (deviates[1] - deviates[0]) / 2
    high = deviates[-1] + (deviates[-1] - deviates[-2]) / 2
    values = np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    knots = tuple(values.tolist()), (float(low), *deviates.tolist(), float(high))
    return _straight_line(knots) or knots


def _straight_line(knots: Knots) -> Knots | None:
    """Return the straight line that replaces ``knots`` if the column is not skewed; None if it is.

    Only two quantiles decide on a line, so noise distorts it less. Equal steps of the column stay equal.
    """
    values, deviates = knots
    low, middle, high = np.interp(np.array([-_SHOULDER, 0.0, _SHOULDER]), deviates, values)
    # The line goes through (low, -_SHOULDER) and (high, _SHOULDER), and ends at the deviates -_FARTHEST and _FARTHEST.
    center, reach = (high + low) / 2, (high - low) / 2 * _FARTHEST / _SHOULDER
    if not (isfinite(reach) and abs(center - middle) < _SKEWED * (high - low) / 2):
        return None
    return (float(center - reach), float(center + reach)), (-_FARTHEST, _FARTHEST)


def is_scale_unreliable(histograms: Sequence[Histogram], knots: Knots) -> bool:
    """Return whether a column's scale by ``knots`` is unreliable: the scaled values may vary much less than they should.

    It is unreliable if the ``histograms`` hold hardly more rows than noise, or do not show enough variance. Each histogram gives a lower
    bound on the variance, and the best bound counts. The two values of a 0/1 column, for example, lie in different bins of one histogram.
    """
    last = histograms[-1]
    if last.noise == 0:  # exact counts give a reliable scale
        return False
    rows = np.maximum(last.counts, 0.0).sum()
    is_mostly_noise = bool(rows < _MIN_COLUMN_SIGNAL * last.noise)
    return is_mostly_noise or max(_least_variance(histogram, knots) for histogram in histograms) < _MIN_VARIANCE


def has_too_few_rows(histograms: Sequence[Histogram]) -> bool:
    """Return whether a table has so few rows, relative to the noise of its last ``histograms``, that some scale is probably wrong."""
    return all(np.maximum(histogram.counts, 0.0).sum() < _MIN_TABLE_SIGNAL * histogram.noise for histogram in histograms)


def _least_variance(histogram: Histogram, knots: Knots) -> float:
    """Return a lower bound on the variance of a column's values after scaling by ``knots``, wherever in their bins its rows lie.

    For a candidate mean, each row contributes the squared distance of the mean from the row's bin. A margin for the noise is subtracted.
    The bound is the minimum over the candidate means.
    """
    rows = np.maximum(histogram.counts, 0.0)
    edge_deviates = np.interp(histogram.edges, *knots)
    means = _CANDIDATE_MEANS[:, None]
    distances = np.maximum(np.maximum(edge_deviates[:-1] - means, means - edge_deviates[1:]), 0.0)  # 0 within a bin
    squares = distances**2
    # The counts' noises are independent, so the noise of the sum below has this standard deviation, times _VARIANCE_MARGIN.
    margin = _VARIANCE_MARGIN * histogram.noise * np.sqrt((squares[:, rows > 0] ** 2).sum(axis=1))
    return float(((squares @ rows - margin) / rows.sum()).min())


def bounds_knots(bounds: tuple[float, float]) -> Knots:
    """Return the knots that map a column linearly from its public ``bounds`` to [-1, 1]."""
    return bounds, (-1.0, 1.0)


def center_and_spread(histogram: Histogram, *, whole: bool = False) -> tuple[float, float]:
    """Estimate the mean and the standard deviation of a column, as if its values were uniform within each bin; NaN if it is empty.

    Args:
        whole: whether values are taken to be uniform on the whole numbers of each bin. This suits counts, many of which are 0 or 1: they
            lie at the low end of their bin.
    """
    rows = np.maximum(histogram.counts, 0.0)
    if not rows.sum() > 0:
        return np.nan, np.nan
    share = rows / rows.sum()
    low, high = histogram.edges[:-1], histogram.edges[1:]
    middles, variances = (low + high) / 2, (high - low) ** 2 / 12  # mean and variance of the uniform distribution on a bin
    if whole:
        first, last = np.ceil(low), np.ceil(high) - 1
        has_whole = last >= first
        middles = np.where(has_whole, (first + last) / 2, middles)
        variances = np.where(has_whole, ((last - first + 1) ** 2 - 1) / 12, 0.0)
    center = float(share @ middles)
    return center, float(np.sqrt(share @ ((middles - center) ** 2 + variances)))


_MAX_COUNT = exp(LINEAR_FROM)
"""Count, in units of spread, up to which the loss of a count has a minimum: the expected count grows no faster beyond."""


@dataclass(frozen=True)
class TargetScale:
    """How a numeric target is scaled.

    Attributes:
        center, spread: in the column's own unit. A scaled target is ``(target - center) / spread``.
        cuts: ascending times at which intervals end; empty unless the target is a time.
        reach: targets for training are clipped to [-reach, reach] after scaling.
    """

    center: float = 0.0
    spread: float = 1.0
    cuts: tuple[float, ...] = ()
    reach: float = _REACH

    def scaled(self, targets: Tensor, *, for_evaluation: bool) -> Tensor:
        """Return ``targets`` (N, ...) scaled as the task takes them.

        Args:
            for_evaluation: whether targets are left unclipped, and exact times follow their intervals in the result.
        """
        if self.cuts:
            times, events = targets.unbind(dim=1)
            intervals = interval_targets(times, events, torch.tensor(self.cuts))
            return with_times(intervals, times, events) if for_evaluation else intervals
        reach = float("inf") if for_evaluation else self.reach
        return ((targets.double() - self.center) / self.spread).clamp(-reach, reach).float()


def target_scale_from_histogram(
    histogram: Histogram | None, targets: Targets, bounds: tuple[float, float] | None, remedy: str = ""
) -> tuple[TargetScale, float]:
    """Return the scale of a numeric target, by its histogram or else its ``bounds``, and a count's mean in units of spread (else 1).

    Args:
        remedy: end of the message if noise hides the target.

    Raises:
        DataError: the target has no bounds, and noise hides it or all its values are equal.
    """
    center, spread = (np.nan, np.nan) if histogram is None else center_and_spread(histogram, whole=targets == "count")
    if not spread > 0 and bounds is not None:
        return target_scale_from_bounds(targets, bounds, reach=_REACH)
    if not isfinite(center):
        raise DataError(
            f"the noise was too large to measure the target's range: set data.bounds for it, add rows, or raise epsilon{remedy}"
        )
    if not spread > 0:
        raise DataError(f"all targets were measured to be {center:.6g}, expected targets that vary: name another column in data.target")
    if targets != "count":
        return TargetScale(center, spread), 1.0
    spread = max(spread, center / _MAX_MEAN)  # with a smaller spread, all counts would be clipped far below their mean
    return TargetScale(center=0.0, spread=spread, reach=_MAX_COUNT), max(center / spread, _MIN_MEAN)


def bin_with_nearly_all_rows(histogram: Histogram) -> tuple[float, float] | None:
    """Return the ends of the bin that holds nearly all rows of a column's last ``histogram``, or None if no bin does.

    Each histogram of a column chooses the bins of the next, so that the bins of the last hold about equally many rows. If one bin still
    holds nearly all, these rows have one value, or the histograms did not resolve how they differ.
    """
    rows = np.maximum(histogram.counts, 0.0)  # noisy counts may be negative
    fullest = int(rows.argmax())
    ends = float(histogram.edges[fullest]), float(histogram.edges[fullest + 1])
    return ends if rows[fullest] > _MAX_BIN_SHARE * rows.sum() else None


def reaches_largest_value(histogram: Histogram) -> bool:
    """Return whether a last ``histogram`` reaches :data:`LARGEST`, where all larger values of a column without bounds are counted."""
    return max(-float(histogram.edges[0]), float(histogram.edges[-1])) >= LARGEST


def _target_reach(targets: Targets) -> float:
    """Return how many spreads from the center a target for training may lie. Counts may lie further, since their center is 0."""
    return _MAX_COUNT if targets == "count" else _REACH


def target_scale_from_bounds(targets: Targets, bounds: tuple[float, float], reach: float) -> tuple[TargetScale, float]:
    """Return the scale of a numeric target from its public ``bounds`` alone, and a count's mean in units of spread (else 1).

    ``reach`` limits scaled targets, see :class:`TargetScale`. The mean and the spread of a count are assumed to be a quarter of its upper
    bound. The upper bound is then 4 on the scale, so scaled counts are never clipped below 4.
    """
    low, high = bounds
    if targets == "count":
        return TargetScale(center=0.0, spread=high / 4, reach=max(reach, 4.0)), 1.0
    return TargetScale((low + high) / 2, (high - low) / 2, reach=reach), 1.0


def cuts_from_histogram(
    histogram: Histogram | None, dataset: Dataset, bounds: tuple[float, float] | None, remedy: str = ""
) -> tuple[TargetScale, list[float]]:
    """Return the intervals of a time to an event, and the share of all times in each interval.

    Intervals end at ``data.cut_points``, or else at quantiles. Where noise hides the quantiles, they have equal lengths within ``bounds``.

    Args:
        remedy: end of the message if noise hides the times.

    Raises:
        DataError: there are neither cut points nor bounds, and noise hides the quantiles.
    """
    cuts = cuts_from_settings(dataset, bounds)
    below = None if histogram is None else histogram.cumulative()
    if histogram is None or below is None:
        if not cuts:
            raise DataError(f"the noise was too large to measure the times: set data.cut_points, add rows, or raise epsilon{remedy}")
        return TargetScale(cuts=tuple(cuts)), [1 / (len(cuts) + 1)] * len(cuts)  # shares are not known, so they are taken as equal
    if not configured_cut_points(dataset):
        # Interpolation needs strictly rising shares, so each edge adds a tiny one. Without times between two edges, shares would be equal.
        rising = below + np.linspace(0, 1e-9, below.size)
        cuts = np.interp(np.arange(1, dataset.outputs + 1) / (dataset.outputs + 1), rising, histogram.edges).tolist()
    return TargetScale(cuts=tuple(cuts)), np.diff(np.interp(cuts, histogram.edges, below), prepend=0.0).tolist()


def configured_cut_points(dataset: Dataset) -> list[float]:
    """Return the ends of intervals from ``data.cut_points``; empty if they are measured."""
    return [] if dataset.encoder is None else dataset.encoder.data.cut_points


def cuts_from_settings(dataset: Dataset, bounds: tuple[float, float] | None) -> list[float]:
    """Return the ends of intervals by public settings alone: ``data.cut_points``, or ``bounds``; empty if neither is set."""
    return configured_cut_points(dataset) or ([] if bounds is None else np.linspace(0, bounds[1], dataset.outputs + 1)[1:].tolist())


def estimate_hazards(ended: Sequence[float], events: float) -> tuple[float, ...]:
    """Estimate the hazard of each interval.

    Args:
        ended: share of all times that lie in each interval.
        events: share of all times that end with an event rather than by censoring.
    """
    shares = np.asarray(ended)
    at_risk = 1 - np.cumsum(shares) + shares  # share of times that reach the interval's beginning
    estimates = np.clip(events * shares / np.maximum(at_risk, _MIN_MEAN), _MIN_MEAN, _MAX_HAZARD)
    return tuple(estimates.tolist())


def bin_indices(values: Floats, edges: Floats) -> NDArray[np.int64]:
    """Return the index of the bin of each value (N,). Values beyond the edges get the outer bins, and NaN gets -1."""
    bins = np.searchsorted(edges, values, side="right") - 1
    return np.where(np.isnan(values), -1, np.clip(bins, 0, edges.size - 2)).astype(np.int64)


def unscaled_values(dataset: Dataset) -> list[Floats]:
    """Return the values (N,) of each unscaled column in the train samples."""
    return [_values(dataset.train, column) for column in dataset.unscaled]


def _values(samples: Samples, column: Unscaled) -> Floats:
    """Return the values (N,) of ``column``. A column with a place is an input. Any other is a target, and NaN in rows without targets."""
    if column.place is not None:
        return samples.tensor[:, column.place].double().numpy()
    targets = samples.targets if samples.targets.dim() == 1 else samples.targets[:, column.label]
    # The mask (N,) is of rows: if there are several targets, a row is without targets if it lacks all of them.
    return targets.double().where(~absent_targets(samples.targets), torch.nan).numpy()


def scaled_like_run(dataset: Dataset, measured: Encoder) -> Dataset:
    """Return ``dataset`` scaled by the encoding that a finished run ``measured``. Nothing is measured again.

    Raises:
        DataError: the run measured other columns.
    """
    places = tuple(column.place for column in dataset.unscaled if column.place is not None)
    if measured.places != places:
        raise DataError(
            f"the run's encoding has {len(measured.places)} columns of numbers, but the data have {len(places)}: use the run's data, or "
            "restore its encoding.json"
        )
    is_number = any(column.place is None and not column.classes for column in dataset.unscaled)
    reach = _target_reach(target_kind(dataset))
    target = TargetScale(measured.target_center, measured.target_spread, measured.cuts, reach) if is_number else None
    return apply_scale(dataset, measured.knots, target, measured.shares)


def scaled_by_bounds(dataset: Dataset) -> Dataset:
    """Return ``dataset`` with each column scaled from its public bounds to [-1, 1]. Nothing is measured.

    Raises:
        DataError: a column of numbers has no bounds.
    """
    numbers = [column for column in dataset.unscaled if not column.classes]
    is_survival = target_kind(dataset) == "survival"
    for column in numbers:  # the time of survival needs no bounds if cut points are set
        if column.bounds is None and not (is_survival and column.place is None and configured_cut_points(dataset)):
            raise DataError(f"the column {column.name!r} has no bounds, and this run does not measure them: add it to data.bounds")
    knots = [bounds_knots(column.bounds) for column in numbers if column.place is not None and column.bounds is not None]
    target_bounds = next((column.bounds for column in numbers if column.place is None), None)
    if is_survival:
        return apply_scale(dataset, knots, TargetScale(cuts=tuple(cuts_from_settings(dataset, target_bounds))), ())
    if target_bounds is None:
        return apply_scale(dataset, knots, target=None, shares=())
    target_scale, _ = target_scale_from_bounds(target_kind(dataset), target_bounds, reach=1.0)
    return apply_scale(dataset, knots, target_scale, shares=())


def target_kind(dataset: Dataset) -> Targets:
    """Return the kind of the target; a number if the data set has no encoder."""
    return "number" if dataset.encoder is None else dataset.encoder.targets


def apply_scale(dataset: Dataset, knots: Sequence[Knots | None], target: TargetScale | None, shares: tuple[float, ...]) -> Dataset:
    """Return ``dataset`` with its unscaled inputs and its target scaled.

    Args:
        knots: for each unscaled input, in order, the knots that scale it. None sets the input to 0.
        target: scale of a numeric target; None if the target is not a number.
        shares: measured shares of the classes; empty if they were not measured. See :class:`ldpfl.data.encoder.Encoder`.
    """
    places = tuple(column.place for column in dataset.unscaled if column.place is not None)

    def scaled_samples(samples: Samples, *, for_evaluation: bool) -> Samples:
        """Return ``samples`` with inputs and targets scaled; targets are clipped unless they are ``for_evaluation``."""
        inputs, targets = samples.inputs, samples.targets
        if places:  # tokens of texts have no scale
            inputs = scale_columns(samples.tensor, places, knots)
        if target is not None:
            targets = target.scaled(targets, for_evaluation=for_evaluation)
        return Samples(inputs, targets)

    target_scale = target or TargetScale()
    encoder = dataset.encoder
    if encoder is not None:
        scale = {"target_center": target_scale.center, "target_spread": target_scale.spread, "cuts": target_scale.cuts}
        encoder = encoder.model_copy(update={"places": places, "knots": tuple(knots), "shares": shares, **scale})
    # The measured scale is part of the fingerprint: a run resumes only with the same scale, since measuring again would spend budget again.
    content = f"{dataset.fingerprint} {list(knots)} {target_scale} {shares}"
    return replace(
        dataset,
        train=scaled_samples(dataset.train, for_evaluation=False),
        unclipped=None if target is None or target.cuts else target.scaled(dataset.train.targets, for_evaluation=True),
        test=scaled_samples(dataset.test, for_evaluation=True),
        unscaled=(),
        shares=shares,
        unit=target_scale.spread,
        encoder=encoder,
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:16],
    )
