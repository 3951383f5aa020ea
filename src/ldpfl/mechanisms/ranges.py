"""Public ranges (center, radius) of each layer, and the rules that update them from released aggregates only."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ldpfl.errors import ConfigError
from ldpfl.util.lazy_imports import torch
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 1e25
_SHOWN = 3


@dataclass(frozen=True, eq=False, init=False)
class LayerRanges:
    """The box [center - radius, center + radius] that each layer's values are clamped to.

    Ranges are public: the server issues them, and they may depend on released aggregates only. What a mechanism costs is computed from
    the numbers; the tensors, which values are clamped by, are made when they are first used. So a plan needs no PyTorch.

    Attributes:
        centers: (L,) one value a layer.
        radii: (L,) positive.
        sizes: number of scalar values of each layer; they add up to the dimension d.

    Raises:
        ConfigError: shapes disagree, a value is not finite, or a radius is not positive.
    """

    centers: NDArray[np.float64]
    radii: NDArray[np.float64]
    sizes: tuple[int, ...]

    def __init__(self, center: ArrayLike, radius: ArrayLike, sizes: Sequence[int]) -> None:
        """Take the center and the radius of each layer, (L,), or one number for all of them."""
        object.__setattr__(self, "sizes", _whole_numbers(sizes))
        for name, field, given in (("center", "centers", center), ("radius", "radii", radius)):
            value = _numbers(given)
            value = np.full(len(self.sizes), value) if value.ndim == 0 else value
            if value.shape != (len(self.sizes),):
                raise ConfigError(f"range {name} has shape {value.shape}, expected one value for each of {len(self.sizes)} layers")
            if not np.isfinite(value).all():
                raise ConfigError(f"range {name} must be finite, found {_shown(value[~np.isfinite(value)])}")
            object.__setattr__(self, field, value)
        # Below, squares of differences would underflow; nothing is lost, for no float32 around a radius is as close to its center.
        self.centers[np.abs(self.centers) < 1 / _LARGEST] = 0.0
        if not (self.radii > 0).all():
            raise ConfigError(f"range radius must be positive, found {_shown(self.radii[~(self.radii > 0)])}")
        if not ((self.radii >= 1 / _LARGEST) & (self.radii <= _LARGEST) & (np.abs(self.centers) <= _LARGEST)).all():
            raise ConfigError(f"ranges must lie between {1 / _LARGEST:g} and {_LARGEST:g}, so that float32 can hold every estimate")

    @cached_property
    def center(self) -> Tensor:
        """The centers as a tensor, (L,) float64."""
        return torch.from_numpy(self.centers)

    @cached_property
    def radius(self) -> Tensor:
        """The radii as a tensor, (L,) float64."""
        return torch.from_numpy(self.radii)

    @property
    def dimension(self) -> int:
        """Number d of scalar values over all layers."""
        return sum(self.sizes)

    def clamp(self, values: Tensor) -> Tensor:
        """Return ``values`` (K, d) as mechanisms take them, float64: what lies outside its layer's range at the end of it."""
        center, radius = self.expand()
        return values.double().clamp(center - radius, center + radius)

    def expand(self) -> tuple[Tensor, Tensor]:
        """Return (center, radius) as (d,) float64 vectors, as :meth:`spread` makes them."""
        return self.slice(0, self.dimension)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return (center, radius) of the coordinates ``start`` to ``stop`` as float64 vectors, as :meth:`spread` makes them."""
        return self.spread(self.center, start, stop), self.spread(self.radius, start, stop)

    def spread(self, told: Tensor, start: int, stop: int) -> Tensor:
        """Return what is ``told`` of each layer, (L,), for each of the coordinates ``start`` to ``stop``; not to be written to.

        Where they lie in one layer it is one number seen (stop - start) times: as fast as a scalar, and no memory.
        """
        ends = list(accumulate(self.sizes))
        first, last = bisect_right(ends, start), bisect_left(ends, stop)
        if first == last:
            value = told[first].expand(stop - start)
            return value.clone() if stop - start == 1 else value  # a single number could be written to
        within = range(first, last + 1)
        counts = [min(stop, ends[layer]) - max(start, ends[layer] - self.sizes[layer]) for layer in within]
        # Twice as fast as ``repeat_interleave`` on one thread, and ten times on two.
        return torch.cat([told[:0], *(told[layer].expand(count) for layer, count in zip(within, counts, strict=True))])

    def part(self, chosen: Tensor) -> LayerRanges:
        """Return the ranges of the ``chosen`` weights, (d,) bool, in their order; a layer of which none is chosen is left out.

        Raises:
            ConfigError: no weight is chosen, or ``chosen`` has another shape.
        """
        counts = self._count(chosen)
        kept = counts > 0
        if not bool(kept.any()):
            raise ConfigError("no weight is chosen: there is no part to take")
        return LayerRanges(self.center[kept], self.radius[kept], tuple(counts[kept].tolist()))

    def with_part(self, part: LayerRanges, chosen: Tensor) -> LayerRanges:
        """Return these ranges, but with those of ``part`` for every layer of which a weight is ``chosen``, (d,) bool.

        Raises:
            ConfigError: ``part`` has other layers than :meth:`part` makes of ``chosen``.
        """
        counts = self._count(chosen)
        kept = counts > 0
        if part.sizes != tuple(counts[kept].tolist()):
            raise ConfigError(f"the part has {len(part.sizes)} layers that are not those of the {int(counts.sum())} chosen weights")
        center, radius = self.center.clone(), self.radius.clone()
        center[kept], radius[kept] = part.center, part.radius
        return LayerRanges(center, radius, self.sizes)

    def _count(self, chosen: Tensor) -> Tensor:
        """Return how many weights of each layer are ``chosen``, (L,)."""
        if chosen.shape != (self.dimension,) or chosen.dtype != torch.bool:
            raise ConfigError(f"chosen weights are {chosen.dtype} {tuple(chosen.shape)}, expected torch.bool ({self.dimension},)")
        before = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])
        return before[torch.tensor(self.sizes).cumsum(0)].diff(prepend=before[:1])

    @classmethod
    def covering(cls, vector: Tensor, sizes: Sequence[int], *, margin: float, floor: float) -> LayerRanges:
        """Ranges that cover a *public* vector (d,), such as the initial model, with ``margin`` to spare.

        Source: LDP-FL, section 3.1: (C_0, R_0) are agreed on "based on prior knowledge" at the start.
        """
        if vector.shape != (sum(sizes),):
            raise ConfigError(f"a vector of shape {tuple(vector.shape)} does not fit layers of {sum(sizes)} weights in all")
        layers = vector.detach().double().cpu().split_with_sizes(list(sizes))
        center = torch.stack([(layer.max() + layer.min()) / 2 for layer in layers])
        radius = torch.stack([(layer.max() - layer.min()) / 2 for layer in layers])
        return cls(center, (radius * margin).clamp_min(floor), tuple(sizes))


def _numbers(given: ArrayLike) -> NDArray[np.float64]:
    """Return a copy of ``given``, which may be a tensor on any device, as numbers of NumPy."""
    value: Any = given
    return np.array(value.detach().cpu().double().numpy() if hasattr(value, "detach") else value, dtype=np.float64)


def _whole_numbers(sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        whole = tuple(operator.index(size) for size in sizes)
    except TypeError:
        whole = ()
    if not whole or min(whole) < 1:
        raise ConfigError(f"layer sizes must be positive whole numbers, got {sizes!r}")
    return whole


class RangeRule(Protocol):
    """How the server chooses the next round's ranges."""

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        """Return the next ranges from the released mean (d,) and the estimated variance of its noise (d,)."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Keep the ranges that the run started with."""

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        return ranges


