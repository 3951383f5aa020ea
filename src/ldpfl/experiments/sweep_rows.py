"""What a sweep found: a row for each variant and point, over all seeds, and which rows are on the frontier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf, sqrt
from typing import Any

from ldpfl.experiments.sweep import Cell, Setting

Point = tuple[tuple[str, Setting], ...]
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A variant at one point of the axes, over all seeds.

    Attributes:
        point: empty for a variant that is the same at all points.
        accuracy: of each seed's last round; of those seeds whose run could be finished.
        bytes_per_client: uplink of one client in one round.
        privacy: figures of the first seed's statement, as in ``result.json``.
        seconds: mean wall time of a run.
        stopped: why the other seeds' runs could not be finished; without any finished one, the figures are those until then.
        noise: of a noise schedule, means over the seeds: ``norm`` (LaDP-FL's "noise scale"), ``protected_fraction`` and
            ``paper_epsilon``; empty for other mechanisms.
    """

    variant: str
    point: Point
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
        epsilon = self.privacy.get("local")
        if epsilon is None:
            return 0.0  # nobody took part
        return inf if epsilon == "infinity" else float(epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "point": dict(self.point), "mean": self.mean, "deviation": self.deviation}


def rows(results: Sequence[tuple[Cell, Result]]) -> list[Row]:
    """Return the results gathered over seeds, in the order in which variants and points first came."""
    folders: dict[str, dict[Point, set[str]]] = {}
    for cell, _ in results:
        folders.setdefault(cell.variant, {}).setdefault(cell.point, set()).add(cell.folder_name)
    gathered: dict[tuple[str, Point], dict[str, Result]] = {}
    for cell, result in results:
        points = folders[cell.variant]
        # A variant that fixes what the axes change is one row, not one a point.
        same = len(points) > 1 and all(runs == points[cell.point] for runs in points.values())
        gathered.setdefault((cell.variant, () if same else cell.point), {})[cell.folder_name] = result
    return [_row(variant, point, list(found.values())) for (variant, point), found in gathered.items()]


def _row(variant: str, point: Point, results: Sequence[Result]) -> Row:
    done = [result for result in results if "stopped" not in result]
    figures = done or [result for result in results if "privacy" in result]
    return Row(
        variant,
        point,
        tuple(float(result["accuracy"]) for result in done),
        int(figures[0]["uplink_bytes_per_client_round"]) if figures else 0,
        {key: value for key, value in figures[0]["privacy"].items() if not isinstance(value, list)} if figures else {},
        statistics.fmean(result["seconds"] for result in figures) if figures else 0.0,
        tuple(result["stopped"] for result in results if "stopped" in result),
        _noise(done),
    )


def _noise(results: Sequence[Result]) -> dict[str, float]:
    found = [result["noise"] for result in results if "noise" in result]
    names = ("norm", "protected_fraction", "paper_epsilon") if found else ()
    return {name: statistics.fmean(noise[name] for noise in found) for name in names}


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are worth their price in bytes and budget.

    A row is not if another one costs no more of either, less of one, and is as accurate up to two standard errors of the
    difference over the seeds, which the two share; or costs the same and is more accurate. Rows of which a seed
    stopped are left out.
    """
    finished = [row for row in rows if row.accuracy and not row.stopped]
    return [row for row in finished if not any(_beats(other, row) for other in finished)]


def _beats(other: Row, row: Row) -> bool:
    if other.bytes_per_client > row.bytes_per_client or other.budget > row.budget:
        return False
    gains = [a - b for a, b in zip(other.accuracy, row.accuracy, strict=False)]
    gain = statistics.fmean(gains)
    if (other.bytes_per_client, other.budget) == (row.bytes_per_client, row.budget):
        return gain > 0
    error = statistics.stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return gain >= -2 * error
