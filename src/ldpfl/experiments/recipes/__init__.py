"""The shipped configs: one TOML file a recipe, named by its path."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.suggestions import did_you_mean

DEFAULT = "quickstart"


def recipe_names() -> tuple[str, ...]:
    """Names of all recipes, sorted, the default first."""
    return tuple(sorted(_paths(), key=lambda name: (name != DEFAULT, name)))


def load_recipe(name: str, *overrides: Iterable[str]) -> RunConfig:
    """Return the config of the recipe ``name`` with ``key=value`` overrides applied, see :func:`~ldpfl.experiments.config.parse_config`.

    Raises:
        ConfigError: there is no such recipe, or an override does not fit.
    """
    paths = _paths()
    if name not in paths:
        raise ConfigError(f"no recipe {name!r}: {did_you_mean(name, paths)}")
    return parse_config(paths[name].read_text(encoding="utf-8"), *overrides, origin=f"recipe {name}")


def _paths() -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}

    def collect(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.name.endswith(".toml"):
                found[prefix + entry.name.removesuffix(".toml")] = entry
            elif entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")

    collect(files(__name__), "")
    return found
