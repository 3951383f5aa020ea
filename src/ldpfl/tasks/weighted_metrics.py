"""Figures by which a model is judged on rows that it was not trained on, each for many weightings of these rows at once.

In a bootstrap resample, each row is drawn a number of times. A figure is a function of these counts, so that all resamples are one matrix
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax, stdtrit, xlogy

from ldpfl.tasks.survival import brier_errors, count_comparable_pairs

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WeightedFigures:
    """Figures of a model on n rows, as a function of how often each row is drawn.

    Most figures follow from sums over the drawn rows. Each row adds its ``row_terms`` (n, S) to S sums, as often as it is drawn. So all
    sums of all resamples are one matrix product.

    Attributes:
        of_counts: function from the number of times that each row is drawn in each of B resamples, (B, n), to each figure (B,), by name.
            A figure is NaN where it has no value.
        shares: the figures that are a share of rows, by name: 1 for a row that is a hit, 0 for a miss, NaN for a row that is neither (n,).
    """

    of_counts: Callable[[Floats], dict[str, Floats]]
    shares: Mapping[str, Floats] = field(default_factory=dict)

    def __call__(self, counts: Floats) -> dict[str, Floats]:
        return self.of_counts(counts)


ACCURACY = "accuracy"
"""Share of samples whose class is predicted right. It is the main metric of classifiers of three or more classes."""

AUROC, PRECISION, BRIER = "AUROC", "average precision", "Brier score"
PREDICTED, OBSERVED, SLOPE = "mean predicted risk", "observed share", "calibration slope"
MEAN_PREDICTION, OBSERVED_MEAN = "mean prediction", "observed mean"
CONCORDANCE, INTEGRATED_BRIER = "concordance", "integrated Brier"
COMMONEST, MACRO_F1, EXACT_MATCH = "accuracy of the commonest class", "macro F1", "exact match"
DEVIANCE, KAPPA, CLASS_ERROR = "deviance explained", "quadratic kappa", "mean class error"
SENSITIVITY, SPECIFICITY, PPV = "sensitivity", "specificity", "positive predictive value"
AT_HALF, AT_BASE_RATE = "0.5", "the base rate"
"""Thresholds of a risk from which on a row counts as flagged. The base rate is the observed share of events among the rows."""

MEASURED_AT_CLIENTS = ", measured at clients"
"""End of the name of a figure that clients measured on records which they hold back from training."""

RESAMPLES = 500
_AT_ONCE = 1 << 22
"""Number of counts that are held at once: 32 MiB."""
_MOST_RANKED = 5
"""Largest number of classes or labels for which the AUROC has an interval: each of them is ranked on its own."""


def name_at_threshold(figure: str, threshold: str) -> str:
    """Return the name of ``figure`` (sensitivity, ...) at a ``threshold``."""
    return f"{figure} at {threshold}"


def two_class_figures(logits: Floats, events: NDArray[np.bool_], threshold: float | None = None) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of a two-class model.

    The model predicts risks whose log odds are ``logits`` (n,). ``events`` (n,) says which rows had the event. With a ``threshold``, the
    figures of rows flagged from this risk on are added to those at 0.5 and at the base rate.

    The calibration slope is that of the logistic regression of events on log odds. In a resample it is approximated by one Newton step from
    the slope of all rows, which is right to first order and spares a regression for each resample.
    """
    risks, observed = expit(logits), events.astype(np.float64)
    flagged = {AT_HALF: risks >= 0.5, AT_BASE_RATE: risks >= observed.mean()}
    if threshold is not None:
        flagged[f"{threshold:g}"] = risks >= threshold
    correct = (risks > 0.5) == events  # a tie counts as no event, as in the largest of two logits
    parts = [np.ones_like(observed), observed, risks, (risks - observed) ** 2, correct, observed * correct]
    for flags in flagged.values():
        parts += [flags * observed, flags]
    # The commonest class is that of all rows. The larger of the two shares in each resample would on average be too large.
    is_common = observed.mean() > 0.5
    shares = {OBSERVED: observed, ACCURACY: correct.astype(np.float64), COMMONEST: observed if is_common else 1 - observed}
    for name, flags in flagged.items():
        shares[name_at_threshold(SENSITIVITY, name)] = np.where(events, flags, np.nan)
        shares[name_at_threshold(SPECIFICITY, name)] = np.where(events, np.nan, ~flags)
        shares[name_at_threshold(PPV, name)] = np.where(flags, observed, np.nan)
    row_terms = np.stack(parts, axis=1).astype(np.float64)
    ranked = _ranking_figures(logits, observed)
    slope = _slope_figure(logits, observed)

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        # One sum for each of ``parts``, in the same order.
        drawn_rows, observed_events, risk, brier, right, found_events, *at_thresholds = (counts @ row_terms).T
        # Found events, plus rows without an event that were predicted wrongly: (drawn_rows - right) less the missed events.
        predicted_events = drawn_rows - right - observed_events + 2 * found_events
        auroc, precision = ranked(counts)
        other_rows, predicted_others = drawn_rows - observed_events, drawn_rows - predicted_events
        f1_of_events = 2 * found_events / (predicted_events + observed_events)
        f1_of_others = 2 * (right - found_events) / (predicted_others + other_rows)
        values = {
            AUROC: auroc,
            PRECISION: precision,
            BRIER: brier / drawn_rows,
            PREDICTED: risk / drawn_rows,
            OBSERVED: observed_events / drawn_rows,
            SLOPE: slope(counts),
            ACCURACY: right / drawn_rows,
            COMMONEST: (observed_events if is_common else other_rows) / drawn_rows,
            MACRO_F1: (np.nan_to_num(f1_of_events) + np.nan_to_num(f1_of_others)) / 2,
        }
        for place, name in enumerate(flagged):
            flagged_events, flagged_rows = at_thresholds[2 * place : 2 * place + 2]  # two sums for each threshold
            values[name_at_threshold(SENSITIVITY, name)] = flagged_events / observed_events
            values[name_at_threshold(SPECIFICITY, name)] = 1 - (flagged_rows - flagged_events) / other_rows
            values[name_at_threshold(PPV, name)] = flagged_events / flagged_rows
        return values

    return WeightedFigures(figures, shares)


