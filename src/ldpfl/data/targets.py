"""What is told of a table's rows: a number, a class, several labels, a time to an event, or the next byte of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import READERS, reads
from ldpfl.data.columns import BYTES, bytes_of, words_of
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.errors import ConfigError, DataError
from ldpfl.tasks import NO_TOKEN, Targets
from ldpfl.util.number_format import counted

MOST_CLASSES = 1000
"""What has more is no classification."""

_MOST_NUMBERS = 20
"""Different numbers beyond which a target is none of classes."""


INTERVALS = 8
"""Intervals of a time to an event, where data.cut_points names none."""

_LARGEST = float(np.finfo(np.float32).max)


class Told(NamedTuple):
    """The targets of each table, how many outputs a model needs for them, what the guarantee assumes of them, and the names of classes."""

    values: list[Tensor]
    outputs: int
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def targets_of(tables: Sequence[Table], config: DataConfig, targets: Targets) -> Told:
    """Return what is told of each row of ``tables``, all by the same classes.

    Raises:
        ConfigError: the settings name too many columns, or too few.
        DataError: a column is missing, or a value is none that can be told; the file and line are named.
    """
    names = config.target_names
    for table in tables:
        for name in names:
            table.column(name, "data.target")
    if targets == "survival":
        return _survival_to_tell(tables, names, config)
    if targets != "classes" and len(names) > 1:
        raise ConfigError(
            f"data.target names {len(names)} columns, and this task predicts one; for several labels set task.name to 'multilabel' "
            "(--task multilabel)"
        )
    if targets == "classes" and len(names) < 2:
        raise ConfigError("a task of several labels needs two columns or more in data.target; for one, take classification")
    if targets == "tokens":
        return Told([_tokens_to_tell(table, config) for table in tables], BYTES)
    if targets == "number":
        return Told([_numbers_to_tell(table, names[0]) for table in tables], 1)
    if targets == "count":
        return Told([_counts_to_tell(table, names[0]) for table in tables], 1)
    if targets == "classes":
        return Told([torch.stack([_label(table, name) for name in names], dim=1) for table in tables], len(names))
    told = _classes_to_tell(tables, names[0], config)
    return _in_order(told, names[0], config) if targets == "ordered" else told


def _in_order(told: Told, name: str, config: DataConfig) -> Told:
    """Return ordered classes, which have an output for each threshold between two of them."""
    if not config.classes and any(not _natural(word)[0] == 0 for word in told.classes):
        raise ConfigError(f"nothing says in which order the classes of {name!r} are: name them in data.classes, from the lowest on")
    return told._replace(outputs=told.outputs - 1)


def _survival_to_tell(tables: Sequence[Table], names: Sequence[str], config: DataConfig) -> Told:
    """Return time and event (N, 2) of each row; an output for each interval."""
    if len(names) != 2:
        raise ConfigError("survival needs two columns in data.target: the time, and whether the event occurred then (1) or not (0)")
    values = [torch.stack([_counts_to_tell(table, names[0]), _label(table, names[1])], dim=1) for table in tables]
    return Told(values, len(config.cut_points) or INTERVALS)


def _counts_to_tell(table: Table, name: str) -> Tensor:
    values = _numbers_to_tell(table, name)
    below = np.flatnonzero(values.numpy() < 0)
    if below.size:
        raise DataError(f"{_places(table, below)}: the target {name!r} is below 0, and this task expects 0 or more: mend the row")
    return values


def _numbers_to_tell(table: Table, name: str) -> Tensor:
    _check_no_words(table, name, "a number", "to tell words apart, set task.name to 'classification' (--task classification)")
    values = table.numbers(name)
    _check_all(table, name, np.isnan(values))
    return torch.from_numpy(np.clip(values, -_LARGEST, _LARGEST).astype(np.float32))


def _label(table: Table, name: str) -> Tensor:
    _check_no_words(table, name, "0 or 1", "write 1 where the label holds, or the event occurred, and else 0")
    values = table.numbers(name)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if wrong.size:
        raise DataError(f"{_places(table, wrong)}: the label in the column {name!r} must be 0 or 1")
    return torch.from_numpy(values.astype(np.float32))


def _check_no_words(table: Table, name: str, expected: str, remedy: str) -> None:
    """Raise a :class:`DataError` if the column ``name`` is one of words: the first of them would be called a mistake among numbers."""
    column = table.columns[name]
    cells = [] if column.dtype == np.float64 else [text for text in column if not table.is_absent(text)]
    if 2 * sum(reads(READERS["numbers"], text) for text in cells) < len(cells):
        raise DataError(f"the target {name!r} holds words, and this task expects {expected} in each row: {remedy}")
    _check_no_stray(table, name, READERS["numbers"], "mend the row, or leave it out")


def _check_no_stray(table: Table, name: str, reader: Callable[[str], float], remedy: str) -> None:
    """Raise a :class:`DataError` if something else than a number stands in a column of numbers. All rows are named, and no cell is."""
    column = table.columns[name]
    if column.dtype == np.float64:
        return
    stray = np.flatnonzero([not (table.is_absent(text) or reads(reader, text)) for text in column])
    if stray.size:
        raise DataError(f"{_places(table, stray)}: what stands in the target {name!r} is no number, as others there are: {remedy}")


def _places(table: Table, rows: NDArray[np.int64]) -> str:
    """Return where the first of ``rows`` are, and how many there are beside these."""
    first, *others = (table.where(int(row)) for row in rows[:_MAX_NAMED])
    file = first.rpartition(", ")[0]
    listed = ", ".join([first, *(place.removeprefix(f"{file}, ") for place in others)])
    return f"{listed} and {counted(len(rows) - _MAX_NAMED, 'other')}" if len(rows) > _MAX_NAMED else listed


_MAX_NAMED = 5
"""Rows that a message names, at most."""


def _classes_to_tell(tables: Sequence[Table], name: str, config: DataConfig) -> Told:
    numeric = all(table.is_numeric(name) for table in tables) and not config.classes
    for table in tables if numeric else ():
        _check_no_stray(table, name, float, "mend the row, leave it out, or name all classes, --set 'data.classes=[\"0\", ...]'")
    words = [words_of(table, name, numeric=numeric, values=config.classes) for table in tables]
    for table, own in zip(tables, words, strict=True):
        _check_all(table, name, np.array([not word for word in own]))
    known = list(config.classes) or _found_classes(tables[0], name, words[0])
    numbers = {word: place for place, word in enumerate(known)}
    found = []
    for table, own in zip(tables, words, strict=True):
        for row, word in enumerate(own):
            if word not in numbers:
                those = f"data.classes, which are {', '.join(known[:10])}" if config.classes else "those of the rows that are trained on"
                raise DataError(f"{table.where(row)}: the class in the column {name!r} is not among {those}")
        found.append(torch.tensor([numbers[word] for word in own]))
    notes = () if config.classes else (_CLASSES_SEEN.format(name=name, some=", ".join(known[:5])),)
    return Told(found, len(known), notes, tuple(known))


_CLASSES_SEEN = (
    "the classes of {name!r} ({some}) were taken from the data, as if they were public: "
    "where it is a secret that one occurs, name them in data.classes"
)


def _found_classes(table: Table, name: str, words: Sequence[str]) -> list[str]:
    known = sorted(set(words), key=_natural)
    if len(known) > MOST_CLASSES or (len(known) > _MOST_NUMBERS and table.is_numeric(name)):
        raise DataError(
            f"the target {name!r} has {len(known):,} different values: to estimate a number, set task.name to 'regression' "
            "(--task regression)"
        )
    if len(known) == 1:
        raise DataError(f"the target {name!r} is the same in every row: there is nothing to tell apart")
    return known


def _natural(word: str) -> tuple[int, float, str]:
    """Sort numbers as numbers, and before words."""
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def _check_all(table: Table, name: str, absent: NDArray[np.bool_]) -> None:
    if absent.any():
        where = _places(table, np.flatnonzero(absent))
        none = "an empty cell, or a word that stands for none, such as NA or None"
        raise DataError(
            f"{where}: the target {name!r} has no value ({none}): leave such rows out; or, if the word is a class, name all classes, "
            "--set 'data.classes=[\"none\", ...]'"
        )


def _tokens_to_tell(table: Table, config: DataConfig) -> Tensor:
    if not config.text:
        raise ConfigError("a language model is trained on texts: name their column in data.text")
    following = bytes_of(table.column(config.text, "data.text"), config.length)[:, 1:]
    return torch.where(following == 0, NO_TOKEN, following)
