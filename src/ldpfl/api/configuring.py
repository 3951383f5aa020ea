"""From a recipe, a file or a config, and what a caller says, to the config that is run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ldpfl.data.tables import SUFFIXES
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, known_keys, parse_config, read_config, toml_value
from ldpfl.experiments.dataset import Given
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.shipped import DEFAULT
from ldpfl.importing import GIVEN
from ldpfl.suggestions import did_you_mean

Settings = Mapping[str, Any] | Sequence[str]
"""Changes of a config: ``{"ranges.radius": 0.1}``, or ``["ranges.radius=0.1"]`` as the command line has them."""

_SEED_BITS = 127
"""Beyond what anybody could try."""


def configure(what: str | Path | RunConfig = DEFAULT, settings: Settings = (), **overrides: Any) -> RunConfig:
    """Return the config that :func:`run` runs for the same arguments, checked.

    Raises:
        ConfigError: no such recipe or setting, or a value that does not fit.
    """
    changes = [*listed(settings), *listed(_by_leaf(overrides, what))]
    config = configured(what, changes)
    # A user's own data have a seed that nobody knows, unless one is said: their noise follows from it.
    said = {*(what if isinstance(what, RunConfig) else config).model_fields_set, *(change.partition("=")[0].strip() for change in changes)}
    if config.data.brought and "seed" not in said:
        return config.model_copy(update={"seed": new_seed()})
    return config


def new_seed() -> int:
    """Return a seed that nobody knows: the noise on a user's own data follows from it."""
    return secrets.randbits(_SEED_BITS)


def brought(data: object, model: str | nn.Module | None) -> tuple[dict[str, Any], Given]:
    """Return the settings that name what a caller brings, and what of it has no name."""
    settings: dict[str, Any] = {}
    if isinstance(data, str | Path):
        settings |= named_data(str(data))
    elif data is not None:
        settings["data.name"] = GIVEN
    if isinstance(model, type):
        raise ConfigError(f"model is the class {model.__name__}: give one of it, {model.__name__}(...)")
    if model is not None:
        settings["model.name"] = GIVEN if isinstance(model, nn.Module) else model
    handed = None if isinstance(data, str | Path) else data
    return settings, Given(handed, model if isinstance(model, nn.Module) else None)


def named_data(data: str) -> dict[str, Any]:
    """Return the setting that names ``data``: a file or folder of tables, or else a data set."""
    path = Path(data)
    is_path = path.suffix.lower() in (*SUFFIXES, ".txt", ".xlsx", ".xls", ".json") or path.exists() or data.startswith((".", "/", "~"))
    return {"data.path": str(path.expanduser().resolve())} if is_path else {"data.name": data}


def configured(what: str | Path | RunConfig, overrides: list[str]) -> RunConfig:
    """Return the config that a caller says, with no seed drawn for it."""
    if isinstance(what, RunConfig):
        return parse_config(what.to_toml(), overrides, origin="the config")
    return read_config(what, overrides) if isinstance(what, Path) else recipe_or_file(what, overrides)


def listed(settings: Settings) -> list[str]:
    """Return changes of a config as ``key=value``."""
    return [f"{key}={toml_value(value)}" for key, value in settings.items()] if isinstance(settings, Mapping) else list(settings)


def _by_leaf(overrides: Mapping[str, Any], what: str | Path | RunConfig) -> dict[str, Any]:
    """Return ``overrides`` by their dotted keys."""
    if not overrides:
        return {}
    name = str(overrides.get("mechanism", configured(what, []).mechanism.name))
    known = known_keys(name)
    found = {}
    for leaf, value in overrides.items():
        keys = [f"{leaf}.name"] if f"{leaf}.name" in known else [key for key in known if key.rpartition(".")[2] == leaf]
        top = [key for key in keys if "." not in key]
        if len(top or keys) != 1:
            said = f"several settings end so, {', '.join(keys)}: give one in settings" if keys else did_you_mean(leaf, known)
            raise ConfigError(f"run has no argument {leaf!r}: {said}")
        found[(top or keys)[0]] = value
    return found
