"""Signs of a randomly rotated direction, each by randomised response. Their counts are nearly as accurate as a trusted server's noisy mean.

Let n clients send one bit with a small epsilon e for each of D coordinates in each of T rounds, and let only counts be revealed. The run
is then approximately mu-GDP for a client, with mu = e sqrt(D T / n). The mean sign of a coordinate has noise of standard deviation
2 / (e sqrt(n)). The coordinates of a randomly rotated direction are about N(0, 1 / D), of which the sign keeps a part sqrt(2 / pi). So the
noise is sqrt(pi / 2) = 1.25 times that of a trusted server which adds Gaussian noise to the mean direction, whatever D is. It does not
matter how many of the D bits a client sends, if it draws them in secret: with s bits, each may have sqrt(D / s) times the epsilon, as long
as that stays below about 1 (Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import Mechanism, PerRound, PublicState, require_finite
from ldpfl.mechanisms.coins import FIRST_BITS, Places, compare_random_words
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import BitReports, Encoder
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.mechanisms.reports.units import MixedCoordinates, Units
from ldpfl.mechanisms.rotation import rotate, rotate_back, rotated_size
from ldpfl.mechanisms.sampled_groups import GroupCounts, Groups, sample_places
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import BinaryRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Count, NotNegative
from ldpfl.util.randomness import RandomSource, as_source, client_blocks

if TYPE_CHECKING:
    from torch import Tensor


def sign_scale(size: int) -> float:
    """Return the value that a sign stands for in a rotated direction with ``size`` coordinates: sqrt(pi / (2 size)).

    A coordinate is about normal with variance 1 / size, and this value makes the mean sign an unbiased estimate of the direction.
    """
    return sqrt(pi / (2 * size))


@dataclass(frozen=True)
class RotatedSign(Mechanism, PerRound):
    """Send the sign of each coordinate of the update's direction after a public random rotation, by randomised response.

    Guarantee: epsilon-LDP (pure) for each of the D / group bits of a report, for any update. D is the number of weights, rounded up to a
    power of two. This hardly protects a whole report: the mechanism is meant for a shuffler, or a sum, which shows only how often each
    bit was sent. Assumes unguessable random bits. The public rotation costs nothing, since it does not depend on the update.

    Reports are in units of ``norm``. An update of at least this length counts as one of length 1. A shorter one keeps its relative length:
    its signs are sent with less certainty. With ``norm`` 0 every update counts as its direction. The estimate of the clients' mean is
    unbiased over random rotations if no weight dominates an update, and up to sqrt(pi / 2) times too long if one does. A zero update sends
    uniformly random bits. Only the centers of ``ranges`` are used.

    Source: Erlingsson et al. 2020 for gradients in bits behind a shuffler; Suresh et al. 2017 for the rotation; Bernstein et al. 2018
    for signs. Confidence high: every factor is measured in ``tests/mechanisms/test_rotated_sign.py``.

    Attributes:
        epsilon: epsilon of one bit.
        norm: clipping norm, and the unit of reports; 0 to use directions only.
        group: size of groups of consecutive rotated coordinates. A client secretly draws one coordinate of each group, and sends its sign.
            With 1 it sends all signs.
        round: number of the round, which determines the rotation; :meth:`in_round` sets it.
    """

    epsilon: float
    norm: float = 0.0
    group: int = 1
    round: int = 1
    name: ClassVar[str] = "rotated-sign"

    def __post_init__(self) -> None:
        thresholds(self.epsilon)  # raises if ``epsilon`` is invalid
        if not (self.norm == 0 or 1e-20 <= self.norm <= 1e20):
            raise ConfigError(f"norm must be 0 or lie between 1e-20 and 1e20, got {self.norm!r}")
        Harmony(self.epsilon, self.group)  # raises if ``group`` is invalid

    def in_round(self, public: PublicState) -> RotatedSign:
        return replace(self, round=public.round)

    @property
    def terms(self) -> RotatedSign:
        """This mechanism without the round's number, which everybody knows."""
        return replace(self, round=1)

    @property
    def _bit_mechanism(self) -> Duchi | Harmony:
        """The mechanism whose wire format and estimator the signs use: randomised response on each coordinate or group."""
        return Duchi(self.epsilon) if self.group == 1 else Harmony(self.epsilon, self.group)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Any:
        """Randomise the signs of all rotated coordinates, or of one coordinate of each group, which each client draws."""
        signs, lengths = self.signs_and_lengths(values, ranges)
        source = as_source(generator)
        if self.group == 1:
            return self._randomise(signs, lengths, source)
        groups = Groups.of(self.rotated_ranges(ranges), self.group)
        index = sample_places(source, len(signs), groups.sizes)
        bits = self._randomise(signs.gather(1, torch.from_numpy(index + groups.starts)), lengths, source)
        return IndexedBitReports(index, bits.unpack().view(np.bool_), groups.sizes)

    def _randomise(self, signs: Tensor, lengths: Tensor, source: RandomSource) -> BitReports:
        """Randomise ``signs`` (K, s), which are -1, 0 or 1, to bits. The relative ``lengths`` (K,), at most 1, scale a client's bias."""
        lowest, _ = thresholds(self.epsilon)
        half = (1 << (BITS - 1)) - lowest  # + is sent when a uniform int32 lies below a threshold from -half to half
        # A client's threshold is its limit (K, 1) for a sign +, minus its limit for -, and 0 for a sign 0.
        limits = (lengths * half).round_().to(torch.int64).clamp_(0, half).numpy()[:, None]

        def make_encoder(columns: slice) -> Encoder:
            """Return a function that randomises the signs at ``columns``."""

            def draw_bits(rows: range) -> NDArray[np.bool_]:
                """Return the bits (k, b) of clients ``rows``. A bit is 1 if a random word is below its sign times the client's limit."""
                block, limit = signs[rows.start : rows.stop, columns].numpy(), limits[rows.start : rows.stop]
                high, low = np.divmod(limit, 1 << (BITS - FIRST_BITS))
                first_bits = np.multiply(block, high.astype(np.int16), dtype=np.int16)
                first_bits -= (block < 0) & (low > 0)  # the first bits of -limit are -high - 1, unless low is 0
                return compare_random_words(first_bits, partial(_signed_limits, block, limit), source, rows)

            return draw_bits

        return BitReports.from_encoder(make_encoder, *signs.shape)

    def signs_and_lengths(self, values: Tensor, ranges: LayerRanges) -> tuple[Tensor, Tensor]:
        """Return the signs -1, 0 or 1 (K, D) int8 of the updates in ``values`` (K, d), rotated, and the updates' lengths (K,).

        An update is a row of ``values`` less the ranges' center. Its rotation is that of the round :attr:`round`. Lengths are multiples of
        ``norm``, at most 1, or 1 if ``norm`` is 0.
        """
        values = require_finite(values, ranges)
        center, _ = ranges.expand()
        signs = torch.empty(len(values), rotated_size(ranges.dimension), dtype=torch.int8)
        lengths = torch.empty(len(values), dtype=torch.float64)
        for rows in client_blocks(*signs.shape):  # so that intermediate arrays stay small
            block = slice(rows.start, rows.stop)
            updates = (values[block] - center).float() if bool(center.any()) else values[block]
            # Scaled by the largest entry, so that no square underflows or overflows, whatever center a server chose.
            largest = updates.abs().amax(dim=1, keepdim=True)
            scaled = torch.where(largest > 0, updates / largest, 0.0)
            # NumPy always adds up a row in the same order; PyTorch's order depends on the number of rows.
            squares = np.square(scaled.numpy(), dtype=np.float64).sum(axis=1)
            lengths[block] = torch.from_numpy(np.sqrt(squares)) * largest[:, 0]
            signs[block] = rotate(scaled, self.round).sign_()
        if self.norm == 0:  # every update counts as its direction
            return signs, torch.ones_like(lengths)
        return signs, (lengths / self.norm).clamp_(0, 1)

    @property
    def gain(self) -> float:
        """A: a bit stands for +A or -A. Computed from the integer thresholds, so that the estimate is unbiased."""
        return Duchi(self.epsilon).gain

    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d): those of the rotated coordinates, rotated back."""
        return self._rotate_back(self._bit_mechanism.decode(reports, self.rotated_ranges(ranges)), ranges)

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> Any:
        return self._bit_mechanism.read(payloads, self.rotated_ranges(ranges))

    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        """Return the mean estimate (d,): that of the rotated coordinates, rotated back."""
        return self._rotate_back(self._bit_mechanism.aggregate(reports, self.rotated_ranges(ranges)), ranges)

    def noise(self, ranges: LayerRanges) -> Noise:
        return _SignNoise(self, ranges)

    def units(self, ranges: LayerRanges) -> Units:
        """Return the layout: one bit for each rotated coordinate, or an index and a bit for each group of them."""
        coordinates = self.rotated_ranges(ranges)
        units = self._bit_mechanism.units(coordinates)
        mixed = MixedCoordinates(coordinates, to_weights=lambda mean: self._rotate_back(mean, ranges))
        # Bits about some rotated coordinates are read by the bit mechanism. ``harmony`` names a reader for its groups; ``duchi`` names
        # none, because it reads bits about any coordinates itself.
        reader = units.reader or (lambda part_ranges: self._bit_mechanism)
        return replace(units, reader=reader, mixed=mixed)

    def rotated_ranges(self, ranges: LayerRanges) -> LayerRanges:
        """Return the ranges of a rotated direction: a sign stands for plus or minus the radius."""
        size = rotated_size(ranges.dimension)
        return LayerRanges(0.0, sign_scale(size), (size,))

    def _rotate_back(self, mean: Tensor, ranges: LayerRanges) -> Tensor:
        """Rotate ``mean`` (..., D) back to weights, (..., d), and add the ranges' center."""
        center, _ = ranges.expand()
        return (center + rotate_back(mean.double(), ranges.dimension, self.round)).float()

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        """Return the release: one bit for each group of rotated coordinates, about a coordinate that is drawn in secret."""
        bits = GroupCounts.of(self.rotated_ranges(ranges), self.group).groups
        realised = Duchi(self.epsilon).epsilon_realised
        return BinaryRelease(self.name, self.epsilon, bits, unit="coordinate", realised=realised, sampled=self.group)

    @property
    def properties(self) -> Properties:
        return Properties(
            adds_up=self._bit_mechanism.properties.adds_up,
            source="Erlingsson et al. 2020; Suresh et al. 2017",
            assumptions=("the rotation is public", "random bits are uniform and secret"),
        )