@dataclass(frozen=True)
class NoisyMinMax:
    """Take half the spread between a layer's extreme noisy means as its radius.

    The paper says only "update C and R from W_l" (LDP-FL, Algorithm 1); this is its direct reading. The noise is
    part of the spread, so the radius grows without bound once A sqrt(2 ln d / n) exceeds about 1, for instance at
    epsilon 0.3 and n = 100. Use :class:`Denoised` there.
    """

    floor: float

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        return LayerRanges.covering(mean, ranges.sizes, margin=1.0, floor=self.floor)


@dataclass(frozen=True)
class Denoised:
    """Subtract the known noise variance from a layer's spread, and clip as hard as the noise asks for.

    What is left of a layer's variance after subtraction is that of its clipped values; inverting the variance of a
    clipped normal gives sigma, the spread before clipping. The next radius is kappa * sigma.

    kappa decides whether the loop is stable. The noise of a round stays in the global model that the next one starts
    from, so sigma^2 becomes sigma^2 (c(kappa) + kappa^2 a), where c(kappa) = E[min(z^2, kappa^2)] is what clipping
    leaves and a = (noise variance of the mean) / radius^2. kappa is the largest value, at most ``widest``, for which
    that factor is at most ``contraction``: 1.54 at epsilon 10 and n = 500, 0.89 at epsilon 0.3 and n = 100. To
    subtract noise and keep kappa at 3 or 4 lets the noise of earlier rounds pass for signal, and the range diverges.

    The step is damped (square root of the wanted factor, between 1/2 and 2). A layer of few weights tells its own
    spread poorly, so its step is averaged with that of the whole model as if the model lent it ``borrowed`` weights.
    The center moves to the layer's mean as far as that stands out of its noise by two standard deviations.

    Attributes:
        floor: smallest radius.
        contraction: largest growth of sigma^2 in a round without training.
        widest: largest radius in units of sigma.
        borrowed: weights at which a layer's own step counts as much as the model's.
    """

    floor: float
    contraction: float = 0.8
    widest: float = 4.0
    borrowed: float = 100.0

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        sizes = list(ranges.sizes)
        layers = list(zip(mean.double().split_with_sizes(sizes), mean_variance.double().split_with_sizes(sizes), strict=True))
        centers = [self._center(float(ranges.center[i]), values, variance) for i, (values, variance) in enumerate(layers)]
        steps = [self._log_step(float(ranges.radius[i]), values, variance) for i, (values, variance) in enumerate(layers)]
        step = torch.tensor(steps, dtype=torch.float64)
        size = torch.tensor(sizes, dtype=torch.float64)
        common = (step * (size - 1)).sum() / (size - 1).sum().clamp_min(1)
        trust = (size - 1) / (size - 1 + self.borrowed)
        factor = torch.exp((trust * step + (1 - trust) * common).clamp(-math.log(2), math.log(2)))
        return LayerRanges(centers, (ranges.radius * factor).clamp_min(self.floor), ranges.sizes)

    def _center(self, center: float, values: Tensor, variance: Tensor) -> float:
        shift = float(values.mean()) - center
        visible = max(0.0, abs(shift) - 2 * math.sqrt(float(variance.mean()) / values.numel()))
        return center + math.copysign(visible, shift)

    def _log_step(self, radius: float, values: Tensor, variance: Tensor) -> float:
        """Return the logarithm of the factor that the layer on its own would put on its radius."""
        if values.numel() < 2:
            return 0.0
        noise = float(variance.mean()) / radius**2
        signal = max(0.0, float(values.var()) / radius**2 - noise)
        clipped_at = _bisect(lambda ratio: _clipped_variance(ratio) / ratio**2 - signal, *_RATIOS)
        kappa = _bisect(lambda ratio: self.contraction - _clipped_variance(ratio) - ratio**2 * noise, 0.0, self.widest)
        return math.log(kappa / clipped_at) / 2


