"""Write the files of a new Flower app that uses ldpfl's ready ServerApp and ClientApp, for a person to read, change and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ldpfl.data.columns import column_words, resolve_column_kinds, resolve_text_column
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, read_table
from ldpfl.data.targets import check_number_of_classes, check_order_known, natural_key
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, split_by_key, toml_value
from ldpfl.experiments.dataset import data_settings_of
from ldpfl.flower.run_settings import RunSettings
from ldpfl.util.files import write_text

_PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "Private training with ldpfl on Flower"
license = "LicenseRef-unspecified"
requires-python = ">=3.11"
dependencies = ["ldpfl[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "unknown"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# What these mean: ldpfl settings, and the page on Flower.
[tool.flwr.app.config.ldpfl]
{settings}"""

_MODULE = '"""The {side}: ldpfl\'s own, for its recipes."""\n\nfrom ldpfl.flower.apps import {side}_app as app\n\n__all__ = ["app"]\n'

NOT_KNOWN = [0, 0]
"""Placeholder for the bounds of a column, to be filled in by the app's author. A run with these bounds is refused."""


def write_app(folder: Path, settings: RunSettings) -> None:
    """Write an app whose ServerApp and ClientApp are ldpfl's own, with these settings.

    Raises:
        ConfigError: the folder is not empty, or its name cannot be the name of a Python package.
    """
    package = folder.resolve().name.replace("-", "_")
    if not package.isidentifier():
        raise ConfigError(
            f"the folder's name becomes the name of a Python package, but {folder.name!r} is not a valid name: begin with a letter, and "
            "use letters, digits, - and _"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and was not changed: give a new or empty folder")
    (folder / package).mkdir(parents=True)
    text = _PYPROJECT.format(name=package.replace("_", "-"), package=package, settings=_readable_toml(settings.to_dict()))
    write_text(folder / package / "__init__.py", '"""Private training on Flower."""\n')
    for side in ("server", "client"):
        write_text(folder / package / f"{side}_app.py", _MODULE.format(side=side))
    write_text(folder / "pyproject.toml", text)


def _readable_toml(settings: Mapping[str, Any]) -> str:
    """Return ``settings`` as TOML. Text of several lines keeps its lines and needs no escapes, where that is possible."""
    lines = []
    for key, value in settings.items():
        needs_no_escapes = isinstance(value, str) and "\n" in value and "'''" not in value and value.replace("\n", "").isprintable()
        lines.append(f"{key} = '''\n{value}'''\n" if needs_no_escapes else tomli_w.dumps({key: value}))
    return "".join(lines)


def example_table_settings(path: Path, target: str | list[str], client: str, person: str, config: RunConfig) -> tuple[dict[str, Any], str]:
    """Return settings for nodes whose tables have the columns of the example table at ``path``, and a note on columns left out.

    ``target``, ``client`` and ``person`` name the columns with the target(s), and with each row's client and person; "" for none.

    The settings copy names and classes from the example table, so this table must be public. The settings in ``config`` choose the columns
    and their kinds, as in a simulation. A column of numbers or dates for which ``config`` has no bounds gets :data:`NOT_KNOWN`. Columns
    whose names suggest identifiers are left out. The note names these columns and those of texts, and is empty if there are none. For a
    model of texts, the settings name only the one column that it reads.

    Raises:
        ConfigError: ``config`` names no column of texts, and a pretrained model has several to choose from; or it gives a column two
            kinds; or it does not give the order of ordered classes.
        DataError: the table cannot be read, or lacks one of the named columns.
    """
    table = read_table(path).with_missing(config.data.missing_words)
    data = data_settings_of(config).model_copy(update={"name": "node", "target": target, "client": client, "person": person})
    for name, setting in (*((name, "--target") for name in data.target_names), (client, "--client"), (person, "--person")):
        if name:
            table.column(name, setting)  # raises if the table has no such column
    data = resolve_text_column(table, data)
    note = ""
    settings: dict[str, Any] = {"data.name": "node", "data.target": target}
    if data.text:
        table.column(data.text, "--text")
        settings["data.text"] = data.text
    else:
        data, notes = resolve_column_kinds(table, data)
        settings |= {"data.columns": data.columns, "data.words": data.words}
        note = ". ".join(notes)
    settings |= {f"data.{key}": value for key in ("person", "dates", "categories") if (value := getattr(data, key))}
    bounded_columns = [name for name in data.columns if name not in data.words and name not in data.categories]
    bounded_columns += _targets_with_bounds(table, data, config.task.name)
    settings["data.bounds"] = {name: data.bounds.get(name, NOT_KNOWN) for name in bounded_columns}
    if config.task.name in _TASKS_OF_CLASSES:
        settings["data.classes"] = data.classes or _classes_in(table, data.target_names[0], config.task.name)
    return settings, note


_TASKS_OF_CLASSES = ("classification", "ordinal")
"""Tasks whose targets are the names of classes."""

_TASKS_OF_NUMBERS = ("regression", "poisson", "survival")
"""Tasks whose first target is a number, whatever its cells look like."""


def _targets_with_bounds(table: Table, data: DataConfig, task: str) -> list[str]:
    """Return the target column that needs bounds at nodes, as a list of one name, or an empty list.

    Bounds are needed by a target that is a number, a count, or a time that is not cut at given points (``data.cut_points``).
    """
    if task in (*_TASKS_OF_CLASSES, "multilabel") or data.cut_points:
        return []
    first = data.target_names[0]  # of a language model, this is the column of texts
    is_number = first != data.text and (task in _TASKS_OF_NUMBERS or table.kind(first) != "words")
    return [first] if is_number else []


def _classes_in(table: Table, target: str, task: str) -> list[str]:
    """Return the different values of the column ``target``, as texts, in the order in which a simulation numbers the classes.

    Raises:
        ConfigError: ``task`` needs the order of the classes, but the classes are words, whose order is unknown.
        DataError: the values are not classes, but a quantity or an identifier.
    """
    classes = sorted({*column_words(table, target)} - {""}, key=natural_key)  # "" is an empty cell
    check_number_of_classes(target, len(classes), numeric=table.is_numeric(target))
    if task == "ordinal":
        check_order_known(classes, target)
    return classes


def without_column_changes(changes: Iterable[str]) -> list[str]:
    """Return ``changes`` of a config, ``key=value``, without those that describe a table or its columns.

    :func:`example_table_settings` has used these already. If they were kept, they would be written twice, and could name a column that is
    no input.
    """
    single_changes = (part for change in changes for part in split_by_key(change))
    return [change for change in single_changes if not f"{change.partition('=')[0].strip()}.".startswith(_TABLE_KEYS)]


_COLUMN_SETTINGS = ("columns", "numbers", "words", "dates", "bounds", "categories", "classes")
_TABLE_KEYS = tuple(f"data.{key}." for key in ("name", "path", "target", "client", "person", "text", *_COLUMN_SETTINGS))
"""Beginnings of the keys of settings that describe a table. The point at the end keeps "data.name" from matching "data.names"."""


def settings_to_changes(settings: Mapping[str, Any]) -> list[str]:
    """Return each of the ``settings`` as a change of a config, ``key=value``."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]