def several_class_figures(logits: Floats, classes: NDArray[np.int64]) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of a classifier of K classes with ``logits`` (n, K), for the observed ``classes`` (n,).

    The Brier score adds up over the classes. The calibration slope is the factor on all logits that makes ``classes`` most likely. In a
    resample it is approximated by one Newton step from the factor of all rows.
    """
    identity = np.eye(logits.shape[1])
    chances, predicted, observed = softmax(logits, axis=1), identity[logits.argmax(axis=1)], identity[classes]
    row_terms = np.concatenate([predicted * observed, predicted, observed, ((chances - observed) ** 2).sum(axis=1, keepdims=True)], axis=1)
    auroc = _auroc_with_interval(chances, observed)
    slope = _factor_figure(logits, observed)
    commonest = observed.sum(axis=0).argmax()
    # Classes that no row has and that are predicted for none have no F1, and do not count in the mean.
    counted_classes = (predicted + observed).any(axis=0)

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        *by_class, brier = (counts @ row_terms).T
        right, predicted_counts, observed_counts = np.split(np.array(by_class), 3)  # (K, B) each
        drawn_rows = counts.sum(axis=1)
        f1 = 2 * right / (predicted_counts + observed_counts)
        values = {ACCURACY: right.sum(axis=0) / drawn_rows, COMMONEST: observed_counts[commonest] / drawn_rows}
        values[MACRO_F1] = _mean_over_classes(f1[counted_classes])
        return {**values, **auroc(counts), BRIER: brier / drawn_rows, SLOPE: slope(counts)}

    return WeightedFigures(figures, {ACCURACY: (predicted * observed).sum(axis=1), COMMONEST: observed[:, commonest]})


def label_figures(logits: Floats, labels: NDArray[np.bool_]) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of a model with ``logits`` (n, L), for L observed ``labels`` (n, L) of each row.

    Only labels that some rows have and others lack count.
    """
    observed, predicted = labels.astype(np.float64), (logits > 0).astype(np.float64)
    exact = (predicted == observed).all(axis=1, keepdims=True)
    row_terms = np.concatenate([predicted * observed, predicted, observed, exact], axis=1)
    auroc = _auroc_with_interval(logits, observed)
    counted_labels = columns_with_both_values(observed)

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        *by_label, right = (counts @ row_terms).T
        found_counts, predicted_counts, observed_counts = np.split(np.array(by_label), 3)  # (L, B) each
        drawn_rows = counts.sum(axis=1)
        # A resample in which all drawn rows have a label, or none has it, has no F1 of that label.
        has_f1 = (observed_counts > 0) & (observed_counts < drawn_rows)
        f1 = np.where(has_f1, np.nan_to_num(2 * found_counts / (predicted_counts + observed_counts)), np.nan)
        return {**auroc(counts), MACRO_F1: _mean_over_classes(f1[counted_labels]), EXACT_MATCH: right / drawn_rows}

    return WeightedFigures(figures, {EXACT_MATCH: exact[:, 0].astype(np.float64)})


