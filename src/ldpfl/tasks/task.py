"""What a model is trained to do: the loss of a sample, and the figures by which a model is judged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.errors import ConfigError
from ldpfl.tasks import outcomes
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_code import called, is_code

Targets = Literal["class", "classes", "number", "tokens", "count", "ordered", "survival"]
"""What a sample's target is: one class (int64), a 0 or 1 for each class (float32), a number (float32), or a token a place (int64).

A count is a number (float32) in units of its spread; an ordered class is a class (int64), told by one output less than there are classes;
and survival is a 0, 1 or NaN for each interval of time (float32), see :func:`ldpfl.tasks.outcomes.hazard_losses`; where it is measured, the
time and the event stand behind them.
"""

PARALLEL: tuple[Targets, ...] = ("ordered", "survival")
"""Targets for which a built-in model has one score, and an offset for each output (proportional odds)."""

NO_TOKEN = -100
"""A target that does not count: what follows the end of a text."""

ABSENT: Mapping[Targets, float] = {
    "class": NO_TOKEN,
    "classes": nan,
    "number": nan,
    "tokens": NO_TOKEN,
    "count": nan,
    "ordered": NO_TOKEN,
    "survival": nan,
}
"""The target of a sample that counts as one and teaches nothing: the loss of a built-in task is 0 there, whatever the weights are."""

ACCURACY = "accuracy"
"""Share of the samples whose class a model tells; a classifier of three classes or more is judged by it after each round."""


LOWER_IS_BETTER = frozenset({"perplexity", "MAE", "RMSE", "Brier score", "mean class error", "integrated Brier"})
"""Figures of which less is better; of all others, those of tasks of one's own among them, more is."""


class Metric(Protocol):
    """Adds samples up and comes to a figure, as those of torchmetrics do."""

    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True)
class Task:
    """What a model is trained to do.

    Attributes:
        name: as in a config.
        targets: what a sample's target is.
        losses: outputs (B, ...) and targets (B, ...) to the loss (B,) of each sample; another shape is refused. It runs under
            ``vmap``, and must not look at values to decide what to do.
        metrics: by name, what makes a fresh metric; by the first one a model is judged after each round.
    """

    name: str
    targets: Targets
    losses: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Callable[[], Metric]]

    @property
    def metric(self) -> str:
        """Name of the figure by which a model is judged."""
        return next(iter(self.metrics))

    def measured(self, batches: Iterator[tuple[Tensor, Tensor]], *, every: bool) -> dict[str, float]:
        """Return the first metric, or ``every`` one, over ``batches`` of outputs and targets. One that has no value is NaN.

        A row whose outputs are :func:`unusable` counts as wrong where rows are counted that are right. Other figures of ours have no
        value then: a metric of torchmetrics would take such a row for one of the first class, or of chance one half.
        """
        chosen = {name: make() for name, make in self.metrics.items() if every or name == self.metric}
        lost: set[str] = set()
        for outputs, targets in batches:
            if bool(unusable(outputs, self.targets).any()):
                lost |= {name for name, metric in chosen.items() if isinstance(metric, _Transformed | outcomes.Kept)}
            for name, metric in chosen.items():
                if name not in lost:
                    metric.update(outputs, targets)
        return {name: nan if name in lost else _value(metric) for name, metric in chosen.items()}


def unusable(outputs: Tensor, targets: Targets) -> Tensor:
    """Return which rows (N,) of ``outputs`` (N, ...) say nothing: NaN or infinity. Classes may be ruled out by minus infinity."""
    told = outputs.softmax(dim=-1) if targets in ("class", "tokens") and outputs.dim() > 1 else outputs
    return ~told.isfinite().reshape(len(told), -1).all(dim=1)


def without_answer(targets: Tensor) -> Tensor:
    """Return which of ``targets`` (N, ...) are :data:`ABSENT`, (N,)."""
    absent = targets.isnan() if targets.is_floating_point() else targets == NO_TOKEN
    return absent.flatten(1).all(dim=1) if absent.dim() > 1 else absent


