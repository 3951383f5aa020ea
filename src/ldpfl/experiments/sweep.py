"""Sweeps: a recipe in several variants, over values of some settings and over seeds; resumable cell by cell."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Runner
from ldpfl.files import write_text
from ldpfl.suggestions import did_you_mean

Setting = bool | int | float | str


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
    axes: dict[str, Annotated[list[Setting], Field(min_length=1)]] = {}
    variants: Annotated[dict[str, list[str]], Field(min_length=1)] = {"as it is": []}
    plot_against: Literal["axis", "budget"] = "axis"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: a variant at one point of the axes with one seed."""

    variant: str
    point: tuple[tuple[str, Setting], ...]
    seed: int
    config: RunConfig

    @property
    def folder_name(self) -> str:
        """A name that equal configs share, whatever variant they belong to: such a run is made once."""
        return hashlib.sha256(self.config.to_toml().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        at = "".join(f", {key.rpartition('.')[2]} {value}" for key, value in self.point)
        return f"{self.variant}{at}, seed {self.seed}"


@dataclass(frozen=True)
class Row:
    """A variant at one point of the axes, over all seeds.

    Attributes:
        accuracy: of each seed's last round; of those seeds whose run could be finished.
        stopped: why the other seeds' runs could not.
        bytes_per_client: uplink of one client in one round.
        privacy: figures of the first seed's statement, as in ``result.json``.
        seconds: mean wall time of a run.
        noise: of a noise schedule, means over the seeds: ``norm`` (LaDP-FL's "noise scale"), ``protected_fraction`` and
            ``paper_epsilon``; empty for other mechanisms.
    """

    variant: str
    point: tuple[tuple[str, Setting], ...]
    accuracy: tuple[float, ...]
    bytes_per_client: int
    privacy: dict[str, Any]
    seconds: float
    stopped: tuple[str, ...] = ()
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean accuracy; None if no run could be finished."""
        return statistics.fmean(self.accuracy) if self.accuracy else None

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0

    @property
    def budget(self) -> float:
        """Epsilon of a client's whole run at the run's delta, trusting nobody; infinite where nothing is protected."""
        epsilon = self.privacy.get("local", "infinity")
        return inf if epsilon == "infinity" else float(epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "point": dict(self.point), "mean": self.mean, "deviation": self.deviation}


def sweep_names() -> tuple[str, ...]:
    """Names of all shipped sweeps, sorted."""
    return tuple(sorted(_paths()))


def load_sweep(name: str) -> SweepConfig:
    """Return the shipped sweep ``name``, or the one in the file ``name`` if it ends in .toml.

    Raises:
        ConfigError: there is none, or a value does not fit; one line.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"sweep file {name} cannot be read: {error}") from error
    else:
        paths = _paths()
        if name not in paths:
            raise ConfigError(f"no sweep {name!r}: {did_you_mean(name, paths)}")
        text = paths[name].read_text(encoding="utf-8")
    try:
        return SweepConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"sweep {name} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"sweep {name}, {place}: {first['msg']}, got {first['input']!r}") from None


def cells(sweep: SweepConfig, overrides: Sequence[str] = ()) -> list[Cell]:
    """Return all runs of ``sweep``, each config checked; ``overrides`` apply to every one of them, last."""
    points = list(itertools.product(*([(key, value) for value in values] for key, values in sweep.axes.items())))
    return [
        Cell(variant, point, seed, _config(sweep, settings, point, seed, overrides))
        for seed in sweep.seeds
        for point in points
        for variant, settings in sweep.variants.items()
    ]


def _config(
    sweep: SweepConfig, settings: Sequence[str], point: Sequence[tuple[str, Setting]], seed: int, overrides: Sequence[str]
) -> RunConfig:
    # Axes before the variant: a variant that fixes a setting, such as no noise at all, is not moved along that axis.
    at = [f"{key}={json.dumps(value)}" for key, value in point]
    named = [f"seed={seed}", 'description=""', f'name="{sweep.name}"']
    return load_recipe(sweep.recipe, [*sweep.settings, *at, *settings, *named, *overrides])


def run_cell(sweep: SweepConfig, cell: Cell, runner: Runner, out: Path) -> dict[str, Any]:
    """Run one cell in its own folder under ``out``, or go on with it, or read its result if it is finished.

    A run that could not be finished because a client's values must not leave gives only ``stopped``, the reason.

    Raises:
        ConfigError: ``out`` holds another sweep.
    """
    path, text = out / "sweep.json", sweep.model_dump_json(indent=1)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{out} holds another sweep: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    folder = RunFolder(out / "runs" / cell.folder_name)
    finished = folder.result()  # its folder is named by its config, so this is the same run
    if finished is not None:
        return finished
    stopped = folder.path / "stopped.txt"
    if stopped.exists():
        return {"stopped": stopped.read_text(encoding="utf-8")}
    try:
        return runner.run(cell.config, folder, resume=True, twin=False)
    except PrivacyError as error:  # training went to NaN, for instance: that is a result of this setting
        write_text(stopped, str(error))
        return {"stopped": str(error)}


def rows(results: Sequence[tuple[Cell, dict[str, Any]]]) -> list[Row]:
    """Return the results gathered over seeds, in the order in which variants and points first came."""
    gathered: dict[tuple[str, tuple[tuple[str, Setting], ...]], list[dict[str, Any]]] = {}
    for cell, result in results:
        gathered.setdefault((cell.variant, cell.point), []).append(result)
    return [
        Row(
            variant,
            point,
            tuple(float(result["accuracy"]) for result in done),
            int(done[0]["uplink_bytes_per_client_round"]) if done else 0,
            {key: value for key, value in done[0]["privacy"].items() if not isinstance(value, list)} if done else {},
            statistics.fmean(result["seconds"] for result in done) if done else 0.0,
            tuple(result["stopped"] for result in runs if "stopped" in result),
            _noise(done),
        )
        for (variant, point), runs in gathered.items()
        for done in [[result for result in runs if "stopped" not in result]]
    ]


def _noise(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = [result["noise"] for result in results if "noise" in result]
    names = ("norm", "protected_fraction", "paper_epsilon") if found else ()
    return {name: statistics.fmean(noise[name] for noise in found) for name in names}


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows than which no other is at least as accurate with no more bytes and no larger budget."""
    finished = [row for row in rows if row.mean is not None]
    prices = {id(row): (-(row.mean or 0.0), row.bytes_per_client, row.budget) for row in finished}

    def dominates(one: Row, other: Row) -> bool:
        ours, theirs = prices[id(one)], prices[id(other)]
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))

    return [row for row in finished if not any(dominates(other, row) for other in finished)]


def _paths() -> dict[str, Traversable]:
    folder = files("ldpfl.experiments").joinpath("sweeps")
    return {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
