"""Read the targets of a table's rows: a number, a class, several labels, a time to an event, or the next byte of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import READERS, can_parse, describe_ambiguity
from ldpfl.data.columns import BYTES, column_words, texts_as_bytes
from ldpfl.data.identifiers import identifier_kind
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.errors import ConfigError, DataError, listed_names
from ldpfl.tasks import NO_TOKEN, Targets
from ldpfl.util.number_format import counted

MOST_CLASSES = 1000
"""Maximum number of classes of a classification."""

_MAX_NUMERIC_CLASSES = 20
"""Maximum number of distinct numbers that are read as classes. A column with more of them holds a quantity."""

INTERVALS = 8
"""Default number of intervals of a time to an event, if ``data.cut_points`` is not set."""

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Larger targets are clipped to it: none becomes infinite."""


class ReadTargets(NamedTuple):
    """The targets of each table's rows, the number of outputs of a model for them, notes on the guarantee, and the classes' names."""

    values: list[Tensor]
    outputs: int
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def check_target_columns(table: Table, names: Sequence[str], targets: Targets) -> None:
    """Raise a :class:`DataError` if ``table`` lacks one of the target columns ``names``."""
    for name in names:
        table.column(name, "data.target", "" if targets in ("classes", "survival") else f"; {_TASK_OF_SEVERAL}")


def read_targets(tables: Sequence[Table], config: DataConfig, targets: Targets) -> ReadTargets:
    """Return the targets of each row of ``tables``, which share one list of classes.

    Raises:
        ConfigError: the settings name too many target columns, or too few.
        DataError: a column is missing, or a value is not a valid target. The message names the file and line.
    """
    names = config.target_names
    for table in tables:
        check_target_columns(table, names, targets)
    if targets == "survival":
        return _survival_targets(tables, names, config)
    if targets != "classes" and len(names) > 1:
        raise ConfigError(f"data.target names {len(names)} columns, but this task predicts one; {_TASK_OF_SEVERAL}")
    if targets == "classes" and len(names) < 2:
        raise ConfigError(
            f"a task of several labels needs two columns or more in data.target, which names {names[0]!r} alone: "
            f"{_list_advice(names[0], 'OTHER')}; for one label, set task.name to 'classification'"
        )
    if targets == "tokens":
        return ReadTargets([_token_targets(table, config) for table in tables], BYTES)
    if targets == "number":
        return ReadTargets([_number_targets(table, names[0]) for table in tables], outputs=1)
    if targets == "count":
        return ReadTargets([_count_targets(table, names[0]) for table in tables], outputs=1)
    if targets == "classes":
        return ReadTargets([torch.stack([_label_targets(table, name) for name in names], dim=1) for table in tables], len(names))
    class_targets = _class_targets(tables, names[0], config)
    if targets == "ordered":
        return _as_ordered_targets(class_targets, names[0], config)
    notes = () if config.classes else _note_on_whole_numbers(names[0], class_targets.classes)
    return class_targets._replace(notes=(*class_targets.notes, *notes))


_TASK_OF_SEVERAL = (
    "for several labels set task.name to 'multilabel' (--task multilabel), and for a time and an event to 'survival' (--task survival)"
)


def _as_ordered_targets(class_targets: ReadTargets, name: str, config: DataConfig) -> ReadTargets:
    """Return ``class_targets`` with one output less: ordered classes have one for each threshold between two neighbouring classes.

    Raises:
        ConfigError: the classes are not numbers, and the settings do not give their order.
    """
    if not config.classes:
        check_order_known(class_targets.classes, name)
    return class_targets._replace(outputs=class_targets.outputs - 1)


def check_order_known(classes: Sequence[str], name: str) -> None:
    """Raise a :class:`ConfigError` if the order of the ``classes`` of the target ``name`` is unknown, because they are not numbers."""
    if any(natural_key(word)[0] for word in classes):
        raise ConfigError(f"the order of the classes of {name!r} is unknown: list them in data.classes, the lowest first")


