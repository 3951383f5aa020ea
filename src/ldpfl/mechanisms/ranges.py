"""Public clipping ranges (center, radius) of each layer, and the rules that update them from released aggregates only."""

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

_MAX_RANGE = 1e25
"""Largest center and radius; the smallest radius is 1 over it. Then float32 can hold every estimate, though not every variance."""
_MAX_SHOWN = 3
"""Number of values in an error message."""


@dataclass(frozen=True, eq=False, init=False)
class LayerRanges:
    """The range [center - radius, center + radius] that each layer's values are clipped to.

    Ranges are public: the server issues them, and they may depend on released aggregates only. The privacy cost is computed from the NumPy
    arrays. The tensors for clipping are created when they are first used, so that a plan needs no PyTorch.

    Attributes:
        centers: (L,) one value for each layer.
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
        for name, field, argument in (("center", "centers", center), ("radius", "radii", radius)):
            value = _float_array(argument)
            value = np.full(len(self.sizes), value) if value.ndim == 0 else value
            if value.shape != (len(self.sizes),):
                raise ConfigError(
                    f"the clipping ranges' {name} has shape {value.shape}, expected one value for each of {len(self.sizes)} layers"
                )
            if not np.isfinite(value).all():
                raise ConfigError(f"the clipping ranges' {name} must be finite, found {_format_few(value[~np.isfinite(value)])}")
            object.__setattr__(self, field, value)
        # A center closer to 0 than the smallest radius becomes 0, because squares of such differences would underflow.
        self.centers[np.abs(self.centers) < 1 / _MAX_RANGE] = 0.0
        if not (self.radii > 0).all():
            raise ConfigError(f"each clipping range's radius must be positive, found {_format_few(self.radii[~(self.radii > 0)])}")
        if not ((self.radii >= 1 / _MAX_RANGE) & (self.radii <= _MAX_RANGE) & (np.abs(self.centers) <= _MAX_RANGE)).all():
            limits = f"its radius must be {1 / _MAX_RANGE:g} to {_MAX_RANGE:g}, and its center at most {_MAX_RANGE:g}"
            raise ConfigError(f"a clipping range is too large or too small for float32: {limits}")

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
        """Return ``values`` (K, d) clipped to their layers' ranges, float64."""
        center, radius = self.expand()
        return values.double().clamp(center - radius, center + radius)

    def expand(self) -> tuple[Tensor, Tensor]:
        """Return the center and the radius of each weight's range, (d,) float64 both. Do not write to them, see :meth:`spread`."""
        return self.slice(0, self.dimension)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the centers and the radii of the coordinates ``start`` to ``stop``, float64. Do not write to them, see :meth:`spread`."""
        return self.spread(self.center, start, stop), self.spread(self.radius, start, stop)

    def spread(self, per_layer: Tensor, start: int, stop: int) -> Tensor:
        """Return the entry of ``per_layer`` (L,) for each of the coordinates ``start`` to ``stop``, by its layer. Do not write to it.

        If all these coordinates lie in one layer, the result is an expanded scalar: fast, and without memory of its own.
        """
        ends = list(accumulate(self.sizes))  # the coordinate after the last of each layer
        first, last = bisect_right(ends, start), bisect_left(ends, stop)  # the layers of the first and the last coordinate
        if first == last:
            value = per_layer[first].expand(stop - start)
            return value.clone() if stop - start == 1 else value  # writing to a view of one element would change ``per_layer``
        layers = range(first, last + 1)
        counts = [min(stop, ends[layer]) - max(start, ends[layer] - self.sizes[layer]) for layer in layers]
        # Twice as fast as ``repeat_interleave`` on one thread, and ten times on two. ``cat`` needs one tensor, even for no coordinate.
        return torch.cat([per_layer[:0], *(per_layer[layer].expand(count) for layer, count in zip(layers, counts, strict=True))])

    def part(self, chosen: Tensor) -> LayerRanges:
        """Return the ranges of the ``chosen`` weights, (d,) bool. Sizes count only these. Layers without a chosen weight are left out.

        Raises:
            ConfigError: no weight is chosen, or ``chosen`` has the wrong shape.
        """
        counts = self._count_per_layer(chosen)
        layers = counts > 0  # the layers with a chosen weight
        if not bool(layers.any()):
            raise ConfigError("no weight is chosen: the mask must have at least one True")
        return LayerRanges(self.center[layers], self.radius[layers], tuple(counts[layers].tolist()))

    def with_part(self, part: LayerRanges, chosen: Tensor) -> LayerRanges:
        """Return these ranges with the centers and radii of ``part`` in every layer that has a ``chosen`` weight, (d,) bool.

        ``part`` has the form that the method :meth:`part` returns for the same ``chosen``: it lacks the other layers, and its sizes count
        only chosen weights.

        Raises:
            ConfigError: ``part`` has other layer sizes than the chosen weights.
        """
        counts = self._count_per_layer(chosen)
        layers = counts > 0
        if part.sizes != tuple(counts[layers].tolist()):
            raise ConfigError(
                f"the part has {len(part.sizes)} layers of {part.dimension} weights, which are not the {int(counts.sum())} chosen weights: "
                "give the mask that the part was made with"
            )
        center, radius = self.center.clone(), self.radius.clone()  # so that these ranges do not change
        center[layers], radius[layers] = part.center, part.radius
        return LayerRanges(center, radius, self.sizes)

    def _count_per_layer(self, chosen: Tensor) -> Tensor:
        """Return the number of ``chosen`` weights of each layer, (L,)."""
        if chosen.shape != (self.dimension,) or chosen.dtype != torch.bool:
            raise ConfigError(
                f"the mask of chosen weights is {chosen.dtype} {tuple(chosen.shape)}, expected torch.bool ({self.dimension},)"
            )
        chosen_before = torch.cat([torch.zeros(1, dtype=torch.int64), chosen.cumsum(0)])  # number of chosen weights before a coordinate
        layer_ends = torch.tensor(self.sizes).cumsum(0)
        return chosen_before[layer_ends].diff(prepend=chosen_before[:1])

    @classmethod
    def covering(cls, vector: Tensor, sizes: Sequence[int], *, margin: float, floor: float) -> LayerRanges:
        """Return ranges that cover a *public* vector (d,), such as the initial model.

        Radii are enlarged by the factor ``margin``, and are at least ``floor``.

        Source: LDP-FL, section 3.1: (C_0, R_0) are agreed on "based on prior knowledge" at the start.
        """
        if vector.shape != (sum(sizes),):
            raise ConfigError(
                f"the vector that ranges should cover has shape {tuple(vector.shape)}, expected ({sum(sizes)},) for all layers together"
            )
        layers = vector.detach().double().cpu().split_with_sizes(list(sizes))
        center = torch.stack([(layer.max() + layer.min()) / 2 for layer in layers])
        radius = torch.stack([(layer.max() - layer.min()) / 2 for layer in layers])
        return cls(center, (radius * margin).clamp_min(floor), tuple(sizes))


def _float_array(array: ArrayLike) -> NDArray[np.float64]:
    """Copy ``array``, which may be a tensor on any device, to a float64 NumPy array."""
    value: Any = array
    return np.array(value.detach().cpu().double().numpy() if hasattr(value, "detach") else value, dtype=np.float64)


def _whole_numbers(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the layer ``sizes`` as Python integers, or raise a ConfigError if there is none, or one is not a positive whole number."""
    try:
        integers = tuple(operator.index(size) for size in sizes)
    except TypeError:
        integers = ()
    if not integers or min(integers) < 1:
        raise ConfigError(f"layer sizes must be positive whole numbers, got {sizes!r}")
    return integers


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
    """Take half the difference of a layer's largest and smallest noisy mean as its radius.

    The paper says only "update C and R from W_l" (LDP-FL, Algorithm 1); this is its direct reading. The noise is part of that
    difference. So the radius grows without bound once A sqrt(2 ln d / n) exceeds about 1, for the mechanism's gain A, d weights and
    n clients, for instance at epsilon 0.3 and n = 100. Use :class:`Denoised` there.
    """

    floor: float

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        return LayerRanges.covering(mean, ranges.sizes, margin=1.0, floor=self.floor)


