"""Features for drawn characters, learnt from random strokes: directions of scattering in which scribbles differ more than their copies.

How two characters differ, and how two hands draw the same one, can be learnt without anybody's data. There are 2,500 scribbles of one to
three random curves, each drawn ten times with other widths, slants and tremors. Fisher's discriminant of their scattering gives a few
directions. So a federation learns a few weights instead of tens of thousands, and noise grows with the root of the number of weights. No
image of any data set was used. ``benchmarks/scribbles.py`` draws the scribbles and learns from them, and ``benchmarks/drawn_features.py``
compares the result with the package's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ldpfl.data.features.base import DrawnFeatures, unit_length
from ldpfl.data.features.scattering import normalised_scattering
from ldpfl.util.packaged_tensors import packaged_tensors

SIDE = 28
DIRECTIONS = 200
"""Number of directions in the file, the best first."""


@dataclass(frozen=True)
class StrokeFeatures(DrawnFeatures):
    """Gray images (N, 1, 28, 28) uint8, ink bright on dark, to vectors (N, ``directions``) float32 of length 1.

    Attributes:
        directions: how many of the 200 directions are used, the best first.
    """

    name = "strokes"
    kind_of_pictures = "gray images"
    picture_shape = (1, SIDE, SIDE)
    max_directions = DIRECTIONS
    directions: int = DIRECTIONS

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the scattering of images, centered and projected on the learnt directions: (N, directions)."""
        self.shape(tuple(inputs.shape[1:]))  # raises if they do not fit
        tensors = load_learnt()
        return unit_length((normalised_scattering(inputs).flatten(1) - tensors["mean"]) @ tensors["directions"][:, : self.directions])


@lru_cache(maxsize=1)
def load_learnt() -> dict[str, Tensor]:
    """Return the tensors of the package's file: the mean (3969,) of the scribbles' features, and the directions (3969, 200)."""
    return packaged_tensors("ldpfl.data.features", "strokes")
