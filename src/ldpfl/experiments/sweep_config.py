"""Sweeps: runs of a recipe in several variants, over values of some settings and over seeds. A cell is one of these runs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from ldpfl.errors import ConfigError, LdpflError, shown
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig, setting_value, settings_as_text, toml_value
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects
from ldpfl.experiments.planned_ledger import check_settings_fit_together
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.shipped import sweep_files
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.util.files import from_toml, read_text
from ldpfl.util.suggestions import did_you_mean, quoting_hint
from ldpfl.util.user_code import GIVEN

_MAX_CELLS = 10_000
MOST_SEEDS = 1000
_MAX_NAME_LENGTH = 80
"""Maximum length of a default name in characters, since folders are named after it."""

AxisValue = bool | int | float | str
"""Value of an axis as tables and plots show it. A list or a table is shown as TOML text."""

_Settings = Annotated[list[str], BeforeValidator(lambda given: settings_as_text(given) if isinstance(given, Mapping) else given)]
_Values = Annotated[list[AxisValue | list[JsonValue] | dict[str, JsonValue]], Field(min_length=1)]


class SweepConfig(BaseModel):
    """A sweep as a person writes it in TOML.

    Attributes:
        name, description: for tables and plots.
        recipe, settings: recipe that every cell starts from, and overrides for all cells: a table of settings, or ``key=value`` texts.
        seeds: list of seeds with which every cell is run, or the number of runs of each cell. With a number, the noise on a user's own
            data follows from a secret of each run, and from no seed.
        axes: values of some settings, by dotted key. Every combination is a cell. The first axis is a plot's x-axis.
        variants: overrides of each variant, by label, in the form of ``settings``.
        plot_against: x-axis of the accuracy plot, beside bytes sent: the first axis, or the local epsilon of a client's whole run, at
            which mechanisms with different units can be compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    description: str = ""
    recipe: str
    settings: _Settings = []
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = 1
    axes: dict[str, _Values] = {}
    variants: Annotated[dict[str, _Settings], Field(min_length=1)] = {"as it is": []}
    plot_against: Literal["axis", "budget"] = "axis"

    @property
    def each_seed(self) -> list[int]:
        """The seeds of a cell's runs."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def points(self) -> dict[str, list[AxisValue]]:
        """The axes with their values as tables and plots show them."""
        return {key: [_shown_value(value) for value in values] for key, values in self.axes.items()}

    @property
    def headings(self) -> list[str]:
        """Short names of the axes, see :func:`short_key`. If two axes have the same short name, both have their full keys instead."""
        short = [short_key(key) for key in self.axes]
        return [key if short.count(name) > 1 else name for key, name in zip(self.axes, short, strict=True)]


def short_key(key: str) -> str:
    """Return the short form of a setting's dotted key: ``model`` for ``model.name``, else its last word."""
    section, _, word = key.rpartition(".")
    return section if word == "name" and section else word


def _shown_value(value: Any) -> AxisValue:
    """Return ``value`` as tables and plots show it."""
    return toml_value(value) if isinstance(value, list | dict) else value


_LOCAL_STEP_SETTINGS = ("training.learning_rate", "training.epochs", "training.batch_size")
"""Settings of clients' local steps. They have no effect if clients send one gradient in each round."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a variant at one point of the axes with one seed."""

    variant: str
    point: tuple[tuple[str, AxisValue], ...]
    seed: int
    config: RunConfig

    @cached_property  # a sweep needs the name often, and the hash takes time
    def folder_name(self) -> str:
        """Name of the run's folder, a hash of its config. Equal configs of different variants share it, so the run is made once."""
        return hashlib.sha256(self.config.to_toml().encode()).hexdigest()[:16]

    def folder(self, out: Path) -> RunFolder:
        """Return the run's folder within the sweep's folder ``out``."""
        return RunFolder(out / "runs" / self.folder_name)

    def __str__(self) -> str:
        at = "".join(f", {short_key(key)} {value}" for key, value in self.point)
        return f"{self.variant}{at}" + ("" if self.config.hides_seed else f", seed {self.seed}")


def load_sweep(name: str) -> SweepConfig:
    """Return the shipped sweep ``name``, or the one in the file ``name`` if it ends in .toml.

    Raises:
        ConfigError: there is no such sweep, or a value in it does not fit.
    """
    if name.endswith(".toml"):
        try:
            text = read_text(Path(name))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"sweep file {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        paths = sweep_files()
        if name not in paths:
            raise ConfigError(f"no sweep {name!r}{quoting_hint(name) or f': {did_you_mean(name, paths)}'}")
        text = paths[name].read_text(encoding="utf-8")
    try:
        tree = from_toml(text)
    except ValueError as error:
        raise ConfigError(f"sweep {name} is not valid TOML: {error}") from error
    return _validated_sweep(tree, f"sweep {name}")


