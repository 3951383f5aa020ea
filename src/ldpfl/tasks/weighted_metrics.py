"""Figures by which a model is judged on rows that it was not trained on, each for many weightings of these rows at once.

A bootstrap resample counts each row so many times. A figure is a function of these counts, so that all resamples are one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax, xlogy

from ldpfl.tasks import ACCURACY
from ldpfl.tasks.survival import brier_errors, compared

Floats = NDArray[np.float64]
Counted = Callable[[Floats], dict[str, Floats]]
"""From how often each row counts (B, n) to each figure (B,), by name; NaN where a figure has no value."""

AUROC, PRECISION, BRIER = "AUROC", "average precision", "Brier score"
PREDICTED, OBSERVED, SLOPE = "mean predicted risk", "observed share", "calibration slope"
CONCORDANCE, INTEGRATED_BRIER = "concordance", "integrated Brier"
COMMONEST, MACRO_F1, EXACT_MATCH = "accuracy of the commonest class", "macro F1", "exact match"
DEVIANCE, KAPPA, CLASS_ERROR = "deviance explained", "quadratic kappa", "mean class error"
SENSITIVITY, SPECIFICITY, PPV = "sensitivity", "specificity", "positive predictive value"
AT_HALF, AT_BASE_RATE = "0.5", "the base rate"
"""Thresholds of a risk from which on a row counts as flagged. The base rate is the observed share of events among the rows."""

MEASURED_AT_CLIENTS = ", measured at clients"
"""How the name ends of a figure that clients measured on records which they hold back from training."""

RESAMPLES = 500
_AT_ONCE = 1 << 22
"""Counts that are held at once: 32 MiB."""
_MOST_RANKED = 5
"""Classes or labels up to which the AUROC has an interval: each of them is ranked on its own."""


def at(figure: str, threshold: str) -> str:
    """Return the name of ``figure`` (sensitivity, ...) at a ``threshold``."""
    return f"{figure} at {threshold}"


def of_two_classes(logits: Floats, events: NDArray[np.bool_], threshold: float | None = None) -> Counted:
    """Return the figures of risks whose log odds are ``logits`` (n,), for ``events`` (n,); also those at a ``threshold`` of one's own.

    The calibration slope is that of the logistic regression of events on log odds; in a resample it is one Newton step from that of all
    rows, which is what the resample's own slope is to first order.
    """
    risks, seen = expit(logits), events.astype(np.float64)
    flagged = {AT_HALF: risks >= 0.5, AT_BASE_RATE: risks >= seen.mean()}
    if threshold is not None:
        flagged[f"{threshold:g}"] = risks >= threshold
    correct = (risks > 0.5) == events
    parts = [np.ones_like(seen), seen, risks, (risks - seen) ** 2, correct, seen * correct]
    parts += [part for own in flagged.values() for part in (own * seen, own)]
    is_common = seen.mean() > 0.5  # of all rows: the larger share of a resample is larger than either on average
    sums_of, ranked, slope = np.stack(parts, axis=1).astype(np.float64), _ranked(logits, seen), _slope(logits, seen)

    def figures(counts: Floats) -> dict[str, Floats]:
        rows, hits, mean, brier, right, found, *at_thresholds = (counts @ sums_of).T
        told = rows - right - hits + 2 * found  # as events: those found, and the wrong ones among the others
        auroc, precision = ranked(counts)
        f1 = (2 * found / (told + hits), 2 * (right - found) / (2 * rows - told - hits))
        values = {
            AUROC: auroc,
            PRECISION: precision,
            BRIER: brier / rows,
            PREDICTED: mean / rows,
            OBSERVED: hits / rows,
            SLOPE: slope(counts),
            ACCURACY: right / rows,
            COMMONEST: (hits if is_common else rows - hits) / rows,
            MACRO_F1: sum(np.nan_to_num(own) for own in f1) / 2,
        }
        for place, name in enumerate(flagged):
            true, positive = at_thresholds[2 * place : 2 * place + 2]
            values[at(SENSITIVITY, name)] = true / hits
            values[at(SPECIFICITY, name)] = 1 - (positive - true) / (rows - hits)
            values[at(PPV, name)] = true / positive
        return values

    return figures


def of_several_classes(logits: Floats, classes: NDArray[np.int64]) -> Counted:
    """Return the figures of a classifier with ``logits`` (n, K) of ``classes`` (n,); the Brier score adds up over the classes.

    The calibration slope is the factor on all logits that makes ``classes`` most likely; in a resample it is one Newton step from that of
    all rows.
    """
    known = np.eye(logits.shape[1])
    chances, told, seen = softmax(logits, axis=1), known[logits.argmax(axis=1)], known[classes]
    sums_of = np.concatenate([told * seen, told, seen, ((chances - seen) ** 2).sum(axis=1, keepdims=True)], axis=1)
    auroc, commonest = _mean_auroc(chances, seen), seen.sum(axis=0).argmax()
    counted, slope = (told + seen).any(axis=0), _factor(logits, seen)

    def figures(counts: Floats) -> dict[str, Floats]:
        *by_class, brier = (counts @ sums_of).T
        right, said, there = np.split(np.array(by_class), 3)
        rows = counts.sum(axis=1)
        values = {ACCURACY: right.sum(axis=0) / rows, COMMONEST: there[commonest] / rows}
        values |= {MACRO_F1: _mean((2 * right / (said + there))[counted]), **auroc(counts)}
        return {**values, BRIER: brier / rows, SLOPE: slope(counts)}

    return figures


def of_labels(logits: Floats, labels: NDArray[np.bool_]) -> Counted:
    """Return the figures of a model with ``logits`` (n, L) of ``labels`` (n, L); a label counts where some rows have it and some do not."""
    seen, told = labels.astype(np.float64), (logits > 0).astype(np.float64)
    exact = (told == seen).all(axis=1, keepdims=True)
    sums_of = np.concatenate([told * seen, told, seen, exact], axis=1)
    auroc, counted = _mean_auroc(logits, seen), _with_both(seen)

    def figures(counts: Floats) -> dict[str, Floats]:
        *by_label, right = (counts @ sums_of).T
        found, said, there = np.split(np.array(by_label), 3)
        rows = counts.sum(axis=1)
        f1 = np.where((there > 0) & (there < rows), np.nan_to_num(2 * found / (said + there)), np.nan)
        return {**auroc(counts), MACRO_F1: _mean(f1[counted]), EXACT_MATCH: right / rows}

    return figures


def of_numbers(found: Floats, targets: Floats) -> Counted:
    """Return the figures of numbers ``found`` (n,) in the place of ``targets`` (n,), in their unit."""
    error, about = found - targets, targets - targets.mean()
    sums_of = np.stack([np.ones_like(error), error**2, np.abs(error), about, about**2], axis=1)

    def figures(counts: Floats) -> dict[str, Floats]:
        rows, squares, sizes, first, second = (counts @ sums_of).T
        return {"R2": 1 - squares / (second - first**2 / rows), "MAE": sizes / rows, "RMSE": np.sqrt(squares / rows)}

    return figures


def of_counts(expected: Floats, counts: Floats) -> Counted:
    """Return the figures of ``expected`` counts (n,) above 0 for observed ``counts`` (n,), in their unit: the share of the Poisson deviance
    around the mean that is explained, and the mean error."""
    own = xlogy(counts, counts)
    deviance = own - xlogy(counts, expected) - counts + expected
    sums_of = np.stack([np.ones_like(counts), counts, own, deviance, np.abs(expected - counts)], axis=1)
    varies = float(np.ptp(counts)) > 0

    def figures(drawn: Floats) -> dict[str, Floats]:
        rows, total, own, deviance, error = (drawn @ sums_of).T
        around_mean = own - xlogy(total, total / rows)
        explained = 1 - deviance / around_mean if varies else np.full(len(drawn), np.nan)
        return {DEVIANCE: explained, "MAE": error / rows}

    return figures


def of_ordered(told: Floats, classes: NDArray[np.int64]) -> Counted:
    """Return the figures of predicted ordered classes ``told`` (n,) for observed ``classes`` (n,).

    Cohen's kappa with quadratic weights is 1 less the mean squared distance over the one that independent draws of both would have.
    """
    seen = classes.astype(np.float64)
    apart = told - seen
    sums_of = np.stack([np.ones_like(seen), apart**2, told, seen, told**2 + seen**2, apart == 0, np.abs(apart)], axis=1)

    def figures(counts: Floats) -> dict[str, Floats]:
        rows, squares, found, seen, both, right, error = (counts @ sums_of).T
        return {KAPPA: 1 - squares / (both - 2 * found * seen / rows), ACCURACY: right / rows, CLASS_ERROR: error / rows}

    return figures


def of_times(lasting: Floats, seen: Floats, cuts: Floats) -> Counted:
    """Return the figures of predicted survival ``lasting`` (n, K) beyond each of ``cuts`` (K,), for times and events ``seen`` (n, 2).

    Harrell's C is a ratio of sums over pairs. In a resample each sum is taken by what each row adds to it, which is what it is to first
    order. The integrated Brier score of a resample has the weights of all rows.
    """
    times, events = seen[:, 0], seen[:, 1] > 0
    pairs, right = compared(times, events, lasting.sum(axis=1))
    sums_of = np.stack([np.ones_like(times), pairs, right, brier_errors(times, events, lasting, cuts)], axis=1)
    all_pairs, all_right = pairs.sum() / 2, right.sum() / 2

    def figures(counts: Floats) -> dict[str, Floats]:
        rows, own_pairs, own_right, errors = (counts @ sums_of).T
        return {CONCORDANCE: (own_right - all_right) / (own_pairs - all_pairs), INTEGRATED_BRIER: errors / rows}

    return figures


def point(figures: Counted, rows: int) -> dict[str, float]:
    """Return each figure of all ``rows``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: float(value[0]) for name, value in figures(np.ones((1, rows))).items()}


