"""A round's reports where some are missing: parts of the model that were reported equally often."""

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
    """How many records were not used, and why, in one line that tells nothing of their content."""

    count: int
    reason: str


@dataclass(frozen=True, eq=False)
class Part:
    """Reports about some of the weights, in whole units; a row is no client.

    Attributes:
        reports: as :meth:`Units.read_by` says.
        weights: (d,) bool, what they are about.
        clients: how many clients they are worth.
    """

    reports: Reports
    weights: Tensor
    clients: int


@dataclass(frozen=True, eq=False)
class PartialPool:
    """A round of which some reports are missing, so that weights have been reported differently often.

    Attributes:
        parts: each about other weights than the rest.
        reported: (d,) bool, the weights that may be updated.
    """

    parts: tuple[Part, ...]
    reported: Tensor

    @property
    def clients(self) -> int:
        """The fewest reports that any weight received which received one: what amplification may count on."""
        return min(part.clients for part in self.parts)

    @property
    def counts(self) -> Tensor:
        """How many clients' reports each weight received, (d,) int64."""
        counts = torch.zeros(self.reported.shape, dtype=torch.int64)
        for part in self.parts:
            counts[part.weights] = part.clients
        return counts * self.reported

    def aggregate(self, mechanism: Mechanism, ranges: LayerRanges) -> Aggregate:
        """Return the mean of each weight over the reports that arrived about it.

        Raises:
            PrivacyError: no weight was reported, or reports of another mechanism or model.
        """
        units = mechanism.units(ranges)
        coordinates = units.about(ranges)
        if self.reported.shape != (coordinates.dimension,):
            raise PrivacyError(f"the reports cover {self.reported.numel()} weights, the ranges cover {coordinates.dimension}")
        if not bool(self.reported.any()):
            raise PrivacyError("there is no report to aggregate")
        mean, variance = torch.zeros(coordinates.dimension), torch.zeros(coordinates.dimension)
        for part in self.parts:
            own = coordinates.part(part.weights)
            alone = units.read_by(mechanism, own)
            mean[part.weights] = values = alone.aggregate([part.reports], own)
            variance[part.weights] = alone.noise(own).mean_variance(values, part.reports.clients)
        if units.mixed is not None:  # every weight is in all of them
            weights = units.mixed.to_weights(mean * self.reported)
            return Aggregate(weights, mechanism.noise(ranges).mean_variance(weights, self.clients))
        return Aggregate(mean * self.reported, variance * self.reported, self.reported)
