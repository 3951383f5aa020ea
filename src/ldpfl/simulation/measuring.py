"""Measure a table's columns before the first round, by the mechanism that protects the run.

Each client counts its records in the bins of each column, and protects the counts like a sum of gradients: replacing a record moves them by
no more than it may move a sum of clipped gradients. So a histogram is a release like that of a round, and is charged as one. Its noise is
chosen separately, so that measuring takes a stated share of the run's budget.

If persons are protected, all rows of a person together count as one record: each row counts one divided by their number, rounded down to
whole lattice points. Then a person's counts in each column are at least 0, and their sum is at most 1. Two such vectors lie no farther
apart than those of two records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import floor, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data import scaling
from ldpfl.data.dataset import Dataset
from ldpfl.data.encoder import Knots
from ldpfl.data.scaling import Floats, Histogram, TargetScale
from ldpfl.data.unscaled import Unscaled
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.privacy import Ledger
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import Channel
from ldpfl.server import histogram_event
from ldpfl.simulation.record_sums import NoisySum, ranges_of, released_sum
from ldpfl.util.randomness import Purpose


@dataclass(frozen=True, eq=False)
class ColumnStages:
    """The histograms of a table's columns that were released so far, and the bins of the next ones.

    Columns are measured in stages. Each stage releases one histogram for each column, with bins that follow from the stage before.

    Attributes:
        columns: all columns that are measured.
        edges: for each column, edges of the bins of its next histogram.
        stages: for each stage, one histogram for each column; None for a column of which nothing stood out from the noise.
    """

    columns: tuple[Unscaled, ...]
    edges: tuple[Floats, ...]
    stages: tuple[tuple[Histogram | None, ...], ...] = ()

    @classmethod
    def before_first_stage(cls, columns: Sequence[Unscaled]) -> ColumnStages:
        """Return the state before anything is measured."""
        return cls(tuple(columns), tuple(map(scaling.first_edges, columns)))

    @property
    def bins(self) -> list[int]:
        """Number of bins of the next histogram of each column."""
        return [ends.size - 1 for ends in self.edges]

    def counts(self, values: Sequence[Floats], rows: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a client's counts (bins,) in all columns' next histograms. Each of its ``rows`` (n,) adds an integer, ``points`` (n,)."""
        bin_of_rows = [scaling.bin_indices(column[rows], ends) for column, ends in zip(values, self.edges, strict=True)]
        return np.concatenate(_points_in_bins(bin_of_rows, self.bins, points))

    def after(self, total: NoisySum, point: int) -> ColumnStages:
        """Return the state after a stage from the ``total`` of all clients' counts, in which each row adds the integer ``point``."""
        counts = np.split(total.points / point, np.cumsum(self.bins)[:-1])
        histograms = [Histogram(ends, column_counts, total.noise / point) for ends, column_counts in zip(self.edges, counts, strict=True)]
        return self.with_histograms(histograms)

    def with_histograms(self, histograms: Sequence[Histogram]) -> ColumnStages:
        """Return the state after a stage with these noisy ``histograms``, one for each column."""
        clear = _without_noise_bins(histograms, self.columns, first=not self.stages)
        if self.stages:  # a column that was hidden in noise stays hidden
            clear = [histogram if before else None for histogram, before in zip(clear, self.stages[-1], strict=True)]
        edges = [
            ends if histogram is None or column.classes else scaling.next_edges(histogram)
            for ends, histogram, column in zip(self.edges, clear, self.columns, strict=True)
        ]
        return replace(self, edges=tuple(edges), stages=(*self.stages, tuple(clear)))

    def scaled(self, dataset: Dataset, *, remedy: str = "") -> Dataset:
        """Return ``dataset``, which has these columns, with all of these columns scaled.

        Args:
            remedy: end of the message if noise hides the target.

        Raises:
            DataError: the target is a number, and noise hides its range.
        """
        return _scaled(dataset, self.stages, remedy)


def points_per_row(steps: int, columns: int) -> int:
    """Return the number of lattice points that a row counts in each of ``columns`` columns. The clipping norm C is ``steps`` points.

    Replacing a record lowers one count of each column and raises another. With p points, c columns move by p sqrt(2 c) in all. A sum of
    gradients may move by 2 C, so the largest p has c p^2 <= 2 C^2.
    """
    point = floor(steps * sqrt(2 / columns))
    is_too_large = columns * point**2 > 2 * steps**2  # if the root was rounded up
    return point - 1 if is_too_large else point


