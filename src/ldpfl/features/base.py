"""What all features have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class FeatureMap(ABC):
    """A public transform of samples: the same for all clients, and fixed before any of them takes part."""

    @abstractmethod
    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features.

        Raises:
            ConfigError: samples of the shape ``inputs`` have none.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the features (N, ...) float32 of ``inputs`` (N, ...)."""


def group_normalised(maps: Tensor, groups: int) -> Tensor:
    """Return ``maps`` (N, C, H, W) with mean 0 and variance 1 in each sample and group of channels (Wu and He 2018, without weights)."""
    grouped = maps.reshape(len(maps), groups, -1)
    centered = grouped - grouped.mean(dim=2, keepdim=True)
    return (centered / (grouped.var(dim=2, keepdim=True, unbiased=False) + 1e-5).sqrt()).reshape(maps.shape)


def unit(rows: Tensor) -> Tensor:
    """Return ``rows`` (N, ...) as (N, F), each of length 1; one of zeros stays as it is."""
    flat = rows.reshape(len(rows), -1)
    norms = flat.norm(dim=1, keepdim=True)
    return flat.div(norms.where(norms > 0, 1.0))
