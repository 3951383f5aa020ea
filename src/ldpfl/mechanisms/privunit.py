"""PrivUnitG: a direction with Gaussian noise around it, at a pure budget for the whole vector, and optionally its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import privatize, require_finite
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.exact_noise import Floats
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.privunit_law import DirectionLaw, direction_law, randomised_directions
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.mechanisms.scalar_noise import refuse_values_above
from ldpfl.mechanisms.settings import EpsilonSettings
from ldpfl.privacy import PureRelease, usable_blanket
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Positive
from ldpfl.util.randomness import RandomSource, as_source, client_blocks, draw_block

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_EPSILON, _LARGEST_EPSILON = 1e-6, 1e4
_SMALLEST_NORM, _LARGEST_NORM = 1e-20, 1e20
"""Outside, float32 cannot hold every estimate, or the optimum is lost to rounding."""

Number = TypeVar("Number", float, "Tensor")


@dataclass(frozen=True)
class PrivUnitG(VectorMechanism):
    """Send the direction of w - c with noise around it, times ``norm`` or times a one-bit estimate of its own length.

    Guarantee: epsilon-LDP (pure) for the whole vector of each round's report, replacing it by any other vector, of the bits that
    leave, because they follow from points of a public lattice. Assumes public ranges and norm, and unguessable random bits.

    Only the centers of ``ranges`` are used: vectors are clipped to the Euclidean ball of radius ``norm`` around them, and single
    coordinates are not clipped. A zero vector gets a random corner of the cube as its direction.

    Attributes:
        norm: clipping norm; a longer vector is shortened to it.
        magnitude_share: part of epsilon that is spent on the length. With 0 every vector counts as one of length ``norm``: the estimates
            of short vectors are too long (biased).

    Source: Asi, Feldman & Talwar 2022; Bhowmick et al. 2018 for the separate length; Duchi et al. 2018 for its bit.
    """

    epsilon: float
    norm: float
    magnitude_share: float = 0.0
    name: ClassVar[str] = "privunit-g"

    def __post_init__(self) -> None:
        """Check the settings, and that both parts of epsilon, for direction and length, are large enough."""
        if not _is_number_between(self.norm, _SMALLEST_NORM, _LARGEST_NORM):
            raise ConfigError(f"norm must lie between {_SMALLEST_NORM:g} and {_LARGEST_NORM:g}, got {self.norm!r}")
        if not _is_number_between(self.magnitude_share, 0.0, 1.0) or self.magnitude_share == 1:
            raise ConfigError(f"magnitude_share must lie in [0, 1), got {self.magnitude_share!r}")
        if not _is_number_between(self.epsilon, _SMALLEST_EPSILON, _LARGEST_EPSILON):
            raise ConfigError(f"epsilon must lie between {_SMALLEST_EPSILON:g} and {_LARGEST_EPSILON:g}, got {self.epsilon!r}")
        parts = (self._direction_epsilon, *((self.length_epsilon,) if self.magnitude_share else ()))
        if min(parts) < _SMALLEST_EPSILON:
            raise ConfigError(
                f"magnitude_share {self.magnitude_share} leaves the direction or the length less than {_SMALLEST_EPSILON:g} of epsilon "
                f"{self.epsilon}: change magnitude_share, or set a larger epsilon"
            )

    @property
    def law(self) -> DirectionLaw:
        """The law by which directions are randomised, at the part of epsilon for them."""
        return direction_law(self._direction_epsilon)

    @property
    def properties(self) -> Properties:
        if self.magnitude_share:
            caveats = Duchi(self.length_epsilon).properties.caveats
        else:
            caveats = (f"lengths are not sent: every update counts as one of norm {self.norm:g}, so short ones are overstated (biased)",)
        return replace(
            super().properties,
            caveats=caveats,
            source="Asi, Feldman & Talwar 2022",
            assumptions=("ranges and norm are public", "random bits are uniform and secret"),
        )

    def bound(self, ranges: LayerRanges) -> float:
        """Return the largest absolute value of an honest report: the bound of a direction's entries times the longest length.

        The longest length is ``norm``, or norm (1 + A) / 2 if lengths are sent by a bit of gain A.
        """
        longest = self.norm * (1 + Duchi(self.length_epsilon).gain) / 2 if self.magnitude_share else self.norm
        return longest * self.law.bound(ranges.dimension)

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> VectorReports:
        """Parse payloads, and refuse values beyond :meth:`bound`: one of them could outweigh all other clients."""
        reports = super().read(payloads, ranges)
        refuse_values_above(reports.values, self.bound(ranges))
        return reports

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> VectorReports:
        """Return each client's noisy direction times its noisy length, or times ``norm`` if lengths are not sent."""
        values = require_finite(values, ranges)
        source, law, sent = as_source(generator), self.law, torch.empty_like(values)
        center, _ = ranges.expand()
        row_blocks = list(client_blocks(len(values), ranges.dimension))
        lengths = np.empty(len(values))
        for rows in row_blocks:  # the directions are computed again below, so that those of all clients need no memory
            block = slice(rows.start, rows.stop)
            lengths[block], _ = _lengths_and_directions((values[block] - center).numpy())
        noisy_lengths = self._noisy_lengths(torch.from_numpy(lengths).clamp_max(self.norm), source)
        for rows in row_blocks:
            block = slice(rows.start, rows.stop)
            # Random corners are drawn for every client, so that the number of random bits does not reveal which vectors are zero.
            corners = _random_corners(draw_block(source, rows, (ranges.dimension + BITS - 1) // BITS), ranges.dimension)
            _, directions = _lengths_and_directions((values[block] - center).numpy())
            directions = np.where(lengths[block, None] > 0, directions, corners)
            sent[block] = torch.from_numpy(randomised_directions(law, directions, source, rows)).mul_(noisy_lengths[block, None]).float()
        if not isfinite(sent.sum(dtype=torch.float64)):
            raise PrivacyError("a report has NaN or infinity, so the random source is broken: pass another source; nothing was sent")
        return VectorReports(sent)

    def noise(self, ranges: LayerRanges) -> Noise:
        return _DirectionNoise(self, ranges)

    def release(self, ranges: LayerRanges) -> PureRelease:
        length_blanket = 1.0  # if lengths are not sent
        if self.magnitude_share:
            lowest, _ = thresholds(self.length_epsilon)
            length_blanket = lowest / (1 << (BITS - 1))  # twice the probability lowest / 2^32 of the length's rarer bit
        return PureRelease(self.name, self.epsilon, 1, "vector", blanket=usable_blanket(self.epsilon, self.law.blanket * length_blanket))

    @property
    def length_epsilon(self) -> float:
        """The part of epsilon that is spent on the vector's length."""
        return self.magnitude_share * self.epsilon

    @property
    def _direction_epsilon(self) -> float:
        """The part of epsilon that is spent on the vector's direction."""
        return self.epsilon - self.length_epsilon

    def _noisy_lengths(self, lengths: Tensor, source: RandomSource) -> Tensor:
        """Return unbiased one-bit estimates of ``lengths`` (K,) in [0, norm] by ``duchi``; or ``norm`` for all if lengths are not sent."""
        if not self.magnitude_share:
            return torch.full_like(lengths, self.norm)
        half = torch.tensor([self.norm / 2], dtype=torch.float64)  # as center and radius, it makes [0, norm] the range of one weight
        return privatize(Duchi(self.length_epsilon), lengths.float()[:, None], LayerRanges(half, half, (1,)), source)[:, 0].double()


@dataclass(frozen=True, eq=False)
class _DirectionNoise(Noise):
    """The error of noisy directions times a length M, which is ``norm`` or a noisy estimate.

    The formulas have the scale m and gamma of :class:`DirectionLaw`, n clients, d weights, the length N and direction u of a client's
    vector, the gain A of the length's bit, and V = E[M^2].
    """

    mechanism: PrivUnitG
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        """Return the variance around the estimate's own mean: E[M^2] E[Z_j^2] - (E[M] u_j)^2 for the length M and noisy direction Z.

        u is the true direction. M and Z are independent. Z_j = (alpha u_j + g_j) / m for the law's random alpha and scale m. g_j has the
        variance 1 - u_j^2, so E[Z_j^2] = (1 + (E[alpha^2] - 1) u_j^2) / m^2. A zero vector has a random direction of mean 0, with
        u_j^2 = 1 / d.
        """
        center, _ = self.ranges.expand()
        offset = values.double() - center
        length = torch.linalg.vector_norm(offset, dim=1, keepdim=True)
        squares = torch.where(length > 0, (offset / length) ** 2, 1 / self.ranges.dimension)  # u_j^2; 0 / 0 is not taken
        clipped = length.clamp_max(self.mechanism.norm)
        mean_length = clipped if self.mechanism.magnitude_share else torch.full_like(clipped, self.mechanism.norm)  # E[M]
        mean_squares = (length > 0) * mean_length**2 * squares  # (E[M] u_j)^2, or 0 for a zero vector
        direction_square: Tensor = (1 + (self.mechanism.law.second_moment - 1) * squares) / self.mechanism.law.scale**2  # E[Z_j^2]
        variance: Tensor = direction_square * self._second_moment(clipped) - mean_squares
        return variance.to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return the variance of one client's estimate over n = ``clients``, with the client's length N and direction u from ``mean``.

        It is (V / m^2 + (V - N^2) u_j^2) / n in weight j, for the law's scale m = gamma and V, the mean square of the noisy length. If
        lengths are not sent, it is norm^2 / (m^2 n), exact except for zero vectors. Otherwise u is the direction of the mean, and N is
        the length that explains the length of the mean, noise included: E|mean - center|^2 = N^2 + (V (d / m^2 + 1) - N^2) / n for d
        weights, where V is linear in N. The estimate is consistent where all clients hold the same vector. It is too large near 0. Where
        updates cancel, it is too small, by the factor (A^2 + 3) / (A^2 - 1) at most, with the gain A of the length's bit.
        """
        scale = self.mechanism.law.scale
        if not self.mechanism.magnitude_share:
            return torch.full_like(mean, self.mechanism.norm**2 / (scale**2 * clients), dtype=torch.float32)
        center, _ = self.ranges.expand()
        offset = mean.double() - center
        squared_length = float(offset.square().sum())
        noise_factor = (self.ranges.dimension / scale**2 + 1) / clients  # factor of V in E|mean - center|^2
        length = self._estimated_length(squared_length, noise_factor, clients)
        second = self._second_moment(length)  # V
        # u_j^2 for each weight j; the mean over random directions if the mean of the reports gives none.
        squares = offset**2 / squared_length if squared_length > 0 else torch.full_like(offset, 1 / self.ranges.dimension)
        return ((second / scale**2 + (second - length**2) * squares) / clients).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return the standard deviation of the mean of ``clients`` reports about the worst vector, the same in every layer."""
        return np.full_like(self.ranges.radii, sqrt(self._worst_variance() / clients))

    def _second_moment(self, length: Number) -> Number:
        """Return the mean square of the noisy length of a vector of this ``length``; norm^2 if lengths are not sent.

        It is norm^2 (A^2 - 1) / 4 + norm * length, with the gain A of the length's bit.
        """
        if not self.mechanism.magnitude_share:
            return 0 * length + self.mechanism.norm**2  # in the shape of ``length``
        return self.mechanism.norm * length + self.mechanism.norm**2 * (Duchi(self.mechanism.length_epsilon).gain ** 2 - 1) / 4

    def _estimated_length(self, squared_length: float, noise_factor: float, clients: int) -> float:
        """Return the length N in [0, norm] of a client's vector that explains the ``squared_length`` of the mean of ``clients`` reports.

        N solves (1 - 1 / clients) N^2 + ``noise_factor`` V(N) = ``squared_length``, where V(N) is :meth:`_second_moment`. The left side is
        the expected squared length, see :meth:`mean_variance`.
        """
        # As V(N) = norm * N + V(0), this is the quadratic equation  square N^2 + linear N = rest.
        square, linear = 1 - 1 / clients, noise_factor * self.mechanism.norm
        rest = squared_length - noise_factor * self._second_moment(0.0)
        if rest <= 0:  # the noise alone explains the mean's length
            return 0.0
        # The positive root, in a form in which no digits cancel.
        return min(self.mechanism.norm, 2 * rest / (linear + sqrt(linear**2 + 4 * square * rest)))

    def _worst_variance(self) -> float:
        """Return the largest variance of a client's estimate in one weight.

        m is the law's scale, and V(N) = _second_moment(N). If lengths are sent (magnitude_share > 0), the variance is V(N) (1 + 1 / m^2) -
        N^2, for a vector with all of its length N in one weight, at the worst N. Otherwise it is norm^2 (1 / m^2 + 1 / d), for the zero
        vector, whose direction is random; other vectors have norm^2 / m^2.
        """
        noise = 1 / self.mechanism.law.scale**2
        # V(N) is norm * N plus a constant, so the variance is largest at N = norm (1 + 1 / m^2) / 2, or at norm if that is less.
        length = self.mechanism.norm * min(1.0, (1 + noise) / 2)
        with_length = self._second_moment(length) * (1 + noise) - length**2
        return with_length if self.mechanism.magnitude_share else self.mechanism.norm**2 * (noise + 1 / self.ranges.dimension)


class PrivUnitGSettings(EpsilonSettings):
    """Settings of ``privunit-g``."""

    name: Literal["privunit-g"] = "privunit-g"
    norm: Positive = 1.0
    """Clipping norm: a longer vector is shortened to it."""
    magnitude_share: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.5
    """Part of ``epsilon`` that is spent on the vector's length."""

    def at(self, epsilon: float) -> PrivUnitG:
        return PrivUnitG(epsilon, self.norm, self.magnitude_share)


def _is_number_between(value: object, low: float, high: float) -> bool:
    """Whether ``value``, which may be of any type, is a number from ``low`` to ``high``. True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and low <= value <= high


def _lengths_and_directions(offsets: Floats) -> tuple[Floats, Floats]:
    """Return the lengths (k,) of ``offsets`` (k, d), and their directions (k, d). Directions are unit vectors; that of a zero vector is 0.

    Rows are divided by their largest entry first, so that no square underflows, whatever center a server chose. Otherwise a direction
    might not be a unit vector, and a report would reveal this. NumPy adds up a row in the same order, whatever the other rows are.
    """
    largest = np.abs(offsets).max(axis=1, keepdims=True)
    scaled = offsets / np.where(largest > 0, largest, 1.0)
    norms = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    return (norms * largest)[:, 0], scaled / np.where(largest > 0, norms, 1.0)


def _random_corners(words: NDArray[np.int32], dimension: int) -> Floats:
    """Return unit vectors (k, d) with entries of equal size, with the bits of the random ``words`` (k, n) as signs. Their mean is 0."""
    bits = np.unpackbits(words.copy().view(np.uint8), axis=1, count=dimension)
    return np.asarray((2.0 * bits - 1) / sqrt(dimension))