def number_figures(predictions: Floats, targets: Floats) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of ``predictions`` (n,) against observed numbers ``targets`` (n,).

    R2 is NaN if all targets are equal, and NaN or infinite in a resample whose targets are equal.
    """
    error = predictions - targets
    # Less their mean, so that the squares around a resample's mean lose no digits in a difference of large sums.
    centered = targets - targets.mean()
    varies = bool(np.ptp(targets))
    row_terms = np.stack([np.ones_like(error), error**2, np.abs(error), centered, centered**2, predictions, targets], axis=1)

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        # One sum for each column of ``row_terms``.
        drawn_rows, squared_errors, absolute_errors, centered_sum, centered_squares, predicted, observed = (counts @ row_terms).T
        squares_around_mean = centered_squares - centered_sum**2 / drawn_rows if varies else np.full_like(drawn_rows, np.nan)
        return {
            "R2": 1 - squared_errors / squares_around_mean,
            "MAE": absolute_errors / drawn_rows,
            "RMSE": np.sqrt(squared_errors / drawn_rows),
            MEAN_PREDICTION: predicted / drawn_rows,
            OBSERVED_MEAN: observed / drawn_rows,
        }

    return WeightedFigures(figures)


def count_figures(expected: Floats, counts: Floats) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of predicted counts (``expected`` (n,), above 0) against observed ``counts`` (n,).

    The figures are the share of the Poisson deviance around the mean that is explained, the mean absolute error, and both means. The share
    is NaN if all counts are equal, and NaN or infinite in a resample whose counts are equal.
    """
    y_log_y = xlogy(counts, counts)  # for a count y
    half_deviances = y_log_y - xlogy(counts, expected) - counts + expected
    row_terms = np.stack([np.ones_like(counts), counts, y_log_y, half_deviances, np.abs(expected - counts), expected], axis=1)
    varies = float(np.ptp(counts)) > 0

    def figures(times_drawn: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name, for ``times_drawn`` (B, n): how often each row is drawn in each resample."""
        # One sum for each column of ``row_terms``.
        drawn_rows, count_sum, y_log_y_sum, half_deviance, error_sum, expected_sum = (times_drawn @ row_terms).T
        # Around the mean m, the half deviance is the sum of y log(y / m) over the drawn counts y, as y - m adds up to 0.
        half_deviance_around_mean = y_log_y_sum - xlogy(count_sum, count_sum / drawn_rows)
        return {
            DEVIANCE: 1 - half_deviance / half_deviance_around_mean if varies else np.full(len(times_drawn), np.nan),
            "MAE": error_sum / drawn_rows,
            MEAN_PREDICTION: expected_sum / drawn_rows,
            OBSERVED_MEAN: count_sum / drawn_rows,
        }

    return WeightedFigures(figures)


def ordered_class_figures(predicted: Floats, classes: NDArray[np.int64]) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of ``predicted`` ordered classes (n,) against observed ``classes`` (n,).

    Cohen's kappa with quadratic weights is 1 - s / s0. s is the mean squared distance of predicted and observed classes. s0 is that of
    independent draws from both.
    """
    observed = classes.astype(np.float64)
    distance = predicted - observed
    squares_of_both = predicted**2 + observed**2
    row_terms = np.stack(
        [np.ones_like(observed), distance**2, predicted, observed, squares_of_both, distance == 0, np.abs(distance)], axis=1
    )

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        # One sum for each column of ``row_terms``.
        drawn_rows, squared_distances, predicted_sum, observed_sum, squares_sum, right, error = (counts @ row_terms).T
        # Sums stand for the means s and s0: in their ratio, the number of rows cancels.
        squared_distances_if_independent = squares_sum - 2 * predicted_sum * observed_sum / drawn_rows
        kappa = 1 - squared_distances / squared_distances_if_independent
        return {KAPPA: kappa, ACCURACY: right / drawn_rows, CLASS_ERROR: error / drawn_rows}

    return WeightedFigures(figures, {ACCURACY: (distance == 0).astype(np.float64)})


def survival_figures(survival: Floats, times_and_events: Floats, cuts: Floats, end: float) -> WeightedFigures:
    """Return the :class:`WeightedFigures` of predicted ``survival`` (n, K): the probability that a time lies beyond each of ``cuts`` (K,).

    ``times_and_events`` (n, 2) are the observed times, and 1 for an event, else 0. ``end`` is that of the integrated Brier score.
    Harrell's C is a ratio of sums over pairs. In a resample, a pair of rows drawn a and b times counts as a + b - 1 instead of a b, which
    is right to first order. In the integrated Brier score, the weights for censoring are those of all rows, and not estimated anew for
    each resample.
    """
    times, events = times_and_events[:, 0], times_and_events[:, 1] > 0
    pairs, right = count_comparable_pairs(times, events, survival.sum(axis=1))
    row_terms = np.stack([np.ones_like(times), pairs, right, brier_errors(times, events, survival, cuts, end)], axis=1)
    all_pairs, all_right = pairs.sum() / 2, right.sum() / 2  # each pair is counted at both of its rows

    def figures(counts: Floats) -> dict[str, Floats]:
        """Return each figure (B,) by name. ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples."""
        # One sum for each column of ``row_terms``.
        drawn_rows, drawn_pairs, drawn_right, errors = (counts @ row_terms).T
        # A pair's rows both count it, so ``drawn_pairs`` is the sum of a + b over all pairs. Less their number, it is that of a + b - 1.
        return {CONCORDANCE: (drawn_right - all_right) / (drawn_pairs - all_pairs), INTEGRATED_BRIER: errors / drawn_rows}

    return WeightedFigures(figures)


def figures_of_all_rows(figures: WeightedFigures, rows: int) -> dict[str, float]:
    """Return each figure over all rows, each counted once. ``rows`` is their number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: float(value[0]) for name, value in figures(np.ones((1, rows))).items()}


def confidence_intervals(
    figures: WeightedFigures, rows: int, seed: int, resamples: int = RESAMPLES, person_of_row: NDArray[np.int64] | None = None
) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each figure, by name: Wilson's for shares of rows, a bootstrap's for other figures.

    A bootstrap's interval of a share would be a single point if all rows, or none, were hits. Resamples in which a figure has no value
    are left out, and a figure that has no value in any of them has no interval.

    Each resample draws as many of the ``rows`` rows as there are, with replacement. If ``person_of_row`` (rows,) numbers the person of each
    row from 0, persons are drawn instead, each with all its rows, because the rows of one person resemble each other.
    """
    values_by_name: dict[str, list[Floats]] = {}  # an array for each batch of resamples
    for counts in _resampled_counts(rows, seed, resamples, person_of_row):
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, values in figures(counts).items():
                values_by_name.setdefault(name, []).append(values)
    intervals = {}
    for name, batches in values_by_name.items():
        if name in figures.shares:
            hits = figures.shares[name]
            is_hit_or_miss = np.isfinite(hits)
            if is_hit_or_miss.any():
                persons = None if person_of_row is None else person_of_row[is_hit_or_miss]
                intervals[name] = share_interval(hits[is_hit_or_miss], persons)
        else:
            values = np.concatenate(batches)
            known = values[np.isfinite(values)]
            if known.size:
                low, high = np.quantile(known, (0.025, 0.975))
                intervals[name] = (float(low), float(high))
    return intervals


def _resampled_counts(rows: int, seed: int, resamples: int, person_of_row: NDArray[np.int64] | None) -> Iterator[Floats]:
    """Yield the counts (b, rows) of batches of bootstrap resamples: how often each row is drawn, see :func:`confidence_intervals`."""
    generator = np.random.default_rng(seed)
    units = rows if person_of_row is None else int(person_of_row.max()) + 1  # number of rows or persons to draw
    at_once = max(1, _AT_ONCE // rows)
    for first in range(0, resamples, at_once):
        batch = min(at_once, resamples - first)
        # An offset for each resample lets one call of bincount count the draws of all resamples.
        drawn = generator.integers(units, size=(batch, units)) + units * np.arange(batch)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=batch * units).reshape(batch, units).astype(np.float64)
        yield counts if person_of_row is None else counts[:, person_of_row]  # each row as often as its person


def calibration_groups(
    predicted: Floats, observed: Floats, *, shares: bool, bins: int = 10, person_of_row: NDArray[np.int64] | None = None
) -> list[dict[str, float]]:
    """Sort the rows by ``predicted`` (n,), cut them into ``bins`` groups, and return each group's mean prediction and observation.

    Each group also has its number of ``rows`` and an interval from ``low`` to ``high``. If the observations ``observed`` (n,) are events
    (``shares``), it is the 95 % interval (Wilson's) of their share. If they are numbers, it holds the middle 80 % of them. If
    ``person_of_row`` (n,) numbers each row's person, see :func:`share_interval`.
    """
    groups = []
    for group in np.array_split(np.argsort(predicted, kind="stable"), min(bins, len(predicted))):
        if shares:
            low, high = share_interval(observed[group], None if person_of_row is None else person_of_row[group])
        else:
            low, high = (float(end) for end in np.quantile(observed[group], (0.1, 0.9)))
        means = {"predicted": float(predicted[group].mean()), "observed": float(observed[group].mean())}
        groups.append({**means, "low": low, "high": high, "rows": group.size})
    return groups


def share_interval(hits: NDArray[Any], person_of_row: NDArray[np.int64] | None = None) -> tuple[float, float]:
    """Return the 95 % interval (Wilson's) of the share of ones among ``hits`` (n,), which are 0 or 1.

    If ``person_of_row`` (n,) numbers each row's person, n is divided by the design effect: the variance of the share over persons, as a
    multiple of its variance over independent rows. Too few persons, hits or misses cannot show this effect. Then it is that of persons
    whose rows are all equal.
    """
    share, effective_rows = float(hits.mean()), float(hits.size)
    quantile = 1.959964  # of the normal distribution, 0.975
    if person_of_row is not None:
        rows_of_person = np.bincount(person_of_row)
        persons = np.count_nonzero(rows_of_person)
        alike_effect = (rows_of_person**2).sum() / hits.size  # if the rows of each person are equal, so that m rows deviate m times as far
        if min(hits.sum(), (1 - hits).sum()) < _MIN_HITS or persons < _MIN_PERSONS:
            effective_rows /= alike_effect
        else:
            # A person with a large part of the rows moves the share towards its own rows, and so deviates too little.
            deviations = np.bincount(person_of_row, hits - share) / (1 - rows_of_person / hits.size)
            effective_rows /= max(1.0, (deviations**2).sum() / ((hits - share) ** 2).sum())
            # The variance is estimated from persons, of whom few count if they have most of the rows (Kish's effective number).
            quantile = float(stdtrit(max(1.0, hits.size / alike_effect - 1), 0.975))
    # Wilson's score interval for a share of n independent rows, both ends multiplied by 1 + z^2 / n.
    z_squared = quantile**2
    middle = share + z_squared / (2 * effective_rows)
    half = sqrt(z_squared * (share * (1 - share) / effective_rows + z_squared / (4 * effective_rows**2)))
    scale = 1 + z_squared / effective_rows
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


_MIN_HITS = _MIN_PERSONS = 10
"""Minimum number of rows that are hits, of misses, and of persons, from which the design effect of a share is measured."""


def _ranking_figures(scores: Floats, events_by_row: Floats) -> Callable[[Floats], tuple[Floats, Floats]]:
    """Return a function from row counts (B, n) to the AUROC (B,), where equal scores count half, and the average precision (B,)."""
    # Rows are sorted from the highest score down. Rows with equal scores form a group, which begins at one of ``starts``.
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.inf) != 0)
    ordered_events = events_by_row[order]

    def figures(counts: Floats) -> tuple[Floats, Floats]:
        """Return the AUROC (B,) and the average precision (B,) for row counts (B, n)."""
        ordered_counts = counts[:, order]
        # Rows, events and other rows in each group, (B, groups).
        rows = np.add.reduceat(ordered_counts, starts, axis=1)
        hits = np.add.reduceat(ordered_counts * ordered_events, starts, axis=1)
        misses = rows - hits
        events, others = hits.sum(axis=1), misses.sum(axis=1)
        # Other rows with a lower score than each group, and half of those with an equal score.
        below = others[:, None] - misses.cumsum(axis=1) + misses / 2
        # Precision if all rows down to each group are flagged.
        precise = hits.cumsum(axis=1) / np.maximum(rows.cumsum(axis=1), 1)
        return (hits * below).sum(axis=1) / (events * others), (hits * precise).sum(axis=1) / events

    return figures


