"""Labelled samples as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Labelled samples: ``inputs`` (N, ...) in the type that they have, and ``labels`` (N,) int64. Images are (N, C, H, W) uint8."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.numel())

    def take(self, index: Tensor) -> Samples:
        """Return the samples at ``index``."""
        return Samples(self.inputs[index], self.labels[index])

    def to(self, device: torch.device) -> Samples:
        """Return a copy on ``device``."""
        return Samples(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """What is to be classified: train and test samples, and the public constants that normalise the pixels of images.

    Attributes:
        mean, std: per channel, on the scale where pixels lie in [0, 1]; fixed constants of the field, not computed
            from the clients' data at run time. Samples that are no pixels are taken as they are.
        fingerprint: identifies the content.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample; of an image: channels, height, width."""
        return tuple(self.train.inputs.shape[1:])


def normalise(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Turn uint8 pixels (..., C, H, W) into float32 with the given channel ``mean`` and ``std``; other ``inputs`` stay as they are."""
    if inputs.dtype != torch.uint8:
        return inputs
    scale = torch.tensor([1 / (255 * s) for s in std], device=inputs.device).view(-1, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=inputs.device).view(-1, 1, 1)
    return inputs.float().mul_(scale).sub_(shift)