def names() -> tuple[str, ...]:
    """Names that :func:`create` knows beside import paths."""
    return tuple(_REGISTRY)


def create(name: str, outputs: int, *, scale: float = 1.0) -> Task:
    """Return the task called ``name``, for models of ``outputs`` outputs; ``scale`` is a unit of the targets in their own units.

    ``"package.module:function"`` is called with ``outputs`` and returns a :class:`Task`.

    Raises:
        ConfigError: the name is unknown, or the path does not give a task.
    """
    if is_code(name):
        return _imported(name, outputs)
    if name not in _REGISTRY:
        raise ConfigError(f"unknown task {name!r}: {did_you_mean(name, _REGISTRY)}, or give an import path package.module:function")
    return _REGISTRY[name](outputs, scale)


def _imported(path: str, outputs: int) -> Task:
    task = called("task", path, outputs)
    if not isinstance(task, Task) or not task.metrics:
        raise ConfigError(f"task {path!r} gives a {type(task).__name__}, expected an ldpfl.tasks.Task with a metric")
    return task


class _Accuracy:
    """Share of the samples whose class is told, exactly: the one of the largest output, or what else ``right`` finds (N,)."""

    def __init__(
        self, right: Callable[[Tensor, Tensor], Tensor] = lambda outputs, own: outputs.argmax(dim=1) == own, kind: Targets = "class"
    ) -> None:
        self._is_right, self._kind = right, kind
        self._right, self._all = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self._right += int((self._is_right(outputs, targets) & ~unusable(outputs, self._kind)).sum())
        self._all += len(targets)

    def compute(self) -> float:
        return self._right / self._all


class _Transformed:
    """A metric of torchmetrics, on outputs and targets that are brought into the form that it wants."""

    def __init__(self, metric: Any, form: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], factor: float = 1.0) -> None:
        self._metric, self._form, self._factor = metric, form, factor

    def figure(self) -> Any:
        return self._metric.compute()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self._metric.update(*(part.detach().cpu() for part in self._form(outputs, targets)))

    def compute(self) -> float:
        with warnings.catch_warnings():  # of classes that the samples lack, see _OfThoseThatOccur
            warnings.simplefilter("ignore")
            return float(self.figure()) * self._factor


class _OfThoseThatOccur(_Transformed):
    """The mean over the classes, or labels, of which there are samples and of which there are others: of the rest nothing is known.

    torchmetrics counts those as 0. NaN where none is left.
    """

    def __init__(self, metric: Any, form: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], classes: int) -> None:
        super().__init__(metric, form)
        self._classes, self._of, self._all = classes, torch.zeros(classes), 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        several = targets.dim() > 1
        own = targets.detach().cpu() if several else F.one_hot(targets.detach().cpu(), self._classes)
        self._of, self._all = self._of + own.sum(dim=0), self._all + len(own)

    def figure(self) -> Any:
        return self._metric.compute()[(self._of > 0) & (self._of < self._all)].mean()


def _value(metric: Metric) -> float:
    try:
        return float(metric.compute())
    except ValueError:  # such as R2 of a single sample
        return float("nan")


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=NO_TOKEN)


def _where_present(losses: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets.isnan(), torch.zeros_like(losses), losses)


def _in_order(logits: Tensor) -> Tensor:
    """Return numbers in (0, 1) in the order of ``logits``, 1/2 for 0. A sigmoid makes 1 of all that are large, and so ties of them."""
    own = logits.double()
    return (own / (1 + own.abs()) + 1) / 2


