"""Reports of one number for each weight, and how they are shuffled weight by weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ProtocolError
from ldpfl.mechanisms.reports.bits import WRONG_LENGTH_HINT
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import COORDINATE_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class DenseReports:
    """float32 values, (clients, d), sent as they are. Mechanisms that add noise to every weight use them, and the non-private ``none``."""

    values: Tensor

    @property
    def clients(self) -> int:
        return int(self.values.shape[0])

    @property
    def dimension(self) -> int:
        return int(self.values.shape[1])

    @property
    def bytes_per_client(self) -> int:
        return 4 * self.dimension  # float32

    def payloads(self) -> Iterable[bytes]:
        """Yield the bytes that each client sends."""
        return (row.numpy().tobytes() for row in self.values)

    def addends(self) -> NDArray[np.float32]:
        """Return the numbers (clients, d) whose sum over clients :meth:`from_sum` takes."""
        return np.asarray(self.values.numpy())

    @classmethod
    def from_sum(cls, total: NDArray[np.float64], clients: int) -> DenseReports:
        """Return the reports of ``clients`` clients if only their sum ``total`` (d,) is known."""
        return DenseSum(total, clients)

    def add_to(self, total: NDArray[np.float64]) -> None:
        """Add all reports to ``total`` (d,) in place, one client after another, so that rounding does not depend on batches."""
        for row in self.addends():
            total += row

    @classmethod
    def mix(cls, batches: Sequence[DenseReports], generator: np.random.Generator) -> DenseReports:
        """Return all reports with the values of each weight in a random order of its own."""
        values = torch.cat([batch.values for batch in batches])
        mixed = torch.empty_like(values)
        width = max(1, COORDINATE_BLOCK // max(1, values.shape[0] // 64))  # at most about 64 COORDINATE_BLOCK values at once
        for start in range(0, values.shape[1], width):
            block = values[:, start : start + width].numpy()
            mixed[:, start : start + width] = torch.from_numpy(generator.permuted(block, axis=0))
        return DenseReports(mixed)

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int) -> DenseReports:
        """Parse the ``payloads`` of clients, one for each, into reports about ``dimension`` weights.

        Raises:
            ProtocolError: a payload has the wrong length, or holds a value that is NaN or infinite.
        """
        for payload in payloads:
            if len(payload) != 4 * dimension:
                expected = f"{4 * dimension} for {dimension} weights"
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {expected}: {WRONG_LENGTH_HINT}")
        joined = bytearray().join(payloads)  # not bytes: tensors have to be writable
        values = np.frombuffer(joined, dtype=np.float32).reshape(len(payloads), dimension)
        if not np.isfinite(values).all():
            raise ProtocolError("a report holds NaN or infinity, which ldpfl's clients never send")
        return cls(torch.from_numpy(values))


class DenseSum(DenseReports):
    """Reports of which only the sum is known.

    Args:
        total: (d,) float64, the sum.
        clients: number of reports.
    """

    def __init__(self, total: NDArray[np.float64], clients: int) -> None:
        object.__setattr__(self, "_total", total)
        object.__setattr__(self, "_clients", clients)

    _total: NDArray[np.float64]
    _clients: int

    @property
    def clients(self) -> int:
        return self._clients

    @property
    def dimension(self) -> int:
        return int(self._total.size)

    def add_to(self, total: NDArray[np.float64]) -> None:
        total += self._total


def mean_of_rows(reports: Sequence[DenseReports], clients: int) -> Tensor:
    """Return the mean (d,) float64 of all rows. They are added up client by client, so that it does not depend on the batches."""
    total = np.zeros(reports[0].dimension)
    for batch in reports:
        batch.add_to(total)
    return torch.from_numpy(total) / clients
