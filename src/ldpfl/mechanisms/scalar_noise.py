"""Three laws that randomise one number t in [-1, 1] at epsilon without bias: Laplace, piecewise and hybrid. All use public lattices.

None uses rejection sampling, so neither the randomness used nor the operations done depend on t. The variance of each law is
``offset + slope * t**2``; the lattices add less than a millionth of it. Formulas use e**-epsilon, which cannot overflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import cbrt, exp, expm1, floor, inf, isfinite, log, log2, nextafter, sqrt, tanh
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.mechanisms.coins import FIRST_BITS, compare_random_words, toss_coins
from ldpfl.mechanisms.duchi import BITS, thresholds
from ldpfl.mechanisms.exact_noise import LAPLACE, MOST_STEPS, draw_integers_below, draw_rounded_noise, largest_probability
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_EPSILON = 1e-9
"""Smallest epsilon. Below it estimates in the widest ranges would overflow float32."""

_MAX_LOG2_POINTS = 20
"""log2 of the largest number of lattice points per unit of t, for Laplace noise."""

_POINTS = 1 << 31
"""Number of lattice points of the piecewise law: the possible values of a report."""

_MAX_SCALES = 36.1
"""Number of scales at which Laplace noise is cut off. This is post-processing, and affects one value in e^36."""

_RELATIVE_SLACK = 1e-6
"""Relative amount by which a received report may exceed its bound: far more than rounding to float32 adds."""

_ROOT = 405 * sqrt(241)
HYBRID_THRESHOLD = log((-5 + 2 * cbrt(6353 - _ROOT) + 2 * cbrt(6353 + _ROOT)) / 27)
"""eps*, about 0.609352: up to it one bit has the smaller worst-case variance (Wang et al. 2019, equation (8))."""


def checked_epsilon(epsilon: float) -> float:
    """Return ``epsilon`` as a float after checking that a number can be randomised at it.

    Raises:
        ConfigError: ``epsilon`` is not a positive finite number, or is below 1e-9.
    """
    try:
        usable = not isinstance(epsilon, bool) and isfinite(epsilon) and epsilon > 0
    except (TypeError, OverflowError):  # not a number, or an integer that no float can hold
        usable = False
    if not usable:
        raise ConfigError(f"epsilon must be a positive finite number, got {epsilon}")
    if epsilon < SMALLEST_EPSILON:
        raise ConfigError(f"epsilon {epsilon:g} for one value is too small: at least {SMALLEST_EPSILON:g} is needed")
    return float(epsilon)


def refuse_values_above(values: Tensor, bound: float) -> None:
    """Refuse received ``values`` if one is larger than ``bound`` in absolute value: no honest client can have sent it.

    Raises:
        ProtocolError: a value exceeds the bound by more than rounding error.
    """
    if values.numel() and float(torch.stack(values.aminmax()).abs().amax()) > bound * (1 + _RELATIVE_SLACK):
        raise ProtocolError(
            f"a report has a value above {bound:g}, the largest that a client can send: use the same settings at clients and server"
        )


@dataclass(frozen=True)
class ScalarLaw(ABC):
    """The law of a randomised value t* of t in [-1, 1]. Guarantee: t* is ``epsilon``-LDP, for the exact bits that are returned."""

    epsilon: float
    epsilon_limit: ClassVar[float] = inf
    """Largest epsilon that the random bits of a draw can express. Above it, the epsilon that is spent is smaller than the stated one."""

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)

    @abstractmethod
    def sample(self, t: Tensor, source: RandomSource, rows: range) -> Tensor:
        """Return the randomised values t* of ``t`` (k, n), float64 in [-1, 1], with random bits of the k clients in ``rows``."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """Largest possible absolute value of t*, the randomised value."""

    @property
    @abstractmethod
    def blanket(self) -> float:
        """Probability with which a draw ignores t: it is from a law that is the same for all t, see :class:`~ldpfl.privacy.PureRelease`."""

    @property
    @abstractmethod
    def offset(self) -> float:
        """Variance of the randomised value t* of t = 0."""

    @property
    @abstractmethod
    def slope(self) -> float:
        """Coefficient of t**2 in the variance of t*, the randomised value of t."""


@dataclass(frozen=True)
class LaplaceLaw(ScalarLaw):
    """t* = t + Lap(2 / epsilon), since two values differ by at most 2 (Dwork et al. 2006).

    t and the real noise are each rounded to a lattice with ``unit`` points per unit, and added as integers.
    """

    @property
    def unit(self) -> int:
        """Number of lattice points per unit of t: 2^20, or fewer so that the noise's scale, 2 unit / epsilon, is at most 2^34 points."""
        # less 1e-9, so that rounding of the logarithms cannot give one power of two too many
        return int(2 ** min(_MAX_LOG2_POINTS, floor(log2(MOST_STEPS / 2) + log2(self.epsilon) - 1e-9)))

    def sample(self, t: Tensor, source: RandomSource, rows: range) -> Tensor:
        """Round t and real Laplace noise to the lattice, add them as integers, and cut off far values."""
        unit, max_point = self.unit, floor(self.bound * self.unit)
        scale = nextafter(2 * unit / self.epsilon, inf)  # rounded up, so that the epsilon spent, 2 unit / scale, is not too large
        sent = draw_rounded_noise(LAPLACE, scale, source, rows, t.shape[1])
        # All points are whole numbers below 2^53, and the unit is a power of two. So floating point rounds only where ``rint`` does.
        points = np.multiply(t.numpy(), unit)
        sent += np.clip(np.rint(points, out=points), -unit, unit, out=points)
        np.clip(sent, -max_point, max_point, out=sent)
        sent *= 1 / unit
        return torch.from_numpy(sent)

    @property
    def bound(self) -> float:
        """Largest t*: t is 1 at most, and noise of scale 2 / epsilon is cut off at 36.1 scales."""
        return 1 + 2 * _MAX_SCALES / self.epsilon

    @property
    def blanket(self) -> float:
        """e^(-epsilon / 2): at any point, the density of t* is at least this factor times that of the noise around 0, whatever t is."""
        return exp(-self.epsilon / 2)

    @property
    def offset(self) -> float:
        """Variance of Laplace noise of scale 2 / epsilon."""
        return 8 / self.epsilon / self.epsilon  # the square could overflow

    @property
    def slope(self) -> float:
        return 0.0  # the noise does not depend on t