def _mean_auroc_figure(scores: Floats, has_class: Floats) -> Callable[[Floats], Floats]:
    """Return a function from row counts (B, n) to the mean AUROC (B,) over the classes that some rows have and others lack.

    ``scores`` (n, K) are ranked for each class, and ``has_class`` (n, K) is 1 for rows of the class, else 0. The mean is NaN if there is no
    such class. Row counts say how often each of n rows is drawn in each of B resamples.
    """
    kept = columns_with_both_values(has_class)
    rankings = [_ranking_figures(class_scores, events) for class_scores, events in zip(scores.T[kept], has_class.T[kept], strict=True)]

    def figure(counts: Floats) -> Floats:
        aurocs = np.empty((len(rankings), len(counts)))
        for place, ranking in enumerate(rankings):
            aurocs[place], _precision = ranking(counts)
        return _mean_over_classes(aurocs)

    return figure


def _auroc_with_interval(scores: Floats, has_class: Floats) -> Callable[[Floats], dict[str, Floats]]:
    """Return a function from row counts (B, n) to a dict of the mean AUROC (B,); it is empty for many classes, which take long to rank."""
    if scores.shape[1] > _MOST_RANKED:
        return lambda counts: {}
    figure = _mean_auroc_figure(scores, has_class)
    return lambda counts: {AUROC: figure(counts)}


