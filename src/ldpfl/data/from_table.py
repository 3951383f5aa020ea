"""From a table to a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.columns import BYTES, bounds_of, features_of, persons_in, said_of_all, texts_of, width_of, with_text, words_of
from ldpfl.data.encoder import Encoder
from ldpfl.data.holding_out import held_out, held_out_by_person
from ldpfl.data.inputs import MASK, TOKENS, Inputs
from ldpfl.data.persons import Names
from ldpfl.data.samples import Dataset, Owners, Samples, owners_of
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.data.targets import targets_of
from ldpfl.data.tokens import following, vocabulary_digest, vocabulary_of
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import Targets
from ldpfl.util.user_code import GIVEN


def dataset_of(name: str, table: Table, test: Table | None, config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set that ``config`` makes of ``table``.

    Which column is one of numbers and which one of words is taken from what most of its cells are, or from the settings. Words
    are hashed, or numbered by ``categories``; numbers stay as they are, to be scaled by what is measured of them, or by ``bounds``. Rows of
    ``test`` go through the same rules; without any, a fifth of the rows are test rows, by their places alone, so that no row's content
    decides about another; or all rows of about a fifth of the persons, by their names, where ``config`` names persons.

    Raises:
        ConfigError: settings that do not fit each other.
        DataError: a column or a value does not fit; the file and line are named.
    """
    tables = [one.with_missing(config.missing_words) for one in (table, test) if one is not None]
    table, config = tables[0], with_text(tables[0], config)
    persons = _persons(tables, config)
    is_test = np.zeros(len(table), dtype=bool) if test is not None else _test_rows(len(table), persons)
    learnt, outputs, notes, classes = targets_of(tables, config, targets)
    unscaled: tuple[Unscaled, ...] = ()
    said = config
    if config.text:
        inputs: list[Inputs] = [texts_of(one, config, targets) for one in tables]
        if targets == "tokens" and config.tokenizer:
            learnt, outputs = [following(own) for own in inputs], vocabulary_of(config.tokenizer)
    else:
        said, left_out = said_of_all(table, config)
        features = [features_of(one, said) for one in tables]
        inputs, unscaled = [torch.from_numpy(own.values) for own in features], features[0].unscaled
        notes = (features[0].said, *left_out, *notes)
    made = [Samples(own, target) for own, target in zip(inputs, learnt, strict=True)]
    train, held = (made[0].take(torch.from_numpy(~is_test)), made[0].take(torch.from_numpy(is_test))) if test is None else made
    digest = hashlib.sha256("".join([*(one.digest for one in tables), config.model_dump_json()]).encode()).hexdigest()[:16]
    return Dataset(
        name,
        train,
        held,
        outputs,
        (),
        (),
        digest,
        **_owners(tables, config, is_test, persons)._asdict(),
        vocabulary=_vocabulary(config, targets),
        unscaled=(*unscaled, *_unscaled_targets(config, targets, outputs)),
        notes=tuple(map(printable, notes)),  # names of columns and classes are in them
        encoder=_encoder(said, targets, classes, width_of(said), outputs),
    )


def _test_rows(count: int, persons: Sequence[Names] | None) -> NDArray[np.bool_]:
    """Return which of ``count`` rows are kept to measure on, by their places or by the names of ``persons``.

    Raises:
        DataError: no row would be left to train on, or none to measure on.
    """
    is_test = held_out(count) if persons is None else held_out_by_person(persons[0])
    if persons is not None and (is_test.all() or not is_test.any()):
        raise DataError(
            f"about a fifth of the persons are test persons, by their names, and of {len(set(persons[0]))} persons that is "
            f"{'each' if is_test.any() else 'none'}: give data.test_path, or a table of more persons"
        )
    if not is_test.any():
        raise DataError(f"{count} rows are too few to keep a fifth of them to measure on: give data.test_path")
    return is_test


