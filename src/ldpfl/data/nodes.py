"""Tables that clients on Flower hold themselves: what is public of them is in the settings, and each node reads its own file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.columns import persons_in, same_word, words_of
from ldpfl.data.from_table import dataset_of
from ldpfl.data.samples import Dataset
from ldpfl.data.scaling import by_bounds
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Column, Table, read_table
from ldpfl.errors import ConfigError, DataError
from ldpfl.tasks import ABSENT, Targets


def described_at_nodes(config: DataConfig, targets: Targets) -> Dataset:
    """Return what a server knows of its clients' tables: one made-up row to train on, and the rows of ``data.test_path``, if there are.

    Raises:
        ConfigError: a setting that has to be public is missing, or does not fit.
        DataError: the test rows cannot be read.
    """
    stand_in = _stand_in(config, targets)
    test = read_table(Path(config.test_path)) if config.test_path else stand_in
    found = _on_scale(dataset_of("node", stand_in, test, config, targets), config)
    return found if config.test_path else replace(found, test=found.test.take(torch.arange(0)))


def read_at_node(config: DataConfig, targets: Targets, path: Path) -> Dataset:
    """Return a node's own table, of which no row decides about another.

    Every rule by which it is read is in ``config``, which a server chooses, anew for each round. So a row that does not fit is no error:
    what a server leaves out of its rules would stop the node where some row has it. A cell that the rules do not know is one without a
    value, and a row of which too little is left keeps its place and teaches nothing. Where persons are protected, a row of which nobody
    knows the person is nobody's, and is left out.

    Raises:
        ConfigError: as :func:`described_at_nodes`.
        DataError: the table cannot be read at all, or lacks a column.
    """
    stand_in = _stand_in(config, targets)
    names = {*stand_in.columns, *config.numbers, *config.words, *config.dates, *config.bounds, *config.categories}
    table = _of_somebody(read_table(path, names, names_shown=False).with_missing(config.missing_words), config, path)
    readable, kept = _fitted(table, stand_in, config, targets)
    found = _on_scale(dataset_of(path.stem, readable, stand_in, config, targets), config)
    answers = found.train.targets
    answers[torch.from_numpy(~kept)] = torch.tensor(ABSENT[targets], dtype=answers.dtype)
    return found


def check_at_node(config: DataConfig, targets: Targets, path: Path) -> None:
    """Return if each row of a node's own table fits: for its operator, before anything is trained on.

    Raises:
        ConfigError: as :func:`described_at_nodes`.
        DataError: one does not; the line is named.
    """
    dataset_of(path.stem, read_table(path, names_shown=False), _stand_in(config, targets), config, targets)


def values_beyond_bounds(config: DataConfig, path: Path) -> dict[str, int]:
    """Return how many values of each column of a node's own table lie outside ``data.bounds``, of the columns where some do.

    Such a value counts as the nearer bound. That is no error; where the table has another unit than the bounds, it is most of a column.

    Raises:
        DataError: the table cannot be read, or lacks a column.
    """
    names = [name for name in config.bounds if name not in config.dates]
    table = read_table(path, names, names_shown=False).with_missing(config.missing_words)
    found = {}
    for name in names:
        table.column(name, "data.bounds")
        numbers, (low, high) = table.numbers(name, strict=False), config.bounds[name]
        found[name] = int(((numbers < low) | (numbers > high)).sum())
    return {name: count for name, count in found.items() if count}


def _on_scale(dataset: Dataset, config: DataConfig) -> Dataset:
    """Return ``dataset`` scaled by its bounds; as it is, where its columns are to be measured."""
    return dataset if config.scaling == "measured" else by_bounds(dataset)


def _of_somebody(table: Table, config: DataConfig, path: Path) -> Table:
    """Return the rows of ``table`` that name their person, where ``config`` names persons; else all."""
    if not config.person:
        return table
    named = np.array(persons_in(table, config), dtype=object) != ""
    if not named.any():
        raise DataError(f"no row of {path} has a value in the column {config.person!r}, which data.person names")
    return table.take(np.flatnonzero(named))


def _fitted(table: Table, stand_in: Table, config: DataConfig, targets: Targets) -> tuple[Table, NDArray[np.bool_]]:
    """Return the table as the settings can read it, and which of its rows they leave enough of; each row by itself."""
    columns, kept = dict(table.columns), np.ones(len(table), dtype=bool)
    names = {config.target} if isinstance(config.target, str) else set(config.target)
    for name in (own for own in stand_in.columns if own != config.person):
        cells = table.column(name, "data.target" if name in names else "data.columns")
        if name in names and targets in ("class", "ordered"):
            words = words_of(table, name, values=config.classes)
            fits = np.array([word in config.classes for word in words])
            columns[name] = np.where(fits, np.array(words, dtype=object), config.classes[0])
        elif name in names and targets != "tokens":
            numbers = table.numbers(name, strict=False)
            fits = _told(numbers, targets, is_event=targets == "survival" and name == config.target_names[1])
            columns[name] = np.where(fits, numbers, stand_in.columns[name][0])
        elif name in config.dates:
            known = ~np.isnan(table.numbers(name, kind="dates", strict=False))
            fits = known if config.missing == "refuse" else kept
            columns[name] = np.where(known, cells, stand_in.columns[name][0] if config.missing == "refuse" else "").astype(object)
        elif name in config.bounds:
            numbers = table.numbers(name, strict=False)
            fits = ~np.isnan(numbers) if config.missing == "refuse" else kept
            columns[name] = np.where(fits, numbers, stand_in.columns[name][0])
        elif name == config.text:
            columns[name] = cells if cells.dtype == object else np.array(words_of(table, name), dtype=object)
            fits = kept
        elif name in config.categories:
            listed, words = set(map(same_word, config.categories[name])), words_of(table, name, values=config.categories[name])
            columns[name] = np.array([word if same_word(word) in listed else "" for word in words], dtype=object)
            fits = kept
        else:
            fits = kept
        kept = kept & fits
    return replace(table, columns=columns), kept


def _told(numbers: NDArray[np.float64], targets: Targets, *, is_event: bool) -> NDArray[np.bool_]:
    """Return which of a column's ``numbers`` can be a target."""
    if targets == "classes" or is_event:
        return np.isin(numbers, (0, 1))
    return ~np.isnan(numbers) if targets == "number" else numbers >= 0


