"""A network for colour pictures whose first two layers begin as those of the features ``leaves``, learnt from drawn leaves alone."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.errors import ConfigError
from ldpfl.models.images import InputShape
from ldpfl.util.packaged_tensors import packaged_tensors

VARIANCE_FLOOR = (10 / 255) ** 2
"""Added to the variance of a patch's values, of 0 to 1, so that normalising does not amplify a patch of nearly one colour."""
_STRIDE = 2
"""Distance of patches in pixels. With 1, a step takes four times as long."""
_SPREAD = 0.25
"""Standard deviation, of values from 0 to 1, to which samples of standard deviation 1 are scaled: about that of photographs."""
_FILTER_UNIT, _DIRECTION_UNIT, _HEAD_SCALE = 0.01, 0.02, 10.0
"""Factors on the weights of filters, dense layer and head. With them one learning rate and one range suit all layers."""
_TINY = 1e-6
"""Added below roots and to norms, so that gradients are finite at 0."""


class LeafNetwork(nn.Module):
    """Filters of 6x6 patches, averaged over quarters of the picture, then a dense layer and a head: 642,902 weights for 10 classes.

    All layers are trained. The filters and the dense layer begin as those of :mod:`ldpfl.data.features.leaves`, and the head at 0. A
    picture and its mirror image have equal outputs at first.
    """

    def __init__(self, shape: InputShape, classes: int, *, directions: int = 372) -> None:
        """Begin with the first ``directions`` of the packaged directions, which were learnt from drawn pictures, and with a head of 0."""
        super().__init__()
        if tuple(shape) != (3, 32, 32):
            raise ConfigError(f"model 'leaf-network' needs colour pictures of 32 x 32 pixels, got samples of shape {tuple(shape)}")
        start = leaves()
        if directions > start["directions"].shape[1]:
            raise ConfigError(f"model 'leaf-network' has at most {start['directions'].shape[1]} directions, got {directions}")
        projection = start["directions"][:, :directions]
        self.filters = nn.Parameter(start["filters"] / _FILTER_UNIT)
        self.thresholds = nn.Parameter(start["thresholds"] / _FILTER_UNIT)
        self.directions = nn.Parameter(projection.T.contiguous() / _DIRECTION_UNIT)
        self.direction_bias = nn.Parameter(-(start["mean"] @ projection) / _DIRECTION_UNIT)
        self.head = nn.Linear(directions, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the outputs (N, classes) for ``pictures`` (N, 3, 32, 32) and their mirror images together."""
        patches = _normalised_patches(pictures * _SPREAD)
        # Mirrored filters on the picture respond as the filters do on its mirror image, with left and right quarters exchanged.
        original, mirrored = (self._responses(patches, filters) for filters in (self.filters, self.filters.flip(-1)))
        responses = _with_length_one(((original + mirrored[..., [1, 0, 3, 2]]).flatten(1) / 2 + _TINY).sqrt())
        hidden = F.linear(responses, self.directions * _DIRECTION_UNIT, self.direction_bias * _DIRECTION_UNIT)
        return torch.as_tensor(self.head(_with_length_one(hidden) * _HEAD_SCALE))

    def _responses(self, patches: Tensor, filters: Tensor) -> Tensor:
        """Return by how much products of filters with ``patches`` (N, 108, P) exceed thresholds, averaged over quarters: (N, K, 4)."""
        products = (filters.flatten(1) * _FILTER_UNIT) @ patches
        above = F.relu(products - self.thresholds[:, None] * _FILTER_UNIT)
        side = round(above.shape[-1] ** 0.5)
        return _quarters(above.reshape(*above.shape[:-1], side, side))


@lru_cache(maxsize=1)
def leaves() -> dict[str, Tensor]:
    """Return the tensors of ``leaves.safetensors``, float32.

    They are filters (400, 3, 6, 6), thresholds (400,), mean (1600,) and directions (1600, 800).
    """
    return packaged_tensors("ldpfl.models", "leaves")


def _normalised_patches(values: Tensor) -> Tensor:
    """Return the 6x6 patches of ``values`` (N, 3, H, W), each with mean 0 and variance 1: (N, 108, P)."""
    patches = F.unfold(values, 6, stride=_STRIDE)
    centered = patches - patches.mean(dim=1, keepdim=True)
    return centered / (centered.square().mean(dim=1, keepdim=True) + VARIANCE_FLOOR).sqrt()


def _quarters(maps: Tensor) -> Tensor:
    """Return the means of ``maps`` (N, K, S, S) over their quarters, which share the middle row and column if S is odd: (N, K, 4)."""
    half = (maps.shape[-1] + 1) // 2
    upper, lower = maps[..., :half, :], maps[..., -half:, :]
    parts = (upper[..., :half], upper[..., -half:], lower[..., :half], lower[..., -half:])
    return torch.stack([part.mean(dim=(-2, -1)) for part in parts], dim=-1)


def _with_length_one(rows: Tensor) -> Tensor:
    """Return ``rows`` (N, F) scaled to length 1; a row of zeros remains zeros."""
    return torch.div(rows, rows.norm(dim=1, keepdim=True) + _TINY)