_RATIOS = (0.05, 20.0)
"""Radius over sigma: outside, clipping takes all or nothing."""


def _clipped_variance(ratio: float) -> float:
    """Return E[min(z^2, ratio^2)] for a standard normal z."""
    tail = math.erfc(ratio / math.sqrt(2))
    return 1 - tail - ratio * math.sqrt(2 / math.pi) * math.exp(-(ratio**2) / 2) + ratio**2 * tail


def _bisect(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Return where ``decreasing`` changes its sign, or the end at which it comes closest."""
    for _ in range(60):
        middle = (low + high) / 2
        if decreasing(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def range_rule(name: str, *, floor: float) -> RangeRule:
    """Look a rule up by its name in a config: ``fixed``, ``noisy-minmax`` or ``denoised``."""
    rules: dict[str, RangeRule] = {"fixed": Fixed(), "noisy-minmax": NoisyMinMax(floor), "denoised": Denoised(floor)}
    if name not in rules:
        raise ConfigError(f"unknown range rule {name!r}: {did_you_mean(name, rules)}")
    return rules[name]


def _shown(values: NDArray[np.float64]) -> str:
    """Return the first few: there may be very many, and a server that others run may have written them."""
    few = ", ".join(f"{value:g}" for value in values[:_SHOWN].tolist())
    return few if len(values) <= _SHOWN else f"{few} and {len(values) - _SHOWN:,} more"
