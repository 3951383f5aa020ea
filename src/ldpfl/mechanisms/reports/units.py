"""How one client's report is laid out in units that may be released apart from each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Units:
    """Units that follow one another on the wire, each about its own weights, which follow one another as well.

    Attributes:
        bits: (U,) int64, bits of each unit on the wire, lowest bit of the first byte first; zero bits fill the last byte.
        weights: (U,) int64, how many weights each is about.

    Raises:
        ConfigError: shapes disagree, or a unit without bits or weights.
    """

    bits: NDArray[np.int64]
    weights: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.bits.ndim != 1 or self.bits.shape != self.weights.shape or not self.bits.size:
            raise ConfigError(f"units have bits {self.bits.shape} and weights {self.weights.shape}, expected (U,) for both, U at least 1")
        if min(self.bits.min(), self.weights.min()) < 1:
            raise ConfigError("every unit must have at least one bit and one weight")

    @classmethod
    def equal(cls, count: int, bits: int) -> Units:
        """``count`` units of one weight and ``bits`` bits each."""
        return cls(np.full(count, bits, dtype=np.int64), np.ones(count, dtype=np.int64))

    @classmethod
    def whole(cls, dimension: int, bits: int) -> Units:
        """One unit about all ``dimension`` weights: nothing may be taken apart."""
        return cls(np.array([bits], dtype=np.int64), np.array([dimension], dtype=np.int64))


@dataclass(frozen=True)
class SampledUnits:
    """Units about weights that each client draws for itself: a unit carries the index of its weight.

    Attributes:
        count: how many weights k a client reports.
        dimension: of how many, d.
    """

    count: int
    dimension: int
