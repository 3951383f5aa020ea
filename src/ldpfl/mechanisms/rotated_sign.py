"""The signs of a rotated direction, each by randomised response: counts of them say nearly as much as a trusted server's noisy mean.

n clients, D coordinates, T rounds, one bit each with a small epsilon e, of which only counts are revealed: the run is mu-GDP for a client
with mu = e sqrt(D T / n), nearly. A coordinate of the mean sign then has noise 2 / (e sqrt(n)). Rotated at random, a direction has
coordinates of about N(0, 1 / D), of which a sign keeps sqrt(2 / pi); so the noise is sqrt(pi / 2) = 1.25 times that of a trusted server
which adds Gaussian noise to the mean direction, whatever D is. Nor does it matter how many of the D bits a client sends, if it draws in
secret which: of s bits each may have sqrt(D / s) times the epsilon, while that stays below 1 or so (Chen et al. 2023).
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
from ldpfl.mechanisms.base import Mechanism, PublicState, require_finite
from ldpfl.mechanisms.coins import FIRST, words_below
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.hooks import PerRound
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import client_blocks
from ldpfl.mechanisms.reports.bits import BitReports, Encoder
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.mechanisms.reports.units import MixedCoordinates, Units
from ldpfl.mechanisms.rotation import rotate, rotate_back, rotated_size
from ldpfl.mechanisms.sampled_groups import GroupCounts, Groups, sample_places
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import BinaryRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Count, NotNegative
from ldpfl.util.randomness import RandomSource, as_source

if TYPE_CHECKING:
    from torch import Tensor


def sign_scale(size: int) -> float:
    """Return what a sign stands for in a coordinate of a rotated direction."""
    return sqrt(pi / (2 * size))


@dataclass(frozen=True)
class RotatedSign(Mechanism, PerRound):
    """Send the sign of each coordinate of the update's direction after a public random rotation, by randomised response.

    Guarantee: epsilon-LDP (pure) for each of the D / group bits of a report, whatever the update was; D is the number of weights, rounded
    up to a power of two. On its own that is next to nothing: it is meant for a shuffler, or a sum, which shows how often each bit was sent.
    Assumes unguessable random bits; that the rotation is public costs nothing, since it is fixed before the update is looked at.

    Reports are in units of ``norm``: an update of this length or more counts as one of length 1, a shorter one as what it is, its signs
    told with less confidence. With ``norm`` 0 all count as directions. The estimate is of the clients' mean, right on average over
    rotations where none of an update's weights stands out, and up to sqrt(pi / 2) times too long where one does. An update of 0 sends
    bits of pure chance. Of ``ranges`` only the centers are used.

    Source: Erlingsson et al. 2020 for gradients in bits behind a shuffler; Suresh et al. 2017 for the rotation; Bernstein et al. 2018
    for signs. Confidence high: every factor is measured in ``tests/mechanisms/test_rotated_sign.py``.

    Attributes:
        epsilon: of one bit.
        norm: longest length that counts, and the unit of reports; 0 for directions alone.
        group: of so many rotated coordinates in a row a client draws one in secret, and sends its sign alone; 1 for all of them.
        round: which rotation is used; :meth:`in_round` sets it.
    """

    epsilon: float
    norm: float = 0.0
    group: int = 1
    round: int = 1
    name: ClassVar[str] = "rotated-sign"

    def __post_init__(self) -> None:
        thresholds(self.epsilon)
        if not (self.norm == 0 or 1e-20 <= self.norm <= 1e20):
            raise ConfigError(f"norm must be 0 or lie between 1e-20 and 1e20, got {self.norm!r}")
        Harmony(self.epsilon, self.group)  # refuses what is no group

    def in_round(self, public: PublicState) -> RotatedSign:
        return replace(self, round=public.round)

    @property
    def terms(self) -> RotatedSign:
        """Without the round's number, which everybody knows."""
        return replace(self, round=1)

    @property
    def _sent(self) -> Duchi | Harmony:
        """What reads the signs: bits by randomised response, like those of any value."""
        return Duchi(self.epsilon) if self.group == 1 else Harmony(self.epsilon, self.group)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Any:
        signs, lengths = self.signs(values, ranges)
        source = as_source(generator)
        if self.group == 1:
            return self._randomise(signs, lengths, source)
        groups = Groups.of(self.coordinates(ranges), self.group)
        index = sample_places(source, len(signs), groups.sizes)
        bits = self._randomise(signs.gather(1, torch.from_numpy(index + groups.starts)), lengths, source)
        plus = np.unpackbits(bits.packed, axis=1, count=groups.sizes.size, bitorder="little").view(np.bool_)
        return IndexedBitReports(index, plus, groups.sizes)

    def _randomise(self, signs: Tensor, lengths: Tensor, source: RandomSource) -> BitReports:
        """Return ``signs`` (K, s) by randomised response, of rows that are worth ``lengths`` (K,) of a whole one."""
        half = (1 << (BITS - 1)) - thresholds(self.epsilon)[0]
        limits = (lengths * half).round_().to(torch.int64).clamp_(0, half).numpy()[:, None]

        def encoder(own: slice) -> Encoder:
            def bits(rows: range) -> NDArray[np.bool_]:
                # + is sent when a uniform int32 lies below t, an integer between minus and plus half of the thresholds' distance.
                part, limit = signs[rows.start : rows.stop, own].numpy(), limits[rows.start : rows.stop]
                high, rest = np.divmod(limit, 1 << (BITS - FIRST))
                first = np.multiply(part, high.astype(np.int16), dtype=np.int16)
                first -= (part < 0) & (rest > 0)  # the first bits of -limit are those of the integer below
                return words_below(first, partial(_signed, part, limit), source, rows)

            return bits

        return BitReports.of(encoder, *signs.shape)

    def signs(self, values: Tensor, ranges: LayerRanges) -> tuple[Tensor, Tensor]:
        """Return the signs (K, D) int8 of the rotated rows, -1, 0 or 1, and what part (K,) of a whole one each row's signs are worth."""
        values, center = require_finite(values, ranges), ranges.expand()[0]
        signs = torch.empty(len(values), rotated_size(ranges.dimension), dtype=torch.int8)
        lengths = torch.empty(len(values), dtype=torch.float64)
        for rows in client_blocks(*signs.shape):  # what lies between is small
            some = slice(rows.start, rows.stop)
            offset = (values[some] - center).float() if bool(center.any()) else values[some]
            # By the largest entry, so that no square is lost, and no sum overflows, whatever a server chose for the center.
            largest = offset.abs().amax(dim=1, keepdim=True)
            scaled = torch.where(largest > 0, offset / largest, 0.0)
            # Summed by NumPy: PyTorch's threads add up a long row in another order when it stands alone.
            squares = np.square(scaled.numpy(), dtype=np.float64).sum(axis=1)
            lengths[some] = torch.from_numpy(np.sqrt(squares)) * largest[:, 0]
            signs[some] = rotate(scaled, self.round).sign_()
        return signs, (lengths / self.norm).clamp_(0, 1) if self.norm else torch.ones_like(lengths)

    @property
    def gain(self) -> float:
        """A: a bit stands for +A or -A; from the integer thresholds, so that it is unbiased."""
        return Duchi(self.epsilon).gain

    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        return self._weights(self._sent.decode(reports, self.coordinates(ranges)), ranges)

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> Any:
        return self._sent.read(payloads, self.coordinates(ranges))

    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        return self._weights(self._sent.aggregate(reports, self.coordinates(ranges)), ranges)

    def noise(self, ranges: LayerRanges) -> Noise:
        return _SignNoise(self, ranges)

    def units(self, ranges: LayerRanges) -> Units:
        """A bit a rotated coordinate, or a group's place and bit."""
        coordinates = self.coordinates(ranges)
        units = self._sent.units(coordinates)
        mixed = MixedCoordinates(coordinates, lambda mean: self._weights(mean, ranges))
        return replace(units, reader=units.reader or (lambda part: self._sent), mixed=mixed)

    def coordinates(self, ranges: LayerRanges) -> LayerRanges:
        """Return the ranges of a rotated direction, in which a sign is worth a radius."""
        size = rotated_size(ranges.dimension)
        return LayerRanges(0.0, sign_scale(size), (size,))

    def _weights(self, mean: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the weights that ``mean`` stands for, of rotated coordinates."""
        return (ranges.expand()[0] + rotate_back(mean.double(), ranges.dimension, self.round)).float()

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        bits = GroupCounts.of(self.coordinates(ranges), self.group).groups
        realised = Duchi(self.epsilon).epsilon_realised
        return BinaryRelease(self.name, self.epsilon, bits, unit="coordinate", realised=realised, sampled=self.group)

    @property
    def properties(self) -> Properties:
        return Properties(
            adds_up=self._sent.properties.adds_up,
            source="Erlingsson et al. 2020; Suresh et al. 2017",
            assumptions=("the rotation is public", "random bits are uniform and secret"),
        )


def _signed(signs: NDArray[np.int8], limits: NDArray[np.int64], row: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the thresholds at some rows and places: each client's limit by the sign of a coordinate."""
    return np.asarray(signs[row, place] * limits[row, 0])


@dataclass(frozen=True, eq=False)
class _SignNoise(Noise):
    """The error of what signs stand for, once they are rotated back: the same in each weight."""

    mechanism: RotatedSign
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        """(g A^2 - 1) pi / (2 D) in each weight of a vector of full length without a sign 0, and never above g A^2 pi / (2 D)."""
        of = self.mechanism
        signs, worth = of.signs(values, self.ranges)
        mean_square = signs.square().double().mean(dim=1, keepdim=True) * worth[:, None] ** 2
        sizes = Groups.of(of.coordinates(self.ranges), of.group).sizes
        largest = float(sizes @ sizes) / signs.shape[1]  # g, or a little less where the last group is smaller
        own = (largest * of.gain**2 - mean_square) * sign_scale(signs.shape[1]) ** 2
        return own.expand(-1, self.ranges.dimension).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """g A^2 pi / (2 D n), the most that it can be: for small epsilon A is large, and nothing else counts."""
        return torch.full_like(mean, float(self.largest_std(clients)[0]) ** 2, dtype=torch.float32)

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """A sqrt(g pi / (2 D n))."""
        scale = self.mechanism.gain * sign_scale(rotated_size(self.ranges.dimension))
        return np.full_like(self.ranges.radii, scale * sqrt(self.mechanism.group / clients))


class RotatedSignSettings(EpsilonSettings):
    """Settings of ``rotated-sign``."""

    name: Literal["rotated-sign"] = "rotated-sign"
    perturbed: Literal["update", "gradient"] = "gradient"

    norm: NotNegative = 0.02
    """Longest gradient or update that counts as it is; a longer one is shortened to it. A small one makes directions of nearly all."""

    group: Count = 1
    """Of so many rotated coordinates one is drawn, in secret, and sent: it saves bytes, and costs little while epsilon is small."""

    uses_ranges: ClassVar[bool] = False

    @property
    def nearly_noise_free(self) -> RotatedSignSettings:
        """The same signs, told as they are."""
        return self.model_copy(update={"epsilon": 30.0, "budget": "unit"})

    def at(self, epsilon: float) -> RotatedSign:
        return RotatedSign(epsilon, self.norm, self.group)
