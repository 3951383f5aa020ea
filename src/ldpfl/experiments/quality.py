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

from ldpfl.data.persons import number_names
from ldpfl.errors import printable
from ldpfl.experiments.judging import EvaluatedModel, evaluate_on_test_rows
from ldpfl.simulation import Federation
from ldpfl.tasks import ACCURACY, weighted_metrics
from ldpfl.tasks.survival import horizon
from ldpfl.tasks.weighted_metrics import Floats

EXTREME_SLOPE, NARROW_SLOPE = 0.5, 2.0
"""Predicted probabilities count as far too close to 0 and 1 if the calibration slope is below the first, and its interval lies between 0
and 1. They count as far too close together if the slope is above the second, and its interval lies above 1, which is the best slope."""

MIN_SITE_ROWS, MIN_EVENTS = 20, 10
"""Minimum number of test rows (or persons), and of rows with and without the event, for metrics with intervals and for a client's metrics.
With fewer rows an interval covers nearly every value, and with fewer events it is too narrow."""
_RISK_BINS = 20
"""Number of bars in the histogram of predicted risks."""

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


def quality_entries(
    federation: Federation, weights: Tensor, seed: int, classes: Sequence[str] = (), personal: Tensor | None = None
) -> dict[str, Any]:
    """Evaluate the model with ``weights`` (d,) on the test rows, and return the entries for ``result.json``.

    The result also has findings, which the caller turns into caveats. Without metrics of rows, it has only the first three. These are True
    or False:

    - ``unusable``: the outputs for some rows are NaN or infinite.
    - ``constant``: all rows have the same outputs.
    - ``without_intervals``: only the task itself has metrics.

    The others are texts, empty if all is well:

    - ``extreme``, ``narrow``: probabilities are far too close to 0 and 1, or to each other.
    - ``off``: the interval of the mean prediction does not meet the interval of the observed mean.
    - ``chance``: the main metric is no better than chance.
    - ``unsure``: the main metric has a wide interval.
    - ``one_class``: outputs differ, but the predicted class of all rows is the same. Then ``threshold`` is a risk from which about as many
      rows are flagged as have the event.

    Args:
        seed: seed of the bootstrap.
        classes: names of the classes, if they have names. Those of a table are in its encoder.
        personal: (N, p) personal layers of all clients; None if the model has none.
    """
    evaluated = evaluate_on_test_rows(federation, weights, personal)
    class_names = classes if federation.encoder is None else federation.encoder.classes
    entries: dict[str, Any] = {"scores": evaluated.scores, "test_rows": len(federation.evaluation.samples), "unusable": evaluated.unusable}
    entries["constant"] = evaluated.constant
    entries["without_intervals"] = evaluated.metrics_function is None and not evaluated.unusable and entries["test_rows"] > 0
    entries["classes"] = [printable(name) for name in class_names]
    if evaluated.figures is None:
        return entries
    row_count = len(evaluated.observed)
    persons = _person_numbers(federation, np.arange(row_count))
    unsure_metrics, entries["intervals_note"] = _unreliable_metrics(evaluated, evaluated.observed, persons)
    all_intervals = weighted_metrics.confidence_intervals(evaluated.figures, row_count, seed, person_of_row=persons)
    if persons is not None:
        entries["resampled"] = "persons"
    if intervals := {name: all_intervals[name] for name in evaluated.scores if name in all_intervals and name not in unsure_metrics}:
        entries["intervals"] = intervals
    entries |= {"off": _means_that_differ(intervals), "one_class": _only_predicted_class(evaluated, class_names)}
    entries["chance"] = _no_better_than_chance(federation.task.task.metric, evaluated, intervals)
    entries["unsure"] = "" if entries["chance"] else _wide_interval(federation.task.task.metric, evaluated, intervals)
    if not entries["chance"]:
        entries |= _slope_findings(evaluated.scores, intervals)
    if evaluated.is_of_times:
        entries["horizon"] = horizon(evaluated.observed[:, 0], evaluated.observed[:, 1] > 0)
    entries["sites"] = list(_site_entries(federation, evaluated, seed))
    if evaluated.is_of_two_classes:
        risks = expit(evaluated.predicted)
        entries["threshold"] = _threshold_for_share(risks, float(evaluated.observed.mean())) if entries["one_class"] else ""
        entries["event"] = printable(class_names[1]) if class_names else "1"
        entries["calibration"] = weighted_metrics.calibration_groups(
            risks, evaluated.observed.astype(np.float64), shares=True, person_of_row=persons
        )
        # The bars end at the largest risk, rounded up to a twentieth.
        counts, edges = np.histogram(risks, bins=_RISK_BINS, range=(0.0, ceil(20 * risks.max()) / 20))
        entries["risks"] = {"edges": edges.tolist(), "rows": counts.tolist()}
    elif evaluated.is_of_numbers:
        entries["calibration"] = weighted_metrics.calibration_groups(evaluated.predicted, evaluated.observed, shares=False)
    return entries