def intervals(
    figures: Counted, rows: int, seed: int, resamples: int = RESAMPLES, whose: NDArray[np.int64] | None = None
) -> dict[str, tuple[float, float]]:
    """Return the 95 % bootstrap interval of each figure, over ``rows`` drawn with replacement; resamples without a value are left out.

    With ``whose`` (rows,), a number from 0 for each row's person, persons are drawn, each with all its rows: those of one are alike.
    """
    generator, units = np.random.default_rng(seed), rows if whose is None else int(whose.max()) + 1
    found: dict[str, list[Floats]] = {}
    at_once = max(1, _AT_ONCE // rows)
    for first in range(0, resamples, at_once):
        some = min(at_once, resamples - first)
        drawn = generator.integers(units, size=(some, units)) + units * np.arange(some)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=some * units).reshape(some, units).astype(np.float64)
        counts = counts if whose is None else counts[:, whose]
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, values in figures(counts).items():
                found.setdefault(name, []).append(values)
    ends = {}
    for name, parts in found.items():
        values = np.concatenate(parts)
        known = values[np.isfinite(values)]
        if known.size:
            low, high = np.quantile(known, (0.025, 0.975))
            ends[name] = (float(low), float(high))
    return ends


def calibration(
    predicted: Floats, observed: Floats, *, shares: bool, bins: int = 10, whose: NDArray[np.int64] | None = None
) -> list[dict[str, float]]:
    """Return, for each tenth of the rows by what was ``predicted`` (n,), the mean of that and of what was ``observed`` (n,).

    The interval is a 95 % one of the mean (Wilson's) where observations are events, so ``shares``; of numbers it holds the middle 80 %.
    Where rows have persons, ``whose`` (n,), it is as wide as that of as many rows as there are persons: those of one person are alike.
    """
    found = []
    for own in np.array_split(np.argsort(predicted, kind="stable"), min(bins, len(predicted))):
        if shares:
            units = own.size if whose is None else np.unique(whose[own]).size
            low, high = share_interval(observed[own], units)
        else:
            low, high = (float(end) for end in np.quantile(observed[own], (0.1, 0.9)))
        means = {"predicted": float(predicted[own].mean()), "observed": float(observed[own].mean())}
        found.append({**means, "low": low, "high": high, "rows": own.size})
    return found


