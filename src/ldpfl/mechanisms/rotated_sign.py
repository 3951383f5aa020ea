"""The signs of a rotated direction, each by randomised response: counts of them say nearly as much as a trusted server's noisy mean.

n clients, D coordinates, T rounds, one bit each with a small epsilon e, of which only counts are revealed: the run is mu-GDP for a client
with mu = e sqrt(D T / n), nearly. A coordinate of the mean sign then has noise 2 / (e sqrt(n)). Rotated at random, a direction has
coordinates of about N(0, 1 / D), of which a sign keeps sqrt(2 / pi); so the noise is sqrt(pi / 2) = 1.25 times that of a trusted server
which adds Gaussian noise to the mean direction, whatever D is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import Mechanism, PublicState, require_finite
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.reports import BitReports, count_ones, packed_size
from ldpfl.mechanisms.rotation import rotate, rotate_back, rotated_size
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.mechanisms.units import Units
from ldpfl.privacy import BinaryRelease
from ldpfl.randomness import RandomSource, as_source, draw
from ldpfl.ranges import LayerRanges

NotNegative = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class RotatedSign(Mechanism):
    """Send the sign of each coordinate of the update's direction after a public random rotation, by randomised response.

    Guarantee: epsilon-LDP (pure) for each of the D bits of a report, whatever the update was; D is the number of weights, rounded up to
    a power of two. On its own that is next to nothing: it is meant for a shuffler, or a sum, which shows how often each bit was sent.
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
        round: which rotation is used; :meth:`in_round` sets it.
    """

    epsilon: float
    norm: float = 0.0
    round: int = 1
    name: ClassVar[str] = "rotated-sign"
    source: ClassVar[str] = "Erlingsson et al. 2020; Suresh et al. 2017"

    def __post_init__(self) -> None:
        thresholds(self.epsilon)
        if not (self.norm == 0 or 1e-20 <= self.norm <= 1e20):
            raise ConfigError(f"norm must be 0 or lie between 1e-20 and 1e20, got {self.norm!r}")

    def in_round(self, public: PublicState) -> RotatedSign:
        return replace(self, round=public.round)

    @property
    def terms(self) -> RotatedSign:
        """Without the round's number, which everybody knows."""
        return replace(self, round=1)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        signs, lengths = self._signs(values, ranges)
        source = as_source(generator)
        half = (1 << (BITS - 1)) - thresholds(self.epsilon)[0]
        limits = (lengths * half).round_().to(torch.int64).clamp_(0, half).to(torch.int32)
        packed = np.empty((len(signs), packed_size(signs.shape[1])), dtype=np.uint8)
        for row in range(len(signs)):
            # + is sent when a uniform int32 lies below t, an integer between minus and plus half of the thresholds' distance.
            below = draw(source, row, signs.shape[1]).numpy() < (signs[row] * limits[row]).numpy()
            packed[row] = np.packbits(below, bitorder="little")
        return BitReports(packed, signs.shape[1])

    def _signs(self, values: Tensor, ranges: LayerRanges) -> tuple[Tensor, Tensor]:
        """Return the signs (K, D) int32 of the rotated rows, -1, 0 or 1, and what part (K,) of a whole one each row's signs are worth."""
        center = ranges.expand()[0]
        offset = require_finite(values, ranges)
        if bool(center.any()):
            offset = (offset - center).float()
        # By the largest entry, so that no square is lost, and no sum overflows, whatever a server chose for the center.
        largest = offset.abs().amax(dim=1, keepdim=True)
        rows = torch.where(largest > 0, offset / largest, 0.0)
        lengths = torch.linalg.vector_norm(rows.double(), dim=1) * largest[:, 0]
        worth = (lengths / self.norm).clamp_(0, 1) if self.norm else torch.ones_like(lengths)
        return rotate(rows, self.round).sign_().to(torch.int32), worth

    @property
    def _gain(self) -> float:
        """A: a bit stands for +A or -A; from the integer thresholds, so that it is unbiased."""
        return Duchi(self.epsilon).gain

    def _scale(self, size: int) -> float:
        """Return what a sign stands for in a coordinate of a rotated direction."""
        return sqrt(pi / (2 * size))

    def decode(self, reports: BitReports, ranges: LayerRanges) -> Tensor:
        self._clients([reports], ranges)
        rows = (2.0 * torch.from_numpy(reports.unpack(row)) - 1 for row in range(reports.clients))
        return torch.stack([self._estimate(row.double() * self._gain, ranges) for row in rows])

    def _estimate(self, signs: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the (d,) direction that estimated mean ``signs`` (D,) stand for."""
        return self.from_coordinates(signs * self._scale(signs.numel()), ranges)

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        return BitReports.from_payloads(payloads, rotated_size(ranges.dimension))

    def aggregate(self, reports: Sequence[BitReports], ranges: LayerRanges) -> Tensor:
        clients = self._clients(reports, ranges)
        return self._estimate((count_ones(reports).double() * (2 / clients) - 1) * self._gain, ranges)

    def _clients(self, reports: Sequence[Any], ranges: LayerRanges) -> int:
        size = rotated_size(ranges.dimension)
        clients = sum(int(batch.clients) for batch in reports)
        if clients == 0:
            raise PrivacyError("there is no report to aggregate")
        if any(not isinstance(batch, BitReports) or batch.dimension != size for batch in reports):
            raise PrivacyError(f"expected reports of {size} bits for {ranges.dimension} weights")
        return clients

    def variance(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """(A^2 - 1) pi / (2 D) in each weight of a vector of full length without a sign 0, and never above A^2 pi / (2 D)."""
        signs, worth = self._signs(values, ranges)
        mean_square = signs.square().double().mean(dim=1, keepdim=True) * worth[:, None] ** 2
        own = (self._gain**2 - mean_square) * self._scale(signs.shape[1]) ** 2
        return own.expand(-1, ranges.dimension).to(values.dtype)

    def mean_variance(self, mean: Tensor, ranges: LayerRanges, clients: int) -> Tensor:
        """A^2 pi / (2 D n), the most that it can be: for small epsilon A is large, and nothing else counts."""
        return torch.full_like(mean, float(self.noise_std(ranges, clients)[0]) ** 2, dtype=torch.float32)

    def noise_std(self, ranges: LayerRanges, clients: int) -> Tensor:
        """A sqrt(pi / (2 D n))."""
        return torch.full_like(ranges.radius, self._gain * self._scale(rotated_size(ranges.dimension)) / sqrt(clients))

    def payload_bits(self, ranges: LayerRanges) -> int:
        return rotated_size(ranges.dimension)

    def units(self, ranges: LayerRanges) -> Units:
        """A bit a coordinate."""
        return Units.equal(self.payload_bits(ranges), 1)

    def unit_ranges(self, ranges: LayerRanges) -> LayerRanges:
        """Those of a rotated direction, in which a sign is worth a radius."""
        size = rotated_size(ranges.dimension)
        return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.tensor([self._scale(size)], dtype=torch.float64), (size,))

    def from_coordinates(self, mean: Tensor, ranges: LayerRanges) -> Tensor:
        return (ranges.expand()[0] + rotate_back(mean.double(), ranges.dimension, self.round)).float()

    def in_part(self, part: LayerRanges) -> Duchi:
        """The signs of some coordinates are bits by randomised response, like those of any value."""
        return Duchi(self.epsilon)

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        realised = Duchi(self.epsilon).epsilon_realised
        return BinaryRelease(self.name, self.epsilon, rotated_size(ranges.dimension), unit="coordinate", realised=realised)

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("the rotation is public", "random bits are uniform and secret")


class RotatedSignSettings(EpsilonSettings):
    """Settings of ``rotated-sign``."""

    name: Literal["rotated-sign"] = "rotated-sign"
    perturbed: Literal["update", "gradient"] = "gradient"

    norm: NotNegative = 0.02
    """Longest gradient or update that counts as it is; a longer one is shortened to it. A small one makes directions of nearly all."""

    uses_ranges: ClassVar[bool] = False

    @property
    def nearly_noise_free(self) -> RotatedSignSettings:
        """The same signs, told as they are."""
        return self.model_copy(update={"epsilon": 30.0, "budget": "unit"})

    def at(self, epsilon: float) -> RotatedSign:
        return RotatedSign(epsilon, self.norm)
