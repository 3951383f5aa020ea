"""Integer vectors with Gaussian noise: a client's by itself, or points of which a server learns nothing but the sum over clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log2, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.exact_noise import MOST_STEPS, NORMAL, rounded
from ldpfl.mechanisms.noise import ConstantNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK, blocks
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.mechanisms.settings import Facts
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource, as_source

if TYPE_CHECKING:
    from torch import Tensor

LEAST_NOISE = 2.0**-10
"""Smallest noise multiplier: with :data:`STEPS` lattice points to C, a thousand to a standard deviation."""
MOST_NOISE = MOST_STEPS / STEPS

UP = 1 + 2.0**-48
"""More than what rounding 2 / noise_multiplier can take off."""

_DEVIATIONS = 12
"""A Gaussian exceeds so many standard deviations once in 10^32."""
_LEAST_SHARE = 2.0**10
"""Fewest lattice points to a standard deviation of one client's noise, for which decision 0023 bounds what rounding changes."""
_PART_LOST = 2.0**-6
"""Largest part of C that rounding towards 0 may take off a vector: it takes less than a point off each of d coordinates, and so less
than sqrt(d) / steps of C off the vector."""


@dataclass(frozen=True)
class Lattice:
    """The integers that clients send: so many points to the norm C, so many bits to a number.

    Attributes:
        steps: lattice points to C, a power of two.
        bits: of a number, 32 or 64. Sums are right modulo 2^bits, and so exact where each coordinate lies in [-2^(bits - 1), 2^(bits - 1)).
    """

    steps: int = STEPS
    bits: int = 64

    @classmethod
    def of(cls, facts: Facts, parts: float, noise_multiplier: float) -> Lattice:
        """Return the lattice for a federation of which ``facts`` are public: that :meth:`for_sum` where reports are summed."""
        return cls.for_sum(facts.clients, parts, noise_multiplier, facts.ranges.dimension) if facts.summed else cls()

    @classmethod
    def for_sum(cls, clients: int, parts: float, noise_multiplier: float, dimension: int) -> Lattice:
        """Return the lattice for a sum over ``clients``: 32 bits where that keeps sums exact and rounding harmless, else 64.

        Proof that sums are exact: each of N = clients x parts vectors is no longer than ``steps`` points, and so is no coordinate of it.
        The noise of n clients, before it is rounded, is one Gaussian of s sqrt(n) ``steps`` points, s being the noise multiplier; it
        exceeds 12 standard deviations in one of 10^32 coordinates. Rounding moves the sum of n clients' noise by n / 2 points at most.
        So |sum| <= (N + 12 s sqrt(n)) ``steps`` + n / 2, and ``steps`` is the largest power of two that keeps this below 2^31. Where
        clients have more records than was said, a sum may wrap around: the mean is wrong then, and no privacy is lost, because it is
        computed from the noised points alone.

        32 bits are taken only if a client's noise has 2^10 points to a standard deviation (decision 0023), and rounding towards 0 takes
        less than 1/64 of C off a vector.

        Args:
            clients: most that are added up, which is public.
            parts: vectors of length C that a client adds up, on average over the clients: its records, its persons, or 1.
            noise_multiplier: standard deviation of one client's noise, as a multiple of C.
            dimension: of the vectors.

        Raises:
            ConfigError: nobody said how many clients there are, or 64 bits are not enough.
        """
        if clients < 1:
            raise ConfigError("how many clients are added up is public and has to be said, as by --set shuffling.max_clients=100")
        length = clients * parts + _DEVIATIONS * sqrt(clients) * noise_multiplier
        if length * STEPS + clients / 2 >= 2.0**63:
            raise ConfigError(f"a sum over {clients:,} clients of {parts:,g} vectors each does not fit 64 bits: take fewer, or less noise")
        room = (2.0**31 - clients / 2) / length
        steps = min(STEPS, 2 ** int(log2(room))) if room > 1 else 0
        if steps * length + clients / 2 < 2.0**31 and steps * noise_multiplier >= _LEAST_SHARE and steps * _PART_LOST >= sqrt(dimension):
            return cls(steps, 32)
        return cls()