def _slope_findings(scores: Scores, intervals: Intervals) -> dict[str, str]:
    """Return the findings ``extreme`` and ``narrow``: the calibration slope as text if it is clearly below or above 1, else "".

    A slope whose interval reaches 0 is not extreme. Then higher predictions may not even mean more events, which is another fault.
    """
    slope, (low, high) = scores.get(weighted_metrics.SLOPE, nan), intervals.get(weighted_metrics.SLOPE, (nan, nan))
    text = f"{weighted_metrics.SLOPE} {slope:.2g} (95 % interval {low:.2g} to {high:.2g}; 1 is best)"
    return {
        "extreme": text if low > 0 and slope < EXTREME_SLOPE and high < 1 else "",
        "narrow": text if slope > NARROW_SLOPE and low > 1 else "",
    }


def _only_predicted_class(evaluated: EvaluatedModel, names: Sequence[str]) -> str:
    """Return the class that is predicted for all test rows, as text; "" if several classes are predicted.

    It is also "" if all outputs are equal, which another finding reports, or if all rows have the same target.
    """
    if evaluated.constant or evaluated.classes is None or not _all_equal(evaluated.classes) or _all_equal(evaluated.observed):
        return ""
    class_number = int(evaluated.classes[0])
    return repr(printable(names[class_number])) if class_number < len(names) else str(class_number)


def _threshold_for_share(risks: Floats, share: float) -> str:
    """Return, as text of few digits, the threshold at which about a ``share`` of ``risks`` (n,) is flagged.

    Rows with a risk at or above the threshold are flagged. It lies within the range of the risks, so that some rows are flagged and some
    are not. The text is "" if there is no such threshold, for example because all risks are equal.
    """
    distinct_risks, rows_at = np.unique(risks, return_counts=True)
    if len(distinct_risks) < 2:
        return ""
    flagged_from = rows_at[::-1].cumsum()[::-1][1:]  # number of rows at or above each distinct risk but the smallest
    nearest = np.abs(flagged_from - share * len(risks)).argmin()
    # Take the fewest digits that flag about as many rows. The number may differ by a tenth of the smaller group, flagged or not flagged.
    tolerance = min(flagged_from[nearest], len(risks) - flagged_from[nearest]) / 10
    texts = (f"{distinct_risks[1:][nearest]:.{digits}g}" for digits in range(2, 17))  # 16 digits tell most float64 numbers apart
    return next((text for text in texts if abs((risks >= float(text)).sum() - flagged_from[nearest]) <= tolerance), "")


def _all_equal(classes: NDArray[Any]) -> bool:
    """Return whether all ``classes`` (n,) are the same."""
    return bool((classes == classes[0]).all())


def _no_better_than_chance(metric: str, evaluated: EvaluatedModel, intervals: Intervals) -> str:
    """Return the main ``metric`` as text if its 95 % interval does not lie above chance; "" if it does, or if it has no interval.

    Chance for the accuracy is the share of the commonest class. The result is "" for two kinds of models that may have learnt something:
    a model whose AUROC lies above chance, and a model of ordered classes that predicts one class for all rows. The metric of the latter
    only sees predicted classes.
    """
    scores = evaluated.scores
    if evaluated.constant or (metric == weighted_metrics.KAPPA and evaluated.classes is not None and _all_equal(evaluated.classes)):
        return ""
    if metric == ACCURACY:
        chance = scores.get(weighted_metrics.COMMONEST, nan)
        comparison = f"the share of the commonest class is {chance:.1%}"
    else:
        chance = _CHANCE.get(metric, nan)
        comparison = f"chance is {chance:g}"
    low, high = intervals.get(metric, (nan, nan))
    auroc_low, _ = intervals.get(weighted_metrics.AUROC, (nan, nan))
    if not low <= chance or auroc_low > _CHANCE[weighted_metrics.AUROC]:  # "not <=" holds for NaN too: no interval, or no chance known
        return ""
    return f"{metric} {scores[metric]:.4g} (95 % interval {low:.3g} to {high:.3g}), and {comparison}"


