"""One-bit randomised response with a range: LDP-FL's data perturbation, exact in finite precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, log
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import Mechanism, require_finite_block, require_shape, total_clients
from ldpfl.mechanisms.coins import FIRST_BITS, Places, compare_random_words
from ldpfl.mechanisms.comparing import ByComparison, Comparison
from ldpfl.mechanisms.noise import TwoValueNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import BitReports, Encoder, count_ones
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import BinaryRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source

if TYPE_CHECKING:
    from torch import Tensor

BITS = 32
"""Width of the uniform integers that thresholds are compared with."""


@lru_cache(maxsize=1024, typed=True)
def thresholds(epsilon: float) -> tuple[int, int]:
    """Return the smallest and the largest threshold (lo, hi) that ensure epsilon. With threshold t, a bit is + with probability t / 2**32.

    lo = ceil(2**32 / (1 + e**epsilon)) with e**epsilon rounded down, and hi = 2**32 - lo. Then hi / lo <= e**epsilon holds exactly, and so
    does epsilon-LDP for all thresholds from lo to hi. Above an epsilon of about 22, lo is 1, and the true epsilon of a bit stays at 22.18.

    Raises:
        ConfigError: epsilon is not a positive finite number, or below about 1e-9.
    """
    try:
        usable = not isinstance(epsilon, bool) and isfinite(epsilon) and epsilon > 0
    except (TypeError, OverflowError):  # not a number, or an integer that no float can hold
        usable = False
    if not usable:
        raise ConfigError(f"epsilon must be a positive finite number, got {epsilon}")
    if epsilon > BITS:  # lo is 1 for so large an epsilon, and e**epsilon need not be computed
        return 1, (1 << BITS) - 1
    context = Context(prec=60, traps=[])
    # e**epsilon: exp is correctly rounded, and one step down makes it a lower bound. The caller's own decimal context plays no part.
    exp_epsilon = Fraction(Decimal(epsilon).exp(context).next_minus(context))
    lo = ceil((1 << BITS) / (1 + exp_epsilon))
    if 2 * lo >= 1 << BITS:
        raise ConfigError(f"epsilon {epsilon:g} is too small to tell + from - with {BITS} random bits: at least 1e-09 is needed")
    return lo, (1 << BITS) - lo


_PAPERS_CLAIM = (
    'LDP-FL, section 4: with shuffling "it is sufficient to protect eps-LDP for each weight"; '
    "shuffling hides who sent a bit, but a client's bits are many, and they add up"
)


@dataclass(frozen=True)
class Duchi(Mechanism, ByComparison):
    """Send one bit for each weight w: + with probability 1/2 + (w - c) / (2 r A), A = (e^eps + 1) / (e^eps - 1).

    c and r are the center and the radius of the weight's range. Guarantee: epsilon-LDP (pure) for each weight of each round's report,
    replacing that weight by any other value. A whole report of d weights costs d * epsilon. Assumes public ranges and an unguessable
    source of random bits.

    Source: LDP-FL, equation (2) and Algorithm 2, after Duchi et al. 2018. Clipping is missing in the paper's pseudo-code, and without it
    the stated epsilon does not hold.
    """

    epsilon: float
    name: ClassVar[str] = "duchi"

    def __post_init__(self) -> None:
        thresholds(self.epsilon)

    @property
    def _half(self) -> int:
        """Largest signed threshold: t = half * (w - c) / r, and + is sent when a uniform int32 lies below t."""
        return (1 << (BITS - 1)) - thresholds(self.epsilon)[0]

    @property
    def epsilon_realised(self) -> float:
        """The epsilon that the integer thresholds really have; never above ``epsilon``."""
        lo, hi = thresholds(self.epsilon)
        return min(self.epsilon, log(hi / lo))  # the logarithm itself may round up

    @property
    def gain(self) -> float:
        """A: a bit stands for center +- radius * A. Computed from the integer thresholds, so that the estimate is unbiased."""
        return (1 << (BITS - 1)) / self._half

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        """Draw one bit for each value, block by block. :meth:`Thresholds.bits` clips, and refuses NaN and infinity."""
        values, source = require_shape(values, ranges).cpu(), as_source(generator)

        def make_encoder(columns: slice) -> Encoder:
            """Return a function that draws the bits about the coordinates ``columns``, for a range of clients."""
            block_thresholds = Thresholds.of(self._half, ranges, columns)
            return lambda rows: block_thresholds.bits(values[rows.start : rows.stop, columns], source, rows)

        return BitReports.from_encoder(make_encoder, *values.shape)

    def comparison(self, ranges: LayerRanges) -> Comparison | None:
        """Return the comparison with random integers by which :meth:`encode` draws bits, so that a simulation can compile it.

        None for models of more than one block of coordinates.
        """
        if ranges.dimension > COORDINATE_BLOCK:  # ``encode`` draws one block after the other, a comparison all coordinates at once
            return None
        all_thresholds = Thresholds.of(self._half, ranges, slice(0, ranges.dimension))
        limits = torch.full((ranges.dimension,), all_thresholds.limit)
        arguments = (all_thresholds.center.contiguous(), all_thresholds.first_slope.contiguous(), limits)
        return Comparison(_first_bits, arguments, all_thresholds.exact)

    def decode(self, reports: BitReports, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d): center + radius A for a bit that is set, center - radius A for one that is not; A is :attr:`gain`."""
        total_clients([reports], ranges, BitReports)  # raises if the reports do not fit
        center, radius = ranges.expand()
        return (center + radius * self.gain * (2 * torch.from_numpy(reports.unpack()).double() - 1)).float()

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        return BitReports.from_payloads(payloads, ranges.dimension)

    def aggregate(self, reports: Sequence[BitReports], ranges: LayerRanges) -> Tensor:
        """Return the mean estimate (d,): center + radius A (2 f - 1). A is the :attr:`gain`, f the share of set bits of a weight."""
        clients = total_clients(reports, ranges, BitReports)
        ones, gain = count_ones(reports), self.gain
        mean = torch.empty(ranges.dimension, dtype=torch.float32)
        for start in range(0, ranges.dimension, COORDINATE_BLOCK):
            stop = min(start + COORDINATE_BLOCK, ranges.dimension)
            center, radius = ranges.slice(start, stop)
            mean[start:stop] = center + radius * gain * (ones[start:stop].double() * (2 / clients) - 1)
        return mean

    def noise(self, ranges: LayerRanges) -> TwoValueNoise:
        """Return the error: the variance in LDP-FL's proof of Lemma 2 (the lemma drops its last term), and the upper bound of Lemma 3."""
        return TwoValueNoise(ranges, self.gain)

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=True, caveats=self._caveats)

    @property
    def _caveats(self) -> tuple[str, ...]:
        """Warning if epsilon is clearly larger than the random bits can express; else empty."""
        if self.epsilon - self.epsilon_realised < 0.01:
            return ()
        realised = f"{self.epsilon_realised:.2f}"
        return (f"epsilon {self.epsilon:g} is more than {BITS} random bits express: {realised} is realised, {self.epsilon:g} is counted",)

    def units(self, ranges: LayerRanges) -> Units:
        """Return one unit of one bit for each weight."""
        return Units.equal(ranges.dimension, 1)

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        return BinaryRelease(self.name, self.epsilon, ranges.dimension, realised=self.epsilon_realised, claim=_PAPERS_CLAIM)


