"""Features for colour pictures, learnt from drawn leaves alone: which patches occur where, and in which directions that differs.

Single layers of patch detectors see nearly as much as deep networks that were never trained on labels (Coates and Ng 2011). The patches
here are of drawn leaves (:mod:`ldpfl.data.features.drawn_leaves`): nobody's data are behind them. ``benchmarks/drawn_features.py`` learns
anew. A picture's patches are normalised, whitened and compared with a dictionary; what each entry answers above a threshold is averaged
over quarters of the picture, and over it and its mirror image. The answers are then turned and stretched by their covariance over drawn
leaves, so that a learner's steps go in all directions, and cut down to a few: noise grows with the root of the number of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.data.features.base import DrawnFeatures, shipped, unit
from ldpfl.data.features.drawn_leaves import SIDE, drawn

DIRECTIONS = 800
"""Directions in the file, those of the largest variance first."""

_ENTRIES, _PATCH = 400, 6
_PICTURES, _AT_ONCE, _PATCHES = 6000, 100, 16
"""Drawn pictures, how many at once, and patches of each that the dictionary is made of."""

_FLAT = (10 / 255) ** 2
"""Added to a patch's variance, so that next to nothing in it is not made large."""

_RIDGE = 0.3
"""Added to the variance of patches in each direction before they are whitened; it is 1 in the mean."""

_THRESHOLD = 0.25
"""Standard deviations above the mean of an entry's answers from which on it counts."""

_QUARTERS = 2
_POWER, _SMALL = 0.35, 0.01
"""Directions are divided by this power of their variance, which is that much of the mean one larger."""

_CLUSTERINGS = 8


@dataclass(frozen=True)
class LeafFeatures(DrawnFeatures):
    """Colour pictures (N, 3, 32, 32) uint8 to vectors (N, ``directions``) float32 of length 1.

    Attributes:
        directions: how many of the 800 are kept, those of the largest variance first.
    """

    name = "leaves"
    pictures = "colour pictures"
    taken = (3, SIDE, SIDE)
    most = DIRECTIONS
    directions: int = DIRECTIONS

    def __call__(self, inputs: Tensor) -> Tensor:
        self.shape(tuple(inputs.shape[1:]))
        known = learnt()
        return unit((_answers(inputs, known["filters"], known["thresholds"]) - known["mean"]) @ known["directions"][:, : self.directions])


@lru_cache(maxsize=1)
def learnt() -> dict[str, Tensor]:
    """Return what the package's file holds: filters (400, 3, 6, 6), thresholds (400,), mean (1600,), directions (1600, 800), float32."""
    return shipped("leaves")


def _answers(pictures: Tensor, filters: Tensor, thresholds: Tensor) -> Tensor:
    """Return roots of what each filter answers above its threshold, in quarters of pictures and mirror images: (N, 4 K)."""
    above = thresholds[:, None, None]
    one, other = (F.adaptive_avg_pool2d((_compared(side, filters) - above).clamp_min_(0), _QUARTERS) for side in _sides(pictures))
    return unit(((one + other) / 2).sqrt())


def _sides(pictures: Tensor) -> tuple[Tensor, Tensor]:
    values = pictures.float() / 255
    return values, values.flip(-1)


def _compared(values: Tensor, filters: Tensor) -> Tensor:
    """Return the product of each filter, whose mean is 0, with each patch, whose variance is brought to 1: (N, K, H - 5, W - 5)."""
    ones = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())
    mean, square = F.conv2d(values, ones), F.conv2d(values**2, ones)
    return F.conv2d(values, filters).div_(((square - mean**2).clamp_min(0) + _FLAT).sqrt())


def learn(progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Tensor]:
    """Return what :func:`learnt` does, from drawn pictures alone; minutes on one core."""
    generator, parts = torch.Generator().manual_seed(0), []
    for done in range(0, _PICTURES, _AT_ONCE):
        parts.append(drawn(generator, _AT_ONCE))
        progress(done + _AT_ONCE, 2 * _PICTURES)
    pictures = torch.cat(parts)
    filters = _dictionary(pictures, generator)
    some = torch.cat([_compared(_sides(batch)[0], filters) for batch in _batches(pictures[: 10 * _AT_ONCE])])
    # That whitened patches have a mean moves answers and thresholds alike, and so it is left out.
    thresholds = some.mean((0, 2, 3)) + _THRESHOLD * some.std((0, 2, 3))
    rows = []
    for done in range(0, _PICTURES, _AT_ONCE):
        rows.append(_answers(pictures[done : done + _AT_ONCE], filters, thresholds))
        progress(_PICTURES + done + _AT_ONCE, 2 * _PICTURES)
    mean, directions = _directions(torch.cat(rows))
    return {"filters": filters.clone(), "thresholds": thresholds, "mean": mean, "directions": directions.half().contiguous()}


def _dictionary(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return filters (400, 3, 6, 6): whitened patches, clustered by their directions (spherical k-means)."""
    chosen = torch.cat([_patches(batch, generator) for batch in _batches(pictures)])
    centered = chosen - chosen.mean(dim=1, keepdim=True)
    normalised = centered / (centered.var(dim=1, keepdim=True, unbiased=False) + _FLAT).sqrt()
    normalised = normalised - normalised.mean(dim=0)
    variances, turned = torch.linalg.eigh((normalised.T @ normalised / len(normalised)).double())
    whitening = ((turned * (variances + _RIDGE).rsqrt()) @ turned.T).float()
    whitened = unit(normalised @ whitening)
    entries = whitened[torch.randperm(len(whitened), generator=generator)[:_ENTRIES]]
    for _ in range(_CLUSTERINGS):
        nearest, which = (whitened @ entries.T).max(dim=1)
        sums = torch.zeros_like(entries).index_add_(0, which, whitened * nearest[:, None])
        entries = unit(torch.where(sums.any(dim=1, keepdim=True), sums, entries))
    filters: Tensor = entries @ whitening
    return torch.sub(filters, filters.mean(dim=1, keepdim=True)).reshape(_ENTRIES, 3, _PATCH, _PATCH)


def _batches(pictures: Tensor) -> Sequence[Tensor]:
    return torch.split(pictures, _AT_ONCE)


def _patches(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return patches from random places of each picture: (16 N, 108)."""
    patches = F.unfold(pictures.float() / 255, _PATCH).transpose(1, 2)
    places = torch.randint(0, patches.shape[1], (len(patches), _PATCHES), generator=generator)
    return patches.gather(1, places[..., None].expand(-1, -1, patches.shape[2])).flatten(0, 1)


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of ``rows``, and their principal directions, each divided by a power of its variance."""
    mean = rows.mean(dim=0)
    variances, turned = torch.linalg.eigh(((rows - mean).T @ (rows - mean) / len(rows)).double())
    variances, turned = variances.flip(0)[:DIRECTIONS], turned.flip(1)[:, :DIRECTIONS]
    # A direction and its opposite are as good: of both, the one whose largest entry is positive.
    turned = turned * turned.gather(0, turned.abs().argmax(dim=0, keepdim=True)).sign()
    directions = turned * (variances + _SMALL * variances.mean()) ** -_POWER
    return mean, (directions / directions.abs().max()).float()
