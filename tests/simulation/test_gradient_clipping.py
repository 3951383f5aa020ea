"""A client's gradient is shortened to ``clip_norm`` as a whole, and to nothing else's measure but its own."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_local_training import UNEQUAL, schedule_of, task_of
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import TINY_TOML
from ldpfl import ParameterLayout
from ldpfl.data import Dataset, Samples
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.baseline import config_without_noise
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, VectorizedTrainer
from ldpfl.simulation.local_steps import LocalOptimiser

TRAINERS = [VectorizedTrainer, LoopTrainer]
AnyTrainer = type[VectorizedTrainer] | type[LoopTrainer]


def with_torch(task: LocalTask, weights: Tensor, schedule: BatchSchedule) -> tuple[Tensor, list[float]]:
    """Return what PyTorch's own clipping trains, one client after another, and the norms that it met."""
    assert task.clip_norm is not None
    trained, norms = [], []
    for indices, masks in zip(schedule.index, schedule.mask, strict=True):
        module = copy.deepcopy(task.module)
        nn.utils.vector_to_parameters(weights.clone(), module.parameters())
        optimiser = torch.optim.SGD(module.parameters(), lr=task.optimiser.learning_rate, momentum=task.optimiser.momentum)
        for index, mask in zip(indices, masks, strict=True):
            if not mask.any():
                continue
            pixels, labels = task.batch(index[mask > 0])
            optimiser.zero_grad()
            F.cross_entropy(module(pixels), labels).backward()  # type: ignore[no-untyped-call]
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), task.clip_norm)))
            optimiser.step()
        trained.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return torch.stack(trained), norms


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("model", "shape", "clip_norm"), [("two-layer-cnn", (1, 20, 20), 2.0), ("logistic-regression", (3, 8, 8), 12.0)])
@pytest.mark.slow
@pytest.mark.thorough_except(
    "logistic-regression-shape1-12.0-0.0-VectorizedTrainer", "logistic-regression-shape1-12.0-0.9-VectorizedTrainer"
)
def test_clipping_is_that_of_torch(model: str, shape: tuple[int, int, int], clip_norm: float, momentum: float, trainer: AnyTrainer) -> None:
    """Clients of unequal size, so with steps that are blanked out; gradients on both sides of the norm."""
    task, weights = task_of(model, shape, sum(UNEQUAL), momentum=momentum)
    schedule = schedule_of(UNEQUAL, epochs=2, batch_size=6)
    clipping = replace(task, clip_norm=clip_norm)
    expected, norms = with_torch(clipping, weights, schedule)
    assert min(norms) < 0.9 * clip_norm
    assert max(norms) > 1.1 * clip_norm
    trained = trainer(clipping).train(weights, schedule)
    torch.testing.assert_close(trained, expected, atol=2e-5, rtol=0)
    assert float((trained - trainer(task).train(weights, schedule)).abs().max()) > 1e-3  # clipping was not idle


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip_norm", [1e4, 1e300])
@pytest.mark.thorough_for(
    "10000.0-0.0-LoopTrainer", "10000.0-0.0-VectorizedTrainer", "1e+300-0.9-LoopTrainer", "1e+300-0.9-VectorizedTrainer"
)
def test_a_norm_that_no_gradient_reaches_changes_no_bit(clip_norm: float, momentum: float, trainer: AnyTrainer) -> None:
    task, weights = task_of("two-layer-cnn", (1, 20, 20), 23, momentum=momentum)
    schedule = schedule_of((7, 1, 15), epochs=2, batch_size=5)
    trained = trainer(replace(task, clip_norm=clip_norm)).train(weights, schedule)
    assert torch.equal(trained, trainer(task).train(weights, schedule))


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("std", "steps"), [(0.25, 4), (1e-25, 1)], ids=["ordinary gradients", "one whose squares overflow float32"])
def test_with_a_small_norm_each_step_is_as_long_as_the_norm_says(std: float, steps: int, trainer: AnyTrainer) -> None:
    """From weights 0, so that steps this short are not lost in rounding."""
    task, weights = task_of("logistic-regression", (1, 4, 4), 24)
    clipping, start = replace(task, std=(std,), clip_norm=1e-6), torch.zeros_like(weights)
    schedule = schedule_of((12, 12), epochs=1, batch_size=3)
    places = [start.expand(2, -1), *(trainer(clipping).train(start, schedule.head(step + 1)) for step in range(steps))]
    for before, after in pairwise(places):
        torch.testing.assert_close((after - before).norm(dim=1), torch.full((2,), 0.05 * 1e-6), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape", "clip_norm", "momentum"),
    [("two-layer-cnn", (1, 20, 20), 2.0, 0.5), ("small-vgg", (3, 8, 8), 0.7, 0.0), ("logistic-regression", (1, 28, 28), 12.0, 0.9)],
)
@pytest.mark.thorough_for("two-layer-cnn-shape0-2.0-0.5", "small-vgg-shape1-0.7-0.0")
def test_a_client_ends_in_the_same_bits_whoever_is_clipped_beside_it(
    model: str, shape: tuple[int, int, int], clip_norm: float, momentum: float
) -> None:
    """As without clipping; among clients of other sizes, which go on when this one has finished."""
    sizes = UNEQUAL * 4
    task, weights = task_of(model, shape, sum(sizes), momentum=momentum)
    trainer = VectorizedTrainer(replace(task, clip_norm=clip_norm))
    everyone = trainer.train(weights, schedule_of(sizes, epochs=1, batch_size=6))
    moved = (everyone != VectorizedTrainer(task).train(weights, schedule_of(sizes, epochs=1, batch_size=6))).any(dim=1)
    assert 5 <= int(moved.sum()) <= 40  # clipping was not idle
    for together in (1, 2, 7):
        pieces = [range(start, min(start + together, 40)) for start in range(0, 40, together)]
        parts = [trainer.train(weights, schedule_of(sizes, epochs=1, batch_size=6, clients=piece)) for piece in pieces]
        assert torch.equal(torch.cat(parts), everyone)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_zero_gradient_stays_zero(trainer: AnyTrainer) -> None:
    """A model that is certain of label 3: right on client 0, where nothing is left to learn, and wrong on client 1."""
    task, weights = task_of("logistic-regression", (1, 4, 4), 4)
    labels = torch.tensor([3, 3, 5, 5])
    certain = torch.zeros_like(weights)
    certain[task.layout.slices["1.bias"]][3] = 1000.0
    clipping = replace(task, data=Samples(task.data.inputs, labels), clip_norm=0.1)
    trained = trainer(clipping).train(certain, schedule_of((2, 2), epochs=1, batch_size=2))
    assert torch.equal(trained[0], certain)
    moved = trained[1] - certain
    moved[task.layout.slices["1.bias"]][3] = 0.0  # too small a step for a weight of 1000
    assert 0 < float(moved.norm()) <= 0.1 * 0.05


