"""A task: the loss of a sample, and the metrics of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.errors import ConfigError
from ldpfl.tasks import outcomes, weighted_metrics as metrics
from ldpfl.tasks.outcomes import MetricOfAllRows
from ldpfl.tasks.survival import concordance
from ldpfl.tasks.weighted_metrics import ACCURACY as ACCURACY, Floats, WeightedFigures
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import call_user_code, is_code

Targets = Literal["class", "classes", "number", "tokens", "count", "ordered", "survival"]
"""Kind of the targets; :class:`Task` has the dtype and the meaning of each."""

PARALLEL: tuple[Targets, ...] = ("ordered", "survival")
"""Targets for which a built-in model has one score, and an offset for each output (proportional odds)."""

NO_TOKEN = -100
"""Target of a position that does not count, such as after the end of a text."""

ABSENT: Mapping[Targets, float] = {
    "class": NO_TOKEN,
    "classes": nan,
    "number": nan,
    "tokens": NO_TOKEN,
    "count": nan,
    "ordered": NO_TOKEN,
    "survival": nan,
}
"""Target of a sample that counts as a sample and contributes nothing: the loss of a built-in task is 0 for it, whatever the weights."""


class Metric(Protocol):
    """A metric that accumulates batches, as those of torchmetrics do. A new one is created for each evaluation."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of ``outputs`` (B, K) of the model and ``targets`` (B, ...). Nothing is rounded or rescaled before."""

    def compute(self) -> Any:
        """Return the metric over all batches, as something that ``float`` takes. A ValueError counts as NaN."""


@dataclass(frozen=True)
class Task:
    """A task: the loss that a model is trained with, and its metrics.

    A function of your own that returns one is named by ``task.name = "file.py:function"``. Its metrics have no intervals, no table of
    further figures and no figures by client, since these need weights of rows, which a :class:`Metric` does not take.

    Attributes:
        name: name of the task. A task of your own must not have the name of a built-in one.
        targets: kind of the targets, and so how ``data.target`` is read and how many outputs the model has:

            - ``class``: number of a class (int64), one output for each class
            - ``classes``: 0 or 1 for each label (float32), one output for each label
            - ``number``: a number (float32), one output. The number of a table is scaled: less a center, divided by a spread, both
              measured under the guarantee, or by ``data.bounds`` to about -1 to 1. So losses and metrics are in units of this spread.
              Arrays and tensors are taken as they are.
            - ``count``: a number of at least 0 (float32), divided by its spread and not centered, one output
            - ``ordered``: number of an ordered class (int64), one output less than there are classes
            - ``survival``: 0, 1 or NaN for each interval of time (float32), see :func:`ldpfl.tasks.outcomes.hazard_losses`. The targets
              of test rows have the time and the event behind them. One output for each interval.
            - ``tokens``: the next token at each place of a text (int64), or -100 where none is to be predicted
        losses: function from outputs (B, ...) and targets (B, ...) to the loss (B,) of each sample. Another shape is refused. It runs
            under ``vmap``, so its control flow must not depend on values.
        metrics: functions that create a new metric, by name. The first one is the main metric, which is computed after each round.
        lower_is_better: names of the metrics for which lower is better, such as errors. Sweeps compare runs by the main metric.
    """

    name: str
    targets: Targets
    losses: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Callable[[], Metric]]
    lower_is_better: Collection[str] = ()

    @property
    def metric(self) -> str:
        """Name of the main metric."""
        return next(iter(self.metrics))

    def measured(self, batches: Iterator[tuple[Tensor, Tensor]], *, every: bool) -> dict[str, float]:
        """Return the main metric, or ``every`` metric, over ``batches`` of outputs and targets. A metric without a value is NaN.

        A row whose outputs are :func:`unusable` counts as wrong in the accuracy. Other built-in metrics are NaN then. A metric of your own
        is given such rows.
        """
        chosen = {name: make() for name, make in self.metrics.items() if every or name == self.metric}
        undefined: set[str] = set()
        for outputs, targets in batches:
            if bool(unusable(outputs, self.targets).any()):
                # All built-in metrics but the accuracy are of these two classes.
                undefined |= {name for name, metric in chosen.items() if isinstance(metric, MetricOfAllRows | _Perplexity)}
            for name, metric in chosen.items():
                if name not in undefined:
                    metric.update(outputs, targets)
        return {name: nan if name in undefined else _value_or_nan(metric) for name, metric in chosen.items()}


