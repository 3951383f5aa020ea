"""Which samples are not trained on: to measure on, to choose hyper-parameters by, or to say when to stop.

By places, or by what files or persons are called: nothing that is known of one sample decides where others go. Samples of one person stay
together, at all clients: a person is in one part everywhere, which follows from its own name and a public label.
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
"""One in so many rows of a user's own data is a test row, where none are given."""

_HOLDOUT = 0.1
_APART = 1_000_003
"""Of what files are called: by what is left above it others are set aside than by what is below."""


def held_out(rows: int, share: int = TEST_SHARE) -> NDArray[np.bool_]:
    """Return which of ``rows`` rows are test rows (rows,): one in ``share``, rounded down.

    These are the rows of a table, in its order, that a run without ``data.test_path`` is measured on. Places alone decide: the places,
    counted from 0, are put in the order of the SHA-256 of their decimal digits, and the first of them are taken. So nothing that is known
    of one row decides where others go; and it is not each fifth row, for rows may come in turns.
    """
    order = sorted(range(rows), key=lambda place: hashlib.sha256(b"%d" % place).digest())
    chosen = np.zeros(rows, dtype=bool)
    chosen[order[: rows // share]] = True
    return chosen


def held_back(parts: Division, share: float) -> tuple[Division, Division]:
    """Return what each client trains on, and the ``share`` of its samples, rounded down, that it holds back to measure on.

    The places of a client's samples among its own decide which, by the order of the SHA-256 of their digits, as in :func:`held_out`.
    """
    orders: dict[int, NDArray[np.int64]] = {}
    kept, held = [], []
    for own in parts:
        size = own.size
        if size not in orders:
            orders[size] = np.array(sorted(range(size), key=lambda place: hashlib.sha256(b"%d" % place).digest()), dtype=np.int64)
        count = int(size * share)
        held.append(own[np.sort(orders[size][:count])])
        kept.append(own[np.sort(orders[size][count:])])
    return Division.of(kept), Division.of(held)


def held_back_by_name(parts: Division, names: Names, share: float) -> tuple[Division, Division]:
    """Return what each client trains on, and about the ``share`` of all persons, or files, that are held back.

    ``names`` (P,) has the name of each. Its own name alone decides.
    """
    chosen = uniform_by_name(names, "evaluation") < share
    return Division.of([own[~chosen[own]] for own in parts]), Division.of([own[chosen[own]] for own in parts])


def held_out_by_person(persons: Iterable[Hashable]) -> NDArray[np.bool_]:
    """Return which rows are test rows (N,) of a run with ``data.person``: all those of about one in :data:`TEST_SHARE` persons.

    ``persons`` (N,) names the person of each row, and its own name alone decides.
    """
    return uniform_by_name((normalize("NFC", as_text(name)) for name in persons), "test") < 1 / TEST_SHARE


def held_out_by_name(identities: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which samples are for measuring, about one in :data:`TEST_SHARE`, by what each of them is called."""
    return np.asarray(identities % np.uint64(TEST_SHARE) == 0)


def without_a_tenth(task: Dataset, seed: int) -> Dataset:
    """Return ``task`` with a tenth of its training samples in the place of its test samples, to choose hyper-parameters by.

    Of files and of persons it is about a tenth.

    Raises:
        ConfigError: none of the files or persons, or each of them, is set aside.
    """
    order = torch.from_numpy(stream(seed, Purpose.HOLDOUT).permutation(len(task.train)).astype(np.int64))
    count = int(len(task.train) * _HOLDOUT)
    kept, held = order[count:], order[:count]
    if (chosen := _tenth_by_name(task)) is not None:
        if not chosen.any() or chosen.all():
            raise ConfigError(
                f"data.evaluate_on = 'holdout' sets about a tenth of the {'files' if task.persons is None else 'persons'} aside, by their "
                f"names, and here {'each' if chosen.any() else 'none'} of them: use more of them, or set it to 'test'"
            )
        kept, held = torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen))
    own = kept.numpy()
    clients, identities, persons = (None if of is None else of[own] for of in (task.clients, task.identities, task.persons))
    held_clients, held_persons = (None if of is None else of[held.numpy()] for of in (task.clients, task.persons))
    train, test = task.train.take(kept), task.train.take(held)
    return replace(
        task,
        train=train,
        test=test,
        clients=clients,
        test_clients=held_clients,
        identities=identities,
        persons=persons,
        test_persons=held_persons,
    )


def _tenth_by_name(task: Dataset) -> NDArray[np.bool_] | None:
    """Return which training samples are set aside by what their persons or files are called; None where these have no names."""
    if task.persons is not None:
        return uniform_by_name(task.persons, "holdout") < _HOLDOUT
    if task.identities is not None:
        return np.asarray(task.identities // np.uint64(_APART) % np.uint64(round(1 / _HOLDOUT)) == 0)
    return None


def with_validation(task: Dataset, share: float) -> tuple[Dataset, Samples | None]:
    """Return ``task`` without the ``share`` of its test samples that say when to stop, and those; none for 0.

    Raises:
        ConfigError: too few rows for both.
    """
    if share == 0:
        return task, None
    if task.test_persons is None:
        place = torch.arange(len(task.test) + 1, dtype=torch.float64)
        chosen = (place * share).floor().diff() > 0  # at even distances: test rows may be sorted
    else:
        chosen = torch.from_numpy(uniform_by_name(task.test_persons, "validation") < share)
    if not chosen.any() or chosen.all():
        raise ConfigError(f"data.validation takes {int(chosen.sum())} of {len(task.test)} test rows: both parts need some")
    clients, persons_left = (None if of is None else of[~chosen.numpy()] for of in (task.test_clients, task.test_persons))
    left = replace(task, test=task.test.take(~chosen), test_clients=clients, test_persons=persons_left)
    return left, task.test.take(chosen)
