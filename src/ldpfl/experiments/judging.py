"""Apply a model to the test rows, and compute the metrics of its outputs. Outputs and targets are first put into a task's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.simulation import Federation
from ldpfl.simulation.local_training import measured
from ldpfl.tasks import unusable, weighted_metrics
from ldpfl.tasks.outcomes import appended_times, median_class, positive_count, survival_probabilities
from ldpfl.tasks.survival import horizon
from ldpfl.tasks.weighted_metrics import ACCURACY, AT_BASE_RATE, COMMONEST, KAPPA, MACRO_F1, OBSERVED, PPV, Floats, WeightedFigures


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model's outputs for the test rows, the observed targets, and the metrics of both.

    Attributes:
        scores: each metric over all rows.
        predicted, observed: outputs and observed targets, in the form that the metrics take; empty if only the task itself has metrics.
        metrics_function: function that computes weighted metrics from outputs and targets; None if only the task itself has metrics.
        figures: result of ``metrics_function`` for all rows.
        unusable: whether the outputs for some rows are NaN or infinite.
        constant: whether all rows have the same outputs.
        classes: class (n,) that is predicted for each row; None if the task predicts none.
    """

    scores: dict[str, float]
    predicted: Floats = field(default_factory=lambda: np.empty(0))
    observed: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    metrics_function: Callable[[Floats, Any], WeightedFigures] | None = None
    figures: WeightedFigures | None = None
    unusable: bool = False
    constant: bool = False
    classes: NDArray[np.int64] | None = None

    @property
    def is_of_two_classes(self) -> bool:
        return isinstance(self.metrics_function, partial) and self.metrics_function.func is weighted_metrics.two_class_figures

    @property
    def is_of_times(self) -> bool:
        return isinstance(self.metrics_function, partial) and self.metrics_function.func is weighted_metrics.survival_figures

    @property
    def is_of_numbers(self) -> bool:
        return self.metrics_function in (weighted_metrics.number_figures, weighted_metrics.count_figures)


def evaluate_on_test_rows(federation: Federation, weights: Tensor, personal: Tensor | None = None) -> EvaluatedModel:
    """Return the outputs and metrics on the test rows of the model with ``weights`` (d,) and the clients' ``personal`` layers (N, p)."""
    task, rows = federation.task.task, federation.evaluation.samples
    if not len(rows):  # there are no batches to join
        return EvaluatedModel(measured(federation.task, weights, rows, every=True))
    if task.name not in _METRICS_INPUTS:  # no weighted metrics are known for the task, so it has only its own
        has_unusable: list[bool] = []
        equality = _EqualOutputs()

        def watched_batches() -> Iterator[tuple[Tensor, Tensor]]:
            """Yield outputs and targets, and note properties of the outputs.

            Batches are not collected, because the outputs for all texts together may not fit into memory.
            """
            for outputs, targets in federation.outputs(weights, personal):
                has_unusable.append(bool(unusable(outputs, task.targets).any()))
                if outputs.dim() <= 2:  # scores of all tokens at all places are too many to compare
                    equality.update(outputs)
                yield outputs, targets

        scores = task.measured(watched_batches(), every=True)  # goes through the batches, which fills ``has_unusable`` and ``equality``
        return EvaluatedModel(scores, unusable=any(has_unusable), constant=equality.all_equal)
    batches = [(outputs.cpu(), targets.cpu()) for outputs, targets in federation.outputs(weights, personal)]
    scores = task.measured(iter(batches), every=True)
    outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return evaluate_outputs(federation, outputs, targets, scores)


def evaluate_outputs(federation: Federation, outputs: Tensor, targets: Tensor, scores: Mapping[str, float]) -> EvaluatedModel:
    """Return the metrics of a model from its ``outputs`` (N, ...) for the test rows, and from their ``targets`` (N, ...).

    ``scores`` are the task's own metrics, which are added. If an output is not finite, the result has only these metrics.
    """
    if not bool(outputs.isfinite().all()):
        return EvaluatedModel(dict(scores), unusable=bool(unusable(outputs, federation.task.task.targets).any()))
    name = federation.task.task.name
    metrics_function, predicted, observed = _METRICS_INPUTS[name](outputs, targets, federation)
    figures, equality = metrics_function(predicted, observed), _EqualOutputs()
    equality.update(outputs)
    classes = _PREDICTED_CLASSES[name](outputs).numpy() if name in _PREDICTED_CLASSES else None
    all_scores = {**weighted_metrics.figures_of_all_rows(figures, len(observed)), **scores}
    if name in ("classification", "ordinal") and len(observed) and (observed == observed[0]).all():
        all_scores = _without_comparisons(all_scores)
    return EvaluatedModel(all_scores, predicted, observed, metrics_function, figures, constant=equality.all_equal, classes=classes)


