"""Reports about a few weights of the model: how those are chosen, what is on the wire, and how reports are mixed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError, ProtocolError
from ldpfl.mechanisms.reports.bits import packed_size


@dataclass(frozen=True, eq=False)
class SampledReports:
    """k (weight, value) pairs a client, which stay together: one report.

    On the wire: k indices of ceil(log2 d) bits each, lowest bit first, bit b of the whole at byte b // 8 and position
    b % 8, padded to a byte with 0; then k little-endian float32. Indices ascend, so a set has one encoding.

    Attributes:
        index: (clients, k) int64, ascending in each row, from 0 to dimension - 1.
        values: (clients, k) float32, finite.
        dimension: number d of weights.

    Raises:
        ProtocolError: anything else.
    """

    index: NDArray[np.int64]
    values: NDArray[np.float32]
    dimension: int

    def __post_init__(self) -> None:
        index, values = self.index, self.values
        if index.dtype != np.int64 or values.dtype != np.float32 or index.ndim != 2 or index.shape != values.shape:
            raise ProtocolError(
                f"sampled reports have {index.dtype} {index.shape} and {values.dtype} {values.shape}, expected int64, float32"
            )
        if not 1 <= self.coordinates <= self.dimension:
            raise ProtocolError(f"a report covers {self.coordinates} of {self.dimension} weights")
        if index.size and not (index.min() >= 0 and index.max() < self.dimension):
            raise ProtocolError(f"a report names a weight beyond its {self.dimension} weights")
        if not (index[:, 1:] > index[:, :-1]).all():
            raise ProtocolError("a report names a weight twice, or not in ascending order")
        if not np.isfinite(values).all():
            raise ProtocolError("a report holds NaN or infinity")

    @property
    def clients(self) -> int:
        return int(self.index.shape[0])

    @property
    def coordinates(self) -> int:
        """How many weights k a client reports."""
        return int(self.index.shape[1])

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.coordinates * index_bits(self.dimension)) + 4 * self.coordinates

    def payloads(self) -> Iterable[bytes]:
        """Yield what each client puts on the wire."""
        width = np.arange(index_bits(self.dimension))
        for index, values in zip(self.index, self.values, strict=True):
            bits = (index[:, None] >> width & 1).astype(np.uint8)
            yield np.packbits(bits.ravel(), bitorder="little").tobytes() + values.astype("<f4").tobytes()

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int, coordinates: int) -> SampledReports:
        """Read reports of ``coordinates`` weights each off the wire.

        Raises:
            ProtocolError: a payload has the wrong length, sets a padding bit, names a weight that does not exist, twice
                or out of order, or holds a value that is NaN or infinite.
        """
        width = index_bits(dimension)
        head = packed_size(coordinates * width)
        index = np.empty((len(payloads), coordinates), dtype=np.int64)
        values = np.empty((len(payloads), coordinates), dtype=np.float32)
        for row, payload in enumerate(payloads):
            if len(payload) != head + 4 * coordinates:
                raise ProtocolError(
                    f"a report has {len(payload)} bytes, expected {head + 4 * coordinates} for {coordinates} of {dimension} weights"
                )
            bits = np.unpackbits(np.frombuffer(payload, dtype=np.uint8, count=head), bitorder="little")
            if bits[coordinates * width :].any():
                raise ProtocolError("a report sets a bit between its indices and its values")
            index[row] = bits[: coordinates * width].reshape(coordinates, width) @ (1 << np.arange(width))
            values[row] = np.frombuffer(payload, dtype="<f4", offset=head)
        return cls(index, values, dimension)

    @classmethod
    def mix(cls, reports: Sequence[Self], generator: np.random.Generator) -> Self:
        """Pool the reports of a cohort and order the clients' rows at random, uniformly.

        The k pairs of a client stay together: epsilon covers them as one message, and they were drawn together. A row is
        one report, in a place that says nothing about its sender.

        Raises:
            PrivacyError: no report, or reports of different shapes.
        """
        if sum(batch.clients for batch in reports) == 0:
            raise PrivacyError("there is no report to shuffle")
        if len({(batch.dimension, batch.coordinates) for batch in reports}) != 1:
            raise PrivacyError("reports of different kinds or dimensions cannot be shuffled together")
        order = generator.permutation(sum(batch.clients for batch in reports))
        index = np.concatenate([batch.index for batch in reports])[order]
        values = np.concatenate([batch.values for batch in reports])[order]
        return cls(index, values, reports[0].dimension)


def choose_coordinates(uniforms: NDArray[np.float64], dimension: int) -> NDArray[np.int64]:
    """Turn rows of k uniform numbers (n, k) into k of ``dimension`` indices each, ascending; all sets are equally likely (to d / 2**52).

    Source: Floyd's algorithm (Bentley & Floyd 1987): no rejection, and no memory of the size of ``dimension``. Step j picks one of the
    indices up to ``last`` = d - k + j; if the set has the pick already, ``last`` joins in its place. The set has it if an earlier step
    picked the same, or if the pick is the ``last`` of an earlier step whose own pick was there already: chains of such steps are followed
    for all rows at once, twice as far each time.
    """
    taken = uniforms.shape[1]
    lasts = np.arange(dimension - taken, dimension)
    picks = np.minimum(np.floor(uniforms * (lasts + 1)).astype(np.int64), lasts)  # rounding may have turned a uniform number into 1
    order = np.argsort(picks, axis=1, kind="stable")
    ordered = np.take_along_axis(picks, order, axis=1)
    there = np.zeros(picks.shape, dtype=np.bool_)
    np.put_along_axis(there, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    before = np.where(picks >= lasts[0], picks - lasts[0], np.arange(taken))
    for _ in range(taken.bit_length()):
        there |= np.take_along_axis(there, before, axis=1)
        before = np.take_along_axis(before, before, axis=1)
    return np.sort(np.where(there, lasts, picks), axis=1)


def index_bits(dimension: int) -> int:
    """Bits that tell ``dimension`` weights apart: ceil(log2 d)."""
    return (dimension - 1).bit_length()
