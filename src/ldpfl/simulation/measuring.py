"""Measure a table's columns before the first round, by the mechanism that protects the run.

Each client counts how many of its records fall into which bin of each column, and protects the counts like a sum of gradients: replacing a
record moves them by no more than it may move a sum of clipped gradients. So a histogram is a release like that of a round, and is charged
as one. It has noise of its own size, so that measuring takes a stated share of the run's budget.

Where persons are protected, all rows of a person together count as one record: each of them by one over their number, in whole lattice
points and rounded down. Of each column a person then adds counts that are no less than 0 and come to no more than 1, and two such vectors
lie no farther apart than two records do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data import scaling
from ldpfl.data.encoder import Knots
from ldpfl.data.samples import Dataset
from ldpfl.data.scaling import Floats, Histogram
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
    """What the histograms that were released so far tell of a table's columns, and where the next ones have their bins.

    Attributes:
        columns: all that are measured.
        edges: of the next histogram of each column.
        stages: histograms of each stage, one a column; None for a column of which nothing stood out of the noise.
    """

    columns: tuple[Unscaled, ...]
    edges: tuple[Floats, ...]
    stages: tuple[tuple[Histogram | None, ...], ...] = ()

    @classmethod
    def begun(cls, columns: Sequence[Unscaled]) -> ColumnStages:
        """Return the state before anything is measured."""
        return cls(tuple(columns), tuple(map(scaling.first_edges, columns)))

    @property
    def bins(self) -> list[int]:
        """Number of bins of the next histogram of each column."""
        return [own.size - 1 for own in self.edges]

    def counts(self, values: Sequence[Floats], rows: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what a client with ``rows`` of ``values`` adds to the next histograms (bins,): ``points`` for a row, in each column."""
        places = [scaling.place(column[rows], own) for column, own in zip(values, self.edges, strict=True)]
        return np.concatenate(_counted(places, self.bins, points))

    def after(self, total: NoisySum, point: int) -> ColumnStages:
        """Return the state after the ``total`` of all clients' counts, in which a row counts ``point``."""
        split = np.split(total.points / point, np.cumsum(self.bins)[:-1])
        return self.with_histograms([Histogram(ends, own, total.noise / point) for ends, own in zip(self.edges, split, strict=True)])

    def with_histograms(self, found: Sequence[Histogram]) -> ColumnStages:
        """Return the state after the histograms ``found``, one a column."""
        clear = _clear(found, self.columns, first=not self.stages)
        if self.stages:
            clear = [own if before else None for own, before in zip(clear, self.stages[-1], strict=True)]
        edges = [
            own if histogram is None or column.classes else scaling.next_edges(histogram)
            for own, histogram, column in zip(self.edges, clear, self.columns, strict=True)
        ]
        return replace(self, edges=tuple(edges), stages=(*self.stages, tuple(clear)))

    def scaled(self, dataset: Dataset) -> Dataset:
        """Return ``dataset``, which has these columns, with all of them scaled.

        Raises:
            DataError: the target is a number, and noise hides where it lies.
        """
        return _scaled(dataset, self.stages)


def point_of(steps: int, columns: int) -> int:
    """Return how many lattice points a row counts in each of its ``columns``, where the clipping norm has ``steps``.

    Replacing a record moves one count of each column down and one up: by sqrt(2 c) points in all, where a gradient may move by 2 C.
    """
    point = floor(steps * sqrt(2 / columns))
    return point - (columns * point**2 > 2 * steps**2)


def taken_off(point: int, mechanism: DpSgd) -> int:
    """Return how many points each client takes off every count before it sends them. The sum gets them back.

    A sum's lattice holds ``steps`` points a record in each coordinate. The ``point`` of a single column is longer, so that a count of
    nearly all records would not fit. Half of what the stated number of records gives is public, and not a figure of the data.
    """
    return floor(point * mechanism.records / 2) if point > mechanism.steps else 0


