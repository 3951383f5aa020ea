"""Apply a model to the test rows, and compute the metrics of its outputs, in the form that each task's metrics take."""

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
from ldpfl.tasks.outcomes import LEAST_COUNT, expected_count, middle_class, survival, times_in
from ldpfl.tasks.weighted_metrics import Counted, Floats


@dataclass(frozen=True, eq=False)
class Judged:
    """A model's outputs for the test rows, the observed targets, and the metrics of both.

    Attributes:
        scores: each metric over all rows.
        told, seen: outputs and observed targets, in the form that the metrics take; empty if only the task itself has metrics.
        kind: function that computes weighted metrics from outputs and targets; None if only the task itself has metrics.
        figures: result of ``kind`` for all rows.
        unusable: whether the outputs for some rows are NaN or infinite.
        constant: whether all rows have the same outputs.
        classes: class (n,) that is predicted for each row; None if the task predicts none.
    """

    scores: dict[str, float]
    told: Floats = field(default_factory=lambda: np.empty(0))
    seen: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    kind: Callable[[Floats, Any], Counted] | None = None
    figures: Counted | None = None
    unusable: bool = False
    constant: bool = False
    classes: NDArray[np.int64] | None = None

    @property
    def is_of_two_classes(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.of_two_classes

    @property
    def is_of_times(self) -> bool:
        return isinstance(self.kind, partial) and self.kind.func is weighted_metrics.of_times

    @property
    def is_of_numbers(self) -> bool:
        return self.kind in (weighted_metrics.of_numbers, weighted_metrics.of_counts)


def judged_on_test_rows(federation: Federation, weights: Tensor, own: Tensor | None = None) -> Judged:
    """Return the metrics of the model with ``weights`` (d,) on the test rows; for ``own`` see :meth:`Federation.outputs`."""
    task, rows = federation.task.task, federation.evaluation.samples
    if not len(rows):
        return Judged(measured(federation.task, weights, rows, every=True))
    if task.name not in _KINDS:
        found: list[bool] = []
        alike = _Alike()

        def watched() -> Iterator[tuple[Tensor, Tensor]]:  # some at a time: the outputs for texts are large
            for outputs, targets in federation.outputs(weights, own):
                found.append(bool(unusable(outputs, task.targets).any()))
                if outputs.dim() <= 2:  # scores of all tokens at all places are too many to compare
                    alike.update(outputs)
                yield outputs, targets

        return Judged(task.measured(watched(), every=True), unusable=any(found), constant=alike.found)
    batches = [(outputs.cpu(), targets.cpu()) for outputs, targets in federation.outputs(weights, own)]
    scores = task.measured(iter(batches), every=True)
    outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return judged_by(federation, outputs, targets, scores)


def judged_by(federation: Federation, outputs: Tensor, targets: Tensor, scores: Mapping[str, float]) -> Judged:
    """Return the metrics of ``outputs`` for the test rows, in the target's units, with the task's own metrics ``scores``."""
    if not bool(outputs.isfinite().all()):
        return Judged(dict(scores), unusable=bool(unusable(outputs, federation.task.task.targets).any()))
    kind, told, seen = _KINDS[federation.task.task.name](outputs, targets, federation)
    figures, alike = kind(told, seen), _Alike()
    alike.update(outputs)
    classes = _CLASSES[federation.task.task.name](outputs).numpy() if federation.task.task.name in _CLASSES else None
    return Judged(
        {**weighted_metrics.point(figures, len(seen)), **scores}, told, seen, kind, figures, constant=alike.found, classes=classes
    )


_CLASSES: Mapping[str, Callable[[Tensor], Tensor]] = {"classification": lambda logits: logits.argmax(dim=1), "ordinal": middle_class}
"""Function from outputs (N, ...) to the predicted class (N,), for tasks that predict one."""


class _Alike:
    """Whether all rows have the same outputs, up to rounding."""

    def __init__(self) -> None:
        self._rows = 0
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def update(self, outputs: Tensor) -> None:
        low, high = outputs.detach().amin(dim=0), outputs.detach().amax(dim=0)
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)
        self._rows += len(outputs)

    @property
    def found(self) -> bool:
        if self._low is None or self._high is None or self._rows < 2:
            return False
        return bool((self._high - self._low).max() <= _SAME * torch.maximum(self._low.abs(), self._high.abs()).max())


_SAME = 1e-6
"""Difference between outputs, relative to the largest of them, up to which rounding makes it."""


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


def _count_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    unit = 1.0 if federation.encoder is None else federation.encoder.target_spread
    expected = expected_count(outputs.reshape(len(targets)).double()).clamp_min(LEAST_COUNT)
    return weighted_metrics.of_counts, expected.numpy() * unit, targets.double().numpy() * unit


def _ordered_form(outputs: Tensor, targets: Tensor, federation: Federation) -> _Form:
    return weighted_metrics.of_ordered, middle_class(outputs).double().numpy(), targets.numpy()


_KINDS: Mapping[str, Callable[[Tensor, Tensor, Federation], _Form]] = {
    "classification": _class_form,
    "multilabel": _label_form,
    "regression": _number_form,
    "poisson": _count_form,
    "ordinal": _ordered_form,
    "survival": _time_form,
}
