"""Read a user's own images with their classes: from a folder by class, or from a data set in the hub's layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.folders import visible_files
from ldpfl.data.from_table import names_of_persons
from ldpfl.data.persons import Names, client_name
from ldpfl.data.samples import Samples
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import SUFFIXES, table_from_frame
from ldpfl.data.targets import MOST_CLASSES
from ldpfl.errors import ConfigError, DataError, listed_names
from ldpfl.util.suggestions import did_you_mean

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""

_EIGHT_BIT_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"))
"""Pillow's modes with at most 8 bits. Values of other modes would be cut off at 255."""

_GREY_MODES = frozenset(("1", "L", "LA", "La"))
"""Modes with one grey value, with or without an alpha channel."""


@dataclass(frozen=True)
class Pictures:
    """Images with their classes.

    Attributes:
        parts: train samples, and test samples if there are any.
        classes: names of the classes; empty if the data have only numbers.
        owners: (N,) name of each train sample's client, if the data name clients.
        persons: for each part, the name of each sample's person, if ``data.person`` names a column; empty for test samples without names.
        unused: columns of the file that describes the images which no setting names.
        identities: (N,) hash of the name of each train image's file; None if the images are not separate files.
    """

    parts: tuple[Samples, ...]
    classes: tuple[str, ...]
    owners: tuple[str, ...] | None
    persons: list[Names] | None
    unused: tuple[str, ...]
    identities: NDArray[np.uint64] | None


def holds_images(path: Path) -> bool:
    """Return whether ``path`` holds images: as files in a folder, or in Parquet files as in the hub's data sets."""
    import pyarrow
    from pyarrow import parquet

    # A table called metadata describes images, so it is not taken for the data.
    files = [file for file in visible_files(path) if file.stem != "metadata"] if path.is_dir() else [path]
    if path.is_dir() and any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        table = next((file for file in files if file.suffix.lower() in SUFFIXES), None)
        if table is not None:
            raise ConfigError(
                f"{path} contains images and also the table {table.relative_to(path)}: if it describes the images, call it metadata.csv "
                "and add a column file_name. To use the table instead of the images, name the table's file"
            )
        return True
    first = next((file for file in files if file.suffix.lower() == ".parquet"), None)
    try:
        schema = [] if first is None else parquet.read_schema(first)
    except (OSError, pyarrow.ArrowException):
        return False  # the error is raised when the table is read
    return any(pyarrow.types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type} for field in schema)


def read_pictures(splits: Mapping[str, Any], config: DataConfig, origin: str) -> Pictures:
    """Return the images of ``splits``, train and possibly test, with their classes, and with their clients if ``config`` names a column.

    ``origin`` is the path or hub id of the data, for messages.

    Raises:
        ConfigError: a named column is missing.
        DataError: an image or a class does not fit.
    """
    import datasets

    image = image_column(splits["train"]) or ""
    label = _label_column(splits["train"], image, config, origin)
    feature = splits["train"].features[label]
    found = feature.names if isinstance(feature, datasets.ClassLabel) else ()
    class_names = tuple(config.classes) or tuple(dict.fromkeys(normalize("NFC", name) for name in found))  # macOS writes names as NFD
    targets: list[Tensor] = []
    for split in splits.values():
        # The train split comes first, and the classes found there number those of the test split.
        numbers, class_names = _number_labels(_labels(split, label, origin), class_names, origin)
        targets.append(torch.tensor(numbers, dtype=torch.int64))
    inputs = [read_pixels(split, image_column(split) or image, origin) for split in splits.values()]
    channels = max(images.shape[1] for images in inputs)  # a grey split beside a coloured one gets three equal channels
    parts = [Samples(images.expand(-1, channels, -1, -1).contiguous(), numbers) for images, numbers in zip(inputs, targets, strict=True)]
    owners = _client_names(splits["train"], image, label, config)
    are_files = bool(config.path) and splits["train"].info.builder_name == "imagefolder"
    # Persons' names decide all that files' names decide otherwise.
    identities = _identities(splits["train"], image, Path(config.path).absolute()) if are_files and not config.person else None
    persons = _persons(splits, label, config)
    used = {image, label, config.client, config.person}
    unused = tuple(name for name in splits["train"].column_names if name not in used) if are_files else ()
    return Pictures(tuple(parts), class_names, owners, persons, unused, identities)


