"""Tables that stay at Flower nodes. The settings describe their columns in public, and each node reads its own file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.columns import canonical_word, check_exact_names, column_words, person_names
from ldpfl.data.dataset import Dataset
from ldpfl.data.from_table import dataset_from_table
from ldpfl.data.scaling import scaled_by_bounds
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Column, Table, read_table
from ldpfl.errors import ConfigError, DataError
from ldpfl.tasks import ABSENT, Targets


def server_view_of_node_tables(config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set that the server has instead of the nodes' tables: one made-up training row, and the rows of ``data.test_path``.

    Raises:
        ConfigError: a setting that describes the tables is missing, or does not fit.
        DataError: the test rows cannot be read.
    """
    made_up = _made_up_table(config, targets)
    test = read_table(Path(config.test_path)) if config.test_path else made_up
    dataset = _scaled_unless_measured(dataset_from_table("node", made_up, test, config, targets), config)
    return dataset if config.test_path else replace(dataset, test=dataset.test.take(torch.arange(0)))  # no test rows


def read_node_table(config: DataConfig, targets: Targets, path: Path) -> Dataset:
    """Read a node's own table, such that no row affects how another row is read.

    The server chooses the rules in ``config`` and may change them in each round. So a row that does not fit must not be an error: a
    server could omit a value from its rules, and see from the error whether the node has it. A cell that the rules do not allow counts as
    missing. A row without a valid target keeps its place and contributes nothing. Where persons are protected, rows without a person are
    left out.

    Raises:
        ConfigError: as :func:`server_view_of_node_tables`.
        DataError: the table cannot be read at all, or lacks a column.
    """
    made_up = _made_up_table(config, targets)
    names = {*made_up.columns, *config.numbers, *config.words, *config.dates, *config.bounds, *config.categories}
    table = _rows_with_person(read_table(path, names, names_shown=False).with_missing(config.missing_words), config, path)
    readable, usable = _replace_invalid_cells(table, made_up, config, targets)
    # The made-up row serves as the test rows, so no row of the node's table is taken for the test.
    dataset = _scaled_unless_measured(dataset_from_table(path.stem, readable, made_up, config, targets), config)
    train_targets = dataset.train.targets  # changed in place: an absent target marks a row that is not trained on
    train_targets[torch.from_numpy(~usable)] = torch.tensor(ABSENT[targets], dtype=train_targets.dtype)
    return dataset


def check_node_table(config: DataConfig, targets: Targets, path: Path) -> None:
    """Raise if a row of a node's own table does not fit. The node's operator runs this check before training.

    Raises:
        ConfigError: as :func:`server_view_of_node_tables`.
        DataError: a row does not fit. The message names its line.
    """
    table = read_table(path, names_shown=False)
    if config.person:  # not checked in a round, where an error would reveal that such a cell exists
        check_exact_names(table, config.person, "data.person")
    dataset_from_table(path.stem, table, _made_up_table(config, targets), config, targets)


def values_beyond_bounds(config: DataConfig, path: Path) -> dict[str, int]:
    """Return the number of values outside ``data.bounds``, for each column of a node's own table that has any.

    Such a value is clipped to the nearer bound, which is no error. If most of a column is outside, its unit may differ from the bounds'.

    Raises:
        DataError: the table cannot be read, or lacks a column.
    """
    names = [name for name in config.bounds if name not in config.dates]
    table = read_table(path, names, names_shown=False).with_missing(config.missing_words)
    counts = {}
    for name in names:
        table.column(name, "data.bounds")  # raises if there is no such column
        low, high = config.bounds[name]
        numbers = table.numbers(name, strict=False)
        counts[name] = int(((numbers < low) | (numbers > high)).sum())
    return {name: count for name, count in counts.items() if count}


def _scaled_unless_measured(dataset: Dataset, config: DataConfig) -> Dataset:
    """Return ``dataset`` scaled by its bounds, or unchanged if the federation measures its columns before training."""
    return dataset if config.scaling == "measured" else scaled_by_bounds(dataset)


def _rows_with_person(table: Table, config: DataConfig, path: Path) -> Table:
    """Return the rows of ``table`` that name a person, or all rows if ``data.person`` is not set."""
    if not config.person:
        return table
    named = np.array(person_names(table, config), dtype=object) != ""
    if not named.any():
        raise DataError(f"the column {config.person!r} (data.person) is empty in all rows of {path}: fill it in, or use another table")
    return table.take(np.flatnonzero(named))


def _replace_invalid_cells(table: Table, made_up: Table, config: DataConfig, targets: Targets) -> tuple[Table, NDArray[np.bool_]]:
    """Return ``table`` with each cell that the settings do not allow replaced, and a mask of the rows that can still be trained on.

    An input cell becomes empty, or the cell of the row ``made_up`` if ``data.missing`` refuses empty cells. In the second case the row is
    not trained on, and neither is a row without a valid target. Each row is treated independently of the others.
    """
    columns = dict(table.columns)
    usable = np.ones(len(table), dtype=bool)
    target_names = {config.target} if isinstance(config.target, str) else set(config.target)
    for name in (column for column in made_up.columns if column != config.person):
        is_target = name in target_names
        table.column(name, "data.target" if is_target else "data.columns")  # raises if there is no such column
        made_up_cell = made_up.columns[name][0]
        if is_target and targets != "tokens":
            columns[name], fits = _valid_target_cells(table, name, made_up_cell, config, targets)
        else:
            columns[name], fits = _valid_input_cells(table, name, made_up_cell, config)
        usable = usable & fits
    return replace(table, columns=columns), usable


