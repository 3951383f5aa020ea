"""Reports of a number a weight, and how they are shuffled weight by weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.errors import ProtocolError
from ldpfl.lazy import torch
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class DenseReports:
    """float32 values as they are, (clients, d): the wire format of noise on every weight, and of the non-private reference."""

    values: Tensor

    @property
    def clients(self) -> int:
        return int(self.values.shape[0])

    @property
    def dimension(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes_per_client(self) -> int:
        return 4 * self.dimension

    def add_to(self, total: Tensor) -> None:
        """Add all reports, one after the other, to ``total`` (d,) float64: the sum does not depend on how they were batched."""
        for row in self.values:
            total += row

    def payloads(self) -> Iterable[bytes]:
        """Yield what each client puts on the wire."""
        return (row.numpy().tobytes() for row in self.values)

    @classmethod
    def mix(cls, batches: Sequence[DenseReports], generator: np.random.Generator) -> DenseReports:
        """Reorder the values of each weight by themselves."""
        values = torch.cat([batch.values for batch in batches])
        mixed = torch.empty_like(values)
        width = max(1, COORDINATE_BLOCK // max(1, values.shape[0] // 64))
        for start in range(0, values.shape[1], width):
            block = values[:, start : start + width].numpy()
            mixed[:, start : start + width] = torch.from_numpy(generator.permuted(block, axis=0))
        return DenseReports(mixed)

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int) -> DenseReports:
        """Read reports off the wire.

        Raises:
            ProtocolError: a payload has the wrong length, or holds a value that is NaN or infinite.
        """
        for payload in payloads:
            if len(payload) != 4 * dimension:
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {4 * dimension} for {dimension} weights")
        values = np.frombuffer(bytearray().join(payloads), dtype=np.float32).reshape(len(payloads), dimension)
        if not np.isfinite(values).all():
            raise ProtocolError("a report holds NaN or infinity")
        return cls(torch.from_numpy(values))


def mean_of_rows(reports: Sequence[DenseReports], clients: int) -> Tensor:
    """Return the mean (d,) float64 of all rows."""
    total = torch.zeros(reports[0].dimension, dtype=torch.float64)
    for batch in reports:
        batch.add_to(total)
    return total / clients
