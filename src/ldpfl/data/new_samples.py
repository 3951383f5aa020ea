"""Classify new images, or an array of samples, with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl.data.encoder import class_predictions, most_likely_class
from ldpfl.data.folders import visible_files
from ldpfl.data.samples import normalise
from ldpfl.data.user_data import sample_tensor
from ldpfl.data.user_hub import read_new_images
from ldpfl.data.user_images import IMAGE_SUFFIXES
from ldpfl.errors import DataError, printable
from ldpfl.models.layout import answers_of

if TYPE_CHECKING:
    import pandas

Rows = str | Path | Tensor | NDArray[Any]
"""A folder of images, an image, a ``.npy`` file or a Parquet file with images; or the samples themselves."""

_BATCH_SIZE = 256
"""Number of samples that go through a model together."""


def read_samples(rows: Rows, shape: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """Return samples (N, ``*shape``) with unnormalised pixels, and the file name of each; an empty list if they are not files.

    If ``shape`` has one channel, images are read as grey values, else as RGB.

    Raises:
        DataError: there are no samples, they cannot be read, or they have another shape.
    """
    files: list[str] = []
    if not isinstance(rows, str | Path):
        samples = sample_tensor(rows, "the samples")
    elif Path(rows).suffix.lower() == ".npy":
        samples = sample_tensor(_array_in(Path(rows)), f"{rows}")
    else:
        path = Path(rows)
        images = [file for file in visible_files(path) if file.suffix.lower() in IMAGE_SUFFIXES] if path.is_dir() else [path]
        is_table = not images or path.suffix.lower() == ".parquet"  # then images are cells of Parquet files, without names of their own
        files = [] if is_table else [str(file.relative_to(path) if path.is_dir() else file.name) for file in images]
        samples = read_new_images(path, None if is_table else images, "L" if shape[:1] == (1,) else "RGB")
    if tuple(samples.shape[1:]) != shape:
        raise DataError(
            f"each of the {len(samples):,} samples has the shape {tuple(samples.shape[1:])}, but the model takes {shape}: convert them to "
            "that shape (for images: channels, height, width). If the model takes features (data.features), load its module with "
            "ldpfl.load_model and pass the features to it"
        )
    return samples, files


def _array_in(path: Path) -> NDArray[Any]:
    """Return the array in the ``.npy`` file at ``path``. Pickled objects, which could run code, are refused."""
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array of numbers: expected a file that numpy.save wrote") from error
    return array


def classify_samples(
    module: nn.Module,
    samples: tuple[Tensor, list[str]],
    scale: tuple[tuple[float, ...], tuple[float, ...]],
    classes: Sequence[str],
    threshold: float | None,
) -> pandas.DataFrame:
    """Return a data frame with each sample's class and the probability of every class. File names, if any, are the first column.

    Args:
        samples: result of :func:`read_samples`.
        scale: mean and standard deviation for normalising pixels.
        classes: names of the outputs.
        threshold: predict the second of two classes wherever its probability is at least this. None predicts the likeliest.

    Raises:
        DataError: the model's number of outputs is not the number of ``classes``.
    """
    inputs, files = samples
    module.eval()
    with torch.no_grad():
        outputs = torch.cat([answers_of(module, normalise(batch, *scale)) for batch in torch.split(inputs, _BATCH_SIZE)]).double()
    if tuple(outputs.shape) != (len(inputs), len(classes)):
        raise DataError(
            f"the model's output for a sample has the shape {tuple(outputs.shape[1:])}, expected {len(classes)} numbers: "
            "use the model of this run"
        )
    chances = outputs.softmax(dim=1)
    predictions = class_predictions("class", classes, chances, most_likely_class(chances, threshold))
    if files:
        predictions.insert(0, "file", [printable(name) for name in files])
    return predictions
