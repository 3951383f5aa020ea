"""How far estimates are from what clients hold: closed forms, of which an author takes one or writes one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


class Noise(ABC):
    """The error of a mechanism's estimates in given ranges."""

    @abstractmethod
    def variance(self, values: Tensor) -> Tensor:
        """Return the variance (K, d) of one client's estimate of ``values`` (K, d)."""

    @abstractmethod
    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return an estimate (d,) of the noise variance of the mean of ``clients`` reports.

        It is computed from the released ``mean`` alone, so the server may use it. Unbiased where all clients hold the
        same value; otherwise too large by their own spread over (clients - 1), because the two cannot be told apart.
        """

    @abstractmethod
    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return the largest standard deviation (L,) that the mean's noise can have in each layer. It uses no PyTorch."""


@dataclass(frozen=True, eq=False)
class ConstantNoise(Noise):
    """Noise that is the same whatever the values.

    Attributes:
        ranges: of the values.
        std: standard deviation of one client's noise in each weight.
    """

    ranges: LayerRanges
    std: float

    def variance(self, values: Tensor) -> Tensor:
        return torch.full(values.shape, self.std**2, dtype=torch.float32)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """That of one client over n, exact."""
        return torch.full_like(mean, self.std**2 / clients, dtype=torch.float32)

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        return np.full_like(self.ranges.radii, self.std / sqrt(clients))


@dataclass(frozen=True, eq=False)
class TwoValueNoise(Noise):
    """Noise of estimates that are center + radius A or center - radius A, for the gain A; or, of a sampled weight, s times as far.

    Attributes:
        ranges: of the values.
        gain: A.
        groups: (G,) sizes s of the groups of weights, of each of which one weight is sampled; None if all weights are sent.
        largest: (L,) the largest s of each layer.
    """

    ranges: LayerRanges
    gain: float
    groups: NDArray[np.int64] | None = None
    largest: NDArray[np.int64] | int = 1

    def variance(self, values: Tensor) -> Tensor:
        """s r^2 A^2 - (w - c)^2 for the clamped w."""
        center = self.ranges.expand()[0]
        inside = self.ranges.clamp(values)
        return (self._square() - (inside - center) ** 2).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """(s r^2 A^2 - (mean - c)^2) / (n - 1): where all weights are sent, the sample variance of n two-valued reports, over n.

        One report has no sample variance: there the upper bound s r^2 A^2 stands. Unbiased but for the cut at 0, which matters to few
        clients in large groups (n below about sqrt(s)): there it is too large, and at most s r^2 A^2 / (n - 1).
        """
        if clients == 1:
            return self._square().float()
        center = self.ranges.expand()[0]
        return ((self._square() - (mean - center) ** 2) / (clients - 1)).clamp_min(0).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """r A sqrt(s / n) for the largest s of each layer, reached at the center."""
        return np.asarray(self.ranges.radii * np.sqrt(self.largest) * (self.gain / sqrt(clients)))

    def _square(self) -> Tensor:
        """s r^2 A^2, (d,): the mean square of an estimate's distance from the center."""
        square: Tensor = (self.ranges.expand()[1] * self.gain) ** 2
        return square if self.groups is None else torch.from_numpy(np.repeat(self.groups, self.groups)) * square


@dataclass(frozen=True, eq=False)
class QuadraticNoise(Noise):
    """Noise whose variance is r^2 (a + b t^2) for a value t = (w - c) / r, clamped to [-1, 1].

    A bit that stands for +A or -A has a = A^2 and b = -1.

    Attributes:
        ranges: of the values.
        offset, slope: a and b.
        clipped: whether a negative b is left out of the estimate of the mean's variance, which could turn negative where only some of the
            weights are reported. The upper bound a / n stands there, too large by t^2 / n at most.
    """

    ranges: LayerRanges
    offset: float
    slope: float
    clipped: bool = False

    def variance(self, values: Tensor) -> Tensor:
        t = scaled(values, *self.ranges.expand())
        return ((self.offset + self.slope * t**2) * self.ranges.expand()[1] ** 2).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """r^2 (a + b m^2) / (n + b), with V = a + b t^2 and m = (mean - c) / r.

        From E[m^2] = t^2 + (a + b t^2) / n, which makes it unbiased where all clients hold the same t; where their t have
        the variance s^2 it is off by -b s^2 / (n + b).
        """
        center, radius = self.ranges.expand()
        if self.slope < 0 and (clients == 1 or self.clipped):
            return (radius**2 * (self.offset / clients)).float()
        m = (mean.double() - center) / radius
        estimate = (self.offset + self.slope * m**2) * radius**2 / (clients + self.slope)
        return estimate.clamp_min(0).float()  # below 0 only by the rounding of the mean

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        return np.asarray(self.ranges.radii * sqrt((self.offset + max(0.0, self.slope)) / clients))


def scaled(values: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """Return t = (w - c) / r for w clamped to the range: never outside [-1, 1]."""
    return values.double().sub(center).div_(radius).clamp_(-1, 1)
