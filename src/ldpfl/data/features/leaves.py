"""Features for colour pictures, learnt from drawn leaves alone: which patches occur in which quarter of a picture.

Single layers of patch detectors see nearly as much as deep networks that were never trained on labels (Coates and Ng 2011). The patches
here are of drawn leaves (:mod:`ldpfl.data.features.drawn_leaves`), and come from nobody's data. ``benchmarks/drawn_features.py`` learns
them again.

Each patch of a picture is normalised, whitened and correlated with the filters of a dictionary. What a filter's correlation exceeds a
threshold by is its response. Responses are averaged over each quarter of the picture, and over the picture and its mirror image. They are
then projected on the principal directions of the responses to drawn leaves, and rescaled, so that a learner makes progress in all
directions. Few directions are used, because noise grows with the root of the number of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.data.features.base import DrawnFeatures, unit_length
from ldpfl.data.features.drawn_leaves import SIDE, draw_pictures
from ldpfl.models.leaf_network import VARIANCE_FLOOR, leaves

DIRECTIONS = 800
"""Number of directions in the file, those of the largest variance first."""

_FILTERS, _PATCH_SIDE = 400, 6
"""Number of filters in the dictionary, and side of a patch in pixels."""
_PICTURES, _BATCH_SIZE, _PATCHES_PER_PICTURE = 6000, 100, 16
"""Number of drawn pictures that are learnt from, of those in a batch, and of each picture's patches for the dictionary."""

_RIDGE = 0.3
"""Added to the variance of patches in each direction, 1 in the mean, so that whitening does not amplify noise."""

_THRESHOLD = 0.25
"""Threshold of a filter's correlations, in their standard deviations above their mean."""

_CELLS_PER_SIDE = 2
"""Responses are averaged over 2 x 2 quarters of a picture."""

_VARIANCE_POWER, _VARIANCE_SHARE = 0.35, 0.01
"""Directions are divided by this power of their variance, after this share of the mean variance was added to it."""

_CLUSTERING_STEPS = 8


@dataclass(frozen=True)
class LeafFeatures(DrawnFeatures):
    """Colour pictures (N, 3, 32, 32) uint8 to vectors (N, ``directions``) float32 of length 1.

    Attributes:
        directions: how many of the 800 directions are used, those of the largest variance first.
    """

    name = "leaves"
    kind_of_pictures = "colour pictures"
    picture_shape = (3, SIDE, SIDE)
    max_directions = DIRECTIONS
    directions: int = DIRECTIONS

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the filters' responses to pictures, centered and projected on the learnt directions: (N, directions)."""
        self.shape(tuple(inputs.shape[1:]))  # raises if they do not fit
        tensors = leaves()
        centered = _responses(inputs, tensors["filters"], tensors["thresholds"]) - tensors["mean"]
        return unit_length(centered @ tensors["directions"][:, : self.directions])


def _responses(pictures: Tensor, filters: Tensor, thresholds: Tensor) -> Tensor:
    """Return the square root of the response of each of K filters in each quarter of ``pictures`` (N, 3, H, W): (N, 4 K), of length 1."""
    values = pictures.float() / 255
    responses, mirrored_responses = (
        F.adaptive_avg_pool2d((_correlations(images, filters) - thresholds[:, None, None]).clamp_min_(0), _CELLS_PER_SIDE)
        for images in (values, values.flip(-1))
    )
    return unit_length(((responses + mirrored_responses) / 2).sqrt())


def _correlations(values: Tensor, filters: Tensor) -> Tensor:
    """Return the product of K filters with each patch of ``values`` (N, 3, H, W), scaled to variance 1: (N, K, H - 5, W - 5)."""
    averaging = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())  # a convolution with it gives each patch's mean
    mean, mean_square = F.conv2d(values, averaging), F.conv2d(values**2, averaging)
    return F.conv2d(values, filters).div_(((mean_square - mean**2).clamp_min(0) + VARIANCE_FLOOR).sqrt())


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
    correlations = torch.cat(
        [_correlations(batch.float() / 255, filters) for batch in torch.split(pictures[: 10 * _BATCH_SIZE], _BATCH_SIZE)]
    )
    # The mean of whitened patches shifts correlations and thresholds equally, and so it is not subtracted.
    thresholds = correlations.mean((0, 2, 3)) + _THRESHOLD * correlations.std((0, 2, 3))
    responses = []
    for done in range(0, _PICTURES, _BATCH_SIZE):
        responses.append(_responses(pictures[done : done + _BATCH_SIZE], filters, thresholds))
        progress(_PICTURES + done + _BATCH_SIZE, 2 * _PICTURES)
    mean, directions = _directions(torch.cat(responses))
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
