"""Decoded images as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Labelled images: ``pixels`` (N, C, H, W) uint8 and ``labels`` (N,) int64."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.numel())

    def take(self, index: Tensor) -> Images:
        """Return the images at ``index``."""
        return Images(self.pixels[index], self.labels[index])

    def to(self, device: torch.device) -> Images:
        """Return a copy on ``device``."""
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class ImageTask:
    """A classification task: train and test images, and the public constants that normalise pixels.

    Attributes:
        mean, std: per channel, on the scale where pixels lie in [0, 1]; fixed constants of the field, not computed
            from the clients' data at run time.
        fingerprint: identifies the decoded content.
    """

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.train.pixels.shape
        return channels, height, width


def normalise(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Turn uint8 ``pixels`` (..., C, H, W) into float32 with the given channel ``mean`` and ``std``."""
    scale = torch.tensor([1 / (255 * s) for s in std], device=pixels.device).view(-1, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=pixels.device).view(-1, 1, 1)
    return pixels.float().mul_(scale).sub_(shift)
