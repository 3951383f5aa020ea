"""Read a user's own images with their classes: from a folder by class, or from a data set in the hub's layout."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.folders import visible_files
from ldpfl.data.samples import Samples
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import SUFFIXES
from ldpfl.data.targets import MOST_CLASSES
from ldpfl.errors import ConfigError, DataError
from ldpfl.util.suggestions import did_you_mean

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""

_EIGHT_BITS = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"))
"""Pillow's modes with at most 8 bits. Values of other modes would be cut off at 255."""

_GREY = frozenset(("1", "L", "LA", "La"))
"""Modes with one grey value, with or without an alpha channel."""


@dataclass(frozen=True)
class Pictures:
    """Images with their classes.

    Attributes:
        parts: train samples, and test samples if there are any.
        classes: names of the classes; empty if the data have only numbers.
        owners: (N,) name of each train sample's client, if the data name clients.
        identities: (N,) hash of the name of each train image's file; None if the images are not separate files.
    """

    parts: tuple[Samples, ...]
    classes: tuple[str, ...]
    owners: tuple[str, ...] | None
    identities: NDArray[np.uint64] | None


def holds_images(path: Path) -> bool:
    """Return whether ``path`` holds images: as files in a folder, or in Parquet files as in the hub's data sets."""
    import pyarrow
    from pyarrow import parquet

    files = [file for file in visible_files(path) if file.stem != "metadata"] if path.is_dir() else [path]
    if path.is_dir() and any(file.suffix.lower() in IMAGES for file in files):
        table = next((file for file in files if file.suffix.lower() in SUFFIXES), None)
        if table is not None:
            raise ConfigError(
                f"{path} holds images, and the table {table.relative_to(path)}: columns about images belong in metadata.csv, with a "
                "column file_name; to use the table and not the images, name the table's file"
            )
        return True
    first = next((file for file in files if file.suffix.lower() == ".parquet"), None)
    try:
        schema = [] if first is None else parquet.read_schema(first)
    except (OSError, pyarrow.ArrowException):
        return False  # the error is raised when the table is read
    return any(pyarrow.types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type} for field in schema)


def pictures(splits: Mapping[str, Any], config: DataConfig, origin: str) -> Pictures:
    """Return the images of ``splits`` train and, if it is there, test, with their classes and owners as ``config`` names them.

    Raises:
        ConfigError: a named column is missing.
        DataError: an image or a class does not fit.
    """
    import datasets

    image = image_column(splits["train"]) or ""
    label = _label_column(splits["train"], image, config, origin)
    feature = splits["train"].features[label]
    named = tuple(config.classes) or (tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ())
    classes: list[Tensor] = []
    for split in splits.values():
        told, named = _numbered(_labels(split, label, origin), named, origin)
        classes.append(torch.tensor(told, dtype=torch.int64))
    inputs = [pixels(split, image_column(split) or image, origin) for split in splits.values()]
    channels = max(own.shape[1] for own in inputs)
    parts = [Samples(own.expand(-1, channels, -1, -1).contiguous(), told) for own, told in zip(inputs, classes, strict=True)]
    owners = _owners(splits["train"], image, label, config)
    files = bool(config.path) and splits["train"].info.builder_name == "imagefolder"
    return Pictures(tuple(parts), named, owners, _identities(splits["train"], image, Path(config.path).absolute()) if files else None)


def _identities(split: Any, image: str, root: Path) -> NDArray[np.uint64]:
    """Return a hash for each image of its path below ``root``, without the innermost folder, which may be its class.

    Files come sorted by path, and so by class. If positions decided on test images and clients, the class of one image would affect
    others.
    """
    import datasets

    paths = [Path(one["path"]) for one in split.cast_column(image, datasets.Image(decode=False))[image]]
    return np.array([_identity(path, root) for path in paths], dtype=np.uint64)


def _identity(path: Path, root: Path) -> int:
    own = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    name = "/".join([*own.parts[:-2], own.name])
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])


def image_column(split: Any) -> str | None:
    import datasets

    return next((column for column, kind in split.features.items() if isinstance(kind, datasets.Image)), None)


def _label_column(split: Any, image: str, config: DataConfig, origin: str) -> str:
    names = [name for name in split.column_names if name != image]
    if not names and config.path:
        raise DataError(f"the images of {origin!r} have no class: put those of each class into a folder of its own, of two classes or more")
    named = config.target if isinstance(config.target, str) else ""
    label = named or next((name for name in names if "label" in name), "")
    if label not in names:
        known = ", ".join(names)
        raise DataError(f"data set {origin!r} has no column {label or 'label'!r}: name the label's in data.target; it has {known}")
    return label


