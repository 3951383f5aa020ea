"""Apply a model to the test rows, and compute the metrics of its outputs. Outputs and targets are first put into a task's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.simulation import Federation
from ldpfl.simulation.local_training import measured
from ldpfl.tasks import unusable, weighted_metrics
from ldpfl.tasks.outcomes import MIN_COUNT, appended_times, expected_count, median_class, survival_probabilities
from ldpfl.tasks.weighted_metrics import FiguresOfCounts, Floats


@dataclass(frozen=True, eq=False)
class Judged:
    """A model's outputs for the test rows, the observed targets, and the metrics of both.

    Attributes:
        scores: each metric over all rows.
        predicted, observed: outputs and observed targets, in the form that the metrics take; empty if only the task itself has metrics.
        kind: function that computes weighted metrics from outputs and targets; None if only the task itself has metrics.
        figures: result of ``kind`` for all rows.
        unusable: whether the outputs for some rows are NaN or infinite.
        constant: whether all rows have the same outputs.
        classes: class (n,) that is predicted for each row; None if the task predicts none.
    """

    scores: dict[str, float]
    predicted: Floats = field(default_factory=lambda: np.empty(0))
    observed: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    kind: Callable[[Floats, Any], FiguresOfCounts] | None = None
    figures: FiguresOfCounts | None = None
    unusable: bool = False
    constant: bool = False
    classes: NDArray[np.int64] | None = None

    @property
    def is_of_two_classes(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.two_class_figures

    @property
    def is_of_times(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.survival_figures

    @property
    def is_of_numbers(self) -> bool:
        return self.kind in (weighted_metrics.number_figures, weighted_metrics.count_figures)


def judged_on_test_rows(federation: Federation, weights: Tensor, personal: Tensor | None = None) -> Judged:
    """Return the metrics of the model with ``weights`` (d,) on the test rows; and the clients' ``personal`` layers (N, p)."""
    task, rows = federation.task.task, federation.evaluation.samples
    if not len(rows):
        return Judged(measured(federation.task, weights, rows, every=True))
    if task.name not in _FORMS:
        has_unusable: list[bool] = []
        equality = _EqualOutputs()

        def watched_batches() -> Iterator[tuple[Tensor, Tensor]]:  # batch by batch: the outputs for texts are large
            for outputs, targets in federation.outputs(weights, personal):
                has_unusable.append(bool(unusable(outputs, task.targets).any()))
                if outputs.dim() <= 2:  # scores of all tokens at all places are too many to compare
                    equality.update(outputs)
                yield outputs, targets

        return Judged(task.measured(watched_batches(), every=True), unusable=any(has_unusable), constant=equality.holds)
    batches = [(outputs.cpu(), targets.cpu()) for outputs, targets in federation.outputs(weights, personal)]
    scores = task.measured(iter(batches), every=True)
    outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return judged_by(federation, outputs, targets, scores)


def judged_by(federation: Federation, outputs: Tensor, targets: Tensor, scores: Mapping[str, float]) -> Judged:
    """Return the metrics of ``outputs`` for the test rows, in the target's units, with the task's own metrics ``scores``."""
    if not bool(outputs.isfinite().all()):
        return Judged(dict(scores), unusable=bool(unusable(outputs, federation.task.task.targets).any()))
    name = federation.task.task.name
    kind, predicted, observed = _FORMS[name](outputs, targets, federation)
    figures, equality = kind(predicted, observed), _EqualOutputs()
    equality.update(outputs)
    classes = _CLASSES[name](outputs).numpy() if name in _CLASSES else None
    all_scores = {**weighted_metrics.figures_of_all_rows(figures, len(observed)), **scores}
    return Judged(all_scores, predicted, observed, kind, figures, constant=equality.holds, classes=classes)


_CLASSES: Mapping[str, Callable[[Tensor], Tensor]] = {"classification": lambda logits: logits.argmax(dim=1), "ordinal": median_class}
"""Function from outputs (N, ...) to the predicted class (N,), for tasks that predict one."""


class _EqualOutputs:
    """Test of whether all rows have the same outputs, up to rounding. Rows are given batch by batch."""

    def __init__(self) -> None:
        self._rows = 0
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def update(self, outputs: Tensor) -> None:
        """Add the ``outputs`` (B, ...) of further rows."""
        low, high = outputs.detach().amin(dim=0), outputs.detach().amax(dim=0)
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)
        self._rows += len(outputs)

    @property
    def holds(self) -> bool:
        """Whether all rows so far have the same outputs. False with fewer than two rows."""
        if self._low is None or self._high is None or self._rows < 2:
            return False
        return bool((self._high - self._low).max() <= _TOLERANCE * torch.maximum(self._low.abs(), self._high.abs()).max())


_TOLERANCE = 1e-6
"""Difference between outputs, as a fraction of the largest one, up to which it counts as rounding."""


_MetricsInput = tuple[Callable[[Floats, Any], FiguresOfCounts], Floats, NDArray[Any]]
"""Function that computes weighted metrics, and its two arguments: outputs and observed targets, in the form that it takes."""


def _class_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of classes, with the difference of two logits, or the logits (n, k) of more classes, and the observed classes."""
    logits, classes = outputs.double().numpy(), targets.numpy()
    if logits.shape[1] == 2:
        figures = partial(weighted_metrics.two_class_figures, threshold=federation.evaluation.threshold)
        return figures, logits[:, 1] - logits[:, 0], classes == 1
    return weighted_metrics.several_class_figures, logits, classes


def _label_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of labels, with their logits (n, k), and which labels each row has."""
    return weighted_metrics.label_figures, outputs.double().numpy(), targets.numpy() > 0


def _number_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of numbers, with the predicted and the observed number of each row, in the unit of the data."""
    encoder = federation.encoder
    center, unit = (0.0, 1.0) if encoder is None else (encoder.target_center, encoder.target_spread)
    predicted, observed = (values.reshape(len(targets)).double().numpy() * unit + center for values in (outputs, targets))
    return weighted_metrics.number_figures, predicted, observed


def _time_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of times, with the probability (n, k) to survive each interval, and times with events (n, 2)."""
    cuts = np.array(() if federation.encoder is None else federation.encoder.cuts, dtype=np.float32)  # as times are
    times, events = appended_times(targets, outputs.shape[1])
    return (
        partial(weighted_metrics.survival_figures, cuts=cuts.astype(np.float64)),
        survival_probabilities(outputs.double()).numpy(),
        np.stack([times, events], axis=1),
    )


def _count_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of counts, with the expected and the observed count of each row, in the unit of the data."""
    unit = 1.0 if federation.encoder is None else federation.encoder.target_spread
    expected = expected_count(outputs.reshape(len(targets)).double()).clamp_min(MIN_COUNT)
    return weighted_metrics.count_figures, expected.numpy() * unit, targets.double().numpy() * unit


def _ordered_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics of ordered classes, with the middle class that is predicted for each row, and the observed class."""
    return weighted_metrics.ordered_class_figures, median_class(outputs).double().numpy(), targets.numpy()


_FORMS: Mapping[str, Callable[[Tensor, Tensor, Federation], _MetricsInput]] = {
    "classification": _class_form,
    "multilabel": _label_form,
    "regression": _number_form,
    "poisson": _count_form,
    "ordinal": _ordered_form,
    "survival": _time_form,
}
"""Function from outputs, targets and the federation to the input of the metrics, by task."""