class Rooted(nn.Module):
    """A linear layer and one more weight, whose gradient on black images is infinite, or 0 * infinity, while all others' are finite."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.root = nn.Parameter(torch.zeros(1) if kind == "infinite" else torch.ones(1))
        self.kind = kind
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        brightness = images.mean(dim=(1, 2, 3))
        inner = self.root + brightness if self.kind == "infinite" else self.root * brightness
        first = torch.arange(10) == 0
        return torch.as_tensor(self.linear(images.flatten(1)) + inner.sqrt()[:, None] * first)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("kind", ["infinite", "not a number"])
def test_a_gradient_that_is_not_finite_becomes_nan_as_a_whole_and_no_one_elses_does(kind: str, trainer: AnyTrainer) -> None:
    """One weight of 171 is the cause; a mechanism that sends a few weights would hardly meet it."""
    module = Rooted(kind)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    pixels = torch.full((6, 1, 4, 4), 100, dtype=torch.uint8)
    pixels[2:4] = 0
    task = LocalTask(module, layout, Samples(pixels, torch.arange(6)), (0.0,), (1.0,), LocalOptimiser(0.05), clip_norm=0.1)
    unclipped = trainer(replace(task, clip_norm=None)).train(weights, schedule_of((2, 2, 2), epochs=1, batch_size=2))
    assert (~unclipped.isfinite()).sum(dim=1).tolist() == [0, 1, 0]
    trained = trainer(task).train(weights, schedule_of((2, 2, 2), epochs=1, batch_size=2))
    assert bool(trained[1].isnan().all())
    assert bool(trained[[0, 2]].isfinite().all())
    assert torch.equal(trained[[0, 2]], trainer(task).train(weights, schedule_of((2, 2, 2), epochs=1, batch_size=2, clients=(0, 2))))


class TwinBiases(nn.Module):
    """Two weights that enter as their sum, so that both may be handed the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(10))
        self.right = nn.Parameter(torch.zeros(10))

    def forward(self, images: Tensor) -> Tensor:
        return (self.left + self.right).expand(len(images), 10)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_weights_that_share_a_gradient_are_clipped_once(trainer: AnyTrainer) -> None:
    module = TwinBiases()
    images = Samples(torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 1, 1]))
    task = LocalTask(module, ParameterLayout.from_module(module), images, (0.0,), (1.0,), LocalOptimiser(0.05), clip_norm=0.01)
    trained = trainer(task).train(torch.zeros(20), schedule_of((2, 2), epochs=1, batch_size=2))
    torch.testing.assert_close(trained.norm(dim=1), torch.full((2,), 0.05 * 0.01), rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_norm_that_is_not_positive_and_finite_is_refused(clip_norm: float) -> None:
    task, _ = task_of("logistic-regression", (1, 4, 4), 2)
    with pytest.raises(ConfigError, match="clip_norm must be positive and finite"):
        replace(task, clip_norm=clip_norm)


def parse(*overrides: str) -> RunConfig:
    return parse_config(TINY_TOML, overrides, origin="test")


@pytest.mark.parametrize("value", ["0", "0.0", "-1.0", "nan", "inf", "true", "on", "[1.0]"])
def test_a_config_gives_a_positive_norm_or_off(value: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.clip_norm") as caught:
        parse(f"training.clip_norm={value}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("overrides", "clip_norm"), [([], None), (["training.clip_norm=off"], None), (["training.clip_norm=2"], 2.0)])
def test_the_norm_reaches_training_and_that_of_the_noise_free_baseline(
    overrides: list[str], clip_norm: float | None, tiny_task: Dataset
) -> None:
    """Clipping belongs to training, not to the noise: without it the baseline would not show what the noise costs."""
    config = parse(*overrides)
    assert parse_config(config.to_toml(), (), origin="test") == config
    for each in (config, config_without_noise(config)):
        federation, _ = build(each, tiny_task, torch.device("cpu"))
        assert federation.task.clip_norm == clip_norm
        assert federation.trainer == VectorizedTrainer(federation.task)