def pixels(split: Any, image: str, origin: str, mode: str = "") -> Tensor:
    """Return all images as uint8: (N, 3, H, W), or (N, 1, H, W) if the ``mode`` is "L" for grey values.

    Without a ``mode``, images are grey if all files are grey, and else have three channels.

    Raises:
        DataError: an image cannot be decoded, has more than 8 bits, or has another size than the first.
    """
    arrays: list[NDArray[np.uint8]] = []
    for place in range(len(split)):
        try:
            picture = split[place][image]
            own = picture.mode
            array = np.atleast_3d(np.asarray(picture.convert(mode or ("L" if own in _GREY else "RGB"))))
        except Exception as error:  # Pillow and the library raise many kinds
            why = type(error).__name__
            raise DataError(f"{_place(split, image, place, origin)} cannot be decoded ({why}): mend it, or take it out") from error
        if own not in _EIGHT_BITS:
            more = f"has values of more than 8 bits (mode {own}): bring all to 8 bits, by the same rule"
            raise DataError(f"{_place(split, image, place, origin)} {more}")
        arrays.append(array)
        if array.shape[:2] != arrays[0].shape[:2]:
            (height, width), (high, wide) = array.shape[:2], arrays[0].shape[:2]
            first = _place(split, image, 0, origin)
            sizes = f"has {width} x {height} pixels, and {first} has {wide} x {high}: bring all to one size"
            raise DataError(f"{_place(split, image, place, origin)} {sizes}")
    channels = max(array.shape[2] for array in arrays)
    alike = [np.broadcast_to(array, (*array.shape[:2], channels)) for array in arrays]
    return torch.from_numpy(np.ascontiguousarray(np.stack(alike).transpose(0, 3, 1, 2)))


def _place(split: Any, image: str, place: int, origin: str) -> str:
    """Return the place of an image for a message: its file, or its row in a Parquet file."""
    import datasets

    path = split.cast_column(image, datasets.Image(decode=False))[place][image]["path"]
    return f"the image {path}" if path else f"the image in row {place + 1:,} of {origin!r}"


def _labels(split: Any, label: str, origin: str) -> list[Any]:
    """Return the label of each image, by name if there are names, since another folder may number its classes differently."""
    import datasets

    if label not in split.column_names:
        raise DataError(f"the test images of {origin!r} have no column {label!r}")
    feature, told = split.features[label], list(split[label])
    if not isinstance(feature, datasets.ClassLabel):
        return told
    if any(one is None or not 0 <= one < len(feature.names) for one in told):
        row = next(row for row, one in enumerate(told, start=1) if one is None or not 0 <= one < len(feature.names))
        raise DataError(f"the image in row {row:,} of {origin!r} has no class: leave such images out")
    return [feature.int2str(one) for one in told]


def _numbered(told: list[Any], classes: Sequence[str], origin: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the labels ``told`` as numbers, and the name of each number. Labels are words or whole numbers."""
    odd = next((one for one in told if not isinstance(one, str | int)), "")
    if odd != "":
        raise DataError(f"an image of {origin!r} has a class of the kind {type(odd).__name__}: each has one, a word or a whole number")
    if not classes and all(isinstance(one, int) for one in told):
        if not 0 <= min(told) <= max(told) < MOST_CLASSES:
            raise DataError(f"classes of {origin!r} are whole numbers from 0 to {MOST_CLASSES - 1}, and some are others")
        return told, ()
    words = [str(one) for one in told]
    places: Mapping[str, int] = {word: place for place, word in enumerate(classes or sorted(set(words)))}
    odd = next((word for word in words if word not in places), None)
    if odd is not None:
        raise DataError(f"a class of {origin!r} is not among {', '.join(list(places)[:10])}")
    return [places[word] for word in words], tuple(places)


def _owners(split: Any, image: str, label: str, config: DataConfig) -> tuple[str, ...] | None:
    if not config.client:
        return None
    if config.client == label:
        raise ConfigError(f"data.client and data.target both name {label!r}: clients are public, so the target would be public too")
    names = [name for name in split.column_names if name != image]
    if config.client not in names:
        raise ConfigError(f"data.client names no column {config.client!r}: {did_you_mean(config.client, names)}")
    owners = list(split[config.client])
    if any(owner is None or str(owner) == "" for owner in owners):
        row = next(row for row, owner in enumerate(owners, start=1) if owner is None or str(owner) == "")
        raise DataError(f"the image in row {row:,} has no client: {config.client!r} is empty there; say whose it is, or leave it out")
    return tuple(map(str, owners))
