"""Write the files to begin with: a config, a package with a new mechanism, or a Flower app."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ldpfl.api.configuring import config_from, configure
from ldpfl.data.loading import image_shape
from ldpfl.data.user_data import check_files
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import target_kind_of
from ldpfl.experiments.settings_listed import commented_toml
from ldpfl.mechanisms.new_package import write_package
from ldpfl.util.files import write_text

_REPLY_S = 60.0
"""Seconds after which clients reply, however long they trained. The app's owner changes this number to the time that nodes need."""


@dataclass(frozen=True)
class BegunApp:
    """A Flower app that was written, and the steps that are left to do.

    Attributes:
        folder: folder of the app.
        differs: differences between Flower and a simulation, one sentence each.
        needed: things that each node needs, one line each.
        from_table: whether columns, their types and classes were copied from a table. They are sent to every node.
        note: names of that table's columns that were left out, if any.
        open_bounds: columns whose bounds must still be filled in.
        mean_left: what ``mechanism.records`` counts, rows or persons, if their mean number at a node must still be given; else empty.
        is_sized: whether the sizes of the model's arrays are known. They are unknown for a model that is code, and for a pretrained one
            that is not in a folder of this machine.
        by_sum: whether reports are added up over a relay, which needs the aggregator's key.
    """

    folder: Path
    differs: tuple[str, ...]
    needed: tuple[str, ...]
    from_table: bool
    note: str
    open_bounds: tuple[str, ...]
    mean_left: Literal["", "rows", "persons"]
    is_sized: bool
    by_sum: bool

    @property
    def is_complete(self) -> bool:
        """Whether a policy and a budget can be written for the app at once."""
        return self.is_sized and not self.by_sum and not self.open_bounds


def begin_mechanism(name: str) -> None:
    """Write a package with a new mechanism to a new folder called ``name``.

    Raises:
        ConfigError: the folder exists, or ``name`` cannot be the name of a package.
    """
    write_package(Path(name), name)


def begin_config(file: Path, recipe: str, changes: Sequence[str]) -> None:
    """Write a config with a comment for each key.

    Raises:
        ConfigError: ``file`` exists, or a change does not fit.
        DataError: the data do not exist, or lack a column that a setting names.
    """
    if file.exists():
        raise ConfigError(f"{file} already exists and is not overwritten: give another file")
    write_text(file, commented_toml(config_of_existing_data(recipe, changes)))


def config_of_existing_data(recipe: str, changes: Sequence[str]) -> RunConfig:
    """Return the config of ``recipe`` with ``changes``, after checks that its data exist and have the columns that it names.

    Raises:
        ConfigError: a change does not fit, or there is no built-in data set of this name.
        DataError: there is no such file, or a column is missing.
    """
    config = config_from(recipe, list(changes))
    if not (config.data.brought or config.data.at_nodes):
        image_shape(config.data.name)  # raises if there is no built-in data set of this name
    check_files(config.data, target_kind_of(config))
    return config


def begin_app(
    folder: Path,
    recipe: str,
    changes: Sequence[str],
    *,
    data: str | None = None,
    target: str | None = None,
    client: str | None = None,
    person: str | None = None,
) -> BegunApp:
    """Write an app for Flower to a new folder, and return the steps that are left to do.

    Args:
        data: a table like those of the nodes: its columns, kinds and classes are written into the app.
        target, client, person: columns of that table.

    Raises:
        ConfigError: Flower is missing, a setting does not fit, ``data`` are images, ``target`` is missing, or no policy fits the app.
    """
    if find_spec("flwr") is None:
        raise ConfigError("apps need Flower, which is not installed: pip install 'ldpfl[flower]'")
    from ldpfl.experiments import load_recipe
    from ldpfl.flower.ignored_settings import node_requirements, setting_notes
    from ldpfl.flower.new_app import NOT_KNOWN, settings_to_changes, without_column_changes, write_app
    from ldpfl.flower.policy_init import check_code, fitting_policy, names_not_loaded, offer_of_settings, ranges_for
    from ldpfl.flower.run_settings import RunSettings, join_changes

    table_settings: dict[str, Any] = {}
    note = ""
    config = configure(recipe, changes)
    person = person or config.data.person or None  # the config has "" for no column
    if data is not None:
        table_settings, note = _settings_from_table(data, config, target, client, person)
        changes = without_column_changes(changes)  # the table's settings have their effect already
    all_changes = join_changes([*settings_to_changes(table_settings), *changes])
    by_sum = config.shuffling.channel == "secure-sum"
    sum_settings: dict[str, Any] = {"transport": "sum", "min_clients": config.clients.count} if by_sum else {}
    at_nodes = bool(table_settings) or config.data.at_nodes
    # A fixed time hides how long a node trained on its own rows. Built-in data are public and need none.
    settings = RunSettings(recipe=recipe, changes=all_changes, out="run", reply_s=_REPLY_S if at_nodes else 0.0, **sum_settings)
    open_bounds = tuple(name for name, bounds in table_settings.get("data.bounds", {}).items() if bounds == NOT_KNOWN)
    check_code(config)
    is_sized = not names_not_loaded(config)  # the sizes of the model's arrays are known, because the model is loaded here
    # These calls raise if no policy fits the app, so that nothing is written then.
    if not open_bounds:
        offer = offer_of_settings(settings)
        if is_sized:
            fitting_policy(offer, ranges_for(offer, ()))
    write_app(folder, settings)
    counted_unit: Literal["rows", "persons"] = "rows" if person is None else "persons"
    return BegunApp(
        folder=folder,
        # The recipe is loaded as the app loads it, because ``config`` has a seed of its own.
        differs=tuple(setting_notes(load_recipe(recipe, list(changes)), at_nodes=at_nodes)),
        needed=tuple(node_requirements(config, at_nodes=at_nodes)),
        from_table=bool(table_settings),
        note=note,
        open_bounds=open_bounds,
        mean_left=counted_unit if config.mechanism.missing_setting_message else "",
        is_sized=is_sized,
        by_sum=by_sum,
    )


def _settings_from_table(
    data: str, config: RunConfig, target: str | None, client: str | None, person: str | None
) -> tuple[dict[str, Any], str]:
    """Return the settings of an app whose nodes have tables like the file ``data``, and a note on the columns that are left out.

    Raises:
        ConfigError: ``data`` are images, or neither ``target`` nor ``config`` names the column to predict.
    """
    from ldpfl.data.user_images import holds_images
    from ldpfl.flower.new_app import example_table_settings

    if Path(data).exists() and holds_images(Path(data)):
        raise ConfigError(
            f"{data} contains images, but an app that ldpfl init writes reads only tables: write your own app with a RecordTask, see "
            "docs/flower.md"
        )
    if not (named_target := target or config.data.target):
        raise ConfigError("--target is missing: name the column to predict with --target COLUMN")
    return example_table_settings(Path(data), named_target, client or config.data.client, person or "", config)
