"""Mechanisms with a fault each, for the audit to find; ``benchmarks/audit.py`` counts how many it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl import LayerRanges, SeededStreams
from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import BitReports, DenseReports, Mechanism
from ldpfl.mechanisms.base import require_finite
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.duchi_vector import DuchiVector, VectorBitReports
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.noise import Noise, QuadraticNoise, TwoValueNoise
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.reports.bits import packed_size
from ldpfl.mechanisms.reports.units import Units
from ldpfl.mechanisms.scalar import Laplace
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, Release
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source, draw


class OwnEncoder(Duchi):
    """Duchi's formula written out plainly, with a place for each fault."""

    def plus(self, distance: Tensor) -> Tensor:
        """Return the probability of + at a distance from the center, in radii."""
        return 0.5 + distance.clamp(-1, 1) / (2 * self.gain)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        values = require_finite(values, ranges)
        center, radius = ranges.expand()
        words = torch.stack([draw(as_source(generator), row, ranges.dimension) for row in range(len(values))])
        bits = (words.double() + 2**31) / 2**32 < self.plus((values - center) / radius)
        return BitReports(np.packbits(bits.numpy(), axis=1, bitorder="little"), ranges.dimension)


@dataclass(frozen=True)
class Rearranged(OwnEncoder):
    """Sends bits about other weights: those that ``rearranged`` puts in their places."""

    rearranged: Callable[[Tensor], Tensor] = torch.clone

    def plus(self, distance: Tensor) -> Tensor:
        return super().plus(self.rearranged(distance))


@dataclass(frozen=True)
class OpenWhere(OwnEncoder):
    """Sends plain signs of the weights for which ``opened`` is true."""

    opened: Callable[[Tensor], Tensor] = torch.isnan

    def plus(self, distance: Tensor) -> Tensor:
        return torch.where(self.opened(distance), (distance > 0).double(), super().plus(distance))


class SecondTurnedByFirst(OwnEncoder):
    def plus(self, distance: Tensor) -> Tensor:
        second = torch.where(distance[:, :1] > 0, distance[:, 1:2], -distance[:, 1:2])
        return super().plus(torch.cat([distance[:, :1], second, distance[:, 2:]], dim=1))


class NoClamp(OwnEncoder):
    def plus(self, distance: Tensor) -> Tensor:
        return 0.5 + distance / (2 * self.gain)


class LateClamp(Duchi):
    """Clamps, but to ten times the range."""

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        return super().encode(values, LayerRanges(ranges.center, 10 * ranges.radius, ranges.sizes), generator)


