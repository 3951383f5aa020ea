"""Reports of one bit a weight: in memory, on the wire, and after shuffling, which leaves only counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ProtocolError
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import COORDINATE_BLOCK, client_blocks, coordinate_blocks

if TYPE_CHECKING:
    from torch import Tensor


Encoder = Callable[[range], NDArray[np.bool_]]
"""Draws the bits (k, b) of the k clients in a range, about the b coordinates of a block."""

WRONG_LENGTH_HINT = "the client's model or mechanism settings may differ from the server's"
"""Likely reason why a client's payload has another length than the server expects."""


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
            found, expected = f"{self.packed.dtype} {self.packed.shape}", f"uint8 (clients, {packed_size(self.dimension)})"
            raise ProtocolError(f"packed reports about {self.dimension} weights are {found}, expected {expected}")

    @classmethod
    def from_encoder(
        cls, make_encoder: Callable[[slice], Encoder], clients: int, dimension: int, values: int = 8 * COORDINATE_BLOCK
    ) -> Self:
        """Draw, pack and count the bits of ``clients`` reports about ``dimension`` weights, in blocks that stay in a cache.

        Args:
            make_encoder: returns the encoder of a block of coordinates.
            values: number of bits to draw at a time. Fewer would be slower: a draw takes some 70 microseconds at least.
        """
        packed, ones = np.empty((clients, packed_size(dimension)), dtype=np.uint8), np.zeros(dimension, dtype=np.int32)
        for columns in coordinate_blocks(dimension):
            draw_bits, packed_columns = make_encoder(columns), slice(columns.start // 8, packed_size(columns.stop))  # at whole bytes
            for rows in client_blocks(clients, columns.stop - columns.start, values=values):
                bits = draw_bits(rows)
                packed[rows.start : rows.stop, packed_columns] = np.packbits(bits, axis=1, bitorder="little")
                _add_sum(bits.view(np.uint8), ones[columns])
        reports = cls(packed, dimension)
        object.__setattr__(reports, "ones", ones)  # fills the cached property
        return reports

    @cached_property
    def ones(self) -> NDArray[np.int32]:
        """Number of reports that set each bit, (d,)."""
        ones = np.zeros(self.dimension, dtype=np.int32)
        rows_per_block = max(1, COORDINATE_BLOCK // max(1, self.dimension))  # a few unpacked rows in memory at a time
        for row in range(0, self.clients, rows_per_block):
            _add_sum(np.unpackbits(self.packed[row : row + rows_per_block], axis=1, count=self.dimension, bitorder="little"), ones)
        return ones

    @property
    def clients(self) -> int:
        return int(self.packed.shape[0])

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.dimension)

    def payloads(self) -> Iterable[bytes]:
        """Yield the bytes that each client sends."""
        return (row.tobytes() for row in self.packed)

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int) -> BitReports:
        """Parse the ``payloads`` of clients, one for each, into reports about ``dimension`` weights.

        Raises:
            ProtocolError: a payload has the wrong length or sets a bit beyond ``dimension``.
        """
        size, unused_bits = packed_size(dimension), -dimension % 8
        for payload in payloads:
            if len(payload) != size:
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {size} for {dimension} weights: {WRONG_LENGTH_HINT}")
            if unused_bits and payload[-1] >> (8 - unused_bits):  # the highest bits of the last byte
                raise ProtocolError(f"a report has bits set after its {dimension} weights, expected zeros")
        packed = np.frombuffer(b"".join(payloads), dtype=np.uint8).reshape(len(payloads), size)
        return cls(packed, dimension)

    @classmethod
    def mix(cls, batches: Sequence[BitReports], generator: np.random.Generator) -> BitReports:
        """Return shuffled reports. The bits of each weight are in a random order of their own, so only their counts are kept."""
        clients = sum(batch.clients for batch in batches)
        # The order is drawn later, if at all, so it gets a generator of its own.
        return ShuffledBits(count_ones(batches).numpy(), clients, generator.spawn(1)[0])

    def addends(self) -> NDArray[np.uint8]:
        """Return the bits (clients, d), whose sum over clients :meth:`from_sum` takes."""
        return self.unpack()

    @classmethod
    def from_sum(cls, total: NDArray[Any], clients: int) -> BitReports:
        """Return the reports of ``clients`` clients if only the sum ``total`` (d,) of their bits is known."""
        return BitCounts(total.astype(np.int32), clients)

    def to_counts(self) -> BitCounts:
        """Return these reports without their order: only the number of reports that set each bit, which is all that mixing keeps."""
        return BitCounts(self.ones, self.clients)

    def unpack(self) -> NDArray[np.uint8]:
        """Return all bits, (clients, d)."""
        return np.unpackbits(self.packed, axis=1, count=self.dimension, bitorder="little")


class BitCounts(BitReports):
    """Bit reports of which only the counts are known.

    Args:
        ones: (d,) int32, number of reports that set each bit.
        clients: number of reports.
    """

    def __init__(self, ones: NDArray[np.int32], clients: int) -> None:
        object.__setattr__(self, "dimension", ones.size)
        self.ones = ones
        self._clients = clients

    def plus(self, batch: BitReports) -> BitCounts:
        """Return the counts of these reports and those of ``batch`` together."""
        return BitCounts(count_ones([self, batch]).numpy(), self.clients + batch.clients)

    @property
    def clients(self) -> int:
        return self._clients

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.dimension)


class ShuffledBits(BitCounts):
    """Shuffled bit reports: the counts, and for each weight a uniformly random order of the clients' bits.

    The order follows from the counts and chance alone. It is drawn when ``packed`` is first read, because a mean needs only the counts.

    Args:
        ones, clients: as for :class:`BitCounts`.
        generator: draws the order, and nothing else.
    """

    def __init__(self, ones: NDArray[np.int32], clients: int, generator: np.random.Generator) -> None:
        super().__init__(ones, clients)
        self._generator = generator

    @cached_property
    def packed(self) -> NDArray[np.uint8]:
        """Bits in random order, drawn without replacement: a row's bit is 1 with probability (ones left) / (rows left)."""
        ones_left = self.ones.astype(np.uint32)
        packed = np.empty((self.clients, self.bytes_per_client), dtype=np.uint8)
        for row in range(self.clients):
            rows_left = self.clients - row
            bits = self._generator.integers(0, rows_left, size=ones_left.size, dtype=np.uint32) < ones_left
            ones_left -= bits  # True counts as 1
            packed[row] = np.packbits(bits, bitorder="little")
        return packed


def packed_size(dimension: int) -> int:
    """Return the number of bytes that hold ``dimension`` bits."""
    return (dimension + 7) // 8


def count_ones(reports: Sequence[BitReports]) -> Tensor:
    """Return how many reports set each bit, (d,) int32."""
    total = np.zeros(reports[0].dimension, dtype=np.int32)
    for batch in reports:
        total += batch.ones
    return torch.from_numpy(total)


def _add_sum(bits: NDArray[np.uint8], ones: NDArray[np.int32]) -> None:
    """Add the sum of ``bits`` (k, b), which are 0 or 1, to ``ones`` (b,) in place, at most 255 rows at a time: fast sums in uint8."""
    for row in range(0, len(bits), _MAX_UINT8):
        ones += bits[row : row + _MAX_UINT8].sum(axis=0, dtype=np.uint8)


_MAX_UINT8 = 255
"""Largest sum of bits that a uint8 holds."""
