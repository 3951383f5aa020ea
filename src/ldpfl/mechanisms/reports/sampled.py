"""Reports about a few sampled weights of the model: sampling, the wire format, and mixing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError, ProtocolError
from ldpfl.mechanisms.reports.bits import WRONG_LENGTH_HINT, packed_size


@dataclass(frozen=True, eq=False)
class SampledReports:
    """Reports of k (weight, value) pairs each. The pairs of a client stay together.

    On the wire, k indices of ceil(log2 d) bits each come first, lowest bit first. Bit b of all these bits is in byte b // 8 at position
    b % 8, and zero bits fill the last byte. Then come k little-endian float32. Indices ascend, so that a set of weights has one encoding.

    Attributes:
        index: (clients, k) int64, ascending in each row, from 0 to dimension - 1.
        values: (clients, k) float32, finite.
        dimension: number d of weights.

    Raises:
        ProtocolError: the arrays are not as described.
    """

    index: NDArray[np.int64]
    values: NDArray[np.float32]
    dimension: int

    def __post_init__(self) -> None:
        index, values = self.index, self.values
        if index.dtype != np.int64 or values.dtype != np.float32 or index.ndim != 2 or index.shape != values.shape:
            raise ProtocolError(
                f"sampled reports need indices in int64 and values in float32, both of the shape (reports, weights), got indices in "
                f"{index.dtype} of the shape {index.shape}, and values in {values.dtype} of the shape {values.shape}"
            )
        if not 1 <= self.coordinates <= self.dimension:
            raise ProtocolError(f"a report has {self.coordinates} weights, expected 1 to {self.dimension}")
        if index.size and not (index.min() >= 0 and index.max() < self.dimension):
            raise ProtocolError(f"a report has the index of a weight outside 0 to {self.dimension - 1}")
        if not (index[:, 1:] > index[:, :-1]).all():
            raise ProtocolError("a report's indices of weights must increase: one is repeated or out of order")
        if not np.isfinite(values).all():
            raise ProtocolError("a report holds NaN or infinity, which ldpfl's clients never send")

    @property
    def clients(self) -> int:
        return int(self.index.shape[0])

    @property
    def coordinates(self) -> int:
        """Number k of weights that a client reports."""
        return int(self.index.shape[1])

    @property
    def bytes_per_client(self) -> int:
        return packed_size(self.coordinates * index_bits(self.dimension)) + 4 * self.coordinates

    def payloads(self) -> Iterable[bytes]:
        """Yield the bytes that each client sends."""
        bit_numbers = np.arange(index_bits(self.dimension))
        for index, values in zip(self.index, self.values, strict=True):
            bits = ((index[:, None] >> bit_numbers) & 1).astype(np.uint8)
            yield np.packbits(bits.ravel(), bitorder="little").tobytes() + values.astype("<f4").tobytes()

    @classmethod
    def from_payloads(cls, payloads: Sequence[bytes], dimension: int, coordinates: int) -> SampledReports:
        """Parse the ``payloads`` of clients, one for each, into reports of ``coordinates`` out of ``dimension`` weights.

        Raises:
            ProtocolError: a payload has the wrong length, sets a padding bit, names a weight that does not exist, twice
                or out of order, or holds a value that is NaN or infinite.
        """
        width = index_bits(dimension)
        index_bytes = packed_size(coordinates * width)
        size = index_bytes + 4 * coordinates
        index = np.empty((len(payloads), coordinates), dtype=np.int64)
        values = np.empty((len(payloads), coordinates), dtype=np.float32)
        for row, payload in enumerate(payloads):
            if len(payload) != size:
                expected = f"{size} for {coordinates} of {dimension} weights"
                raise ProtocolError(f"a report has {len(payload)} bytes, expected {expected}: {WRONG_LENGTH_HINT}")
            bits = np.unpackbits(np.frombuffer(payload, dtype=np.uint8, count=index_bytes), bitorder="little")
            if bits[coordinates * width :].any():
                raise ProtocolError("a report has bits set between its indices and its values, expected zeros")
            index[row] = bits[: coordinates * width].reshape(coordinates, width) @ (1 << np.arange(width))  # the lowest bit comes first
            values[row] = np.frombuffer(payload, dtype="<f4", offset=index_bytes)
        return cls(index, values, dimension)

    @classmethod
    def mix(cls, reports: Sequence[Self], generator: np.random.Generator) -> Self:
        """Pool all reports and put the clients' rows in a uniformly random order.

        The k pairs of a client stay together, because epsilon covers them as one message.

        Raises:
            PrivacyError: reports of different shapes.
        """
        if len({(batch.dimension, batch.coordinates) for batch in reports}) != 1:
            raise PrivacyError("reports about different numbers of weights cannot be shuffled together: use one model and mechanism")
        order = generator.permutation(sum(batch.clients for batch in reports))
        index = np.concatenate([batch.index for batch in reports])[order]
        values = np.concatenate([batch.values for batch in reports])[order]
        return cls(index, values, reports[0].dimension)


def choose_coordinates(uniforms: NDArray[np.float64], dimension: int) -> NDArray[np.int64]:
    """Turn each row of k uniform numbers (n, k) into k different indices below d = ``dimension``, ascending.

    All sets of indices are equally likely, up to a relative error of d / 2^52.

    Source: Floyd's algorithm (Bentley & Floyd 1987): no rejection, and no memory of the size of ``dimension``. Step j picks one of the
    indices up to ``last`` = d - k + j. If the set has this index already, ``last`` joins the set instead. The set has it if an earlier step
    picked the same index, or if the index is the ``last`` of an earlier step, which joined instead of that step's pick. Chains of such
    steps are followed for all rows at once, twice as far each time.
    """
    count = uniforms.shape[1]
    lasts = np.arange(dimension - count, dimension)
    picks = np.minimum(np.floor(uniforms * (lasts + 1)).astype(np.int64), lasts)  # rounding may have turned a uniform number into 1
    order = np.argsort(picks, axis=1, kind="stable")
    ordered = np.take_along_axis(picks, order, axis=1)
    in_set = np.zeros(picks.shape, dtype=np.bool_)  # whether the set has the step's pick already
    np.put_along_axis(in_set, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    step_with_last = np.where(picks >= lasts[0], picks - lasts[0], np.arange(count))  # the step whose ``last`` was picked, or itself
    for _ in range(count.bit_length()):  # enough, as a chain has ``count`` steps at most
        in_set |= np.take_along_axis(in_set, step_with_last, axis=1)
        step_with_last = np.take_along_axis(step_with_last, step_with_last, axis=1)
    return np.sort(np.where(in_set, lasts, picks), axis=1)


def index_bits(dimension: int) -> int:
    """Return the number of bits of an index of ``dimension`` weights: ceil(log2 d)."""
    return (dimension - 1).bit_length()
