"""What all features have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ldpfl.errors import ConfigError

if TYPE_CHECKING:
    from ldpfl.data.dataset import Dataset

TAKEN_FOR_PUBLIC = "the data that it was trained on count as public, and no guarantee here covers them"
"""End of the note of features that come from a trained network."""


class FeatureMap(ABC):
    """A public transform of samples to features. It is the same for all clients, and fixed before any client takes part."""

    @property
    def note(self) -> str:
        """Note in results on the data that the features were learnt from; "" if they come from formulas or drawings."""
        return ""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of frozen weights that do not come with this package; "" if there are none."""
        return ""

    @property
    def reads_texts(self) -> bool:
        """Whether the transform takes tokens of its own tokenizer."""
        return False

    def load(self) -> None:  # noqa: B027  # most transforms need nothing
        """Load what the transform needs from this machine.

        Raises:
            ConfigError: a file or package is missing or damaged.
        """

    def prepared(self, dataset: Dataset) -> Dataset:
        """Return ``dataset`` with each sample as one tensor in the form that this transform takes.

        Raises:
            ConfigError: the samples are of another kind.
        """
        return dataset

    @abstractmethod
    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features, for a sample of the shape ``inputs``.

        Raises:
            ConfigError: the transform does not take samples of this shape.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the features (N, ...) float32 of ``inputs`` (N, ...)."""


class DrawnFeatures(FeatureMap):
    """Features that were learnt from drawings: projections of a picture on directions that a file of the package holds.

    Attributes:
        name: name of the features in configs, and of their file.
        kind_of_pictures: pictures that the features are for, in a word or two.
        picture_shape: their shape (C, H, W).
        max_directions: number of directions in the file.
        directions: number of directions that are used, the first ones.
    """

    name: ClassVar[str]
    kind_of_pictures: ClassVar[str]
    picture_shape: ClassVar[tuple[int, int, int]]
    max_directions: ClassVar[int]
    directions: int

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features, (directions,), or raise if a sample of the shape ``inputs`` does not fit."""
        if inputs != self.picture_shape:
            size = " x ".join(map(str, self.picture_shape[1:]))
            raise ConfigError(f"features {self.name!r} need {self.kind_of_pictures} of {size} pixels, got samples of shape {inputs}")
        if not 1 <= self.directions <= self.max_directions:
            raise ConfigError(f"directions of the features {self.name!r} is {self.directions}, expected 1 to {self.max_directions}")
        return (self.directions,)


def group_normalised(maps: Tensor, groups: int) -> Tensor:
    """Scale ``maps`` (N, C, H, W) to mean 0 and variance 1 in each group of channels of each sample.

    Source: Wu and He 2018 (group normalisation), here without learnt weights.
    """
    grouped = maps.reshape(len(maps), groups, -1)
    centered = grouped - grouped.mean(dim=2, keepdim=True)
    return (centered / (grouped.var(dim=2, keepdim=True, unbiased=False) + 1e-5).sqrt()).reshape(maps.shape)  # 1e-5 as in nn.GroupNorm


def unit_length(rows: Tensor) -> Tensor:
    """Return ``rows`` (N, ...) as vectors (N, F) of length 1. A row of zeros remains zeros."""
    flat = rows.reshape(len(rows), -1)
    norms = flat.norm(dim=1, keepdim=True)
    return flat.div(norms.where(norms > 0, 1.0))
