"""The TOML files of the recipes and sweeps that come with the package, by name. Only descriptions are read.

The module ``recipes`` turns a file into a config, and ``sweep_config`` turns one into a sweep.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

DEFAULT = "quickstart"
"""The recipe that is run if none is named."""

OWN = "own"
"""The recipe that is run on a user's own data if none is named."""


def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes, sorted, the default first."""
    return tuple(sorted(recipe_files(), key=lambda name: (name != DEFAULT, name)))


def sweep_names() -> tuple[str, ...]:
    """Return the names of all sweeps, sorted."""
    return tuple(sorted(sweep_files()))


def recipe_files() -> Mapping[str, Traversable]:
    """Return the file of each recipe, by its name: the path below the folder of recipes."""
    return _toml_files("recipes")


def sweep_files() -> Mapping[str, Traversable]:
    """Return the file of each sweep, by its name."""
    return _toml_files("sweeps")


def reproduction_files() -> Mapping[str, Traversable]:
    """Return the file of each table and figure that can be reproduced, by its name."""
    return _toml_files("reproductions")


def description(file: Traversable) -> str:
    """Return the text of the key ``description`` in the file of a recipe or sweep; "" if it has none."""
    return str(tomllib.loads(file.read_text(encoding="utf-8")).get("description", ""))


def _toml_files(folder_name: str) -> Mapping[str, Traversable]:
    """Return all TOML files in the package's folder ``folder_name`` and below, by their path without ``.toml``."""
    by_name: dict[str, Traversable] = {}

    def collect(folder: Traversable, prefix: str) -> None:
        """Add the files in ``folder`` and below to ``by_name``, with names that begin with ``prefix``."""
        for entry in folder.iterdir():
            if entry.name.endswith(".toml"):
                by_name[prefix + entry.name.removesuffix(".toml")] = entry
            elif entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")

    collect(files("ldpfl.experiments").joinpath(folder_name), "")
    return by_name
