"""Public ranges (center, radius) of each layer, and the rules that update them from released aggregates only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ldpfl.errors import ConfigError
from ldpfl.suggestions import did_you_mean


@dataclass(frozen=True)
class LayerRanges:
    """The box [center - radius, center + radius] that each layer's values are clamped to.

    Attributes:
        center: (L,) float64, one value a layer.
        radius: (L,) float64, positive.
        sizes: number of scalar values of each layer; they add up to the dimension d.

    Ranges are public: the server issues them, and they may depend on released aggregates only.

    Raises:
        ConfigError: shapes disagree, a value is not finite, or a radius is not positive.
    """

    center: Tensor
    radius: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        for name in ("center", "radius"):
            value = torch.as_tensor(getattr(self, name), dtype=torch.float64).detach().cpu()
            value = value.expand(len(self.sizes)).clone() if value.dim() == 0 else value.clone()
            if value.shape != (len(self.sizes),):
                raise ConfigError(f"range {name} has shape {tuple(value.shape)}, expected one value for each of {len(self.sizes)} layers")
            if not bool(torch.isfinite(value).all()):
                raise ConfigError(f"range {name} must be finite, got {value.tolist()}")
            object.__setattr__(self, name, value)
        if not bool((self.radius > 0).all()):
            raise ConfigError(f"range radius must be positive, got {self.radius.tolist()}")
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"layer sizes must be positive, got {self.sizes}")

    @property
    def dimension(self) -> int:
        """Number d of scalar values over all layers."""
        return sum(self.sizes)

    def expand(self) -> tuple[Tensor, Tensor]:
        """Return (center, radius) as (d,) float64 vectors."""
        return self.slice(0, self.dimension)

    def slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return (center, radius) of the coordinates ``start`` to ``stop`` as float64 vectors."""
        counts, offset = [], 0
        for size in self.sizes:
            counts.append(max(0, min(stop, offset + size) - max(start, offset)))
            offset += size
        repeats = torch.tensor(counts)
        return self.center.repeat_interleave(repeats), self.radius.repeat_interleave(repeats)

    @classmethod
    def covering(cls, vector: Tensor, sizes: Sequence[int], *, margin: float, floor: float) -> LayerRanges:
        """Ranges that cover a *public* vector (d,), such as the initial model, with ``margin`` to spare.

        Source: LDP-FL, section 3.1: (C_0, R_0) are agreed on "based on prior knowledge" at the start.
        """
        layers = vector.detach().double().cpu().split_with_sizes(list(sizes))
        center = torch.stack([(layer.max() + layer.min()) / 2 for layer in layers])
        radius = torch.stack([(layer.max() - layer.min()) / 2 for layer in layers])
        return cls(center, (radius * margin).clamp_min(floor), tuple(sizes))


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
    """Subtract the known noise variance from a layer's spread before turning it into a radius.

    For each layer: s2 = variance of the noisy means over the layer's coordinates, v = mean noise variance,
    signal = max(0, s2 - v - z * sd(s2)), where sd(s2) = v sqrt(2 / (size - 1)) is the sampling error of s2 under
    noise alone. The radius is ``spread * sqrt(signal)``, not below ``floor`` and at most doubled or halved in one
    round. The center is the layer's mean, moved only as far as its noise allows to tell. Without the
    sampling-error term a layer of ten biases would feed its own noise back into its range.

    Attributes:
        floor: smallest radius.
        spread: radius in standard deviations of the layer's de-noised means.
        confidence: z above.
    """

    floor: float
    spread: float = 4.0
    confidence: float = 2.0

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        centers, radii = [], []
        layers = zip(
            mean.double().split_with_sizes(list(ranges.sizes)), mean_variance.double().split_with_sizes(list(ranges.sizes)), strict=True
        )
        for layer, (values, variance) in enumerate(layers):
            center, radius = float(ranges.center[layer]), float(ranges.radius[layer])
            centers.append(self._center(center, values, variance))
            radii.append(self._radius(radius, values, variance))
        return replace(ranges, center=torch.tensor(centers), radius=torch.tensor(radii))

    def _center(self, center: float, values: Tensor, variance: Tensor) -> float:
        shift = float(values.mean()) - center
        doubt = self.confidence * float((variance.mean() / values.numel()).sqrt())
        return center + (max(0.0, abs(shift) - doubt) if shift > 0 else -max(0.0, abs(shift) - doubt))

    def _radius(self, radius: float, values: Tensor, variance: Tensor) -> float:
        if values.numel() < 2:
            return radius
        noise = float(variance.mean())
        doubt = self.confidence * noise * math.sqrt(2 / (values.numel() - 1))
        signal = max(0.0, float(values.var()) - noise - doubt)
        wanted = self.spread * math.sqrt(signal)
        return max(self.floor, min(max(wanted, radius / 2), radius * 2))


def range_rule(name: str, *, floor: float) -> RangeRule:
    """Look a rule up by its name in a config: ``fixed``, ``noisy-minmax`` or ``denoised``."""
    rules: dict[str, RangeRule] = {"fixed": Fixed(), "noisy-minmax": NoisyMinMax(floor), "denoised": Denoised(floor)}
    if name not in rules:
        raise ConfigError(f"unknown range rule {name!r}: {did_you_mean(name, rules)}")
    return rules[name]