def _valid_target_cells(
    table: Table, name: str, made_up_cell: Any, config: DataConfig, targets: Targets
) -> tuple[Column, NDArray[np.bool_]]:
    """Return the target column ``name`` with a made-up cell in place of each invalid one, and a mask of the valid ones."""
    if targets in ("class", "ordered"):
        words = column_words(table, name, values=config.classes)
        fits = np.array([word in config.classes for word in words])
        return np.where(fits, np.array(words, dtype=object), config.classes[0]), fits
    numbers = table.numbers(name, strict=False)
    fits = _is_valid_target(numbers, targets, is_event=targets == "survival" and name == config.target_names[1])
    return np.where(fits, numbers, made_up_cell), fits


def _valid_input_cells(table: Table, name: str, made_up_cell: Any, config: DataConfig) -> tuple[Column, NDArray[np.bool_]]:
    """Return the input column ``name`` with invalid cells replaced, and a mask of the rows that it does not keep from training."""
    cells, every_row = table.columns[name], np.ones(len(table), dtype=bool)
    if name in config.dates:
        is_date = ~np.isnan(table.numbers(name, kind="dates", strict=False))
        fits = is_date if config.missing == "refuse" else every_row
        return np.where(is_date, cells, made_up_cell if config.missing == "refuse" else "").astype(object), fits
    if name in config.bounds:
        numbers = table.numbers(name, strict=False)
        fits = ~np.isnan(numbers) if config.missing == "refuse" else every_row  # else NaN stays, as an empty cell
        return np.where(fits, numbers, made_up_cell), fits
    if name == config.text:
        return cells if cells.dtype == object else np.array(column_words(table, name), dtype=object), every_row
    if name in config.categories:
        categories = set(map(canonical_word, config.categories[name]))
        words = column_words(table, name, values=config.categories[name])
        return np.array([word if canonical_word(word) in categories else "" for word in words], dtype=object), every_row
    return cells, every_row  # words that are hashed: any cell is allowed


def _is_valid_target(numbers: NDArray[np.float64], targets: Targets, *, is_event: bool) -> NDArray[np.bool_]:
    """Return a mask of the ``numbers`` that are valid targets. ``is_event`` marks the event column of survival."""
    if targets == "classes" or is_event:
        return np.isin(numbers, (0, 1))
    return ~np.isnan(numbers) if targets == "number" else numbers >= 0


def _made_up_table(config: DataConfig, targets: Targets) -> Table:
    """Return a made-up table of one row that the settings allow."""
    return Table(dict(_made_up_columns(config, targets)), lambda row: "the settings of data", "made up")


def _made_up_columns(config: DataConfig, targets: Targets) -> Iterator[tuple[str, Column]]:
    """Yield the name and the one made-up cell of each column that the settings describe.

    Raises:
        ConfigError: a setting that describes a column is missing, or a setting does not apply to nodes' tables.
    """
    if config.path or config.client or config.evaluate_on != "test":
        raise ConfigError(
            "data.name = 'node' means that each node's operator names the node's table: leave data.path, data.client and "
            "data.evaluate_on out"
        )
    if config.text:
        yield config.text, np.array(["word"], dtype=object)
    elif not config.columns:
        raise ConfigError("data.columns is empty, but the server cannot see the nodes' tables: list their input columns in data.columns")
    for name in config.columns:
        if name in config.bounds and name in config.dates:
            yield name, np.array(["1970-01-01"], dtype=object)
        elif name in config.bounds:
            yield name, np.array([config.bounds[name][0]])
        elif name in config.categories or name in config.words:
            yield name, np.array([config.categories.get(name, ["word"])[0]], dtype=object)
        else:
            raise ConfigError(
                f"the server cannot see the nodes' column {name!r}: describe it in data.bounds (numbers), data.categories or data.words"
            )
    names = [config.target] if isinstance(config.target, str) else config.target
    for name in filter(None, names):
        yield name, _made_up_target(name, config, targets)
    if config.person:
        yield config.person, np.array(["somebody"], dtype=object)


def _made_up_target(name: str, config: DataConfig, targets: Targets) -> Column:
    """Return one made-up cell of the target column ``name``, or raise if the settings do not say which values it may have."""
    has_classes = targets in ("class", "ordered")
    is_time = targets == "survival" and name == config.target_names[0]
    if has_classes and not config.classes:
        raise ConfigError("data.classes is empty, but the server cannot see the nodes' tables: list the classes in data.classes")
    if (targets in ("number", "count") or (is_time and not config.cut_points)) and name not in config.bounds:
        raise ConfigError(f"data.bounds lacks the target {name!r}, and the server cannot see the nodes' tables: give its bounds there")
    if has_classes:
        return np.array([config.classes[0]], dtype=object)
    return np.array([config.bounds[name][0] if name in config.bounds else 0.0])


def node_table_path(setting: str | None, partition: object) -> Path:
    """Return the path of the node's table: the operator's ``setting``, with the number ``partition`` in place of ``{partition}``.

    Raises:
        DataError: ``setting`` is missing, or it contains ``{partition}`` and the node's ``partition`` is no number.
    """
    if not setting:
        raise DataError("this node's table is not set: name its file in LDPFL_DATA, in the environment of the SuperNode")
    if "{partition}" in setting and not isinstance(partition, int):  # a text could lead to another folder
        raise DataError(
            "LDPFL_DATA contains {partition}, but this node has no partition number: add partition-id=NUMBER to its --node-config"
        )
    return Path(setting.replace("{partition}", str(partition)))
