"""Evaluate a run's model on the test rows: metrics with intervals, calibration, and metrics of each client's test rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, isfinite, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from ldpfl.data.persons import numbered
from ldpfl.errors import printable
from ldpfl.simulation import Federation
from ldpfl.simulation.local_training import evaluated, measured
from ldpfl.tasks import ACCURACY, LOWER_IS_BETTER, unusable, weighted_metrics
from ldpfl.tasks.outcomes import survival, times_in
from ldpfl.tasks.weighted_metrics import Counted, Floats

EXTREME_SLOPE, _SURELY_EXTREME = 0.5, 0.8
"""Predicted probabilities count as far too close to 0 and 1 if the calibration slope is below the first and its interval's upper end below
the second."""
NARROW_SLOPE, _SURELY_NARROW = 1 / EXTREME_SLOPE, 1 / _SURELY_EXTREME
"""Predicted probabilities count as far too close together if the calibration slope is above the first and its interval's lower end above
the second."""

MIN_SITE_ROWS, MIN_EVENTS = 20, 10
"""Minimum number of test rows (or persons), and of rows with and without the event, for metrics with intervals and for a client's metrics.
With fewer rows an interval covers nearly every value, and with fewer events it is too narrow."""
_RISK_BINS = 20

Scores = Mapping[str, float]
Intervals = Mapping[str, tuple[float, float]]

_CHANCE: Scores = {weighted_metrics.AUROC: 0.5, weighted_metrics.CONCORDANCE: 0.5, "R2": 0.0}
"""Value of each metric for a model that has learnt nothing."""


@dataclass(frozen=True)
class Reference:
    """Scores on the same data without protection.

    Attributes:
        score_per_round: score of the same training without noise after each round, by the task's main metric.
        scores: all metrics of the final model of that training.
        pooled: metrics of a regression on all rows together, without clipping or noise; None if the data are not a table.
    """

    score_per_round: list[float]
    scores: Scores = field(default_factory=dict)
    pooled: Scores | None = None


def quality(federation: Federation, weights: Tensor, seed: int, classes: Sequence[str] = ()) -> dict[str, Any]:
    """Evaluate the model with ``weights`` (d,) on the test rows, and return the entries for ``result.json``.

    The result also has findings that the caller turns into caveats: ``unusable`` is True if the outputs for some rows are NaN or infinite.
    The texts ``extreme``, ``narrow``, ``off`` and ``chance`` are not empty if probabilities are far too close to 0 and 1, if they are far
    too close together, if the mean risk is far from the observed share, or if the main metric is no better than chance.

    Args:
        seed: seed of the bootstrap.
        classes: names of the classes of images, if they have names. Those of a table are in its encoder.
    """
    judged = _judged(federation, weights)
    named = classes if federation.encoder is None else federation.encoder.classes
    found: dict[str, Any] = {"scores": judged.scores, "test_rows": len(federation.evaluation.samples), "unusable": judged.unusable}
    found["classes"] = [printable(name) for name in named]
    if judged.figures is None:
        return found
    rows = len(judged.seen)
    whose = _whose(federation, np.arange(rows))
    unsure, _ = _few_events(judged, judged.seen, whose)
    known = weighted_metrics.intervals(judged.figures, rows, seed, whose=whose)
    if whose is not None:
        found["resampled"] = "persons"
    if intervals := {name: known[name] for name in judged.scores if name in known and name not in unsure}:
        found["intervals"] = intervals
    found |= {"extreme": _extreme(judged.scores, intervals), "narrow": _narrow(judged.scores, intervals)}
    found |= {"off": _off(judged.scores, intervals), "chance": _chance(federation.task.task.metric, judged.scores, intervals)}
    found["sites"] = list(_by_site(federation, judged, seed))
    if judged.is_of_two_classes:
        risks = expit(judged.told)
        found["event"] = printable(named[1]) if named else "1"
        found["calibration"] = weighted_metrics.calibration(risks, judged.seen.astype(np.float64), shares=True, whose=whose)
        counts, edges = np.histogram(risks, bins=_RISK_BINS, range=(0.0, ceil(20 * risks.max()) / 20))
        found["risks"] = {"edges": edges.tolist(), "rows": counts.tolist()}
    elif judged.is_of_numbers:
        found["calibration"] = weighted_metrics.calibration(judged.told, judged.seen, shares=False)
    return found


def _extreme(scores: Scores, intervals: Intervals) -> str:
    """Return the calibration slope as text if the predicted probabilities are clearly too far apart, else ""."""
    slope, (_, high) = scores.get(weighted_metrics.SLOPE, nan), intervals.get(weighted_metrics.SLOPE, (nan, nan))
    return _slope_of(scores, intervals) if slope < EXTREME_SLOPE and high < _SURELY_EXTREME else ""


def _narrow(scores: Scores, intervals: Intervals) -> str:
    """Return the calibration slope as text if the predicted probabilities are clearly too close together, else ""."""
    slope, (low, _) = scores.get(weighted_metrics.SLOPE, nan), intervals.get(weighted_metrics.SLOPE, (nan, nan))
    return _slope_of(scores, intervals) if slope > NARROW_SLOPE and low > _SURELY_NARROW else ""


def _slope_of(scores: Scores, intervals: Intervals) -> str:
    low, high = intervals[weighted_metrics.SLOPE]
    return f"{weighted_metrics.SLOPE} {scores[weighted_metrics.SLOPE]:.2g} (95 % interval {low:.2g} to {high:.2g}; 1 is best)"


def _chance(metric: str, scores: Scores, intervals: Intervals) -> str:
    """Return the main ``metric`` as text if its interval does not lie above chance; "" if it does, or if there is no interval.

    Chance for the accuracy is the share of the commonest class. A model of several classes whose AUROC lies above chance has learnt
    something, whichever class it predicts.
    """
    if metric == ACCURACY:
        chance, beside = (
            scores.get(weighted_metrics.COMMONEST, nan),
            f"the share of the commonest class is {scores.get(weighted_metrics.COMMONEST, nan):.1%}",
        )
    else:
        chance, beside = _CHANCE.get(metric, nan), f"chance is {_CHANCE.get(metric, nan):g}"
    low, high = intervals.get(metric, (nan, nan))
    auroc, _ = intervals.get(weighted_metrics.AUROC, (nan, nan))
    if not low <= chance or auroc > _CHANCE[weighted_metrics.AUROC]:
        return ""
    return f"{metric} {scores[metric]:.4g} (95 % interval {low:.3g} to {high:.3g}), and {beside}"


def _off(scores: Scores, intervals: Intervals) -> str:
    """Return the mean predicted risk and the observed share as text if one is more than twice the other, else ""."""
    risk, seen = scores.get(weighted_metrics.PREDICTED, nan), scores.get(weighted_metrics.OBSERVED, nan)
    low, high = intervals.get(weighted_metrics.OBSERVED, (0.0, inf))
    return f"{risk:.1%}, and {seen:.1%} was observed" if risk > max(2 * seen, high) or risk < min(seen / 2, low) else ""


def scores_of(federation: Federation, weights: Tensor) -> dict[str, float]:
    """Return all figures of the model with ``weights`` (d,) on the test rows, by name."""
    return _judged(federation, weights).scores


@dataclass(frozen=True, eq=False)
class _Judged:
    """A model's outputs for the test rows, the observed targets, and the metrics of both.

    Attributes:
        scores: each metric over all rows.
        told, seen: outputs and observed targets, in the form that the metrics take; empty if only the task itself has metrics.
        kind: function that computes weighted metrics from outputs and targets; None if only the task itself has metrics.
        figures: result of ``kind`` for all rows.
        unusable: whether the outputs for some rows are NaN or infinite.
    """

    scores: dict[str, float]
    told: Floats = field(default_factory=lambda: np.empty(0))
    seen: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    kind: Callable[[Floats, Any], Counted] | None = None
    figures: Counted | None = None
    unusable: bool = False

    @property
    def is_of_two_classes(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.of_two_classes

    @property
    def is_of_times(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.of_times

    @property
    def is_of_numbers(self) -> bool:
        return self.kind is weighted_metrics.of_numbers


def _judged(federation: Federation, weights: Tensor) -> _Judged:
    task, rows = federation.task.task, federation.evaluation.samples
    if not len(rows):
        return _Judged(measured(federation.task, weights, rows, every=True))
    if task.name not in _KINDS:
        found: list[bool] = []

        def watched() -> Iterator[tuple[Tensor, Tensor]]:  # some at a time: the outputs for texts are large
            for outputs, targets in evaluated(federation.task, weights, rows):
                found.append(bool(unusable(outputs, task.targets).any()))
                yield outputs, targets

        return _Judged(task.measured(watched(), every=True), unusable=any(found))
    batches = [(outputs.cpu(), targets.cpu()) for outputs, targets in evaluated(federation.task, weights, rows)]
    scores = task.measured(iter(batches), every=True)
    outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return judged_by(federation, outputs, targets, scores)


def judged_by(federation: Federation, outputs: Tensor, targets: Tensor, scores: Mapping[str, float]) -> _Judged:
    """Return the metrics of ``outputs`` for the test rows, in the target's units, with the task's own metrics ``scores``."""
    if not bool(outputs.isfinite().all()):
        return _Judged(dict(scores), unusable=bool(unusable(outputs, federation.task.task.targets).any()))
    kind, told, seen = _KINDS[federation.task.task.name](outputs, targets, federation)
    figures = kind(told, seen)
    return _Judged({**weighted_metrics.point(figures, len(seen)), **scores}, told, seen, kind, figures)


_Form = tuple[Callable[[Floats, Any], Counted], Floats, NDArray[Any]]


def _class_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    logits, classes = outputs.double().numpy(), targets.numpy()
    if logits.shape[1] == 2:
        figures = partial(weighted_metrics.of_two_classes, threshold=federation.evaluation.threshold)
        return figures, logits[:, 1] - logits[:, 0], classes == 1
    return weighted_metrics.of_several_classes, logits, classes


def _label_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    return weighted_metrics.of_labels, outputs.double().numpy(), targets.numpy() > 0


def _number_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    encoder = federation.encoder
    center, unit = (0.0, 1.0) if encoder is None else (encoder.target_center, encoder.target_spread)
    found, seen = (own.reshape(len(targets)).double().numpy() * unit + center for own in (outputs, targets))
    return weighted_metrics.of_numbers, found, seen


def _time_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    cuts = np.array(() if federation.encoder is None else federation.encoder.cuts, dtype=np.float32)  # as times are
    times, events = times_in(targets, outputs.shape[1])
    return (
        partial(weighted_metrics.of_times, cuts=cuts.astype(np.float64)),
        survival(outputs.double()).numpy(),
        np.stack([times, events], axis=1),
    )


_KINDS: Mapping[str, Callable[[Tensor, Tensor, Federation], _Form]] = {
    "classification": _class_form,
    "multilabel": _label_form,
    "regression": _number_form,
    "survival": _time_form,
}


def _by_site(federation: Federation, judged: _Judged, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each client's test rows: the worst client first, clients without metrics last."""
    if federation.evaluation.clients is None:
        return
    metric = federation.task.task.metric
    found = [_site(federation, judged, place, seed) for place in np.unique(federation.evaluation.clients)]
    sign = -1 if metric in LOWER_IS_BETTER else 1

    def place(site: Mapping[str, Any]) -> tuple[bool, float]:
        score = site["scores"].get(metric, nan)
        return not isfinite(score), sign * score if isfinite(score) else 0.0

    yield from sorted(found, key=place)


