"""Duchi's randomiser for whole vectors, corrected: one bit a weight and one budget for all of them, exact in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, pi, sqrt
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import Mechanism, require_finite, total_clients
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.noise import TwoValueNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import BitCounts, BitReports, Encoder, count_ones
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import PureRelease, usable_blanket
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source, client_blocks, draw_block, draw_each

if TYPE_CHECKING:
    from torch import Tensor

_MAX_DRAWS = 2000
"""Number of draws for a client after which the random source counts as broken: a draw is rejected with probability 1/2 at most."""

PackedBits = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class VectorBitReports(BitReports):
    """One bit for each weight. A client's row is protected as a whole, so it stays together, also in the shuffler."""

    @classmethod
    def mix(cls, batches: Sequence[BitReports], generator: np.random.Generator) -> VectorBitReports:
        """Pool the rows of all ``batches`` and put them in a uniformly random order, each one unchanged."""
        return VectorBitReports(generator.permutation(np.concatenate([batch.packed for batch in batches])), batches[0].dimension)

    @classmethod
    def from_sum(cls, total: NDArray[Any], clients: int) -> VectorBitReports:
        return _VectorBitCounts(total.astype(np.int32), clients)


class _VectorBitCounts(BitCounts, VectorBitReports):
    """The number of reports that set each bit, without the reports."""