def mean_auroc(scores: Floats, has_class: Floats) -> float:
    """Return the mean AUROC over all rows and the columns of ``scores`` (n, K), see :func:`_mean_auroc_figure`."""
    return float(_mean_auroc_figure(scores, has_class)(np.ones((1, len(scores))))[0])


def macro_f1(predicted: NDArray[Any], observed: NDArray[Any], counted: NDArray[np.bool_]) -> float:
    """Return the mean F1 of the classes in the mask ``counted`` (K,). ``predicted`` and ``observed`` (n, K) are 1 if a row has a class."""
    found = (predicted * observed)[:, counted].sum(axis=0)
    predicted_plus_observed = (predicted + observed)[:, counted].sum(axis=0)
    return float(_mean_over_classes(2 * found / predicted_plus_observed))


def columns_with_both_values(has_class: Floats) -> NDArray[np.bool_]:
    """Return a mask (K,) of the columns of ``has_class`` (n, K) that are positive in some rows and 0 in others."""
    return np.asarray((has_class > 0).any(axis=0) & (has_class == 0).any(axis=0))


def _mean_over_classes(values: Floats) -> Floats:
    """Return the mean (...) of ``values`` (K, ...) over the K classes; NaN for a resample where a class has no value, or without classes.

    If such a class were left out instead, the figure would be a mean over fewer classes in some resamples.
    """
    class_count = len(values) if len(values) else np.nan
    return np.asarray(values.sum(axis=0) / class_count)