def _survival_targets(tables: Sequence[Table], names: Sequence[str], config: DataConfig) -> ReadTargets:
    """Return the time and the event (N, 2) of each row, from the two columns ``names``, with one output for each interval."""
    if len(names) != 2:
        given = f"{len(names)} columns" if len(names) > 1 else f"{names[0]!r} alone"
        raise ConfigError(
            "survival needs two columns in data.target: the time, and then whether the event occurred at that time (1) or not (0). "
            f"It names {given}: {_list_advice(names[0] if len(names) == 1 else 'TIME', 'EVENT')}"
        )
    time, event = names
    for table in tables:
        if table.is_numeric(time) and _is_event(table, time) and not _is_event(table, event):
            raise ConfigError(
                f"data.target names {time!r} as the time, but it holds only 0 and 1, and {event!r} as the event, but it holds others: "
                f"name the time first, {_list_advice(event, time)}"
            )
    values = [torch.stack([_count_targets(table, time), _label_targets(table, event)], dim=1) for table in tables]
    return ReadTargets(values, len(config.cut_points) or INTERVALS)


def _list_advice(*names: str) -> str:
    """Return the advice to give the target columns ``names`` as a list, for a message."""
    return f"give them as a list, --set 'data.target={json.dumps(names, ensure_ascii=False)}' (or target=[...] from Python)"


def _is_event(table: Table, name: str) -> bool:
    """Return whether each value in the column ``name`` is 0 or 1."""
    values = table.numbers(name, strict=False)
    return bool(np.isin(values[~np.isnan(values)], (0, 1)).all())


def _count_targets(table: Table, name: str) -> Tensor:
    """Return the counts, or times, in the column ``name`` (N,). A negative number raises a :class:`DataError`."""
    values = _number_targets(table, name)
    negative_rows = np.flatnonzero(values.numpy() < 0)
    if negative_rows.size:
        where = _describe_rows(table, negative_rows)
        raise DataError(f"{where}: the target {name!r} is below 0, and this task expects 0 or more: correct the row")
    return values


def _number_targets(table: Table, name: str) -> Tensor:
    """Return the numbers in the column ``name`` (N,). Any other cell raises a :class:`DataError`."""
    _check_numeric(table, name, "a number", "to predict words, set task.name to 'classification' (--task classification)")
    values = table.numbers(name)
    _check_none_missing(table, name, np.isnan(values), "leave such rows out")
    return torch.from_numpy(np.clip(values, -_LARGEST_FLOAT32, _LARGEST_FLOAT32).astype(np.float32))


def _label_targets(table: Table, name: str) -> Tensor:
    """Return the labels, or events, in the column ``name`` (N,). A cell that is not 0 or 1 raises a :class:`DataError`."""
    _check_numeric(table, name, "0 or 1", "write 1 where the label applies or the event occurred, otherwise 0")
    values = table.numbers(name)
    wrong_rows = np.flatnonzero((values != 0) & (values != 1))
    if wrong_rows.size:
        raise DataError(f"{_describe_rows(table, wrong_rows)}: the label in the column {name!r} must be 0 or 1: correct or remove the row")
    return torch.from_numpy(values.astype(np.float32))


def _check_numeric(table: Table, name: str, expected: str, remedy: str) -> None:
    """Raise a :class:`DataError` if the target ``name`` does not hold numbers.

    A column of words gets a message of its own, with ``expected`` and ``remedy``. Otherwise its first word would be reported as a typing
    error among numbers.
    """
    column = table.columns[name]
    cells = [] if column.dtype == np.float64 else [text for text in column if not table.is_absent(text)]
    if 2 * sum(can_parse(READERS["numbers"], text) for text in cells) < len(cells):
        if problem := describe_ambiguity(cells):
            raise DataError(f"the target {name!r} holds {problem}")
        advice = f", and {hint}" if (hint := _identifier_remedy(name)) else f": {remedy}"
        raise DataError(f"the target {name!r} holds words, and this task expects {expected} in each row{advice}")
    _check_only_numbers(table, name, READERS["numbers"], "correct the row, or leave it out")


