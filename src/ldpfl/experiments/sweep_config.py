"""Sweeps: a recipe in several variants, over values of some settings and over seeds; resumable cell by cell."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ldpfl.errors import ConfigError, LdpflError, shown
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.config import RunConfig, setting_value, toml_value
from ldpfl.experiments.planned_ledger import check_fit
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.shipped import sweep_files
from ldpfl.files import from_toml, read_text
from ldpfl.suggestions import did_you_mean

_MOST_CELLS = 10_000

AxisValue = bool | int | float | str


class SweepConfig(BaseModel):
    """A sweep as a person writes it in TOML.

    Attributes:
        name, description: for tables and plots.
        recipe, settings: what every cell starts from, and ``key=value`` overrides for all of them.
        seeds: every cell is run once with each.
        axes: settings by dotted key, and the values they take; every combination is a cell. The first is a plot's x.
        variants: by label, the ``key=value`` overrides that make it.
        plot_against: what accuracy is drawn against, beside the bytes sent: the first axis, or the epsilon of a client's whole
            run when nobody is trusted, at which mechanisms of different units can be compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    description: str = ""
    recipe: str
    settings: list[str] = []
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    axes: dict[str, Annotated[list[AxisValue], Field(min_length=1)]] = {}
    variants: Annotated[dict[str, list[str]], Field(min_length=1)] = {"as it is": []}
    plot_against: Literal["axis", "budget"] = "axis"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a variant at one point of the axes with one seed."""

    variant: str
    point: tuple[tuple[str, AxisValue], ...]
    seed: int
    config: RunConfig

    @cached_property  # a sweep asks for it again and again
    def folder_name(self) -> str:
        """A name that equal configs share, whatever variant they belong to: such a run is made once."""
        return hashlib.sha256(self.config.to_toml().encode()).hexdigest()[:16]

    def folder(self, out: Path) -> RunFolder:
        """Return the run's own folder in that of the sweep: it is named by the config, so what stands there is the same run."""
        return RunFolder(out / "runs" / self.folder_name)

    def __str__(self) -> str:
        at = "".join(f", {key.rpartition('.')[2]} {value}" for key, value in self.point)
        return f"{self.variant}{at}" + ("" if self.config.hides_seed else f", seed {self.seed}")


def load_sweep(name: str) -> SweepConfig:
    """Return the shipped sweep ``name``, or the one in the file ``name`` if it ends in .toml.

    Raises:
        ConfigError: there is none, or a value does not fit; one line.
    """
    if name.endswith(".toml"):
        try:
            text = read_text(Path(name))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"sweep file {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    else:
        paths = sweep_files()
        if name not in paths:
            raise ConfigError(f"no sweep {name!r}: {did_you_mean(name, paths)}")
        text = paths[name].read_text(encoding="utf-8")
    try:
        return SweepConfig.model_validate(from_toml(text))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"sweep {name}, {place}: {first['msg']}, got {shown(first['input'])}") from None
    except ValueError as error:
        raise ConfigError(f"sweep {name} is not valid TOML: {error}") from error


def sweep_of(recipe: str, settings: Sequence[str], axes: Sequence[str], seeds: int) -> SweepConfig:
    """Return the sweep of a user's own data that flags describe, with secret noise.

    Args:
        axes: texts ``key=value,value``.
        seeds: how many runs each setting gets.

    Raises:
        ConfigError: an axis has no key or no values.
    """
    found: dict[str, list[AxisValue]] = {}
    for axis in axes:
        key, _, text = axis.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not key.strip() or not all(values):
            raise ConfigError(f"--axis {shown(axis)} has no values: give KEY=VALUE,VALUE, such as privacy.target_epsilon=1,2,4")
        found[key.strip()] = [setting_value(value) for value in values]
    # Seeds count runs here: the noise on a user's own rows follows from a secret of each run.
    return SweepConfig(name=recipe, recipe=recipe, settings=[*settings, "secret_noise=true"], seeds=list(range(seeds)), axes=found)


def cells(sweep: SweepConfig, overrides: Sequence[str] = (), *, settle: bool = True) -> list[Cell]:
    """Return all runs of ``sweep``, each config checked; ``overrides`` apply to every one of them, last.

    Without ``settle`` configs are as they are written: nothing that they name, such as data, is looked at.
    """
    count = prod(map(len, sweep.axes.values())) * len(sweep.seeds) * len(sweep.variants)
    if count > _MOST_CELLS:
        raise ConfigError(f"sweep {sweep.name} has {count:,} runs, more than {_MOST_CELLS:,}")
    points = list(itertools.product(*([(key, value) for value in values] for key, values in sweep.axes.items())))
    return [
        Cell(variant, point, seed, _config(sweep, settings, point, seed, overrides, settle=settle))
        for seed in sweep.seeds
        for point in points
        for variant, settings in sweep.variants.items()
    ]


def _config(
    sweep: SweepConfig,
    settings: Sequence[str],
    point: Sequence[tuple[str, AxisValue]],
    seed: int,
    overrides: Sequence[str],
    *,
    settle: bool,
) -> RunConfig:
    # Axes before the variant: a variant that fixes a setting, such as no noise at all, is not moved along that axis.
    at = [f"{key}={toml_value(value)}" for key, value in point]
    named = [f"seed={seed}", 'description=""', f"name={toml_value(sweep.name)}"]
    config = load_recipe(sweep.recipe, [*sweep.settings, *at], settings, [*named, *overrides])
    return settled(config) if settle else config


def check_cells(cells: Sequence[Cell]) -> None:
    """Find out before any training whether each run's model, data set and mechanism fit together.

    Raises:
        ConfigError: one does not; the run is named.
    """
    checked: set[str] = set()
    for cell in cells:
        what = cell.config.model_dump_json(exclude={"seed"})  # which decides about values only
        if what in checked:
            continue
        checked.add(what)
        try:
            check_fit(cell.config)
        except LdpflError as error:
            raise ConfigError(f"{cell}: {error}") from error
