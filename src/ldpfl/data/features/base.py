"""What all features have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, ClassVar

from safetensors.torch import load_file
from torch import Tensor

from ldpfl.errors import ConfigError

if TYPE_CHECKING:
    from ldpfl.data.samples import Dataset


TAKEN_FOR_PUBLIC = "the data that it was trained on are taken for public, and no guarantee here covers them"
"""End of the note of features that come from a trained network."""


class FeatureMap(ABC):
    """A public transform of samples: the same for all clients, and fixed before any of them takes part."""

    @property
    def note(self) -> str:
        """What results say about data that the features were trained on; "" if they were made from formulas or drawings."""
        return ""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of frozen weights that are not this package's; "" if there are none."""
        return ""

    @property
    def reads_texts(self) -> bool:
        """Whether the transform takes tokens of its own tokenizer."""
        return False

    def load(self) -> None:  # noqa: B027  # most transforms need nothing
        """Load what the transform needs from this machine.

        Raises:
            ConfigError: it is not there, or damaged.
        """

    def prepared(self, dataset: Dataset) -> Dataset:
        """Return ``dataset`` with samples of one tensor, as this transform takes them.

        Raises:
            ConfigError: the samples are of another kind.
        """
        return dataset

    @abstractmethod
    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's features.

        Raises:
            ConfigError: samples of the shape ``inputs`` have none.
        """

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the features (N, ...) float32 of ``inputs`` (N, ...)."""


class DrawnFeatures(FeatureMap):
    """Features that were learnt from drawings, of which the package holds ``most`` directions; the first ``directions`` are taken.

    Attributes:
        name: how configs call them, and their file.
        pictures, taken: what kind of pictures they are of, in a word, and of which shape (C, H, W).
    """

    name: ClassVar[str]
    pictures: ClassVar[str]
    taken: ClassVar[tuple[int, int, int]]
    most: ClassVar[int]
    directions: int

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        if inputs != self.taken:
            size = " x ".join(map(str, self.taken[1:]))
            raise ConfigError(f"features {self.name!r} take {self.pictures} of {size} pixels; these samples are {inputs}")
        if not 1 <= self.directions <= self.most:
            raise ConfigError(f"features {self.name!r} have 1 to {self.most} directions, got {self.directions}")
        return (self.directions,)


def shipped(name: str) -> dict[str, Tensor]:
    """Return the tensors, as float32, of the package's file for the features called ``name``."""
    with as_file(files("ldpfl.data.features").joinpath(f"{name}.safetensors")) as path:
        return {key: tensor.float() for key, tensor in load_file(path).items()}


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