def count_offset(point: int, mechanism: DpSgd) -> int:
    """Return the number that each client subtracts from every count before sending. The server adds it again, for each client.

    A row adds the integer ``point`` to a count. Each coordinate of a sum has room for ``steps`` for each record. With a single column,
    ``point`` exceeds ``steps``, so that a count of nearly all records would not fit. So half of the largest count is subtracted.
    This offset follows from the number of records that the mechanism assumes, which is public and does not depend on the data.
    """
    return floor(point * mechanism.records / 2) if point > mechanism.steps else 0


@dataclass(frozen=True)
class Measuring:
    """Measures the columns of a table.

    Attributes:
        seed: secret seed of the run's noise.
        mechanism: mechanism for sums over records, with the noise of measuring; None counts exactly, for runs that protect nothing.
        channel, colluding: as in :class:`~ldpfl.simulation.federation.Participation`.
    """

    seed: int
    mechanism: DpSgd | None
    channel: Channel
    colluding: int = 0

    def scaled(
        self, dataset: Dataset, parts: Sequence[NDArray[np.int64]], sharing: Sequence[NDArray[np.int64]] | None = None
    ) -> tuple[Dataset, Ledger]:
        """Return ``dataset`` with all columns scaled, and the ledger of the histograms that were released for it.

        Args:
            parts: for each client, its rows.
            sharing: for each of these rows, the number of rows that its person has at the client; None if records are protected.

        Raises:
            DataError: the target is a number, and noise hides its range.
        """
        values, stages = scaling.unscaled_values(dataset), ColumnStages.before_first_stage(dataset.unscaled)
        sharing = [np.ones_like(rows) for rows in parts] if sharing is None else sharing
        for stage in range(1, scaling.STAGES + 1):
            total, points_of_row = self._release_histograms(values, stages, parts, sharing, stage=stage)
            stages = stages.after(total, points_of_row)
        has_made_up_clients = dataset.clients is None and self.channel != "secure-sum"
        remedy = _REAL_CLIENTS.format(len(parts)) if has_made_up_clients else ""
        return stages.scaled(dataset, remedy=remedy), measuring_ledger(self.mechanism, len(parts), self.channel, self.colluding)

    def _release_histograms(
        self,
        values: Sequence[Floats],
        stages: ColumnStages,
        parts: Sequence[NDArray[np.int64]],
        sharing: Sequence[NDArray[np.int64]],
        *,
        stage: int,
    ) -> tuple[NoisySum, int]:
        """Release histograms: return the sum of all clients' counts, and the lattice points that a row, or all rows of a person, add."""
        if self.mechanism is None:
            rows = np.arange(len(values[0]))
            counts = stages.counts(values, rows, np.ones_like(rows)).astype(np.float64)
            return NoisySum(counts, noise=0.0), 1
        row_points = points_per_row(self.mechanism.steps, len(stages.columns))
        offset = count_offset(row_points, self.mechanism)
        edges = b"".join(ends.tobytes() for ends in stages.edges)

        def counts_of(clients: range) -> Tensor:
            """Return the counts (k, bins) that ``clients`` send, in lattice points, less the offset that the server adds again."""
            # ``parts`` has each client's rows, and ``sharing`` how many rows each row's person has: these share the points of one row.
            counts = [stages.counts(values, parts[client], row_points // sharing[client]) for client in clients]
            return torch.from_numpy(np.stack(counts) - offset)

        # The context leaves out the number of rounds, since columns are measured once, even if the run is extended later.
        size, purpose = sum(stages.bins), Purpose.MEASURING
        total = released_sum(counts_of, len(parts), size, self.mechanism, seed=self.seed, purpose=purpose, number=stage, context=edges)
        return NoisySum(total.points + offset * len(parts), total.noise), row_points


def measuring_ledger(mechanism: DpSgd | None, clients: int, channel: Channel, colluding: int = 0) -> Ledger:
    """Return the ledger of measuring columns with ``mechanism``. It is empty if ``mechanism`` is None, which protects nothing."""
    ledger = Ledger()
    if mechanism is not None:
        release = released(mechanism, ranges_of(1))
        for stage in range(1, scaling.STAGES + 1):
            ledger = ledger.charge(histogram_event(stage, release, clients, channel, colluding))
    return ledger


def _without_noise_bins(noisy: Sequence[Histogram], columns: Sequence[Unscaled], *, first: bool) -> list[Histogram | None]:
    """Return the histograms of a stage without bins that may be empty. Histograms of classes stay as they are.

    If all bins of a column may be empty, the ``first`` stage has None for it, and later stages keep its noisy histogram.
    """
    bins = sum(histogram.counts.size for histogram in noisy)
    pairs = zip(noisy, columns, strict=True)
    clear = [histogram if column.classes else histogram.without_insignificant_bins(bins, together=not first) for histogram, column in pairs]
    if first:
        return clear
    return [noisy_histogram if histogram is None else histogram for histogram, noisy_histogram in zip(clear, noisy, strict=True)]


def _scaled(dataset: Dataset, stages: Sequence[Sequence[Histogram | None]], remedy: str) -> Dataset:
    """Return ``dataset`` scaled by the histograms of all ``stages``, with notes on columns that may be scaled wrongly.

    ``remedy`` is appended to errors.
    """
    scales = _ColumnScales()
    for number, column in enumerate(dataset.unscaled):
        last, seen = stages[-1][number], [histogram for stage in stages if (histogram := stage[number]) is not None]
        if column.classes:
            scales.shares += _shares(seen, column)
        elif column.place is None:
            scales.add_numeric_target(column, seen, last, dataset, remedy)
        else:
            scales.add_input(column, seen, last)
    numbers = [last for last, column in zip(stages[-1], dataset.unscaled, strict=True) if last is not None and not column.classes]
    # For times to an event, the only share is that of the times that end with an event.
    shares = scaling.estimate_hazards(scales.ended, scales.shares[0]) if scales.ended else tuple(scales.shares)
    inputs = dataset.train.tensor.shape[1] if scales.knots else 0
    return scaling.apply_scale(dataset.with_notes(*scales.all_notes(numbers, inputs)), scales.knots, scales.target, shares)


@dataclass
class _ColumnScales:
    """Scales of a table's columns, collected column by column, and what notes say about them.

    Attributes:
        knots: for each input, the points between which its values are interpolated; None for an input that is left out.
        target: scale of a target that is a number, a count or a time to an event.
        shares: shares of the target's classes. For a count, its mean stands in their place.
        ended: share of the times to an event that lie in each interval.
        target_notes: notes on a target that is a number or a count.
        hidden, by_bounds, rough: names of the columns that are left out, scaled by their bounds alone, or perhaps scaled wrongly.
    """

    knots: list[Knots | None] = field(default_factory=list)
    target: TargetScale | None = None
    shares: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    target_notes: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    by_bounds: list[str] = field(default_factory=list)
    rough: list[str] = field(default_factory=list)

    def add_input(self, column: Unscaled, seen: Sequence[Histogram], last: Histogram | None) -> None:
        """Add an input ``column``, whose ``last`` histogram is None if noise hides it. ``seen`` are its histograms of all stages."""
        knots = None if last is None else scaling.quantile_knots(last)
        if knots is not None:
            if scaling.is_scale_unreliable(seen, knots):
                self.rough.append(column.name)
        elif column.bounds is not None:
            self.by_bounds.append(column.name)
            knots = scaling.bounds_knots(column.bounds)
        else:
            self.hidden.append(column.name)
        self.knots.append(knots)

    def add_numeric_target(
        self, column: Unscaled, seen: Sequence[Histogram], last: Histogram | None, dataset: Dataset, remedy: str
    ) -> None:
        """Add a target that is a number, a count or a time to an event; see :meth:`add_input`.

        Raises:
            DataError: noise hides the target, and nothing else gives its range. The message ends with ``remedy``.
        """
        kind = scaling.target_kind(dataset)
        if kind == "survival":
            self.target, self.ended = scaling.cuts_from_histogram(last, dataset, column.bounds, remedy)
            return
        self.target, mean = scaling.target_scale_from_histogram(last, kind, column.bounds, remedy)
        if kind == "count":
            self.shares.append(mean)
        if last is None:
            return
        if column.bounds is None and scaling.reaches_largest_value(last):
            self.target_notes.append(
                f"values of {column.name} reach {scaling.LARGEST:.2g}, and larger values count as this number in measuring and "
                "training: divide the column by a publicly known number, or give data.bounds"
            )
        elif (ends := scaling.bin_with_nearly_all_rows(last)) is not None:
            self.target_notes.append(_note_on_one_value(column.name, *ends))
        elif (knots := scaling.quantile_knots(last)) and scaling.is_scale_unreliable(seen, knots):
            self.rough.append(column.name)

    def all_notes(self, numbers: Sequence[Histogram], inputs: int) -> Iterator[str]:
        """Yield the notes on all columns.

        Args:
            numbers: the last histograms of the columns of numbers.
            inputs: number of the model's inputs.
        """
        yield from self.target_notes
        if self.hidden:
            nothing_left = "So the model has no input left, and predicts the same for all rows. " if len(self.hidden) == inputs else ""
            yield (
                "columns left out, because their values were not seen above the noise of measuring: "
                f"{_named(self.hidden)}. {nothing_left}To include them, set data.bounds for them (for many columns also "
                f'data.scaling = "bounds", which measures nothing), set a larger privacy.measuring_share or target epsilon, or give more '
                f"rows{_LARGER_CLIENTS}"
            )
        if self.by_bounds:
            yield f"columns scaled by data.bounds alone, since nothing was seen above the noise: {_named(self.by_bounds)}"
        if numbers and scaling.has_too_few_rows(numbers):
            yield (
                "the columns were measured on few rows or persons for this epsilon, so about one in ten may be scaled wrongly: give "
                "data.bounds for the columns whose usual range is known"
            )
        if self.rough:
            yield (
                "columns whose scale may be wrong, since they were seen only roughly above the noise of measuring: "
                f"{_named(self.rough)}. Narrower data.bounds, a larger privacy.measuring_share or target epsilon, or more rows "
                f"help{_LARGER_CLIENTS}"
            )


_MOST_NAMES = 20
"""Maximum number of columns that a note names."""


def _named(columns: Sequence[str]) -> str:
    """Return the names of ``columns``, and how many more there are if there are too many for a note."""
    more = len(columns) - _MOST_NAMES
    return ", ".join(columns[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


_LARGER_CLIENTS = "; without a secure sum each client adds noise of its own, so fewer and larger clients help too"
"""End of notes on columns that noise hides."""

_REAL_CLIENTS = (
    "; or, since rows were dealt to {:,} made-up clients, each with noise of its own, name the column of the real clients (data.client) or "
    "set a smaller clients.count"
)
"""End of messages on a target that noise hides, if the simulation made up the clients. Takes their number."""

NOT_SEEN_TO_VARY = "they were not seen to vary"
"""Part of the note on a target with nearly one value."""


def _note_on_one_value(name: str, low: float, high: float) -> str:
    """Return a note on a target of which nearly all values were measured to lie between ``low`` and ``high``."""
    place = "close to 0" if low <= 0 <= high and high - low < _CLOSE else f"between {low:.10g} and {high:.10g}"
    return (
        f"nearly all values of {name} were measured to lie {place}: {NOT_SEEN_TO_VARY}, so the model and its figures may say nothing; "
        "choose another target, subtract a publicly known offset from it, or give closer data.bounds. If it has two values, set --task "
        "classification (task.name)"
    )


_CLOSE = 1e-6
"""Width of a bin around 0 below which a message does not state its ends."""


def _shares(histograms: Sequence[Histogram], column: Unscaled) -> list[float]:
    """Return the share of each class of ``column``, or of the value 1 of a label, by the mean of its ``histograms``; never 0 or 1."""
    counts = np.mean([histogram.counts for histogram in histograms], axis=0)
    noise = histograms[0].noise / sqrt(len(histograms))
    # A count below its noise may be as large as the noise. An exact count is taken as one record at least.
    counts = np.maximum(counts, max(noise, 1.0))
    share = counts / counts.sum()
    return share.tolist() if column.label is None else [float(share[1])]


def _points_in_bins(bin_of_rows: Sequence[NDArray[np.int64]], bins: Sequence[int], points: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return for each column the sum of the rows' ``points`` (n,) in each bin (bins,).

    ``bin_of_rows`` has for each column the bin (n,) of each row, -1 for a row without a bin.
    """
    has_bin = [column >= 0 for column in bin_of_rows]
    return [
        np.bincount(column[rows], weights=points[rows], minlength=size).astype(np.int64)  # exact below 2^53
        for column, rows, size in zip(bin_of_rows, has_bin, bins, strict=True)
    ]