@dataclass(frozen=True)
class PiecewiseLaw(ScalarLaw):
    """t* is uniform close to t with probability 1 / (1 + q), else uniform over the rest of [-C, C]; q = e^(-epsilon / 2).

    "Close to t" means in [(t - q) / (1 - q), (t + q) / (1 - q)]. C is (1 + q) / (1 - q). Source: Wang et al. 2019, Algorithm 2.

    On the lattice, t* is one of 2^31 points, and those close to t are a window of ``width`` points. The probability of the window is the
    largest multiple of 2^-64 with which a point in it is at most e^epsilon times as likely as one outside.
    """

    # Above it, the probability q / (1 + q) of a point outside the window is below 2^-64, the smallest that is drawn.
    epsilon_limit: ClassVar[float] = 2 * 64 * log(2)

    @property
    def width(self) -> int:
        """Number of lattice points in the window close to t."""
        return max(1, round(_POINTS * self._q / (1 + self._q)))

    @property
    def _gain(self) -> float:
        """Change of the mean drawn point if the window close to t moves by one point. Points are divided by it, so that t* is unbiased."""
        inside = _window_probability(self.epsilon, self.width) / 2**64  # probability of a point in the window
        return inside - (1 - inside) * self.width / (_POINTS - self.width)

    @property
    def bound(self) -> float:
        """C: the largest t*."""
        return 1 / tanh(self.epsilon / 4)

    @property
    def blanket(self) -> float:
        """Probability with which t* is drawn uniformly, whatever t: the probability of a point outside the window, over a uniform one."""
        outside: int = 2**64 - _window_probability(self.epsilon, self.width)
        return float(outside / 2**64 * (_POINTS / (_POINTS - self.width)))

    @property
    def _q(self) -> float:
        """q = e^(-epsilon / 2)."""
        return max(exp(-self.epsilon / 2), 1e-300)  # its reciprocal stays finite

    @property
    def _one_minus_q(self) -> float:
        return -expm1(-self.epsilon / 2)  # without cancellation for a small epsilon

    def sample(self, t: Tensor, source: RandomSource, rows: range) -> Tensor:
        """Draw a lattice point in the window close to t, or one outside of it, and scale the point to t*, (k, n)."""
        outside_count = _POINTS - self.width
        window_start = np.multiply(t.numpy(), outside_count / 2)
        window_start += outside_count / 2
        np.clip(np.rint(window_start, out=window_start), 0, outside_count, out=window_start)  # all here are integers below 2^32
        in_window = toss_coins(_window_probability(self.epsilon, self.width), source, rows, t.shape[1])
        limits = np.multiply(in_window, float(self.width - outside_count))  # ``width`` in the window, else ``outside_count``
        limits += outside_count
        point = draw_integers_below(limits, source, rows)
        # Both cases are computed for every value, by products and without branches, so that time does not reveal which one was sent.
        # In the window, the point becomes point + window_start, and the jump cancels. Outside, a point that is not before the window jumps
        # over it.
        jump = np.multiply(point >= window_start, float(self.width), out=limits)
        window_start -= jump
        window_start *= in_window
        point += jump
        point += window_start
        # Points 0 to 2^31 - 1 become numbers that are symmetric around 0, with the mean t.
        point *= 2
        point -= _POINTS - 1
        point *= 1 / (self._gain * outside_count)
        # Rounding may move the outermost point beyond the bound by a part in 2^31.
        return torch.from_numpy(np.clip(point, -self.bound, self.bound, out=point))

    @property
    def offset(self) -> float:
        """Variance at t = 0: q (1 + 3 q) / (3 (1 - q)^2)."""
        return self._q * (1 + 3 * self._q) / (3 * self._one_minus_q**2)

    @property
    def slope(self) -> float:
        """Coefficient q / (1 - q) of t^2 in the variance of t*."""
        return self._q / self._one_minus_q


