"""List what comes with the package: recipes, sweeps, and the papers' tables and figures. Recipes and sweeps are listed without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from ldpfl.experiments.shipped import description, recipe_files, recipe_names, reproduction_files, sweep_files, sweep_names

if TYPE_CHECKING:
    from ldpfl.experiments.settings_listed import ListedSetting


@dataclass(frozen=True)
class Shipped:
    """A recipe, a sweep or a reproduction that comes with the package.

    Attributes:
        name: name by which a command takes it.
        about: sentence that says what it runs, or what it shows.
        sizes: sizes in which a reproduction can be made; empty for a recipe or a sweep.
    """

    name: str
    about: str
    sizes: tuple[str, ...] = ()


def recipes() -> tuple[Shipped, ...]:
    """Return all recipes, the default first, then by name."""
    return _described(recipe_names(), recipe_files())


def sweeps() -> tuple[Shipped, ...]:
    """Return all sweeps, by name."""
    return _described(sweep_names(), sweep_files())


def reproductions() -> tuple[Shipped, ...]:
    """Return the papers' tables and figures that can be made again, by name."""
    from ldpfl.experiments.reproduction import load_reproduction  # imported late: it loads PyTorch

    by_name = {name: load_reproduction(name) for name in sorted(reproduction_files())}
    sizes_by_name = {name: {"desk": reproduction.desk, "paper": reproduction.paper} for name, reproduction in by_name.items()}
    return tuple(
        Shipped(name, f"{reproduction.source}: {reproduction.title}", tuple(size for size, run in sizes_by_name[name].items() if run))
        for name, reproduction in by_name.items()
    )


def list_settings(of: str | None = None) -> dict[str, tuple[ListedSetting, ...]]:
    """Return the settings of a config by section, or those of one section or mechanism.

    Raises:
        ConfigError: neither a section nor a mechanism has this name.
    """
    from ldpfl.experiments.settings_listed import sections, settings  # imported late: it loads PyTorch

    return {name: settings(name) for name in (sections() if of is None else (of,))}


def mechanism_names() -> tuple[str, ...]:
    """Return the names of all mechanisms, those of installed packages included."""
    from ldpfl import mechanisms

    return tuple(mechanisms.names())


def _described(names: tuple[str, ...], files: Mapping[str, Traversable]) -> tuple[Shipped, ...]:
    """Return the recipes or sweeps with these ``names``, with the description in each one's file."""
    return tuple(Shipped(name, description(files[name])) for name in names)
