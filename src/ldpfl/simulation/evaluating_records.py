"""Evaluate the model on records that clients hold back from training, and release the result as a noisy sum.

Each held-back record contributes one vector. It holds the record's loss, and for a classification also whether the prediction is right,
the gap between score and observation, a one-hot cell of the confusion matrix, and a one-hot bin of a histogram of scores. Two
records' vectors differ in each of the first three entries by at most its weight, and in each one-hot part by at most sqrt(2) times its
weight. The squares of these differences add up to at most the square of :data:`APART`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division
from ldpfl.data.settings import DataConfig
from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.dp_sgd import require_dp_sgd
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy import Release
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import without_claim
from ldpfl.simulation.local_training import LocalTask, evaluated
from ldpfl.simulation.record_sums import APART, NoisySum, client_sums, ranges_of, released_sum
from ldpfl.simulation.score_bins import BINS, EQUAL_STEPS, ScoreBins, bins_for_table
from ldpfl.tasks import ACCURACY, Targets, absent_targets, unusable
from ldpfl.tasks.weighted_metrics import AUROC
from ldpfl.util.randomness import Purpose


class Weights(NamedTuple):
    """Scale of each part of a record's vector: the length of a number's range, and the entry of a one-hot part."""

    loss: float
    right: float = 0.0
    gap: float = 0.0
    cell: float = 0.0
    bin: float = 0.0


NUMBERS = 3
"""Number of entries before the one-hot parts: loss, right, gap."""

MOST_CLASSES = 32
"""Maximum number of classes for a confusion matrix. With more classes, most of its cells would be noise."""

_LOSS_SHARE, _RIGHT_SHARE, _GAP_SHARE, _CELL_SHARE, _BIN_SHARE = 0.12, 0.34, 0.1, 0.22, 0.22
"""Share of each part in the squared distance of two records' vectors. A larger share gives the part's figures less noise."""


@dataclass(frozen=True)
class RecordScores:
    """The vector that a held-back record contributes, as described at the top of this file.

    Attributes:
        kind: kind of the targets.
        outputs: number of outputs of the model. For classes it is the number of classes.
        loss_bound: clipping bound of the loss.
        one_by_one: whether each record has copies of model and loss to itself, so that no record can change the vector of another. Only
            built-in models and tasks need not.
        bins: bins of the scores.
        table: settings of the table, by which :meth:`fitted_to` chooses the bins of a logistic regression; None for other models and data.
    """

    kind: Targets
    outputs: int
    loss_bound: float
    one_by_one: bool = True
    bins: ScoreBins = EQUAL_STEPS
    table: DataConfig | None = None

    def fitted_to(self, weights: Tensor) -> Self:
        """Return a copy whose bins of scores suit the model with ``weights`` (d,). Without a table, bins stay as they are.

        Server and clients both call this. What it returns depends on no data, and has the same length of vectors.
        """
        return self if self.table is None else replace(self, bins=bins_for_table(self.table, weights))

    @property
    def of_classes(self) -> bool:
        """Whether targets are classes, so that a vector has more than a loss."""
        return self.kind == "class"

    @property
    def has_cells(self) -> bool:
        """Whether there is a confusion matrix."""
        return self.of_classes and self.outputs <= MOST_CLASSES

    @property
    def size(self) -> int:
        """Number of entries of a record's vector."""
        return NUMBERS + self.cells + 2 * BINS if self.of_classes else 1

    @property
    def ranges(self) -> LayerRanges:
        """Public ranges of the vector that a client sends."""
        return ranges_of(self.size)

    @property
    def cells(self) -> int:
        """Number of cells of the confusion matrix, which has a row for each class."""
        return self.outputs**2 if self.has_cells else 0

    @cached_property
    def weights(self) -> Weights:
        """Scale of each part of a record's vector."""
        if not self.of_classes:
            return Weights(loss=APART)
        cell_share = _CELL_SHARE if self.has_cells else 0.0
        shares = np.array([_LOSS_SHARE, _RIGHT_SHARE, _GAP_SHARE, cell_share, _BIN_SHARE])
        # Shares of the squared distance of two records' vectors. Two one-hot parts differ by sqrt(2) times the entry.
        shares = shares / shares.sum() / [1, 1, 1, 2, 2]
        return Weights(*(APART * np.sqrt(shares)).tolist())

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        """Return the vectors (R, size) of the task's records at ``rows`` (R,); with ``one_by_one`` each by a copy of the model."""
        vectors = [torch.zeros(0, self.size, dtype=torch.float64)]  # so that there is something to join if ``rows`` is empty
        rows_at_once = 1 if self.one_by_one else max(1, len(rows))
        for start in range(0, len(rows), rows_at_once):
            batch = task.data.take(rows[start : start + rows_at_once])
            with task.isolated() if self.one_by_one else nullcontext(task) as own:
                vectors += [self.vectors(own, outputs.cpu(), targets.cpu()) for outputs, targets in evaluated(own, weights, batch)]
        return torch.cat(vectors)

    def vectors(self, task: LocalTask, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the vectors (R, size) of records from the model's ``outputs`` (R, ...). NaN or infinite outputs count as wrong.

        A record without a target has zeros. One with unusable outputs has the largest loss. For classes it also has a wrong prediction, and
        zeros in all later entries.
        """
        has_target, is_usable = ~absent_targets(targets), ~unusable(outputs, self.kind)
        losses = task.losses(outputs, targets).double().nan_to_num(nan=self.loss_bound, posinf=self.loss_bound)
        vectors = torch.zeros(len(targets), self.size, dtype=torch.float64)
        # A number in [0, 1] enters less 0.5, which makes the longest vectors shorter and changes no distance between two of them.
        vectors[:, 0] = self.weights.loss * ((losses / self.loss_bound).clamp(0, 1).where(is_usable, 1.0) - 0.5)
        if self.of_classes:
            self._write_class_entries(vectors, outputs, targets, is_usable)
        return vectors.where(has_target[:, None], 0.0)

    def _write_class_entries(self, vectors: Tensor, outputs: Tensor, targets: Tensor, is_usable: Tensor) -> None:
        """Write all entries of ``vectors`` (R, size) but the loss: right, gap, the cell of the confusion matrix, the bin of the score.

        The score is the probability of the second of two classes, or of the predicted class of several. It is observed if the target is
        that class. ``is_usable`` (R,) is False for records with unusable outputs.
        """
        weights, rows = self.weights, torch.arange(len(targets))
        actual, predicted = targets.clamp(0, self.outputs - 1), outputs.argmax(dim=1)  # an absent target gets any class: it is zeroed later
        is_right = (predicted == actual) & is_usable
        vectors[:, 1] = weights.right * (is_right.double() - 0.5)
        probabilities = outputs.double().softmax(dim=1).nan_to_num()
        score, observed = (probabilities[:, 1], actual == 1) if self.outputs == 2 else (probabilities.amax(dim=1), is_right)
        vectors[:, 2] = weights.gap * (score - observed.double()) / 2
        if self.has_cells:
            vectors[rows, NUMBERS + actual * self.outputs + predicted] = weights.cell
        bins = torch.from_numpy(self.bins.places(score.numpy()))
        vectors[rows, NUMBERS + self.cells + observed.long() * BINS + bins] = weights.bin
        vectors[:, 2:] = vectors[:, 2:].where(is_usable[:, None], 0.0)


@dataclass(frozen=True, eq=False)
class ClientEvaluation:
    """The evaluation at clients: its records, its noise, and its rounds.

    Attributes:
        units: held-back records, or persons, of each client.
        vectors: rule for the vector that each record or person contributes.
        mechanism: mechanism with the noise of one evaluation.
        rounds, every: number of rounds of the run, and number of rounds between evaluations; 0 evaluates only at the end.
        persons: which rows belong to which person, if persons are protected.
    """

    units: Division
    vectors: RecordScores
    mechanism: Mechanism
    rounds: int
    every: int = 0
    persons: Persons | None = None

    def is_due(self, number: int) -> bool:
        """Return whether the model is evaluated after round ``number``."""
        return is_due(number, self.rounds, self.every)

    def before(self, number: int) -> int:
        """Return how many evaluations take place before round ``number``."""
        return sum(self.is_due(earlier) for earlier in range(1, number))

    @property
    def release(self) -> Release:
        """Release of one evaluation, for the ledger."""
        return without_claim(released(self.mechanism, self.vectors.ranges))

    def measured(self, task: LocalTask, weights: Tensor, seed: int, number: int) -> dict[str, Any]:
        """Evaluate the model after round ``number``, and return the noisy sum of vectors as ``RoundMetrics.at_clients`` stores it."""
        mechanism, vectors = require_dp_sgd(self.mechanism), self.vectors.fitted_to(weights)

        def sums_of(batch: range) -> Tensor:
            return client_sums(vectors, task, weights, self.units[batch.start : batch.stop], mechanism.steps, self.persons)

        context = b"evaluation" + weights.numpy().tobytes()
        clients, size = len(self.units), self.vectors.size
        total = released_sum(sums_of, clients, size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=number, context=context)
        return as_measured(vectors, total.in_units(mechanism.steps), int(self.units.sizes.sum()))


def as_measured(vectors: RecordScores, total: NoisySum, records: int, *, stated: bool = False) -> dict[str, Any]:
    """Return the noisy ``total`` of ``records`` records' vectors in the form in which ``RoundMetrics.at_clients`` stores it.

    Args:
        vectors: layout of the vectors, with the bins that the clients used.
        stated: whether the number of records is an assumption in the terms of the round, because nodes do not send their own numbers.
    """
    edges = list(vectors.bins.edges) if vectors.of_classes else []
    return {"sums": total.points.tolist(), "noise": total.noise, "records": records, "stated": stated, "edges": edges}


def is_due(number: int, rounds: int, every: int) -> bool:
    """Return whether a run of ``rounds`` rounds evaluates after round ``number``: after every ``every`` rounds, and after the last."""
    return number == rounds or (every > 0 and number % every == 0)


@dataclass(frozen=True)
class Figure:
    """An estimate of a metric from an evaluation at clients.

    Attributes:
        value: the estimate. It is unbiased, except for the binning of scores.
        noise, sampling: standard deviation of the estimate due to noise, and due to the finite number of records.
        binning: bound on the error due to binning of scores.
        least, most: bounds of the metric. Noise may move the value beyond them, but not the ends of the interval.
    """

    value: float
    noise: float
    sampling: float
    binning: float = 0.0
    least: float = 0.0
    most: float = 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval from the deviations by noise and by sample, as if normal, widened for binning, within the metric's bounds.

        Around an estimate beyond the bounds it would hold no possible value, or hardly any. So it is put around the nearest possible value,
        and holds all possible values that it would hold otherwise.
        """
        half_width = 1.96 * sqrt(self.noise**2 + self.sampling**2) + self.binning
        middle = min(max(self.value, self.least), self.most)
        low, high = max(middle - half_width, self.least), min(middle + half_width, self.most)
        return low, high


RIGHT, LOSS, RANKED, GAP = ACCURACY, "mean loss", AUROC, "mean predicted less observed"
"""Names of the figures. RANKED is the AUROC. "Predicted" is the score: see :meth:`RecordScores.vectors`."""


@dataclass(frozen=True, eq=False)
class ClientFigures:
    """The metrics that follow from a released sum of vectors.

    Attributes:
        scores: layout of the vectors, with the bins that the clients used.
        total: the noisy sum.
        records: number of records, or persons, in the sum.
    """

    scores: RecordScores
    total: NoisySum
    records: int

    @classmethod
    def of(cls, scores: RecordScores, measured: dict[str, Any]) -> ClientFigures:
        """Return the figures for a result of :meth:`ClientEvaluation.measured`."""
        used = replace(scores, bins=ScoreBins(tuple(measured["edges"]))) if scores.of_classes else scores
        return cls(used, NoisySum(np.array(measured["sums"]), float(measured["noise"])), int(measured["records"]))

    def all(self) -> dict[str, Figure]:
        """Return each metric by its name. A metric that is lost in the noise is left out."""
        weights, bound, count, noise = self.scores.weights, self.scores.loss_bound, self.records, self.total.noise
        # A record adds weight * (value - 0.5) to a sum, see :meth:`RecordScores.vectors`.
        loss = 0.5 + float(self.total.points[0]) / (weights.loss * count)
        # The variance of the records' losses is not measured. Values in [0, 1] with mean m have a variance of at most m (1 - m).
        loss_noise, loss_sampling = noise / (weights.loss * count), _deviation(loss, count)
        figures = {LOSS: Figure(bound * loss, bound * loss_noise, bound * loss_sampling, most=bound)}
        if self.scores.of_classes:
            right = 0.5 + float(self.total.points[1]) / (weights.right * count)
            figures[RIGHT] = Figure(right, noise / (weights.right * count), _deviation(right, count))
            if weights.gap:  # 0 if clients send bits, which leave the gap out
                gap = 2 * float(self.total.points[2]) / (weights.gap * count)
                figures[GAP] = Figure(gap, 2 * noise / (weights.gap * count), self._deviation_of_gap(gap), least=-1.0)
            figures |= self._shown_auroc()
        return figures

    def counted(self) -> Figure | None:
        """Return the noisy number of records with a target, from the bins of scores; None if the sum has no bins."""
        if not self.scores.of_classes:
            return None
        bins, noise = self._bins()
        return Figure(float(bins.sum()), noise=noise * sqrt(bins.size), sampling=0.0, most=inf)

    def confusion(self) -> tuple[NDArray[np.float64], float] | None:
        """Return the confusion matrix (true class, predicted class) in records, and the noise of a cell; None if it was not measured."""
        if not self.scores.has_cells:
            return None
        weight, size = self.scores.weights.cell, self.scores.outputs
        return self.total.points[NUMBERS : NUMBERS + size**2].reshape(size, size) / weight, self.total.noise / weight

    def calibration(self) -> list[dict[str, float]]:
        """Return the predicted and the observed share, with a 95 % interval, of each bin of scores that stands out from the noise."""
        if not self.scores.of_classes:
            return []
        (negatives, positives), noise = self._bins()
        rows = []
        for score, negative, positive in zip(self.scores.bins.middles, negatives, positives, strict=True):
            count = negative + positive
            if count > _CLEAR_DEVIATIONS * noise * sqrt(2):  # the noise of a sum of two counts
                low, high = _share_interval(positive, count, noise)
                observed = min(max(positive / count, 0.0), 1.0)
                rows.append({"predicted": float(score), "observed": observed, "low": low, "high": high, "rows": round(count)})
        return rows

    def _bins(self) -> tuple[NDArray[np.float64], float]:
        """Return the number of records in each bin of scores, not observed and observed ones (2, BINS), and the noise of each number."""
        weight = self.scores.weights.bin  # a record adds this to its bin
        return self.total.points[NUMBERS + self.scores.cells :].reshape(2, BINS) / weight, self.total.noise / weight

    def _deviation_of_gap(self, gap: float) -> float:
        """Return the standard deviation of the gap due to the finite number of records, estimated from the bins of scores."""
        (bins, _), middles = self._bins(), self.scores.bins.middles
        squared_gaps = np.stack([middles, middles - 1]) ** 2  # of a record that is not observed, and of one that is
        squares = float((squared_gaps * np.maximum(bins, 0.0)).sum()) / self.records
        variance = max(squares - gap**2, 1 / self.records)  # noise may make the difference too small, or negative
        return sqrt(variance / self.records)

    def too_many_ties(self) -> float | None:
        """Return the bound on the AUROC's error due to binning, if it is so large that the AUROC is not shown; else None."""
        figure = self._auroc_if_clear()
        return figure.binning if figure is not None and figure.binning > MAX_BINNING else None

    def has_a_rare_class(self) -> bool:
        """Return whether the AUROC is not shown because one of two classes did not stand out from the noise."""
        return self.scores.outputs == 2 and self.scores.of_classes and self._auroc_if_clear() is None

    def _shown_auroc(self) -> dict[str, Figure]:
        """Return the AUROC by its name; an empty dict if noise hides a class, or if the error due to binning may be too large."""
        figure = self._auroc_if_clear()
        return {} if figure is None or figure.binning > MAX_BINNING else {RANKED: figure}

    def _auroc_if_clear(self) -> Figure | None:
        """Return the AUROC if there are two classes and both stand out from the noise, else None."""
        if self.scores.outputs != 2 or not self.scores.of_classes:
            return None
        (negatives, positives), noise = self._bins()
        if min(negatives.sum(), positives.sum()) <= _CLEAR_DEVIATIONS * noise * sqrt(BINS):  # the noise of a sum over all bins
            return None
        return _auroc_figure(negatives, positives, noise=_SELECTION_FACTOR * noise)  # wider, since only clear counts come here


MAX_BINNING = 0.1
"""Largest bound on the error due to binning with which an AUROC is shown."""
_CLEAR_DEVIATIONS = 5.0
"""A noisy number of records is used as a divisor only if it exceeds this many standard deviations of its noise.

It is so large because a number that is chosen for being large is mostly too large.
"""
_SELECTION_FACTOR = 1.33
"""Factor on the noise in intervals of figures that are shown only if a noisy number is large. Without it, they would hold too seldom."""


def _share_interval(part: float, count: float, noise: float) -> tuple[float, float]:
    """Return a 95 % interval of the share ``part`` / ``count``. ``part`` and ``count - part`` each have noise of deviation ``noise``.

    If p is the true share, then part - p count has the mean 0. The interval has each p for which it lies within 1.96 standard deviations.
    Both the noise (Fieller) and the finite number of records (Wilson) contribute to these. So the ends solve the quadratic equation
    (part - p count)^2 = N ((1 - p)^2 + p^2) + R p (1 - p). N is 1.96^2 times the variance of the noise, widened by _SELECTION_FACTOR, and R
    is 1.96^2 count.
    """
    part = min(max(part, 0.0), count)  # else noise may have moved it so far that no share lies within 1.96 deviations
    n, r = (1.96 * _SELECTION_FACTOR * noise) ** 2, 1.96**2 * count
    # The coefficients of p^2 and of -p, and the constant.
    square, linear, constant = count**2 + r - 2 * n, 2 * part * count + r - 2 * n, part**2 - n
    root = sqrt(max(linear**2 - 4 * square * constant, 0.0))
    low, high = (min(max((linear + sign * root) / (2 * square), 0.0), 1.0) for sign in (-1, 1))
    return low, high


def _deviation(share: float, count: int) -> float:
    """Return the standard deviation of a ``share`` of ``count`` records by Agresti and Coull, who add two successes and two failures.

    Without them, the deviation would be too small near 0 and 1. Dividing by ``count`` instead of ``count`` + 4 errs on the large side.
    """
    adjusted_share = (min(max(share, 0.0), 1.0) * count + 2) / (count + 4)
    return sqrt(adjusted_share * (1 - adjusted_share) / count)


def _auroc_figure(negatives: NDArray[np.float64], positives: NDArray[np.float64], noise: float) -> Figure:
    """Return the AUROC from the counts in bins of scores, ``negatives`` for the first class and ``positives`` for the second.

    It is the probability that a record of the second class has the higher score; ties count half. ``noise`` is the standard deviation of
    the noise in each count. The deviations by this noise and by sampling are to first order (delta method). Scaling all counts of a class
    does not change the AUROC.
    """
    below = np.cumsum(negatives) - negatives / 2
    above = positives.sum() - np.cumsum(positives) + positives / 2
    value = float((positives * below).sum() / (positives.sum() * negatives.sum()))
    # The derivative of the AUROC by each count.
    slopes = np.stack([(above / positives.sum() - value) / negatives.sum(), (below / negatives.sum() - value) / positives.sum()])
    # By sampling, the variance of a count is about the count itself (Poisson). A count with noise may be negative.
    variance = (np.maximum([negatives, positives], 0.0) * slopes**2).sum()
    # Ties count half. In truth between none and all tied pairs are in order, so the error is at most half their share.
    ties = max(float(negatives @ positives), 0.0) / float(negatives.sum() * positives.sum())
    return Figure(value, noise * float(np.sqrt((slopes**2).sum())), float(np.sqrt(variance)), ties / 2)