def _check_only_numbers(table: Table, name: str, reader: Callable[[str], float], remedy: str) -> None:
    """Raise a :class:`DataError` if a cell of a column of numbers is not a number. It names the rows, and no cell: cells are private."""
    column = table.columns[name]
    if column.dtype == np.float64:
        return
    other_rows = np.flatnonzero([not (table.is_absent(text) or can_parse(reader, text)) for text in column])
    if other_rows.size:
        where = _describe_rows(table, other_rows)
        raise DataError(f"{where}: the target {name!r} is not a number, unlike others in this column: {remedy}")


def _describe_rows(table: Table, rows: NDArray[np.int64]) -> str:
    """Return the places of the first few ``rows``, such as "a.csv, line 2, line 7", and how many others there are, for a message."""
    first, *further = (table.where(int(row)) for row in rows[:_MAX_NAMED])
    file = first.rpartition(", ")[0]  # "a.csv" of "a.csv, line 2"; the message names it once
    listed = ", ".join([first, *(place.removeprefix(f"{file}, ") for place in further)])
    return f"{listed} and {counted(len(rows) - _MAX_NAMED, 'other')}" if len(rows) > _MAX_NAMED else listed


_MAX_NAMED = 5
"""Maximum number of rows that a message names."""


def _class_targets(tables: Sequence[Table], name: str, config: DataConfig) -> ReadTargets:
    """Return the number of each row's class (N,), in the order of ``data.classes`` or else of the classes in the first table."""
    numeric = all(table.is_numeric(name) for table in tables) and not config.classes  # then 1 and 1.0 are the same class
    if numeric:
        # First, so that a column of measurements gets the advice on quantities, and not a message on a cell such as <0.5.
        numbers = tables[0].numbers(name, strict=False)
        if (count := np.unique(numbers[~np.isnan(numbers)]).size) > _MAX_NUMERIC_CLASSES:
            check_number_of_classes(name, count, numeric=True)
        for table in tables:
            _check_only_numbers(table, name, float, "correct the row, leave it out, or name all classes, --set 'data.classes=[\"0\", ...]'")
    words = [column_words(table, name, numeric=numeric, values=config.classes) for table in tables]
    classes = list(config.classes) or _classes_in(tables[0], name, words[0])
    for table, table_words in zip(tables, words, strict=True):
        remedy = "leave such rows out; or, if the word is a class, name all classes, --set 'data.classes=[\"none\", ...]'"
        _check_none_missing(table, name, np.array([not word for word in table_words]), remedy)
    class_numbers = {word: number for number, word in enumerate(classes)}
    targets = []
    for table, table_words in zip(tables, words, strict=True):
        for row, word in enumerate(table_words):
            if word not in class_numbers:
                if config.classes:
                    problem = f"in data.classes, expected one of {listed_names(classes, 10)}"
                else:
                    problem = (
                        f"one of the training rows' classes, {listed_names(classes, 10)}: correct its spelling, list all classes in "
                        "data.classes, or leave the row out"
                    )
                raise DataError(f"{table.where(row)}: the class in the column {name!r} is not {problem}")
        targets.append(torch.tensor([class_numbers[word] for word in table_words]))
    notes = () if config.classes else (_NOTE_ON_CLASSES.format(name=name, some=listed_names(classes, 5)), *_note_on_case(name, classes))
    return ReadTargets(targets, len(classes), notes, tuple(classes))


_NOTE_ON_CLASSES = (
    "the classes of {name!r} ({some}) were taken from the data, as if they were public: "
    "if it is secret which of them occur, list all classes in data.classes"
)


def _note_on_whole_numbers(name: str, classes: Sequence[str]) -> tuple[str, ...]:
    """Return a note if the ``classes`` of the target ``name`` are whole numbers that may be counts; an empty tuple if they are not.

    The first ones must be consecutive numbers from 0 or 1. Larger counts are rare, so there may be gaps between them.
    """
    start = 1 if classes[0] == "1" else 0
    expected = [str(number) for number in range(start, start + _MIN_COUNTS)]
    if list(classes[:_MIN_COUNTS]) != expected or not all(word.isdecimal() for word in classes):
        return ()
    return (
        f"the target {name!r} has {len(classes)} different values, the whole numbers from {classes[0]} to {classes[-1]}, taken as "
        "classes without an order. If they count something, such as visits, set task.name to 'poisson' (--task poisson); if they measure "
        "something, to 'regression' (--task regression); if they are grades, to 'ordinal' (--task ordinal)",
    )


