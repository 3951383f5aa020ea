"""Reports of one sign a group of weights: which weight was sampled, and its sign, in memory and on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError, ProtocolError
from ldpfl.mechanisms.reports.bits import WRONG_LENGTH_HINT, packed_size

_BITS_AT_ONCE = 1 << 22
"""Number of bits that are packed at once, one byte each: bounds the working memory, if a single report is not larger."""

_COLUMN_BLOCK = 64
"""Number of groups that are shuffled at once: a row of them fills a few cache lines."""


@dataclass(frozen=True, eq=False)
class IndexedBitReports:
    """One (index, sign) pair for each group and client. Each group has exactly one, so no index can be sent twice.

    On the wire a group takes ceil(log2(size)) bits for the index, none for a group of one weight, and then one for the
    sign (1 is +). The groups follow one another, lowest bit first, and zero bits fill the last byte.

    Attributes:
        index: (clients, groups) int64, the place of the sampled weight within its group.
        signs: (clients, groups) bool, True for +.
        group_sizes: (groups,) int64, number of weights of each group.

    Raises:
        ProtocolError: shapes or dtypes disagree, or an index lies outside its group.
    """

    index: NDArray[np.int64]
    signs: NDArray[np.bool_]
    group_sizes: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes, index, signs = self.group_sizes, self.index, self.signs
        if sizes.dtype != np.int64 or sizes.ndim != 1 or sizes.size == 0 or sizes.min() < 1:
            raise ProtocolError(f"group sizes must be a non-empty vector of positive int64, got {sizes.dtype} of shape {sizes.shape}")
        if index.dtype != np.int64 or signs.dtype != np.bool_ or index.shape != signs.shape or index.shape[1:] != sizes.shape:
            raise ProtocolError(
                f"a report has {index.dtype} indices {index.shape} and {signs.dtype} signs {signs.shape}, "
                f"expected int64 and bool (clients, {sizes.size})"
            )
        outside = (index < 0) | (index >= sizes)
        if outside.any():
            row, group = np.argwhere(outside)[0]
            raise ProtocolError(
                f"a report names index {index[row, group]} in a group of {sizes[group]} weights, expected 0 to {sizes[group] - 1}"
            )

    @property
    def clients(self) -> int:
        return int(self.index.shape[0])

    @property
    def dimension(self) -> int:
        return int(self.group_sizes.sum())

    @property
    def bytes_per_client(self) -> int:
        return packed_size(payload_bits(self.group_sizes))

    def payloads(self) -> Iterable[bytes]:
        """Yield the bytes that each client sends."""
        lengths = unit_bits(self.group_sizes)
        for rows in _row_blocks(self.clients, lengths):
            codes = self.index[rows] | (self.signs[rows].astype(np.int64) << (lengths - 1))  # the sign is a group's highest bit
            yield from (row.tobytes() for row in _pack(codes, lengths))

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], group_sizes: NDArray[np.int64]) -> IndexedBitReports:
        """Parse the ``payloads`` of clients, one for each, into reports about groups of ``group_sizes`` weights.

        Raises:
            ProtocolError: a payload has the wrong length, sets a bit beyond its groups, or names an index outside a group.
        """
        bits = payload_bits(group_sizes)
        size, unused_bits = packed_size(bits), -bits % 8
        for payload in payloads:
            if len(payload) != size:
                expected = f"{size} for {group_sizes.size} groups"
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {expected}: {WRONG_LENGTH_HINT}")
            if unused_bits and payload[-1] >> (8 - unused_bits):
                raise ProtocolError(f"a report has bits set after its {group_sizes.size} groups, expected zeros")
        packed = np.frombuffer(b"".join(payloads), dtype=np.uint8).reshape(len(payloads), size)
        lengths = unit_bits(group_sizes)
        index = np.empty((len(payloads), group_sizes.size), dtype=np.int64)
        signs = np.empty(index.shape, dtype=np.bool_)
        for rows in _row_blocks(len(payloads), lengths):
            codes = _unpack(packed[rows], lengths)  # the highest bit of a group is the sign, and the others are the index
            signs[rows] = codes >> (lengths - 1)
            index[rows] = codes & ((1 << (lengths - 1)) - 1)
        return cls(index, signs, group_sizes)

    @classmethod
    def mix(cls, batches: Sequence[Self], generator: np.random.Generator) -> Self:
        """Pool all reports and reorder the (index, sign) pairs within every group, uniformly and independently.

        This is what an ideal shuffler does to messages (group, index, sign). A row of the result no longer belongs to one client.

        Raises:
            PrivacyError: reports that cut the weights into different groups.
        """
        sizes = batches[0].group_sizes
        if not all(np.array_equal(batch.group_sizes, sizes) for batch in batches):
            raise PrivacyError("reports about different groups of weights cannot be shuffled together: use one model and mechanism")
        pairs = np.concatenate([2 * batch.index + batch.signs for batch in batches])  # (index, sign) as one number
        for start in range(0, sizes.size, _COLUMN_BLOCK):
            block = pairs[:, start : start + _COLUMN_BLOCK]
            block[:] = generator.permuted(block, axis=0)
        return cls(pairs >> 1, (pairs & 1).astype(np.bool_), sizes)


def unit_bits(group_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of bits (G,) of each group on the wire: those of its largest index, and one for the sign."""
    digits: NDArray[np.int32] = np.frexp(group_sizes - 1.0)[1]  # the binary exponent is the number of bits, exact below 2**53
    return digits.astype(np.int64) + 1


def payload_bits(group_sizes: NDArray[np.int64]) -> int:
    """Return the number of bits of one client's report, before rounding up to bytes: ceil(log2(size)) + 1 for each group."""
    return int(unit_bits(group_sizes).sum())


def _row_blocks(clients: int, lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Yield blocks of rows that are packed at once, for ``clients`` reports about groups of ``lengths`` (G,) bits."""
    rows_per_block = max(1, _BITS_AT_ONCE // int(lengths.sum()))
    return (slice(start, start + rows_per_block) for start in range(0, clients, rows_per_block))


def _bit_columns(lengths: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, for each bit number, the groups that have this bit, and for each of them the bit's position on the wire.

    A group has the bits 0 to its length - 1. On the wire, groups follow one another without gaps.
    """
    starts = np.cumsum(lengths) - lengths
    for bit in range(int(lengths.max())):
        groups = np.flatnonzero(lengths > bit)
        yield bit, groups, starts[groups] + bit


def _pack(codes: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Pack each row of ``codes`` (k, G) into bytes (k, n): one number after the other, of ``lengths`` (G,) bits, lowest bit first."""
    bits = np.zeros((len(codes), int(lengths.sum())), dtype=np.uint8)
    for bit, groups, columns in _bit_columns(lengths):
        bits[:, columns] = (codes[:, groups] >> bit) & 1
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack(packed: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers (k, G) that :func:`_pack` packed."""
    bits = np.unpackbits(packed, axis=1, count=int(lengths.sum()), bitorder="little")
    codes = np.zeros((len(packed), lengths.size), dtype=np.int64)
    for bit, groups, columns in _bit_columns(lengths):
        codes[:, groups] |= bits[:, columns].astype(np.int64) << bit
    return codes
