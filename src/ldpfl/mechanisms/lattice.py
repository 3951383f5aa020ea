"""Integer vectors with Gaussian noise. The server sees each client's vector, or only the sum over clients (``summed``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log2, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.exact_noise import MOST_STEPS, NORMAL, draw_rounded_noise
from ldpfl.mechanisms.noise import ConstantNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.mechanisms.reports.units import MixedCoordinates, Units
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.mechanisms.settings import Facts
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source, blocks

if TYPE_CHECKING:
    from torch import Tensor

LEAST_NOISE = 2.0**-10
"""Smallest noise multiplier. With :data:`STEPS` lattice points per C, a standard deviation then has 1024 points."""
MOST_NOISE = MOST_STEPS / STEPS
"""Largest noise multiplier."""

ROUNDED_UP = 1 + 2.0**-48
"""Factor on mu = 2 / noise_multiplier, so that it is an upper bound in spite of rounding."""

_MAX_STDS = 12
"""Number of standard deviations that a Gaussian value exceeds with probability 1e-32, which counts as never."""
_MIN_STD = 2.0**10
"""Smallest number of lattice points per standard deviation of one client's noise. Decision 0023 bounds the effect of rounding for it."""
_MAX_SHORTENING = 2.0**-6
"""Largest part of C by which rounding towards 0 may shorten a vector. Rounding changes each of d coordinates by less than a lattice point,
and so the vector by less than C sqrt(d) / steps."""


@dataclass(frozen=True)
class Lattice:
    """Format of the integers that clients send, which stand for points of a lattice.

    Attributes:
        steps: number of lattice points per norm C, a power of two.
        bits: width of a number, 32 or 64. Sums are right modulo 2^bits. So they are exact if each of their coordinates lies in
            [-2^(bits - 1), 2^(bits - 1)).
    """

    steps: int = STEPS
    bits: int = 64

    @classmethod
    def of(cls, facts: Facts, parts: float, noise_multiplier: float) -> Lattice:
        """Return the default lattice, or if reports are summed, that of :meth:`for_sum`, which explains the other arguments."""
        return cls.for_sum(facts.clients, parts, noise_multiplier, facts.ranges.dimension) if facts.summed else cls()

    @classmethod
    def for_sum(cls, clients: int, parts: float, noise_multiplier: float, dimension: int) -> Lattice:
        """Return the lattice for a sum over ``clients`` clients: 32 bits if that keeps sums exact and rounding harmless, else 64.

        Proof that sums are exact. Let n = ``clients``, N = n x ``parts`` and s the noise multiplier. Each of N vectors has at most the
        length ``steps``, and so has each coordinate. The noise of n clients, before rounding, is one Gaussian with a standard deviation of
        s sqrt(n) ``steps`` points. It exceeds 12 standard deviations in one of 10^32 coordinates. Rounding moves the sum of the noise by at
        most n / 2 points. So |sum| <= (N + 12 s sqrt(n)) ``steps`` + n / 2, and ``steps`` is the largest power of two that keeps this below
        2^31. If clients have more records than stated, a sum may wrap around. The mean is then wrong, but no privacy is lost, because
        wrapping happens after the noise was added.

        32 bits are used only if a client's noise has 2^10 points per standard deviation (decision 0023), and rounding towards 0 shortens a
        vector by less than C / 64.

        Args:
            clients: largest number of clients that are added up, which is public.
            parts: number of vectors of length C that a client adds up, on average over clients: its records, its persons, or 1.
            noise_multiplier: standard deviation of one client's noise, as a multiple of C.
            dimension: dimension of the vectors.

        Raises:
            ConfigError: the number of clients is unknown (0), or 64 bits are not enough.
        """
        if clients < 1:
            raise ConfigError(
                "shuffling.max_clients, the largest number of clients in a sum, is not set: add --set shuffling.max_clients=100, say"
            )
        length = clients * parts + _MAX_STDS * sqrt(clients) * noise_multiplier  # largest coordinate of a sum, in units of C
        if length * STEPS + clients / 2 >= 2.0**63:
            raise ConfigError(
                f"a sum over {clients:,} clients of {parts:,g} vectors each does not fit 64 bits: sum over fewer clients, or use less noise"
            )
        max_steps = (2.0**31 - clients / 2) / length
        steps = min(STEPS, 2 ** int(log2(max_steps))) if max_steps > 1 else 0  # 0: no power of two is small enough
        exact = steps * length + clients / 2 < 2.0**31  # checked again, since ``log2`` may have rounded up
        rounding_harmless = steps * noise_multiplier >= _MIN_STD and steps * _MAX_SHORTENING >= sqrt(dimension)
        return cls(steps, 32) if exact and rounding_harmless else cls()


