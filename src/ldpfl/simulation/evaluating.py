"""Measure the model on records that clients held back from training, and release what was measured as a sum with noise.

Each held-back record gives its loss, and in a classification whether it is told right, how much its score is above what is observed, a
cell of the confusion matrix, and a cell of a histogram of scores. All of it is one vector. Two records' vectors differ in each of the
first three entries by its weight at most, and in one-hot parts by sqrt(2) times theirs: the squares add up to no more than the square of
:data:`APART`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.division import Division
from ldpfl.data.persons import Persons
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.privacy import Release
from ldpfl.privacy.authors import released
from ldpfl.simulation.local_training import LocalTask, evaluated
from ldpfl.simulation.record_sums import APART, NoisySum, client_sums, ranges_of, released_sum
from ldpfl.tasks import ACCURACY, Targets, unusable, without_answer
from ldpfl.tasks.weighted_metrics import AUROC
from ldpfl.util.randomness import Purpose


class Weights(NamedTuple):
    """How far apart records may lie in a part of their vectors: the whole range of a number, and 1 against 0 of a one-hot part."""

    loss: float
    right: float = 0.0
    gap: float = 0.0
    cell: float = 0.0
    bin: float = 0.0


_NUMBERS = 3
"""Entries before the one-hot parts: loss, right, gap."""

MOST_CLASSES = 32
"""Classes up to which there is a confusion matrix: beyond, its cells are too many for the noise that each has."""

EDGES = np.concatenate([[0.0], 1 / (1 + np.exp(-np.linspace(-5, 5, 21))), [1.0]])
"""Ends of the bins of scores, which are probabilities: even steps of their log odds, so that small and large ones are told apart."""
BINS = len(EDGES) - 1

_LOSS, _RIGHT, _GAP, _CELL, _BIN = 0.12, 0.34, 0.1, 0.22, 0.22
"""Share of the squared distance of two records' vectors that each part takes: the larger, the less noise its figures have."""


