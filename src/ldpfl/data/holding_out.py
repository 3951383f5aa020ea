"""Which samples are not trained on: to measure on, to choose hyper-parameters by, or to say when to stop.

By places, or by what files are called: nothing that is known of one sample decides where others go. Samples of one person stay together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.persons import numbered
from ldpfl.data.samples import Dataset, Samples
from ldpfl.errors import ConfigError
from ldpfl.randomness import Purpose, stream

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


def held_out_by_person(persons: Sequence[Hashable] | NDArray[Any], share: int = TEST_SHARE) -> NDArray[np.bool_]:
    """Return which rows are test rows (N,) of a run with ``data.person``: all those of one in ``share`` persons.

    ``persons`` (N,) names the person of each row. The persons are chosen as rows are by :func:`held_out`, by their places in the order of
    their first rows: neither a name nor a row of one person decides where another goes.
    """
    numbers = numbered(persons)
    return held_out(int(numbers.max(initial=-1)) + 1, share)[numbers]


def held_out_by_name(identities: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which samples are for measuring, about one in :data:`TEST_SHARE`, by what each of them is called."""
    return np.asarray(identities % np.uint64(TEST_SHARE) == 0)


def without_a_tenth(task: Dataset, seed: int) -> Dataset:
    """Return ``task`` with a tenth of its training samples in the place of its test samples, to choose hyper-parameters by."""
    order = torch.from_numpy(stream(seed, Purpose.HOLDOUT).permutation(len(task.train)).astype(np.int64))
    count = int(len(task.train) * _HOLDOUT)
    kept, held = order[count:], order[:count]
    if task.persons is not None:
        drawn = stream(seed, Purpose.HOLDOUT).permutation(int(task.persons.max()) + 1)
        chosen = torch.from_numpy(np.isin(task.persons, drawn[: int(len(drawn) * _HOLDOUT)]))
        kept, held = torch.arange(len(task.train))[~chosen], torch.arange(len(task.train))[chosen]
    if task.identities is not None:
        chosen = torch.from_numpy(task.identities // np.uint64(_APART) % np.uint64(round(1 / _HOLDOUT)) == 0)
        kept, held = torch.arange(len(task.train))[~chosen], torch.arange(len(task.train))[chosen]
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


def with_validation(task: Dataset, share: float) -> tuple[Dataset, Samples | None]:
    """Return ``task`` without the ``share`` of its test samples that say when to stop, and those; none for 0.

    Raises:
        ConfigError: too few rows for both.
    """
    if share == 0:
        return task, None
    persons = np.arange(len(task.test)) if task.test_persons is None else numbered(task.test_persons.tolist())
    place = torch.arange(int(persons.max()) + 2, dtype=torch.float64)
    chosen = ((place * share).floor().diff() > 0)[torch.from_numpy(persons)]  # at even distances: test rows may be sorted
    if not chosen.any() or chosen.all():
        raise ConfigError(f"data.validation takes {int(chosen.sum())} of {len(task.test)} test rows: both parts need some")
    clients, persons_left = (None if of is None else of[~chosen.numpy()] for of in (task.test_clients, task.test_persons))
    left = replace(task, test=task.test.take(~chosen), test_clients=clients, test_persons=persons_left)
    return left, task.test.take(chosen)
