"""Features of a whole data set, computed once and kept in the user's cache folder."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldpfl.data.dataset import Dataset
from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.registry import NONE, feature_map, is_cacheable, names
from ldpfl.data.samples import Samples
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.util.side_effects import OutsideState
from ldpfl.util.user_cache import Warn, cache_dir, read_cached, write_cached

Progress = Callable[[str, int, int], None]
"""Called with (what is computed and whether it is stored, samples done, samples in all)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Report no progress."""


_BATCH_SIZE = 16
"""Number of samples that go through a network together. Small batches stay in a core's cache, and so they are faster."""


def extracted(
    dataset: Dataset,
    name: str,
    options: Mapping[str, Any],
    warn: Warn,
    progress: Progress = no_progress,
    *,
    digest: str = "",
    keep: bool = True,
    write_cache: bool = True,
) -> Dataset:
    """Return ``dataset`` with features, float32, instead of its samples. For the ``name`` "none" it is returned unchanged.

    Features are rounded to float16, whether they come from the cache or not. Features by import path are computed each time, since their
    code may have changed. A run that was stopped finds the parts that it had computed in the cache.

    Args:
        name, options: as for :func:`feature_map`.
        warn: called if the cache cannot be written.
        digest: SHA-256 that frozen weights must have; "" allows any.
        keep: whether the user's cache is used. Features by import path never use it.
        write_cache: whether new features are written to the cache, if it is used. Otherwise it is only read.

    Raises:
        ConfigError: the name or an option is unknown, the features do not fit the samples, or the weights have another digest.
        PrivacyError: the features of a sample depend on other samples.
    """
    if name == NONE:
        return dataset
    features = feature_map(name, options)
    if digest and features.digest != digest:
        raise ConfigError(
            f"the weights of features {name!r} here have the SHA-256 {features.digest[:16]}, but this run uses weights with {digest[:16]} "
            "(data.features_digest): get those weights"
        )
    dataset = features.prepared(dataset)
    features.shape(dataset.shape)  # raises if they do not fit
    if name not in names():  # code of others, or a network by its name
        _check_independence(name, features, dataset)
    key = f"{name} {json.dumps(dict(options), sort_keys=True)} {_VERSION}{features.digest}"
    fingerprint = hashlib.sha256(f"{dataset.fingerprint} {key}".encode()).hexdigest()[:16]
    file = f"{dataset.name}-{_NOT_IN_FILE_NAMES.sub('-', name)}-{fingerprint}.safetensors"
    path = cache_dir() / "features" / file if keep and is_cacheable(name) else None
    tensors = _read_cache(path, dataset, features) if path else None
    if tensors is None:
        cache_file = path if write_cache else None
        tensors = _computed(dataset, name, features, progress, cache_file)
        if cache_file:
            write_cached(cache_file, tensors, "features", warn)
            for part in cache_file.parent.glob(f"{cache_file.stem}.*.part"):
                part.unlink(missing_ok=True)
    train, test = (Samples(tensors[split].float(), getattr(dataset, split).targets) for split in ("train", "test"))
    notes = [features.note] if features.note else []
    classes = dataset.classes if dataset.encoder is None else dataset.encoder.classes  # kept, since the encoder is dropped
    with_features = replace(dataset, train=train, test=test, fingerprint=fingerprint, vocabulary=None, encoder=None, classes=classes)
    return with_features.with_notes(*notes)


_NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]+")


def _check_independence(name: str, features: FeatureMap, dataset: Dataset) -> None:
    """Raise if a sample's ``features`` depend on the other samples of a batch. Then one record would change the features of others.

    The check uses a batch of five made-up samples. The first, the middle and the last one are replaced in turn by a far larger sample. The
    features of the other four must not change.

    Raises:
        PrivacyError: they change, and no mechanism randomises that.
    """
    inputs, generator = dataset.train.tensor, torch.Generator().manual_seed(0)
    uniform = torch.rand(6, *inputs.shape[1:], generator=generator)
    if tokens := dataset.tokens():
        uniform *= tokens  # cut to whole numbers below, which are tokens of the vocabulary
    else:  # a scale that a whole batch shares, as in quantisation, shows only beside an outlier
        uniform[5] *= _OUTLIER_FACTOR
        if not inputs.is_floating_point():
            uniform *= 256 / _OUTLIER_FACTOR  # bytes: the outlier's are below 256, the others' below 16
    samples = uniform.to(inputs.dtype)
    batch, replacement = samples[:5], samples[5]
    before = features(batch).nan_to_num()  # NaN would not be equal to itself
    for replaced in (0, 2, 4):
        is_other = torch.arange(5) != replaced
        changed_batch = batch.clone()
        changed_batch[replaced] = replacement
        after = features(changed_batch).nan_to_num()
        if not torch.equal(before[is_other], after[is_other]):
            problem = f"features {name!r} of one sample change with the other samples of its batch, so a record would affect others"
            raise PrivacyError(f"{problem}: let forward treat each sample by itself (does it use batch statistics?)")


