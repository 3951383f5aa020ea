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
from dataclasses import dataclass
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
from ldpfl.randomness import Purpose
from ldpfl.ranges import LayerRanges
from ldpfl.server import histogram_event
from ldpfl.simulation.record_sums import released_sum


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
        columns, values = dataset.unscaled, scaling.unscaled_values(dataset)
        sharing = [np.ones_like(own) for own in parts] if sharing is None else sharing
        edges = [scaling.first_edges(column) for column in columns]
        stages: list[list[Histogram | None]] = []
        for stage in range(1, scaling.STAGES + 1):
            found = _clear(self._histograms(values, edges, parts, sharing, stage=stage), columns, first=stage == 1)
            if stages:
                found = [own if before else None for own, before in zip(found, stages[-1], strict=True)]
            stages.append(found)
            edges = [
                own if histogram is None or column.classes else scaling.next_edges(histogram)
                for own, histogram, column in zip(edges, found, columns, strict=True)
            ]
        return _scaled(dataset, stages), charged(self.mechanism, len(parts), self.channel, self.colluding)

    def _histograms(
        self,
        values: Sequence[Floats],
        edges: Sequence[Floats],
        parts: Sequence[NDArray[np.int64]],
        sharing: Sequence[NDArray[np.int64]],
        *,
        stage: int,
    ) -> list[Histogram]:
        """Return a histogram of each column, all of them released together."""
        places = [scaling.place(column, own) for column, own in zip(values, edges, strict=True)]
        bins = [own.size - 1 for own in edges]
        if self.mechanism is None:
            whole = _counted(places, bins, np.ones(len(values[0]), dtype=np.int64))
            return [Histogram(own, counts.astype(np.float64), 0.0) for own, counts in zip(edges, whole, strict=True)]
        # Replacing a record moves one count of each column down and one up: by sqrt(2 c) points in all, where a gradient may move by 2 C.
        steps = self.mechanism.steps
        point = floor(steps * sqrt(2 / len(bins)))
        point -= len(bins) * point**2 > 2 * steps**2
        # A sum's lattice holds ``steps`` points a record in each coordinate. The point of a single column is longer, so a client takes off
        # what half of its records would give, and the sum gets it back. Their stated number is public, and not that of the data.
        taken_off = floor(point * self.mechanism.records / 2) if point > steps else 0
        layout = b"".join(ends.tobytes() for ends in edges)

        def own(some: range) -> Tensor:
            counted = [_counted([column[parts[client]] for column in places], bins, point // sharing[client]) for client in some]
            return torch.from_numpy(np.stack(list(map(np.concatenate, counted))) - taken_off)

        # Columns are measured once: also where a run is extended, and its config says another number of rounds.
        found = released_sum(
            own, len(parts), sum(bins), self.mechanism, seed=self.seed, purpose=Purpose.MEASURING, number=stage, context=layout
        )
        counts, noise = (found.points + taken_off * len(parts)) / point, found.noise / point
        split = np.split(counts, np.cumsum(bins)[:-1])
        return [Histogram(ends, counted, noise) for ends, counted in zip(edges, split, strict=True)]


def charged(mechanism: DpSgd | None, clients: int, channel: Channel, colluding: int = 0) -> Ledger:
    """Return the ledger of measuring, by what protects the histograms; nothing is released where ``mechanism`` is None."""
    ledger = Ledger()
    if mechanism is not None:
        release = released(mechanism, _ranges(1))
        for stage in range(1, scaling.STAGES + 1):
            ledger = ledger.charge(histogram_event(stage, release, clients, channel, colluding))
    return ledger


def _clear(found: Sequence[Histogram], columns: Sequence[Unscaled], *, first: bool) -> list[Histogram | None]:
    """Return the histograms of numbers without the bins that may be empty; None for a first one all of whose bins may be."""
    total = sum(own.counts.size for own in found)
    clear = [own if column.classes else own.standing_out(total, together=not first) for own, column in zip(found, columns, strict=True)]
    return [own if first or own else before for own, before in zip(clear, found, strict=True)]


def _scaled(dataset: Dataset, stages: Sequence[Sequence[Histogram | None]]) -> Dataset:
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


def _ranges(size: int) -> LayerRanges:
    return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (size,))
