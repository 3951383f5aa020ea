"""Reports of which a server learns the sum alone, as a secure sum would give it: integers, so that a sum is exact."""

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
    """The sum of the lattice points of ``clients`` clients, each of which adds Gaussian noise of its own.

    A deployment makes it of a sum that two servers formed, with everybody's noise in it. A simulation makes it out of sums before noise:
    all noise is then drawn at once when the sum is formed, with the variance of the clients' together. Rounded Gaussians of 2^10 steps
    or more add up to one but for a part of e^(-2^20), see decision 0023; the draw is in floating point, for nothing leaves a simulation.

    Attributes:
        total: (d,) int64; without noise before :meth:`mix`, with it after.
        clients: how many.
        noise: standard deviation of one client's noise, in lattice points.
        scale: what a lattice point stands for.
        bits: of each number that a client sends, 32 or 64.
        mixed: whether the noise is in it.
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
        """Nobody sees a client's own.

        Raises:
            PrivacyError: always.
        """
        raise PrivacyError("a sum over clients cannot be decoded into single reports: use aggregate")

    @classmethod
    def mix(cls, batches: Sequence[SummedReports], generator: np.random.Generator) -> SummedReports:
        """Return the sum of all ``batches`` with everybody's noise in it."""
        first, clients = batches[0], sum(batch.clients for batch in batches)
        if first.mixed or any(batch._kind != first._kind for batch in batches):
            raise PrivacyError("sums of different kinds cannot be added up")
        noise = np.rint(generator.standard_normal(first.dimension) * (first.noise * sqrt(clients))).astype(np.int64)
        total = torch.stack([batch.total for batch in batches]).sum(dim=0) + torch.from_numpy(noise)
        return replace(first, total=total, clients=clients, mixed=True)

    @property
    def _kind(self) -> tuple[object, ...]:
        return self.dimension, self.noise, self.scale, self.bits, self.mixed

    @staticmethod
    def total_of(reports: Sequence[object]) -> Tensor:
        """Return the sum (d,) that :meth:`mix` draws noise for; of reports that bring their own, nothing."""
        totals = [batch.total for batch in reports if isinstance(batch, SummedReports)]
        return torch.stack(totals).sum(dim=0) if totals else torch.empty(0, dtype=torch.int64)

    @staticmethod
    def kind_of(reports: Sequence[object]) -> bytes:
        """Return what tells noise of one size from that of another: of how many clients, and what a lattice point is."""
        sums = [batch for batch in reports if isinstance(batch, SummedReports)]
        return repr((sum(batch.clients for batch in sums), sorted({(batch.noise, batch.scale) for batch in sums}))).encode()

    def mean(self, ranges: LayerRanges) -> Tensor:
        """Return the (d,) float32 mean over clients.

        Raises:
            PrivacyError: it has no noise yet, or is of another model.
        """
        if not self.mixed or self.dimension != ranges.dimension:
            raise PrivacyError("a sum is read once everybody's noise is in it, and for its own model")
        return (ranges.expand()[0] + self.total.double() * (self.scale / self.clients)).float()
