"""Look up and build mechanisms by name: the built-in ones and those of other installed packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ldpfl.errors import ConfigError, first_line, shown
from ldpfl.mechanisms.base import Mechanism, record_rate_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.settings import Facts, MechanismSettings
from ldpfl.privacy import GaussianRelease
from ldpfl.privacy.authors import BUILT_IN, is_built_in
from ldpfl.util.suggestions import did_you_mean

GROUP = "ldpfl.mechanisms"
"""Group of the entry points by which an installed package adds mechanisms: ``name = "package.module:Settings"``."""

_RUN_SETTINGS = {"budget", "perturbed"}
"""Settings of a mechanism that have a meaning only in a run's config."""


def names(*, alone: bool = False) -> tuple[str, ...]:
    """Return the names of all mechanisms, or with ``alone`` only of those that :func:`create` can build without a training."""
    return tuple(name for name in _import_paths() if not alone or _needs_no_training(name))


def _needs_no_training(name: str) -> bool:
    """Whether the mechanism ``name`` can be built without a training. False also if its package cannot be loaded."""
    try:
        return not settings_of(name).needs_training
    except ConfigError:  # raised again when a user asks for this mechanism; until then, one broken package must not hide the others
        return False


@lru_cache(maxsize=256)
def settings_of(name: str) -> type[MechanismSettings]:
    """Return the settings class of the mechanism ``name``.

    Raises:
        ConfigError: there is no such mechanism, or the package that adds it cannot be used.
    """
    import_paths = _import_paths()
    if name not in import_paths:
        raise ConfigError(
            f"unknown mechanism {name!r} ({did_you_mean(name, import_paths)}): if another package has it, install that package here. "
            "ldpfl verify does not need the package to check a certificate"
        )
    path = import_paths[name]
    module, _, attribute = path.partition(":")
    origin = f"mechanism {name!r} of {version_of(name)}"
    try:
        settings_class = getattr(import_module(module), attribute)
    except Exception as error:  # somebody else's code, which may fail in any way
        raise ConfigError(f"{origin} cannot be loaded from {path}: {type(error).__name__}: {first_line(error)}") from error
    if not (isinstance(settings_class, type) and issubclass(settings_class, MechanismSettings)):
        raise ConfigError(f"{origin}: {path} must be a class derived from MechanismSettings")
    name_field = settings_class.model_fields["name"]
    if name_field.is_required():
        raise ConfigError(f'{origin}: {path} does not name its mechanism: add the field name: Literal["{name}"] = "{name}"')
    if name_field.default != name:
        raise ConfigError(f"{origin}: {path} has name {name_field.default!r}, expected {name!r}")
    return settings_class


def built(settings: MechanismSettings, facts: Facts) -> Mechanism:
    """Return the mechanism that ``settings`` describe.

    Raises:
        ConfigError: a setting is out of range or does not fit the facts. Or the mechanism or its release has another name than the
            settings, on which policies and ledgers rely. Or the release states a lower sampling rate of records than the mechanism uses.
    """
    mechanism = _build_checked(settings, facts)
    release = mechanism.release(facts.ranges)
    _check_name(settings.name, release.mechanism)
    record_rate = record_rate_of(mechanism)
    # ``of_part``: a record or a person is protected. A lower sampling rate of these claims more privacy.
    if isinstance(release, GaussianRelease) and release.of_part and release.rate < record_rate:
        problem = f"mechanism {settings.name!r} samples records with probability {record_rate:g}"
        raise ConfigError(f"{problem}, but its release states {release.rate:g}: make both the same")
    return mechanism


def _build_checked(settings: MechanismSettings, facts: Facts) -> Mechanism:
    """Build the mechanism that ``settings`` describe, and check its name and that a built-in one has its own settings class."""
    mechanism = settings.build(facts)
    _check_name(settings.name, mechanism.name)
    if is_built_in(mechanism.name) and type(settings) is not settings_of(mechanism.name):
        # Foreign settings could choose facts that the guarantee relies on, such as the protected unit, or that only a sum is seen.
        raise ConfigError(
            f"settings of {type(settings).__module__} built the built-in mechanism {mechanism.name!r}, which only ldpfl's settings may do: "
            "write a new class with a new name"
        )
    return mechanism


