"""The reports of a round with missing records, grouped into parts of the model that were reported equally often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms import Mechanism, Reports
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.transport.shuffling.pool import Aggregate
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RefusedRecords:
    """The number of records that were not used, and the reason. The reason reveals nothing of their content."""

    count: int
    reason: str


@dataclass(frozen=True, eq=False)
class Part:
    """Reports about some of the weights, in whole units. The units of a row may come from different clients.

    Attributes:
        reports: reports for the mechanism that :meth:`Units.reader_of_part` returns.
        weights: (d,) bool, True for the weights that the reports are about.
        clients: number of clients that reported each of these weights.
    """

    reports: Reports
    weights: Tensor
    clients: int


@dataclass(frozen=True, eq=False)
class PartialPool:
    """A round with missing records, so that some weights were reported more often than others.

    Attributes:
        parts: the parts of the model, which do not overlap.
        reported: (d,) bool, True for the weights that may be updated: those with reports, none of which is known to be false.
    """

    parts: tuple[Part, ...]
    reported: Tensor

    @property
    def clients(self) -> int:
        """Smallest number of reports among the weights that received any: the anonymity set that amplification may rely on."""
        return min(part.clients for part in self.parts)

    @property
    def counts(self) -> Tensor:
        """Number of usable reports about each weight, (d,) int64. It is 0 for weights that are not in ``reported``."""
        counts = torch.zeros(self.reported.shape, dtype=torch.int64)
        for part in self.parts:
            counts[part.weights] = part.clients
        return counts * self.reported

    def aggregate(self, mechanism: Mechanism, ranges: LayerRanges) -> Aggregate:
        """Return the mean of each weight over the reports about it, and the estimated variance of the mean's noise.

        Reports are about coordinates: the weights themselves, or numbers that the mechanism computes from all weights (``units.mixed``).
        In the second case no weight lacks a report.

        Raises:
            PrivacyError: no weight was reported, or reports of another mechanism or model.
        """
        units = mechanism.units(ranges)
        coordinates = units.unit_ranges(ranges)
        if self.reported.shape != (coordinates.dimension,):
            raise PrivacyError(
                f"the reports cover {self.reported.numel()} weights, but the clipping ranges cover {coordinates.dimension}: give the "
                "ranges of the model that the reports are about"
            )
        if not bool(self.reported.any()):
            raise PrivacyError("there is no report to aggregate")
        mean, variance = torch.zeros(coordinates.dimension), torch.zeros(coordinates.dimension)
        for part in self.parts:
            part_ranges = coordinates.part(part.weights)
            part_mechanism = units.reader_of_part(mechanism, part_ranges)
            part_mean = part_mechanism.aggregate([part.reports], part_ranges)
            mean[part.weights] = part_mean
            variance[part.weights] = part_mechanism.noise(part_ranges).mean_variance(part_mean, part.reports.clients)
        usable_mean = mean * self.reported  # 0 for the coordinates without usable reports
        if units.mixed is not None:
            weights = units.mixed.to_weights(usable_mean)
            return Aggregate(weights, mechanism.noise(ranges).mean_variance(weights, self.clients))
        return Aggregate(usable_mean, variance * self.reported, self.reported)
