"""Losses and figures of each task, against PyTorch's and scikit-learn's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from ldpfl import ConfigError, tasks
from ldpfl.tasks import NO_TOKEN, Emphasis, Task


def figures(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """In batches, which no figure may depend on."""
    some = [slice(start, start + 7) for start in range(0, len(targets), 7)]
    return task.measured(((outputs[own], targets[own]) for own in some), every=True)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_classification() -> None:
    from sklearn import metrics

    task, logits, targets = tasks.create("classification", 3), drawn(50, 3), torch.arange(50) % 3
    torch.testing.assert_close(task.losses(logits, targets).mean(), F.cross_entropy(logits, targets))
    found, told = figures(task, logits, targets), logits.argmax(dim=1)
    assert task.metric == "accuracy"
    assert found["accuracy"] == metrics.accuracy_score(targets, told)
    assert found["macro F1"] == pytest.approx(metrics.f1_score(targets, told, average="macro"), abs=1e-5)
    assert found["AUROC"] == pytest.approx(metrics.roc_auc_score(targets, logits.softmax(dim=1), multi_class="ovr"), abs=1e-5)


def test_two_classes_are_judged_by_auroc_and_more_by_accuracy() -> None:
    assert [tasks.create("classification", outputs).metric for outputs in (2, 3)] == ["AUROC", "accuracy"]


def test_multilabel() -> None:
    from sklearn import metrics

    task, logits, targets = tasks.create("multilabel", 3), drawn(50, 3), (drawn(50, 3).roll(1, 0) > 0).float()
    torch.testing.assert_close(task.losses(logits, targets).mean(), F.binary_cross_entropy_with_logits(logits, targets))
    found = figures(task, logits, targets)
    assert found["AUROC"] == pytest.approx(metrics.roc_auc_score(targets, logits), abs=1e-5)
    assert found["macro F1"] == pytest.approx(metrics.f1_score(targets, logits > 0, average="macro"), abs=1e-5)
    assert found["exact match"] == metrics.accuracy_score(targets, (logits > 0).float())


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_regression(shape: tuple[int, ...]) -> None:
    """A model may give numbers or rows of one; what is told of them is in the targets' own units."""
    from sklearn import metrics

    task, numbers, targets = tasks.create("regression", 1, scale=10.0), drawn(*shape), drawn(51)[1:]
    torch.testing.assert_close(task.losses(numbers, targets).mean(), F.mse_loss(numbers.flatten(), targets))
    found = figures(task, numbers, targets)
    assert found["R2"] == pytest.approx(metrics.r2_score(targets, numbers.flatten()), abs=1e-5)
    assert found["MAE"] == pytest.approx(10 * metrics.mean_absolute_error(targets, numbers.flatten()), rel=1e-5)


def test_language_model() -> None:
    """Places without a token count nowhere; a text of none has no loss."""
    task, logits, targets = tasks.create("language-model", 5), drawn(9, 4, 5), torch.arange(36).view(9, 4) % 5
    targets[:, 3] = NO_TOKEN
    targets[0] = NO_TOKEN
    losses = task.losses(logits, targets)
    assert float(losses[0]) == 0.0
    own = F.cross_entropy(logits[1, :3], targets[1, :3])
    torch.testing.assert_close(losses[1], own)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TOKEN)
    assert figures(task, logits, targets)["perplexity"] == pytest.approx(math.exp(float(whole)), rel=1e-4)