@dataclass(frozen=True)
class Measuring:
    """How columns are measured.

    Attributes:
        seed: of the run.
        mechanism: protects sums over records, with the noise of measuring; None counts exactly, where nothing is protected anyway.
        channel, colluding: as in the rounds.
    """

    seed: int
    mechanism: DpSgd | None
    channel: Channel
    colluding: int = 0

    def scaled(
        self, dataset: Dataset, parts: Sequence[NDArray[np.int64]], sharing: Sequence[NDArray[np.int64]] | None = None
    ) -> tuple[Dataset, Ledger]:
        """Return ``dataset`` with all columns scaled, and the ledger of what was released for it.

        Args:
            parts: each client's rows.
            sharing: with each of these rows, how many its person has there, where persons are protected; None where each row is a record.

        Raises:
            DataError: the target is a number, and noise hides where it lies.
        """
        values, stages = scaling.unscaled_values(dataset), ColumnStages.begun(dataset.unscaled)
        sharing = [np.ones_like(own) for own in parts] if sharing is None else sharing
        for stage in range(1, scaling.STAGES + 1):
            stages = stages.after(*self._released(values, stages, parts, sharing, stage=stage))
        return stages.scaled(dataset), charged(self.mechanism, len(parts), self.channel, self.colluding)

    def _released(
        self,
        values: Sequence[Floats],
        stages: ColumnStages,
        parts: Sequence[NDArray[np.int64]],
        sharing: Sequence[NDArray[np.int64]],
        *,
        stage: int,
    ) -> tuple[NoisySum, int]:
        """Return the counts of a histogram of each column, all of them released together, and how many points a row counts in them."""
        if self.mechanism is None:
            every = np.arange(len(values[0]))
            whole = stages.counts(values, every, np.ones_like(every)).astype(np.float64)
            return NoisySum(whole, 0.0), 1
        point = point_of(self.mechanism.steps, len(stages.columns))
        less = taken_off(point, self.mechanism)
        layout = b"".join(ends.tobytes() for ends in stages.edges)

        def own(some: range) -> Tensor:
            return torch.from_numpy(np.stack([stages.counts(values, parts[client], point // sharing[client]) for client in some]) - less)

        # Columns are measured once: also where a run is extended, and its config says another number of rounds.
        size = sum(stages.bins)
        found = released_sum(own, len(parts), size, self.mechanism, seed=self.seed, purpose=Purpose.MEASURING, number=stage, context=layout)
        return NoisySum(found.points + less * len(parts), found.noise), point


def charged(mechanism: DpSgd | None, clients: int, channel: Channel, colluding: int = 0) -> Ledger:
    """Return the ledger of measuring, by what protects the histograms; nothing is released where ``mechanism`` is None."""
    ledger = Ledger()
    if mechanism is not None:
        release = released(mechanism, ranges_of(1))
        for stage in range(1, scaling.STAGES + 1):
            ledger = ledger.charge(histogram_event(stage, release, clients, channel, colluding))
    return ledger


def _clear(found: Sequence[Histogram], columns: Sequence[Unscaled], *, first: bool) -> list[Histogram | None]:
    """Return the histograms of numbers without the bins that may be empty; None for a first one all of whose bins may be."""
    total = sum(own.counts.size for own in found)
    clear = [own if column.classes else own.standing_out(total, together=not first) for own, column in zip(found, columns, strict=True)]
    return [own if first or own else before for own, before in zip(clear, found, strict=True)]


def _scaled(dataset: Dataset, stages: Sequence[Sequence[Histogram | None]]) -> Dataset:
    """Return ``dataset`` scaled by the histograms of all ``stages``."""
    knots: list[Knots | None] = []
    shares: list[float] = []
    hidden: list[str] = []
    by_bounds: list[str] = []
    rough: list[str] = []
    kind, target = scaling.targets_in(dataset), None
    ended: list[float] = []
    for number, column in enumerate(dataset.unscaled):
        last = stages[-1][number]
        if column.classes:
            shares += _shares([own for stage in stages if (own := stage[number]) is not None], column)
        elif column.place is None:
            if kind == "survival":
                target, ended = scaling.measured_cuts(last, dataset, column.bounds)
            else:
                target, mean = scaling.measured_target(last, kind, column.bounds)
                shares += [mean] * (kind == "count")
        else:
            found = None if last is None else scaling.knots_of(last)
            if found is not None and scaling.is_rough([own for stage in stages if (own := stage[number]) is not None], found):
                rough.append(column.name)
            if found is None:
                (hidden if column.bounds is None else by_bounds).append(column.name)
                found = None if column.bounds is None else scaling.within(column.bounds)
            knots.append(found)
    if hidden:
        dataset = dataset.noted(
            f"not seen above the noise of measuring, and so left out: {', '.join(hidden)}; give data.bounds for them, "
            "a larger privacy.measuring_share or target epsilon, or more rows"
        )
    if by_bounds:
        dataset = dataset.noted(f"not seen above the noise of measuring, and so scaled by data.bounds alone: {', '.join(by_bounds)}")
    seen = [own for own, column in zip(stages[-1], dataset.unscaled, strict=True) if own is not None and not column.classes]
    if seen and scaling.is_small(seen):
        dataset = dataset.noted(
            "the columns were measured on few rows or persons for this epsilon, so about one in ten may be scaled wrongly: give "
            "data.bounds for the columns whose usual range is known"
        )
    if rough:
        dataset = dataset.noted(
            f"seen only roughly above the noise of measuring, so that their scale may be wrong: {', '.join(rough)}; narrower data.bounds, "
            "a larger privacy.measuring_share or target epsilon, or more rows help"
        )
    return scaling.scaled(dataset, knots, target, scaling.hazards(ended, shares[0]) if ended else tuple(shares))


def _shares(found: Sequence[Histogram], column: Unscaled) -> list[float]:
    """Return the share of each class, or of the label's 1, as all histograms together show it; never quite 0 or 1."""
    counts = np.mean([own.counts for own in found], axis=0)
    noise = found[0].noise / sqrt(len(found))
    # A share below the noise is not known to be smaller than the noise; that of an exact count is one record at least.
    held = np.maximum(counts, max(noise, 1.0))
    share = held / held.sum()
    return share.tolist() if column.label is None else [float(share[1])]


def _counted(places: Sequence[NDArray[np.int64]], bins: Sequence[int], points: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return how many ``points`` (n,) of each column's places (n,) are in each bin (bins,); -1 is in none. Sums are exact below 2^53."""
    inside = [column >= 0 for column in places]
    return [
        np.bincount(column[own], weights=points[own], minlength=size).astype(np.int64)
        for column, own, size in zip(places, inside, bins, strict=True)
    ]
