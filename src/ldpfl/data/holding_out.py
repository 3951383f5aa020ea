"""Split off samples that are not trained on: for testing, for choosing hyper-parameters, or for early stopping.

Positions, or the names of files or persons, decide which samples these are. So the content of one sample never affects another sample's
split. All samples of one person are in the same split, at every client, because only the person's name and a public label decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import replace
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.division import Division
from ldpfl.data.persons import Names, uniform_by_name
from ldpfl.data.samples import Dataset, Samples
from ldpfl.data.tables import as_text
from ldpfl.errors import ConfigError
from ldpfl.util.randomness import Purpose, stream

TEST_SHARE = 5
"""One row in 5 of the user's own data is a test row if no test data are given."""

_HOLDOUT_SHARE = 0.1
_IDENTITY_DIVISOR = 1_000_003
"""The holdout uses a file's identity divided by this prime, so that it is independent of the test split by the remainder."""


def held_out(rows: int, share: int = TEST_SHARE) -> NDArray[np.bool_]:
    """Return a mask (rows,) of the test rows of a table with ``rows`` rows: one in ``share``, rounded down.

    A run without ``data.test_path`` is tested on these rows. Row numbers, from 0, are sorted by the SHA-256 of their decimal digits, and
    the first ones are taken. So no row's content affects another row's split. Taking every fifth row would not do: rows may be periodic.
    """
    chosen = np.zeros(rows, dtype=bool)
    chosen[_hash_order(rows)[: rows // share]] = True
    return chosen


def _hash_order(count: int) -> NDArray[np.int64]:
    """Return the numbers below ``count``, sorted by the SHA-256 of their decimal digits."""
    return np.array(sorted(range(count), key=lambda number: hashlib.sha256(b"%d" % number).digest()), dtype=np.int64)


def held_back(parts: Division, share: float) -> tuple[Division, Division]:
    """Return each client's training samples, and the ``share`` of its samples, rounded down, that it holds back for evaluation.

    The position of a sample within its client decides, by the order of the SHA-256 of the position's digits, as in :func:`held_out`.
    """
    order_by_size: dict[int, NDArray[np.int64]] = {}
    train_parts, held_parts = [], []
    for indices in parts:
        size = indices.size
        if size not in order_by_size:
            order_by_size[size] = _hash_order(size)
        count = int(size * share)
        held_parts.append(indices[np.sort(order_by_size[size][:count])])
        train_parts.append(indices[np.sort(order_by_size[size][count:])])
    return Division.of(train_parts), Division.of(held_parts)


def held_back_by_name(parts: Division, names: Names, share: float) -> tuple[Division, Division]:
    """Return each client's training samples, and the samples of about a ``share`` of all persons or files, which are held back.

    The indices in ``parts`` are those of persons or files, and ``names`` (P,) holds their names. A name alone decides.
    """
    chosen = uniform_by_name(names, "evaluation") < share
    return Division.of([part[~chosen[part]] for part in parts]), Division.of([part[chosen[part]] for part in parts])


def held_out_by_person(persons: Iterable[Hashable]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the test rows of a run with ``data.person``: all rows of about one in :data:`TEST_SHARE` persons.

    ``persons`` (N,) names the person of each row. That name alone decides.
    """
    return uniform_by_name((normalize("NFC", as_text(name)) for name in persons), "test") < 1 / TEST_SHARE


def held_out_by_name(identities: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the test samples, about one in :data:`TEST_SHARE`. Each file's name alone decides, through its identity."""
    return np.asarray(identities % np.uint64(TEST_SHARE) == 0)


def without_a_tenth(dataset: Dataset, seed: int) -> Dataset:
    """Return ``dataset`` with a tenth of its training samples as its test samples, for choosing hyper-parameters.

    Where the names of files or persons decide, it is about a tenth of the files or persons.

    Raises:
        ConfigError: none or all of the files or persons would be set aside.
    """
    shuffled = torch.from_numpy(stream(seed, Purpose.HOLDOUT).permutation(len(dataset.train)).astype(np.int64))
    count = int(len(dataset.train) * _HOLDOUT_SHARE)
    train_indices, held_indices = shuffled[count:], shuffled[:count]
    if (chosen := _tenth_by_name(dataset)) is not None:
        if not chosen.any() or chosen.all():
            kind = "files" if dataset.persons is None else "persons"
            raise ConfigError(
                f"data.evaluate_on = 'holdout' sets about a tenth of the {kind} aside, chosen by name, but here that is "
                f"{'every one' if chosen.any() else 'none'}: use more {kind}, or set data.evaluate_on to 'test'"
            )
        train_indices, held_indices = torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen))
    rows, held_rows = train_indices.numpy(), held_indices.numpy()
    by_sample = (dataset.clients, dataset.persons, dataset.identities)
    clients, persons, identities = (None if array is None else array[rows] for array in by_sample)
    held_clients, held_persons = (None if array is None else array[held_rows] for array in by_sample[:2])
    train, test = dataset.train.take(train_indices), dataset.train.take(held_indices)
    return replace(
        dataset,
        train=train,
        test=test,
        clients=clients,
        test_clients=held_clients,
        identities=identities,
        persons=persons,
        test_persons=held_persons,
    )


def _tenth_by_name(dataset: Dataset) -> NDArray[np.bool_] | None:
    """Return a mask of the training samples to set aside by the names of their persons or files; None if the data have no such names."""
    if dataset.persons is not None:
        return uniform_by_name(dataset.persons, "holdout") < _HOLDOUT_SHARE
    if dataset.identities is not None:
        return np.asarray(dataset.identities // np.uint64(_IDENTITY_DIVISOR) % np.uint64(round(1 / _HOLDOUT_SHARE)) == 0)
    return None


def with_validation(dataset: Dataset, share: float) -> tuple[Dataset, Samples | None]:
    """Split off the ``share`` of the test samples that decides on early stopping. Return ``dataset`` without them, and these samples.

    For a ``share`` of 0 the second result is None.

    Raises:
        ConfigError: there are too few test samples for both parts.
    """
    if share == 0:
        return dataset, None
    if dataset.test_persons is None:
        positions = torch.arange(len(dataset.test) + 1, dtype=torch.float64)
        chosen = (positions * share).floor().diff() > 0  # at even distances, since test rows may be sorted
    else:
        chosen = torch.from_numpy(uniform_by_name(dataset.test_persons, "validation") < share)
    if not chosen.any() or chosen.all():
        raise ConfigError(
            f"data.validation = {share:g} takes {int(chosen.sum())} of {len(dataset.test)} test rows, but both parts need at least one: "
            "change data.validation, or add test rows"
        )
    clients, persons = (None if array is None else array[~chosen.numpy()] for array in (dataset.test_clients, dataset.test_persons))
    remaining = replace(dataset, test=dataset.test.take(~chosen), test_clients=clients, test_persons=persons)
    return remaining, dataset.test.take(chosen)