def _wide_interval(metric: str, evaluated: EvaluatedModel, intervals: Intervals) -> str:
    """Return the main ``metric`` as text if its 95 % interval is wider than :data:`_MAX_WIDTH`, and the number of test events; else "".

    Only the AUROC and the concordance are looked at. Their intervals depend on the number of events, which is small for a rare outcome
    even where there are many test rows.
    """
    low, high = intervals.get(metric, (nan, nan))
    if metric not in (weighted_metrics.AUROC, weighted_metrics.CONCORDANCE) or not high - low > _MAX_WIDTH:  # or NaN: no interval
        return ""
    events = evaluated.observed[:, 1] if evaluated.is_of_times else evaluated.observed
    share = f"{int(events.sum()):,} of {len(events):,} rows have the event"
    return f"{metric} {evaluated.scores[metric]:.3g} (95 % interval {low:.3g} to {high:.3g}), and {share}"


_MAX_WIDTH = 0.15
"""Width of an interval above which a note warns of it. An AUROC of 0.75 has a wider one with fewer than some 50 events among many rows."""


def _means_that_differ(intervals: Intervals) -> str:
    """Return the intervals of the mean prediction (or risk) and of the observed mean (or share) as text if they do not meet, else ""."""
    for predicted, observed, form in (
        (weighted_metrics.PREDICTED, weighted_metrics.OBSERVED, ".1%"),
        (weighted_metrics.MEAN_PREDICTION, weighted_metrics.OBSERVED_MEAN, ".4g"),
    ):
        low, high = intervals.get(predicted, (nan, nan))
        observed_low, observed_high = intervals.get(observed, (nan, nan))
        if high < observed_low or low > observed_high:
            return f"{low:{form}} to {high:{form}} (95 % interval), and {observed_low:{form}} to {observed_high:{form}} was observed"
    return ""


def scores_on_test_rows(federation: Federation, weights: Tensor, personal: Tensor | None = None) -> dict[str, float]:
    """Return all figures of the model with ``weights`` (d,) on the test rows, by name; for ``personal`` see :func:`quality_entries`."""
    return evaluate_on_test_rows(federation, weights, personal).scores


