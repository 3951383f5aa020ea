"""Turn a table into a data set of encoded samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.columns import (
    BYTES,
    check_exact_names,
    column_words,
    input_width,
    person_names,
    public_bounds,
    read_features,
    read_texts,
    resolve_column_kinds,
    resolve_text_column,
)
from ldpfl.data.dataset import Dataset, Owners, number_clients
from ldpfl.data.encoder import Encoder
from ldpfl.data.holding_out import held_out, held_out_by_person
from ldpfl.data.persons import Names, client_name
from ldpfl.data.samples import MASK, TOKENS, Inputs, Samples
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.data.targets import read_targets
from ldpfl.data.tokens import next_token_targets, vocabulary_digest, vocabulary_size
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import Targets
from ldpfl.util.user_code import GIVEN


def dataset_from_table(name: str, table: Table, test: Table | None, config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set that ``config`` makes of ``table``, with test rows from ``test`` or split off from ``table``.

    The settings say which columns hold numbers and which hold words. Otherwise the majority of a column's cells decides.
    Words are hashed, or numbered by ``categories``. Numbers are scaled later, by measured quantiles or by ``bounds``.

    Without ``test``, a fifth of the rows become test rows. A row's position alone decides on it, so no row's content affects another row.
    If ``data.person`` is set, all rows of about a fifth of the persons become test rows. A person's name alone decides.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: a column or a value does not fit. The message names the file and line.
    """
    tables = [rows.with_missing(config.missing_words) for rows in (table, test) if rows is not None]
    table = tables[0]
    config = resolve_text_column(table, config)
    persons = names_of_persons(tables, config)
    is_test = np.zeros(len(table), dtype=bool) if test is not None else choose_test_rows(len(table), persons)
    encoded_targets, output_count, notes, classes = read_targets(tables, config, targets)
    unscaled: tuple[Unscaled, ...] = ()
    if config.text:
        resolved = config  # texts have no input columns whose kinds are to be found
        inputs: list[Inputs] = [read_texts(rows, config, targets) for rows in tables]
        if targets == "tokens" and config.tokenizer:  # the targets above are bytes
            encoded_targets = [next_token_targets(tokens) for tokens in inputs]
            output_count = vocabulary_size(config.tokenizer)
    else:
        resolved, left_out_notes = resolve_column_kinds(table, config)
        features = [read_features(rows, resolved) for rows in tables]
        inputs = [torch.from_numpy(matrix.values) for matrix in features]
        unscaled = features[0].unscaled
        notes = (features[0].note, *left_out_notes, *notes)
    if table.index:
        notes = (*notes, f"the data frame's index ({', '.join(table.index)}) is not used: to name persons or clients by it, reset_index()")
    samples = [Samples(*inputs_and_targets) for inputs_and_targets in zip(inputs, encoded_targets, strict=True)]
    if test is None:
        (of_table,) = samples
        samples = [of_table.take(torch.from_numpy(~is_test)), of_table.take(torch.from_numpy(is_test))]
    train_samples, test_samples = samples
    digest = hashlib.sha256("".join([*(rows.digest for rows in tables), config.model_dump_json()]).encode()).hexdigest()[:16]
    owners = _clients(tables, config, is_test).with_persons(persons, is_test)
    return Dataset(
        name,
        train_samples,
        test_samples,
        output_count,
        mean=(),
        std=(),
        fingerprint=digest,
        **owners._asdict(),  # Dataset has the same fields
        vocabulary=_vocabulary(config, targets),
        unscaled=(*unscaled, *_unscaled_targets(config, targets, output_count)),
        notes=tuple(map(printable, notes)),  # they contain names of columns and classes
        encoder=_encoder(resolved, targets, classes, input_width(resolved), output_count),
    )


def choose_test_rows(count: int, persons: Sequence[Names] | None) -> NDArray[np.bool_]:
    """Return a mask (count,) of the test rows, chosen by position, or by the names that the first array of ``persons`` gives the rows.

    Raises:
        DataError: there would be no training rows or no test rows.
    """
    is_test = held_out(count) if persons is None else held_out_by_person(persons[0])
    if persons is not None and (is_test.all() or not is_test.any()):
        raise DataError(
            f"about a fifth of the persons is chosen by name for the test, but of these {len(set(persons[0]))} persons that is "
            f"{'every one' if is_test.any() else 'none'}: set data.test_path, or use a table of more persons"
        )
    if not is_test.any():
        raise DataError(f"the table has only {count} rows, too few to keep a fifth of them for the test: set data.test_path, or add rows")
    return is_test