def _slope_figure(logits: Floats, events: Floats) -> Callable[[Floats], Floats]:
    """Return a function from row counts (B, n) to the calibration slope (B,); to NaN if there is no slope, as for equal risks.

    Newton's method fits intercept and slope to all rows. Each resample then takes one further step from there.
    """
    design = np.stack([np.ones_like(logits), logits], axis=1)
    fitted = np.zeros(2)  # intercept and slope
    for _ in range(_MAX_STEPS):
        residual, curvature = _gradient_and_curvature(design, fitted, events)
        try:
            step = np.linalg.solve(curvature.sum(axis=0).reshape(2, 2), residual.sum(axis=0))
        except np.linalg.LinAlgError:
            break
        fitted = fitted + step
        # The last step is so small that the derivatives before it hold at ``fitted`` too.
        if np.abs(step).max() < _TOLERANCE:
            return lambda counts: _slope_after_step(counts, fitted, residual, curvature)
    return lambda counts: np.full(len(counts), np.nan)


def _factor_figure(logits: Floats, one_hot: Floats) -> Callable[[Floats], Floats]:
    """Return a function from row counts (B, n) to the factor (B,) on ``logits`` (n, K) that makes the classes ``one_hot`` most likely.

    Its result is NaN if there is no such factor. Newton's method fits the factor to all rows. Each resample then takes one further step
    from there.
    """
    factor = 0.0
    observed_logits = (logits * one_hot).sum(axis=1)
    for _ in range(_MAX_STEPS):
        chances = softmax(factor * logits, axis=1)
        # Each row's contribution to the gradient of the log-likelihood, and to its curvature: the variance of a row's logits.
        mean = (chances * logits).sum(axis=1)
        gradient = observed_logits - mean
        curvature = (chances * logits**2).sum(axis=1) - mean**2
        with np.errstate(divide="ignore", invalid="ignore"):
            step = gradient.sum() / curvature.sum()
        if not np.isfinite(step):
            break
        factor += step
        if abs(step) < _TOLERANCE * max(1.0, abs(factor)):
            return lambda counts: factor + (counts @ gradient) / (counts @ curvature)
    return lambda counts: np.full(len(counts), np.nan)


