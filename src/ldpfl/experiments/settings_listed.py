"""List every setting of a config with its key, meaning, default and allowed values, and write a commented config file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from ldpfl import mechanisms
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig, toml_value
from ldpfl.mechanisms import MechanismSettings, settings_of
from ldpfl.util.suggestions import did_you_mean


@dataclass(frozen=True)
class ListedSetting:
    """One key of a config.

    Attributes:
        key: key with its section, as ``--set`` takes it.
        meaning: a sentence or two.
        default: default value as TOML.
        allowed: description of the allowed values.
    """

    key: str
    meaning: str
    default: str
    allowed: str


def sections() -> tuple[str, ...]:
    """Return the sections of a config, in the order of a file. ``run`` stands for the settings above all sections."""
    return ("run", *(name for name in RunConfig.model_fields if name == "mechanism" or _section_class(name) is not None))


def settings(name: str) -> tuple[ListedSetting, ...]:
    """Return the settings of the section or the mechanism ``name``. For ``mechanism``, these are the settings that all mechanisms have.

    Raises:
        ConfigError: there is no section and no mechanism of this name.
    """
    if name == "run":
        return tuple(_listed_fields("", RunConfig, [key for key in RunConfig.model_fields if key not in sections()]))
    if name == "mechanism":
        return tuple(_listed_fields("mechanism.", MechanismSettings))
    model = _section_class(name) if name in RunConfig.model_fields else None
    if model is None and name not in mechanisms.names():
        raise ConfigError(f"{name!r} is neither a section nor a mechanism: {did_you_mean(name, (*sections(), *mechanisms.names()))}")
    return tuple(_listed_fields("mechanism.", settings_of(name)) if model is None else _listed_fields(f"{name}.", model))


def _section_class(name: str) -> type[BaseModel] | None:
    """Return the class of the section ``name`` of a config; None if ``name`` is a single setting, or the mechanism's section."""
    field_type = RunConfig.model_fields[name].annotation
    return field_type if isinstance(field_type, type) and issubclass(field_type, BaseModel) else None


def _listed_fields(prefix: str, model: type[BaseModel], names: Sequence[str] | None = None) -> Iterator[ListedSetting]:
    """Yield the fields of ``model`` as settings whose keys begin with ``prefix``: all of them, or those in ``names``."""
    schema, meanings = model.model_json_schema(), _meanings(model)
    for name, field in model.model_fields.items():
        if names is None or name in names:
            default = "" if field.is_required() else toml_value(field.get_default(call_default_factory=True))
            # In one line, and without the markup of docstrings.
            meaning = " ".join((field.description or meanings.get(name, "")).split()).replace("``", "'")
            yield ListedSetting(f"{prefix}{name}", meaning, default, _allowed_in_words(schema["properties"][name]))


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of ``model`` and of the classes that it extends, by name, from their source code.

    Pydantic could read them with ``use_attribute_docstrings``. But it would do so whenever the class is created, in every process.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(model.mro()):
        if issubclass(base, BaseModel) and base is not BaseModel:
            [class_node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, next_node in pairwise(getattr(class_node, "body", [])):
                match field, next_node:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[name] = text
                    case ast.AnnAssign(target=ast.Name(id=name)), _:  # a field without a docstring does not inherit one
                        docstrings.pop(name, None)
    return docstrings


_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
"""Word for each bound of a number in a JSON schema."""


def _allowed_in_words(schema: Mapping[str, Any]) -> str:
    """Return in words which values a part of a JSON schema allows."""
    if "anyOf" in schema:
        return ", or ".join(_allowed_in_words(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    match schema.get("type"):
        case "array":
            return f"a list of: {_allowed_in_words(schema['items'])}"
        case "object":
            return f"a table of: {_allowed_in_words(schema['additionalProperties'])}"
        case "boolean":
            return "true, false"
        case "integer" | "number" as kind:
            bounds = [f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema]
            return " ".join(["a whole number" if kind == "integer" else "a number", *bounds])
    return "text"


def commented_toml(config: RunConfig) -> str:
    """Return ``config`` as TOML. A comment gives each key's meaning and allowed values, and keys with their default are comments too."""
    tree = config.model_dump()
    lines = [f"{key} = {toml_value(tree[key])}" for key in ("name", "description")]
    # A seed in the file would determine the noise on a user's own data, and the file may be handed on. Without a seed, each run draws one.
    no_seed = config.data.brought and "seed" not in config.model_fields_set
    lines.append("# seed: drawn for each run, and beside it a secret that noise follows from" if no_seed else f"seed = {config.seed}")
    if config.secret_noise:
        lines.append("secret_noise = true")
    for section in sections()[1:]:  # without "run", whose settings are written above
        section_or_mechanism = config.mechanism.name if section == "mechanism" else section
        lines += ["", f"[{section}]"]
        for setting in settings(section_or_mechanism):
            name = setting.key.rpartition(".")[2]
            value = toml_value(tree[section][name])
            lines += [f"# {setting.meaning}"] if setting.meaning else []
            lines.append(f"# {setting.allowed}")
            is_written = name == "name" or value != setting.default  # names of the task, model and mechanism tell what the run is
            lines.append(f"{name} = {value}" if is_written else f"# {name} = {value}")
    return "\n".join(lines) + "\n"
