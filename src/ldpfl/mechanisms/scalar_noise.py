"""Three laws that randomise one number t in [-1, 1] at epsilon without bias: Laplace, piecewise and hybrid.

Each maps uniform numbers to t*, as many as ``draws`` says, by inverting a distribution function; none ever rejects, so
neither the randomness used nor the operations done depend on t. The variance of every law here is
``offset + slope * t**2``. All is written in e**-epsilon, which cannot overflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import cbrt, exp, expm1, isfinite, log, sqrt, tanh
from typing import ClassVar

import torch
from torch import Tensor

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.randomness import UNIFORM_BITS

SMALLEST_EPSILON = 1e-9
"""Below it the reports outgrow what float32 leaves room for beside the widest ranges."""

FINITE_PRECISION = "noise is drawn in floating point: proved for real arithmetic, not in finite precision (Mironov 2012)"

_SLACK = 1e-6
"""By what part a report may exceed its bound: far more than the rounding to float32 adds."""

_ROOT = 405 * sqrt(241)
HYBRID_THRESHOLD = log((-5 + 2 * cbrt(6353 - _ROOT) + 2 * cbrt(6353 + _ROOT)) / 27)
"""eps*, about 0.609352: up to it one bit has the smaller worst-case variance (Wang et al. 2019, equation (8))."""


def checked_epsilon(epsilon: float) -> float:
    """Return ``epsilon`` if one number can be randomised at it.

    Raises:
        ConfigError: it is not a positive finite number, or below 1e-9.
    """
    try:
        usable = not isinstance(epsilon, bool) and isfinite(epsilon) and epsilon > 0
    except (TypeError, OverflowError):
        usable = False
    if not usable:
        raise ConfigError(f"epsilon must be a positive finite number, got {epsilon}")
    if epsilon < SMALLEST_EPSILON:
        raise ConfigError(f"epsilon {epsilon:g} for one value is too small: at least {SMALLEST_EPSILON:g} is needed")
    return float(epsilon)


def check_possible(values: Tensor, bound: float) -> None:
    """Refuse received ``values`` of which one is larger than ``bound`` in size, so that no honest client can have sent it.

    Raises:
        ProtocolError: one exceeds the bound by more than rounding does.
    """
    if values.numel() and float(torch.stack(values.aminmax()).abs().amax()) > bound * (1 + _SLACK):
        raise ProtocolError(
            f"a report holds a value beyond {bound:g}, the most a client can send; check that both sides use the same settings"
        )


@dataclass(frozen=True)
class ScalarLaw(ABC):
    """How t* is drawn. Guarantee: ``epsilon``-LDP for t in [-1, 1], any two values; in real arithmetic (Mironov 2012)."""

    epsilon: float
    draws: ClassVar[int]
    limit: ClassVar[float]
    """Largest epsilon at which uniforms of ``UNIFORM_BITS`` bits still produce every kind of report for every t."""

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)

    @abstractmethod
    def sample(self, t: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Return t* for the float64 values ``t`` in [-1, 1], from ``draws`` uniforms of the same shape."""

    @property
    @abstractmethod
    def bound(self) -> float:
        """Largest size of t* that any t and any uniforms of ``UNIFORM_BITS`` bits lead to."""

    @property
    @abstractmethod
    def offset(self) -> float:
        """Variance of t* at t = 0."""

    @property
    @abstractmethod
    def slope(self) -> float:
        """What t**2 = 1 adds to the variance of t*."""

    @abstractmethod
    def density(self, x: Tensor, t: float) -> Tensor:
        """Return the density of t* at ``x``; of its continuous part, where it has atoms."""