_OUTLIER_FACTOR = 16
"""Factor by which one made-up sample is larger than others. Bytes hold 256 values, so with a larger factor others would nearly be 0."""

_VERSION = 2
"""Version of the features, a part of the cache's key. Raise it if features change, so that old ones are not read from the cache."""

_PART_SIZE = 128 * _BATCH_SIZE
"""Number of samples whose features are cached together while the features of others are still being computed."""


def _computed(dataset: Dataset, name: str, features: FeatureMap, progress: Progress, cache_file: Path | None) -> dict[str, Tensor]:
    """Return the computed features (N, ...) float16 by split. Parts are cached beside ``cache_file``, for a run that is stopped.

    One sample must not change the features of another, not even their rounding. Rounding depends on a sample's place in its batch and on
    the batch's length. So all batches are filled up to one length, and a row's place does not depend on other rows. Rows of persons are
    computed one at a time, since the rows of one person would move those of others. So are features by import path. For each sample, their
    module is copied afresh, and what classes and functions keep is reset (:class:`OutsideState` says what it cannot reset).
    """
    is_own_code, outside = not is_cacheable(name), OutsideState.of(features)
    batch_size = 1 if is_own_code or dataset.persons is not None else _BATCH_SIZE
    total, done = len(dataset.train) + len(dataset.test), 0
    work = f"features {name} ({'stored for later runs' if cache_file else 'computed in each run'})"
    by_split: dict[str, Tensor] = {}
    for split in ("train", "test"):
        inputs = getattr(dataset, split).tensor
        rows = torch.empty(len(inputs), *features.shape(dataset.shape), dtype=torch.float16)
        for first in range(0, len(inputs), _PART_SIZE):
            part = rows[first : first + _PART_SIZE]
            path = cache_file.with_suffix(f".{split}-{first}.part") if cache_file else None
            cached = (read_cached(path, "features") or {}).get("rows") if path else None
            if cached is not None and cached.shape == part.shape:
                part[:] = cached
                done += len(part)
                progress(work, done, total)
                continue
            for start in range(0, len(part), batch_size):
                samples = inputs[first + start : first + min(start + batch_size, len(part))]
                if is_own_code:
                    batch = _own_code_features(features, samples, outside)
                else:
                    batch = _filled_up_features(features, samples, batch_size)
                # A feature that is not finite becomes 0. If it were an error, the error would reveal that such a sample exists.
                part[start : start + batch_size] = batch.where(torch.isfinite(batch), 0.0)
                done += len(batch)
                progress(work, done, total)
            if path and len(rows) > _PART_SIZE:  # a single part is cached as the whole, by the caller
                write_cached(path, {"rows": part.clone()}, "features", _ignore_warning)
        by_split[split] = rows
    return by_split


def _own_code_features(features: FeatureMap, sample: Tensor, outside: OutsideState) -> Tensor:
    """Return the features of one ``sample`` (1, ...) float16 by a fresh copy of own code, and reset what its classes and functions keep."""
    with outside.restored():
        return copy.deepcopy(features)(sample).half()


def _filled_up_features(features: FeatureMap, samples: Tensor, batch_size: int) -> Tensor:
    """Return the features of ``samples`` (N, ...) float16, computed in a batch that zeros fill up to ``batch_size``."""
    filling = samples.new_zeros(batch_size - len(samples), *samples.shape[1:])
    return features(torch.cat([samples, filling])).half()[: len(samples)]


def _ignore_warning(message: str) -> None:
    """Ignore the warning that a part cannot be cached. The user is warned once, when all features are cached together."""


def _read_cache(path: Path, dataset: Dataset, features: FeatureMap) -> dict[str, Tensor] | None:
    """Return the features of each split from the cache; None if the cache lacks them or they do not fit the samples."""
    tensors = read_cached(path, "features") or {}
    shapes = {split: (len(getattr(dataset, split)), *features.shape(dataset.shape)) for split in ("train", "test")}
    fits = all(split in tensors and tuple(tensors[split].shape) == shape for split, shape in shapes.items())
    return tensors if fits else None
