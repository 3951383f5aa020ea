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
from ldpfl.mechanisms.noise import QuadraticNoise, scaled
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK, blocks, client_blocks
from ldpfl.mechanisms.reports.dense import DenseReports
from ldpfl.mechanisms.reports.sampled import SampledReports, choose_coordinates
from ldpfl.mechanisms.reports.units import SampledUnits, Units
from ldpfl.mechanisms.scalar_noise import (
    HybridLaw,
    LaplaceLaw,
    PiecewiseLaw,
    ScalarLaw,
    check_possible,
    checked_epsilon,
)
from ldpfl.mechanisms.settings import EpsilonSettings, as_none
from ldpfl.privacy import PureRelease, usable_blanket
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Count
from ldpfl.util.randomness import RandomSource, as_source, uniform

if TYPE_CHECKING:
    from torch import Tensor

Coordinates = int | Literal["auto"] | None

EPSILON_A_COORDINATE = 2.5
"""k grows by one for every 2.5 of epsilon: close to the best k for the worst input (Wang et al. 2019, section 4)."""


@dataclass(frozen=True)
class ScalarMechanism(Mechanism):
    """Clamp and scale a weight to t = (w - c) / r in [-1, 1], report t* drawn by a :class:`ScalarLaw`, estimate c + r t*.

    With ``coordinates`` k, each client draws k of the d weights without replacement, whatever their values, and
    reports them at epsilon / k each; the estimate of those is c + r (d / k) t*, of the others c. A report carries t*.

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
        checked_epsilon(_share(self.epsilon, self.coordinates))

    def sampled(self, ranges: LayerRanges) -> int | None:
        """Return how many weights k a client reports; ``None`` for all of them, each at the full epsilon.

        Raises:
            ConfigError: ``coordinates`` exceeds the number of weights.
        """
        if self.coordinates == "auto":
            return max(1, min(ranges.dimension, floor(self.epsilon / EPSILON_A_COORDINATE)))
        if self.coordinates is not None and self.coordinates > ranges.dimension:
            raise ConfigError(f"coordinates is {self.coordinates}, and there are only {ranges.dimension} weights")
        return self.coordinates

    def law_for(self, ranges: LayerRanges) -> ScalarLaw:
        """Return the law that one reported value is drawn from."""
        return self.law(_share(self.epsilon, self.sampled(ranges)))

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=self.coordinates is None, caveats=self._caveats)

    @property
    def _caveats(self) -> tuple[str, ...]:
        taken = floor(self.epsilon / EPSILON_A_COORDINATE) if self.coordinates == "auto" else self.coordinates
        each = _share(self.epsilon, max(1, taken) if taken is not None else None)
        if each <= self.law.limit:
            return ()
        return (f"epsilon {each:g} a value is more than {self.law.limit:.1f}, above which less is spent than counted",)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports | SampledReports:
        law, taken, source = self.law_for(ranges), self.sampled(ranges), as_source(generator)
        if taken is None:
            return _encode_all(require_finite(values, ranges), ranges, source, law)
        return _encode_sampled(require_shape(values, ranges).cpu(), ranges, source, law, taken)

    def decode(self, reports: DenseReports | SampledReports, ranges: LayerRanges) -> Tensor:
        self._checked([reports], ranges)
        center, radius = ranges.expand()
        if isinstance(reports, DenseReports):
            return (center + radius * reports.values).float()
        hit = torch.from_numpy(reports.index)
        estimated = center[hit] + radius[hit] * self._weight(ranges) * torch.from_numpy(reports.values)
        return center.float().expand(reports.clients, -1).scatter(1, hit, estimated.float())

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> DenseReports | SampledReports:
        """Read either format, and refuse values beyond the law's ``bound``: one of them could outweigh all other clients."""
        reports: DenseReports | SampledReports
        taken = self.sampled(ranges)
        if taken is None:
            reports = DenseReports.from_payloads(payloads, ranges.dimension)
        else:
            reports = SampledReports.from_payloads(payloads, ranges.dimension, taken)
        check_possible(torch.as_tensor(reports.values), self.law_for(ranges).bound)
        return reports

    def aggregate(self, reports: Sequence[DenseReports | SampledReports], ranges: LayerRanges) -> Tensor:
        """Divide by the number of clients, not by that of the hits: the mean stays unbiased and the hits tell nothing more."""
        clients = self._checked(reports, ranges)
        total = np.zeros(ranges.dimension)
        for batch in reports:  # client by client, so that the sum does not depend on how they were batched
            if isinstance(batch, SampledReports):
                np.add.at(total, batch.index.ravel(), batch.values.ravel().astype(np.float64))
            else:
                batch.add_to(total)
        center, radius = ranges.expand()
        return (center + radius * torch.from_numpy(total) * (self._weight(ranges) / clients)).float()

    def noise(self, ranges: LayerRanges) -> QuadraticNoise:
        """r^2 V(t), and with k-of-d r^2 [(d / k) V(t; epsilon / k) + (d / k - 1) t^2] (Wang et al. 2019, section 4).

        In r^2 (a + b t^2), b is 0 for Laplace and for hybrid above eps*, with all weights reported; positive for piecewise, and about
        d / k for k-of-d. It is -1 for one bit a weight.
        """
        offset, slope = self._quadratic(ranges)
        return QuadraticNoise(ranges, offset, slope, clipped=self.sampled(ranges) is not None)

    def units(self, ranges: LayerRanges) -> Units | SampledUnits:
        """A value a weight, or the sampled weights, each with its index: they were randomised at epsilon / k each."""
        taken = self.sampled(ranges)
        if taken is None:
            return Units.equal(ranges.dimension, 32)
        # A sampled weight alone is the report of a client that samples one weight, at epsilon / k.
        alone = replace(self, epsilon=_share(self.epsilon, taken), coordinates=1)
        return SampledUnits(taken, ranges.dimension, reader=lambda part: alone)

    def release(self, ranges: LayerRanges) -> PureRelease:
        taken, each = self.sampled(ranges), self.law_for(ranges).blanket
        if taken is None:
            blanket = usable_blanket(self.epsilon, each)
            return PureRelease(self.name, self.epsilon, ranges.dimension, "weight", blanket=blanket, signed=blanket is not None)
        return PureRelease(self.name, self.epsilon, 1, "vector", blanket=usable_blanket(self.epsilon, each**taken))

    def _weight(self, ranges: LayerRanges) -> float:
        """d / k: what a reported value counts for."""
        taken = self.sampled(ranges)
        return 1.0 if taken is None else ranges.dimension / taken

    def _quadratic(self, ranges: LayerRanges) -> tuple[float, float]:
        """Return (a, b): the variance of one client's estimate is r^2 (a + b t^2)."""
        law, weight = self.law_for(ranges), self._weight(ranges)
        return weight * law.offset, weight * law.slope + (weight - 1)

    def _checked(self, reports: Sequence[DenseReports | SampledReports], ranges: LayerRanges) -> int:
        """Return the number of clients behind reports of the kind that :meth:`encode` makes.

        Raises:
            PrivacyError: no report, or one of another kind, dimension or number of weights.
        """
        taken = self.sampled(ranges)
        clients = total_clients(reports, ranges, DenseReports if taken is None else SampledReports)
        for batch in reports:
            if isinstance(batch, SampledReports) and batch.coordinates != taken:
                raise PrivacyError(f"a report covers {batch.coordinates} sampled weights, expected {taken}")
        return clients