def _signed_limits(signs: NDArray[np.int8], limits: Places, row: Places, column: Places) -> Places:
    """Return the thresholds (m,) at rows ``row`` (m,) and columns ``column`` (m,): the client's limit times the coordinate's sign."""
    return np.asarray(signs[row, column] * limits[row, 0])


@dataclass(frozen=True, eq=False)
class _SignNoise(Noise):
    """The error of the estimates after rotating back: the same in each weight."""

    mechanism: RotatedSign
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        """Return (g A^2 - s) pi / (2 D) for the group size g, the gain A and D rotated coordinates.

        s is the mean square of (relative length x sign) over the coordinates: 1 for a vector of full length without zero signs.
        """
        mechanism = self.mechanism
        signs, lengths = mechanism.signs_and_lengths(values, self.ranges)
        mean_square = signs.square().double().mean(dim=1, keepdim=True) * lengths[:, None] ** 2
        sizes = Groups.of(mechanism.rotated_ranges(self.ranges), mechanism.group).sizes
        mean_size = float(sizes @ sizes) / signs.shape[1]  # g, or slightly less if the last group is smaller
        variance = (mean_size * mechanism.gain**2 - mean_square) * sign_scale(signs.shape[1]) ** 2  # sign_scale: sqrt(pi / (2 D))
        return variance.expand(-1, self.ranges.dimension).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return the square of :meth:`largest_std`, an upper bound. It is tight for a small epsilon, where the gain is large."""
        return torch.full_like(mean, float(self.largest_std(clients)[0]) ** 2, dtype=torch.float32)

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return A sqrt(g pi / (2 D n)) for each layer, with the gain A, group size g, D rotated coordinates and n = ``clients``."""
        scale = self.mechanism.gain * sign_scale(rotated_size(self.ranges.dimension))
        return np.full_like(self.ranges.radii, scale * sqrt(self.mechanism.group / clients))


class RotatedSignSettings(EpsilonSettings):
    """Settings of ``rotated-sign``."""

    name: Literal["rotated-sign"] = "rotated-sign"
    perturbed: Literal["update", "gradient"] = "gradient"

    norm: NotNegative = 0.02
    """Clipping norm: a longer gradient or update is shortened to it. With a small one nearly all are, so only their directions count."""

    group: Count = 1
    """Size of a group of rotated coordinates. A client sends one of each group, drawn in secret. This saves bytes, and costs little
    accuracy if epsilon is small."""

    uses_ranges: ClassVar[bool] = False
    sends_bits: ClassVar[bool] = True

    @property
    def nearly_noise_free(self) -> RotatedSignSettings:
        """These settings at epsilon 30, at which nearly all signs are sent as they are."""
        return self.model_copy(update={"epsilon": 30.0, "budget": "unit"})

    def at(self, epsilon: float) -> RotatedSign:
        return RotatedSign(epsilon, self.norm, self.group)