def _site_entries(federation: Federation, evaluated: EvaluatedModel, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each client's test rows: the worst client first, clients without metrics last."""
    if federation.evaluation.clients is None:
        return
    metric = federation.task.task.metric
    entries = [_site_entry(federation, evaluated, client, seed) for client in np.unique(federation.evaluation.clients)]

    def worst_first(entry: Mapping[str, Any]) -> tuple[bool, float]:
        """Return the key to sort by. Entries without the main metric come last.

        Low scores count as worst: in all tasks whose clients have metrics, higher is better.
        """
        score = entry["scores"].get(metric, nan)
        return not isfinite(score), score if isfinite(score) else 0.0

    yield from sorted(entries, key=worst_first)


def _site_entry(federation: Federation, evaluated: EvaluatedModel, client: int, seed: int) -> dict[str, Any]:
    """Return the entry of ``client`` in ``result.json``: its metrics, or a note on why there are too few test rows for them."""
    rows = np.flatnonzero(federation.evaluation.clients == client)
    predicted, observed = evaluated.predicted[rows], evaluated.observed[rows]
    name = printable(federation.evaluation.client_names[client]) if federation.evaluation.client_names else str(client)
    entry: dict[str, Any] = {"name": name, "rows": rows.size, "scores": {}, "intervals": {}, "note": ""}
    if evaluated.is_of_two_classes:
        entry["events"] = int(observed.sum())
    elif evaluated.is_of_times:
        entry["events"] = int(observed[:, 1].sum())
    persons = _person_numbers(federation, rows)
    unit_count = rows.size if persons is None else int(persons.max()) + 1  # rows, or persons if the data name them
    if evaluated.is_of_two_classes:  # both shares are given for any number of rows
        entry["scores"] = {weighted_metrics.PREDICTED: float(expit(predicted).mean()), weighted_metrics.OBSERVED: float(observed.mean())}
        entry["intervals"] = {weighted_metrics.OBSERVED: weighted_metrics.share_interval(observed, persons)}
    if unit_count < MIN_SITE_ROWS:
        return {**entry, "note": f"too few {'rows' if persons is None else 'persons'}: figures need {MIN_SITE_ROWS}"}
    if evaluated.is_of_two_classes and entry["events"] in (0, rows.size):
        return {**entry, "note": "no event among its rows" if not entry["events"] else "an event in each of its rows"}
    unsure_metrics, note = _unreliable_metrics(evaluated, observed, persons)
    if evaluated.metrics_function is None:
        return {**entry, "note": note}
    figures = evaluated.metrics_function(predicted, observed)
    scores = {name: value for name, value in weighted_metrics.figures_of_all_rows(figures, rows.size).items() if name not in unsure_metrics}
    intervals = weighted_metrics.confidence_intervals(figures, rows.size, seed, person_of_row=persons) if scores else {}
    entry["scores"] |= scores
    entry["intervals"] |= {name: intervals[name] for name in scores if name in intervals}
    return {**entry, "note": note}


def _unreliable_metrics(evaluated: EvaluatedModel, targets: NDArray[Any], persons: NDArray[np.int64] | None) -> tuple[frozenset[str], str]:
    """Return the metrics that are unreliable for rows with these ``targets``, and the reason as text; nothing and "" if all are reliable.

    Metrics are unreliable if too few rows have an event, because their intervals are too narrow then. Rows are counted separately for each
    class or label that some row has. If ``persons`` (n,) numbers the person of each row, persons are counted instead of rows.
    """
    outcome = _rare_outcome(evaluated, targets)
    if outcome is None:
        return frozenset(), ""
    units = np.arange(len(targets)) if persons is None else persons  # each row counts on its own, or with the rows of its person
    # A mask (n,) of rows for each outcome, and for each outcome one of the rows without it.
    masks = [*outcome.has_outcome.T, *(~outcome.has_outcome.T if outcome.needs_rows_without else ())]
    fewest = min((np.unique(units[mask]).size for mask in masks), default=0)
    if fewest >= MIN_EVENTS:
        return frozenset(), ""
    unit_name = "rows" if persons is None else "persons"
    if outcome.needs_rows_without:
        return outcome.unreliable, f"too few {unit_name} with or without {outcome.name}: figures need {MIN_EVENTS} of each"
    return outcome.unreliable, f"too few {unit_name} with {outcome.name}: figures need {MIN_EVENTS}"


class _Outcome(NamedTuple):
    """An outcome, such as an event or one of several classes, of which metrics need a minimum number of rows.

    Attributes:
        has_outcome: (n, K) whether each of n rows has each of K such outcomes.
        name: name of the outcome, for notes.
        unreliable: metrics that are unreliable if too few rows have it.
        needs_rows_without: whether a minimum number of rows without it is needed too.
    """

    has_outcome: NDArray[np.bool_]
    name: str
    unreliable: frozenset[str]
    needs_rows_without: bool = True


def _rare_outcome(evaluated: EvaluatedModel, targets: NDArray[Any]) -> _Outcome | None:
    """Return the outcome that may be rare among rows with these ``targets``; None if no metric of the model needs many rows of a kind."""
    if evaluated.is_of_two_classes:
        return _Outcome(targets[:, None] > 0, "the event", frozenset(evaluated.scores))
    if evaluated.is_of_times:
        return _Outcome(targets[:, 1:] > 0, "the event", frozenset(evaluated.scores), needs_rows_without=False)
    if evaluated.metrics_function is weighted_metrics.several_class_figures:
        unreliable = frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1))
        return _Outcome(targets[:, None] == np.unique(targets), "one of the classes", unreliable)
    if evaluated.metrics_function is weighted_metrics.label_figures:
        return _Outcome(
            targets[:, targets.any(axis=0)], "one of the labels", frozenset((weighted_metrics.AUROC, weighted_metrics.MACRO_F1))
        )
    if evaluated.metrics_function is weighted_metrics.count_figures:
        unreliable = frozenset((weighted_metrics.DEVIANCE, weighted_metrics.MEAN_PREDICTION, weighted_metrics.OBSERVED_MEAN))
        return _Outcome(targets[:, None] > 0, "a count above 0", unreliable, needs_rows_without=False)
    if evaluated.metrics_function is weighted_metrics.ordered_class_figures:
        is_other_class = targets[:, None] != np.bincount(targets).argmax()
        return _Outcome(is_other_class, "another class than the commonest", frozenset((weighted_metrics.KAPPA,)), needs_rows_without=False)
    return None


def _person_numbers(federation: Federation, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return, for each of the test ``rows`` (n,), a number from 0 that identifies its person; None if the data name no persons."""
    persons = federation.evaluation.persons
    return None if persons is None else number_names(persons[rows].tolist())