def _check_name(expected: str, name: str) -> None:
    """Raise a ConfigError unless ``name``, of a mechanism or a release, equals the name ``expected`` from its settings."""
    if type(name) is not str or type(expected) is not str or name != expected:  # a subclass of str could override ==
        raise ConfigError(f"mechanism {expected!r} states the name {name!r}: give its settings and releases one name")


def read_settings(value: Any) -> MechanismSettings:
    """Parse a config's section ``[mechanism]`` as the settings of the mechanism that it names. Pydantic calls this to validate the section.

    Raises:
        ValidationError: ``value`` is no section, the name is unknown, or a setting is unknown or out of range.
    """
    if isinstance(value, MechanismSettings):
        return value
    if not isinstance(value, Mapping):
        # The message suggests a name: the given value if that is one, else that of the default mechanism.
        name = value if isinstance(value, str) and value in _import_paths() else "duchi"
        raise PydanticCustomError("no_section", "input should be a section: its name is set by mechanism.name={name}", {"name": name})
    name = value.get("name", "duchi")
    try:
        settings_class = settings_of(str(name))
    except ConfigError as error:
        problem = PydanticCustomError("unknown_mechanism", "{why}", {"why": str(error)})
        raise ValidationError.from_exception_data("mechanism", [InitErrorDetails(type=problem, loc=("name",), input=name)]) from None
    return settings_class.model_validate(value)


def create(name: str, **parameters: Any) -> Mechanism:
    """Build the mechanism called ``name`` from its settings, for instance ``create("duchi", epsilon=1.0)``.

    Raises:
        ConfigError: the name is unknown, a setting is unknown or out of range, or the mechanism can be built only for a training.
    """
    settings_class = settings_of(name)
    fields = settings_class.model_fields.keys()
    if settings_class.needs_training:
        raise ConfigError(f"mechanism {name!r} depends on training settings, so it works only in a run's config")
    if unknown := parameters.keys() - fields:
        setting = min(unknown)
        raise ConfigError(f"mechanism {name!r} has no setting {setting!r}: {did_you_mean(setting, fields - _RUN_SETTINGS - {'name'})}")
    if run_settings := _RUN_SETTINGS & parameters.keys():
        setting = min(run_settings)
        raise ConfigError(f"mechanism {name!r}: {setting} works only in a run's config: leave it out; epsilon then counts for each unit")
    if "epsilon" in fields and "epsilon" not in parameters:
        raise ConfigError(f"mechanism {name!r} needs epsilon, which has no default: set it")
    try:
        settings = settings_class.model_validate(parameters)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"mechanism {name!r}, {setting}: {first['msg'].lower()}, got {shown(first['input'])}") from None
    # Any facts do: no training is needed, and epsilon is for each unit, however many units the ranges have.
    mechanism = _build_checked(settings, Facts(LayerRanges(0.0, 1.0, (1,))))
    _check_name(name, mechanism.name)  # a validator of another package's settings could change their name
    return mechanism


def with_defaults(name: str, epsilon: float) -> Mechanism:
    """Build the mechanism ``name`` at ``epsilon``, if it has an epsilon, with all other settings at their defaults.

    Raises:
        ConfigError: as :func:`create`.
    """
    if "epsilon" in settings_of(name).model_fields:
        return create(name, epsilon=epsilon)
    return create(name)


def version_of(name: str) -> str:
    """Return the package that provides the mechanism ``name``, and the package's version; "unknown" if it is not installed here."""
    if name in BUILT_IN:
        return f"ldpfl {version('ldpfl')}"
    packages = [point.dist for point in entry_points(group=GROUP) if point.name == name and point.dist is not None]
    return f"{packages[0].name} {packages[0].version}" if packages else "unknown"


def _import_paths() -> dict[str, str]:
    """Return the import path of each mechanism's settings class, by name. A package cannot replace a built-in mechanism."""
    return {**_import_paths_from_packages(tuple(sys.path)), **BUILT_IN}  # the later entries win


@lru_cache(maxsize=4)
def _import_paths_from_packages(python_path: tuple[str, ...]) -> dict[str, str]:
    """Return the import paths that installed packages state. ``python_path`` is only the cache's key: a new one reads them again."""
    return {point.name: point.value for point in entry_points(group=GROUP)}