def _persons(splits: Mapping[str, Any], label: str, config: DataConfig) -> list[Names] | None:
    """Return the name of each image's person by the column ``data.person``, one array for each split; None if it is not set."""
    if not config.person:
        return None
    described = [split.remove_columns(image_column(split)).to_pandas() for split in splits.values()]
    tables = [table_from_frame(frame, "the description of the images") for frame in described]
    return names_of_persons(tables, config.model_copy(update={"target": label}))


def _identities(split: Any, image: str, root: Path) -> NDArray[np.uint64]:
    """Return a hash (N,) of the path of each image below ``root``, without the innermost folder, which may be its class.

    The hashes decide which images are test images and which client gets an image. Positions must not decide, because files come sorted by
    class: the class of one image would affect the positions of others.
    """
    import datasets

    paths = [Path(file["path"]) for file in split.cast_column(image, datasets.Image(decode=False))[image]]
    return np.array([_identity(path, root) for path in paths], dtype=np.uint64)


def _identity(path: Path, root: Path) -> int:
    """Return 64 bits of the hash of one image's path below ``root``, without the innermost folder, which may be its class."""
    below_root = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    name = "/".join([*below_root.parts[:-2], below_root.name])
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])


def image_column(split: Any) -> str | None:
    """Return the name of the first column of images; None if there is none."""
    import datasets

    return next((column for column, kind in split.features.items() if isinstance(kind, datasets.Image)), None)


def _label_column(split: Any, image: str, config: DataConfig, origin: str) -> str:
    """Return the column of the classes: ``data.target``, or else the first column beside ``image`` with "label" in its name."""
    names = [name for name in split.column_names if name != image]
    if not names and config.path:
        raise DataError(
            f"the images of {origin!r} have no class: put the images of each class into a separate folder, at least two folders"
        )
    target = config.target if isinstance(config.target, str) else ""
    label = target or next((name for name in names if "label" in name), "")
    if label not in names:
        columns = ", ".join(names)
        raise DataError(
            f"data set {origin!r} has no column {label or 'label'!r}: set data.target to the column of classes, one of {columns}"
        )
    return label


def read_pixels(split: Any, image: str, origin: str, mode: str = "") -> Tensor:
    """Return all images as uint8: (N, 3, H, W), or (N, 1, H, W) if the ``mode`` is "L" for grey values.

    Without a ``mode``, images are grey if all files are grey, and else have three channels.

    Raises:
        DataError: an image cannot be decoded, has more than 8 bits, or has another size than the first.
    """
    arrays: list[NDArray[np.uint8]] = []
    for row in range(len(split)):
        try:
            picture = split[row][image]
            file_mode = picture.mode
            array = np.atleast_3d(np.asarray(picture.convert(mode or ("L" if file_mode in _GREY_MODES else "RGB"))))
        except Exception as error:  # Pillow and the library raise many kinds
            kind = type(error).__name__
            raise DataError(f"{_place_of_image(split, image, row, origin)} cannot be decoded ({kind}): replace it, or remove it") from error
        if file_mode not in _EIGHT_BIT_MODES:
            problem = f"has values of more than 8 bits (mode {file_mode}): convert all images to 8 bits, with one scale for all"
            raise DataError(f"{_place_of_image(split, image, row, origin)} {problem}")
        arrays.append(array)
        if array.shape[:2] != arrays[0].shape[:2]:
            (height, width), (first_height, first_width) = array.shape[:2], arrays[0].shape[:2]
            first = _place_of_image(split, image, row=0, origin=origin)
            problem = f"has {width} x {height} pixels, and {first} has {first_width} x {first_height}: resize all images to one size"
            raise DataError(f"{_place_of_image(split, image, row, origin)} {problem}")
    channels = max(array.shape[2] for array in arrays)
    same_shape = [np.broadcast_to(array, (*array.shape[:2], channels)) for array in arrays]  # grey images get three equal channels
    return torch.from_numpy(np.ascontiguousarray(np.stack(same_shape).transpose(0, 3, 1, 2)))