class DuchiSettings(EpsilonSettings):
    """Settings of ``duchi``."""

    name: Literal["duchi"] = "duchi"
    sends_bits: ClassVar[bool] = True

    def at(self, epsilon: float) -> Duchi:
        return Duchi(epsilon)


@dataclass(frozen=True)
class Thresholds:
    """Turns the values at b coordinates into bits: + is sent when a uniform signed 32-bit integer lies below t = half * (w - c) / r.

    The first 16 bits of the integer decide, unless they equal those of t. That happens once in 65536 draws, whatever the value; only then
    are the other 16 bits drawn.

    c and r are the center and the radius of a coordinate's range, w its value, clipped so that t lies between -half and half.

    Privacy: let T be t's first 16 bits as float32 arithmetic computes them, which lie between those of -half and half. Then + has the
    probability 1/2 + (T 2^16 + min(2^16, max(0, t - T 2^16))) / 2^32, with t an integer between -half and half. So it lies between
    1/2 - half / 2^32 and 1/2 + half / 2^32, as epsilon requires, exactly.

    Accuracy: close to a multiple of 2^16, float32 may round t across it. The probability is then that of the multiple, and wrong by less
    than 2^-22 of its distance from 1/2. There are three roundings, by 2^-24 each: of w - c, of half / r and of their product. If the center
    is 0 there are two, and the error is below 2^-23.

    Attributes:
        half: the largest t, which determines epsilon.
        center, slope: c and half / r of each coordinate, (b,).
        first_slope: ``slope`` / 2^16, as float32.
        limit: a float32, the largest t / 2^16, or slightly less.
        centered: whether all centers are 0, as for updates. This saves a pass over the weights.
    """

    half: int
    center: Tensor
    slope: Tensor
    first_slope: Tensor
    limit: float
    centered: bool

    @classmethod
    def of(cls, half: int, ranges: LayerRanges, columns: slice) -> Thresholds:
        """Return the thresholds of the coordinates ``columns``. ``half`` is the largest signed threshold, which determines epsilon."""
        unit = 2 ** (BITS - FIRST_BITS)
        slopes, limit = half / ranges.radius, np.float32(half / unit)
        if float(limit) > half / unit:  # conversion to float32 must not raise the limit, and with it epsilon
            limit = np.nextafter(limit, np.float32(0))
        first_slopes = (slopes / unit).clamp_max(np.finfo(np.float32).max).float()  # finite for the tiniest radius, too
        per_layer = (ranges.center, slopes, first_slopes)
        center, slope, first_slope = (ranges.spread(values, columns.start, columns.stop) for values in per_layer)
        return cls(half, center, slope, first_slope, float(limit), not bool(center.any()))

    def bits(self, values: Tensor, source: RandomSource, rows: range) -> NDArray[np.bool_]:
        """Draw the bits (k, b) that stand for the ``values`` (k, b) of the k clients in ``rows``.

        A bit is set if a random 32-bit integer lies below the value's threshold t, which is linear in the value.

        Raises:
            PrivacyError: a value is NaN or infinite.
        """
        # Checked here, while the block is in the cache: a separate pass over all values would take longer.
        require_finite_block(values)
        offset = values if self.centered else values - self.center  # ``centered``: all centers are 0
        # Clamping to ``limit`` clips the values to their ranges, which epsilon needs.
        first_bits = (offset.float() * self.first_slope).clamp_(-self.limit, self.limit).floor_().to(torch.int16)  # first 16 bits of t

        def exact_thresholds(row: Places, column: Places) -> NDArray[np.int64]:
            return self.exact(values.numpy()[row, column], column)

        return compare_random_words(first_bits.numpy(), exact_thresholds, source, rows)

    def exact(self, values: NDArray[np.float32], columns: Places) -> Places:
        """Return the threshold t, an integer, of each of ``values`` (m,), which are at the coordinates ``columns`` (m,) of the block."""
        offset = values.astype(np.float64) - self.center.numpy()[columns]
        return np.asarray(np.rint(offset * self.slope.numpy()[columns]).clip(-self.half, self.half).astype(np.int64))


def _first_bits(values: Tensor, center: Tensor, first_slope: Tensor, limit: Tensor) -> Tensor:
    """Return the first 16 bits of the thresholds of ``values``, as :meth:`Thresholds.bits` computes them, in float32. Can be compiled."""
    return ((values.double() - center).float() * first_slope).clamp(-limit, limit).floor()
