"""Laplace, piecewise and hybrid noise on every weight, or on a random few of them at the whole budget (k-of-d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, nextafter
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import Mechanism, require_finite, require_finite_sample, require_shape, total_clients
from ldpfl.mechanisms.noise import QuadraticNoise, scale_to_unit_range
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.dense import DenseReports
from ldpfl.mechanisms.reports.sampled import SampledReports, choose_coordinates
from ldpfl.mechanisms.reports.units import FLOAT_BITS, SampledUnits, Units
from ldpfl.mechanisms.scalar_noise import HybridLaw, LaplaceLaw, PiecewiseLaw, ScalarLaw, checked_epsilon, refuse_values_above
from ldpfl.mechanisms.settings import EpsilonSettings, none_if_word
from ldpfl.privacy import PureRelease, usable_blanket
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Count
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source, blocks, client_blocks, uniform

if TYPE_CHECKING:
    from torch import Tensor

Coordinates = int | Literal["auto"] | None

EPSILON_PER_COORDINATE = 2.5
"""``auto`` samples k = epsilon / 2.5 weights, rounded down: close to the best k for the worst input (Wang et al. 2019, section 4)."""


@dataclass(frozen=True)
class ScalarMechanism(Mechanism):
    """Clamp and scale a weight to t = (w - c) / r in [-1, 1], report t* drawn by a :class:`ScalarLaw`, estimate c + r t*.

    With ``coordinates`` k, each client draws k of the d weights without replacement, whatever their values, and reports them at
    epsilon / k each. The estimate of a drawn weight is c + r (d / k) t*, that of another one is c. A report carries t*.

    Guarantee: pure epsilon-LDP, replacing one weight by any other value (``coordinates=None``: d such reports a round)
    or replacing the whole vector (k-of-d: one report), of the bits that leave: t and the noise are points of a public lattice, and
    what becomes a float32 is their sum alone. Assumes public ranges and an unguessable source of random bits.

    Source: Wang et al. 2019, Algorithms 2 to 4, with the clamp in front, without which there is no epsilon.

    Attributes:
        epsilon: budget of a weight, or with ``coordinates`` of the whole vector.
        coordinates: ``None``, k, or ``"auto"``: k = max(1, min(d, floor(epsilon / 2.5))).
    """

    epsilon: float
    coordinates: Coordinates = None
    law: ClassVar[type[ScalarLaw]]

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if self.coordinates is None or self.coordinates == "auto":
            return
        if isinstance(self.coordinates, bool) or not isinstance(self.coordinates, int) or self.coordinates < 1:
            raise ConfigError(f'coordinates must be a whole number of at least 1, or "auto", got {self.coordinates!r}')
        checked_epsilon(_epsilon_per_value(self.epsilon, self.coordinates))

    def sample_count(self, ranges: LayerRanges) -> int | None:
        """Return the number k of weights that a client samples and reports; None if it reports all, each at the full epsilon.

        Raises:
            ConfigError: ``coordinates`` exceeds the number of weights.
        """
        if self.coordinates == "auto":
            return max(1, min(ranges.dimension, floor(self.epsilon / EPSILON_PER_COORDINATE)))
        if self.coordinates is not None and self.coordinates > ranges.dimension:
            raise ConfigError(f"coordinates is {self.coordinates}, but there are only {ranges.dimension} weights: set a smaller number")
        return self.coordinates

    def law_for(self, ranges: LayerRanges) -> ScalarLaw:
        """Return the law that one reported value is drawn from."""
        return self.law(_epsilon_per_value(self.epsilon, self.sample_count(ranges)))

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=self.coordinates is None, caveats=self._caveats)  # reports of sampled weights carry indices, too

    @property
    def _caveats(self) -> tuple[str, ...]:
        """Warning if a value's epsilon is larger than random bits can express. For ``auto``, the number of weights is not known here."""
        count = floor(self.epsilon / EPSILON_PER_COORDINATE) if self.coordinates == "auto" else self.coordinates
        value_epsilon = _epsilon_per_value(self.epsilon, max(1, count) if count is not None else None)
        if value_epsilon <= self.law.epsilon_limit:
            return ()
        return (
            f"epsilon {value_epsilon:g} a value is above {self.law.epsilon_limit:.1f}, from where on reports reveal less than is counted",
        )

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports | SampledReports:
        """Randomise all weights of ``values``, or sample some of each client's and randomise these."""
        law, count, source = self.law_for(ranges), self.sample_count(ranges), as_source(generator)
        if count is None:
            return _encode_all(require_finite(values, ranges), ranges, source, law)
        return _encode_sampled(require_shape(values, ranges).cpu(), ranges, source, law, count)

    def decode(self, reports: DenseReports | SampledReports, ranges: LayerRanges) -> Tensor:
        """Return estimates (K, d): center + F radius t* for a reported value t*, F the :meth:`_sampling_factor`; the center for others."""
        self._count_clients([reports], ranges)
        center, radius = ranges.expand()
        if isinstance(reports, DenseReports):
            return (center + radius * reports.values).float()
        index = torch.from_numpy(reports.index)
        estimates = center[index] + radius[index] * self._sampling_factor(ranges) * torch.from_numpy(reports.values)
        return center.float().expand(reports.clients, -1).scatter(1, index, estimates.float())

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> DenseReports | SampledReports:
        """Parse payloads of all or of sampled weights. Refuse values beyond the law's ``bound``, which could outweigh all others."""
        reports: DenseReports | SampledReports
        count = self.sample_count(ranges)
        if count is None:
            reports = DenseReports.from_payloads(payloads, ranges.dimension)
        else:
            reports = SampledReports.from_payloads(payloads, ranges.dimension, count)
        refuse_values_above(torch.as_tensor(reports.values), self.law_for(ranges).bound)
        return reports

    def aggregate(self, reports: Sequence[DenseReports | SampledReports], ranges: LayerRanges) -> Tensor:
        """Return the mean (d,). Sums are divided by the number of all clients, not of those that sampled the weight. So it is unbiased."""
        clients = self._count_clients(reports, ranges)
        total = np.zeros(ranges.dimension)
        for batch in reports:  # client by client, so that the sum does not depend on how they were batched
            if isinstance(batch, SampledReports):
                np.add.at(total, batch.index.ravel(), batch.values.ravel().astype(np.float64))
            else:
                batch.add_to(total)
        center, radius = ranges.expand()
        return (center + radius * torch.from_numpy(total) * (self._sampling_factor(ranges) / clients)).float()

    def noise(self, ranges: LayerRanges) -> QuadraticNoise:
        """Return the error with the variance r^2 V(t), for the radius r and the law's variance V(t) = a + b t^2.

        With k of d weights it is r^2 [(d / k) V(t; epsilon / k) + (d / k - 1) t^2] (Wang et al. 2019, section 4). With all weights, b is 0
        for Laplace, and for hybrid above eps*; positive for piecewise; and -1 for one bit a weight. With k-of-d, it is about d / k.
        """
        offset, slope = self._variance_coefficients(ranges)
        return QuadraticNoise(ranges, offset, slope, clipped=self.sample_count(ranges) is not None)

    def units(self, ranges: LayerRanges) -> Units | SampledUnits:
        """Return the layout: one unit for each weight, a float32; or one for each sampled weight, an index and a float32."""
        count = self.sample_count(ranges)
        if count is None:
            return Units.equal(ranges.dimension, FLOAT_BITS)
        # A unit that is separated from its report equals the report of a client that samples one weight, at epsilon / k.
        one_weight = replace(self, epsilon=_epsilon_per_value(self.epsilon, count), coordinates=1)
        return SampledUnits(count, ranges.dimension, reader=lambda all_ranges: one_weight)  # the same, whatever the ranges

    def release(self, ranges: LayerRanges) -> PureRelease:
        """Return the release: one unit for each weight, or all sampled weights as one unit, whose blanket is the product of theirs."""
        count, value_blanket = self.sample_count(ranges), self.law_for(ranges).blanket
        if count is None:
            blanket = usable_blanket(self.epsilon, value_blanket)
            return PureRelease(self.name, self.epsilon, ranges.dimension, "weight", blanket=blanket, signed=blanket is not None)
        return PureRelease(self.name, self.epsilon, 1, "vector", blanket=usable_blanket(self.epsilon, value_blanket**count))

    def _sampling_factor(self, ranges: LayerRanges) -> float:
        """Return d / k, the factor on reported values that makes estimates unbiased; 1 if all weights are reported."""
        count = self.sample_count(ranges)
        return 1.0 if count is None else ranges.dimension / count

    def _variance_coefficients(self, ranges: LayerRanges) -> tuple[float, float]:
        """Return (a, b): the variance of a client's estimate is radius^2 (a + b t^2), t the value's distance from the center in radii."""
        law, factor = self.law_for(ranges), self._sampling_factor(ranges)
        return factor * law.offset, factor * law.slope + (factor - 1)  # factor - 1: from sampling, see :meth:`noise`

    def _count_clients(self, reports: Sequence[DenseReports | SampledReports], ranges: LayerRanges) -> int:
        """Return the number of clients of ``reports``, after checking that :meth:`encode` could have made them.

        Raises:
            PrivacyError: there is no report, or one has another class, dimension or number of sampled weights.
        """
        count = self.sample_count(ranges)
        clients = total_clients(reports, ranges, DenseReports if count is None else SampledReports)
        for batch in reports:
            if isinstance(batch, SampledReports) and batch.coordinates != count:
                raise PrivacyError(
                    f"a report has {batch.coordinates} sampled weights, expected {count}: use the same settings at clients and server"
                )
        return clients


