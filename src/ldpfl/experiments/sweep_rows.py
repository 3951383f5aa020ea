"""Results of a sweep: a row for each variant and point over all seeds, its learning curve, and the rows on the Pareto frontier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import inf, isfinite, nan, sqrt
from pathlib import Path
from typing import Any

from ldpfl.errors import DataError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_config import AxisValue, Cell
from ldpfl.privacy.guarantee import IF_TRUSTED, Statement, best_figure, is_figure
from ldpfl.tasks import ACCURACY, LOWER_IS_BETTER
from ldpfl.util.files import from_json_lines
from ldpfl.util.number_format import number

Point = tuple[tuple[str, AxisValue], ...]
Result = dict[str, Any]
Rounds = tuple[float, ...]
"""A figure after each round of one run."""


@dataclass(frozen=True)
class Row:
    """A variant at one point of the axes, over all seeds.

    Attributes:
        point: value of each axis; empty for a variant that is the same at all points.
        score: score after the last round, for each seed whose run finished.
        bytes_per_client: number of bytes that one client sends in one round.
        privacy: entries of the privacy statements, as in ``result.json``, each the largest over all seeds, stopped runs included. They
            may differ, since the seed may decide how often a client takes part.
        seconds: mean wall time of a run.
        stopped: reasons why the other seeds' runs stopped early. If no run finished, the figures are those of the finished rounds.
        noise: figures of a noise schedule, means over the seeds: ``norm`` (LaDP-FL's "noise scale"), ``protected_fraction`` and
            ``paper_epsilon``; and ``norm_deviation``, 0 for one seed. Empty for other mechanisms.
        metric: name of the score's metric.
        scores: all metrics of the final models, by name, for the same seeds as ``score``; None for a metric without a value.
    """

    variant: str
    point: Point
    score: tuple[float, ...]
    bytes_per_client: int
    privacy: dict[str, Any]
    seconds: float
    stopped: tuple[str, ...] = ()
    noise: dict[str, float] = field(default_factory=dict)
    metric: str = ACCURACY
    scores: dict[str, tuple[float | None, ...]] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float | None]:
        """Mean of each figure over the seeds in which it has a value."""
        known = {name: [value for value in values if value is not None] for name, values in self.scores.items()}
        return {name: statistics.fmean(values) if values else None for name, values in known.items()}

    @property
    def mean(self) -> float | None:
        """Mean score; None if no run could be finished."""
        return statistics.fmean(self.score) if self.score else None

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return _deviation(self.score)

    @property
    def budget(self) -> float:
        """Local epsilon of a client's whole run at the run's delta; infinite if nothing is protected."""
        epsilon = self.privacy.get("local")
        if epsilon is None:
            return 0.0  # nobody took part
        return inf if epsilon == "infinity" else float(epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**asdict(self), "point": dict(self.point), "mean": self.mean, "deviation": self.deviation, "means": self.means}


@dataclass(frozen=True)
class Curve:
    """A row's figures after each round, for each seed whose run finished.

    Attributes:
        score: score after each round.
        norm: L2 norms of the clients' noise, added up over clients and rounds (LaDP-FL, Table III). Empty without a noise schedule.
        paper_epsilon: epsilon of the mean client by LaDP-FL's sum (equations 17 to 19, Figure 5). It is not a guarantee. Empty without a
            noise schedule.
    """

    row: Row
    score: tuple[Rounds, ...]
    norm: tuple[Rounds, ...] = ()
    paper_epsilon: tuple[Rounds, ...] = ()


@dataclass(frozen=True)
class JointGuarantee:
    """The privacy guarantee against somebody who sees the models of all runs over a user's own data.

    Attributes:
        runs: number of runs.
        statement: joint guarantee from the ledgers of all runs.
    """

    runs: int
    statement: Statement

    @property
    def sentences(self) -> tuple[str, ...]:
        """Warnings to read before choosing a row."""
        best, delta = self.statement.best, self.statement.delta
        if best is None or not isfinite(best.epsilon):
            figure = "no finite epsilon"
        else:
            figure = (
                f"epsilon {number(best.epsilon)} at delta {delta:g} for each {self.statement.protected}, {IF_TRUSTED[best.trust_model]}"
            )
        return (
            f"whoever sees the models of all {self.runs} runs, each of them released on the same rows, has {figure}",
            *self.statement.warnings,
            "the scores of this table were measured on test rows without noise: no epsilon covers them, so keep the table to yourself",
            "to choose the best row by these scores is to choose on the test rows: measure it on other rows, or choose by ldpfl tune",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {"runs": self.runs, "privacy": self.statement.to_dict()}


def rows(results: Sequence[tuple[Cell, Result]]) -> list[Row]:
    """Return one row for each variant and point, over all seeds, in order of first appearance."""
    return [_row(variant, point, list(found.values())) for (variant, point), found in gathered(results).items()]


def curves(results: Sequence[tuple[Cell, Result]], out: Path) -> list[Curve]:
    """Return the curve of each row, in the order of :func:`rows`, for the sweep in the folder ``out``.

    Raises:
        DataError: the metrics of a finished run with a noise schedule are missing or damaged.
    """
    return [_curve(_row(*key, list(found.values())), found, out / "runs") for key, found in gathered(results).items()]


def gathered(results: Sequence[tuple[Cell, Result]]) -> dict[tuple[str, Point], dict[str, Result]]:
    """Return the results by variant and point, and there by the name of the run's folder."""
    folders: dict[str, dict[Point, set[str]]] = {}
    for cell, _ in results:
        folders.setdefault(cell.variant, {}).setdefault(cell.point, set()).add(cell.folder_name)
    gathered: dict[tuple[str, Point], dict[str, Result]] = {}
    for cell, result in results:
        points = folders[cell.variant]
        # A variant that fixes the settings of all axes has the same runs at every point, so it becomes one row.
        same = len(points) > 1 and all(runs == points[cell.point] for runs in points.values())
        gathered.setdefault((cell.variant, () if same else cell.point), {})[cell.folder_name] = result
    return gathered


def _curve(row: Row, found: dict[str, Result], runs: Path) -> Curve:
    done = {name: result for name, result in found.items() if "stopped" not in result}
    noise = [_noise_by_round(RunFolder(runs / name), result) for name, result in done.items() if "noise" in result]
    norm, paper_epsilon = zip(*noise, strict=True) if noise else ((), ())
    return Curve(row, tuple(tuple(result["score_per_round"]) for result in done.values()), norm, paper_epsilon)


def _noise_by_round(folder: RunFolder, result: Result) -> tuple[Rounds, Rounds]:
    """Return the noise norm and the papers' epsilon after each round; a round without any client adds nothing to either."""
    path, charged = folder.metrics_path, result["noise"]["paper_epsilon_per_round"]
    damaged = DataError(f"{path} is damaged: it lacks rounds of a finished run; remove {folder.path} and start the sweep again")
    try:
        noise = [line["noise"] for line in from_json_lines(path)]
        norms = [_known(figures["norm"]) if figures else 0.0 for figures in noise]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise damaged from error
    if len(noise) != result["rounds"] or sum(map(bool, noise)) != len(charged):
        raise damaged
    left = iter([_known(epsilon) for epsilon in charged])
    return tuple(accumulate(norms)), tuple(accumulate(next(left) if figures else 0.0 for figures in noise))


def _row(variant: str, point: Point, results: Sequence[Result]) -> Row:
    done = [result for result in results if "stopped" not in result]
    charged = [result for result in results if "privacy" in result]  # also until a run was given up
    figures = done or charged
    return Row(
        variant,
        point,
        tuple(_known(result["score"]) for result in done),
        int(figures[0]["uplink_bytes_per_client_round"]) if figures else 0,
        _costliest([result["privacy"] for result in charged]) if charged else {},
        statistics.fmean(result["seconds"] for result in figures) if figures else 0.0,
        tuple(result["stopped"] for result in results if "stopped" in result),
        _noise(done),
        str(figures[0].get("metric", ACCURACY)) if figures else ACCURACY,
        {name: tuple(result["scores"].get(name) for result in done) for name in _names(done)},
    )


def _names(results: Sequence[Result]) -> list[str]:
    """Return the names of all figures, in the order in which they first come."""
    return list(dict.fromkeys(name for result in results for name in result.get("scores", {})))


def _costliest(statements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one statement: each figure is the largest over the seeds, other entries come from the statement with the largest epsilon."""
    worst = max(statements, key=lambda own: (best_figure(own) or (0.0,))[0])
    figures = {key: [own[key] for own in statements if is_figure(own.get(key))] for key in worst}
    return {key: max(figures[key], key=float) if figures[key] else value for key, value in worst.items() if not isinstance(value, list)}


def _noise(results: Sequence[Result]) -> dict[str, float]:
    found = [result["noise"] for result in results if "noise" in result]
    if not found:
        return {}
    means = {name: statistics.fmean(_known(noise[name]) for noise in found) for name in ("norm", "protected_fraction", "paper_epsilon")}
    return {**means, "norm_deviation": _deviation([_known(noise["norm"]) for noise in found])}


def _known(figure: float | None) -> float:
    """Return a figure of a file, where None stands for one that is not a finite number."""
    return nan if figure is None else figure


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows on the Pareto frontier of accuracy, bytes and privacy budget.

    A row is dominated if another row costs no more of either, less of one, and is as accurate up to two standard errors of the
    difference over their shared seeds; or if another row costs the same and is more accurate. Rows with a stopped run are left out.
    """
    finished = [row for row in rows if row.score and not row.stopped]
    return [row for row in finished if not any(_dominates(other, row) for other in finished)]


def _dominates(other: Row, row: Row) -> bool:
    if other.bytes_per_client > row.bytes_per_client or other.budget > row.budget:
        return False
    if any(other.privacy.get(what) != row.privacy.get(what) for what in ("protected", "delta")):
        return False  # epsilons for records and for clients, or at different deltas, cannot be compared
    better = -1 if row.metric in LOWER_IS_BETTER else 1
    gains = [better * (a - b) for a, b in zip(other.score, row.score, strict=False)]
    gain = statistics.fmean(gains)
    if (other.bytes_per_client, other.budget) == (row.bytes_per_client, row.budget):
        return gain > 0
    error = statistics.stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return gain >= -2 * error
