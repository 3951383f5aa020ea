"""Reports of one bit a weight: in memory, on the wire, and shuffled, of which only counts are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ProtocolError
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK, client_blocks, coordinate_blocks
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


Encoder = Callable[[range], NDArray[np.bool_]]
"""Draws the bits (k, b) of some clients about a block of coordinates."""


@dataclass(frozen=True, eq=False)
class BitReports:
    """One bit a weight and client, packed: bit j of a client stands in byte j // 8 at position j % 8 (lowest first).

    Attributes:
        packed: (clients, ceil(dimension / 8)) uint8; the unused bits of the last byte are 0.
        dimension: number d of weights.
    """

    packed: NDArray[np.uint8]
    dimension: int

    def __post_init__(self) -> None:
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] != packed_size(self.dimension):
            raise ProtocolError(f"packed reports have shape {self.packed.shape}, expected (clients, {packed_size(self.dimension)}) uint8")

    @classmethod
    def of(cls, encoder: Callable[[slice], Encoder], clients: int, dimension: int, values: int = 8 * COORDINATE_BLOCK) -> Self:
        """Return the reports of ``clients``, whose bits ``encoder`` draws ``values`` at a time; they are counted while a cache has them.

        A call takes some 70 microseconds whatever their number.
        """
        packed, ones = np.empty((clients, packed_size(dimension)), dtype=np.uint8), np.zeros(dimension, dtype=np.int32)
        for own in coordinate_blocks(dimension):
            encoded = encoder(own)
            for rows in client_blocks(clients, own.stop - own.start, values=values):
                bits = encoded(rows)
                packed[rows.start : rows.stop, own.start // 8 : packed_size(own.stop)] = np.packbits(bits, axis=1, bitorder="little")
                _count(bits.view(np.uint8), ones[own])
        reports = cls(packed, dimension)
        object.__setattr__(reports, "ones", ones)
        return reports

    @cached_property
    def ones(self) -> NDArray[np.int32]:
        """How many reports set each bit, (d,)."""
        ones = np.zeros(self.dimension, dtype=np.int32)
        together = max(1, COORDINATE_BLOCK // max(1, self.dimension))  # a few unpacked rows in memory at a time
        for row in range(0, self.clients, together):
            _count(np.unpackbits(self.packed[row : row + together], axis=1, count=self.dimension, bitorder="little"), ones)
        return ones

    @property
    def clients(self) -> int:
        return int(self.packed.shape[0])

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.dimension)

    def payloads(self) -> Iterable[bytes]:
        """Yield what each client puts on the wire."""
        return (row.tobytes() for row in self.packed)

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int) -> BitReports:
        """Read reports off the wire.

        Raises:
            ProtocolError: a payload has the wrong length or sets a bit beyond ``dimension``.
        """
        size, spare = packed_size(dimension), -dimension % 8
        for payload in payloads:
            if len(payload) != size:
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {size} for {dimension} weights")
            if spare and payload[-1] >> (8 - spare):
                raise ProtocolError(f"a report sets a bit beyond its {dimension} weights")
        packed = np.frombuffer(b"".join(payloads), dtype=np.uint8).reshape(len(payloads), size)
        return cls(packed, dimension)

    @classmethod
    def mix(cls, batches: Sequence[BitReports], generator: np.random.Generator) -> BitReports:
        """Keep each column's count alone: a uniformly random permutation of its bits is an arrangement that follows from it."""
        clients = sum(batch.clients for batch in batches)
        return ShuffledBits(count_ones(batches).numpy(), clients, generator.spawn(1)[0])

    def addends(self) -> NDArray[np.uint8]:
        """Return the numbers (clients, d) of which :meth:`of_sum` takes the sum over clients."""
        return self.unpack()

    @classmethod
    def of_sum(cls, total: NDArray[Any], clients: int) -> BitReports:
        """Return the reports of ``clients`` of which nothing but the sum (d,) is left."""
        return BitCounts(total.astype(np.int32), clients)

    def counted(self) -> BitCounts:
        """Return what mixing keeps of these reports: how many set each bit."""
        return BitCounts(self.ones, self.clients)

    def unpack(self) -> NDArray[np.uint8]:
        """Return all bits, (clients, d)."""
        return np.unpackbits(self.packed, axis=1, count=self.dimension, bitorder="little")


class BitCounts(BitReports):
    """Bit reports of which nothing but the counts is left, and no order of their own.

    Args:
        ones: (d,) int32, how many reports set each bit.
        clients: how many reports there are.
    """

    def __init__(self, ones: NDArray[np.int32], clients: int) -> None:
        object.__setattr__(self, "dimension", ones.size)
        self.ones = ones
        self._clients = clients

    def plus(self, batch: BitReports) -> BitCounts:
        """Return the counts with those of ``batch``."""
        return BitCounts(count_ones([self, batch]).numpy(), self.clients + batch.clients)

    @property
    def clients(self) -> int:
        return self._clients

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.dimension)


class ShuffledBits(BitCounts):
    """Bit reports of which nothing but the counts is left: each column's bits stand in a uniformly random arrangement.

    It follows from the counts and chance alone, so it is drawn when somebody looks at ``packed`` for the first time; a mean
    needs the counts only.

    Args:
        ones, clients: as above.
        generator: what the arrangement is drawn from; nobody else may use it.
    """

    def __init__(self, ones: NDArray[np.int32], clients: int, generator: np.random.Generator) -> None:
        super().__init__(ones, clients)
        self._generator = generator

    @cached_property
    def packed(self) -> NDArray[np.uint8]:
        """Row by row, a 1 is placed with probability (ones left) / (rows left): drawing without replacement."""
        ones_left = self.ones.astype(np.uint32)
        packed = np.empty((self.clients, self.bytes_per_client), dtype=np.uint8)
        for row in range(self.clients):
            bits = self._generator.integers(0, self.clients - row, size=ones_left.size, dtype=np.uint32) < ones_left
            ones_left -= bits
            packed[row] = np.packbits(bits, bitorder="little")
        return packed


def packed_size(dimension: int) -> int:
    """Bytes that hold ``dimension`` bits."""
    return (dimension + 7) // 8


def count_ones(reports: Sequence[BitReports]) -> Tensor:
    """Return how many reports set each bit, (d,) int32."""
    total = np.zeros(reports[0].dimension, dtype=np.int32)
    for batch in reports:
        total += batch.ones
    return torch.from_numpy(total)


def _count(bits: NDArray[np.uint8], ones: NDArray[np.int32]) -> None:
    """Add the sum of ``bits`` (k, b), which are 0 or 1, to ``ones`` (b,)."""
    for row in range(0, len(bits), _COUNTED):
        ones += bits[row : row + _COUNTED].sum(axis=0, dtype=np.uint8)


_COUNTED = 255
"""The most that a uint8 counter holds."""
