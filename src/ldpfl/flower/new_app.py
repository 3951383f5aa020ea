"""A new Flower app around the ready ones: files that a person reads, changes and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ldpfl.data.identifiers import note_on, whose
from ldpfl.data.tables import read_table
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import toml_value
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
_MODULE = '"""The {who}: ldpfl\'s own, for its recipes."""\n\nfrom ldpfl.flower.apps import {who}_app as app\n\n__all__ = ["app"]\n'

NOT_KNOWN = [0, 0]
"""Bounds that are still to be filled in, and refused until they are."""


def write_app(folder: Path, settings: RunSettings) -> None:
    """Write an app whose ServerApp and ClientApp are ldpfl's own, with these settings.

    Raises:
        ConfigError: there is something in the folder, or it has no name that a package can have.
    """
    package = folder.resolve().name.replace("-", "_")
    if not package.isidentifier():
        raise ConfigError(f"the folder's name is that of a Python package, and {folder.name!r} cannot be one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and is left as it is: give a new folder")
    (folder / package).mkdir(parents=True)
    text = _PYPROJECT.format(name=package.replace("_", "-"), package=package, settings=_as_people_write(settings.to_dict()))
    write_text(folder / package / "__init__.py", '"""Private training on Flower."""\n')
    for who in ("server", "client"):
        write_text(folder / package / f"{who}_app.py", _MODULE.format(who=who))
    write_text(folder / "pyproject.toml", text)


def _as_people_write(settings: Mapping[str, Any]) -> str:
    """Return ``settings`` as TOML; several lines of changes as lines, without escapes, where that can be."""
    lines = []
    for key, value in settings.items():
        literal = isinstance(value, str) and "\n" in value and "'''" not in value and value.replace("\n", "").isprintable()
        lines.append(f"{key} = '''\n{value}'''\n" if literal else tomli_w.dumps({key: value}))
    return "".join(lines)


def public_settings(
    path: Path, target: str, client: str | None, person: str | None, bounds: Mapping[str, Sequence[float]], *, classes: bool
) -> tuple[dict[str, Any], str]:
    """Return what the settings of nodes' own tables say that are like the one at ``path``: taken from it, so it is to be a public one.

    Bounds of columns of numbers are taken from ``bounds``; others are :data:`NOT_KNOWN`. Beside the settings comes a note on columns
    that are left out for their names, empty where there are none.

    Raises:
        DataError: the table cannot be read, or has no such column.
    """
    table = read_table(path)
    for name, setting in ((target, "--target"), (client, "--client"), (person, "--person"), *((name, "data.bounds") for name in bounds)):
        if name is not None:
            table.column(name, setting)
    candidates = [name for name in table.columns if name not in (target, client, person)]
    left_out = [name for name in candidates if whose(name)]
    columns = [name for name in candidates if name not in left_out]
    kinds = {name: table.kind(name) for name in (*columns, *([] if classes else [target]))}
    found: dict[str, Any] = {
        "data.name": "node",
        "data.target": target,
        "data.columns": columns,
        "data.bounds": {name: list(bounds.get(name, NOT_KNOWN)) for name, kind in kinds.items() if kind != "words"},
        "data.words": [name for name in columns if kinds[name] == "words"],
    }
    if person is not None:
        found["data.person"] = person
    if dates := [name for name in columns if kinds[name] == "dates"]:
        found["data.dates"] = dates
    if classes:
        cells = (f"{cell:.15g}" if isinstance(cell, float) else cell.strip() for cell in table.columns[target])
        found["data.classes"] = sorted({cell for cell in cells if not table.is_absent(cell)})
    return found, note_on(left_out, person=person or "", client=client or "") if left_out else ""


def written(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as changes of a config, ``key=value``."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()]
