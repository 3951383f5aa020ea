"""The layout of one client's report: its units, which a shuffler may separate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.sampled import index_bits

if TYPE_CHECKING:
    from torch import Tensor

Numbers = NDArray[np.int64]

FLOAT_BITS = 32
"""Number of bits of a float32 on the wire."""

ReaderT = TypeVar("ReaderT")
"""A mechanism, which reads reports."""


@dataclass(frozen=True, eq=False)
class MixedCoordinates:
    """Coordinates into which a mechanism transforms the weights before it randomises them, for example by a rotation.

    Attributes:
        ranges: ranges of the coordinates.
        to_weights: transforms a mean (D,) of coordinates back to weights (d,). Coordinates that nobody reported are 0.
    """

    ranges: LayerRanges
    to_weights: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class SeparateUnits:
    """Units of a report that are read without its other units.

    Attributes:
        reader: returns a mechanism that reads reports of some whole units. Its argument are the ranges of the coordinates that these units
            are about. None if the mechanism itself can read them.
        mixed: the coordinates that units are about, if these are not the weights.
    """

    reader: Callable[[LayerRanges], Any] | None = field(default=None, kw_only=True, repr=False, compare=False)
    mixed: MixedCoordinates | None = field(default=None, kw_only=True, repr=False, compare=False)

    def reader_of_part(self, mechanism: ReaderT, part: LayerRanges) -> ReaderT:
        """Return the mechanism that reads the units about the coordinates in ``part``, from a report of ``mechanism``."""
        reader: ReaderT = mechanism if self.reader is None else self.reader(part)
        return reader

    def unit_ranges(self, ranges: LayerRanges) -> LayerRanges:
        """Return the ranges of the coordinates that units are about: ``ranges`` of the weights, unless the mechanism transforms them."""
        return ranges if self.mixed is None else self.mixed.ranges


@dataclass(frozen=True, eq=False)
class Units(SeparateUnits):
    """Consecutive units on the wire, each about its own consecutive weights.

    Runs of equal units are stored once, so that a very large model takes no memory here.

    Attributes:
        bits: (R,) int64, number of bits of a unit on the wire, lowest bit of the first byte first; zero bits fill the last byte.
        weights: (R,) int64, number of weights that a unit is about.
        repeats: (R,) int64, number of equal units in a run; 1 if each unit has its own entry.

    Raises:
        ConfigError: shapes disagree, or a unit has no bits or no weights.
    """

    bits: Numbers
    weights: Numbers
    repeats: Numbers | int = 1

    def __post_init__(self) -> None:
        if self.bits.ndim != 1 or self.bits.shape != self.weights.shape or not self.bits.size:
            raise ConfigError(
                f"a report's units have bits of shape {self.bits.shape} and weights of shape {self.weights.shape}, expected (R,) for both, "
                "with R at least 1"
            )
        if min(self.bits.min(), self.weights.min()) < 1:
            raise ConfigError("each unit of a report must have at least one bit and one weight")

    @classmethod
    def equal(cls, count: int, bits: int) -> Units:
        """Return the layout of ``count`` units, each about one weight and of ``bits`` bits."""
        return cls(np.array([bits], dtype=np.int64), np.array([1], dtype=np.int64), np.array([count], dtype=np.int64))

    @classmethod
    def whole(cls, dimension: int, bits: int) -> Units:
        """Return the layout of a report that must stay together: one unit of ``bits`` bits about all ``dimension`` weights."""
        return cls(np.array([bits], dtype=np.int64), np.array([dimension], dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of units."""
        return int(np.broadcast_to(self.repeats, self.bits.shape).sum())

    @property
    def payload_bits(self) -> int:
        """Number of bits of all units together."""
        return int((self.bits * self.repeats).sum())

    @property
    def dimension(self) -> int:
        """Number of coordinates that all units together are about."""
        return int((self.weights * self.repeats).sum())

    def bits_and_weights_per_unit(self) -> tuple[Numbers, Numbers]:
        """Return the number of bits and the number of weights of each unit, (U,) both."""
        return np.repeat(self.bits, self.repeats), np.repeat(self.weights, self.repeats)


@dataclass(frozen=True)
class SampledUnits(SeparateUnits):
    """Units about weights that each client samples for itself. A unit carries the index of its weight, and a float32.

    Units are read one by one: a reader gets reports of one unit each, and its argument are the ranges of all weights.

    Attributes:
        count: number k of weights that a client reports.
        dimension: number d of weights of the model.
    """

    count: int
    dimension: int

    @property
    def payload_bits(self) -> int:
        """Number of bits of all units together: a float32 and an index each."""
        return self.count * (FLOAT_BITS + index_bits(self.dimension))