def unusable(outputs: Tensor, targets: Targets) -> Tensor:
    """Return a mask (N,) of the rows of ``outputs`` (N, ...) with NaN or infinity. For classes, a logit of minus infinity is allowed."""
    # A softmax turns minus infinity into probability 0, and keeps NaN.
    predicted = outputs.softmax(dim=-1) if targets in ("class", "tokens") and outputs.dim() > 1 else outputs
    return ~predicted.isfinite().reshape(len(predicted), -1).all(dim=1)


def absent_targets(targets: Tensor) -> Tensor:
    """Return a mask (N,) of the ``targets`` (N, ...) that are :data:`ABSENT`. A target of several values is absent if all of them are."""
    absent = targets.isnan() if targets.is_floating_point() else targets == NO_TOKEN
    return absent.flatten(1).all(dim=1) if absent.dim() > 1 else absent


def names() -> tuple[str, ...]:
    """Return the names of the built-in tasks."""
    return tuple(_REGISTRY)


@dataclass(frozen=True)
class Emphasis:
    """How much each sample counts in the loss of a classification. The default counts all alike.

    Attributes:
        class_weights: factor on the loss of the samples of each class; empty for 1 everywhere.
        focusing: gamma of the focal loss (Lin et al. 2017), at least 0. The loss of a sample whose class has the predicted probability p
            is multiplied by (1 - p)^gamma, so samples that the model predicts well count less.
    """

    class_weights: tuple[float, ...] = ()
    focusing: float = 0.0

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (B,) for ``logits`` (B, C) and classes ``targets`` (B,)."""
        losses = _cross_entropy(logits, targets)
        if self.focusing:
            wrong = -torch.expm1(-losses)  # 1 - p, since a loss is -log p
            losses = losses * wrong.clamp_min(_MIN_WRONG) ** self.focusing
        if self.class_weights:
            losses = losses * logits.new_tensor(self.class_weights)[targets.clamp_min(0)]  # the loss of an absent target is 0 already
        return losses


NO_EMPHASIS = Emphasis()
"""All samples count alike."""

_MIN_WRONG = 1e-12
"""Smallest 1 - p whose power is taken: the derivative of a power below 1 is infinite at 0."""


def create(name: str, outputs: int, *, scale: float = 1.0, emphasis: Emphasis = NO_EMPHASIS) -> Task:
    """Return the task called ``name`` for models with ``outputs`` outputs.

    ``"package.module:function"`` is called with ``outputs`` and returns a :class:`Task`. ``scale`` is the size of one unit of the scaled
    targets, in their original unit. ``emphasis`` changes the loss of ``classification``, and is for no other task.

    Raises:
        ConfigError: the name is unknown, or the path does not give a task.
    """
    task = _task_by_name(name, outputs, scale)
    return task if emphasis == NO_EMPHASIS else replace(task, losses=emphasis.losses)


def _task_by_name(name: str, outputs: int, scale: float) -> Task:
    """Return the built-in task called ``name``, or the task that an import path gives."""
    if is_code(name):
        return _call_users_function(name, outputs)
    if name not in _REGISTRY:
        raise ConfigError(f"unknown task {name!r}: {did_you_mean(name, _REGISTRY)}, or give an import path package.module:function")
    return _REGISTRY[name](outputs, scale)


def _call_users_function(path: str, outputs: int) -> Task:
    """Call the user's function at the import path ``path``, and return its task. Raise a :class:`ConfigError` if it is not valid."""
    task = call_user_code("task", path, outputs)
    if not isinstance(task, Task):
        raise ConfigError(f"task {path!r} returned a {type(task).__name__}, expected an ldpfl.tasks.Task")
    if not task.metrics:
        raise ConfigError(f"task {path!r} returned a Task without metrics, expected at least one")
    if task.name in _REGISTRY:  # its model would be evaluated by the metrics of the built-in task
        raise ConfigError(f"task {path!r} returned a Task named {task.name!r}, which is the name of a built-in task: give it another name")
    if unknown := [name for name in task.lower_is_better if name not in task.metrics]:
        raise ConfigError(f"task {path!r}: lower_is_better names {unknown[0]!r}, but the metrics are {', '.join(task.metrics)}")
    return task


class _Accuracy:
    """Exact share of samples that are predicted right: by the largest output, or by the mask (N,) that ``is_right`` returns.

    Samples whose outputs are :func:`unusable` for the ``kind`` of targets count as wrong.
    """

    def __init__(
        self,
        is_right: Callable[[Tensor, Tensor], Tensor] = lambda outputs, targets: outputs.argmax(dim=1) == targets,
        kind: Targets = "class",
    ) -> None:
        self._is_right, self._kind = is_right, kind
        self._right, self._all = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self._right += int((self._is_right(outputs, targets) & ~unusable(outputs, self._kind)).sum())
        self._all += len(targets)

    def compute(self) -> float:
        return self._right / self._all