def _classification(outputs: int, scale: float) -> Task:
    def form(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if outputs != 2:
            return logits.double().softmax(dim=1), targets
        second = _in_order(logits[:, 1] - logits[:, 0])
        return torch.stack([1 - second, second], dim=1), targets

    def f1() -> Metric:
        from torchmetrics.classification import MulticlassF1Score  # takes a second to import

        return _Transformed(MulticlassF1Score(num_classes=outputs, average="macro"), form)

    def auroc() -> Metric:
        from torchmetrics.classification import MulticlassAUROC

        return _OfThoseThatOccur(MulticlassAUROC(num_classes=outputs, average=None), form, outputs)

    metrics: dict[str, Callable[[], Metric]] = {ACCURACY: _Accuracy, "macro F1": f1, "AUROC": auroc}
    if outputs == 2:  # of a rare outcome, who says that it never happens is nearly always right
        metrics = {"AUROC": auroc, ACCURACY: _Accuracy, "macro F1": f1}
    return Task("classification", "class", _cross_entropy, metrics)


def _multilabel(outputs: int, scale: float) -> Task:
    def form(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _in_order(logits), targets.long()

    def f1() -> Metric:
        from torchmetrics.classification import MultilabelF1Score

        return _OfThoseThatOccur(MultilabelF1Score(num_labels=outputs, average=None), form, outputs)

    def auroc() -> Metric:
        from torchmetrics.classification import MultilabelAUROC

        return _OfThoseThatOccur(MultilabelAUROC(num_labels=outputs, average=None), form, outputs)

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        by_label = F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
        return _where_present(by_label, targets).mean(dim=-1)

    def exact_match() -> Metric:
        return _Accuracy(lambda logits, own: ((logits > 0) == (own > 0)).all(dim=1), "classes")

    metrics = {"AUROC": auroc, "macro F1": f1, "exact match": exact_match}
    return Task("multilabel", "classes", losses, metrics)


def _regression(outputs: int, scale: float) -> Task:
    def metric(kind: str, factor: float = 1.0) -> Callable[[], Metric]:
        def make() -> Metric:
            import torchmetrics

            return _Transformed(getattr(torchmetrics, kind)(), lambda found, targets: (found.reshape(targets.shape), targets), factor)

        return make

    def losses(found: Tensor, targets: Tensor) -> Tensor:
        return _where_present(F.mse_loss(found.reshape(targets.shape), targets.nan_to_num(), reduction="none"), targets)

    return Task("regression", "number", losses, {"R2": metric("R2Score"), "MAE": metric("MeanAbsoluteError", scale)})


def _language_model(outputs: int, scale: float) -> Task:
    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        by_place = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none", ignore_index=NO_TOKEN)
        return by_place.sum(dim=-1) / (targets != NO_TOKEN).sum(dim=-1).clamp_min(1)

    def perplexity() -> Metric:
        from torchmetrics.text import Perplexity

        return _Transformed(Perplexity(ignore_index=NO_TOKEN), lambda logits, targets: (logits, targets))

    return Task("language-model", "tokens", losses, {"perplexity": perplexity})


def _poisson(outputs: int, scale: float) -> Task:
    def losses(found: Tensor, targets: Tensor) -> Tensor:
        return _where_present(outcomes.count_losses(found.reshape(targets.shape), targets.nan_to_num()), targets)

    def mae() -> Metric:
        from torchmetrics import MeanAbsoluteError

        return _Transformed(MeanAbsoluteError(), lambda found, own: (outcomes.expected_count(found.reshape(own.shape)), own), scale)

    return Task("poisson", "count", losses, {"deviance explained": outcomes.DevianceExplained, "MAE": mae})


def _ordinal(outputs: int, scale: float) -> Task:
    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        by_sample = outcomes.ordered_losses(logits, targets)
        return torch.where(targets == NO_TOKEN, torch.zeros_like(by_sample), by_sample)

    def form(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outcomes.middle_class(logits), targets

    def kappa() -> Metric:
        from torchmetrics.classification import MulticlassCohenKappa

        return _Transformed(MulticlassCohenKappa(num_classes=outputs + 1, weights="quadratic"), form)

    def accuracy() -> Metric:
        return _Accuracy(lambda logits, own: outcomes.middle_class(logits) == own, "ordered")

    return Task("ordinal", "ordered", losses, {"quadratic kappa": kappa, ACCURACY: accuracy, "mean class error": outcomes.MeanClassError})


def _survival(outputs: int, scale: float) -> Task:
    return Task("survival", "survival", outcomes.hazard_losses, {"concordance": outcomes.Concordance})


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
"""Of images with ten classes."""
