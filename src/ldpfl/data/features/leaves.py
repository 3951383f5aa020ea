"""Features for colour pictures, learnt from drawn leaves alone: which patches occur in which quarter of a picture.

Single layers of patch detectors see nearly as much as deep networks that were never trained on labels (Coates and Ng 2011). The patches
here are of drawn leaves, and come from nobody's data. ``benchmarks/drawn_leaves.py`` draws the leaves and learns from them, and
``benchmarks/drawn_features.py`` compares the result with the package's file.

Each patch of a picture is normalised, whitened and correlated with the filters of a dictionary. A filter's response is the amount by which
its correlation exceeds a threshold. Responses are averaged over each quarter of the picture, and over the picture and its mirror image.
They are then projected on the principal directions of the responses to drawn leaves, and rescaled, so that a learner makes progress in all
directions. Few directions are used, because noise grows with the root of the number of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.data.features.base import DrawnFeatures, unit_length
from ldpfl.models.leaf_network import VARIANCE_FLOOR, leaves

SIDE = 32

DIRECTIONS = 800
"""Number of directions in the file, those of the largest variance first."""

_CELLS_PER_SIDE = 2
"""Responses are averaged over 2 x 2 quarters of a picture."""


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
        centered = responses(inputs, tensors["filters"], tensors["thresholds"]) - tensors["mean"]
        return unit_length(centered @ tensors["directions"][:, : self.directions])


def responses(pictures: Tensor, filters: Tensor, thresholds: Tensor) -> Tensor:
    """Return the square root of the response of each of K filters in each quarter of ``pictures`` (N, 3, H, W): (N, 4 K), of length 1."""
    values = pictures.float() / 255
    original, mirrored = (
        F.adaptive_avg_pool2d((correlations(images, filters) - thresholds[:, None, None]).clamp_min_(0), _CELLS_PER_SIDE)
        for images in (values, values.flip(-1))
    )
    return unit_length(((original + mirrored) / 2).sqrt())


def correlations(values: Tensor, filters: Tensor) -> Tensor:
    """Return products of K filters, 6 x 6 with mean 0, with the patches of ``values`` (N, 3, H, W) at variance 1: (N, K, H - 5, W - 5)."""
    averaging = torch.full((1, *filters.shape[1:]), 1 / filters[0].numel())  # a convolution with it gives each patch's mean
    mean, mean_square = F.conv2d(values, averaging), F.conv2d(values**2, averaging)
    return F.conv2d(values, filters).div_(((mean_square - mean**2).clamp_min(0) + VARIANCE_FLOOR).sqrt())
