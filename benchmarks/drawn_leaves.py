"""Draw pictures by the "dead leaves" model, and learn the features ``leaves`` from them.

The pictures show random shapes of all sizes that lie over each other, as if they had fallen.

Like photographs they have edges at all scales, things in front of others, shading, and light of one colour, but they contain nobody's
data. The model is Matheron's (1968). With sizes by a power law, its statistics are near those of natural pictures (Lee, Mumford and Huang
2001), and networks that were trained on such pictures alone learn to see (Baradad et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.data.features.base import unit_length
from ldpfl.data.features.leaves import DIRECTIONS, SIDE, correlations, responses
from ldpfl.models.leaf_network import VARIANCE_FLOOR

_LEAVES = 90
"""Number of leaves of a picture."""

_SMALLEST, _LARGEST = 0.09, 1.4
"""Range of the sizes of leaves, where a picture's side is 2. Their density falls with the third power of the size."""

_SUPERSAMPLING = 2
"""Pictures are drawn this many times as large, and then averaged, which smooths edges as a lens does."""

_FILTERS, _PATCH_SIDE = 400, 6
"""Number of filters in the dictionary, and side of a patch in pixels."""

_PICTURES, _BATCH_SIZE, _PATCHES_PER_PICTURE = 6000, 100, 16
"""Number of drawn pictures that are learnt from, of those in a batch, and of each picture's patches for the dictionary."""

_CLUSTERING_STEPS = 8

_RIDGE = 0.3
"""Added to the variance of patches in each direction, 1 in the mean, so that whitening does not amplify noise."""

_THRESHOLD = 0.25
"""Threshold of a filter's correlations, in their standard deviations above their mean."""

_VARIANCE_POWER, _VARIANCE_SHARE = 0.35, 0.01
"""Directions are divided by this power of their variance, after this share of the mean variance was added to it."""


@dataclass(frozen=True)
class _Leaves:
    """The L leaves of each of N pictures, those that lie lowest first, as tensors (N, L, ...).

    Attributes:
        size, place: radius, and center (..., 2), where a picture spans -1 to 1.
        turn, stretch: angle in radians, and ratio of length to width.
        shape: 0 for an ellipse, 1 for a rectangle, 2 for a triangle.
        colour: red, green and blue (..., 3) in the middle.
        shading: change of the colour (..., 2) from the middle to the edge, along and across the leaf.
        stripe, frequency, slant: height of a wave that is added to the colour, 0 for none, with its frequency and direction.
    """

    size: Tensor
    place: Tensor
    turn: Tensor
    stretch: Tensor
    shape: Tensor
    colour: Tensor
    shading: Tensor
    stripe: Tensor
    frequency: Tensor
    slant: Tensor


def draw_pictures(generator: torch.Generator, count: int) -> Tensor:
    """Draw ``count`` pictures (count, 3, 32, 32) uint8 of random shapes ("dead leaves") that lie over each other."""
    leaves = _draw_leaves(generator, count)
    side = _SUPERSAMPLING * SIDE
    coordinates = (torch.arange(side) + 0.5) / side * 2 - 1
    y, x = torch.meshgrid(coordinates, coordinates, indexing="ij")
    pictures = torch.full((count, 3, side, side), 0.5)
    for number in range(_LEAVES):
        pictures = _with_leaf(pictures, leaves, number, x, y)
    pictures = F.avg_pool2d(pictures, _SUPERSAMPLING)
    grain = 0.015 * torch.randn(pictures.shape, generator=generator)
    return ((pictures + grain).clamp(0, 1) * 255).round().to(torch.uint8)


def _draw_leaves(generator: torch.Generator, count: int) -> _Leaves:
    """Draw the leaves (random shapes that lie over each other) of ``count`` pictures: sizes, places, colours, stripes."""

    def uniform(*more: int) -> Tensor:
        return torch.rand(count, _LEAVES, *more, generator=generator)

    def normal(*more: int) -> Tensor:
        return torch.randn(count, _LEAVES, *more, generator=generator)

    sizes = (_SMALLEST**-2 + uniform() * (_LARGEST**-2 - _SMALLEST**-2)) ** -0.5  # by inversion of the power law
    # Large leaves mostly fall first. Otherwise they would cover nearly all others.
    order = (torch.arange(_LEAVES) + 0.6 * _LEAVES * uniform()).argsort(dim=1)
    light = 0.12 * torch.randn(count, 1, 3, generator=generator)  # one colour of light for all leaves of a picture
    return _Leaves(
        size=sizes.sort(dim=1, descending=True).values.gather(1, order),
        place=uniform(2) * 2.8 - 1.4,
        turn=uniform() * 2 * pi,
        stretch=torch.exp(0.5 * normal()),
        shape=torch.randint(0, 3, (count, _LEAVES), generator=generator),
        colour=0.05 + 0.9 * uniform(1) + 0.1 * normal(3) + light,
        shading=0.25 * normal(2),
        stripe=(uniform() < 0.35) * 0.12 * normal().abs(),
        frequency=torch.exp(2 * uniform() + 1.6),
        slant=uniform() * 2 * pi,
    )