@dataclass(frozen=True)
class Laplace(ScalarMechanism):
    """Laplace noise of scale 2 / epsilon on t. :class:`ScalarMechanism` states the guarantee, the sampling and the assumptions.

    The variance is 8 / epsilon^2 for every t. Source: Dwork et al. 2006.
    """

    name: ClassVar[str] = "laplace"
    law: ClassVar[type[ScalarLaw]] = LaplaceLaw


@dataclass(frozen=True)
class Piecewise(ScalarMechanism):
    """Bounded noise, mostly close to t. :class:`ScalarMechanism` states the guarantee, the sampling and the assumptions.

    From epsilon 1.28978 on, its largest variance is below that of one bit. Source: Wang et al. 2019, Algorithms 2 and 4.
    """

    name: ClassVar[str] = "piecewise"
    law: ClassVar[type[ScalarLaw]] = PiecewiseLaw


@dataclass(frozen=True)
class Hybrid(ScalarMechanism):
    """Piecewise or one bit, at random. :class:`ScalarMechanism` states the guarantee, the sampling and the assumptions.

    For the worst t, its variance is never above that of either. Source: Wang et al. 2019, sections 3.3 and 4.
    """

    name: ClassVar[str] = "hybrid"
    law: ClassVar[type[ScalarLaw]] = HybridLaw