@dataclass(frozen=True)
class LatticeMechanism(VectorMechanism):
    """Add exact Gaussian noise, rounded to a lattice, to vectors of lattice points whose length is bounded.

    Attributes:
        clip: the norm C, and the number of lattice points per C.
        noise_multiplier: standard deviation of one client's noise, as a multiple of C.
        summed: whether the server learns only the sum over all clients.
        bits: width of the numbers that a client sends if reports are summed.
    """

    clip: RecordClip
    noise_multiplier: float
    summed: bool = False
    bits: int = 64

    def __post_init__(self) -> None:
        if not (isfinite(self.noise_multiplier) and LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE):
            raise ConfigError(f"noise_multiplier must lie between {LEAST_NOISE:g} and {MOST_NOISE:g}, got {self.noise_multiplier:g}")
        std = self.clip.steps * float(self.noise_multiplier)
        if std < _MIN_STD:
            raise ConfigError(
                f"one client's noise has a standard deviation of {std:g} lattice points, expected {_MIN_STD:g} or more: "
                "set more steps (lattice points for each clipping norm), so that rounding to points is harmless"
            )
        if self.bits not in (32, 64):
            raise ConfigError(f"bits, the size of a lattice point, must be 32 or 64, got {self.bits!r}")

    @abstractmethod
    def _clipped_points(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the clipped ``values`` as lattice points, (K, d) int64, to which noise is still to be added.

        Raises:
            PrivacyError: the values are invalid and must not be sent.
        """

    @property
    @abstractmethod
    def _report_divisor(self) -> float:
        """Number by which a client's sum, in units of C, is divided to give its report."""

    @property
    def steps(self) -> int:
        """Number of lattice points per norm C."""
        return self.clip.steps

    def sent_ranges(self, ranges: LayerRanges) -> LayerRanges:
        """Return the ranges of the numbers that a client sends: ``ranges`` themselves, unless clipping is adaptive.

        With adaptive clipping a client sends one more number, which shows whether the vector was clipped. Then these ranges have the center
        0, and :meth:`_weight_estimates` adds the center of ``ranges`` afterwards.
        """
        return LayerRanges(0.0, 1.0, (self.clip.width(ranges.dimension),)) if self.clip.adaptive else ranges

    def points(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> NDArray[np.int64]:
        """Return the lattice points that each client adds to a sum, its own noise included, (K, d). Exact.

        A coordinate of the sum exceeds ``bits`` bits with a probability below 10^-32, see :meth:`Lattice.for_sum`. Even then the sum is
        right modulo 2^bits.

        Raises:
            PrivacyError: the values are invalid and must not be sent.
        """
        clipped, source = self._clipped_points(values, ranges).numpy(), as_source(generator)
        sent = np.empty(clipped.shape, dtype=np.int64)
        for rows, columns in blocks(len(clipped), clipped.shape[1], values=COORDINATE_BLOCK):  # small: noise takes several float64 arrays
            block = slice(rows.start, rows.stop), columns
            noise = draw_rounded_noise(NORMAL, self._noise_std, source, rows, columns.stop - columns.start)
            np.add(clipped[block], noise.astype(np.int64), out=sent[block])
        return sent

    @property
    def _vectors_held(self) -> float:
        """Average number of vectors that a client has: one for each record or person, or its whole update as one."""
        return 1.0

    @property
    def _vectors_in_round(self) -> float:
        """Average number of vectors that a client adds up in a round: less than it holds if records are sampled."""
        return 1.0

    def _norm_ratio(self, ranges: LayerRanges) -> float:
        """Return the factor on estimates: the norm C in ``ranges`` over that of the first round, or 1 if reports are in units of C."""
        return 1.0

    def max_sum_length(self, clients: int, asked: int, dimension: int, vector: float = 1.0) -> float:
        """Return a length, in lattice points, that an honest sum over ``clients`` of the ``asked`` clients exceeds once in 10^31.

        Proof: let x be the sum of honest vectors, each of length ``vector`` C at most. Let N be the number of vectors of all clients that
        were asked, since a few clients may hold most vectors. Then |x| <= N ``vector`` C. The noise z is Gaussian with standard deviation
        s sqrt(n) C in each coordinate, where s is ``noise_multiplier`` and n is ``clients``. Each of two events has a probability below
        10^-31: |z| exceeds its root mean square by 12 standard deviations, or the component of z along x exceeds 12 of them. So
        |x + z|^2 = |x|^2 + 2 x z + |z|^2 is bounded. Rounding adds less than n / 2 per coordinate.
        """
        noise_std, length = self._noise_std * sqrt(clients), asked * self._vectors_held * vector * self.steps
        squared = length**2 + 2 * _MAX_STDS * noise_std * length + noise_std**2 * (sqrt(dimension) + _MAX_STDS) ** 2
        return sqrt(squared) + clients / 2 * sqrt(dimension)

    def reports_from_sum(self, total: NDArray[np.int64], clients: int) -> SummedReports:
        """Return ``total`` (d,), the sum of the :meth:`points` of ``clients`` clients, as reports for :meth:`aggregate`.

        Raises:
            PrivacyError: this mechanism does not sum reports, or there are no clients.
        """
        if not self.summed:
            raise PrivacyError(f"{self.name} was built with summed=False, so it cannot read a sum over clients: build it with summed=True")
        if clients < 1:
            raise PrivacyError(f"a sum must have at least 1 client, got {clients} clients")
        return SummedReports(torch.from_numpy(total), clients, self._noise_std, self._scale, self.bits, mixed=True)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> VectorReports | SummedReports:
        """Return the clients' noisy vectors. If reports are summed, return the sum without noise, to which mixing adds the noise."""
        if self.summed:
            clipped = self._clipped_points(values, ranges)
            return SummedReports(clipped.sum(dim=0), len(clipped), self._noise_std, self._scale, self.bits)
        sent = torch.from_numpy(self.points(values, ranges, generator)).double().mul_(self._scale)
        return VectorReports(sent.float())

    @property
    def _noise_std(self) -> float:
        """Standard deviation of one client's noise, in lattice points."""
        return self.noise_multiplier * self.steps

    @property
    def _scale(self) -> float:
        """Value of one lattice point in an estimate."""
        return 1 / (self.steps * self.clip.shortened * self._report_divisor)

    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        return self._weight_estimates(self._mean(reports, ranges), ranges)

    def fraction_within(self, reports: Sequence[Any], ranges: LayerRanges) -> float:
        """Return an unbiased estimate of the share of vectors that were not longer than C. Its noise may put it outside 0 to 1.

        The last coordinate of each vector has ``clip.bit`` lattice points if the vector was not longer than C, else minus as many.
        """
        # Mean of the last coordinate over vectors, in lattice points.
        mean_bit = float(self._mean(reports, ranges)[-1]) / (self._scale * self._vectors_in_round)
        return (1 + mean_bit / self.clip.bit) / 2

    def _mean(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        """Return the mean over clients of all numbers that they sent, those of adaptive clipping included."""
        if reports and isinstance(reports[0], SummedReports):
            return reports[0].mean(self.sent_ranges(ranges))
        return super().aggregate(reports, self.sent_ranges(ranges))

    def _weight_estimates(self, sent: Tensor, ranges: LayerRanges) -> Tensor:
        """Return estimates (..., d) of the weights from ``sent``, the estimates of all numbers in :meth:`sent_ranges`."""
        if not self.clip.adaptive:
            return sent
        weights = sent[..., :-1].double()  # the last number shows whether the vector was clipped
        return (ranges.expand()[0] + weights * self._norm_ratio(ranges)).float()

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> VectorReports:
        return super().read(payloads, self.sent_ranges(ranges))

    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d) of the clients' vectors; impossible for a sum over clients."""
        if isinstance(reports, SummedReports):
            raise PrivacyError("a sum over clients cannot be decoded into single reports: use aggregate")
        return self._weight_estimates(super().decode(reports, self.sent_ranges(ranges)), ranges)

    def noise(self, ranges: LayerRanges) -> ConstantNoise:
        """Return the noise of a client's report. It does not depend on the values."""
        return ConstantNoise(ranges, self.noise_multiplier / (self._report_divisor * self.clip.shortened) * self._norm_ratio(ranges))

    def units(self, ranges: LayerRanges) -> Units:
        """Return one unit, the whole vector: a float32 for each number, or if reports are summed, a lattice point of 32 or 64 bits.

        With adaptive clipping the vector has d + 1 numbers for d weights. So the result also says which mechanism reads all d + 1 numbers,
        and how their mean is turned into d weights.

        Raises:
            ConfigError: clipping is adaptive, and the norm in ``ranges`` is out of range.
        """
        self.clip.in_round(ranges)  # raises if the norm is out of range
        sent = self.sent_ranges(ranges)
        units = Units.whole(sent.dimension, (self.bits if self.summed else 32) * sent.dimension)
        if not self.clip.adaptive:
            return units
        # Without adaptive clipping, the mechanism reads the last number, the clipping bit, as if it were one more weight.
        all_numbers_reader = replace(self, clip=replace(self.clip, adaptive=False))
        mixed = MixedCoordinates(sent, to_weights=lambda mean: self._weight_estimates(mean, ranges))
        return replace(units, reader=lambda part_ranges: all_numbers_reader, mixed=mixed)  # one reader, as the unit is never cut

    @property
    def properties(self) -> Properties:
        return replace(super().properties, delta=1e-5)
