"""Gradients of clients and of single records, against autograd, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ldpfl import ConfigError, ParameterLayout, models
from ldpfl.data.samples import Dataset, Samples
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.mechanisms.records import STEPS, RecordClip
from ldpfl.simulation import GradientTrainer, LocalTask, RecordGradientTrainer
from ldpfl.simulation.schedule import full_batch

SIZES = (1, 7, 3)


def task_of(model: str, shape: tuple[int, ...]) -> tuple[LocalTask, nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = sum(SIZES)
    inputs = (
        torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8) if len(shape) == 3 else torch.randn(count, *shape)
    )
    samples = Samples(inputs, torch.randint(0, 10, (count,), generator=generator))
    module = models.create(model, shape, 10, seed=3)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    return LocalTask(module, layout, samples, (0.5,), (0.5,), 1.0), module, weights


def own(task: LocalTask, module: nn.Module, places: np.ndarray) -> torch.Tensor:
    """Return minus the gradient of the mean loss at ``places``, by autograd."""
    module.zero_grad()
    inputs, labels = task.batch(torch.from_numpy(places))
    F.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
    return -task.layout.flatten({name: p.grad for name, p in module.named_parameters() if p.grad is not None})


PARTS = [np.arange(0, 1), np.arange(1, 8), np.arange(8, 11)]


@pytest.mark.parametrize(("model", "shape"), [("two-layer-cnn", (1, 16, 16)), ("mlp", (30,)), ("linear", (30,))])
def test_a_clients_gradient_is_that_of_its_mean_loss(model: str, shape: tuple[int, ...]) -> None:
    task, module, weights = task_of(model, shape)
    found = GradientTrainer(task).train(weights, full_batch(PARTS, max(SIZES)))
    for row, places in zip(found, PARTS, strict=True):
        torch.testing.assert_close(row, own(task, module, places), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("model", "shape"), [("two-layer-cnn", (1, 16, 16)), ("mlp", (30,))])
@pytest.mark.parametrize("norm", [0.02, 1.0, 100.0])
def test_records_are_clipped_one_by_one(model: str, shape: tuple[int, ...], norm: float) -> None:
    task, module, weights = task_of(model, shape)
    found = RecordGradientTrainer(task, RecordClip(norm)).train(weights, full_batch(PARTS, max(SIZES)))
    assert found.dtype == torch.int64
    for row, places in zip(found, PARTS, strict=True):
        total = torch.zeros(task.layout.dimension, dtype=torch.float64)
        for place in places:
            gradient = own(task, module, np.array([place])).double()
            total += gradient * min(1.0, norm / float(gradient.norm()))
        torch.testing.assert_close(row.double() * norm / STEPS, total, atol=norm * 1e-4, rtol=1e-3)


def test_replacing_a_record_moves_the_sum_by_two_norms_at_most() -> None:
    task, _, weights = task_of("mlp", (30,))
    trainer = RecordGradientTrainer(task, RecordClip(0.01))
    before = trainer.train(weights, full_batch([np.arange(0, 7)], 7))
    for other in (7, 8, 9):
        after = trainer.train(weights, full_batch([np.array([other, *range(1, 7)])], 7))
        difference = (after - before)[0].tolist()
        assert sum(value**2 for value in difference) <= (2 * STEPS) ** 2


def test_a_record_with_no_usable_gradient_counts_as_nothing() -> None:
    task, _, weights = task_of("linear", (30,))
    task.images.inputs[2] = float("nan")
    with_it = RecordGradientTrainer(task, RecordClip(0.01)).train(weights, full_batch([np.array([1, 2, 3])], 3))
    without = RecordGradientTrainer(task, RecordClip(0.01)).train(weights, full_batch([np.array([1, 3])], 2))
    assert torch.equal(with_it, without)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mechanism.name=dp-sgd", "training.momentum=0.5"],
        ["mechanism.name=dp-sgd", "training.clip_norm=1.0"],
        ["mechanism.name=duchi", "mechanism.perturbed=gradient", "training.momentum=0.5"],
    ],
)
def test_what_a_single_gradient_has_no_use_for_is_refused(overrides: list[str], tiny_task: Dataset) -> None:
    config = parse_config("", ["model.name=linear", "clients.count=5", *overrides], origin="test")
    with pytest.raises(ConfigError, match="leave"):
        build(config, tiny_task, torch.device("cpu"))
