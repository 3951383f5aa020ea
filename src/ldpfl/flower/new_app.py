"""Write the files of a new Flower app that uses ldpfl's ready ServerApp and ClientApp, for a person to read, change and run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ldpfl.data.columns import with_text
from ldpfl.data.identifiers import note_on, whose
from ldpfl.data.tables import read_table
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, toml_value
from ldpfl.experiments.dataset import data_of
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


def public_settings(path: Path, target: str, client: str | None, person: str | None, config: RunConfig) -> tuple[dict[str, Any], str]:
    """Return settings for nodes whose tables have the columns of the example table at ``path``, and a note on columns left out.

    The settings copy names and classes from the example table, so it must be public. Bounds of number columns come from ``config``; a
    column without bounds there gets :data:`NOT_KNOWN`. Columns whose names suggest identifiers are left out. The note names them, and is
    empty if there are none. A model of texts reads one column, so no other columns are named for it.

    Raises:
        ConfigError: ``config`` names no column of texts, and a pretrained model has several to choose from.
        DataError: the table cannot be read, or lacks one of the named columns.
    """
    table, bounds, has_classes = read_table(path), config.data.bounds, config.task.name == "classification"
    for name, setting in ((target, "--target"), (client, "--client"), (person, "--person"), *((name, "data.bounds") for name in bounds)):
        if name is not None:
            table.column(name, setting)
    named_columns = {"target": target, "client": client or "", "person": person or ""}
    if text := with_text(table, data_of(config).model_copy(update=named_columns)).text:
        table.column(text, "--text")
    candidates = [] if text else [name for name in table.columns if name not in (target, client, person)]
    left_out = [name for name in candidates if whose(name)]
    columns = [name for name in candidates if name not in left_out]
    kinds = {name: table.kind(name) for name in (*columns, *([] if has_classes else [target]))}
    settings: dict[str, Any] = {
        "data.name": "node",
        "data.target": target,
        "data.bounds": {name: list(bounds.get(name, NOT_KNOWN)) for name, kind in kinds.items() if kind != "words"},
    }
    if text:
        settings["data.text"] = text
    else:
        settings |= {"data.columns": columns, "data.words": [name for name in columns if kinds[name] == "words"]}
    if person is not None:
        settings["data.person"] = person
    if dates := [name for name in columns if kinds[name] == "dates"]:
        settings["data.dates"] = dates
    if has_classes:
        cells = (f"{cell:.15g}" if isinstance(cell, float) else cell.strip() for cell in table.columns[target])
        settings["data.classes"] = sorted({cell for cell in cells if not table.is_absent(cell)})
    return settings, note_on(left_out, person=person or "", client=client or "") if left_out else ""


def written(settings: Mapping[str, Any]) -> list[str]:
    """Return each of the ``settings`` as a change of a config, ``key=value``."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]