def _with_leaf(pictures: Tensor, leaves: _Leaves, number: int, x: Tensor, y: Tensor) -> Tensor:
    """Return ``pictures`` (N, 3, S, S) with each one's leaf ``number``, a shape, drawn over it. ``x`` and ``y`` (S, S) locate pixels."""

    def of_leaf(values: Tensor) -> Tensor:  # from (N, L) to (N, 1, 1), to be combined with ``x`` and ``y``
        return values[:, number, None, None]

    right, down = x - of_leaf(leaves.place[..., 0]), y - of_leaf(leaves.place[..., 1])
    cosine, sine = of_leaf(leaves.turn).cos(), of_leaf(leaves.turn).sin()
    size, stretch = of_leaf(leaves.size), of_leaf(leaves.stretch).sqrt()
    along, across = (right * cosine + down * sine) / stretch, (down * cosine - right * sine) * stretch
    # Distances from the leaf's middle. Each shape is where its distance is below the size.
    ellipse, rectangle = (along**2 + across**2).sqrt(), 1.1 * torch.maximum(along.abs(), across.abs())
    triangle = 1.4 * torch.maximum(across, 0.87 * along.abs() - 0.5 * across)
    shape = of_leaf(leaves.shape)
    inside = torch.where(shape == 0, ellipse, torch.where(shape == 1, rectangle, triangle)) < size
    shade = (of_leaf(leaves.shading[..., 0]) * along + of_leaf(leaves.shading[..., 1]) * across) / size
    wave = 2 * of_leaf(leaves.frequency) * (right * of_leaf(leaves.slant).cos() + down * of_leaf(leaves.slant).sin())
    painted = leaves.colour[:, number, :, None, None] + (shade + of_leaf(leaves.stripe) * torch.sin(wave))[:, None]
    return torch.where(inside[:, None], painted, pictures)


def learn(progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Tensor]:
    """Compute filters, thresholds, and the mean and principal directions of responses, from drawn pictures alone. It takes minutes.

    ``progress`` is called with the number of steps that are done, and of all.
    """
    generator, parts = torch.Generator().manual_seed(0), []
    for done in range(0, _PICTURES, _BATCH_SIZE):
        parts.append(draw_pictures(generator, _BATCH_SIZE))
        progress(done + _BATCH_SIZE, 2 * _PICTURES)
    pictures = torch.cat(parts)
    filters = _dictionary(pictures, generator)
    samples = torch.cat([correlations(batch.float() / 255, filters) for batch in torch.split(pictures[: 10 * _BATCH_SIZE], _BATCH_SIZE)])
    # The mean of whitened patches shifts correlations and thresholds equally, and so it is not subtracted.
    thresholds = samples.mean((0, 2, 3)) + _THRESHOLD * samples.std((0, 2, 3))
    rows = []
    for done in range(0, _PICTURES, _BATCH_SIZE):
        rows.append(responses(pictures[done : done + _BATCH_SIZE], filters, thresholds))
        progress(_PICTURES + done + _BATCH_SIZE, 2 * _PICTURES)
    mean, directions = _directions(torch.cat(rows))
    return {"filters": filters.clone(), "thresholds": thresholds, "mean": mean, "directions": directions.half().contiguous()}


def _dictionary(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return filters (400, 3, 6, 6), which whiten patches and compare them with the centers of clusters by spherical k-means."""
    patches = torch.cat([_patches(batch, generator) for batch in torch.split(pictures, _BATCH_SIZE)])
    centered = patches - patches.mean(dim=1, keepdim=True)
    normalised = centered / (centered.var(dim=1, keepdim=True, unbiased=False) + VARIANCE_FLOOR).sqrt()
    normalised = normalised - normalised.mean(dim=0)
    variances, axes = torch.linalg.eigh((normalised.T @ normalised / len(normalised)).double())
    whitening = ((axes * (variances + _RIDGE).rsqrt()) @ axes.T).float()
    whitened = unit_length(normalised @ whitening)
    centers = whitened[torch.randperm(len(whitened), generator=generator)[:_FILTERS]]
    for _ in range(_CLUSTERING_STEPS):
        similarities, nearest = (whitened @ centers.T).max(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, whitened * similarities[:, None])
        centers = unit_length(torch.where(sums.any(dim=1, keepdim=True), sums, centers))  # a center without patches stays
    filters: Tensor = centers @ whitening
    return torch.sub(filters, filters.mean(dim=1, keepdim=True)).reshape(_FILTERS, 3, _PATCH_SIDE, _PATCH_SIDE)


def _patches(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return 16 patches from random places of each of N ``pictures``, flattened: (16 N, 3 x 6 x 6)."""
    patches = F.unfold(pictures.float() / 255, _PATCH_SIDE).transpose(1, 2)
    places = torch.randint(0, patches.shape[1], (len(patches), _PATCHES_PER_PICTURE), generator=generator)
    return patches.gather(1, places[..., None].expand(-1, -1, patches.shape[2])).flatten(0, 1)


def _directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (F,) of ``rows`` (N, F), and their principal directions (F, 800), each divided by a power of its variance."""
    mean = rows.mean(dim=0)
    variances, axes = torch.linalg.eigh(((rows - mean).T @ (rows - mean) / len(rows)).double())
    variances, axes = variances.flip(0)[:DIRECTIONS], axes.flip(1)[:, :DIRECTIONS]
    # A direction and its opposite are equally good. To be reproducible, its largest entry is made positive.
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    directions = axes * (variances + _VARIANCE_SHARE * variances.mean()) ** -_VARIANCE_POWER
    return mean, (directions / directions.abs().max()).float()