def _without_comparisons(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the ``scores`` of rows that all have one class, without those that mean nothing, since they compare classes.

    The accuracy of two classes is left out, since it equals the specificity or the sensitivity at 0.5. For more classes it is the main
    metric and stays.
    """
    dropped = {COMMONEST, MACRO_F1, KAPPA} | ({ACCURACY} if OBSERVED in scores else set())
    names = [name for name in scores if name not in dropped and not name.startswith(PPV) and not name.endswith(f" at {AT_BASE_RATE}")]
    return {name: scores[name] for name in names if isfinite(scores[name])}


_PREDICTED_CLASSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "classification": lambda logits: logits.argmax(dim=1),
    "ordinal": median_class,
}
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
    def all_equal(self) -> bool:
        """Whether all rows so far have the same outputs. False with fewer than two rows."""
        if self._low is None or self._high is None or self._rows < 2:
            return False
        # Rounding errors are relative to the largest output.
        return bool((self._high - self._low).max() <= _TOLERANCE * torch.maximum(self._low.abs(), self._high.abs()).max())


_TOLERANCE = 1e-6
"""Difference between outputs, as a fraction of the largest one, up to which it counts as rounding."""


_MetricsInput = tuple[Callable[[Floats, Any], WeightedFigures], Floats, NDArray[Any]]
"""Function that computes weighted metrics, and its two arguments: outputs and observed targets, in the form that it takes."""


def _input_for_classes(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for classes, with its arguments: logits (n, k) of k classes, and the observed classes.

    Two classes have one number for each row: the difference of the two logits.
    """
    logits, classes = outputs.double().numpy(), targets.numpy()
    if logits.shape[1] == 2:
        figures = partial(weighted_metrics.two_class_figures, threshold=federation.evaluation.threshold)
        return figures, logits[:, 1] - logits[:, 0], classes == 1
    return weighted_metrics.several_class_figures, logits, classes


def _input_for_labels(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for labels, with its arguments: logits (n, k) of k labels, and which labels each row has."""
    # ``federation`` is not used. All functions in ``_METRICS_INPUTS`` take the same arguments.
    return weighted_metrics.label_figures, outputs.double().numpy(), targets.numpy() > 0


def _input_for_numbers(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for numbers, with its arguments: predicted and observed numbers, in the unit of the data."""
    encoder = federation.encoder
    center, unit = (0.0, 1.0) if encoder is None else (encoder.target_center, encoder.target_spread)
    predicted, observed = (values.reshape(len(targets)).double().numpy() * unit + center for values in (outputs, targets))
    return weighted_metrics.number_figures, predicted, observed


def _input_for_times(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for times, with its arguments: survival probabilities (n, k) at k cuts, and times with events (n, 2).

    The end of the scored time follows from all test rows, so that it is the same for all models and clients.
    """
    # Times are stored as float32. Cuts are rounded in the same way, so that a time at a cut equals it.
    cuts = np.array(() if federation.encoder is None else federation.encoder.cuts, dtype=np.float32)
    times, events = appended_times(targets, outputs.shape[1])
    return (
        partial(weighted_metrics.survival_figures, cuts=cuts.astype(np.float64), end=horizon(times, events > 0)),
        survival_probabilities(outputs.double()).numpy(),
        np.stack([times, events], axis=1),
    )


def _input_for_counts(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for counts, with its arguments: expected and observed counts, in the unit of the data."""
    unit = 1.0 if federation.encoder is None else federation.encoder.target_spread
    expected = positive_count(outputs.reshape(len(targets)).double()).numpy()
    return weighted_metrics.count_figures, expected * unit, targets.double().numpy() * unit


def _input_for_ordered_classes(outputs: Tensor, targets: Tensor, federation: Federation) -> _MetricsInput:
    """Return the metrics function for ordered classes, with its arguments: the median of the predicted classes, and the observed class."""
    # ``federation`` is not used. All functions in ``_METRICS_INPUTS`` take the same arguments.
    return weighted_metrics.ordered_class_figures, median_class(outputs).double().numpy(), targets.numpy()


_METRICS_INPUTS: Mapping[str, Callable[[Tensor, Tensor, Federation], _MetricsInput]] = {
    "classification": _input_for_classes,
    "multilabel": _input_for_labels,
    "regression": _input_for_numbers,
    "poisson": _input_for_counts,
    "ordinal": _input_for_ordered_classes,
    "survival": _input_for_times,
}
"""Function from outputs, targets and the federation to the input of the metrics, by task."""