def _stand_in(config: DataConfig, targets: Targets) -> Table:
    """Return a table of one row that the settings allow."""
    columns = dict(_columns(config, targets))

    def where(row: int) -> str:
        return "the settings of data"

    return Table(columns, where, "made up")


def _columns(config: DataConfig, targets: Targets) -> Iterator[tuple[str, Column]]:
    if config.path or config.client or config.evaluate_on != "test":
        raise ConfigError("data.name = 'node' is each node's own table, which only its operator names: leave path, client, evaluate_on out")
    if config.text:
        yield config.text, np.array(["word"], dtype=object)
    elif not config.columns:
        raise ConfigError("data.columns has to name what nodes' tables are read for, since nobody else sees them")
    for name in config.columns:
        if name in config.bounds and name in config.dates:
            yield name, np.array(["1970-01-01"], dtype=object)
        elif name in config.bounds:
            yield name, np.array([config.bounds[name][0]])
        elif name in config.categories or name in config.words:
            yield name, np.array([config.categories.get(name, ["word"])[0]], dtype=object)
        else:
            raise ConfigError(f"data.bounds, data.categories or data.words has to say what stands in {name!r}, since nobody else sees it")
    names = [config.target] if isinstance(config.target, str) else config.target
    for name in filter(None, names):
        yield name, _target(name, config, targets)
    if config.person:
        yield config.person, np.array(["somebody"], dtype=object)


def _target(name: str, config: DataConfig, targets: Targets) -> Column:
    of_classes, of_time = targets in ("class", "ordered"), targets == "survival" and name == config.target_names[0]
    if of_classes and not config.classes:
        raise ConfigError("data.classes has to say which there are, since nobody else sees nodes' tables")
    if (targets in ("number", "count") or (of_time and not config.cut_points)) and name not in config.bounds:
        raise ConfigError(f"data.bounds has to hold those of the target {name!r}, since nobody else sees nodes' tables")
    if of_classes:
        return np.array([config.classes[0]], dtype=object)
    return np.array([config.bounds[name][0] if name in config.bounds else 0.0])


def table_path(named: str | None, partition: object) -> Path:
    """Return the table that an operator ``named``, in which ``{partition}`` stands for the node's number.

    Raises:
        DataError: none is named, or the node has no number.
    """
    if not named:
        raise DataError("this node has no table of its own: name it in LDPFL_DATA, in the environment of the SuperNode")
    if "{partition}" in named and not isinstance(partition, int):  # others may have written it: it must lead nowhere else
        raise DataError("LDPFL_DATA names a table by {partition}, and the node's config has no partition-id that is a number")
    return Path(named.replace("{partition}", str(partition)))
