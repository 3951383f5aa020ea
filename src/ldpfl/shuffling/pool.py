"""Parameter shuffling: split reports into (parameter id, report), pool them over the cohort, order them at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import COORDINATE_BLOCK, Mechanism
from ldpfl.mechanisms.duchi_vector import VectorBitReports, mix_vectors
from ldpfl.mechanisms.gaussian import NoisyReports
from ldpfl.mechanisms.indexed_reports import IndexedBitReports, mix_indexed
from ldpfl.mechanisms.reports import BitReports, DenseReports, Reports, ShuffledBits, count_ones
from ldpfl.mechanisms.sampled_reports import SampledReports, mix_sampled
from ldpfl.mechanisms.vector_reports import VectorReports, mix_vector_rows
from ldpfl.ranges import LayerRanges


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What the reports of a round say about the weights.

    Attributes:
        mean: (d,) float32 estimate of the clients' mean; 0 where no report was heard.
        variance: (d,) estimated variance of its noise; 0 where no report was heard.
        heard: (d,) bool, the weights that reports spoke about; None for all.
    """

    mean: Tensor
    variance: Tensor
    heard: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReportPool:
    """All (parameter id, report) pairs of a round, in an order that says nothing about clients.

    Column j of ``reports`` holds the values received for parameter (or group) j, in an order drawn for that column
    alone; a row is no client. Where a client's whole vector is one report, rows stay together and their order is drawn.
    This is the only thing that server code gets to see of a round.
    """

    reports: Reports

    @property
    def clients(self) -> int:
        """How many reports each parameter received."""
        return self.reports.clients

    def aggregate(self, mechanism: Mechanism, ranges: LayerRanges) -> Aggregate:
        """Return the mean over all reports.

        Raises:
            PrivacyError: no report, or reports of another mechanism or model.
        """
        mean = mechanism.aggregate([self.reports], ranges)
        return Aggregate(mean, mechanism.mean_variance(mean, ranges, self.clients))


def mix(reports: Sequence[Reports], generator: np.random.Generator) -> ReportPool:
    """Pool the reports of a cohort and reorder them within every parameter id, uniformly and independently.

    Simulates an ideal shuffler (LDP-FL, section 3.1 and Figure 2 (2)): what a network observer or a colluding relay
    could still see is not part of it. One-bit reports are counted, which takes a tenth of a nanosecond a weight and client;
    their order is drawn, in a few nanoseconds, once somebody looks at it.

    Raises:
        PrivacyError: no reports, or reports of different kinds or dimensions.
    """
    if not reports or sum(batch.clients for batch in reports) == 0:
        raise PrivacyError("there is no report to shuffle")
    if len({(type(batch), batch.dimension) for batch in reports}) != 1:
        raise PrivacyError("reports of different kinds or dimensions cannot be shuffled together")
    mixer = _MIXERS.get(type(reports[0]))
    if mixer is None:
        raise PrivacyError(f"nobody knows how to shuffle {type(reports[0]).__name__}: teach shuffling/pool.py")
    return ReportPool(mixer(reports, generator))


def _mix_bits(reports: Sequence[BitReports], generator: np.random.Generator) -> BitReports:
    """Keep each column's count alone: a uniformly random permutation of its bits is an arrangement that follows from it."""
    clients = sum(batch.clients for batch in reports)
    return ShuffledBits(count_ones(reports).numpy(), clients, generator.spawn(1)[0])


def _mix_dense(reports: Sequence[DenseReports], generator: np.random.Generator) -> DenseReports:
    values = torch.cat([batch.values for batch in reports])
    mixed = torch.empty_like(values)
    width = max(1, COORDINATE_BLOCK // max(1, values.shape[0] // 64))
    for start in range(0, values.shape[1], width):
        block = values[:, start : start + width].numpy()
        mixed[:, start : start + width] = torch.from_numpy(generator.permuted(block, axis=0))
    return DenseReports(mixed)


_MIXERS: Mapping[type, Callable[[Sequence[Any], np.random.Generator], Reports]] = {
    BitReports: _mix_bits,
    DenseReports: _mix_dense,
    IndexedBitReports: mix_indexed,
    NoisyReports: mix_vector_rows,
    SampledReports: mix_sampled,
    ShuffledBits: _mix_bits,
    VectorBitReports: mix_vectors,
    VectorReports: mix_vector_rows,
}