def _validated_sweep(tree: dict[str, Any], origin: str) -> SweepConfig:
    """Return the sweep that ``tree`` describes, or raise a :class:`ConfigError` that calls it ``origin`` and names the first fault."""
    try:
        return SweepConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{origin}, {place}: {first['msg']}, got {shown(first['input'])}") from None


def sweep_of(
    recipe: str, settings: Sequence[str], axes: Mapping[str, Iterable[Any]], seeds: int | Sequence[int] = 1, name: str | None = None
) -> SweepConfig:
    """Return the sweep that flags of the command line or arguments from Python describe.

    Args:
        settings: ``key=value`` overrides for all runs.
        axes: list of values for each dotted key that is varied, as Python objects.
        seeds: number of runs of each cell, or the list of their seeds.
        name: name of the sweep; by default the name of the data and the short names of the axes.

    Raises:
        ConfigError: an axis has no list of values, or a value cannot be that of a setting.
    """
    for key, values in axes.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise ConfigError(f"axes: {key} is {shown(values)}, expected a list of values: give {{{key!r}: [...]}}")
    parsed_axes = {key.strip(): [setting_value(toml_value(value)) for value in values] for key, values in axes.items()}
    tree = {
        "name": name or _default_name(recipe, settings, parsed_axes),
        "recipe": recipe,
        "settings": list(settings),
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        "axes": parsed_axes,
    }
    return _validated_sweep(tree, "sweep")


def _default_name(recipe: str, settings: Sequence[str], axes: Iterable[str]) -> str:
    """Return a name from the data in ``settings`` (or the recipe) and the keys of the ``axes``, such as ``patients-target_epsilon``.

    It is the name of a folder too, so it has only letters, digits, "_", "-" and ".".
    """
    values = {key.strip(): setting_value(text.strip()) for key, _, text in (setting.partition("=") for setting in settings)}
    data = Path(str(values.get("data.path", values.get("data.name", "")))).stem.partition(":")[0]  # without the function's name, of code
    words = [data if data and data != GIVEN else recipe, *map(short_key, axes)]
    return re.sub(r"[^\w.-]+", "-", "-".join(words)).strip("-.")[:_MAX_NAME_LENGTH]


def parse_axis(text: str, option: str = "--axis") -> tuple[str, list[Any]]:
    """Return the key and the values in the text ``KEY=VALUE,VALUE`` of the command line's ``option``, parsed as TOML.

    Raises:
        ConfigError: the text has no key or no values.
    """
    key, _, values = text.partition("=")
    texts = [value.strip() for value in _split_at_commas(values)]
    if not key.strip() or not all(texts):
        raise ConfigError(f"{option} {shown(text)} has no values: give KEY=VALUE,VALUE, such as privacy.target_epsilon=1,2,4")
    return key.strip(), [setting_value(value) for value in texts]


def _split_at_commas(text: str) -> Iterator[str]:
    """Yield the parts of ``text`` between commas. Commas within brackets or quotes do not separate."""
    # ``quote`` is the quotation mark that is open, or "". In double quotes, TOML escapes a character by a backslash.
    start, open_brackets, quote, escaped = 0, 0, "", False
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = quote == '"' and char == "\\" and not escaped
        elif char in "\"'":
            quote = char
        elif char == "," and not open_brackets:
            yield text[start:place]
            start = place + 1
        elif char in "[{":
            open_brackets += 1
        elif char in "]}":
            open_brackets -= 1
    yield text[start:]


def cells(
    sweep: SweepConfig,
    overrides: Sequence[str] = (),
    *,
    resolve: bool = True,
    caller_objects: CallerObjects = NO_CALLER_OBJECTS,
    load: Callable[..., RunConfig] | None = None,
) -> list[Cell]:
    """Return all runs of ``sweep``, with checked configs.

    Args:
        overrides: settings for every run, applied last.
        resolve: whether to fill in values that depend on the data. Without it, nothing that a config names, such as data, is opened.
        caller_objects: data or a model that a caller passes from Python.
        load: function that returns the config of ``sweep.recipe``. The default knows shipped recipes only and opens no file of a user,
            since a stored sweep may be somebody else's.

    Raises:
        ConfigError: there are too many runs, or a setting does not fit or is the seed.
    """
    settings_of_runs = itertools.chain(sweep.settings, *sweep.variants.values(), overrides)
    if "seed" in {*map(str.strip, sweep.axes), *(setting.partition("=")[0].strip() for setting in settings_of_runs)}:
        raise ConfigError(
            f"sweep {sweep.name} sets seed, but each of its runs has a seed of its own: leave the setting out, and give the number of runs "
            "of each setting (--seeds 3, or seeds in the sweep's file), or the list of their seeds (from Python, or in the file)"
        )
    count = prod(map(len, sweep.axes.values())) * len(sweep.each_seed) * len(sweep.variants)
    if count > _MAX_CELLS:
        raise ConfigError(f"sweep {sweep.name} has {count:,} runs, expected at most {_MAX_CELLS:,}: leave out values or seeds")
    # All combinations of a (key, value) pair from each axis.
    points = list(itertools.product(*([(key, value) for value in values] for key, values in sweep.axes.items())))
    all_cells = []
    for seed, point, (variant, settings) in itertools.product(sweep.each_seed, points, sweep.variants.items()):
        config = _config_of_cell(sweep, settings, point, seed, overrides, load or load_recipe)
        all_cells.append(Cell(variant, _shown_point(point), seed, resolve_settings(config, caller_objects) if resolve else config))
    return all_cells


