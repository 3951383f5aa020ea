"""Split off samples that are not trained on: for testing, for choosing hyper-parameters, or for early stopping.

Positions, or the names of files or persons, decide which samples these are. So the content of one sample never affects another sample's
split. All samples of one person are in the same split, at every client, because only the person's name and a public label decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.dataset import Dataset
from ldpfl.data.persons import Names, normalise_names, uniform_by_name
from ldpfl.data.samples import Division, Samples
from ldpfl.data.tables import cell_text
from ldpfl.errors import ConfigError
from ldpfl.util.randomness import Purpose, stream

TEST_SHARE = 5
"""One row in 5 of the user's own data is a test row if no test data are given."""

HOLDOUT_SHARE = 0.1
_IDENTITY_DIVISOR = 1_000_003
"""The holdout divides a file's identity by this prime, because the test split has already used the identity's remainder by 5."""


def scored_part(*evaluated_on: str) -> str:
    """Return what texts call the rows that the scores of runs are of: "holdout" rows or "test" rows.

    Holdout rows are taken from the training rows, and settings are chosen by them. Records that clients hold back count as test rows.

    Args:
        evaluated_on: ``data.evaluate_on`` of each run. If they differ, the rows are called test rows.
    """
    return "holdout" if set(evaluated_on) == {"holdout"} else "test"


