"""Evaluate a run's model on the test rows: metrics with intervals, calibration, and metrics of each client's test rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from ldpfl.data.persons import numbered
from ldpfl.errors import printable
from ldpfl.experiments.judging import Judged, judged_on_test_rows
from ldpfl.simulation import Federation
from ldpfl.tasks import ACCURACY, LOWER_IS_BETTER, weighted_metrics
from ldpfl.tasks.weighted_metrics import Floats

EXTREME_SLOPE, _SURELY_EXTREME = 0.5, 0.8
"""Predicted probabilities count as far too close to 0 and 1 if the calibration slope is below the first, and its interval lies above 0 and
below the second."""
NARROW_SLOPE, _SURELY_NARROW = 1 / EXTREME_SLOPE, 1 / _SURELY_EXTREME
"""Predicted probabilities count as far too close together if the calibration slope is above the first and its interval's lower end above
the second."""

MIN_SITE_ROWS, MIN_EVENTS = 20, 10
"""Minimum number of test rows (or persons), and of rows with and without the event, for metrics with intervals and for a client's metrics.
With fewer rows an interval covers nearly every value, and with fewer events it is too narrow."""
_RISK_BINS = 20

Scores = Mapping[str, float]
Intervals = Mapping[str, tuple[float, float]]

_CHANCE: Scores = {
    **dict.fromkeys((weighted_metrics.AUROC, weighted_metrics.CONCORDANCE), 0.5),
    **dict.fromkeys(("R2", weighted_metrics.DEVIANCE, weighted_metrics.KAPPA), 0.0),
}
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


def quality(federation: Federation, weights: Tensor, seed: int, classes: Sequence[str] = (), own: Tensor | None = None) -> dict[str, Any]:
    """Evaluate the model with ``weights`` (d,) on the test rows, and return the entries for ``result.json``.

    The result also has findings that the caller turns into caveats: ``unusable`` is True if the outputs for some rows are NaN or infinite,
    and ``constant`` if all rows have the same outputs. The texts ``extreme``, ``narrow``, ``off``, ``chance`` and ``one_class`` are not
    empty if probabilities are far too close to 0 and 1, if they are far too close together, if the mean risk is far from the observed
    share, if the main metric is no better than chance, or if different outputs make one class of all rows. With ``one_class``, the text
    ``threshold`` is the risk that flags about as many rows as have the event.

    Args:
        seed: seed of the bootstrap.
        classes: names of the classes of images, if they have names. Those of a table are in its encoder.
        own: (N, p) personal layers of all clients; None if the model has none.
    """
    judged = judged_on_test_rows(federation, weights, own)
    named = classes if federation.encoder is None else federation.encoder.classes
    found: dict[str, Any] = {"scores": judged.scores, "test_rows": len(federation.evaluation.samples), "unusable": judged.unusable}
    found["constant"] = judged.constant
    found["classes"] = [printable(name) for name in named]
    if judged.figures is None:
        return found
    rows = len(judged.seen)
    whose = _whose(federation, np.arange(rows))
    unsure, found["intervals_note"] = _few_events(judged, judged.seen, whose)
    known = weighted_metrics.intervals(judged.figures, rows, seed, whose=whose)
    if whose is not None:
        found["resampled"] = "persons"
    if intervals := {name: known[name] for name in judged.scores if name in known and name not in unsure}:
        found["intervals"] = intervals
    found |= {"off": _off(judged.scores, intervals), "one_class": _one_class(judged, named)}
    found["chance"] = _chance(federation.task.task.metric, judged, intervals)
    if not found["chance"]:
        found |= {"extreme": _extreme(judged.scores, intervals), "narrow": _narrow(judged.scores, intervals)}
    found["sites"] = list(_by_site(federation, judged, seed))
    if judged.is_of_two_classes:
        risks = expit(judged.told)
        found["threshold"] = _threshold(risks, float(judged.seen.mean())) if found["one_class"] else ""
        found["event"] = printable(named[1]) if named else "1"
        found["calibration"] = weighted_metrics.calibration(risks, judged.seen.astype(np.float64), shares=True, whose=whose)
        counts, edges = np.histogram(risks, bins=_RISK_BINS, range=(0.0, ceil(20 * risks.max()) / 20))
        found["risks"] = {"edges": edges.tolist(), "rows": counts.tolist()}
    elif judged.is_of_numbers:
        found["calibration"] = weighted_metrics.calibration(judged.told, judged.seen, shares=False)
    return found


def _extreme(scores: Scores, intervals: Intervals) -> str:
    """Return the calibration slope as text if the predicted probabilities are clearly too far apart, else "".

    A slope that may be 0 or less is another fault: then a higher prediction does not mean more events.
    """
    slope, (low, high) = scores.get(weighted_metrics.SLOPE, nan), intervals.get(weighted_metrics.SLOPE, (nan, nan))
    return _slope_of(scores, intervals) if low > 0 and slope < EXTREME_SLOPE and high < _SURELY_EXTREME else ""


def _narrow(scores: Scores, intervals: Intervals) -> str:
    """Return the calibration slope as text if the predicted probabilities are clearly too close together, else ""."""
    slope, (low, _) = scores.get(weighted_metrics.SLOPE, nan), intervals.get(weighted_metrics.SLOPE, (nan, nan))
    return _slope_of(scores, intervals) if slope > NARROW_SLOPE and low > _SURELY_NARROW else ""


def _slope_of(scores: Scores, intervals: Intervals) -> str:
    low, high = intervals[weighted_metrics.SLOPE]
    return f"{weighted_metrics.SLOPE} {scores[weighted_metrics.SLOPE]:.2g} (95 % interval {low:.2g} to {high:.2g}; 1 is best)"


def _one_class(judged: Judged, names: Sequence[str]) -> str:
    """Return the class that different outputs predict for all test rows, as text; "" if they predict several, or if the rows are of one."""
    if judged.constant or judged.classes is None or not _is_one(judged.classes) or _is_one(judged.seen):
        return ""
    told = int(judged.classes[0])
    return repr(printable(names[told])) if told < len(names) else str(told)


def _threshold(risks: Floats, share: float) -> str:
    """Return the threshold in few digits at which about a ``share`` of ``risks`` (n,) is flagged; "" if all risks are equal.

    It lies within the range of the risks, so that some rows are flagged and some are not.
    """
    values, counts = np.unique(risks, return_counts=True)
    if len(values) < 2:
        return ""
    flagged = counts[::-1].cumsum()[::-1][1:]  # rows at or above each value but the smallest
    best = np.abs(flagged - share * len(risks)).argmin()
    near = min(flagged[best], len(risks) - flagged[best]) / 10
    texts = (f"{values[1:][best]:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if abs((risks >= float(text)).sum() - flagged[best]) <= near), "")


def _is_one(classes: NDArray[Any]) -> bool:
    return bool((classes == classes[0]).all())


def _chance(metric: str, judged: Judged, intervals: Intervals) -> str:
    """Return the main ``metric`` as text if its interval does not lie above chance; "" if it does, or if there is no interval.

    Chance for the accuracy is the share of the commonest class. A model of several classes whose AUROC lies above chance has learnt
    something, whichever class it predicts. So may a model of ordered classes that predicts one of them for all rows: only its classes
    are judged, so nothing is said of it here.
    """
    scores = judged.scores
    if judged.constant or (metric == weighted_metrics.KAPPA and judged.classes is not None and _is_one(judged.classes)):
        return ""
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
    """Return the mean predicted risk and the observed share as text if they are far apart, else "".

    They are far apart if one is more than twice the other, or if this holds for the risk and the share of the other class.
    """
    risk, seen = scores.get(weighted_metrics.PREDICTED, nan), scores.get(weighted_metrics.OBSERVED, nan)
    low, high = intervals.get(weighted_metrics.OBSERVED, (0.0, 1.0))
    far = _is_far(risk, seen, low, high) or _is_far(1 - risk, 1 - seen, 1 - high, 1 - low)
    return f"{risk:.1%}, and {seen:.1%} was observed" if far else ""


def _is_far(risk: float, seen: float, low: float, high: float) -> bool:
    """Return whether ``risk`` is more than twice or less than half of ``seen``, and outside its interval."""
    return risk > max(2 * seen, high) or risk < min(seen / 2, low)


def scores_of(federation: Federation, weights: Tensor, own: Tensor | None = None) -> dict[str, float]:
    """Return all figures of the model with ``weights`` (d,) on the test rows, by name; for ``own`` see :func:`quality`."""
    return judged_on_test_rows(federation, weights, own).scores


def _by_site(federation: Federation, judged: Judged, seed: int) -> Iterator[dict[str, Any]]:
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


def _site(federation: Federation, judged: Judged, client: int, seed: int) -> dict[str, Any]:
    """Return the entry of ``client`` in ``result.json``: its metrics, or a note on why there are too few test rows for them."""
    own = np.flatnonzero(federation.evaluation.clients == client)
    told, seen = judged.told[own], judged.seen[own]
    name = printable(federation.evaluation.client_names[client]) if federation.evaluation.client_names else str(client)
    found: dict[str, Any] = {"name": name, "rows": own.size, "scores": {}, "intervals": {}, "note": ""}
    if judged.is_of_two_classes:
        found["events"] = int(seen.sum())
    elif judged.is_of_times:
        found["events"] = int(seen[:, 1].sum())
    whose = _whose(federation, own)
    units = own.size if whose is None else int(whose.max()) + 1
    if judged.is_of_two_classes:  # both shares are known of any number of rows
        found["scores"] = {weighted_metrics.PREDICTED: float(expit(told).mean()), weighted_metrics.OBSERVED: float(seen.mean())}
        found["intervals"] = {weighted_metrics.OBSERVED: weighted_metrics.share_interval(seen, units)}
    if units < MIN_SITE_ROWS:
        return {**found, "note": f"too few {'rows' if whose is None else 'persons'}: figures need {MIN_SITE_ROWS}"}
    if judged.is_of_two_classes and found["events"] in (0, own.size):
        return {**found, "note": "no event among its rows" if not found["events"] else "an event in each of its rows"}
    unsure, few = _few_events(judged, seen, whose)
    if judged.kind is None:
        return {**found, "note": few}
    figures = judged.kind(told, seen)
    sure = {name: value for name, value in weighted_metrics.point(figures, own.size).items() if name not in unsure}
    known = weighted_metrics.intervals(figures, own.size, seed, whose=whose) if sure else {}
    shown = found["scores"] | sure, found["intervals"] | {name: known[name] for name in sure if name in known}
    return {**found, "scores": shown[0], "intervals": shown[1], "note": few}


def _few_events(judged: Judged, seen: NDArray[Any], whose: NDArray[np.int64] | None) -> tuple[frozenset[str], str]:
    """Return the metrics that are unreliable for rows with the targets ``seen``, and why: intervals over few events are too narrow.

    Events are counted for each class or label that some row has. If rows have persons, ``whose`` (n,), persons are counted.
    """
    rare = _rare(judged, seen)
    if rare is None:
        return frozenset(), ""
    units = np.arange(len(seen)) if whose is None else whose
    sides = (rare.columns, ~rare.columns) if rare.and_without else (rare.columns,)
    fewest = min((np.unique(units[own]).size for side in sides for own in side.T), default=0)
    if fewest >= MIN_EVENTS:
        return frozenset(), ""
    what, (without, of_each) = "rows" if whose is None else "persons", (" or without", " of each") if rare.and_without else ("", "")
    return rare.unsure, f"too few {what} with{without} {rare.what}: figures need {MIN_EVENTS}{of_each}"


class _Rare(NamedTuple):
    """What may be rare among rows.

    Attributes:
        columns: which rows have it, (n, K).
        what: its name.
        unsure: metrics that are unreliable where it is rare.
        and_without: whether rows without it are needed too.
    """

    columns: NDArray[np.bool_]
    what: str
    unsure: frozenset[str]
    and_without: bool = True


def _rare(judged: Judged, seen: NDArray[Any]) -> _Rare | None:
    """Return what may be rare among rows with the targets ``seen``; None if the metrics do not depend on it."""
    if judged.is_of_two_classes:
        return _Rare(seen[:, None] > 0, "the event", frozenset(judged.scores))
    if judged.is_of_times:
        return _Rare(seen[:, 1:] > 0, "the event", frozenset(judged.scores), and_without=False)
    if judged.kind is weighted_metrics.of_several_classes:
        unsure = frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1))
        return _Rare(seen[:, None] == np.unique(seen), "one of the classes", unsure)
    if judged.kind is weighted_metrics.of_labels:
        return _Rare(seen[:, seen.any(axis=0)], "one of the labels", frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1)))
    if judged.kind is weighted_metrics.of_counts:
        return _Rare(seen[:, None] > 0, "a count above 0", frozenset((weighted_metrics.DEVIANCE,)), and_without=False)
    if judged.kind is weighted_metrics.of_ordered:
        other = seen[:, None] != np.bincount(seen).argmax()
        return _Rare(other, "another class than the commonest", frozenset((weighted_metrics.KAPPA,)), and_without=False)
    return None


def _whose(federation: Federation, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the number of the person of each of the test ``rows`` (n,), from 0; None if the data name no persons."""
    persons = federation.evaluation.persons
    return None if persons is None else numbered(persons[rows].tolist())