def _site(federation: Federation, judged: _Judged, client: int, seed: int) -> dict[str, Any]:
    """Return the entry of ``client`` in ``result.json``: its metrics, or a note on why there are too few test rows for them."""
    own = np.flatnonzero(federation.evaluation.clients == client)
    told, seen = judged.told[own], judged.seen[own]
    name = printable(federation.evaluation.client_names[client]) if federation.evaluation.client_names else str(client)
    found: dict[str, Any] = {"name": name, "rows": own.size, "scores": {}, "intervals": {}, "note": ""}
    if judged.is_of_two_classes:
        found["events"] = int(seen.sum())
    whose = _whose(federation, own)
    if (own.size if whose is None else int(whose.max()) + 1) < MIN_SITE_ROWS:
        return {**found, "note": f"too few {'rows' if whose is None else 'persons'}: figures need {MIN_SITE_ROWS}"}
    if judged.is_of_two_classes and found["events"] in (0, own.size):
        return {**found, "note": "no event among its rows" if not found["events"] else "an event in each of its rows"}
    unsure, few = _few_events(judged, seen, whose)
    if judged.kind is None:
        return {**found, "note": few}
    figures = judged.kind(told, seen)
    sure = {name: value for name, value in weighted_metrics.point(figures, own.size).items() if name not in unsure}
    known = weighted_metrics.intervals(figures, own.size, seed, whose=whose) if sure else {}
    return {**found, "scores": sure, "intervals": {name: known[name] for name in sure if name in known}, "note": few}