@dataclass(frozen=True)
class LatticeMechanism(VectorMechanism):
    """Add real Gaussian noise, rounded to a lattice, to vectors of lattice points whose length is bounded.

    Attributes:
        clip: the norm C, and how many lattice points there are to it.
        noise_multiplier: standard deviation of one client's noise, as a multiple of C.
        summed: whether the server learns nothing but the sum over all clients.
        bits: of a number that a client sends where reports are summed.
    """

    clip: RecordClip
    noise_multiplier: float
    summed: bool = False
    bits: int = 64

    def __post_init__(self) -> None:
        if not (isfinite(self.noise_multiplier) and LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE):
            raise ConfigError(f"noise_multiplier must lie between {LEAST_NOISE:g} and {MOST_NOISE:g}, got {self.noise_multiplier:g}")
        if self.bits not in (32, 64):
            raise ConfigError(f"a lattice point has 32 or 64 bits, got {self.bits!r}")

    @abstractmethod
    def _bounded(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the lattice points (K, d) int64 that ``values`` stand for, without noise.

        Raises:
            PrivacyError: values that must not leave.
        """

    @property
    @abstractmethod
    def _share(self) -> float:
        """How many times C make a report of length 1."""

    @property
    def steps(self) -> int:
        """Lattice points to the norm C."""
        return self.clip.steps

    def points(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> NDArray[np.int64]:
        """Return what each client adds to a sum: its lattice points with its own noise in them, (K, d). Exact.

        A coordinate takes more than ``bits`` bits with a probability below 10^-32, see :meth:`Lattice.for_sum`; modulo 2^bits the sum
        is right all the same.

        Raises:
            PrivacyError: values that must not leave.
        """
        bounded, source = self._bounded(values, ranges).numpy(), as_source(generator)
        sent = np.empty(bounded.shape, dtype=np.int64)
        for rows, own in blocks(len(bounded), ranges.dimension, values=COORDINATE_BLOCK):  # of 64 bits, several times
            some, noise = slice(rows.start, rows.stop), rounded(NORMAL, self._noise, source, rows, own.stop - own.start)
            np.add(bounded[some, own], noise.astype(np.int64), out=sent[some, own])
        return sent

    @property
    def _vectors(self) -> float:
        """Vectors of length C that a client adds up, on average."""
        return 1.0

    def longest_sum(self, clients: int, asked: int, dimension: int, vector: float = 1.0) -> float:
        """Return the length, in lattice points, that a sum over ``clients`` of the ``asked`` exceeds once in 10^31 if all are honest.

        Proof: the sum x of honest vectors, each of length ``vector`` C or less, is no longer than N times that. N counts the vectors of all
        that were asked. The noise z is a Gaussian of s sqrt(n) C a coordinate. Its length exceeds its root-mean-square one by 12 such
        deviations, and its part along x exceeds 12 of them, with a probability below 10^-31 each. So |x + z|^2 = |x|^2 + 2 x z + |z|^2 is
        bounded; rounding adds less than n / 2 a coordinate.
        """
        noise, length = self._noise * sqrt(clients), asked * self._vectors * vector * self.steps
        squared = length**2 + 2 * _DEVIATIONS * noise * length + noise**2 * (sqrt(dimension) + _DEVIATIONS) ** 2
        return sqrt(squared) + clients / 2 * sqrt(dimension)

    def sum_of(self, total: NDArray[np.int64], clients: int) -> SummedReports:
        """Return the reports that a ``total`` (d,) of the :meth:`points` of so many ``clients`` stands for, for :meth:`aggregate`.

        Raises:
            PrivacyError: reports are not summed here, or there are no clients.
        """
        if not self.summed or clients < 1:
            raise PrivacyError(f"a sum is taken over 1 client or more, of reports that are to be summed; got {clients} clients")
        return SummedReports(torch.from_numpy(total), clients, self._noise, self._scale, self.bits, mixed=True)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> VectorReports | SummedReports:
        if self.summed:
            bounded = self._bounded(values, ranges)
            return SummedReports(bounded.sum(dim=0), len(bounded), self._noise, self._scale, self.bits)
        sent = torch.from_numpy(self.points(values, ranges, generator)).double().mul_(self._scale)
        return VectorReports(sent.float())

    @property
    def _noise(self) -> float:
        """Standard deviation of one client's noise, in lattice points."""
        return self.noise_multiplier * self.steps

    @property
    def _scale(self) -> float:
        """What a lattice point of a report stands for."""
        return 1 / (self.steps * self._share)

    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        if reports and isinstance(reports[0], SummedReports):
            return reports[0].mean(ranges)
        return super().aggregate(reports, ranges)

    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        if isinstance(reports, SummedReports):
            raise PrivacyError("of a sum over clients nobody can say what one of them sent")
        return super().decode(reports, ranges)

    def noise(self, ranges: LayerRanges) -> ConstantNoise:
        """The noise of a client's report, whatever the values."""
        return ConstantNoise(ranges, self.noise_multiplier / self._share)

    def units(self, ranges: LayerRanges) -> Units:
        """A float32 a weight, or a lattice point of 32 or 64 bits where reports are to be summed; the whole vector is one unit."""
        return Units.whole(ranges.dimension, (self.bits if self.summed else 32) * ranges.dimension)

    @property
    def properties(self) -> Properties:
        return replace(super().properties, delta=1e-5)
