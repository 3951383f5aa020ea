"""Training many clients at once gives what training them one after another gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl import ParameterLayout, models
from ldpfl.data import Dataset, Samples
from ldpfl.server.round_aggregation import Schedule
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, VectorizedTrainer, batch_schedule
from ldpfl.simulation.local_steps import LocalOptimiser
from ldpfl.simulation.local_training import measured
from ldpfl.util.randomness import Purpose, SeededStreams

UNEQUAL = (10, 3, 7, 1, 20, 5, 9, 30, 2, 11)


def task_of(model: str, shape: tuple[int, int, int], samples: int, *, momentum: float = 0.0) -> tuple[LocalTask, Tensor]:
    """Random images are enough: what counts is that two ways of training agree on them."""
    generator = np.random.default_rng(0)
    pixels = torch.from_numpy(generator.integers(0, 256, (samples, *shape), dtype=np.uint8))
    images = Samples(pixels, torch.from_numpy(generator.integers(0, 10, samples)))
    module = models.create(model, shape, 10, seed=1)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    return LocalTask(module, layout, images, (0.5,) * shape[0], (0.25,) * shape[0], LocalOptimiser(0.05, momentum)), weights


def shares(sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def schedule_of(sizes: Sequence[int], *, epochs: int, batch_size: int, clients: Sequence[int] | None = None) -> BatchSchedule:
    parts = shares(sizes)
    chosen = range(len(sizes)) if clients is None else clients
    orders = [SeededStreams.of(chosen, 100, Purpose.BATCH_ORDER, epoch) for epoch in range(epochs)]
    return batch_schedule([parts[client] for client in chosen], orders, batch_size=batch_size)


class _Double(nn.Module):
    """A model whose products are float64."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.inner(images.double())
        return outputs


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("sizes", "batch_size", "epochs"),
    [((20, 20, 20), 5, 5), ((23, 23), 5, 4), (UNEQUAL, 6, 4), ((4, 4, 4), 10, 20)],
    ids=["equal", "partial last batch", "unequal", "batch larger than a client"],
)
@pytest.mark.slow
@pytest.mark.thorough_except("batch larger than a client-0.9")
def test_all_at_once_equals_one_after_another(sizes: tuple[int, ...], batch_size: int, epochs: int, momentum: float) -> None:
    """In float64: a rounding of float32 may decide a maximum of the pooling otherwise, and the two ways part by more than roundings."""
    task, weights = task_of("two-layer-cnn", (1, 20, 20), sum(sizes), momentum=momentum)
    module = _Double(task.module)
    task, weights = replace(task, module=module, layout=ParameterLayout.from_module(module)), weights.double()
    module.double()
    schedule = schedule_of(sizes, epochs=epochs, batch_size=batch_size)
    assert schedule.steps >= 20
    vectorised = VectorizedTrainer(task).train(weights, schedule)
    assert vectorised.shape == (len(sizes), task.layout.dimension)
    torch.testing.assert_close(vectorised, LoopTrainer(task).train(weights, schedule), atol=1e-12, rtol=0)
    moved = (vectorised - weights).abs().amax(dim=1)
    assert float(moved.min()) > 1e-3  # every client has learned something that could differ


@pytest.mark.parametrize(("model", "shape"), [("small-vgg", (3, 16, 16)), ("logistic-regression", (3, 8, 8))])
def test_other_models_agree_with_the_loop_as_well(model: str, shape: tuple[int, int, int]) -> None:
    sizes = (4, 2, 5)
    task, weights = task_of(model, shape, sum(sizes), momentum=0.5)
    schedule = schedule_of(sizes, epochs=2, batch_size=2)
    expected = LoopTrainer(task).train(weights, schedule)
    torch.testing.assert_close(VectorizedTrainer(task).train(weights, schedule), expected, atol=1e-4, rtol=0)
    assert float((expected - weights).abs().amax(dim=1).min()) > 1e-4


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 10), nn.Linear(3, 10)

    def forward(self, right: Tensor, left: Tensor) -> Tensor:
        return torch.as_tensor(self.left(left) * self.right(right))


def test_samples_of_several_tensors_are_trained_on_alike() -> None:
    random = torch.Generator().manual_seed(0)
    inputs = {"left": torch.randn(sum(UNEQUAL), 4, generator=random), "right": torch.randn(sum(UNEQUAL), 3, generator=random)}
    module = _Pair()
    layout = ParameterLayout.from_module(module)
    weights = torch.randn(layout.dimension, generator=random)
    task = LocalTask(module, layout, Samples(inputs, torch.arange(sum(UNEQUAL)) % 10), (), (), LocalOptimiser(0.05, 0.5))
    schedule = schedule_of(UNEQUAL, epochs=2, batch_size=3)
    expected = LoopTrainer(task).train(weights, schedule)
    torch.testing.assert_close(VectorizedTrainer(task).train(weights, schedule), expected, atol=1e-4, rtol=0)
    assert float((expected - weights).abs().amax(dim=1).min()) > 1e-3


