"""Make the config of a run from a recipe, a file or a config, and the caller's changes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from ldpfl import mechanisms
from ldpfl.api.arguments import Settings, checked
from ldpfl.data.cells import can_parse
from ldpfl.data.tables import SUFFIXES
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import SECTIONS, RunConfig, flattened, known_keys, parse_config, settings_as_text, toml_value
from ldpfl.experiments.dataset import CallerObjects
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.shipped import DEFAULT
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import GIVEN, named_model

_SEED_BITS = 63  # a drawn seed fits the signed 64-bit integers of TOML


@checked
def configure(what: str | Path | RunConfig = DEFAULT, settings: Settings = (), **overrides: Any) -> RunConfig:
    """Return the config that :func:`run` runs for the same arguments, checked.

    Raises:
        ConfigError: no such recipe or setting, or a value that does not fit.
    """
    return config_for_call(configure, what, settings, overrides)


def config_for_call(
    function: Callable[..., object],
    what: str | Path | RunConfig,
    settings: Settings,
    overrides: Mapping[str, Any],
    resumed: RunConfig | None = None,
) -> RunConfig:
    """Return the config that the arguments of a public function describe. Its seed is drawn if its noise follows from a secret.

    Args:
        function: the public function. Its arguments are suggested in place of an unknown argument.
        resumed: config of the run to resume. If no seed is given, and its noise follows from a secret, its seed is used again. The caller
            then compares all other settings, so that no other run can have this seed and secret.
    """
    changes = [*setting_texts(settings), *setting_texts(overrides_by_key(function, overrides, what))]
    config = config_from(what, changes)
    # Unless a seed is given, the noise on a user's own data follows from a secret that is no part of the config.
    # A RunConfig knows which of its keys were stated. In `config` all of them count as stated, because it was parsed from their full text.
    stated_keys = (what if isinstance(what, RunConfig) else config).model_fields_set
    given_keys = {*stated_keys, *(change.partition("=")[0].strip() for change in changes)}
    if not config.data.brought or "seed" in given_keys:  # the data are built in, or the user gave a seed
        return config
    if resumed is not None and resumed.secret_noise:
        seed = resumed.seed
    elif isinstance(what, RunConfig) and what.seed:  # an earlier call of this function drew the seed, since nobody stated it
        seed = what.seed
    else:
        seed = secrets.randbits(_SEED_BITS)
    with_seed = config.model_copy(update={"seed": seed, "secret_noise": True})
    with_seed.model_fields_set.discard("seed")  # a drawn seed must not count as given by the user: see `given_keys`
    return with_seed


def settings_and_objects(data: object, model: str | nn.Module | None) -> tuple[dict[str, Any], CallerObjects]:
    """Return settings that name the caller's data and model. Python objects are returned beside them, and named only as "given"."""
    settings: dict[str, Any] = {}
    if isinstance(data, str | Path):
        settings |= named_data(data)
    elif data is not None:
        settings["data.name"] = GIVEN
    if model is not None:
        settings["model.name"] = GIVEN if isinstance(model, nn.Module) else named_model(model)
    data_object = None if isinstance(data, str | Path) else data
    return settings, CallerObjects(data_object, model if isinstance(model, nn.Module) else None)


def named_data(data: str | Path) -> dict[str, Any]:
    """Return the setting that names ``data``: ``data.path`` for a file or folder, else ``data.name`` for a data set.

    A ``Path`` is always a file or folder. So is a text that looks like a path, even if no such file exists: a later error then names it.
    """
    path = Path(data)
    looks_like_path = path.suffix.lower() in (*SUFFIXES, ".txt", ".xlsx", ".xls", ".json") or str(data).startswith((".", "/", "~"))
    is_path = isinstance(data, Path) or looks_like_path or path.exists()
    if not is_path:
        return {"data.name": data}
    try:
        return {"data.path": str(path.expanduser().resolve())}
    except RuntimeError:  # the user does not exist, or has no home
        raise ConfigError(f"data is {str(data)!r}, but the home folder that ~ means is unknown: give the full path") from None