def held_out(rows: int, share: int = TEST_SHARE) -> NDArray[np.bool_]:
    """Return a mask (rows,) of the test rows of a table with ``rows`` rows: one in ``share``, rounded down.

    A run without ``data.test_path`` and ``data.person`` is tested on these rows; with persons, see :func:`held_out_by_person`.

    Row numbers, from 0, are sorted by the SHA-256 of their decimal digits, and the first ones are taken. So no row's content affects
    another row's split. Taking every fifth row would not do: rows may be periodic.
    """
    if not isinstance(rows, int | np.integer):
        raise ConfigError(f"rows is {type(rows).__name__}, expected the number of rows; for persons use held_out_by_person")
    chosen = np.zeros(rows, dtype=bool)
    chosen[_hash_order(rows)[: rows // share]] = True
    return chosen


def _hash_order(count: int) -> NDArray[np.int64]:
    """Return the numbers below ``count``, sorted by the SHA-256 of their decimal digits."""
    return np.array(sorted(range(count), key=lambda number: hashlib.sha256(b"%d" % number).digest()), dtype=np.int64)


def split_off_share(parts: Division, share: float) -> tuple[Division, Division]:
    """Return each client's training samples, and the ``share`` of its samples, rounded down, that it holds back for evaluation.

    The position of a sample within its client decides, by the order of the SHA-256 of the position's digits, as in :func:`held_out`.
    """
    order_by_size: dict[int, NDArray[np.int64]] = {}
    train_parts, evaluation_parts = [], []  # np.sort below keeps the samples of each part in the client's order
    for indices in parts:
        size = indices.size
        if size not in order_by_size:
            order_by_size[size] = _hash_order(size)
        evaluation_count = int(size * share)
        evaluation_parts.append(indices[np.sort(order_by_size[size][:evaluation_count])])
        train_parts.append(indices[np.sort(order_by_size[size][evaluation_count:])])
    return Division.of(train_parts), Division.of(evaluation_parts)


def split_off_share_by_name(parts: Division, names: Names, share: float) -> tuple[Division, Division]:
    """Return each client's training persons (or files), and those that it holds back for evaluation, about a ``share`` of all.

    The indices in ``parts`` are those of persons or files, and ``names`` (P,) holds their names. A person's or file's name alone decides.
    """
    is_held_back = uniform_by_name(names, "evaluation") < share
    train_parts = [part[~is_held_back[part]] for part in parts]
    return Division.of(train_parts), Division.of([part[is_held_back[part]] for part in parts])


def held_out_by_person(persons: Iterable[Hashable]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the test rows of a run with ``data.person``: all rows of about one in :data:`TEST_SHARE` persons.

    ``persons`` (N,) names the person of each row. That name alone decides, normalised as in a run (:func:`normalise_names`).
    """
    return uniform_by_name(normalise_names(cell_text(person) for person in persons), "test") < 1 / TEST_SHARE


def held_out_by_file_name(identities: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return a mask (N,) of the test samples, about one in :data:`TEST_SHARE`. Each file's name alone decides, through its identity."""
    return np.asarray(identities % np.uint64(TEST_SHARE) == 0)


def with_tenth_as_test(dataset: Dataset, seed: int) -> Dataset:
    """Return ``dataset`` with a tenth of its training samples as its test samples, for choosing hyper-parameters.

    If the samples have names of persons or files, the names decide: about a tenth of the persons or files is chosen. Otherwise the
    ``seed`` decides.

    Raises:
        ConfigError: none or all of the files or persons would be set aside.
    """
    shuffled = torch.from_numpy(stream(seed, Purpose.HOLDOUT).permutation(len(dataset.train)).astype(np.int64))
    test_count = int(len(dataset.train) * HOLDOUT_SHARE)
    train_indices, test_indices = shuffled[test_count:], shuffled[:test_count]
    if (is_test := _tenth_by_name(dataset)) is not None:
        if not is_test.any() or is_test.all():
            kind = "files" if dataset.persons is None else "persons"
            raise ConfigError(
                f"data.evaluate_on = 'holdout' sets about a tenth of the {kind} aside, chosen by name, but here that is "
                f"{'every one' if is_test.any() else 'none'}: use more {kind}, or set data.evaluate_on to 'test'"
            )
        train_indices, test_indices = torch.from_numpy(np.flatnonzero(~is_test)), torch.from_numpy(np.flatnonzero(is_test))
    train_rows, test_rows = train_indices.numpy(), test_indices.numpy()
    owners = (dataset.clients, dataset.persons)
    clients, persons, identities = (None if array is None else array[train_rows] for array in (*owners, dataset.identities))
    test_clients, test_persons = (None if array is None else array[test_rows] for array in owners)
    return replace(
        dataset,
        train=dataset.train.take(train_indices),
        test=dataset.train.take(test_indices),
        clients=clients,
        test_clients=test_clients,
        identities=identities,
        persons=persons,
        test_persons=test_persons,
    )


def _tenth_by_name(dataset: Dataset) -> NDArray[np.bool_] | None:
    """Return a mask of the training samples to set aside by the names of their persons or files; None if the data have no such names."""
    if dataset.persons is not None:
        return uniform_by_name(dataset.persons, "holdout") < HOLDOUT_SHARE
    if dataset.identities is not None:  # hashes of file names; dividing makes this choice independent of the test split's
        return np.asarray(dataset.identities // np.uint64(_IDENTITY_DIVISOR) % np.uint64(round(1 / HOLDOUT_SHARE)) == 0)
    return None


def split_off_validation(dataset: Dataset, share: float, part: str = "test") -> tuple[Dataset, Samples | None]:
    """Take a ``share`` of the test samples for early stopping. Return ``dataset`` without these samples, and the samples.

    For a ``share`` of 0 the second result is None. The message of an error names the samples by ``part``, see :func:`scored_part`.

    Raises:
        ConfigError: there are too few test samples for both parts.
    """
    if share == 0:
        return dataset, None
    if dataset.test_persons is None:
        positions = torch.arange(len(dataset.test) + 1, dtype=torch.float64)
        # Row i is taken if position * share passes a whole number from i to i + 1: at even distances, since test rows may be sorted.
        is_validation = (positions * share).floor().diff() > 0
    else:
        is_validation = torch.from_numpy(uniform_by_name(dataset.test_persons, "validation") < share)
    if not is_validation.any() or is_validation.all():
        raise ConfigError(
            f"data.validation = {share:g} takes {int(is_validation.sum())} of {len(dataset.test)} {part} rows for validation, but "
            f"validation and {part} need at least one each: change data.validation, or add {part} rows"
        )
    is_left = ~is_validation
    clients, persons = (None if array is None else array[is_left.numpy()] for array in (dataset.test_clients, dataset.test_persons))
    remaining = replace(dataset, test=dataset.test.take(is_left), test_clients=clients, test_persons=persons)
    return remaining, dataset.test.take(is_validation)
