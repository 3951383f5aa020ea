"""The recipes and sweeps that come with the package, as TOML files: their names, texts and descriptions, without reading more of them.

``recipes`` makes a config of one, or of a file; ``sweep_config`` a sweep.
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
    """Names of all recipes, sorted, the default first."""
    return tuple(sorted(recipe_files(), key=lambda name: (name != DEFAULT, name)))


def sweep_names() -> tuple[str, ...]:
    """Names of all sweeps, sorted."""
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
    """Return what a recipe or sweep says of itself."""
    return str(tomllib.loads(file.read_text(encoding="utf-8")).get("description", ""))


def _toml_files(kind: str) -> Mapping[str, Traversable]:
    found: dict[str, Traversable] = {}

    def collect(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.name.endswith(".toml"):
                found[prefix + entry.name.removesuffix(".toml")] = entry
            elif entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")

    collect(files("ldpfl.experiments").joinpath(kind), "")
    return found
