"""Results of a sweep: a row for each variant and point over all seeds, its learning curve, and the rows on the Pareto frontier."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from math import inf, isfinite, isnan, nan, sqrt
from pathlib import Path
from typing import Any

from ldpfl.errors import DataError
from ldpfl.experiments.dataset import NOTES_ON_ALL_OWN_DATA
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.sweep_config import AxisValue, Cell
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, IF_TRUSTED, Statement, best_figure, is_figure
from ldpfl.tasks import ACCURACY
from ldpfl.util.files import from_json_lines
from ldpfl.util.number_format import counted, number

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
        stopped: reasons why other seeds' runs stopped early. If no run finished, the figures are those of the finished rounds.
        noise: figures of a noise schedule, means over the seeds: ``norm`` (LaDP-FL's "noise scale"), ``protected_fraction`` and
            ``paper_epsilon``; and ``norm_deviation``, 0 for one seed. Empty for other mechanisms.
        metric: name of the score's metric.
        scores: all metrics of the final models, by name, for the same seeds as ``score``; None for a metric without a value.
        lower_is_better: whether a low ``score`` is good.
        failed: errors of the other seeds' runs, each after the name of its run. A resumed sweep tries these runs again.
        evaluated_on: ``data.evaluate_on`` of the runs.
        caveats: notes in the ``result.json`` of each finished run, by the name of the run's folder.
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
    lower_is_better: bool = False
    failed: tuple[str, ...] = ()
    evaluated_on: str = "test"
    caveats: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float | None]:
        """Mean of each metric over the seeds in which it has a value; None without such a seed."""
        known = {name: [value for value in values if value is not None] for name, values in self.scores.items()}
        return {name: statistics.fmean(values) if values else None for name, values in known.items()}

    @property
    def mean(self) -> float | None:
        """Mean score; None if no run could be finished."""
        return statistics.fmean(self.score) if self.score else None

    @property
    def deviation(self) -> float:
        """Standard deviation of the score over the seeds; 0 for one seed."""
        return _standard_deviation(self.score)

    @property
    def budget(self) -> float:
        """Local epsilon of a client's whole run at the run's delta; 0 if nobody took part, and infinite if nothing is protected."""
        epsilon = self.privacy.get("local")
        if epsilon is None:
            return 0.0  # nobody took part
        return inf if epsilon == "infinity" else float(epsilon)

    @property
    def notes(self) -> list[str]:
        """Different notes of the finished runs, in order of first appearance."""
        return list(dict.fromkeys(caveat for caveats in self.caveats.values() for caveat in caveats))

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
        scored_part: "holdout" if all scores are of holdout rows, else "test".
    """

    runs: int
    statement: Statement
    scored_part: str = "test"

    @property
    def sentences(self) -> tuple[str, ...]:
        """Warnings to read before choosing a row."""
        guarantee, delta = self.statement.best, self.statement.delta
        if guarantee is None or not isfinite(guarantee.epsilon):
            figure = "no finite epsilon"
        else:
            trust = IF_TRUSTED[guarantee.trust_model]
            figure = f"epsilon {number(guarantee.epsilon)} at delta {delta:g} for each {self.statement.protected}, {trust}"
        seen = "the model" if self.runs == 1 else f"the models of all {self.runs:,} runs, each of them released on the same rows,"
        choice = (
            "choose the best row by these scores, or within one epsilon by ldpfl tune, and measure it once on test rows, without "
            "data.evaluate_on"
            if self.scored_part == "holdout"
            else "choosing the best row by these scores is choosing on the test rows: measure it on other rows, or choose by ldpfl tune"
        )
        return (
            f"whoever sees {seen} has {figure}",
            *self.statement.warnings,
            f"the scores of this table were measured on {self.scored_part} rows without noise: no epsilon covers them, so keep the table "
            "to yourself",
            choice,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {"runs": self.runs, "privacy": self.statement.to_dict()}


def rows(results: Sequence[tuple[Cell, Result]]) -> list[Row]:
    """Return one row for each variant and point, over all seeds, in order of first appearance."""
    return [_row_of(variant, point, by_folder) for (variant, point), by_folder in group_results(results).items()]


def curves(results: Sequence[tuple[Cell, Result]], out: Path) -> list[Curve]:
    """Return the curve of each row, in the order of :func:`rows`, for the sweep in the folder ``out``.

    Raises:
        DataError: the metrics of a finished run with a noise schedule are missing or damaged.
    """
    return [
        _curve_of(_row_of(variant, point, by_folder), by_folder, out / "runs")
        for (variant, point), by_folder in group_results(results).items()
    ]


def group_results(results: Sequence[tuple[Cell, Result]]) -> dict[tuple[str, Point], dict[str, Result]]:
    """Return the results of each variant and point: one result for each seed, by the name of the run's folder.

    A variant that fixes the settings of all axes has the same runs at every point. It gets one entry, with an empty point.
    """
    names_by_variant: dict[str, dict[Point, set[str]]] = {}  # names of the runs' folders
    for cell, _ in results:
        names_by_variant.setdefault(cell.variant, {}).setdefault(cell.point, set()).add(cell.folder_name)
    fixed_variants = {variant for variant, names_by_point in names_by_variant.items() if _has_same_runs_at_all_points(names_by_point)}
    grouped: dict[tuple[str, Point], dict[str, Result]] = {}
    for cell, result in results:
        point = () if cell.variant in fixed_variants else cell.point
        grouped.setdefault((cell.variant, point), {})[cell.folder_name] = result
    return grouped


def _has_same_runs_at_all_points(names_by_point: Mapping[Point, set[str]]) -> bool:
    """Return whether a variant has several points, and runs in the same folders at each of them."""
    first, *others = names_by_point.values()
    return bool(others) and all(names == first for names in others)


def _curve_of(row: Row, results: dict[str, Result], runs: Path) -> Curve:
    """Return the curve of ``row`` from its ``results`` by folder name. ``runs`` is the folder that holds the runs' folders."""
    finished = {name: result for name, result in results.items() if _is_finished(result)}
    noise_by_run = [_noise_by_round(RunFolder(runs / name), result) for name, result in finished.items() if "noise" in result]
    norm, paper_epsilon = zip(*noise_by_run, strict=True) if noise_by_run else ((), ())
    return Curve(row, tuple(tuple(result["score_per_round"]) for result in finished.values()), norm, paper_epsilon)


def _noise_by_round(folder: RunFolder, result: Result) -> tuple[Rounds, Rounds]:
    """Return the sums, up to each round, of the noise norm and of the paper's epsilon. A round without clients adds nothing."""
    path, charged_epsilons = folder.metrics_path, result["noise"]["paper_epsilon_per_round"]
    damaged = DataError(f"{path} is damaged: it lacks rounds of a finished run; remove {folder.path} and start the sweep again")
    try:
        noise = [line["noise"] for line in from_json_lines(path)]
        norms = [_nan_if_none(figures["norm"]) if figures else 0.0 for figures in noise]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise damaged from error
    if len(noise) != result["rounds"] or sum(map(bool, noise)) != len(charged_epsilons):
        raise damaged
    # The result has an epsilon for each round with clients, and the metrics have a line for each round.
    charges = iter([_nan_if_none(epsilon) for epsilon in charged_epsilons])
    return tuple(accumulate(norms)), tuple(accumulate(next(charges) if figures else 0.0 for figures in noise))


def _row_of(variant: str, point: Point, by_folder: Mapping[str, Result]) -> Row:
    """Return the row of a variant and point from the results of its runs, by the name of their folders.

    Without a finished run, figures are those of stopped runs.
    """
    results = list(by_folder.values())
    finished = [result for result in results if _is_finished(result)]
    with_privacy = [result for result in results if "privacy" in result]  # also stopped runs with finished rounds
    with_figures = finished or with_privacy
    return Row(
        variant=variant,
        point=point,
        score=tuple(_nan_if_none(result["score"]) for result in finished),
        bytes_per_client=int(with_figures[0]["uplink_bytes_per_client_round"]) if with_figures else 0,
        privacy=_largest_figures([result["privacy"] for result in with_privacy]) if with_privacy else {},
        seconds=statistics.fmean(result["seconds"] for result in with_figures) if with_figures else 0.0,
        stopped=tuple(result["stopped"] for result in results if "stopped" in result),
        noise=_mean_noise(finished),
        metric=str(with_figures[0].get("metric", ACCURACY)) if with_figures else ACCURACY,
        scores={name: tuple(result["scores"].get(name) for result in finished) for name in _metric_names(finished)},
        lower_is_better=any(result.get("lower_is_better", False) for result in with_figures),
        failed=tuple(result["failed"] for result in results if "failed" in result),
        evaluated_on=str(with_figures[0].get("evaluated_on", "test")) if with_figures else "test",
        caveats={name: tuple(result.get("caveats", ())) for name, result in by_folder.items() if _is_finished(result)},
    )


def _is_finished(result: Result) -> bool:
    """Return whether the run of a ``result`` came to its end: it was neither stopped early nor failed."""
    return not {"stopped", "failed"} & result.keys()


def notes_on_runs(rows: Sequence[Row]) -> list[str]:
    """Return the notes of the finished runs of ``rows``, the most frequent first, each with the number of runs that have it.

    Notes that differ only in numbers, or after their first colon, count as one: runs may leave out different columns. The longest of them
    is returned, since it names most columns. Notes that every run on a user's own data has are left out.
    """
    caveats_by_run = {run: caveats for row in rows for run, caveats in row.caveats.items()}  # rows may share a run
    texts: dict[str, dict[str, list[str]]] = {}  # by kind of note, then by run
    for run, caveats in caveats_by_run.items():
        for caveat in caveats:
            if not caveat.startswith(NOTES_ON_ALL_OWN_DATA):
                kind = re.sub(r"\d[\d,. ]*", "#", caveat.partition(": ")[0])
                texts.setdefault(kind, {}).setdefault(run, []).append(caveat)
    notes = []
    for by_run in sorted(texts.values(), key=len, reverse=True):
        different = {text for run_texts in by_run.values() for text in run_texts}
        details = " (details are those of one run)" if len(different) > 1 else ""
        runs = counted(len(caveats_by_run), "finished run")
        notes.append(f"in {len(by_run):,} of {runs}{details}: {max(sorted(different), key=len)}")
    more = len(notes) - _MAX_NOTES
    return [*notes[:_MAX_NOTES], *([f"and {counted(more, 'further note')}, under caveats in rows.json"] if more > 0 else [])]


_MAX_NOTES = 10


def metric_of(rows: Sequence[Row]) -> str:
    """Return the name of the metric of ``rows``. A row without a finished round has only the default, so it is skipped."""
    return next((row.metric for row in rows if row.privacy), ACCURACY)


def _metric_names(results: Sequence[Result]) -> list[str]:
    """Return the names of all metrics, in order of first appearance."""
    return list(dict.fromkeys(name for result in results for name in result.get("scores", {})))


def _largest_figures(statements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a statement with the largest value of each figure over the ``statements``, one for each seed. "infinity" is a figure too.

    Its texts are those of the statement with the largest epsilon, but its status is the weakest. Lists are left out, since entries of
    different seeds do not correspond.
    """
    worst = max(statements, key=_best_epsilon)
    result = {}
    for key, value in worst.items():
        figures = [statement[key] for statement in statements if is_figure(statement.get(key))]
        if not isinstance(value, list):
            result[key] = max(figures, key=float) if figures else value
    if any(statement.get("status") == AUTHORS_CLAIM for statement in statements):
        result["status"] = AUTHORS_CLAIM
    return result


def _best_epsilon(statement: dict[str, Any]) -> float:
    """Return the best epsilon of a privacy ``statement``; 0 if nobody took part."""
    epsilon, _trust_model = best_figure(statement) or (0.0, "")
    return epsilon


def _mean_noise(results: Sequence[Result]) -> dict[str, float]:
    """Return the means over the ``results`` of the figures of a noise schedule; an empty dict without such a schedule."""
    schedules = [result["noise"] for result in results if "noise" in result]
    if not schedules:
        return {}
    names = ("norm", "protected_fraction", "paper_epsilon")
    means = {name: statistics.fmean(_nan_if_none(noise[name]) for noise in schedules) for name in names}
    return {**means, "norm_deviation": _standard_deviation([_nan_if_none(noise["norm"]) for noise in schedules])}


def _nan_if_none(figure: float | None) -> float:
    """Return a figure of a result file, in which None stands for NaN and infinity."""
    return nan if figure is None else figure


def _standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of those ``values`` that are no NaN, as a score without a value is; 0 for fewer than two."""
    known = [value for value in values if not isnan(value)]
    return statistics.stdev(known) if len(known) > 1 else 0.0


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows on the Pareto frontier of accuracy, bytes and privacy budget.

    The costs are bytes and budget. A row is left out in three cases:

    - Another row costs less in one and no more in the other, and is as accurate, up to two standard errors of their difference over seeds.
    - Another row costs the same and is more accurate.
    - A run of the row was stopped or failed.
    """
    finished = [row for row in rows if row.score and not row.stopped and not row.failed]
    return [row for row in finished if not any(_dominates(other, row) for other in finished)]


def _dominates(other: Row, row: Row) -> bool:
    """Return whether ``other`` keeps ``row`` off the frontier, see :func:`frontier`."""
    if other.bytes_per_client > row.bytes_per_client or other.budget > row.budget:
        return False
    if any(other.privacy.get(key) != row.privacy.get(key) for key in ("protected", "delta")):
        return False  # epsilons for records and for clients, or at different deltas, cannot be compared
    sign = -1 if row.lower_is_better else 1
    # Scores of the same seed are compared. A sweep may still lack some seeds of one row.
    gains = [sign * (other_score - score) for other_score, score in zip(other.score, row.score, strict=False)]
    mean_gain = statistics.fmean(gains)
    if (other.bytes_per_client, other.budget) == (row.bytes_per_client, row.budget):
        return mean_gain > 0
    standard_error = statistics.stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return mean_gain >= -2 * standard_error
