"""How one client's report is laid out in units that may be released apart from each other."""

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

ReaderT = TypeVar("ReaderT")
"""What reads reports: a mechanism."""


@dataclass(frozen=True, eq=False)
class MixedCoordinates:
    """Coordinates that a mechanism makes of the weights before it randomises them, such as a rotation.

    Attributes:
        ranges: of the coordinates.
        to_weights: returns the weights (d,) that a mean (D,) of coordinates stands for; 0 stands for a coordinate that nobody reported.
    """

    ranges: LayerRanges
    to_weights: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Apart:
    """How units are read without the others of their report.

    Attributes:
        reader: returns the mechanism whose reports are whole units alone, those about a part of the ranges. None if the mechanism itself
            reads them: it looks at nothing but the units that it gets.
        mixed: what units are about, where that is not the weights.
    """

    reader: Callable[[LayerRanges], Any] | None = field(default=None, kw_only=True, repr=False, compare=False)
    mixed: MixedCoordinates | None = field(default=None, kw_only=True, repr=False, compare=False)

    def read_by(self, mechanism: ReaderT, part: LayerRanges) -> ReaderT:
        """Return what reads the units about ``part`` of the coordinates, in a report of ``mechanism``."""
        own: ReaderT = mechanism if self.reader is None else self.reader(part)
        return own

    def about(self, ranges: LayerRanges) -> LayerRanges:
        """Return the ranges of the coordinates that units are about: ``ranges`` themselves, unless the weights are mixed."""
        return ranges if self.mixed is None else self.mixed.ranges


@dataclass(frozen=True, eq=False)
class Units(Apart):
    """Units that follow one another on the wire, each about its own weights, which follow one another as well.

    Equal units in a row are stated once, so that a very large model takes no memory here.

    Attributes:
        bits: (R,) int64, bits of a unit on the wire, lowest bit of the first byte first; zero bits fill the last byte.
        weights: (R,) int64, how many weights a unit is about.
        repeats: (R,) int64, how many such units follow one another; 1 if all are stated one by one.

    Raises:
        ConfigError: shapes disagree, or a unit without bits or weights.
    """

    bits: Numbers
    weights: Numbers
    repeats: Numbers | int = 1

    def __post_init__(self) -> None:
        if self.bits.ndim != 1 or self.bits.shape != self.weights.shape or not self.bits.size:
            raise ConfigError(f"units have bits {self.bits.shape} and weights {self.weights.shape}, expected (U,) for both, U at least 1")
        if min(self.bits.min(), self.weights.min()) < 1:
            raise ConfigError("every unit must have at least one bit and one weight")

    @classmethod
    def equal(cls, count: int, bits: int) -> Units:
        """``count`` units of one weight and ``bits`` bits each."""
        return cls(np.array([bits], dtype=np.int64), np.array([1], dtype=np.int64), np.array([count], dtype=np.int64))

    @classmethod
    def whole(cls, dimension: int, bits: int) -> Units:
        """One unit about all ``dimension`` weights: nothing may be taken apart."""
        return cls(np.array([bits], dtype=np.int64), np.array([dimension], dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of units."""
        return int(np.broadcast_to(self.repeats, self.bits.shape).sum())

    @property
    def payload_bits(self) -> int:
        """Bits of all units together."""
        return int((self.bits * self.repeats).sum())

    @property
    def dimension(self) -> int:
        """Number of coordinates that all units together are about."""
        return int((self.weights * self.repeats).sum())

    def one_by_one(self) -> tuple[Numbers, Numbers]:
        """Return the bits and the weights of each unit, (U,) both."""
        return np.repeat(self.bits, self.repeats), np.repeat(self.weights, self.repeats)


@dataclass(frozen=True)
class SampledUnits(Apart):
    """Units about weights that each client draws for itself: a unit carries the index of its weight, and a float32.

    They come one by one, so a reader gets reports of one unit each, and its part covers all weights.

    Attributes:
        count: how many weights k a client reports.
        dimension: of how many, d.
    """

    count: int
    dimension: int

    @property
    def payload_bits(self) -> int:
        """Bits of all units together."""
        return self.count * (32 + index_bits(self.dimension))
