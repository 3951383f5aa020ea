"""Parameter shuffling: split reports into (parameter id, report), pool them over the cohort, order them at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import Reports

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Aggregate:
    """What the reports of a round say about the weights.

    Attributes:
        mean: (d,) float32 estimate of the clients' mean; 0 where no report was heard.
        variance: (d,) estimated variance of its noise; 0 where no report was heard.
        reported: (d,) bool, the weights that reports spoke about; None for all.
    """

    mean: Tensor
    variance: Tensor
    reported: Tensor | None = None


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
        return Aggregate(mean, mechanism.noise(ranges).mean_variance(mean, self.clients))


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
    return ReportPool(type(reports[0]).mix(reports, generator))