@dataclass(frozen=True)
class Denoised:
    """Estimate a layer's standard deviation without the noise, and set the radius to a multiple of it. More noise, smaller multiple.

    Subtracting the known noise variance from a layer's variance leaves the variance of its clipped values. Inverting the variance of a
    clipped normal gives sigma, the standard deviation before clipping. The next radius is kappa * sigma.

    kappa decides whether ranges stay stable over rounds. The noise of a round stays in the global model from which the next round starts.
    So sigma^2 becomes sigma^2 (c(kappa) + kappa^2 a). Here c(kappa) = E[min(z^2, kappa^2)], z standard normal, is the part of the variance
    that clipping keeps, and a = (noise variance of the mean) / radius^2. kappa is the largest value, at most ``widest``, for which that
    factor is at most ``contraction``: 1.54 at epsilon 10 and n = 500 clients, 0.89 at epsilon 0.3 and n = 100. With a fixed kappa of 3 or
    4, the noise of earlier rounds would count as signal, and the range would diverge.

    The step is damped: the radius changes by the square root of the wanted factor, and by 1/2 to 2 at most. The estimate of a small layer
    is poor, so its step is averaged with that of the whole model, which counts like ``borrowed`` weights. The center moves towards the
    layer's mean, by the part of the distance that exceeds two standard deviations of the noise.

    Attributes:
        floor: smallest radius.
        contraction: largest growth of sigma^2 in a round without training.
        widest: largest radius in units of sigma.
        borrowed: number of weights of a layer at which its own step counts as much as the model's.
    """

    floor: float
    contraction: float = 0.8
    widest: float = 4.0
    borrowed: float = 100.0

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        """Return the next ranges: each layer's new center, and its radius after a damped step.

        A step is the logarithm of a factor on the radius. It is averaged with the model's step, which counts more the smaller a layer is.
        """
        sizes = list(ranges.sizes)
        layers = list(zip(mean.double().split_with_sizes(sizes), mean_variance.double().split_with_sizes(sizes), strict=True))
        centers = [self._next_center(float(ranges.center[i]), values, variance) for i, (values, variance) in enumerate(layers)]
        steps = [self._log_step(float(ranges.radius[i]), values, variance) for i, (values, variance) in enumerate(layers)]
        own_steps = torch.tensor(steps, dtype=torch.float64)
        # A layer counts by its degrees of freedom, size - 1: a layer of one weight has no spread, and so no step.
        freedom = torch.tensor(sizes, dtype=torch.float64) - 1
        model_step = (own_steps * freedom).sum() / freedom.sum().clamp_min(1)
        own_shares = freedom / (freedom + self.borrowed)
        # A radius is at most doubled or halved.
        factors = torch.exp((own_shares * own_steps + (1 - own_shares) * model_step).clamp(-math.log(2), math.log(2)))
        return LayerRanges(centers, (ranges.radius * factors).clamp_min(self.floor), ranges.sizes)

    def _next_center(self, center: float, values: Tensor, variance: Tensor) -> float:
        """Return ``center``, moved towards the mean of ``values`` by the distance beyond two standard deviations of the mean's noise."""
        shift = float(values.mean()) - center
        significant = max(0.0, abs(shift) - 2 * math.sqrt(float(variance.mean()) / values.numel()))
        return center + math.copysign(significant, shift)

    def _log_step(self, radius: float, values: Tensor, variance: Tensor) -> float:
        """Return the logarithm of the factor by which the ``radius`` should change according to this layer alone.

        As the class explains, sigma is the weights' standard deviation before clipping, and kappa sigma is the radius to move to.

        Args:
            values: released mean of the layer's weights, with noise.
            variance: estimated variance of that noise, for each weight.
        """
        if values.numel() < 2:  # one weight has no spread
            return 0.0
        noise = float(variance.mean()) / radius**2  # variances in squared radii
        signal = max(0.0, float(values.var()) / radius**2 - noise)
        # Invert the variance of a clipped normal: radius / sigma is where it equals ``signal``.
        radius_over_sigma = _bisect(lambda ratio: _clipped_variance(ratio) / ratio**2 - signal, *_RADIUS_OVER_SIGMA_RANGE)
        # The largest kappa with which clipping and noise, in a round without training, multiply sigma^2 by ``contraction`` at most.
        kappa = _bisect(lambda ratio: self.contraction - _clipped_variance(ratio) - ratio**2 * noise, 0.0, self.widest)
        return math.log(kappa / radius_over_sigma) / 2  # half of the logarithm damps the step


