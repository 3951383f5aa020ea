"""Features of a whole data set, computed once and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.registry import NONE, feature_map, is_cacheable
from ldpfl.data.samples import Dataset, Samples
from ldpfl.errors import ConfigError, PrivacyError
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
    digest: str = "",
    keep: bool = True,
    write_cache: bool = True,
) -> Dataset:
    """Return ``dataset`` with its samples' features in their place, float32; ``name`` "none" leaves it as it is.

    Features are rounded to float16, whether they come from the cache or not. With ``keep`` they are kept there, for this user alone;
    those by import path are computed anew each time: their code may have changed. Parts are kept while they are computed, so that a
    run that was stopped goes on where it was. Without ``write_cache`` they are only read from there.

    Args:
        digest: SHA-256 that frozen weights must have; "" allows any.

    Raises:
        ConfigError: the name or an option is unknown, these samples have no such features, or the weights are others.
        PrivacyError: features of a sample depend on others.
    """
    if name == NONE:
        return dataset
    chosen = feature_map(name, options)
    if digest and chosen.digest != digest:
        raise ConfigError(
            f"features {name!r} are computed by other weights than those of the terms: their SHA-256 is {chosen.digest[:16]}, expected "
            f"{digest[:16]}: get the weights that the server uses"
        )
    dataset = chosen.prepared(dataset)
    chosen.shape(dataset.shape)
    if is_code(name):
        _check_apart(name, chosen, dataset)
    key = f"{name} {json.dumps(dict(options), sort_keys=True)} {_VERSION}{chosen.digest}"
    fingerprint = hashlib.sha256(f"{dataset.fingerprint} {key}".encode()).hexdigest()[:16]
    file = f"{dataset.name}-{_NOT_IN_FILES.sub('-', name)}-{fingerprint}.safetensors"
    path = cache_dir() / "features" / file if keep and is_cacheable(name) else None
    tensors = _kept(path, dataset, chosen) if path else None
    if tensors is None:
        kept = path if write_cache else None
        tensors = _computed(dataset, name, chosen, progress, kept)
        if kept:
            write_cached(kept, tensors, "features", warn)
            for part in kept.parent.glob(f"{kept.stem}.*.part"):
                part.unlink(missing_ok=True)
    train, test = (Samples(tensors[split].float(), getattr(dataset, split).targets) for split in ("train", "test"))
    notes = [chosen.note] if chosen.note else []
    return replace(dataset, train=train, test=test, fingerprint=fingerprint, vocabulary=None, encoder=None).noted(*notes)


_NOT_IN_FILES = re.compile(r"[^\w.-]+")


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


_IN_A_PART = 128 * _AT_ONCE
"""Samples whose features are kept together while others are still to be computed."""


def _computed(dataset: Dataset, name: str, chosen: FeatureMap, progress: Progress, kept: Path | None) -> dict[str, Tensor]:
    """Return the features of each split. Parts of the file ``kept`` that an earlier run left beside it are not computed again."""
    total, done = len(dataset.train) + len(dataset.test), 0
    found: dict[str, Tensor] = {}
    for split in ("train", "test"):
        inputs = getattr(dataset, split).tensor
        rows = torch.empty(len(inputs), *chosen.shape(dataset.shape), dtype=torch.float16)
        for first in range(0, len(inputs), _IN_A_PART):
            part = rows[first : first + _IN_A_PART]
            path = kept.with_suffix(f".{split}-{first}.part") if kept else None
            earlier = (read_cached(path, "features") or {}).get("rows") if path else None
            if earlier is not None and earlier.shape == part.shape:
                part[:] = earlier
                done += len(part)
                progress(f"features {name}", done, total)
                continue
            for start in range(0, len(part), _AT_ONCE):
                made = chosen(inputs[first + start : first + min(start + _AT_ONCE, len(part))]).half()
                # A sample that has no features counts as one of zeros: were it to stop a client, that would tell of it.
                part[start : start + _AT_ONCE] = made.where(torch.isfinite(made), 0.0)
                done += len(made)
                progress(f"features {name}", done, total)
            if path and len(rows) > _IN_A_PART:
                write_cached(path, {"rows": part.clone()}, "features", _say_nothing)
        found[split] = rows
    return found


def _say_nothing(message: str) -> None:
    """Leave the warning that the cache cannot be written to the write of all features together."""


def _kept(path: Path, dataset: Dataset, chosen: FeatureMap) -> dict[str, Tensor] | None:
    """Return the features in the cache, if they are there and of these samples."""
    tensors = read_cached(path, "features") or {}
    shapes = {split: (len(getattr(dataset, split)), *chosen.shape(dataset.shape)) for split in ("train", "test")}
    fits = all(split in tensors and tuple(tensors[split].shape) == shape for split, shape in shapes.items())
    return tensors if fits else None