_MAX_STEPS, _TOLERANCE = 50, 1e-9
"""Maximum number of steps of Newton's method, and the relative step below which it stops. If it does not stop, the slope is NaN."""


def _gradient_and_curvature(design: Floats, fitted: Floats, events: Floats) -> tuple[Floats, Floats]:
    """Return each row's contribution to the gradient (n, 2) and the curvature (n, 4) of the logistic regression's log-likelihood.

    The curvature is a 2 x 2 matrix, written row by row. ``design`` (n, 2) has the columns 1 and log odds. ``fitted`` (2,) are the intercept
    and the slope.
    """
    chance = expit(design @ fitted)
    squares = (design[:, :, None] * design[:, None, :]).reshape(-1, 4)
    return design * (events - chance)[:, None], squares * (chance * (1 - chance))[:, None]


def _slope_after_step(counts: Floats, fitted: Floats, residual: Floats, curvature: Floats) -> Floats:
    """Return the slope (B,) of a logistic regression for each bootstrap resample, after one step of Newton's method.

    ``counts`` (B, n) says how often each of n rows is drawn in each of B resamples. The step begins at ``fitted`` (2,), the intercept and
    slope of all rows. There, ``residual`` (n, 2) and ``curvature`` (n, 4) are the rows' contributions to the derivatives.
    """
    # Second entry of the solution of two linear equations, by Cramer's rule.
    g0, g1 = (counts @ residual).T
    h00, h01, _, h11 = (counts @ curvature).T  # symmetric, so the third entry equals the second
    slope: Floats = fitted[1] + (h00 * g1 - h01 * g0) / (h00 * h11 - h01**2)
    return slope
