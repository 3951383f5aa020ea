"""Tables and figures of the papers: which sweep makes one, at which size, and what the paper reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ldpfl.errors import ConfigError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.shipped import reproduction_files
from ldpfl.experiments.sweep_config import AxisValue, SweepConfig, cells
from ldpfl.experiments.sweep_rows import Point, Row, gathered, rows
from ldpfl.experiments.sweep_run import finished
from ldpfl.privacy.guarantee import best_figure
from ldpfl.util.files import from_toml
from ldpfl.util.suggestions import did_you_mean

SizeName = Literal["desk", "paper"]
"""``desk``: minutes to an hour or two on two cores. ``paper``: as many data, clients and rounds as the paper has."""

Shows = Literal["score", "noise", "paper_epsilon", "seconds", "distance"]
"""What a table or figure is about: see :class:`~ldpfl.experiments.sweep_rows.Row`; ``distance``: of reconstructed images to real ones."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Size(_Strict):
    """The sweep that is run, with ``settings`` of all its runs; and ``steps`` and ``images`` of the attack, where a distance is shown."""

    sweep: str
    settings: list[str] = []
    steps: int = 1000
    images: int = 500


class Published(_Strict):
    """What the paper reports of a variant of the sweep, at a point of its axes."""

    variant: str
    at: dict[str, AxisValue] = {}
    value: float


class Reproduction(_Strict):
    """A table or figure of a paper.

    Attributes:
        title: what it shows.
        source: paper and number.
        differs: what is not as in the paper, in a sentence or two.
        shows: the figure that is compared.
        desk, paper: how it is made, by size; None where it is not.
        published: the paper's figures, where its text has any; of pictures alone nothing is read off.
        changed: settings by which a user changed every run; the paper's figures are then of another setting.
    """

    title: str
    source: str
    differs: str = ""
    shows: Shows = "score"
    desk: Size | None = None
    paper: Size | None = None
    published: list[Published] = []
    changed: str = ""

    @property
    def changes_said(self) -> str:
        """A line for tables and pictures; empty where nothing was changed."""
        return f"Not the paper's setting. Changed by --set: {self.changed}" if self.changed else ""

    def at_size(self, name: str, size: SizeName) -> Size:
        """Return how it is made at ``size``.

        Raises:
            ConfigError: it is not made at this size.
        """
        if size not in ("desk", "paper"):
            raise ConfigError(f"the size is desk or paper, not {size!r}")
        chosen = self.desk if size == "desk" else self.paper
        if chosen is None:
            other = "paper" if size == "desk" else "desk"
            raise ConfigError(f"{name} is not made at the size {size!r}: choose the size {other}")
        return chosen

    def reported(self, variant: str, point: Point) -> float | None:
        """Return the paper's figure for a variant at a point of the axes, if it has one."""
        at = dict(point)
        return next((one.value for one in self.published if one.variant == variant and one.at.items() <= at.items()), None)


def load_reproduction(name: str) -> Reproduction:
    """Return the table or figure called ``name``.

    Raises:
        ConfigError: there is none.
    """
    files = reproduction_files()
    if name not in files:
        raise ConfigError(f"no table or figure {name!r}: {did_you_mean(name, files)}")
    try:
        return Reproduction.model_validate(from_toml(files[name].read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"{name}: {error.errors()[0]['msg']}") from None


@dataclass(frozen=True)
class Reached:
    """A row of a reproduced table.

    Attributes:
        row: over the seeds whose runs are finished; None where none is.
        variant, point: which one.
        seeds: how many runs are finished.
        wanted: how many there are to be.
        distances: of the attacks on them, where they were attacked.
    """

    row: Row | None
    variant: str
    point: Point
    seeds: int
    wanted: int
    distances: tuple[float, ...] = ()

    def figure(self, shows: Shows) -> float | None:
        """Return what is compared with the paper; None where it was not run, or could not be finished."""
        if self.row is None:
            return None
        if shows == "score":
            return self.row.mean
        if shows == "distance":
            return statistics.fmean(self.distances) if self.distances else None
        return self.row.seconds if shows == "seconds" else self.row.noise.get("norm" if shows == "noise" else "paper_epsilon")

    @property
    def holds(self) -> tuple[float, str] | None:
        """Return the smallest epsilon that holds for all that is sent in the run, and whom it trusts; None where it was not run."""
        if self.row is None or not self.row.privacy:
            return None
        return best_figure(self.row.privacy)


def reached(
    sweep: SweepConfig, overrides: Sequence[str], out: Path, distances: Callable[[RunFolder], Sequence[float]] = lambda folder: ()
) -> list[Reached]:
    """Return the rows of ``sweep`` as far as its runs in ``out`` are finished; nothing is run.

    Args:
        distances: of the attacks on a finished run.

    Raises:
        ConfigError: a setting does not fit.
        DataError: a run's files are damaged.
    """
    todo = cells(sweep, overrides)
    done = [(cell, found) for cell in todo if (found := finished(cell, out)) is not None]
    known, count = {(row.variant, row.point): row for row in rows(done)}, gathered(done)
    wanted = gathered([(cell, {}) for cell in todo])
    attacked = {cell.folder_name: tuple(distances(cell.folder(out))) for cell, _ in done}
    return [
        Reached(known.get(key), *key, len(own := count.get(key, {})), len(runs), tuple(each for name in own for each in attacked[name]))
        for key, runs in wanted.items()
    ]