def _vocabulary(config: DataConfig, targets: Targets) -> int | dict[str, int] | None:
    """Return the size of the vocabulary if the samples are texts, by input name for a tokenizer; else None."""
    if config.tokenizer:
        return {TOKENS: vocabulary_size(config.tokenizer), MASK: 2}  # a mask holds 0 and 1
    if not config.text:
        return None
    return BYTES if targets == "tokens" else config.vocabulary


def _unscaled_targets(config: DataConfig, targets: Targets, outputs: int) -> tuple[Unscaled, ...]:
    """Return the targets to measure before training: a number's range, or class counts. ``label`` is the index among several columns."""
    names = config.target_names
    bounds = public_bounds(config, names[0])
    if targets in ("count", "survival") and bounds is not None and bounds[0] < 0:
        raise ConfigError(f"data.bounds.{names[0]} begins at {bounds[0]:g}, but counts and times are never negative: begin at 0 or more")
    if targets in ("number", "count"):
        return (Unscaled(f"{names[0]}, the target", bounds=bounds),)
    if config.text:  # a run on texts measures no class counts
        return ()
    if targets == "class":
        return (Unscaled(f"{names[0]}, the target", classes=outputs),)
    if targets == "ordered":
        return (Unscaled(f"{names[0]}, the target", classes=outputs + 1),)  # outputs are thresholds between two classes
    if targets == "survival":
        time = Unscaled(f"{names[0]}, the time", bounds=bounds, label=0)
        return time, Unscaled(f"{names[1]}, the event", classes=2, label=1)
    return tuple(Unscaled(f"{name}, a target", classes=2, label=label) for label, name in enumerate(names))


_ENCODING_SETTINGS = (
    *("target", "columns", "bounds", "numbers", "words", "dates", "categories", "buckets"),
    *("missing", "missing_words", "text", "tokenizer", "length", "vocabulary"),
    "cut_points",
)
"""Settings that affect how a row is encoded. An encoding holds no other settings, such as the path of the data."""


def _encoder(config: DataConfig, targets: Targets, classes: tuple[str, ...], width: int, outputs: int) -> Encoder | None:
    """Return the encoder for new rows, or None for a language model, whose texts need none."""
    if targets == "tokens":
        return None
    digest = vocabulary_digest(config.tokenizer) if config.tokenizer else ""
    return Encoder(
        data=DataConfig(name=GIVEN, tokenizer_digest=digest, **config.model_dump(include=set(_ENCODING_SETTINGS))),
        targets=targets,
        classes=classes,
        width=width,
        outputs=outputs,
    )


def names_of_persons(tables: Sequence[Table], config: DataConfig) -> list[Names] | None:
    """Return the name of each row's person, one array for each table; None if ``config`` names no person column.

    A table of test rows need not have the column, or may have gaps in it. Then its array is empty.
    """
    if not config.person:
        return None
    train, *test = tables
    names = person_names(train, config)
    if "" in names:
        raise DataError(f"{train.where(names.index(''))}: data.person {config.person!r} has no value: fill it in, or remove the row")
    persons = [np.array(names, dtype=object)]
    for table in test:
        test_names = person_names(table, config) if config.person in table.columns else []
        persons.append(np.array([] if "" in test_names else test_names, dtype=object))
    return persons


def _clients(tables: Sequence[Table], config: DataConfig, is_test: NDArray[np.bool_]) -> Owners:
    """Return the client of each row by the column ``data.client``; no clients if it is not set.

    Raises:
        DataError: the column is missing, or a training row has no client.
    """
    if not config.client:
        return Owners()
    train = tables[0]
    train.column(config.client, "data.client")  # raises if there is no such column
    check_exact_names(train, config.client, "data.client")
    words = _client_names(train, config)
    if "" in words:
        raise DataError(f"{train.where(words.index(''))}: data.client {config.client!r} has no value: fill it in, or remove the row")
    train_clients = [words[row] for row in np.flatnonzero(~is_test)]
    if len(tables) == 1:
        return number_clients(train_clients, [words[row] for row in np.flatnonzero(is_test)])
    test_clients = _client_names(tables[1], config) if config.client in tables[1].columns else None
    return number_clients(train_clients, None if test_clients is None or "" in test_clients else test_clients)


def _client_names(table: Table, config: DataConfig) -> list[str]:
    """Return the client of each row of ``table``. A client may have a name that usually means "no value", such as None.

    As for persons, 7.0 becomes 7. But 007 stays 007, because clients' names are shown.
    """
    # missing=(): no word means "no value".
    return [client_name(word) for word in column_words(replace(table, missing=()), config.client)]
