"""One-bit randomised response with a range: LDP-FL's data perturbation, exact in finite precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, log, sqrt
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.lazy import torch
from ldpfl.mechanisms.base import Mechanism, require_finite, total_clients
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK
from ldpfl.mechanisms.reports.bits import BitReports, count_ones, packed_size
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import BinaryRelease
from ldpfl.randomness import RandomSource, as_source, draw
from ldpfl.ranges import LayerRanges

if TYPE_CHECKING:
    from torch import Tensor

BITS = 32
"""Width of the uniform integers that thresholds are compared with."""


@lru_cache(maxsize=1024, typed=True)
def thresholds(epsilon: float) -> tuple[int, int]:
    """Return (lo, hi): a report is + with probability t / 2**32 for an integer t in [lo, hi].

    lo = ceil(2**32 / (1 + e**epsilon)) with e**epsilon rounded down, hi = 2**32 - lo. Then hi / lo <= e**epsilon
    holds exactly, and so does epsilon-LDP, whatever rounding happened upstream. Above epsilon of about 22 lo is 1 and
    the realised budget stays at 22.18.

    Raises:
        ConfigError: epsilon is not a positive finite number, or below about 1e-9.
    """
    try:
        usable = not isinstance(epsilon, bool) and isfinite(epsilon) and epsilon > 0
    except (TypeError, OverflowError):
        usable = False
    if not usable:
        raise ConfigError(f"epsilon must be a positive finite number, got {epsilon}")
    if epsilon > BITS:  # lo is 1 from here on; spares a huge exponential
        return 1, (1 << BITS) - 1
    context = Context(prec=60, traps=[])
    # exp is correctly rounded; one step down makes it a lower bound. The caller's own decimal context plays no part.
    growth = Fraction(Decimal(epsilon).exp(context).next_minus(context))
    lo = ceil((1 << BITS) / (1 + growth))
    if 2 * lo >= 1 << BITS:
        raise ConfigError(f"epsilon {epsilon:g} is too small to tell + from - with {BITS} random bits: at least 1e-09 is needed")
    return lo, (1 << BITS) - lo


_CLAIM = (
    'LDP-FL, section 4: with shuffling "it is sufficient to protect eps-LDP for each weight"; '
    "shuffling hides who sent a bit, but a client's bits are many, and they add up"
)


@dataclass(frozen=True)
class Duchi(Mechanism):
    """Send one bit a weight: + with probability 1/2 + (w - c) / (2 r A), A = (e^eps + 1) / (e^eps - 1).

    Guarantee: epsilon-LDP (pure) for each weight of each round's report, replacing that weight by any other value;
    a whole report of d weights costs d * epsilon. Assumes public ranges and an unguessable source of random bits.

    Source: LDP-FL, equation (2) and Algorithm 2, after Duchi et al. 2018; the clamp is missing in the paper's
    pseudo-code, and without it the stated epsilon does not hold.
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
        """The budget that the integer thresholds really spend; never above ``epsilon``."""
        lo, hi = thresholds(self.epsilon)
        return min(self.epsilon, log(hi / lo))  # the logarithm itself may round up

    @property
    def caveats(self) -> tuple[str, ...]:
        if self.epsilon - self.epsilon_realised < 0.01:
            return ()
        realised = f"{self.epsilon_realised:.2f}"
        return (f"epsilon {self.epsilon:g} is more than {BITS} random bits express: {realised} is realised, {self.epsilon:g} is counted",)

    @property
    def gain(self) -> float:
        """A: the estimate is center +- radius * A. From the integer thresholds, so that it is unbiased."""
        return (1 << (BITS - 1)) / self._half

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        values = require_finite(values, ranges)
        source = as_source(generator)
        clients, dimension = values.shape
        packed = np.zeros((clients, packed_size(dimension)), dtype=np.uint8)
        scratch = _Scratch(min(dimension, COORDINATE_BLOCK))
        half = self._half  # exact arithmetic: too slow to repeat for every client
        slopes, centered = half / ranges.radius, not bool(ranges.center.any())
        for start in range(0, dimension, COORDINATE_BLOCK):
            stop = min(start + COORDINATE_BLOCK, dimension)
            center, slope = ranges.spread(ranges.center, start, stop), ranges.spread(slopes, start, stop)
            for row in range(clients):
                uniform = draw(source, row, stop - start)
                bits = scratch.randomise(values[row, start:stop], None if centered else center, slope, half, uniform)
                packed[row, start // 8 : packed_size(stop)] = np.packbits(bits, bitorder="little")
        return BitReports(packed, dimension)

    def decode(self, reports: BitReports, ranges: LayerRanges) -> Tensor:
        total_clients([reports], ranges, BitReports)
        center, radius = ranges.expand()
        rows = [torch.from_numpy(reports.unpack(row)).double() for row in range(reports.clients)]
        return (center + radius * self.gain * (2 * torch.stack(rows) - 1)).float()

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        return BitReports.from_payloads(payloads, ranges.dimension)

    def aggregate(self, reports: Sequence[BitReports], ranges: LayerRanges) -> Tensor:
        clients = total_clients(reports, ranges, BitReports)
        ones, gain = count_ones(reports), self.gain
        mean = torch.empty(ranges.dimension, dtype=torch.float32)
        for start in range(0, ranges.dimension, COORDINATE_BLOCK):
            stop = min(start + COORDINATE_BLOCK, ranges.dimension)
            center, radius = ranges.slice(start, stop)
            mean[start:stop] = center + radius * gain * (ones[start:stop].double() * (2 / clients) - 1)
        return mean

    def variance(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """r^2 A^2 - (w - c)^2 for the clamped w (LDP-FL, proof of Lemma 2; the lemma itself drops the last term)."""
        center, radius = ranges.expand()
        inside = ranges.clamp(values)
        return ((radius * self.gain) ** 2 - (inside - center) ** 2).to(values.dtype)

    def mean_variance(self, mean: Tensor, ranges: LayerRanges, clients: int) -> Tensor:
        """(r^2 A^2 - (mean - c)^2) / (n - 1): the sample variance of n two-valued reports, over n.

        One report has no sample variance: there the upper bound r^2 A^2 stands.
        """
        center, radius = ranges.expand()
        if clients == 1:
            return ((radius * self.gain) ** 2).float()
        return (((radius * self.gain) ** 2 - (mean - center) ** 2) / (clients - 1)).clamp_min(0).float()

    def noise_std(self, ranges: LayerRanges, clients: int) -> NDArray[np.float64]:
        """r A / sqrt(n) (LDP-FL, Lemma 3, upper bound)."""
        return np.asarray(ranges.radii * (self.gain / sqrt(clients)))

    def payload_bits(self, ranges: LayerRanges) -> int:
        return ranges.dimension

    def units(self, ranges: LayerRanges) -> Units:
        """A bit a weight."""
        return Units.equal(ranges.dimension, 1)

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        return BinaryRelease(self.name, self.epsilon, ranges.dimension, realised=self.epsilon_realised, claim=_CLAIM)


class DuchiSettings(EpsilonSettings):
    """Settings of ``duchi``."""

    name: Literal["duchi"] = "duchi"

    def at(self, epsilon: float) -> Duchi:
        return Duchi(epsilon)


class _Scratch:
    """Buffers for one block, so that encoding allocates nothing for each client."""

    def __init__(self, size: int) -> None:
        self._scaled = torch.empty(size, dtype=torch.float64)
        self._threshold = torch.empty(size, dtype=torch.int32)
        self._bits = np.empty(size, dtype=np.bool_)

    def randomise(self, values: Tensor, center: Tensor | None, slope: Tensor, half: int, uniform: Tensor) -> NDArray[np.bool_]:
        size = values.numel()
        scaled, threshold, bits = self._scaled[:size], self._threshold[:size], self._bits[:size]
        # The clamp in floating point makes the conversion safe, the one in integers makes epsilon exact.
        scaled.copy_(values)
        if center is not None:  # None: all are 0, as of updates, and a pass over the weights is saved
            scaled.sub_(center)
        scaled.mul_(slope).clamp_(-half, half).round_()
        threshold.copy_(scaled).clamp_(-half, half)
        np.less(uniform.numpy(), threshold.numpy(), out=bits)  # four times as fast as torch.lt
        return bits