@dataclass(frozen=True)
class DuchiVector(Mechanism):
    """Send a random vector of signs that is biased to agree with the client's rounded vector in most coordinates.

    Guarantee: epsilon-LDP (pure) for the whole vector of each round's report, replacing it by any other vector. Exact in
    finite precision. Assumes public ranges and an unguessable source of random bits.

    The client rounds t = (w - c) / r to signs v without bias. Sign vectors x with <x, v> > 0 are sent with e^epsilon times
    the probability of the others, and x_j stands for c + r B x_j. The papers include <x, v> = 0, which is possible for an even
    dimension. That would cost ln(1 + e^epsilon), and the estimate would be biased.

    Source: Duchi, Jordan & Wainwright 2018; Nguyen et al. 2016 for the even dimension; Optimal LDP-FL, equations (6)-(8).
    """

    epsilon: float
    name: ClassVar[str] = "duchi-vector"

    def __post_init__(self) -> None:
        thresholds(self.epsilon)  # raises if epsilon is not usable

    @property
    def epsilon_realised(self) -> float:
        """The epsilon that the integer thresholds really have; never above ``epsilon``."""
        return Duchi(self.epsilon).epsilon_realised

    def gain(self, dimension: int) -> float:
        """Return B: a sign stands for center +- radius * B. It grows like sqrt(pi d / 2) with the ``dimension`` d.

        Let C_d be the number of vectors that agree with the client's in most coordinates, g = e^epsilon the odds at which one of them is
        sent rather than another, and S_d = C(d - 1, floor(d / 2)). Then B = (2^d + C_d (g - 1)) / (S_d (g - 1)). In terms of
        k = C(2n, n) / 4^n, n = floor(d / 2), this is A / k for odd d and A / k - 1 for even d; A = (g + 1) / (g - 1) is ``duchi``'s gain.
        """
        return Duchi(self.epsilon).gain / central_binomial(dimension // 2) - (dimension % 2 == 0)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> VectorBitReports:
        """Round each row to signs, then draw the sign vector that is sent instead. Both are packed to bits."""
        values = require_finite(values, ranges)
        source = as_source(generator)
        packed = _round_to_signs(values, ranges, source)
        disagree_share, _ = thresholds(self.epsilon)
        for rows in client_blocks(len(packed), packed.shape[1]):
            signs = packed[rows.start : rows.stop]
            packed[rows.start : rows.stop] = _draw_vectors(signs, ranges.dimension, disagree_share, source, rows)
        return VectorBitReports(packed, ranges.dimension)

    def decode(self, reports: VectorBitReports, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d): center + amplitude for a bit that is set, center - amplitude for one that is not.

        The amplitude is the weight's radius times :meth:`gain`.
        """
        total_clients([reports], ranges, VectorBitReports)  # raises if the reports do not fit
        center, amplitude = self._centers_and_amplitudes(ranges)
        return (center + amplitude * (2 * torch.from_numpy(reports.unpack()).double() - 1)).float()

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> VectorBitReports:
        return VectorBitReports(BitReports.from_payloads(payloads, ranges.dimension).packed, ranges.dimension)

    def aggregate(self, reports: Sequence[VectorBitReports], ranges: LayerRanges) -> Tensor:
        clients = total_clients(reports, ranges, VectorBitReports)
        center, amplitude = self._centers_and_amplitudes(ranges)
        return (center + amplitude * (count_ones(reports).double() * (2 / clients) - 1)).float()  # the mean of decode's rows

    def noise(self, ranges: LayerRanges) -> TwoValueNoise:
        return TwoValueNoise(ranges, self.gain(ranges.dimension))

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=True, caveats=Duchi(self.epsilon).properties.caveats)

    def units(self, ranges: LayerRanges) -> Units:
        return Units.whole(ranges.dimension, ranges.dimension)

    def release(self, ranges: LayerRanges) -> PureRelease:
        """Return the release: one vector at epsilon.

        Its blanket, the part of a report's distribution that is the same for all inputs, is uniform over sign vectors. The weight of the
        blanket is 2^d times the smallest probability of a vector, that of one which agrees with the client's in at most half of the places.
        """
        lo, hi = thresholds(self.epsilon)
        half_agree = central_binomial(ranges.dimension // 2) if ranges.dimension % 2 == 0 else 0.0  # share of all vectors
        most_agree = (1 - half_agree) / 2  # the share that is sent hi / lo times as often as the others
        blanket = 1 / (1 - most_agree + most_agree * hi / lo)
        return PureRelease(self.name, self.epsilon, 1, "vector", blanket=usable_blanket(self.epsilon, blanket))

    def _centers_and_amplitudes(self, ranges: LayerRanges) -> tuple[Tensor, Tensor]:
        """Return each weight's center and its amplitude radius x :meth:`gain`, (d,) each. A sign stands for plus or minus the amplitude."""
        center, radius = ranges.expand()
        return center, radius * self.gain(ranges.dimension)


class DuchiVectorSettings(EpsilonSettings):
    """Settings of ``duchi-vector``."""

    name: Literal["duchi-vector"] = "duchi-vector"

    def at(self, epsilon: float) -> DuchiVector:
        return DuchiVector(epsilon)


@lru_cache(maxsize=64)
def central_binomial(n: int) -> float:
    """Return C(2n, n) / 4^n, the probability that 2n fair coins fall evenly, to 15 digits.

    Differences of log-gamma would lose half of the digits by n = 10^7. The series of Gamma(n + 1/2) / Gamma(n + 1) (Tricomi & Erdelyi 1951)
    loses none: for n above 512, its next term is below 1e-16.
    """
    if n <= 512:
        return comb(2 * n, n) / (1 << (2 * n))
    x = 1 / n
    return sqrt(x / pi) * (1 - x / 8 + x**2 / 128 + 5 * x**3 / 1024 - 21 * x**4 / 32768)


def _round_to_signs(values: Tensor, ranges: LayerRanges, source: RandomSource) -> PackedBits:
    """Round each value w to a random sign, + with probability (1 + t) / 2 for t = (w - c) / r, clipped to [-1, 1]; a set bit is +.

    c and r are the center and the radius of the value's range. A uniform integer in [-2^31, 2^31) is compared with 2^31 t, so values
    outside the range count as its ends, and the probability is too large by 2^-32 at most. Such errors affect only the estimate, because
    ``_draw_vectors`` alone ensures epsilon.
    """

    def make_encoder(columns: slice) -> Encoder:
        """Return a function that rounds the values at the coordinates ``columns``."""
        center, radius = ranges.slice(columns.start, columns.stop)
        slope = (1 << (BITS - 1)) / radius
        centers_are_zero = not bool(center.any())  # as for updates; saves a pass over the values

        def draw_bits(rows: range) -> NDArray[np.bool_]:
            """Draw the signs of the k clients in ``rows`` at the b coordinates, (k, b), True for +."""
            block = values[rows.start : rows.stop, columns]
            scaled = block * slope if centers_are_zero else (block - center).mul_(slope)  # 2^31 t
            words = draw_block(source, rows, columns.stop - columns.start)
            # Words are uniform on [-2^31, 2^31), so one lies below 2^31 t with probability (1 + t) / 2.
            return np.asarray(words < scaled.numpy())

        return draw_bits

    # Fewer values at a time than by default, since float64 takes more of a cache.
    return BitReports.from_encoder(make_encoder, len(values), ranges.dimension, values=4 * COORDINATE_BLOCK).packed


def _draw_vectors(signs: PackedBits, dimension: int, disagree_share: int, source: RandomSource, rows: range) -> PackedBits:
    """Draw the sign vector to send for each row of ``signs``, packed to bits as ``signs`` are.

    First, a uniform vector is drawn. Either it or its opposite agrees with the row in most places. One coin decides which of the two is
    sent: the one that disagrees with probability s / 2^32, where s is ``disagree_share``. So a vector that agrees is (2^32 - s) / s times
    as likely as one that disagrees. A vector that agrees in exactly half of the places is kept with probability 2 s / 2^32, and so is as
    likely as one that disagrees. No binomial probability is evaluated, so nothing is rounded. The number of draws depends neither on
    ``signs`` nor on the result, so the time reveals nothing.
    """
    size = (dimension + BITS - 1) // BITS + 1  # words for a vector, and one for the coin
    drawn, undecided = np.empty_like(signs), np.arange(len(signs))
    words = draw_block(source, rows, size)
    for _ in range(_MAX_DRAWS):
        coins = words[:, -1].astype(np.int64) + (1 << (BITS - 1))  # from 0 to 2^32 - 1
        vectors = words[:, :-1].copy().view(np.uint8)[:, : signs.shape[1]]
        vectors[:, -1] &= 0xFF >> (-dimension % 8)  # the unused bits of the last byte are 0
        differing = np.bitwise_count(vectors ^ signs[undecided]).sum(axis=1, dtype=np.int64)
        most_agree, half_agree = 2 * differing < dimension, 2 * differing == dimension
        # A coin below 2^32 - s asks for the vector that agrees, so the opposite is taken where the drawn vector is not the one asked for.
        opposite = ~half_agree & ((coins < (1 << BITS) - disagree_share) != most_agree)
        vectors[opposite] = ~vectors[opposite]
        vectors[:, -1] &= 0xFF >> (-dimension % 8)  # inverting set the unused bits
        drawn[undecided] = vectors
        undecided = undecided[half_agree & (coins >= 2 * disagree_share)]  # rejected: these rows draw again
        if not undecided.size:
            return drawn
        words = draw_each(source, np.repeat(undecided + rows.start, size)).reshape(-1, size)
    raise PrivacyError("the random source repeats its output, so its bits are not random; nothing was sent: pass another source")
