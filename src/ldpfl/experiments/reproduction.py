"""Reproductions of the papers' tables and figures: the sweep that makes one, at which size, and the figures that the paper reports."""

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
from ldpfl.experiments.sweep_rows import Point, Row, group_results, rows
from ldpfl.experiments.sweep_run import finished_result
from ldpfl.privacy.guarantee import best_figure
from ldpfl.util.files import from_toml
from ldpfl.util.suggestions import did_you_mean

SizeName = Literal["desk", "paper"]
"""``desk``: minutes to an hour or two on two cores. ``paper``: as many data, clients and rounds as the paper has."""

Shows = Literal["score", "noise", "paper_epsilon", "seconds", "distance"]
"""The figure that is compared: one of :class:`~ldpfl.experiments.sweep_rows.Row`, or the ``distance`` of reconstructed to real images."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Size(_Strict):
    """How a table or figure is made at one size.

    Attributes:
        sweep, settings: name of the sweep, and settings for all its runs.
        steps, images: numbers of training steps and of reconstructed images, if the figure is of an attack.
    """

    sweep: str
    settings: list[str] = []
    steps: int = 1000
    images: int = 500


class Published(_Strict):
    """The figure ``value`` that the paper reports for a variant of the sweep, at the point ``at`` of its axes."""

    variant: str
    at: dict[str, AxisValue] = {}
    value: float


class Reproduction(_Strict):
    """A table or figure of a paper.

    Attributes:
        title: title, for tables and plots.
        source: the paper, and the number of the table or figure in it.
        differs: differences from the paper, in a sentence or two.
        shows: the figure that is compared.
        desk, paper: how it is made at each size; None if it is not made at that size.
        published: the paper's figures that its text states. Nothing is read off pictures.
        changed: settings by which a user changed all runs. Then the paper's figures are for other settings.
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
    def changes_note(self) -> str:
        """Line below tables and plots that names the changed settings; "" if a user changed none."""
        return f"Not the paper's setting. Changed by --set: {self.changed}" if self.changed else ""

    def at_size(self, name: str, size: SizeName) -> Size:
        """Return how the table or figure called ``name`` is made at ``size``.

        Raises:
            ConfigError: it is not made at this size.
        """
        if size not in ("desk", "paper"):
            raise ConfigError(f"the size is {size!r}, expected desk or paper")
        chosen = self.desk if size == "desk" else self.paper
        if chosen is None:
            other = "paper" if size == "desk" else "desk"
            raise ConfigError(f"{name} is not available in the size {size!r}: choose the size {other}")
        return chosen

    def paper_figure(self, variant: str, point: Point) -> float | None:
        """Return the paper's figure for a variant at a point of the axes; None if it reports none."""
        values = dict(point).items()  # ``<=`` below: a paper's figure may leave axes out
        return next((figure.value for figure in self.published if figure.variant == variant and figure.at.items() <= values), None)


def load_reproduction(name: str) -> Reproduction:
    """Return the table or figure called ``name``.

    Raises:
        ConfigError: there is no such table or figure.
    """
    files = reproduction_files()
    if name not in files:
        raise ConfigError(f"no table or figure {name!r}: {did_you_mean(name, files)}")
    try:
        return Reproduction.model_validate(from_toml(files[name].read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"{name}: {error.errors()[0]['msg']}") from None


@dataclass(frozen=True)
class ReproducedRow:
    """A row of a reproduced table, as far as its runs are finished.

    Attributes:
        row: figures over the seeds whose runs are finished; None if no run is finished.
        variant, point: the variant, and the point of the axes, of this row.
        seeds: number of finished runs.
        wanted: number of all runs.
        distances: distances of the images that attacks reconstructed from the finished runs; empty if there was no attack.
    """

    row: Row | None
    variant: str
    point: Point
    seeds: int
    wanted: int
    distances: tuple[float, ...] = ()

    def figure(self, shows: Shows) -> float | None:
        """Return the figure that is compared with the paper; None if no run has it."""
        if self.row is None:
            return None
        if shows == "score":
            return self.row.mean
        if shows == "distance":
            return statistics.fmean(self.distances) if self.distances else None
        if shows == "seconds":
            return self.row.seconds
        return self.row.noise.get("norm" if shows == "noise" else "paper_epsilon")

    @property
    def best_guarantee(self) -> tuple[float, str] | None:
        """Smallest proved epsilon of everything that is sent in a run, and its trust model; None if no run is finished."""
        if self.row is None or not self.row.privacy:
            return None
        return best_figure(self.row.privacy)


def reproduced_rows(
    sweep: SweepConfig, overrides: Sequence[str], out: Path, distances: Callable[[RunFolder], Sequence[float]] = lambda folder: ()
) -> list[ReproducedRow]:
    """Return the rows of ``sweep``, with the figures of its finished runs in ``out``. Nothing is run.

    Args:
        distances: function that returns the distances of the attacks on a finished run.

    Raises:
        ConfigError: a setting does not fit.
        DataError: a run's files are damaged.
    """
    planned = cells(sweep, overrides)  # a cell is a run of the sweep: a variant and a seed at a point of the axes
    finished_cells = [(cell, result) for cell in planned if (result := finished_result(cell, out)) is not None]
    rows_by_key = {(row.variant, row.point): row for row in rows(finished_cells)}
    finished_by_key = group_results(finished_cells)
    distances_by_folder = {cell.folder_name: tuple(distances(cell.folder(out))) for cell, _ in finished_cells}
    results = []
    # All seeds of a variant at a point make one row.
    for (variant, point), runs in group_results([(cell, {}) for cell in planned]).items():
        row, finished_runs = rows_by_key.get((variant, point)), finished_by_key.get((variant, point), {})
        row_distances = tuple(distance for name in finished_runs for distance in distances_by_folder[name])
        results.append(ReproducedRow(row, variant, point, len(finished_runs), len(runs), row_distances))
    return results