def share_interval(seen: NDArray[Any], units: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson's) of the share of events among ``seen`` (n,), as wide as that of so many rows as ``units``."""
    from scipy.stats import binomtest  # slow to import

    ends = binomtest(round(float(seen.mean()) * units), units).proportion_ci(method="wilson")
    return float(ends.low), float(ends.high)


def _ranked(scores: Floats, seen: Floats) -> Callable[[Floats], tuple[Floats, Floats]]:
    """Return what gives the AUROC, in which equal scores count half, and the average precision."""
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.inf) != 0)
    among = seen[order]

    def figures(counts: Floats) -> tuple[Floats, Floats]:
        own = counts[:, order]
        there, hits = np.add.reduceat(own, starts, axis=1), np.add.reduceat(own * among, starts, axis=1)
        misses = there - hits
        events, others = hits.sum(axis=1), misses.sum(axis=1)
        below = others[:, None] - misses.cumsum(axis=1) + misses / 2
        precise = hits.cumsum(axis=1) / np.maximum(there.cumsum(axis=1), 1)
        return (hits * below).sum(axis=1) / (events * others), (hits * precise).sum(axis=1) / events

    return figures


def _mean_auroc(scores: Floats, seen: Floats) -> Callable[[Floats], dict[str, Floats]]:
    """Return what gives the mean AUROC over columns; nothing of many columns, which would take long."""
    if scores.shape[1] > _MOST_RANKED:
        return lambda counts: {}
    both = _with_both(seen)
    columns = [_ranked(own, there) for own, there in zip(scores.T[both], seen.T[both], strict=True)]
    return lambda counts: {AUROC: _mean(np.array([column(counts)[0] for column in columns]).reshape(len(columns), len(counts)))}


