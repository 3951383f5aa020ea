"""Settings of the ready apps, as a person writes them in an app's pyproject, below ``[tool.flwr.app.config.ldpfl]``."""

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
"""The keys begin with it where Flower hands them over: ``ldpfl.recipe``."""


def _named(field: str) -> str:
    return "set" if field == "changes" else field.replace("_", "-")


class RunSettings(BaseModel):
    """What the ready ServerApp is told; a client reads none of it.

    Attributes:
        recipe, changes: a recipe's name, and under ``set`` changes to it, ``key=value``, separated by semicolons.
        out: folder on the server for checkpoints and results, which a later run of the same config goes on with; empty for none.
        nodes: that a round needs; 0 for all clients.
        agreeing: fewest of them that have to agree to a round; over the relay at least ``min_clients``.
        wait_s, answer_s, timeout_s: seconds to wait for them, for further answers to the question whether they take part, and for replies.
        device: where the server measures: auto, cpu or cuda.
        transport: whether reports are in the replies, go over the relay sealed, or as masked parts of a sum; with the next three as in
            :class:`ldpfl.flower.relay_collection.RelayCollector`; of a sum, nothing is linked.
        reply_s: seconds after its charge at which every client replies; 0, as soon as it can, is for simulations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True, alias_generator=_named)

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
        """Return the settings in a run's config, whose other keys are not looked at.

        Raises:
            ConfigError: one is unknown, or has no such value.
        """
        start = f"{SECTION}."
        return cls.read({key.removeprefix(start): value for key, value in run_config.items() if key.startswith(start)})

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> RunSettings:
        """Return the settings of an app, by the names that they have there.

        Raises:
            ConfigError: one is unknown, or has no such value.
        """
        try:
            return cls.model_validate(dict(settings), by_alias=True, by_name=False)
        except ValidationError as error:
            raise ConfigError(_explained(error)) from None

    @property
    def change_list(self) -> list[str]:
        """The changes one by one."""
        return [change.strip() for change in self.changes.split(";") if change.strip()]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return what they are called in an app's pyproject."""
        return tuple(map(_named, cls.model_fields))

    def to_dict(self) -> dict[str, Any]:
        """Return them by the names that they have in an app's pyproject."""
        return self.model_dump(by_alias=True)


def joined(changes: Iterable[str]) -> str:
    """Return changes ``key=value`` as one text, one below the other, which :attr:`RunSettings.change_list` takes apart again.

    Semicolons within them stand in strings of TOML, which can spell them: what a column or class is called ends no setting.
    """
    return ";\n".join(change.replace(";", "\\u003b") for change in changes)


def _explained(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown setting {SECTION}.{name}: {did_you_mean(name, RunSettings.names())}"
    return f"setting {SECTION}.{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {repr(first['input'])[:80]}"