def overrides_of(
    data: str | None,
    target: str | None,
    client: str | None,
    task: str | None,
    model: str | None,
    target_epsilon: float | None,
    changes: list[str] | None,
    recipe: str | None = None,
    person: str | None = None,
    evaluation_epsilon: float | None = None,
    text: str | None = None,
    adapter: str | None = None,
) -> list[str]:
    """Return the changes of a config, ``key=value``, that follow from the command line's flags for a user's own data.

    Raises:
        ConfigError: ``target`` is a number, not a column; or columns are named without ``data``.
    """
    if target is not None and can_parse(float, target):
        raise ConfigError(f"--target is {target}, but it must name a column of your data: for the epsilon give --target-epsilon {target}")
    names_column = any(column is not None for column in (target, client, person))
    if names_column and data is None and recipe is None:  # a recipe may name the data
        raise ConfigError(
            "--target, --client and --person name columns of your data, but --data is missing: give a table with --data, or leave them out"
        )
    flags = {"data.target": target, "data.client": client, "data.person": person, "data.text": text, "task.name": task}
    flags |= {"model.name": None if model is None else named_model(model), "model.adapter": adapter}
    # A later change overrides an earlier one: ``changes`` (--set) those before them, and the flags for epsilon all others.
    return [
        *([f"{key}={toml_value(value)}" for key, value in named_data(data).items()] if data is not None else []),
        *(f"{key}={toml_value(value)}" for key, value in flags.items() if value is not None),
        *(changes or []),
        *([f"privacy.target_epsilon={target_epsilon}"] if target_epsilon is not None else []),
        *([f"evaluation.epsilon={evaluation_epsilon}"] if evaluation_epsilon is not None else []),
    ]


def config_from(what: str | Path | RunConfig, overrides: list[str]) -> RunConfig:
    """Return the config ``what``, or the one that it names, with ``overrides``. No seed is drawn."""
    if isinstance(what, RunConfig):
        return parse_config(what.to_toml(), overrides, origin="the config")
    return recipe_or_file(what, overrides)


def setting_texts(settings: Settings) -> list[str]:
    """Return changes of a config as texts ``key=value``. Nested changes, such as ``{"clients": {"count": 5}}``, are flattened.

    Raises:
        ConfigError: ``settings`` is neither a mapping nor texts.
    """
    if isinstance(settings, Mapping):
        return settings_as_text(settings)
    texts = [settings] if isinstance(settings, str) else list(settings or ())
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ConfigError(
            f"settings has an item of the type {type(wrong[0]).__name__}, expected a dict of keys and values, or texts such as "
            "'clients.count=5'"
        )
    return texts


_SECTIONS_IN_NAMES = ("evaluation", "clipping")
"""Sections whose settings have the section in their argument's name, such as ``evaluation_epsilon``. A plain ``epsilon`` must not mean
``evaluation.epsilon``, not even if the mechanism has no epsilon; and a plain ``learning_rate`` is that of the clients."""


def overrides_by_key(function: Callable[..., object], overrides: Mapping[str, Any], what: str | Path | RunConfig) -> dict[str, Any]:
    """Return ``overrides`` by dotted key. An argument is a dotted key, a key's last word, or a section, which sets the section's ``name``.

    Raises:
        ConfigError: no setting, or more than one, has such a name. The error names ``function``.
    """
    if not overrides:
        return {}
    values_by_key = flattened(overrides)
    mechanism = str(values_by_key.get("mechanism.name", values_by_key.get("mechanism")) or config_from(what, []).mechanism.name)
    known = known_keys(mechanism)  # including the mechanism's own settings
    by_name: dict[str, list[str]] = {}
    for key in known:
        section, _, last_word = key.rpartition(".")
        if section in _SECTIONS_IN_NAMES:  # as in evaluation_epsilon, since a plain epsilon is the mechanism's
            last_word = f"{section}_{last_word}"
        elif section and last_word == "name":  # as in mechanism="duchi"
            last_word = section
        by_name.setdefault(last_word, []).append(key)
    by_dotted_key = {}
    for argument, value in values_by_key.items():
        keys = [argument] if "." in argument or argument in known else by_name.get(argument, [])
        if len(keys) != 1:
            raise ConfigError(f"{function.__name__} has no argument {argument!r}{_advice(function, argument, mechanism, by_name)}")
        (key,) = keys
        by_dotted_key[key] = value
    return by_dotted_key


def _example_key(section: str) -> str:
    """Return the first key of a section, as an example for an error message."""
    return next(key.partition(".")[2] for key in known_keys() if key.startswith(f"{section}."))


def _advice(function: Callable[..., object], argument: str, mechanism: str, by_name: Mapping[str, Sequence[str]]) -> str:
    """Return the end of the message about an unknown ``argument``: what may have been meant."""
    if argument in by_name:
        return f": several settings have this name, {', '.join(by_name[argument])}: give one of them in settings"
    if argument in SECTIONS:
        return f": it is a section of settings, so give a dict of them, such as {{{_example_key(argument)!r}: ...}}"
    built_in = (name for name in mechanisms.names() if mechanisms.is_built_in(name))
    is_of_other_mechanism = any(argument in mechanisms.settings_of(name).model_fields for name in built_in)
    with_mechanism = f" with the mechanism {mechanism}" if is_of_other_mechanism else ""
    parameters = [name for name, parameter in signature(function).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    return f"{with_mechanism}: {did_you_mean(argument, [*parameters, *(name for name, keys in by_name.items() if len(keys) == 1)])}"