@dataclass(frozen=True)
class LaplaceLaw(ScalarLaw):
    """t* = t + Lap(2 / epsilon): two values are at most 2 apart (Dwork et al. 2006)."""

    draws: ClassVar[int] = 1
    limit: ClassVar[float] = UNIFORM_BITS * log(2)  # the noise, at most that many scales, no longer spans [-1, 1]

    def sample(self, t: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        middle = uniforms[0] - 0.5
        # Rounding may turn the largest uniform number into 1, whose logarithm would be infinite here.
        distance = middle.abs().clamp_max_(0.5 - 2.0 ** -(UNIFORM_BITS + 1))
        magnitude = distance.mul_(-2).log1p_().mul_(-2 / self.epsilon)
        return magnitude.copysign_(middle).add_(t)

    @property
    def bound(self) -> float:
        """1 + 2 ln(2^52) / epsilon: t = 1, and the noise of the uniform number that is closest to 1."""
        return 1 + 2 * UNIFORM_BITS * log(2) / self.epsilon

    @property
    def offset(self) -> float:
        return 8 / self.epsilon / self.epsilon  # the square could overflow

    @property
    def slope(self) -> float:
        return 0.0

    def density(self, x: Tensor, t: float) -> Tensor:
        return torch.exp((x - t).abs() * (-self.epsilon / 2)) * (self.epsilon / 4)


@dataclass(frozen=True)
class PiecewiseLaw(ScalarLaw):
    """t* is uniform close to t with probability 1 / (1 + q), else uniform over the rest of [-C, C]; q = e^(-epsilon / 2).

    Close is [(t - q) / (1 - q), (t + q) / (1 - q)], and C = (1 + q) / (1 - q). Source: Wang et al. 2019, Algorithm 2.
    """

    draws: ClassVar[int] = 1
    limit: ClassVar[float] = 2 * UNIFORM_BITS * log(2)  # the rest is drawn with probability q / (1 + q)

    @property
    def bound(self) -> float:
        """C: the largest t*."""
        return 1 / tanh(self.epsilon / 4)

    @property
    def _q(self) -> float:
        return max(exp(-self.epsilon / 2), 1e-300)  # its reciprocal stays finite

    @property
    def _1_minus_q(self) -> float:
        return -expm1(-self.epsilon / 2)

    def sample(self, t: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        q = self._q
        # (1 - q) t* grows with z = (1 + q) u - (1 + t) q / 2: at rate 2 q for z in [0, 1], where t* is close, else at 2 / q.
        z = torch.add(uniforms[0] * (1 + q), t + 1, alpha=-q / 2)
        close = z.clamp(0, 1)
        scaled = z.sub_(close).mul_(2 / q).add_(close, alpha=2 * q).add_(t).sub_(q)
        return scaled.div_(self._1_minus_q).clamp_(-self.bound, self.bound)  # rounding of z counts 2 / q times

    @property
    def offset(self) -> float:
        return self._q * (1 + 3 * self._q) / (3 * self._1_minus_q**2)

    @property
    def slope(self) -> float:
        return self._q / self._1_minus_q

    def density(self, x: Tensor, t: float) -> Tensor:
        q, scaled = self._q, x * self._1_minus_q
        close = self._1_minus_q / (2 * (1 + q)) / q
        values = torch.where((scaled - t).abs() <= q, torch.full_like(x, close), torch.full_like(x, close * q**2))
        return values * (x.abs() <= self.bound)


@dataclass(frozen=True)
class HybridLaw(ScalarLaw):
    """Piecewise with probability 1 - e^(-epsilon / 2), else the one bit of Duchi et al.; up to eps* always the bit.

    Source: Wang et al. 2019, section 3.3: each part is epsilon-LDP, and which one is taken does not depend on t.
    """

    draws: ClassVar[int] = 2
    limit: ClassVar[float] = PiecewiseLaw.limit

    @property
    def piecewise_share(self) -> float:
        """Probability of the piecewise part."""
        return -expm1(-self.epsilon / 2) if self.epsilon > HYBRID_THRESHOLD else 0.0

    @property
    def bound(self) -> float:
        """C, which exceeds A; A where there is no piecewise part."""
        return PiecewiseLaw(self.epsilon).bound if self.piecewise_share else self.gain

    @property
    def gain(self) -> float:
        """A: the one bit stands for +A or -A."""
        return 1 / tanh(self.epsilon / 2)

    def plus(self, t: Tensor) -> Tensor:
        """Return the probability that the one bit, if it is sent, is +."""
        return t / (2 * self.gain) + 0.5

    def sample(self, t: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        choice, position = uniforms
        bit = (position < self.plus(t)).double().mul_(2 * self.gain).sub_(self.gain)
        # Both are computed for every value, so that time does not tell which one left.
        return torch.where(choice < self.piecewise_share, PiecewiseLaw(self.epsilon).sample(t, [position]), bit)

    @property
    def offset(self) -> float:
        share = self.piecewise_share
        return share * PiecewiseLaw(self.epsilon).offset + (1 - share) * self.gain**2

    @property
    def slope(self) -> float:
        return 0.0 if self.epsilon > HYBRID_THRESHOLD else -1.0  # the two parts cancel: share / (1 - q) = 1

    def density(self, x: Tensor, t: float) -> Tensor:
        return PiecewiseLaw(self.epsilon).density(x, t) * self.piecewise_share