def _place_of_image(split: Any, image: str, row: int, origin: str) -> str:
    """Return the place of the image in the row ``row``, from 0, for a message: its file, or its row in a Parquet file."""
    import datasets

    path = split.cast_column(image, datasets.Image(decode=False))[row][image]["path"]
    return f"the image {path}" if path else f"the image in row {row + 1:,} of {origin!r}"


def _labels(split: Any, label: str, origin: str) -> list[Any]:
    """Return the label of each image: the class's name if classes have names, since another folder may number its classes differently."""
    import datasets

    if label not in split.column_names:
        raise DataError(f"the test images of {origin!r} have no column {label!r}, which the training images have: add it")
    feature, labels = split.features[label], list(split[label])
    if not isinstance(feature, datasets.ClassLabel):
        return labels
    unnamed = [row for row, number in enumerate(labels, start=1) if number is None or not 0 <= number < len(feature.names)]
    if unnamed:
        raise DataError(f"the image in row {unnamed[0]:,} of {origin!r} has no class: give it one, or leave it out")
    return [feature.int2str(number) for number in labels]


def _number_labels(labels: list[Any], classes: Sequence[str], origin: str) -> tuple[list[int], tuple[str, ...]]:
    """Return ``labels``, words or whole numbers, as numbers from 0, and the names of the classes; no names if labels are such numbers.

    Whole numbers that do not begin at 0, or of which more than half are missing, are codes, and so names.

    Args:
        classes: the known names, empty if the data define them.
    """
    wrong_kinds = [type(label).__name__ for label in labels if not isinstance(label, str | int)]
    if wrong_kinds:
        raise DataError(
            f"an image of {origin!r} has a class of the type {wrong_kinds[0]}, expected a word or a whole number for each image"
        )
    if not classes and all(isinstance(label, int) for label in labels):
        if not 0 <= min(labels) <= max(labels) < MOST_CLASSES:
            raise DataError(f"some classes of {origin!r} are not whole numbers from 0 to {MOST_CLASSES - 1}: correct them")
        found = sorted(set(labels))
        if found[0] == 0 and 2 * len(found) > found[-1]:
            return labels, ()
        classes = [str(code) for code in found]
    words = [normalize("NFC", str(label)) for label in labels]
    number_of: Mapping[str, int] = {word: number for number, word in enumerate(classes or sorted(set(words)))}
    unknown = [row for row, word in enumerate(words, start=1) if word not in number_of]
    if unknown:
        expected = listed_names(number_of, 10)
        raise DataError(f"the image in row {unknown[0]:,} of {origin!r} has an unknown class, expected one of {expected}: correct it")
    return [number_of[word] for word in words], tuple(number_of)


def _client_names(split: Any, image: str, label: str, config: DataConfig) -> tuple[str, ...] | None:
    """Return the name of each image's client by the column ``data.client``; None if it is not set."""
    if not config.client:
        return None
    if config.client == label:
        raise ConfigError(
            f"data.client and data.target both name {label!r}, but the client of an image is public and its class is not: name another "
            "column in one of them"
        )
    names = [name for name in split.column_names if name != image]
    if config.client not in names:
        raise ConfigError(f"data.client names {config.client!r}, but there is no such column: {did_you_mean(config.client, names)}")
    owners = list(split[config.client])
    unnamed = [row for row, owner in enumerate(owners, start=1) if owner is None or str(owner) == ""]
    if unnamed:
        row = unnamed[0]
        raise DataError(f"the image in row {row:,} has no client: fill in its {config.client!r} (data.client), or leave the image out")
    return tuple(client_name(str(owner)) for owner in owners)