@dataclass(frozen=True)
class RecordScores:
    """What a held-back record adds: see the module.

    Attributes:
        kind: of the targets.
        outputs: of the model; the number of classes, where targets are classes.
        loss_bound: largest loss that counts.
    """

    kind: Targets
    outputs: int
    loss_bound: float

    @property
    def of_classes(self) -> bool:
        """Whether there is more than a loss."""
        return self.kind == "class"

    @property
    def has_cells(self) -> bool:
        """Whether there is a confusion matrix."""
        return self.of_classes and self.outputs <= MOST_CLASSES

    @property
    def size(self) -> int:
        return 1 + self.of_classes * (2 + self.cells + 2 * BINS)

    @property
    def cells(self) -> int:
        """Cells of the confusion matrix, a row for each class."""
        return self.outputs**2 if self.has_cells else 0

    @cached_property
    def weights(self) -> Weights:
        """What stands for each part in a record's vector."""
        if not self.of_classes:
            return Weights(loss=APART)
        cell = _CELL if self.has_cells else 0.0
        shares = np.array([_LOSS, _RIGHT, _GAP, cell / 2, _BIN / 2]) / (_LOSS + _RIGHT + _GAP + cell + _BIN)
        return Weights(*(APART * np.sqrt(shares)).tolist())

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        found = [self.vectors(task, outputs.cpu(), targets.cpu()) for outputs, targets in evaluated(task, weights, task.data.take(rows))]
        return torch.cat(found) if found else torch.zeros(0, self.size, dtype=torch.float64)

    def vectors(self, task: LocalTask, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the vectors (R, size) of records by the model's ``outputs`` (R, ...) for them. Outputs that are no numbers are wrong."""
        absent, lost = without_answer(targets), unusable(outputs, self.kind)
        weights, every = self.weights, torch.arange(len(targets))
        losses = task.losses(outputs, targets).double().nan_to_num(nan=self.loss_bound, posinf=self.loss_bound)
        found = torch.zeros(len(targets), self.size, dtype=torch.float64)
        found[:, 0] = weights.loss * ((losses / self.loss_bound).clamp(0, 1).where(~lost, 1.0) - 0.5)
        if self.of_classes:
            own, told = targets.clamp(0, self.outputs - 1), outputs.argmax(dim=1)
            right = (told == own) & ~lost
            found[:, 1] = weights.right * (right.double() - 0.5)
            chances = outputs.double().softmax(dim=1).nan_to_num()
            score, seen = (chances[:, 1], own == 1) if self.outputs == 2 else (chances.amax(dim=1), right)
            found[:, 2] = weights.gap * (score - seen.double()) / 2
            if self.has_cells:
                found[every, _NUMBERS + own * self.outputs + told] = weights.cell
            place = torch.from_numpy(np.clip(np.searchsorted(EDGES, score.numpy(), side="right") - 1, 0, BINS - 1))
            found[every, _NUMBERS + self.cells + seen.long() * BINS + place] = weights.bin
            found[:, 2:] = found[:, 2:].where(~lost[:, None], 0.0)
        return found.where(~absent[:, None], 0.0)


@dataclass(frozen=True, eq=False)
class ClientEvaluation:
    """What clients measure, of whom and when.

    Attributes:
        units: each client's held-back records, or persons.
        vectors: what each of them gives.
        mechanism: with the noise of one measurement.
        rounds, every: of the run, and after how many of them each measurement is made; 0 makes one at the end.
        persons: whose the rows are, where persons are protected.
    """

    units: Division
    vectors: RecordScores
    mechanism: DpSgd
    rounds: int
    every: int = 0
    persons: Persons | None = None

    def is_due(self, number: int) -> bool:
        """Whether the model is measured after round ``number``."""
        return is_due(number, self.rounds, self.every)

    def before(self, number: int) -> int:
        """Return how many measurements were made before round ``number`` is over."""
        return sum(self.is_due(earlier) for earlier in range(1, number))

    @property
    def release(self) -> Release:
        """What a client sends, for the ledger."""
        return released(self.mechanism, ranges_of(1))

    def measured(self, task: LocalTask, weights: Tensor, seed: int, number: int) -> dict[str, Any]:
        """Return what a server learns of the model with ``weights`` (d,) after round ``number``, as :class:`RoundMetrics` keeps it."""

        def own(some: range) -> Tensor:
            return client_sums(self.vectors, task, weights, self.units[some.start : some.stop], self.mechanism.steps, self.persons)

        context = b"evaluation" + weights.numpy().tobytes()
        clients, size = len(self.units), self.vectors.size
        found = released_sum(own, clients, size, self.mechanism, seed=seed, purpose=Purpose.EVALUATION, number=number, context=context)
        return as_measured(found.in_units(self.mechanism.steps), int(self.units.sizes.sum()))


def as_measured(total: NoisySum, records: int, *, stated: bool = False) -> dict[str, Any]:
    """Return the ``total`` over so many ``records`` as :class:`RoundMetrics` keeps it.

    Args:
        stated: whether the number of records is stated by the terms of the round, because nodes do not send their own numbers.
    """
    return {"sums": total.points.tolist(), "noise": total.noise, "records": records, "stated": stated}


def is_due(number: int, rounds: int, every: int) -> bool:
    """Whether a run of so many ``rounds`` measures at clients after round ``number``: after each ``every`` rounds, and after the last."""
    return number == rounds or (every > 0 and number % every == 0)


@dataclass(frozen=True)
class Figure:
    """A figure that was measured at clients.

    Attributes:
        value: unbiased, but for what bins of scores round.
        noise, records: standard deviation that the noise leaves in it, and that the finite number of records does.
        least, most: what the figure can be; the value may lie beyond by its noise, and its interval does not.
    """

    value: float
    noise: float
    records: float
    least: float = 0.0
    most: float = 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval: both deviations together, as if the figure were normal."""
        half = 1.96 * sqrt(self.noise**2 + self.records**2)
        low, high = (min(max(end, self.least), self.most) for end in (self.value - half, self.value + half))
        return low, high


RIGHT, LOSS, RANKED, GAP = ACCURACY, "mean loss", AUROC, "mean predicted less observed"
"""Names of the figures. Predicted is the probability of the second of two classes, or of the class that is told of several."""


@dataclass(frozen=True, eq=False)
class ClientFigures:
    """The figures that a released sum of :class:`RecordScores` tells.

    Attributes:
        scores: what was summed.
        total: the sum.
        records: how many records, or persons, were summed.
    """

    scores: RecordScores
    total: NoisySum
    records: int

    @classmethod
    def of(cls, scores: RecordScores, measured: dict[str, Any]) -> ClientFigures:
        """Return the figures of what :meth:`ClientEvaluation.measured` gave."""
        return cls(scores, NoisySum(np.array(measured["sums"]), float(measured["noise"])), int(measured["records"]))

    def all(self) -> dict[str, Figure]:
        """Return each figure by its name. One whose value is lost in the noise is left out."""
        weights, bound, count, noise = self.scores.weights, self.scores.loss_bound, self.records, self.total.noise
        loss = 0.5 + float(self.total.points[0]) / (weights.loss * count)
        # Of values in [0, 1] with this mean, the variance is m (1 - m) at most: that of each record's loss is not measured.
        found = {LOSS: Figure(bound * loss, bound * noise / (weights.loss * count), bound * _deviation(loss, count), most=bound)}
        if self.scores.of_classes:
            right = 0.5 + float(self.total.points[1]) / (weights.right * count)
            gap = 2 * float(self.total.points[2]) / (weights.gap * count)
            found[RIGHT] = Figure(right, noise / (weights.right * count), _deviation(right, count))
            found[GAP] = Figure(gap, 2 * noise / (weights.gap * count), self._deviation_of_gap(gap), least=-1.0)
            found |= self._auroc()
        return found

    def counted(self) -> Figure | None:
        """Return how many records with an answer the sum itself counts, behind its noise; None where it has no bins of scores."""
        if not self.scores.of_classes:
            return None
        bins, noise = self._bins()
        return Figure(float(bins.sum()), noise * sqrt(bins.size), 0.0, most=inf)

    def confusion(self) -> tuple[NDArray[np.float64], float] | None:
        """Return the confusion matrix (classes, told) in records, with the noise of a cell; None where there is none."""
        if not self.scores.has_cells:
            return None
        weight, size = self.scores.weights.cell, self.scores.outputs
        return self.total.points[_NUMBERS : _NUMBERS + size**2].reshape(size, size) / weight, self.total.noise / weight

    def calibration(self) -> list[dict[str, float]]:
        """Return predicted and observed shares, with 95 % intervals, of each bin of scores that stands out of the noise."""
        if not self.scores.of_classes:
            return []
        (without, with_), noise = self._bins()
        rows = []
        for place, (none, some) in enumerate(zip(without, with_, strict=True)):
            count = none + some
            if count > _CLEAR * noise:
                observed = min(max(some / count, 0.0), 1.0)
                half = 1.96 * sqrt(noise**2 * (observed**2 + (1 - observed) ** 2) / count**2 + observed * (1 - observed) / count)
                ends = {"low": max(0.0, observed - half), "high": min(1.0, observed + half)}
                rows.append({"predicted": float(_MIDDLES[place]), "observed": observed, **ends, "rows": round(count)})
        return rows

    def _bins(self) -> tuple[NDArray[np.float64], float]:
        """Return records in each bin of scores (2, BINS), without and with what the score is of, and the noise of each."""
        weight = self.scores.weights.bin
        return self.total.points[_NUMBERS + self.scores.cells :].reshape(2, BINS) / weight, self.total.noise / weight

    def _deviation_of_gap(self, gap: float) -> float:
        """Return the standard deviation that the number of records leaves in the gap, by the bins of scores."""
        (without, with_), _ = self._bins()
        squares = float((np.stack([_MIDDLES, _MIDDLES - 1]) ** 2 * np.maximum([without, with_], 0.0)).sum()) / self.records
        return sqrt(max(squares - gap**2, 1 / self.records) / self.records)

    def _auroc(self) -> dict[str, Figure]:
        """Return the AUROC of two classes, where both stand out of the noise."""
        (without, with_), noise = self._bins()
        if self.scores.outputs != 2 or min(without.sum(), with_.sum()) <= _CLEAR * noise * sqrt(BINS):
            return {}
        return {RANKED: _auroc(without, with_, noise)}


_MIDDLES = np.concatenate([[EDGES[1] / 2], 1 / (1 + np.exp(-(np.linspace(-5, 5, 21)[1:] - 0.25))), [(1 + EDGES[-2]) / 2]])
"""Score that stands for each bin."""
_CLEAR = 3.0
"""Standard deviations of its noise from which on a number of records is divided by."""


def _deviation(share: float, count: int) -> float:
    """Return the standard deviation of a ``share`` of so many records, by Agresti and Coull: as if two more were right and two wrong.

    The share of the records themselves would give too little near 0 and 1.
    """
    inside = (min(max(share, 0.0), 1.0) * count + 2) / (count + 4)
    return sqrt(inside * (1 - inside) / count)


def _auroc(without: NDArray[np.float64], with_: NDArray[np.float64], noise: float) -> Figure:
    """Return the probability that a record of the second class has the higher score, where ties count half, by counts in bins.

    Deviations are to first order (delta method). The derivative by all counts of a class together is 0.
    """
    below = np.cumsum(without) - without / 2
    above = with_.sum() - np.cumsum(with_) + with_ / 2
    value = float((with_ * below).sum() / (with_.sum() * without.sum()))
    slopes = np.stack([(above / with_.sum() - value) / without.sum(), (below / without.sum() - value) / with_.sum()])
    spread = (np.maximum([without, with_], 0.0) * slopes**2).sum()
    return Figure(value, noise * float(np.sqrt((slopes**2).sum())), float(np.sqrt(spread)))