def _shown_point(point: Sequence[tuple[str, Any]]) -> tuple[tuple[str, AxisValue], ...]:
    """Return each key and value of ``point``, with values as tables and plots show them."""
    return tuple((key, _shown_value(value)) for key, value in point)


def _config_of_cell(
    sweep: SweepConfig,
    settings: Sequence[str],
    point: Sequence[tuple[str, Any]],
    seed: int,
    overrides: Sequence[str],
    load: Callable[..., RunConfig],
) -> RunConfig:
    """Return the config of one cell: the recipe with the sweep's settings, the ``point``, the variant's ``settings`` and ``overrides``.

    Later settings replace earlier ones. ``load`` is as for :func:`cells`.
    """
    # The variant's settings come after the point's: a variant that fixes the setting of an axis keeps its value at all points.
    point_settings = [f"{key}={toml_value(value)}" for key, value in point]
    cell_settings = [f"seed={seed}", 'description=""', f"name={toml_value(sweep.name)}"]
    return load(sweep.recipe, [*sweep.settings, *point_settings], settings, [*cell_settings, *overrides])


def define_same_runs(first: SweepConfig, first_overrides: Sequence[str], second: SweepConfig, second_overrides: Sequence[str]) -> bool:
    """Return whether two sweeps with their overrides define the same runs under the same labels, however their settings are written."""
    if (first.name, list(first.axes), first.plot_against) != (second.name, list(second.axes), second.plot_against):
        return False
    return cells(first, first_overrides, resolve=False) == cells(second, second_overrides, resolve=False)


def check_cells(cells: Sequence[Cell], caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> None:
    """Raise before any training if the model, data set and mechanism of one of the runs ``cells`` do not fit together.

    Raises:
        ConfigError: a run does not fit, and the message names it; or the runs protect different persons or clients.
    """
    check_same_protected(cell.config for cell in cells)
    checked: set[str] = set()
    for cell in cells:
        settings = cell.config.model_dump_json(exclude={"seed"})  # no check depends on the seed
        if settings in checked:
            continue
        checked.add(settings)
        try:
            _check_axes(cell)
            check_settings_fit_together(cell.config, caller_objects)
        except LdpflError as error:
            raise ConfigError(f"{cell}: {error}") from error


def check_same_protected(configs: Iterable[RunConfig]) -> None:
    """Raise a :class:`ConfigError` if runs of the ``configs`` on own data protect persons or clients that different columns name.

    A guarantee of such runs together would hold for nobody: a run that protects each doctor counts a patient with several doctors as
    several persons, and a hospital of one run has the data of many clients of a run whose clients are patients.
    """
    persons, clients = dict[tuple[str, str], None](), dict[tuple[str, str], None]()  # sets that keep the order
    for config in configs:
        data = config.data
        if data.person:
            persons[data.person, data.client] = None
        elif data.brought and not isinstance(config.mechanism, DpSgdSettings):  # dp-sgd protects single records, whoever holds them
            clients["", data.client] = None
    client_columns = {client for _, client in [*persons, *clients]}
    are_persons_dealt_out = bool(persons and clients and "" in client_columns)  # to clients that are made up, a row at a time
    if len(persons) > 1 or (clients and len(client_columns) > 1) or are_persons_dealt_out:
        named = "; ".join(_protected_by(person, client) for person, client in [*persons, *clients])
        raise ConfigError(
            f"the runs protect different persons or clients, by the columns data.person and data.client: {named}. So they have no joint "
            "guarantee: set both columns to the same names in all runs; of finished runs, state the guarantee of each by itself"
        )


def _protected_by(person: str, client: str) -> str:
    """Return whom a run protects, by the columns ``person`` and ``client`` (empty: no column), for a message."""
    holder = repr(client) if client else "clients without a column"
    return holder if not person else f"{person!r} at {client!r}" if client else repr(person)


def _check_axes(cell: Cell) -> None:
    """Raise a :class:`ConfigError` if an axis has no effect. Its runs would differ by noise alone, and each would cost privacy."""
    unused = [key for key, _ in cell.point if key in _LOCAL_STEP_SETTINGS]
    if unused and cell.config.mechanism.perturbed == "gradient":
        raise ConfigError(
            f"{' and '.join(unused)} changes nothing where clients send one gradient a round: leave out {' and '.join(unused)}, or compare "
            "settings of the server, such as training.server_learning_rate"
        )