class ScalarSettings(EpsilonSettings):
    """Settings that ``laplace``, ``piecewise`` and ``hybrid`` share."""

    coordinates: Count | Literal["all", "auto"] = "all"
    """Number of weights that a client samples and sends, which share ``epsilon``. ``all`` sends every weight, each at ``epsilon``. ``auto``
    sends one weight for every 2.5 of ``epsilon``, and at least one."""

    mechanism: ClassVar[type[ScalarMechanism]]

    def at(self, epsilon: float) -> ScalarMechanism:
        return self.mechanism(epsilon, none_if_word(self.coordinates, "all"))  # None: all weights are sent


class LaplaceSettings(ScalarSettings):
    """Settings of ``laplace``."""

    name: Literal["laplace"] = "laplace"
    mechanism: ClassVar[type[ScalarMechanism]] = Laplace


class PiecewiseSettings(ScalarSettings):
    """Settings of ``piecewise``."""

    name: Literal["piecewise"] = "piecewise"
    mechanism: ClassVar[type[ScalarMechanism]] = Piecewise


class HybridSettings(ScalarSettings):
    """Settings of ``hybrid``."""

    name: Literal["hybrid"] = "hybrid"
    mechanism: ClassVar[type[ScalarMechanism]] = Hybrid


def _encode_all(values: Tensor, ranges: LayerRanges, source: RandomSource, law: ScalarLaw) -> DenseReports:
    """Randomise every weight of ``values`` (K, d) by ``law``."""
    reported = torch.empty(values.shape, dtype=torch.float32)
    for rows, columns in blocks(len(values), ranges.dimension, values=COORDINATE_BLOCK):  # small: sampling takes several float64 arrays
        block, (center, radius) = (slice(rows.start, rows.stop), columns), ranges.slice(columns.start, columns.stop)
        reported[block] = law.sample(scale_to_unit_range(values[block], center, radius), source, rows).float()
    return DenseReports(reported)


def _encode_sampled(values: Tensor, ranges: LayerRanges, source: RandomSource, law: ScalarLaw, count: int) -> SampledReports:
    """Sample ``count`` weights of each row of ``values`` (K, d), and randomise them by ``law``. Others are not even checked for NaN."""
    center, radius = ranges.expand()
    index = np.empty((values.shape[0], count), dtype=np.int64)
    reported = np.empty(index.shape, dtype=np.float32)
    for rows in client_blocks(values.shape[0], count):
        block = slice(rows.start, rows.stop)
        index[block] = choose_coordinates(uniform(source, rows, count), ranges.dimension)
        columns = torch.from_numpy(index[block])
        t = scale_to_unit_range(require_finite_sample(values[block].gather(1, columns)), center[columns], radius[columns])
        reported[block] = law.sample(t, source, rows).numpy()
    return SampledReports(index, reported, ranges.dimension)


def _epsilon_per_value(epsilon: float, count: int | None) -> float:
    """Return epsilon / ``count``, rounded down if ``count`` times it would exceed ``epsilon``.

    Return ``epsilon`` if ``count`` is None, and 0, which is refused later, if no float can hold ``count``.
    """
    if count is None:
        return epsilon
    try:
        quotient = epsilon / count
        return quotient if Fraction(quotient) * count <= Fraction(epsilon) else nextafter(quotient, 0.0)
    except OverflowError:
        return 0.0
