"""Tables that clients on Flower hold themselves: what is public of them is in the settings, and each node reads its own file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ldpfl.data.encoding import dataset_of
from ldpfl.data.samples import Dataset
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Column, Table, read_table
from ldpfl.errors import ConfigError, DataError
from ldpfl.tasks import Targets


def described_at_nodes(config: DataConfig, targets: Targets) -> Dataset:
    """Return what a server knows of its clients' tables: one made-up row to train on, and the rows of ``data.test_path``, if there are.

    Raises:
        ConfigError: a setting that has to be public is missing, or does not fit.
        DataError: the test rows cannot be read.
    """
    stand_in = _stand_in(config, targets)
    test = read_table(Path(config.test_path)) if config.test_path else stand_in
    found = dataset_of("node", stand_in, test, config, targets)
    return found if config.test_path else replace(found, test=found.test.take(torch.arange(0)))


def read_at_node(config: DataConfig, targets: Targets, path: Path) -> Dataset:
    """Return a node's own table, all of whose rows are trained on.

    Every rule by which it is read is in ``config``, so that no row decides about another.

    Raises:
        ConfigError: as :func:`described_at_nodes`.
        DataError: the table cannot be read, or does not fit; the line is named.
    """
    return dataset_of(path.stem, read_table(path), _stand_in(config, targets), config, targets)


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
        if name in config.bounds:
            yield name, np.array([config.bounds[name][0]])
        elif name in config.categories or name in config.words:
            yield name, np.array([config.categories.get(name, ["word"])[0]], dtype=object)
        else:
            raise ConfigError(f"data.bounds, data.categories or data.words has to say what stands in {name!r}, since nobody else sees it")
    names = [config.target] if isinstance(config.target, str) else config.target
    for name in filter(None, names):
        yield name, _target(name, config, targets)


def _target(name: str, config: DataConfig, targets: Targets) -> Column:
    if targets == "class" and not config.classes:
        raise ConfigError("data.classes has to say which there are, since nobody else sees nodes' tables")
    if targets == "number" and name not in config.bounds:
        raise ConfigError(f"data.bounds has to hold those of the target {name!r}, since nobody else sees nodes' tables")
    if targets == "class":
        return np.array([config.classes[0]], dtype=object)
    return np.array([config.bounds[name][0] if targets == "number" else 0.0])


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