@pytest.mark.parametrize(
    ("model", "shape", "momentum"),
    [("two-layer-cnn", (1, 20, 20), 0.5), ("small-vgg", (3, 16, 16), 0.0), ("logistic-regression", (1, 28, 28), 0.0)],
)
@pytest.mark.parametrize("together", [1, 2, 3, 7])
@pytest.mark.thorough_for(
    "2-two-layer-cnn-shape0-0.5",
    "3-two-layer-cnn-shape0-0.5",
    "1-two-layer-cnn-shape0-0.5",
    "3-small-vgg-shape1-0.0",
    "7-small-vgg-shape1-0.0",
    "2-small-vgg-shape1-0.0",
    "1-small-vgg-shape1-0.0",
)
def test_a_client_ends_in_the_same_bits_whoever_is_trained_beside_it(
    model: str, shape: tuple[int, int, int], momentum: float, together: int
) -> None:
    """The chunk size is chosen by timing, so a resumed run may choose another; its model must not change for that."""
    task, weights = task_of(model, shape, sum(UNEQUAL), momentum=momentum)
    trainer = VectorizedTrainer(task)
    everyone = trainer.train(weights, schedule_of(UNEQUAL, epochs=1, batch_size=6))
    pieces = [list(range(start, min(start + together, len(UNEQUAL)))) for start in range(0, len(UNEQUAL), together)]
    parts = [trainer.train(weights, schedule_of(UNEQUAL, epochs=1, batch_size=6, clients=piece)) for piece in pieces]
    assert torch.equal(torch.cat(parts), everyone)


def test_training_follows_the_gradient_step_by_step() -> None:
    """One step of plain SGD, written out by hand."""
    task, weights = task_of("logistic-regression", (1, 4, 4), 3)
    trained = VectorizedTrainer(task).train(weights, schedule_of((3,), epochs=1, batch_size=3))[0]
    leaf = weights.clone().requires_grad_()
    parameters = task.layout.unflatten(leaf)
    pixels, labels = task.batch(torch.arange(3))
    logits = torch.as_tensor(pixels).flatten(1) @ parameters["1.weight"].T + parameters["1.bias"]
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), leaf)
    torch.testing.assert_close(trained, weights - 0.05 * gradient, atol=1e-6, rtol=0)


def test_momentum_does_not_carry_a_finished_client_on() -> None:
    """A client with one batch beside one with many: its result is that of its one step."""
    task, weights = task_of("logistic-regression", (1, 4, 4), 22, momentum=0.9)
    trainer = VectorizedTrainer(task)
    both = trainer.train(weights, schedule_of((2, 20), epochs=1, batch_size=2))
    alone = trainer.train(weights, schedule_of((2, 20), epochs=1, batch_size=2, clients=[0]))
    torch.testing.assert_close(both[0], alone[0], atol=1e-6, rtol=0)
    assert float((both[0] - both[1]).abs().max()) > 1e-3


def test_training_changes_neither_the_model_nor_the_broadcast_weights() -> None:
    task, weights = task_of("two-layer-cnn", (1, 20, 20), 6)
    before, sent = {name: p.clone() for name, p in task.module.named_parameters()}, weights.clone()
    for trainer in (VectorizedTrainer(task), LoopTrainer(task)):
        trainer.train(weights, schedule_of((3, 3), epochs=1, batch_size=2))
    assert torch.equal(weights, sent)
    assert all(torch.equal(p, before[name]) for name, p in task.module.named_parameters())


PULLED = [
    LocalOptimiser(0.05, weight_decay=0.1),
    LocalOptimiser(0.05, proximal=0.5),
    LocalOptimiser(0.05, 0.9, weight_decay=0.1, proximal=0.5),
    LocalOptimiser(0.01, kind="adam"),
    LocalOptimiser(0.01, kind="adam", weight_decay=0.1, proximal=0.5, schedule="cosine", rounds=4),
]


@pytest.mark.thorough_except(
    "LocalOptimiser(learning_rate=0.05, momentum=0.0, kind='sgd', weight_decay=0.1, proximal=0.0, schedule='constant', rounds=1)",
    "LocalOptimiser(learning_rate=0.05, momentum=0.0, kind='sgd', weight_decay=0.0, proximal=0.5, schedule='constant', rounds=1)",
)
@pytest.mark.parametrize("optimiser", PULLED, ids=str)
def test_every_optimiser_is_that_of_torch(optimiser: LocalOptimiser) -> None:
    """Clients of different sizes: one that has finished stands still, whatever adds_to_gradient at it."""
    task, weights = task_of("logistic-regression", (1, 8, 8), sum(UNEQUAL))
    task = replace(task, optimiser=optimiser)
    schedule = schedule_of(UNEQUAL, epochs=2, batch_size=4)
    at_once = VectorizedTrainer(task).train(weights, schedule, 3)
    torch.testing.assert_close(at_once, LoopTrainer(task).train(weights, schedule, 3), rtol=1e-4, atol=1e-5)
    plain = VectorizedTrainer(replace(task, optimiser=LocalOptimiser(optimiser.learning_rate, optimiser.momentum))).train(
        weights, schedule, 3
    )
    assert not torch.allclose(at_once, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("schedule", "factor"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)])
def test_the_learning_rate_follows_its_schedule(schedule: Schedule, factor: float) -> None:
    assert LocalOptimiser(0.2, schedule=schedule, rounds=4).rate(3) == pytest.approx(0.2 * factor)
    assert LocalOptimiser(0.2, schedule=schedule, rounds=4).rate(1) == 0.2


def test_accuracy_counts_what_the_model_gets_right(tiny_task: Dataset) -> None:
    """A model that always answers 3 is right on the 3s."""
    module = models.create("logistic-regression", tiny_task.shape, 10, seed=0)
    layout = ParameterLayout.from_module(module)
    task = LocalTask(module, layout, tiny_task.train, tiny_task.mean, tiny_task.std, LocalOptimiser(0.1))
    weights = torch.zeros(layout.dimension)
    weights[layout.slices["1.bias"]][3] = 1.0
    share = float((tiny_task.test.targets == 3).float().mean())
    assert share == pytest.approx(0.1)
    assert measured(task, weights, tiny_task.test) == {"accuracy": pytest.approx(share)}