def _with_both(seen: Floats) -> NDArray[np.bool_]:
    """Return which columns of ``seen`` (n, K) have rows with and without it."""
    return np.asarray((seen > 0).any(axis=0) & (seen == 0).any(axis=0))


def _mean(values: Floats) -> Floats:
    """Return the mean over the rows of ``values`` (K, B), those that count for all samples; NaN for a resample in which one has no value.

    The same figure would otherwise be that of fewer classes in some resamples.
    """
    return np.asarray(values.sum(axis=0) / (len(values) or np.nan))


def _slope(logits: Floats, seen: Floats) -> Callable[[Floats], Floats]:
    """Return what gives the calibration slope; NaN where there is none, as of equal risks or of events that they tell apart."""
    design, fitted = np.stack([np.ones_like(logits), logits], axis=1), np.zeros(2)
    for _ in range(_STEPS):
        residual, curvature = _terms(design, fitted, seen)
        try:
            step = np.linalg.solve(curvature.sum(axis=0).reshape(2, 2), residual.sum(axis=0))
        except np.linalg.LinAlgError:
            break
        fitted = fitted + step
        if np.abs(step).max() < _CLOSE:
            return lambda counts: _stepped(counts, fitted, residual, curvature)
    return lambda counts: np.full(len(counts), np.nan)


def _factor(logits: Floats, seen: Floats) -> Callable[[Floats], Floats]:
    """Return what gives the factor on ``logits`` (n, K) by which the classes ``seen`` (n, K) are most likely; NaN where there is none."""
    told, factor = (logits * seen).sum(axis=1), 0.0
    for _ in range(_STEPS):
        chances = softmax(factor * logits, axis=1)
        mean = (chances * logits).sum(axis=1)
        gradient, curvature = told - mean, (chances * logits**2).sum(axis=1) - mean**2
        with np.errstate(divide="ignore", invalid="ignore"):
            step = gradient.sum() / curvature.sum()
        if not np.isfinite(step):
            break
        factor += step
        if abs(step) < _CLOSE * max(1.0, abs(factor)):
            return lambda counts: factor + (counts @ gradient) / (counts @ curvature)
    return lambda counts: np.full(len(counts), np.nan)


_STEPS, _CLOSE = 50, 1e-9


def _terms(design: Floats, fitted: Floats, seen: Floats) -> tuple[Floats, Floats]:
    """Return each row's part of the gradient (n, 2), and of the curvature (n, 4), of the likelihood."""
    chance = expit(design @ fitted)
    squares = (design[:, :, None] * design[:, None, :]).reshape(-1, 4)
    return design * (seen - chance)[:, None], squares * (chance * (1 - chance))[:, None]


def _stepped(counts: Floats, fitted: Floats, residual: Floats, curvature: Floats) -> Floats:
    (g0, g1), (h00, h01, _, h11) = (counts @ residual).T, (counts @ curvature).T
    slope: Floats = fitted[1] + (h00 * g1 - h01 * g0) / (h00 * h11 - h01**2)
    return slope