class _Perplexity:
    """Exponential of the mean cross-entropy of a token; NaN without tokens."""

    def __init__(self) -> None:
        self._loss, self._tokens = 0.0, 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TOKEN, reduction="sum"))
        self._tokens += int((targets != NO_TOKEN).sum())

    def compute(self) -> float:
        return float(torch.tensor(self._loss / self._tokens).exp()) if self._tokens else nan


def _metric_factory(function: Callable[[Tensor, Tensor], float]) -> Callable[[], Metric]:
    """Return a function that creates the metric which ``function`` computes from the outputs and targets of all rows."""
    return lambda: MetricOfAllRows(function)


def _figure_factory(
    name: str, figures_of: Callable[[Floats, Any], WeightedFigures], predict: Callable[[Tensor, Tensor], Tensor], factor: float = 1.0
) -> Callable[[], Metric]:
    """Return a function that creates the metric ``name``: the figure of this name over all rows, times ``factor``.

    ``predict`` turns outputs and targets (N,) into predictions (N,). ``figures_of`` takes these and the targets, and returns their figures
    as a function of how often each row counts. Here each row counts once.
    """

    def figure_times_factor(outputs: Tensor, targets: Tensor) -> float:
        weighted_figures = figures_of(predict(outputs, targets).double().numpy(), targets.double().numpy())
        return metrics.figures_of_all_rows(weighted_figures, len(targets))[name] * factor

    return _metric_factory(figure_times_factor)


def _value_or_nan(metric: Metric) -> float:
    """Return the result of ``metric``; NaN if it cannot be computed."""
    try:
        return float(metric.compute())
    except ValueError:  # as some metrics of torchmetrics raise for a single sample
        return float("nan")


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss (B,) of each sample; 0 if its class is unknown."""
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=NO_TOKEN)


def _zero_where_absent(losses: Tensor, targets: Tensor) -> Tensor:
    """Return ``losses`` with 0 in place of the losses of targets that are NaN."""
    return torch.where(targets.isnan(), torch.zeros_like(losses), losses)


def _classification(outputs: int, _scale: float) -> Task:
    """Return the task of predicting one of ``outputs`` classes."""
    identity = np.eye(outputs)

    def f1(logits: Tensor, targets: Tensor) -> float:
        predicted, observed = identity[logits.argmax(dim=1).numpy()], identity[targets.numpy()]
        return metrics.macro_f1(predicted, observed, (predicted + observed).any(axis=0))

    def auroc(logits: Tensor, targets: Tensor) -> float:
        if outputs == 2:
            # The log odds rank rows as probabilities do, which would be rounded to 1 for large logits, and so be tied. nan_to_num: a logit
            # of minus infinity, which rules a class out, makes them infinite.
            log_odds = (logits[:, 1:] - logits[:, :1]).nan_to_num()
            return metrics.mean_auroc(log_odds.numpy(), identity[targets.numpy()][:, 1:])
        return metrics.mean_auroc(logits.softmax(dim=1).numpy(), identity[targets.numpy()])

    by_name: dict[str, Callable[[], Metric]] = {
        ACCURACY: _Accuracy,
        metrics.MACRO_F1: _metric_factory(f1),
        metrics.AUROC: _metric_factory(auroc),
    }
    if outputs == 2:  # the AUROC comes first, as the main metric: always to predict "no" has a high accuracy for a rare outcome
        by_name = {metrics.AUROC: by_name.pop(metrics.AUROC), **by_name}
    return Task("classification", "class", _cross_entropy, by_name)


def _multilabel(_outputs: int, _scale: float) -> Task:
    """Return the task of predicting which of several labels a sample has."""

    def f1(logits: Tensor, targets: Tensor) -> float:
        observed = targets.numpy()
        return metrics.macro_f1((logits > 0).numpy(), observed, metrics.columns_with_both_values(observed))

    def auroc(logits: Tensor, targets: Tensor) -> float:
        return metrics.mean_auroc(logits.numpy(), targets.numpy())

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy (B,) over the labels, for ``logits`` (B, L) and ``targets`` (B, L) of 0, 1 or NaN (unknown)."""
        by_label = F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
        return _zero_where_absent(by_label, targets).mean(dim=-1)

    def exact_match() -> Metric:
        return _Accuracy(lambda logits, labels: ((logits > 0) == (labels > 0)).all(dim=1), "classes")

    by_name = {metrics.AUROC: _metric_factory(auroc), metrics.MACRO_F1: _metric_factory(f1), metrics.EXACT_MATCH: exact_match}
    return Task("multilabel", "classes", losses, by_name)