def _few_events(judged: _Judged, seen: NDArray[Any], whose: NDArray[np.int64] | None) -> tuple[frozenset[str], str]:
    """Return the metrics that are unreliable for rows with the targets ``seen``, and why: intervals over few events are too narrow.

    Events are counted for each class or label that some row has. If rows have persons, ``whose`` (n,), persons are counted.
    """
    if judged.is_of_two_classes:
        columns, unsure = seen[:, None] > 0, frozenset(judged.scores)
    elif judged.is_of_times:
        columns, unsure = seen[:, 1:] > 0, frozenset(judged.scores)
    elif judged.kind is weighted_metrics.of_several_classes:
        columns, unsure = seen[:, None] == np.unique(seen), frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1))
    elif judged.kind is weighted_metrics.of_labels:
        columns, unsure = seen[:, seen.any(axis=0)], frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1))
    else:
        return frozenset(), ""
    units = np.arange(len(seen)) if whose is None else whose
    sides = (columns,) if judged.is_of_times else (columns, ~columns)
    fewest = min((np.unique(units[own]).size for side in sides for own in side.T), default=0)
    if fewest >= MIN_EVENTS:
        return frozenset(), ""
    what = "rows" if whose is None else "persons"
    kind = "event" if len(columns.T) == 1 else "class" if judged.kind is weighted_metrics.of_several_classes else "label"
    return unsure, f"too few {what} with or without {_AN[kind]}: figures need {MIN_EVENTS} of each"


_AN = {"event": "the event", "class": "one of the classes", "label": "one of the labels"}


def _whose(federation: Federation, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the number of the person of each of the test ``rows`` (n,), from 0; None if the data name no persons."""
    persons = federation.evaluation.persons
    return None if persons is None else numbered(persons[rows].tolist())