@dataclass(frozen=True)
class Laplace(ScalarMechanism):
    """Laplace noise of scale 2 / epsilon on t. Guarantee, sampling and what it assumes: see :class:`ScalarMechanism`.

    Variance 8 / epsilon^2 whatever t. Source: Dwork et al. 2006.
    """

    name: ClassVar[str] = "laplace"
    law: ClassVar[type[ScalarLaw]] = LaplaceLaw


@dataclass(frozen=True)
class Piecewise(ScalarMechanism):
    """Bounded noise, mostly close to t. Guarantee, sampling and what it assumes: see :class:`ScalarMechanism`.

    Worst-case variance below one bit's from epsilon 1.28978 on. Source: Wang et al. 2019, Algorithms 2 and 4.
    """

    name: ClassVar[str] = "piecewise"
    law: ClassVar[type[ScalarLaw]] = PiecewiseLaw


@dataclass(frozen=True)
class Hybrid(ScalarMechanism):
    """Piecewise or one bit, at random. Guarantee, sampling and what it assumes: see :class:`ScalarMechanism`.

    Never worse than either for the worst t. Source: Wang et al. 2019, sections 3.3 and 4.
    """

    name: ClassVar[str] = "hybrid"
    law: ClassVar[type[ScalarLaw]] = HybridLaw


class ScalarSettings(EpsilonSettings):
    """Settings that ``laplace``, ``piecewise`` and ``hybrid`` share."""

    coordinates: Count | Literal["all", "auto"] = "all"
    """Weights sent, at the whole budget together; ``all`` sends each at ``epsilon``."""

    mechanism: ClassVar[type[ScalarMechanism]]

    def at(self, epsilon: float) -> ScalarMechanism:
        return self.mechanism(epsilon, as_none(self.coordinates, "all"))


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
    reported = torch.empty(values.shape, dtype=torch.float32)
    for rows, own in blocks(len(values), ranges.dimension, values=COORDINATE_BLOCK):  # float64, several times, takes more of a cache
        some, (center, radius) = slice(rows.start, rows.stop), ranges.slice(own.start, own.stop)
        reported[some, own] = law.sample(scaled(values[some, own], center, radius), source, rows).float()
    return DenseReports(reported)


def _encode_sampled(values: Tensor, ranges: LayerRanges, source: RandomSource, law: ScalarLaw, taken: int) -> SampledReports:
    center, radius = ranges.expand()
    index = np.empty((values.shape[0], taken), dtype=np.int64)
    reported = np.empty(index.shape, dtype=np.float32)
    for rows in client_blocks(values.shape[0], taken):
        some = slice(rows.start, rows.stop)
        index[some] = choose_coordinates(uniform(source, rows, taken), ranges.dimension)
        hit = torch.from_numpy(index[some])
        t = scaled(require_finite_sample(values[some].gather(1, hit)), center[hit], radius[hit])
        reported[some] = law.sample(t, source, rows).numpy()
    return SampledReports(index, reported, ranges.dimension)


def _share(epsilon: float, taken: int | None) -> float:
    """Return the budget of one reported value."""
    try:
        if taken is None:
            return epsilon
        share = epsilon / taken
        return share if Fraction(share) * taken <= Fraction(epsilon) else nextafter(share, 0.0)  # so that k of them are no more
    except OverflowError:  # more coordinates than a float can hold
        return 0.0
