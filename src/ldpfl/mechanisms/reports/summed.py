"""Reports of which a server learns only the sum, as by secure aggregation. They are integers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SummedReports:
    """The sum of the lattice points of ``clients`` clients, each of which adds its own Gaussian noise.

    In a deployment, two servers form the sum, and it contains the noise of all clients. A simulation sums without noise, and draws the
    noise of all clients at once in :meth:`mix`, with the sum of their variances. A sum of Gaussians rounded to a lattice, with a standard
    deviation of 2^10 points or more, has the law of one rounded Gaussian, except for a part of e^(-2^20), see decision 0023. The draw is
    in floating point, because nothing leaves a simulation.

    Attributes:
        total: (d,) int64 sum. In a simulation, :meth:`mix` adds the noise to it.
        clients: number of clients.
        noise: standard deviation of one client's noise, in lattice points.
        scale: value of one lattice point in an estimate.
        bits: width of each number that a client sends, 32 or 64.
        mixed: whether ``total`` contains the noise.
    """

    total: Tensor
    clients: int
    noise: float
    scale: float
    bits: int = 64
    mixed: bool = False

    @property
    def dimension(self) -> int:
        return int(self.total.numel())

    @property
    def bytes_per_client(self) -> int:
        return self.bits // 8 * self.dimension

    def payloads(self) -> Iterable[bytes]:
        """Refuse: nobody sees the report of a single client.

        Raises:
            PrivacyError: always.
        """
        raise PrivacyError("a sum over clients cannot be decoded into single reports: use aggregate")

    @classmethod
    def mix(cls, batches: Sequence[SummedReports], generator: np.random.Generator) -> SummedReports:
        """Return the sum of all ``batches``, and add the noise of all clients.

        Raises:
            PrivacyError: the batches contain the noise already, or differ in dimension, lattice or noise.
        """
        first, clients = batches[0], sum(batch.clients for batch in batches)
        if first.mixed:
            raise PrivacyError("this sum was mixed already, and noise cannot be added twice: use it as it is")
        if any(batch._kind != first._kind for batch in batches):
            raise PrivacyError("sums of reports with different dimensions or noise cannot be added up: use one model and mechanism")
        # The sum of all clients' noise is drawn at once: its variance is the sum of theirs.
        noise = np.rint(generator.standard_normal(first.dimension) * (first.noise * sqrt(clients))).astype(np.int64)
        total = torch.stack([batch.total for batch in batches]).sum(dim=0) + torch.from_numpy(noise)
        return replace(first, total=total, clients=clients, mixed=True)

    @property
    def _kind(self) -> tuple[object, ...]:
        """Parameters that sums must share to be added up."""
        return self.dimension, self.noise, self.scale, self.bits, self.mixed

    @staticmethod
    def total_without_noise(reports: Sequence[object]) -> Tensor:
        """Return the sum (d,) to which :meth:`mix` will add noise. It is empty for reports of other classes, which have noise already."""
        totals = [batch.total for batch in reports if isinstance(batch, SummedReports)]
        return torch.stack(totals).sum(dim=0) if totals else torch.empty(0, dtype=torch.int64)

    @staticmethod
    def noise_parameter_bytes(reports: Sequence[object]) -> bytes:
        """Return as bytes what determines the size of a sum's noise: number of clients, noise, scale. The noise is seeded with them."""
        sums = [batch for batch in reports if isinstance(batch, SummedReports)]
        return repr((sum(batch.clients for batch in sums), sorted({(batch.noise, batch.scale) for batch in sums}))).encode()

    def mean(self, ranges: LayerRanges) -> Tensor:
        """Return the (d,) float32 mean over clients.

        Raises:
            PrivacyError: the sum has no noise yet, or is for another number of weights than ``ranges``.
        """
        if not self.mixed:
            raise PrivacyError("this sum has no noise yet, so it cannot be read: call mix first")
        if self.dimension != ranges.dimension:
            raise PrivacyError(
                f"the sum has {self.dimension} weights, but the clipping ranges have {ranges.dimension}: give the ranges of the sum's model"
            )
        return (ranges.expand()[0] + self.total.double() * (self.scale / self.clients)).float()
