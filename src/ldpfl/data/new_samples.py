"""What a trained model says of new images, or of an array of samples: from files to its inputs, and from its outputs to classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl.data.encoder import likeliest, told_classes
from ldpfl.data.folders import visible_files
from ldpfl.data.samples import normalise
from ldpfl.data.user_data import tensor_of
from ldpfl.data.user_hub import new_images
from ldpfl.data.user_images import IMAGES
from ldpfl.errors import DataError, printable
from ldpfl.models.layout import answers_of

if TYPE_CHECKING:
    import pandas

Rows = str | Path | Tensor | NDArray[Any]
"""A folder of images, an image, a ``.npy`` file or a Parquet file with images; or the samples themselves."""

_AT_ONCE = 256
"""Samples that go through a model together."""


def read_samples(rows: Rows, shape: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """Return samples (N, ``*shape``), as they are before pixels are normalised, and the file of each one; no files where there are none.

    Images of one channel are read as grey values, others as RGB.

    Raises:
        DataError: there are no samples, they cannot be read, or they are of another shape.
    """
    files: list[str] = []
    if not isinstance(rows, str | Path):
        found = tensor_of(rows, "the samples")
    elif Path(rows).suffix.lower() == ".npy":
        found = tensor_of(_array_in(Path(rows)), f"{rows}")
    else:
        path = Path(rows)
        images = [file for file in visible_files(path) if file.suffix.lower() in IMAGES] if path.is_dir() else [path]
        is_table = not images or path.suffix.lower() == ".parquet"
        files = [] if is_table else [str(file.relative_to(path) if path.is_dir() else file.name) for file in images]
        found = new_images(path, None if is_table else images, "L" if shape[:1] == (1,) else "RGB")
    if tuple(found.shape[1:]) != shape:
        raise DataError(
            f"each of the {len(found):,} samples has the shape {tuple(found.shape[1:])}, and the model takes {shape}: bring them to that "
            "shape (images are channels, height, width); of features (data.features), give them to ldpfl.load_model's module yourself"
        )
    return found, files


def _array_in(path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: expected a file that numpy.save wrote, of numbers alone") from error
    return found


def classified(
    module: nn.Module,
    samples: tuple[Tensor, list[str]],
    scale: tuple[tuple[float, ...], tuple[float, ...]],
    classes: Sequence[str],
    threshold: float | None,
) -> pandas.DataFrame:
    """Return the class of each sample and the probability of each class; with the file of each in the first column, if it has one.

    Args:
        samples: as :func:`read_samples` returns them.
        scale: mean and standard deviation that pixels are normalised by.
        classes: what the outputs stand for.
        threshold: of two classes, the probability from which on it is the second one.

    Raises:
        DataError: the model has other outputs.
    """
    inputs, files = samples
    module.eval()
    with torch.no_grad():
        outputs = torch.cat([answers_of(module, normalise(part, *scale)) for part in torch.split(inputs, _AT_ONCE)]).double()
    if tuple(outputs.shape) != (len(inputs), len(classes)):
        raise DataError(f"the model says {tuple(outputs.shape[1:])} of a sample, expected {len(classes)} figures: it is of another run")
    chances = outputs.softmax(dim=1)
    found = told_classes("class", classes, chances, likeliest(chances, threshold))
    if files:
        found.insert(0, "file", [printable(name) for name in files])
    return found