def _regression(_outputs: int, scale: float) -> Task:
    """Return the task of predicting a number; ``scale`` converts errors to its original unit."""

    def numbers(predictions: Tensor, targets: Tensor) -> Tensor:
        return predictions.reshape(targets.shape)

    def losses(predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the squared errors (B,) of ``predictions`` (B, 1) or (B,); 0 where ``targets`` (B,) are NaN."""
        return _zero_where_absent(F.mse_loss(numbers(predictions, targets), targets.nan_to_num(), reduction="none"), targets)

    r2 = _figure_factory("R2", metrics.number_figures, numbers)
    mae = _figure_factory("MAE", metrics.number_figures, numbers, scale)
    return Task("regression", "number", losses, {"R2": r2, "MAE": mae})


def _language_model(_outputs: int, _scale: float) -> Task:
    """Return the task of predicting each next token of a text."""

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss (B,) over the tokens of each text, for ``logits`` (B, T, V) and ``targets`` (B, T)."""
        # PyTorch expects the V scores in the second axis. A text without tokens has the loss 0.
        by_token = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none", ignore_index=NO_TOKEN)
        return by_token.sum(dim=-1) / (targets != NO_TOKEN).sum(dim=-1).clamp_min(1)

    return Task("language-model", "tokens", losses, {"perplexity": _Perplexity}, lower_is_better=("perplexity",))


def _poisson(_outputs: int, scale: float) -> Task:
    """Return the task of predicting a count; ``scale`` converts errors to its original unit."""

    def losses(predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (B,) of ``predictions`` (B, 1) or (B,), logarithms of expected counts; 0 where ``targets`` (B,) are NaN."""
        return _zero_where_absent(outcomes.count_losses(predictions.reshape(targets.shape), targets.nan_to_num()), targets)

    def counts(outputs: Tensor, targets: Tensor) -> Tensor:
        return outcomes.positive_count(outputs.reshape(targets.shape))

    deviance = _figure_factory(metrics.DEVIANCE, metrics.count_figures, counts)
    mae = _figure_factory("MAE", metrics.count_figures, counts, scale)
    return Task("poisson", "count", losses, {metrics.DEVIANCE: deviance, "MAE": mae})


def _ordinal(_outputs: int, _scale: float) -> Task:
    """Return the task of predicting one of several ordered classes."""

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (B,) for ``logits`` (B, outputs), the log odds of being above each threshold; 0 for an absent class."""
        by_sample = outcomes.ordered_losses(logits, targets)
        return torch.where(targets == NO_TOKEN, torch.zeros_like(by_sample), by_sample)

    def accuracy() -> Metric:
        return _Accuracy(lambda logits, classes: outcomes.median_class(logits) == classes, "ordered")

    kappa, error = (
        _figure_factory(name, metrics.ordered_class_figures, lambda logits, classes: outcomes.median_class(logits))
        for name in (metrics.KAPPA, metrics.CLASS_ERROR)
    )
    return Task("ordinal", "ordered", losses, {metrics.KAPPA: kappa, ACCURACY: accuracy, metrics.CLASS_ERROR: error})


def _survival(_outputs: int, _scale: float) -> Task:
    """Return the task of predicting the time to an event, by its probability in each of several intervals."""

    def harrells_c(logits: Tensor, targets: Tensor) -> float:
        """Return Harrell's C of the predicted times: the expected numbers of intervals without an event."""
        times, events = outcomes.appended_times(targets, logits.shape[1])
        predicted_times = outcomes.survival_probabilities(logits).sum(dim=1)  # the sum of probabilities is the expected number
        return concordance(times, events, predicted_times.numpy())

    return Task("survival", "survival", outcomes.hazard_losses, {metrics.CONCORDANCE: _metric_factory(harrells_c)})


# Each function takes the number of outputs, and the size of one unit of the scaled targets. Few tasks depend on both.
_REGISTRY: Mapping[str, Callable[[int, float], Task]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "language-model": _language_model,
    "poisson": _poisson,
    "ordinal": _ordinal,
    "survival": _survival,
}

CLASSIFICATION = _classification(10, 1.0)
"""Task of images with ten classes."""