@lru_cache(maxsize=1024)
def _window_probability(epsilon: float, width: int) -> int:
    """Return the probability, times 2^64, that a piecewise report lies in the window of ``width`` points close to t."""
    # A point in the window is at most e^epsilon times as likely as one outside. Above an epsilon of 1e4, the result is 2^64 - 1 anyway.
    return largest_probability(lambda context: context.exp(min(epsilon, 1e4)) * width / (_POINTS - width))


@dataclass(frozen=True)
class HybridLaw(ScalarLaw):
    """Piecewise with probability 1 - e^(-epsilon / 2), else the one bit of Duchi et al.; up to eps* always the bit.

    Source: Wang et al. 2019, section 3.3: each part is epsilon-LDP, and which one is taken does not depend on t.
    """

    epsilon_limit: ClassVar[float] = BITS * log(2)  # that of the one bit

    @property
    def piecewise_share(self) -> float:
        """Probability that t* is drawn by the piecewise law, rather than as one bit."""
        return -expm1(-self.epsilon / 2) if self.epsilon > HYBRID_THRESHOLD else 0.0

    @property
    def bound(self) -> float:
        """Largest t*: C of the piecewise law, or A if only the bit is sent."""
        return max(PiecewiseLaw(self.epsilon).bound, self.gain) if self.piecewise_share else self.gain

    @property
    def blanket(self) -> float:
        """Mean of the blankets of the two laws, weighted by their shares. The bit's blanket is twice the probability of its rarer value."""
        share, bit = self.piecewise_share, thresholds(self.epsilon)[0] / (1 << (BITS - 1))
        return share * PiecewiseLaw(self.epsilon).blanket + (1 - share) * bit if share else bit

    @property
    def _half(self) -> int:
        """Largest signed threshold: + is sent when a uniform int32 lies below t ``_half``."""
        return (1 << (BITS - 1)) - thresholds(self.epsilon)[0]

    @property
    def gain(self) -> float:
        """A: the one bit stands for t* = A or t* = -A."""
        return (1 << (BITS - 1)) / self._half

    def sample(self, t: Tensor, source: RandomSource, rows: range) -> Tensor:
        """Draw a bit and a piecewise value for every value of ``t``, so that time reveals nothing. Then choose one of them at random."""
        # As in ``duchi``: + is sent if a uniform signed 32-bit integer lies below the threshold. Its first 16 bits nearly always decide.
        half = self._half
        threshold = np.multiply(t.numpy(), half)
        np.clip(np.rint(threshold, out=threshold), -half, half, out=threshold)
        first = np.floor(threshold * 2.0 ** (FIRST_BITS - BITS)).astype(np.int16)
        plus = compare_random_words(first, lambda row, column: threshold[row, column].astype(np.int64), source, rows)
        bit = torch.from_numpy(np.multiply(plus, 2 * self.gain)).sub_(self.gain)
        if self.piecewise_share == 0:
            return bit
        is_piecewise = toss_coins(min(2**64 - 1, int(self.piecewise_share * 2**64)), source, rows, t.shape[1])
        return torch.where(torch.from_numpy(is_piecewise), PiecewiseLaw(self.epsilon).sample(t, source, rows), bit)

    @property
    def offset(self) -> float:
        """Mean of the variances of both laws at t = 0, weighted by their shares. That of the bit is A^2."""
        share = self.piecewise_share
        return share * PiecewiseLaw(self.epsilon).offset + (1 - share) * self.gain**2

    @property
    def slope(self) -> float:
        return 0.0 if self.epsilon > HYBRID_THRESHOLD else -1.0  # the two parts cancel: share / (1 - q) = 1