class HalfTheRange(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        return super().encode(values, LayerRanges(ranges.center, ranges.radius / 2, ranges.sizes), generator)


class TwoPercentMore(OwnEncoder):
    def plus(self, distance: Tensor) -> Tensor:
        return 1.02 * super().plus(distance)


class TwoPercentLess(OwnEncoder):
    def plus(self, distance: Tensor) -> Tensor:
        return 0.98 * super().plus(distance)


class Reusing:
    """A source that hands the same words out again: to every client of a block, or along the weights of a client."""

    def __init__(self, source: RandomSource, *, clients: bool = False, period: int = 0, blocks: bool = False) -> None:
        self._source, self._clients, self._period, self._blocks = source, clients, period, blocks
        self._kept: dict[int, Tensor] = {}

    def int32(self, row: int, count: int) -> Tensor:
        if self._period:
            return self._source.int32(row, self._period).repeat(-(-count // self._period))[:count]
        if self._blocks:
            kept = self._kept.setdefault(row, self._source.int32(row, COORDINATE_BLOCK))
            return kept[:count].clone()
        if row == 0 or not self._clients or count not in self._kept:
            self._kept[count] = self._source.int32(0, count)
        return self._kept[count].clone()


@dataclass(frozen=True, eq=False)
class ChattyReports(BitReports):
    """Appends a byte to a report with more + than -."""

    def payloads(self) -> Iterable[bytes]:
        return (row.tobytes() + b"\0" * int(np.unpackbits(row).sum() > self.dimension / 2) for row in self.packed)


@dataclass(frozen=True, eq=False)
class NoiseOfEach(Noise):
    """Noise of the variance ``each`` (d,) in each weight, whatever the values. All weights of a layer have the same."""

    each: Tensor
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        return self.each.float().expand(values.shape)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        return (self.each / clients).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        return np.array([float(layer[0] / clients) ** 0.5 for layer in self.each.split_with_sizes(list(self.ranges.sizes))])


@dataclass(frozen=True)
class LaplaceNoise(Mechanism):
    """Each weight plus Laplace noise: for tests alone, because doubles leak. ``unit`` says what epsilon is to cover.

    With unit "vector" epsilon is divided over the weights; ``leak`` is how often a value leaves as it is; ``hair`` the
    width of what noise is left on it then, in radii.
    """

    epsilon: float
    unit: Literal["weight", "layer", "vector", "client"] = "weight"
    divided: bool = True
    leak: float = 0.0
    hair: float = 0.0
    name = "laplace-noise"

    @property
    def properties(self) -> Properties:
        return Properties(delta=1e-5)  # where a subclass states mu

    def _scale(self, ranges: LayerRanges) -> Tensor:
        weights = ranges.dimension if self.unit == "vector" and self.divided else 1
        return 2 * ranges.expand()[1] * weights / self.epsilon

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        center, radius = ranges.expand()
        inside = require_finite(values, ranges).double().clamp(center - radius, center + radius)
        source = as_source(generator)
        words = torch.stack([draw(source, row, 2 * ranges.dimension) for row in range(len(values))]).double()
        noise, chance = ((words + 2**31 + 0.5) / 2**32).chunk(2, dim=1)
        noise = -(noise - 0.5).sign() * torch.log1p(-2 * (noise - 0.5).abs())
        noise = torch.where(chance < self.leak, noise * radius * self.hair, noise * self._scale(ranges))
        return DenseReports((inside + noise).float())

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> DenseReports:
        return DenseReports.from_payloads(payloads, ranges.dimension)

    def decode(self, reports: DenseReports, ranges: LayerRanges) -> Tensor:
        return reports.values.clone()

    def aggregate(self, reports: Sequence[DenseReports], ranges: LayerRanges) -> Tensor:
        return torch.cat([batch.values for batch in reports]).double().mean(dim=0).float()

    def noise(self, ranges: LayerRanges) -> Noise:
        return NoiseOfEach(2 * self._scale(ranges) ** 2, ranges)

    def units(self, ranges: LayerRanges) -> Units:
        return Units.equal(ranges.dimension, 32) if self.unit == "weight" else Units.whole(ranges.dimension, 32 * ranges.dimension)

    def release(self, ranges: LayerRanges) -> Release:
        return PureRelease(self.name, self.epsilon, ranges.dimension if self.unit == "weight" else 1, self.unit)


@dataclass(frozen=True)
class SeldomReports(LaplaceNoise):
    """Sends nothing but the center, except with probability ``rate``: then one of two far values. Sound."""

    rate: float = 1e-4

    @property
    def _gain(self) -> float:
        return math.tanh(self.epsilon / 2)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        center, radius = ranges.expand()
        t = ((require_finite(values, ranges) - center) / radius).clamp(-1, 1).double()
        source = as_source(generator)
        chance = (torch.stack([draw(source, row, ranges.dimension) for row in range(len(values))]).double() + 2**31) / 2**32
        low = self.rate / 2 * (1 - self._gain * t)
        signs = (chance < self.rate).double() - 2 * (chance < low).double()
        return DenseReports((center + radius * signs / (self.rate * self._gain)).float())

    def noise(self, ranges: LayerRanges) -> Noise:
        return QuadraticNoise(ranges, offset=1 / (self.rate * self._gain**2), slope=-1)


class Tampered(Laplace):
    """Laplace noise on every weight, with a place for each fault, in estimates t* (K, d) of values t (K, d) in [-1, 1]."""

    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        return sent

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        reports = super().encode(values, ranges, generator)
        assert isinstance(reports, DenseReports)
        center, radius = ranges.expand()
        t = ((values - center) / radius).clamp(-1, 1)
        return DenseReports(self.tampered(reports.values.clone(), t, ranges).float())


class FirstOpen(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        sent[:, 0] = t[:, 0].float()
        return sent


class LastThousandthOpen(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        sent[:, -max(1, ranges.dimension // 1000) :] = t[:, -max(1, ranges.dimension // 1000) :].float()
        return sent


class TwoShareNoise(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        if sent.shape[1] > 17:
            sent[:, 5] = t[:, 5] + sent[:, 17] - t[:, 17]
        return sent


class SignInTheLowestBit(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        bits = sent.contiguous().view(torch.int32)
        return ((bits & ~1) | (t > 0).int()).view(torch.float32)


class SignInTheLowestBitOfOneWeight(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        bits = sent.contiguous().view(torch.int32)
        bits[:, 40:41] = (bits[:, 40:41] & ~1) | (t[:, 40:41] > 0).int()
        return bits.view(torch.float32)


class LargestOpen(Tampered):
    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        return torch.where(t == 1, t.double(), sent.double())


class LessNoiseInTheMiddle(Tampered):
    """A weight of one layer gets a fifth of its noise."""

    def tampered(self, sent: Tensor, t: Tensor, ranges: LayerRanges) -> Tensor:
        place = ranges.dimension // 2
        sent[:, place] = t[:, place] + (sent[:, place] - t[:, place]) / 5
        return sent


class NoClampInTheSixthLayer(OwnEncoder):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        center, radius = ranges.expand()
        words = torch.stack([draw(as_source(generator), row, ranges.dimension) for row in range(len(values))])
        distance = ((values - center) / radius).double()
        sizes = torch.arange(len(ranges.sizes)).repeat_interleave(torch.tensor(ranges.sizes))
        distance = torch.where(sizes == 5, distance, distance.clamp(-1, 1))
        bits = (words.double() + 2**31) / 2**32 < 0.5 + distance / (2 * self.gain)
        return BitReports(np.packbits(bits.numpy(), axis=1, bitorder="little"), ranges.dimension)


class PlaceBySize(Harmony):
    """Sends the largest weight of each layer in place of one that is drawn without looking."""

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Any:
        center, radius = ranges.expand()
        sizes, start = ((values - center) / radius).abs(), 0
        reports = super().encode(values, ranges, generator)
        index = np.array(reports.index)
        for layer, size in enumerate(ranges.sizes):
            index[:, layer] = sizes[:, start : start + size].argmax(dim=1).numpy()
            start += size
        return replace(reports, index=index)


class ClosedHalfSpace(DuchiVector):
    """For an even number of weights, ties belong to both halves: ln(1 + e) is spent at epsilon 1, which is 1.313."""

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> VectorBitReports:
        values = require_finite(values, ranges)
        center, radius = ranges.expand()
        chosen = torch.Generator().manual_seed(int(draw(as_source(generator), 0, 1)[0]) & 0xFFFF)
        t = ((values - center) / radius).double().clamp(-1, 1)
        signs = torch.where(torch.rand(t.shape, generator=chosen) < 0.5 + t / 2, 1.0, -1.0)
        want = torch.where(torch.rand(len(t), generator=chosen) < math.e**self.epsilon / (1 + math.e**self.epsilon), 1.0, -1.0)
        found = torch.zeros_like(signs)
        left = torch.ones(len(t), dtype=torch.bool)
        while bool(left.any()):
            tried = 2.0 * torch.randint(0, 2, signs.shape, generator=chosen) - 1
            fits = left & ((tried * signs).sum(dim=1) * want >= 0)
            found[fits], left = tried[fits], left & ~fits
        return VectorBitReports(np.packbits((found > 0).numpy(), axis=1, bitorder="little"), ranges.dimension)


@dataclass(frozen=True)
class OneLayer(Duchi):
    """Takes one layer's range for a quarter wider than it is."""

    layer: int = 0

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        radius = ranges.radius.clone()
        radius[self.layer : self.layer + 1] *= 1.25
        return super().encode(values, LayerRanges(ranges.center, radius, ranges.sizes), generator)


@dataclass(frozen=True)
class Reuser(Duchi):
    """Draws from a :class:`Reusing` source, with ``reuse`` as its arguments."""

    reuse: tuple[tuple[str, Any], ...] = ()

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        return super().encode(values, ranges, Reusing(as_source(generator), **dict(self.reuse)))


class Restarting(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        return super().encode(values, ranges, SeededStreams.for_clients(7, 1, range(len(values))))


class Silent(OwnEncoder):
    def plus(self, distance: Tensor) -> Tensor:
        return (distance > 0).double()


class Chatty(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        sent = super().encode(values, ranges, generator)
        return ChattyReports(sent.packed, sent.dimension)

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        return super().read([payload[: packed_size(ranges.dimension)] for payload in payloads], ranges)


class Understated(Duchi):
    def units(self, ranges: LayerRanges) -> Units:
        return Units.equal(ranges.dimension - 8, 1)


class Unreadable(Duchi):
    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        raise ProtocolError("a report is not what it should be")


class NotFinite(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        return super().encode(values.nan_to_num(), ranges, generator)


class Scaled(Duchi):
    def aggregate(self, reports: Sequence[BitReports], ranges: LayerRanges) -> Tensor:
        return super().aggregate(reports, ranges) * 1.0001


class Forgetful(Duchi):
    def aggregate(self, reports: Sequence[BitReports], ranges: LayerRanges) -> Tensor:
        return super().aggregate(reports[:2], ranges)


class Boasting(Duchi):
    def noise(self, ranges: LayerRanges) -> TwoValueNoise:
        return replace(super().noise(ranges), gain=self.gain * math.sqrt(0.97))


@dataclass(frozen=True, eq=False)
class FactorOnMeans(TwoValueNoise):
    """States the noise of means with a factor: on the variance that is estimated, and on the largest standard deviation."""

    on_variance: float = 1.0
    on_std: float = 1.0

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        return super().mean_variance(mean, clients) * self.on_variance

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        return super().largest_std(clients) * self.on_std


@dataclass(frozen=True)
class WrongAboutMeans(Duchi):
    on_variance: float = 1.0
    on_std: float = 1.0

    def noise(self, ranges: LayerRanges) -> TwoValueNoise:
        return FactorOnMeans(ranges, self.gain, on_variance=self.on_variance, on_std=self.on_std)


class AnyLength(Duchi):
    """Cuts payloads that are too long, and fills up those that are too short."""

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        size = packed_size(ranges.dimension)
        return super().read([payload[:size].ljust(size, b"\0") for payload in payloads], ranges)


class OnlyTheSumOfLengths(Duchi):
    """Looks at the length of all payloads together."""

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> BitReports:
        joined, size = b"".join(payloads), packed_size(ranges.dimension)
        if len(joined) != size * len(payloads):
            raise ProtocolError("the reports have a wrong length")
        return super().read([joined[start : start + size] for start in range(0, len(joined), size)], ranges)


class ClipsInPlace(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        center, radius = (part.float() for part in ranges.expand())
        return super().encode(require_finite(values, ranges).clamp_(center - radius, center + radius), ranges, generator)


class Undefined(Duchi):
    def decode(self, reports: BitReports, ranges: LayerRanges) -> Tensor:
        estimates = super().decode(reports, ranges)
        estimates[0, 0] = math.nan
        return estimates


class SharedRows(LaplaceNoise):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        return super().encode(values, ranges, Reusing(as_source(generator), clients=True))


class SharedByWeights(LaplaceNoise):
    """All weights of a client have the same noise, so their differences have none."""

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        return super().encode(values, ranges, Reusing(as_source(generator), period=1))


class NormalShared(SharedByWeights):
    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 9.0)


@dataclass(frozen=True)
class NormalNoise(LaplaceNoise):
    """Normal noise of all weights of a vector, ``share`` times as large as ``mu`` needs, and sound with the defaults.

    ``noise_of`` makes noise of standard deviation 1 from uniform numbers in (0, 1).
    """

    mu: float = 1.0
    share: float = 1.0
    noise_of: Callable[[Tensor], Tensor] = torch.special.ndtri

    def _sigma(self, ranges: LayerRanges) -> Tensor:
        return ranges.expand()[1] * (self.share * 2 * math.sqrt(ranges.dimension) / self.mu)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        inside, source = ranges.clamp(require_finite(values, ranges)).double(), as_source(generator)
        words = torch.stack([draw(source, row, ranges.dimension) for row in range(len(values))]).double()
        return DenseReports((inside + self.noise_of((words + 2**31 + 0.5) / 2**32) * self._sigma(ranges)).float())

    def noise(self, ranges: LayerRanges) -> Noise:
        return NoiseOfEach(self._sigma(ranges) ** 2, ranges)

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, self.mu, alike=True)


class NoIntegers(NormalNoise):
    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return replace(super().release(ranges), integers=True)


class PartlyShared(LaplaceNoise):
    """A part of each weight's noise is the first weight's. No pair shows it, but their sum does."""

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        sent, radius = super().encode(values, ranges, generator).values.double(), ranges.expand()[1]
        first = (sent[:, :1] - ranges.clamp(values)[:, :1].double()) / radius[0]
        return DenseReports((sent + 0.1 * first * radius).float())

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 9.0)


class RestartingRows(LaplaceNoise):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        return super().encode(values, ranges, SeededStreams.for_clients(7, 1, range(len(values))))


# --- what is stated of a release, and is not so -----------------------------------------------------------------------


class HardlyTelling(Laplace):
    def release(self, ranges: LayerRanges) -> PureRelease:
        return replace(super().release(ranges), blanket=0.999, signed=False)


class SureOfTheSign(Laplace):
    def release(self, ranges: LayerRanges) -> PureRelease:
        return replace(super().release(ranges), blanket=math.exp(-self.epsilon) * 1.001)


@dataclass(frozen=True)
class Misstated(Duchi):
    """States its release with other ``numbers`` than are true."""

    numbers: tuple[tuple[str, Any], ...] = ()

    def release(self, ranges: LayerRanges) -> BinaryRelease:
        return replace(super().release(ranges), **dict(self.numbers))


class OneBitOfAllPlaces(Harmony):
    def release(self, ranges: LayerRanges) -> BinaryRelease:
        return replace(super().release(ranges), sampled=1)


class RareBits(OwnEncoder):
    """Odds that differ by little, but one value hardly comes: no randomised response at epsilon does that."""

    def plus(self, distance: Tensor) -> Tensor:
        return 0.01 - 0.001 * distance.clamp(-1, 1)


class LittleMu(LaplaceNoise):
    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 0.1)


class LouderAtTheEnds(LaplaceNoise):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        center, radius = ranges.expand()
        sent = super().encode(values, ranges, generator).values
        louder = 1 + 9 * ((values - center) / radius).abs().clamp(0, 1)
        return DenseReports((center + (sent - center) * louder).float())

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 9.0, alike=True)


class NoNormalNoise(LaplaceNoise):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        return DenseReports(ranges.clamp(require_finite(values, ranges)).float())

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 9.0, alike=True)


class SeldomCounted(LaplaceNoise):
    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 9.0, unit="record", rate=0.01)


@dataclass(frozen=True, eq=False)
class UnmixedReports(BitReports):
    @classmethod
    def mix(cls, batches: Sequence[BitReports], generator: np.random.Generator) -> BitReports:
        return BitReports(np.concatenate([batch.packed for batch in batches]), batches[0].dimension)


@dataclass(frozen=True, eq=False)
class RowsOfBits(BitReports):
    @classmethod
    def mix(cls, batches: Sequence[BitReports], generator: np.random.Generator) -> BitReports:
        return BitReports(generator.permutation(np.concatenate([batch.packed for batch in batches])), batches[0].dimension)


class Unmixed(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        sent = super().encode(values, ranges, generator)
        return UnmixedReports(sent.packed, sent.dimension)


class MixedByRows(Duchi):
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> BitReports:
        sent = super().encode(values, ranges, generator)
        return RowsOfBits(sent.packed, sent.dimension)


class OneMessage(Duchi):
    def units(self, ranges: LayerRanges) -> Units:
        return Units.whole(ranges.dimension, ranges.dimension)


@dataclass(frozen=True)
class UnderstatedDirection(PrivUnitG):
    """States less than it spends. Its noise is equal in all weights, so that only the widest layer shows it."""

    name: ClassVar[str] = "understated-direction"

    def release(self, ranges: LayerRanges) -> PureRelease:
        spent = super().release(ranges)
        return replace(spent, epsilon=0.75 * spent.epsilon, blanket=None)


class Planted(NamedTuple):
    """A mechanism with a fault, and the kind of check that is there for it."""

    mechanism: Mechanism
    found: str


FAULTS: Mapping[str, Planted] = {
    "no clamp": Planted(NoClamp(1.0), "epsilon"),
    "a clamp to ten times the range": Planted(LateClamp(1.0), "bias"),
    "half the range": Planted(HalfTheRange(1.0), "bias"),
    "two per cent more": Planted(TwoPercentMore(1.0), "epsilon"),
    "two per cent less": Planted(TwoPercentLess(1.0), "bias"),
    "a wider range of the third layer": Planted(OneLayer(1.0, layer=2), "bias"),
    "bits of the next weight": Planted(Rearranged(1.0, lambda t: t.roll(1, 1)), "bias"),
    "weights in reverse": Planted(Rearranged(1.0, lambda t: t.flip(1)), "bias"),
    "sorted weights": Planted(Rearranged(1.0, lambda t: t.sort(dim=1).values), "bias"),
    "the mean of all weights in each": Planted(Rearranged(1.0, lambda t: t.mean(dim=1, keepdim=True).expand_as(t)), "bias"),
    "the first weight in each": Planted(Rearranged(1.0, lambda t: t[:, :1].expand_as(t)), "bits of other weights"),
    "a second weight that the first one turns": Planted(SecondTurnedByFirst(1.0), "bits of other weights"),
    "the same bits for every client": Planted(Reuser(1.0, reuse=(("clients", True),)), "independent clients"),
    "the same bits for every weight": Planted(Reuser(1.0, reuse=(("period", 1),)), "independent weights"),
    "the same bits every 64 weights": Planted(Reuser(1.0, reuse=(("period", 64),)), "independent weights"),
    "the same bits every 4,097 weights": Planted(Reuser(1.0, reuse=(("period", 4097),)), "independent weights"),
    "the same bits in every block": Planted(Reuser(1.0, reuse=(("blocks", True),)), "independent weights"),
    "the same bits in every call": Planted(Restarting(1.0), "independent calls"),
    "no noise": Planted(Silent(1.0), "epsilon"),
    "a length that depends on the value": Planted(Chatty(1.0), "equal lengths"),
    "a wrong statement of the payload": Planted(Understated(1.0), "stated length"),
    "reports that cannot be read": Planted(Unreadable(1.0), "readable reports"),
    "values that are no numbers": Planted(NotFinite(1.0), "refusal of NaN and infinity"),
    "an aggregate that is not the mean": Planted(Scaled(1.0), "aggregate is the mean"),
    "an aggregate without some reports": Planted(Forgetful(1.0), "aggregate is the mean"),
    "a wrong closed form of the variance": Planted(Boasting(1.0), "variance"),
    "estimates that are no numbers": Planted(Undefined(1.0), "bias"),
    "a value as it is, once in a hundred times": Planted(LaplaceNoise(1.0, leak=0.01), "epsilon"),
    "a value nearly as it is, once in a hundred times": Planted(LaplaceNoise(1.0, leak=0.01, hair=1e-3), "epsilon"),
    "noise of one weight for a whole client": Planted(LaplaceNoise(1.0, unit="client", divided=False), "epsilon"),
    "noise of one weight for a whole layer": Planted(LaplaceNoise(1.0, unit="layer", divided=False), "epsilon"),
    "less stated than spent on a vector": Planted(UnderstatedDirection(1.0, 1.0), "epsilon"),
    "rows that share their noise": Planted(SharedRows(1.0, unit="vector"), "independent clients"),
    "the same noise in all weights of a vector": Planted(SharedByWeights(1.0, unit="vector"), "epsilon"),
    "the same normal noise in all weights": Planted(NormalShared(1.0, unit="vector"), "noise of each weight"),
    "noise that weights share in part": Planted(PartlyShared(1.0, unit="vector"), "noise of sums and differences"),
    "no noise on normal vectors": Planted(NoNormalNoise(1.0, unit="vector"), "noise alike"),
    "rows with the same noise in every call": Planted(RestartingRows(1.0, unit="vector"), "independent calls"),
    "the first weight without noise": Planted(FirstOpen(1.0), "epsilon of bits"),
    "the last thousandth without noise": Planted(LastThousandthOpen(1.0), "epsilon of bits"),
    "two weights that share noise": Planted(TwoShareNoise(1.0), "noise of each weight"),
    "the sign in the lowest bit": Planted(SignInTheLowestBit(1.0), "epsilon of bits"),
    "the sign in the lowest bit of one weight": Planted(SignInTheLowestBitOfOneWeight(1.0), "epsilon of bits"),
    "the largest weight without noise": Planted(LargestOpen(1.0), "epsilon of bits"),
    "a fifth of the noise on one weight": Planted(LessNoiseInTheMiddle(1.0), "epsilon of bits"),
    "no clamp in the sixth layer": Planted(NoClampInTheSixthLayer(1.0), "epsilon of bits"),
    "the place of the largest weight": Planted(PlaceBySize(1.0), "epsilon of bits"),
    "a blanket of 0.999": Planted(HardlyTelling(1.0), "blanket of a unit"),
    "a sign that is wrong more often": Planted(SureOfTheSign(1.0), "sign of a report"),
    "half of its epsilon": Planted(Misstated(2.0, (("epsilon", 1.0), ("realised", None))), "epsilon"),
    "a realised epsilon that it does not spend": Planted(Misstated(0.1, (("epsilon", 6.0), ("realised", 6.0))), "realised epsilon"),
    "one unit for all weights": Planted(Misstated(1.0, (("units", 1),)), "units and epsilon"),
    "a thousand coordinates": Planted(Misstated(1.0, (("sampled", 1000),)), "coordinates"),
    "a bit about a place that it sends": Planted(OneBitOfAllPlaces(1.0), "one bit a unit"),
    "bits that are hardly ever set": Planted(RareBits(0.3), "probabilities of bits"),
    "a small mu": Planted(LittleMu(1.0, unit="vector", divided=False), "mu"),
    "noise that depends on the value": Planted(LouderAtTheEnds(1.0, unit="vector", divided=False), "noise alike"),
    "records that always take part": Planted(SeldomCounted(1.0, unit="vector"), "rate of records"),
    "a pool in the order of clients": Planted(Unmixed(1.0), "order in the pool"),
    "a pool of whole rows": Planted(MixedByRows(1.0), "units apart in the pool"),
    "weights in one message": Planted(OneMessage(1.0), "units apart"),
    "half of the normal noise": Planted(NormalNoise(1.0, unit="vector", share=0.5), "mu of the noise"),
    "half of the normal noise at a small mu": Planted(NormalNoise(1.0, unit="vector", mu=0.268, share=0.5), "mu of the noise"),
    "two thirds of the normal noise": Planted(NormalNoise(1.0, unit="vector", share=2 / 3), "mu of the noise"),
    "four fifths of the normal noise": Planted(NormalNoise(1.0, unit="vector", share=0.8), "mu of the noise"),
    "0.95 of the normal noise": Planted(NormalNoise(1.0, unit="vector", share=0.95), "mu of the noise"),
    "uniform noise for normal noise": Planted(
        NormalNoise(1.0, unit="vector", mu=4.0, noise_of=lambda u: (u - 0.5) * math.sqrt(12)), "normal noise"
    ),
    "normal noise cut at three standard deviations": Planted(
        NormalNoise(1.0, unit="vector", mu=4.0, noise_of=lambda u: torch.special.ndtri(u).clamp(-3, 3)), "normal noise"
    ),
    "no noise for a client alone": Planted(OpenWhere(1.0, lambda t: torch.full_like(t, len(t) == 1) > 0), "epsilon"),
    "no noise if a client differs from the first": Planted(
        OpenWhere(1.0, lambda t: (t != t[:1]).any(dim=1, keepdim=True).expand_as(t)), "epsilon"
    ),
    "no noise on the only nonzero weight": Planted(
        OpenWhere(1.0, lambda t: ((t.abs() > 1e-6).sum(dim=1, keepdim=True) == 1).expand_as(t) & (t.shape[1] > 4)), "epsilon"
    ),
    "bits of the next client": Planted(Rearranged(1.0, lambda t: t.roll(1, 0)), "reports of other clients"),
    "the mean of all clients": Planted(Rearranged(1.0, lambda t: t.mean(dim=0, keepdim=True).expand_as(t)), "reports of other clients"),
    "ties in both halves of the cube": Planted(ClosedHalfSpace(1.0), "epsilon"),
    "payloads of any length": Planted(AnyLength(1.0), "refusal of wrong lengths"),
    "payloads whose lengths add up": Planted(OnlyTheSumOfLengths(1.0), "refusal of wrong lengths"),
    "values clipped in place": Planted(ClipsInPlace(1.0), "unchanged values"),
    "a hundredth of a mean's variance": Planted(WrongAboutMeans(1.0, on_variance=0.01), "mean_variance"),
    "a hundred times a mean's variance": Planted(WrongAboutMeans(1.0, on_variance=100.0), "mean_variance"),
    "half of the largest noise": Planted(WrongAboutMeans(1.0, on_std=0.5), "largest_std"),
    "ten times the largest noise": Planted(WrongAboutMeans(1.0, on_std=10.0), "largest_std"),
    "integers that are none": Planted(NoIntegers(1.0, unit="vector"), "integers"),
}
