"""Recipes, the shipped configs: one TOML file each, named by its path. Load a config from a recipe or from a user's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, parse_config, read_config
from ldpfl.experiments.shipped import recipe_files
from ldpfl.util.suggestions import did_you_mean, quoting_hint


def load_recipe(name: str, *overrides: Iterable[str]) -> RunConfig:
    """Return the config of the recipe ``name`` with ``key=value`` overrides applied, see :func:`~ldpfl.experiments.config.parse_config`.

    Raises:
        ConfigError: there is no such recipe, or an override does not fit.
    """
    recipes = recipe_files()
    if name not in recipes:
        raise ConfigError(f"no recipe {name!r}{quoting_hint(name) or f': {did_you_mean(name, recipes)}'}")
    return parse_config(recipes[name].read_text(encoding="utf-8"), *overrides, origin=f"recipe {name}")


def recipe_or_file(name: str | Path, *overrides: Iterable[str]) -> RunConfig:
    """Return the config of the recipe ``name``, or of the user's file ``name`` if it is a path or ends in .toml.

    Lists of ``key=value`` overrides are applied as in :func:`~ldpfl.experiments.config.parse_config`.

    Raises:
        ConfigError: there is no such recipe or file, or an override does not fit.
    """
    recipes, path = recipe_files(), Path(name)
    if name in recipes:
        return load_recipe(str(name), *overrides)
    if _is_true(Path.is_dir, path):
        raise ConfigError(f"{name} is a folder: expected the name of a recipe, or a config file (*.toml)")
    if path.suffix == ".toml" or isinstance(name, Path):  # a text without this ending may be a misspelt recipe
        if path.as_posix() in recipes and not _is_true(Path.exists, path):
            raise ConfigError(
                f"there is no config file {name}: to run the recipe of this name, give the text {path.as_posix()!r} instead of a path"
            )
        return read_config(path, *overrides)
    if _is_true(Path.is_file, path):
        raise ConfigError(
            f"{name} is not a config, because its name does not end in .toml: rename it, or if it is your data, give --data {name}"
        )
    return load_recipe(name, *overrides)


def _is_true(test: Callable[[Path], bool], path: Path) -> bool:
    """Return ``test(path)``, or False if the system refuses to look there, or the name is too long for a path."""
    try:
        return test(path)
    except OSError:
        return False
