"""Features of a whole data set, computed once and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.registry import NONE, feature_map
from ldpfl.data.samples import Dataset, Samples
from ldpfl.errors import PrivacyError
from ldpfl.util.user_cache import Warn, cache_dir, read_cached, write_cached
from ldpfl.util.user_code import is_code

Progress = Callable[[str, int, int], None]
"""Called with (what is computed, samples done, samples in all)."""


def quietly(what: str, done: int, total: int) -> None:
    """Tell nobody."""


_AT_ONCE = 16
"""Samples that go through a network together: small batches stay in a core's cache, which is faster than large ones."""


def extracted(
    dataset: Dataset,
    name: str,
    options: Mapping[str, Any],
    warn: Warn,
    progress: Progress = quietly,
    *,
    keep: bool = True,
    write_cache: bool = True,
) -> Dataset:
    """Return ``dataset`` with its samples' features in their place, float32; ``name`` "none" leaves it as it is.

    Features are rounded to float16, whether they come from the cache or not. With ``keep`` they are kept there, for this user alone;
    those by import path are computed anew each time: their code may have changed. Without ``write_cache`` they are only read from there.

    Raises:
        ConfigError: the name or an option is unknown, or these samples have no such features.
        PrivacyError: features of a sample depend on others.
    """
    if name == NONE:
        return dataset
    chosen = feature_map(name, options)
    chosen.shape(dataset.shape)
    if is_code(name):
        _check_apart(name, chosen, dataset)
    key = f"{name} {json.dumps(dict(options), sort_keys=True)} {_VERSION}"
    fingerprint = hashlib.sha256(f"{dataset.fingerprint} {key}".encode()).hexdigest()[:16]
    path = None if is_code(name) or not keep else cache_dir() / "features" / f"{dataset.name}-{name}-{fingerprint}.safetensors"
    tensors = _kept(path, dataset, chosen) if path else None
    if tensors is None:
        tensors = _computed(dataset, name, chosen, progress)
        if path and write_cache:
            write_cached(path, tensors, "features", warn)
    train, test = (Samples(tensors[split].float(), getattr(dataset, split).targets) for split in ("train", "test"))
    return replace(dataset, train=train, test=test, fingerprint=fingerprint, encoder=None)


def _check_apart(name: str, chosen: FeatureMap, dataset: Dataset) -> None:
    """Return if what ``chosen`` makes of made-up samples does not depend on who is beside them: before, between or after.

    Raises:
        PrivacyError: it does: a record would change the features of others, and no mechanism randomises that.
    """
    inputs, generator = dataset.train.tensor, torch.Generator().manual_seed(0)
    made = torch.rand(6, *inputs.shape[1:], generator=generator)
    made = made.to(inputs.dtype) if inputs.is_floating_point() else (made * (dataset.tokens() or 256)).to(inputs.dtype)
    batch, other = made[:5], made[5]
    before = chosen(batch).nan_to_num()
    for place in (0, 2, 4):
        others = torch.arange(5) != place
        again = chosen(torch.where(others.view(-1, *[1] * (batch.dim() - 1)), batch, other)).nan_to_num()
        if not torch.equal(before[others], again[others]):
            said = f"features {name!r} of a sample depend on those beside it: one record would change others'"
            raise PrivacyError(f"{said} (batch statistics, or samples that are taken for one sequence?)")


_VERSION = 1
"""Of what features are made of; a change makes them anew."""


def _computed(dataset: Dataset, name: str, chosen: FeatureMap, progress: Progress) -> dict[str, Tensor]:
    total, done = len(dataset.train) + len(dataset.test), 0
    found: dict[str, Tensor] = {}
    for split in ("train", "test"):
        inputs = getattr(dataset, split).tensor
        rows = torch.empty(len(inputs), *chosen.shape(dataset.shape), dtype=torch.float16)
        for start in range(0, len(inputs), _AT_ONCE):
            made = chosen(inputs[start : start + _AT_ONCE]).half()
            # A sample that has no features counts as one of zeros: were it to stop a client, that would tell of it.
            rows[start : start + _AT_ONCE] = made.where(torch.isfinite(made), 0.0)
            done += len(made)
            progress(f"features {name}", done, total)
        found[split] = rows
    return found


def _kept(path: Path, dataset: Dataset, chosen: FeatureMap) -> dict[str, Tensor] | None:
    """Return the features in the cache, if they are there and of these samples."""
    tensors = read_cached(path, "features") or {}
    shapes = {split: (len(getattr(dataset, split)), *chosen.shape(dataset.shape)) for split in ("train", "test")}
    fits = all(split in tensors and tuple(tensors[split].shape) == shape for split, shape in shapes.items())
    return tensors if fits else None