_RADIUS_OVER_SIGMA_RANGE = (0.05, 20.0)
"""Range in which radius / sigma is searched. Outside, clipping changes nearly every value or nearly none."""


def _clipped_variance(ratio: float) -> float:
    """Return E[min(z^2, ratio^2)] for a standard normal z: the variance that is left after clipping z to [-ratio, ratio]."""
    tail = math.erfc(ratio / math.sqrt(2))
    return 1 - tail - ratio * math.sqrt(2 / math.pi) * math.exp(-(ratio**2) / 2) + ratio**2 * tail


def _bisect(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Return where the ``decreasing`` function is 0 between ``low`` and ``high``. If it is 0 nowhere, return the end nearer to that."""
    for _ in range(60):  # enough for all digits of a float
        middle = (low + high) / 2
        if decreasing(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


_MAX_NORM_GROWTH = 1e4
"""Largest factor between an adaptive clipping norm and that of the first round."""


@dataclass(frozen=True)
class NormQuantile:
    """Let the clipping norm C, which is the radius of all layers, follow a quantile of the vectors' norms.

    Each round multiplies C by exp(-learning_rate (fraction - quantile)), where fraction is a noisy share of the vectors that were not
    longer than C. C stays within a factor of 10,000 of its start: noise alone must not end a run.

    Source: Andrew et al. 2021, algorithm 1.

    Attributes:
        quantile: wanted share of vectors that are not clipped.
        learning_rate: change of the logarithm of C for a share that is off by 1.
        start: C of the first round.
    """

    quantile: float
    learning_rate: float
    start: float

    def ranges_after_round(self, ranges: LayerRanges, fraction: float) -> LayerRanges:
        """Return the ranges after a round with ``ranges``, in which about this ``fraction`` of the vectors was not clipped."""
        if not math.isfinite(fraction):  # only dishonest reports can cause this
            return ranges
        log_growth = math.log(ranges.radii[0] / self.start) - self.learning_rate * (fraction - self.quantile)
        limit = math.log(_MAX_NORM_GROWTH)
        return LayerRanges(ranges.centers, self.start * math.exp(min(max(log_growth, -limit), limit)), ranges.sizes)


def range_rule(name: str, *, floor: float) -> RangeRule:
    """Return the rule with this ``name`` in a config: ``fixed``, ``noisy-minmax`` or ``denoised``. ``floor`` is the smallest radius."""
    rules: dict[str, RangeRule] = {"fixed": Fixed(), "noisy-minmax": NoisyMinMax(floor), "denoised": Denoised(floor)}
    if name not in rules:
        raise ConfigError(f"ranges.rule {name!r} is unknown: {did_you_mean(name, rules)}")
    return rules[name]


def _format_few(values: NDArray[np.float64]) -> str:
    """Format the first few ``values`` for a message. There may be very many, and an untrusted server may have chosen them."""
    few = ", ".join(f"{value:g}" for value in values[:_MAX_SHOWN].tolist())
    return few if len(values) <= _MAX_SHOWN else f"{few} and {len(values) - _MAX_SHOWN:,} more"
