"""Settings of the ready apps, as a person writes them in an app's ``pyproject.toml``, under ``[tool.flwr.app.config.ldpfl]``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from ldpfl.errors import ConfigError
from ldpfl.experiments.shipped import DEFAULT
from ldpfl.privacy.policy import Transport
from ldpfl.util.quantities import NotNegative, Positive
from ldpfl.util.suggestions import did_you_mean

SECTION = "ldpfl"
"""Prefix of the settings' keys in Flower's run config: ``ldpfl.recipe``."""


def _setting_name(field: str) -> str:
    """Return the name in ``pyproject.toml`` of a field of :class:`RunSettings`."""
    return "set" if field == "changes" else field.replace("_", "-")


class RunSettings(BaseModel):
    """Settings of the ready ServerApp. A client reads none of them.

    Attributes:
        recipe: name of a recipe.
        changes: changes to the recipe, ``key=value``, separated by semicolons; called ``set`` in ``pyproject.toml``.
        out: folder on the server for checkpoints and results; a later run of the same config resumes from it. Empty for no folder.
        nodes: number of connected nodes that a round needs; 0 for all clients.
        agreeing: minimum number of nodes that must agree to a round; over the relay at least ``min_clients``.
        wait_s: seconds to wait for nodes to connect.
        answer_s: seconds to wait for the next answer to the question whether nodes take part.
        timeout_s: seconds to wait for the replies of a round.
        device: device on which the server evaluates: auto, cpu or cuda.
        transport: ``direct``: reports are in the Flower replies; ``relay``: encrypted, over a mixing relay; ``sum``: masked, over a
            summing relay.
        linked, min_clients, window_s: as in :class:`ldpfl.flower.relay_collection.RelayCollector`. A sum does not use ``linked``.
        reply_s: seconds after its charge at which every client replies; 0 means as soon as it can, and is for simulations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, alias_generator=_setting_name)

    recipe: str = DEFAULT
    changes: str = ""
    out: str = ""
    nodes: NonNegativeInt = 0
    agreeing: PositiveInt = 1
    wait_s: NotNegative = 300.0
    answer_s: Positive = 60.0
    timeout_s: NotNegative = 3600.0
    device: str = "cpu"
    transport: Transport = "direct"
    linked: PositiveInt = 1
    min_clients: PositiveInt = 2
    window_s: NotNegative = 60.0
    reply_s: NotNegative = 0.0

    @classmethod
    def of_run(cls, run_config: Mapping[str, Any]) -> RunSettings:
        """Return the settings in a run's config. Keys without the prefix ``ldpfl.`` are ignored.

        Raises:
            ConfigError: a setting is unknown, or its value is not allowed.
        """
        start = f"{SECTION}."
        return cls.read({key.removeprefix(start): value for key, value in run_config.items() if key.startswith(start)})

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> RunSettings:
        """Return the settings of an app, given by their names in ``pyproject.toml``.

        Raises:
            ConfigError: a setting is unknown, or its value is not allowed.
        """
        try:
            return cls.model_validate(dict(settings), by_alias=True, by_name=False)
        except ValidationError as error:
            raise ConfigError(_first_problem(error)) from None

    @property
    def change_list(self) -> list[str]:
        """The changes one by one."""
        return [change.strip() for change in self.changes.split(";") if change.strip()]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the settings' names in an app's ``pyproject.toml``."""
        return tuple(map(_setting_name, cls.model_fields))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by their names in an app's ``pyproject.toml``."""
        return self.model_dump(by_alias=True)


def join_changes(changes: Iterable[str]) -> str:
    """Join changes ``key=value`` into one text, one change a line. :attr:`RunSettings.change_list` splits the text again.

    A semicolon ends each change but the last. Within a change, a semicolon can stand only in a TOML string, such as a column's name. There
    it is escaped, so that the text is not split at it.
    """
    return ";\n".join(change.replace(";", "\\u003b") for change in changes)


def _first_problem(error: ValidationError) -> str:
    """Return text that names the first setting that is not allowed, with its value or a similar setting's name."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown setting {SECTION}.{name}: {did_you_mean(name, RunSettings.names())}"
    return f"setting {SECTION}.{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {repr(first['input'])[:80]}"