_MIN_COUNTS = 6
"""Minimum number of classes that may be counts. Fewer whole numbers are mostly codes or grades: yes and no, or a scale of up to 5."""


def _note_on_case(name: str, classes: Sequence[str]) -> tuple[str, ...]:
    """Return a note if some classes of the target ``name`` differ in upper and lower case alone; an empty tuple if none do."""
    spellings: dict[str, list[str]] = {}
    for word in classes:
        spellings.setdefault(word.casefold(), []).append(word)
    alike = next((words for words in spellings.values() if len(words) > 1), None)
    if alike is None:
        return ()
    return (
        f"{' and '.join(alike)} are different classes of {name!r}, but differ only in upper and lower case: if they mean the same, "
        "rewrite one of them",
    )


def _classes_in(table: Table, name: str, words: Sequence[str]) -> list[str]:
    """Return the distinct ``words`` of the target ``name`` in natural order, or raise if they are not plausible as classes.

    An empty word, which is a missing value, is no class.
    """
    classes = sorted({*words} - {""}, key=natural_key)
    if len(classes) > 1 or "" not in words:  # else the caller raises on the empty cells, which says more
        check_number_of_classes(name, len(classes), numeric=table.is_numeric(name))
    return classes


def check_number_of_classes(name: str, count: int, *, numeric: bool) -> None:
    """Raise a :class:`DataError` if the target ``name`` with ``count`` different values is a quantity, an identifier, or always the same.

    ``numeric`` says whether most values are numbers.
    """
    different = f"the target {name!r} has {count:,} different values"
    if count > _MAX_NUMERIC_CLASSES and (remedy := _identifier_remedy(name)):
        raise DataError(f"{different}, and {remedy}; if it is what you want to predict, list its values in data.classes")
    if count > _MAX_NUMERIC_CLASSES and numeric:
        raise DataError(
            f"{different}, which are numbers: to estimate the number, set task.name to 'regression' (--task regression); to predict "
            "whether it passes a limit, add a column that is 1 where it does, otherwise 0, and name this column in data.target (--target)"
        )
    if count > MOST_CLASSES:
        raise DataError(f"{different}, and a classification has at most {MOST_CLASSES:,} classes: merge some, or name another column")
    if count == 1:
        raise DataError(f"the target {name!r} is the same in every row, so there is nothing to learn: name another column in data.target")


def _identifier_remedy(name: str) -> str:
    """Return what to do about a target whose ``name`` suggests an identifier, such as a patient's number; "" for any other name."""
    kind = identifier_kind(name)
    setting = {"person": "--person (data.person)", "client": "--client (data.client)"}.get(kind or "")
    use = f"; a column that names each row's {kind} belongs in {setting}" if setting else ""
    return f"its name suggests an identifier: name the column of the outcome in data.target (--target){use}" if kind else ""


def natural_key(word: str) -> tuple[int, float, str]:
    """Return a sort key that puts numbers in numeric order, before words."""
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def _check_none_missing(table: Table, name: str, absent: NDArray[np.bool_], remedy: str) -> None:
    """Raise a :class:`DataError` if a row has no target, which the mask ``absent`` (N,) marks."""
    if absent.any():
        where = _describe_rows(table, np.flatnonzero(absent))
        missing = "an empty cell, or a word for a missing value, such as NA or None"
        raise DataError(f"{where}: the target {name!r} has no value ({missing}): {remedy}")


def _token_targets(table: Table, config: DataConfig) -> Tensor:
    """Return the next byte at each position of each text as a token (N, length), and ``NO_TOKEN`` after the end."""
    if not config.text:
        raise ConfigError("a language model is trained on texts: name their column in data.text")
    next_bytes = texts_as_bytes(table.column(config.text, "data.text"), config.length)[:, 1:]  # without the mark of the start
    return torch.where(next_bytes == 0, NO_TOKEN, next_bytes)  # 0 is padding
