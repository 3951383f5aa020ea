"""Reports in which each client's whole vector stays together, and the base class of mechanisms that send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ldpfl.mechanisms.base import Mechanism, total_clients
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.dense import DenseReports, DenseSum, mean_of_rows
from ldpfl.mechanisms.reports.units import FLOAT_BITS, Units
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class VectorReports(DenseReports):
    """Noisy float32 vectors. A client's row is protected as a whole, so it stays together, also in the shuffler."""

    @classmethod
    def mix(cls, batches: Sequence[DenseReports], generator: np.random.Generator) -> VectorReports:
        """Pool the rows of all ``batches`` and put them in a uniformly random order, each one unchanged."""
        order = torch.from_numpy(generator.permutation(sum(batch.clients for batch in batches)))
        return VectorReports(torch.cat([batch.values for batch in batches])[order])

    @classmethod
    def from_sum(cls, total: NDArray[np.float64], clients: int) -> VectorTotal:
        return VectorTotal(total, clients)

    def to_total(self) -> VectorTotal:
        """Return only the sum of these reports, which is all that a mean needs."""
        return VectorTotal(np.zeros(self.dimension), 0).plus(self)


class VectorTotal(DenseSum, VectorReports):
    """Noisy vectors of which only the sum is kept. A simulated round needs no more, and saves the memory of many clients' vectors."""

    def plus(self, batch: DenseReports) -> VectorTotal:
        """Return the sum of these reports and of ``batch``, whose reports are added one after the other."""
        total = np.zeros(self.dimension)
        self.add_to(total)
        batch.add_to(total)
        return VectorTotal(total, self.clients + batch.clients)

    @classmethod
    def mix(cls, batches: Sequence[DenseReports], generator: np.random.Generator) -> VectorTotal:
        """Return the sum over all ``batches``. The order of reports does not matter to it, except for rounding."""
        total = np.zeros(batches[0].dimension)
        for batch in batches:
            batch.add_to(total)
        return VectorTotal(total, sum(batch.clients for batch in batches))


class VectorMechanism(Mechanism):
    """Clients send noisy vectors, offset by the ranges' center; their mean is an unbiased estimate."""

    def decode(self, reports: VectorReports, ranges: LayerRanges) -> Tensor:
        total_clients([reports], ranges, VectorReports)  # raises if the reports do not fit
        return (reports.values + ranges.expand()[0]).float()  # vectors are sent less the center

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> VectorReports:
        return VectorReports(DenseReports.from_payloads(payloads, ranges.dimension).values)

    def aggregate(self, reports: Sequence[VectorReports], ranges: LayerRanges) -> Tensor:
        clients = total_clients(reports, ranges, VectorReports)
        return (ranges.expand()[0] + mean_of_rows(reports, clients)).float()  # vectors are sent less the center

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=True)

    def units(self, ranges: LayerRanges) -> Units:
        """Return the layout: the whole vector is one unit, with a float32 for each weight."""
        return Units.whole(ranges.dimension, FLOAT_BITS * ranges.dimension)