def _vocabulary(config: DataConfig, targets: Targets) -> int | dict[str, int] | None:
    """Return how many tokens there are where samples are texts."""
    if config.tokenizer:
        return {TOKENS: vocabulary_of(config.tokenizer), MASK: 2}
    return None if not config.text else BYTES if targets == "tokens" else config.vocabulary


def _unscaled_targets(config: DataConfig, targets: Targets, outputs: int) -> tuple[Unscaled, ...]:
    """Return what is measured of the target: where its numbers lie, or how many rows each class has."""
    names = config.target_names
    bounds = bounds_of(config, names[0])
    if targets in ("count", "survival") and bounds is not None and bounds[0] < 0:
        raise ConfigError(f"data.bounds.{names[0]} begin at {bounds[0]:g}, and counts and times begin at 0: give 0 or more")
    if targets in ("number", "count"):
        return (Unscaled(f"{names[0]}, the target", bounds=bounds),)
    if config.text:
        return ()
    if targets == "class":
        return (Unscaled(f"{names[0]}, the target", classes=outputs),)
    if targets == "ordered":
        return (Unscaled(f"{names[0]}, the target", classes=outputs + 1),)
    if targets == "survival":
        time = Unscaled(f"{names[0]}, the time", bounds=bounds, label=0)
        return time, Unscaled(f"{names[1]}, the event", classes=2, label=1)
    return tuple(Unscaled(f"{name}, a target", classes=2, label=label) for label, name in enumerate(names))


_OF_COLUMNS = (
    *("target", "columns", "bounds", "numbers", "words", "dates", "categories", "buckets"),
    *("missing", "missing_words", "text", "tokenizer", "length", "vocabulary"),
    "cut_points",
)
"""Settings that say what becomes of a row; the others, such as where the rows lie, are not written into an encoding."""


def _encoder(config: DataConfig, targets: Targets, classes: tuple[str, ...], width: int, outputs: int) -> Encoder | None:
    if targets == "tokens":
        return None
    digest = vocabulary_digest(config.tokenizer) if config.tokenizer else ""
    return Encoder(
        data=DataConfig(name=GIVEN, tokenizer_digest=digest, **config.model_dump(include=set(_OF_COLUMNS))),
        targets=targets,
        classes=classes,
        width=width,
        outputs=outputs,
    )


def _owners(tables: Sequence[Table], config: DataConfig, is_test: NDArray[np.bool_], persons: Sequence[Names] | None) -> Owners:
    """Return whose each row is; a table of test rows need not say so."""
    owners = _clients(tables, config, is_test)
    if persons is None:
        return owners
    test = persons[1] if len(persons) > 1 else persons[0][is_test]
    return owners._replace(persons=persons[0][~is_test], test_persons=test if test.size else None)


def _persons(tables: Sequence[Table], config: DataConfig) -> list[Names] | None:
    """Return the name of the person of each row, table by table; None where ``config`` names no persons.

    A table of test rows need not say so; then its names are none.
    """
    if not config.person:
        return None
    train, *test = tables
    names = persons_in(train, config)
    if "" in names:
        raise DataError(f"{train.where(names.index(''))}: the person's column {config.person!r} has no value")
    known = [persons_in(table, config) if config.person in table.columns else [""] for table in test]
    return [np.array(own, dtype=object) for own in (names, *([] if "" in own else own for own in known))]


def _clients(tables: Sequence[Table], config: DataConfig, is_test: NDArray[np.bool_]) -> Owners:
    if not config.client:
        return Owners()
    train = tables[0]
    train.column(config.client, "data.client")
    words = words_of(replace(train, missing=()), config.client)  # a client may be called None
    if "" in words:
        raise DataError(f"{train.where(words.index(''))}: the client's column {config.client!r} has no value")
    kept = [words[place] for place in np.flatnonzero(~is_test)]
    if len(tables) == 1:
        return owners_of(kept, [words[place] for place in np.flatnonzero(is_test)])
    test = words_of(replace(tables[1], missing=()), config.client) if config.client in tables[1].columns else [""]
    return owners_of(kept, None if "" in test else test)
