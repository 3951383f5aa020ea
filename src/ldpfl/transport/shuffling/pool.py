"""Parameter shuffling: split reports into (parameter id, report), pool them over the cohort, order them at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import Mechanism, Reports
from ldpfl.mechanisms.ranges import LayerRanges

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The estimate of the weights from the reports of a round.

    Attributes:
        mean: (d,) float32 estimate of the clients' mean; 0 for weights without reports.
        variance: (d,) estimated variance of the noise in ``mean``; 0 for weights without reports.
        reported: (d,) bool, the weights with reports; None if all have reports.
    """

    mean: Tensor
    variance: Tensor
    reported: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReportPool:
    """All (parameter id, report) pairs of a round, in an order that reveals nothing about clients.

    Column j of ``reports`` holds the values received for parameter (or group) j, in a random order of its own, so that a row is not one
    client's. If a client's whole vector is one report, rows stay together, and the rows are in random order. Server code sees nothing else
    of a round.
    """

    reports: Reports

    @property
    def clients(self) -> int:
        """Number of reports that each parameter received."""
        return self.reports.clients

    def aggregate(self, mechanism: Mechanism, ranges: LayerRanges) -> Aggregate:
        """Return the mean over all reports.

        Raises:
            PrivacyError: no report, or reports of another mechanism or model.
        """
        mean = mechanism.aggregate([self.reports], ranges)
        return Aggregate(mean, mechanism.noise(ranges).mean_variance(mean, self.clients))


def mix(reports: Sequence[Reports], generator: np.random.Generator) -> ReportPool:
    """Pool the reports of a cohort and reorder them within every parameter id, uniformly and independently.

    This simulates an ideal shuffler (LDP-FL, section 3.1 and Figure 2 (2)). It does not simulate what a network observer or a colluding
    relay could still see. One-bit reports are only counted here, which is fast. Their order is drawn if it is read.

    Raises:
        PrivacyError: no reports, or reports of different kinds or dimensions.
    """
    if not reports or sum(batch.clients for batch in reports) == 0:
        raise PrivacyError("no client sent a report, so there is nothing to shuffle: give the reports of at least one client")
    if len({(type(batch), batch.dimension) for batch in reports}) != 1:
        raise PrivacyError("reports of different kinds or dimensions cannot be shuffled together: use one model and mechanism")
    return ReportPool(type(reports[0]).mix(reports, generator))
