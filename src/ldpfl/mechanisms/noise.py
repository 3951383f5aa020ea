"""How far estimates are from the clients' values, in closed form. A mechanism uses one of these classes, or its own subclass."""

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

        It is computed from the released ``mean`` alone, so the server may use it. It is unbiased if all clients hold the same value.
        Otherwise it is too large by (variance among the clients' values) / (clients - 1), because the mean does not show that variance.
        Where no unbiased estimate is known, it is an upper bound, at most the square of :meth:`largest_std`.
        """

    @abstractmethod
    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return the largest standard deviation (L,) of the mean's noise in each layer. It needs no PyTorch, so that planning is fast."""


@dataclass(frozen=True, eq=False)
class ConstantNoise(Noise):
    """Noise that is the same whatever the values.

    Attributes:
        ranges: ranges of the values.
        std: standard deviation of one client's noise in each weight.
    """

    ranges: LayerRanges
    std: float

    def variance(self, values: Tensor) -> Tensor:
        return torch.full(values.shape, self.std**2, dtype=torch.float32)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return the variance of one client's noise over ``clients``, which is exact."""
        return torch.full_like(mean, self.std**2 / clients, dtype=torch.float32)

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        return np.full_like(self.ranges.radii, self.std / sqrt(clients))


@dataclass(frozen=True, eq=False)
class TwoValueNoise(Noise):
    """Noise of estimates with two possible values: center c plus or minus s r A, for radius r and gain A.

    s is the size of the weight's group if a client samples one weight of each group; else 1.

    Attributes:
        ranges: ranges of the values.
        gain: A.
        groups: (G,) sizes s of all groups of weights; None if all weights are sent.
        largest: (L,) the largest s of each layer.
    """

    ranges: LayerRanges
    gain: float
    groups: NDArray[np.int64] | None = None
    largest: NDArray[np.int64] | int = 1

    def variance(self, values: Tensor) -> Tensor:
        """Return E[(estimate - center)^2] - (clamped value - center)^2, (K, d): estimates have the clamped value as their mean."""
        center = self.ranges.expand()[0]
        clipped = self.ranges.clamp(values)
        return (self._mean_square() - (clipped - center) ** 2).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return (q - (mean - center)^2) / (n - 1) for n = ``clients``, where q is :meth:`_mean_square`; or for one client, q.

        q is an upper bound for one client, whose report alone does not show its value.

        Where all weights are sent, this is the sample variance of n two-valued reports, over n. It is unbiased, except that negative
        results are set to 0. These occur only with few clients and large groups (n below about the root of the group size); the bias is
        at most q / (n - 1).
        """
        if clients == 1:
            return self._mean_square().float()
        center = self.ranges.expand()[0]
        return ((self._mean_square() - (mean - center) ** 2) / (clients - 1)).clamp_min(0).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return radius A sqrt(s / n): A is the gain, s a layer's largest group size, n = ``clients``. Values at the center have it."""
        return np.asarray(self.ranges.radii * np.sqrt(self.largest) * (self.gain / sqrt(clients)))

    def _mean_square(self) -> Tensor:
        """Return the mean square of an estimate's distance from the center, (d,): the group size times (radius A)^2, for the gain A."""
        square: Tensor = (self.ranges.expand()[1] * self.gain) ** 2
        # ``repeat`` gives each weight the size of its group: a group of s weights stands for s entries s.
        return square if self.groups is None else torch.from_numpy(np.repeat(self.groups, self.groups)) * square


@dataclass(frozen=True, eq=False)
class QuadraticNoise(Noise):
    """Noise whose variance is r^2 (a + b t^2) for a value w with t = (w - c) / r, clamped to [-1, 1]; c is the center, r the radius.

    A bit that stands for +A or -A has a = A^2 and b = -1.

    Attributes:
        ranges: ranges of the values.
        offset, slope: a and b.
        clipped: whether :meth:`mean_variance` takes a negative b as 0. Otherwise its estimate could become negative if clients report
            only some weights. The result r^2 a / n is an upper bound, too large by -b r^2 t^2 / n at most.
    """

    ranges: LayerRanges
    offset: float
    slope: float
    clipped: bool = False

    def variance(self, values: Tensor) -> Tensor:
        """Return radius^2 (offset + slope t^2), (K, d), for the values' distances t from the center, in radii."""
        t = scale_to_unit_range(values, *self.ranges.expand())
        return ((self.offset + self.slope * t**2) * self.ranges.expand()[1] ** 2).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return r^2 (a + b m^2) / (n + b), with a = offset, b = slope, r = radius, m = (mean - center) / r and n = ``clients``.

        It follows from E[m^2] = t^2 + (a + b t^2) / n, and is unbiased where all clients hold the same t. Where the clients' t have the
        variance s^2, it is off by -b s^2 / (n + b). If b < 0, the upper bound r^2 a / n replaces it for one client, where n + b may be 0,
        and for ``clipped``.
        """
        center, radius = self.ranges.expand()
        if self.slope < 0 and (clients == 1 or self.clipped):
            return (radius**2 * (self.offset / clients)).float()
        m = (mean.double() - center) / radius
        estimate = (self.offset + self.slope * m**2) * radius**2 / (clients + self.slope)
        return estimate.clamp_min(0).float()  # below 0 only by the rounding of the mean

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return radius sqrt((offset + slope t^2) / n) for n = ``clients``. The worst t is 0 if the slope is negative, else 1."""
        return np.asarray(self.ranges.radii * sqrt((self.offset + max(0.0, self.slope)) / clients))


def scale_to_unit_range(values: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """Return the distance of ``values`` from ``center``, in units of ``radius``, clamped to [-1, 1]; float64."""
    return values.double().sub(center).div_(radius).clamp_(-1, 1)
