"""Before the first round: histograms of columns that nobody knows the bounds of, taken by the mechanism that protects the run.

Each client counts how many of its records fall into which bin of each column, and protects the counts like a sum of gradients: a
record moves them by no more than one clipped gradient would. So a histogram costs what a round costs, and is charged as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data import scaling
from ldpfl.data.samples import Dataset
from ldpfl.data.scaling import Floats
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.record_clipping import STEPS
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.privacy import Ledger
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import Channel
from ldpfl.randomness import Purpose, SeededStreams, bound_stream
from ldpfl.ranges import LayerRanges
from ldpfl.server import histogram_event
from ldpfl.shuffling import mix

_AT_ONCE = 1 << 22
"""Counts that are held at once: 32 MiB."""


@dataclass(frozen=True)
class Measuring:
    """How columns are measured.

    Attributes:
        seed: of the run.
        mechanism: protects sums over records; None counts exactly, where nothing is protected anyway.
        records: mean number of records a client.
        channel: as in the rounds.
    """

    seed: int
    mechanism: Mechanism | None
    records: float
    channel: Channel

    def scaled(self, dataset: Dataset, parts: Sequence[NDArray[np.int64]]) -> tuple[Dataset, Ledger]:
        """Return ``dataset`` with all columns scaled, and what was released for it; ``parts`` are the records of each client."""
        values, ledger = scaling.unscaled_values(dataset), Ledger()
        edges = scaling.coarse_edges(values.shape[1])
        counts, noise = self._histograms(values, edges, parts, stage=1)
        huge = [name for name, far in zip(dataset.unscaled_names, scaling.beyond(counts, noise), strict=True) if far]
        if huge:
            dataset = dataset.noted(
                f"beyond {scaling.LARGEST:.3g} on either side numbers are not distinguished: {', '.join(huge)}; give data.bounds for "
                "them, or another unit"
            )
        for stage in range(2, scaling.STAGES + 1):
            edges = scaling.fine_edges(counts, edges, noise)
            counts, noise = self._histograms(values, edges, parts, stage=stage)
        center, spread = scaling.center_and_spread(counts, edges, noise)
        unseen = [name for name, middle in zip(dataset.unscaled_names, center, strict=True) if np.isnan(middle)]
        if unseen:
            dataset = dataset.noted(
                f"not seen above the noise of measuring, and so left out: {', '.join(unseen)}; give data.bounds for them"
            )
        if self.mechanism is not None:
            release = released(self.mechanism, _ranges(edges))
            for stage in range(1, scaling.STAGES + 1):
                ledger = ledger.charge(histogram_event(stage, release, len(parts), self.channel))
        return scaling.scaled(dataset, center, spread), ledger

    def _histograms(self, values: Floats, edges: Floats, parts: Sequence[NDArray[np.int64]], *, stage: int) -> tuple[Floats, float]:
        """Return how many records fall into each bin (columns, bins), and the standard deviation of the noise in that."""
        columns, bins = values.shape[1], edges.shape[1] - 1
        places = scaling.place(values, edges)
        if self.mechanism is None:
            return _counted(places, bins).astype(np.float64), 0.0
        point = floor(STEPS / sqrt(columns))  # a record is in one bin of each column: so long is its vector at most STEPS
        point -= columns * point**2 > STEPS**2
        ranges = _ranges(edges)
        reports, at_once = [], max(1, _AT_ONCE // ranges.dimension)
        for first in range(0, len(parts), at_once):
            some = range(first, min(first + at_once, len(parts)))
            own = np.stack([_counted(places[parts[client]], bins).reshape(-1) for client in some])
            vectors, keys = torch.from_numpy(own * point), [(stage, client) for client in some]
            # Columns are measured once: also where a run is extended, and its config says another number of rounds.
            streams = SeededStreams.bound(self.seed, Purpose.MEASURING, keys, vectors, edges.tobytes())
            reports.append(self.mechanism.encode(vectors, ranges, streams))
        pool = mix(reports, bound_stream(self.seed, Purpose.MIXING, (0, stage), SummedReports.total_of(reports), edges.tobytes()))
        unit = self.records * len(parts) * STEPS / point
        mean = pool.aggregate(self.mechanism, ranges).mean.double().numpy()
        noise = float(self.mechanism.noise_std(ranges, len(parts))[0]) * unit
        return mean.reshape(columns, bins) * unit, noise


def _counted(places: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """Return how many of the places (n, columns) are in each bin, (columns, bins); -1 is in none."""
    return np.stack([np.bincount(column[column >= 0], minlength=bins) for column in places.T])


def _ranges(edges: Floats) -> LayerRanges:
    size = edges.shape[0] * (edges.shape[1] - 1)
    return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (size,))