@pytest.mark.parametrize("name", tasks.names())
def test_losses_of_many_clients_at_once_are_those_of_each(name: str) -> None:
    task = tasks.create(name, 4)
    tokens = torch.arange(3 * 6 * 4).view(3, 6, 4) % 4
    shapes = {"class": (drawn(3, 6, 4), tokens[..., 0]), "classes": (drawn(3, 6, 4), (tokens > 1).float())}
    shapes |= {"number": (drawn(3, 6, 1), drawn(3, 6)), "tokens": (drawn(3, 6, 4, 4), tokens)}
    shapes |= {"count": (drawn(3, 6, 1), drawn(3, 6).abs()), "ordered": (drawn(3, 6, 4), tokens[..., 0])}
    shapes |= {"survival": (drawn(3, 6, 4), (tokens > 1).float())}
    outputs, targets = shapes[task.targets]
    each = torch.stack([task.losses(*one) for one in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(vmap(task.losses)(outputs, targets), each)


def test_a_figure_without_a_value_is_no_number() -> None:
    assert math.isnan(tasks.create("regression", 1).measured(iter([(drawn(1), drawn(1))]), every=False)["R2"])


def test_equal_numbers_leave_nothing_for_r2_to_explain() -> None:
    assert math.isnan(tasks.create("regression", 1).measured(iter([(drawn(9, 1), torch.full((9,), 0.1))]), every=False)["R2"])


def brought(outputs: int) -> Task:
    return Task("own", "class", lambda found, targets: (found[:, 0] - targets) ** 2, tasks.create("classification", outputs).metrics)


def named_as_a_built_in_one(outputs: int) -> Task:
    return replace(brought(outputs), name="regression")


def of_no_metric(outputs: int) -> Task:
    return replace(brought(outputs), lower_is_better=("rmse",))


def test_a_task_of_one_s_own_is_found_by_its_path() -> None:
    assert tasks.create("test_task:brought", 2).name == "own"
    refused = {
        "test_task:figures": "cannot be built",
        "builtins:float": "expected an ldpfl.tasks.Task",
        "test_task:named_as_a_built_in_one": "named 'regression', which is the name of a built-in task",
        "test_task:of_no_metric": "lower_is_better names 'rmse', but the metrics are AUROC",
    }
    for path, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            tasks.create(path, 2)
    with pytest.raises(ConfigError, match="did you mean 'regression'"):
        tasks.create("regresion", 1)


@pytest.mark.parametrize(("name", "figure"), [("classification", "AUROC"), ("multilabel", "AUROC"), ("multilabel", "macro F1")])
def test_a_class_of_which_no_sample_is_measured_on_counts_for_nothing(name: str, figure: str) -> None:
    """Nor one of which all are; a model that is right is right."""
    classes = torch.tensor([0, 1, 0, 1])
    targets = classes if name == "classification" else torch.stack([classes == 0, classes == 1, classes == 5], dim=1).float()
    outputs = 8 * torch.nn.functional.one_hot(classes, 3).float() - 4
    task = tasks.create(name, 3)
    assert task.measured(iter([(outputs, targets)]), every=True)[figure] == pytest.approx(1.0)
    alone = targets[:1]
    assert math.isnan(task.measured(iter([(outputs[:1], alone)]), every=True)[figure])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", tasks.names())
def test_outputs_that_are_no_numbers_are_wrong_where_rows_are_counted_and_leave_no_other_figure(name: str, value: float) -> None:
    classes = torch.tensor([0, 1, 0, 2])
    outputs = {"regression": 1, "poisson": 1, "ordinal": 2}.get(name, 3)
    targets = {"class": classes, "ordered": classes, "tokens": classes[:, None]}
    made = drawn(4, 1, outputs) if name == "language-model" else drawn(4, outputs)
    made[0], task = value, tasks.create(name, outputs)
    own = targets.get(task.targets, (drawn(4, outputs) > 0).float() if outputs > 1 else drawn(4).abs())
    batches = [(made[:2], own[:2]), (made[2:], own[2:])]
    found = task.measured(iter(batches), every=True)
    counted = {figure: found.pop(figure) for figure in ("accuracy", "exact match") if figure in found}
    assert all(map(math.isnan, found.values()))
    for figure, share in counted.items():
        wrong = task.measured(iter([(made[1:], own[1:])]), every=True)[figure] * 3 / 4
        assert share == pytest.approx(wrong)


def test_a_class_that_a_model_rules_out_is_no_trouble() -> None:
    logits, task = drawn(20, 3), tasks.create("classification", 3)
    logits[:, 2] = -math.inf
    assert not any(map(math.isnan, figures(task, logits, torch.arange(20) % 2).values()))


def test_confident_outputs_are_no_ties() -> None:
    """The probability of each of these is 1 in float32: their order is that of the outputs all the same."""
    gaps = torch.tensor([60.0, 50.0, 40.0, 30.0])
    logits, targets = torch.stack([torch.zeros(4), gaps], dim=1), torch.tensor([1, 0, 1, 0])
    found = tasks.create("classification", 2).measured(iter([(logits, targets)]), every=True)
    assert found["AUROC"] == pytest.approx(0.75)
    several = tasks.create("multilabel", 2).measured(
        iter([(logits[:, [1, 1]], torch.stack([targets, targets], dim=1).float())]), every=True
    )
    assert several["AUROC"] == pytest.approx(0.75)


def test_classes_count_by_their_weights_and_samples_by_how_wrong_the_model_is() -> None:
    """Against PyTorch's own weights, and the focal loss as its paper states it."""
    logits, targets = drawn(50, 3), torch.arange(50) % 3
    plain, weights = F.cross_entropy(logits, targets, reduction="none"), (0.5, 1.0, 4.0)
    weighted = tasks.create("classification", 3, emphasis=Emphasis(weights))
    torch.testing.assert_close(weighted.losses(logits, targets), F.cross_entropy(logits, targets, torch.tensor(weights), reduction="none"))
    own = logits.softmax(dim=1)[torch.arange(50), targets]
    both = tasks.create("classification", 3, emphasis=Emphasis(weights, 2.0))
    torch.testing.assert_close(both.losses(logits, targets), torch.tensor(weights)[targets] * (1 - own) ** 2 * plain)
    torch.testing.assert_close(vmap(both.losses)(logits[:, None], targets[:, None])[:, 0], both.losses(logits, targets))


@pytest.mark.parametrize("focusing", [0.5, 2.0])
def test_a_sample_that_is_certain_or_absent_has_a_finite_gradient(focusing: float) -> None:
    losses = tasks.create("classification", 2, emphasis=Emphasis((1.0, 2.0), focusing)).losses
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [3.0, 1.0]], requires_grad=True)
    losses(logits, torch.tensor([0, 0, NO_TOKEN])).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().min() > 0.9
    assert logits.grad[[0, 2]].abs().max() == 0
