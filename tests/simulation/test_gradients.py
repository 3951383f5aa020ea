"""Gradients of clients and of single records, against autograd, one at a time."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ldpfl import ConfigError, ParameterLayout, models, tasks
from ldpfl.data.dataset import Dataset
from ldpfl.data.partition import LABEL_BLIND, Scheme, partition
from ldpfl.data.samples import Samples
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.privacy import GaussianRelease
from ldpfl.simulation import GradientTrainer, LocalTask, RecordGradientTrainer, gradients
from ldpfl.simulation.cohort_training import train_clients
from ldpfl.simulation.gradients import confined
from ldpfl.simulation.local_steps import LocalOptimiser, full_batch, poisson_batch
from ldpfl.util.randomness import SeededStreams

SIZES = (1, 7, 3)
SUMMED = "summed_grad"  # where Opacus keeps what it adds up


def task_of(model: str, shape: tuple[int, ...], count: int = sum(SIZES), outputs: int = 10) -> tuple[LocalTask, nn.Module, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = (
        torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8) if len(shape) == 3 else torch.randn(count, *shape)
    )
    samples = Samples(inputs, torch.randint(0, outputs, (count,), generator=generator))
    module = models.create(model, shape, outputs, seed=3)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    return LocalTask(module, layout, samples, (0.5,), (0.5,), LocalOptimiser(1.0)), module, weights


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
    task.data.tensor[2] = float("nan")
    with_it = RecordGradientTrainer(task, RecordClip(0.01)).train(weights, full_batch([np.array([1, 2, 3])], 3))
    without = RecordGradientTrainer(task, RecordClip(0.01)).train(weights, full_batch([np.array([1, 3])], 2))
    assert torch.equal(with_it, without)


@pytest.mark.thorough_except("True")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_record_that_raises_stops_a_simulation_and_adds_nothing_on_a_node(at_once: bool) -> None:
    """There, all others keep their gradients to the last bit: where each lies decides how it is rounded."""
    task, _, weights = task_of("mlp", (30,))
    trainer, whole = RecordGradientTrainer(task, RecordClip(0.01), at_once), full_batch(PARTS, max(SIZES))
    task.data.tensor[5] = float("nan")
    without = trainer.train(weights, whole)
    task.data.targets[5] = 10  # classes are 0 to 9
    with pytest.raises((IndexError, RuntimeError)):
        trainer.train(weights, whole)
    assert torch.equal(confined(trainer).train(weights, whole), without)
    task.data.targets[1:8] = 10
    found = confined(trainer).train(weights, whole)
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert torch.equal(found[[0, 2]], without[[0, 2]])


def test_what_fails_for_another_reason_than_a_record_stops_a_node_s_training_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, weights = task_of("mlp", (30,))
    together = gradients._negative_gradients

    def short_of_memory(*given: Any, **more: Any) -> torch.Tensor:
        if len(given[2]) > 1:
            raise MemoryError
        return together(*given, **more)

    monkeypatch.setattr(gradients, "_negative_gradients", short_of_memory)
    with pytest.raises(MemoryError):
        confined(RecordGradientTrainer(task, RecordClip(0.01))).train(weights, full_batch(PARTS, max(SIZES)))


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


@pytest.mark.parametrize("norm", [0.02, 1.0])
def test_opacus_clips_and_adds_up_the_same_gradients(norm: float) -> None:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    task, module, weights = task_of("mlp", (30,))
    places = np.arange(0, 11)
    found = RecordGradientTrainer(task, RecordClip(norm)).train(weights, full_batch([places], 11))[0]
    wrapped = GradSampleModule(module)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=norm, expected_batch_size=1, loss_reduction="sum"
    )
    inputs, labels = task.batch(torch.from_numpy(places))
    F.cross_entropy(wrapped(torch.as_tensor(inputs).requires_grad_()), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    optimizer.clip_and_accumulate()
    summed = {name: getattr(p, SUMMED) for name, p in module.named_parameters()}
    torch.testing.assert_close(found.double() * norm / STEPS, -task.layout.flatten(summed).double(), atol=norm * 1e-4, rtol=1e-3)


def test_poisson_batches_take_each_record_by_a_coin_of_its_own() -> None:
    """2,000 records at 0.3: a count within 5 standard deviations, so wrong less than once in a million; another batch a round."""
    whole = full_batch([np.arange(2000), np.arange(500)], 2000)
    batches = [poisson_batch(whole, 0.3, SeededStreams.for_clients(seed, 1, range(2))) for seed in range(2)]
    for batch in batches:
        assert abs(float(batch.mask[0].sum()) - 600) < 5 * sqrt(2000 * 0.21)
        assert (batch.mask <= whole.mask).all()
        assert torch.equal(batch.index, whole.index)
    assert not torch.equal(batches[0].mask, batches[1].mask)


def test_a_record_s_coin_moves_no_other_record_s_gradient() -> None:
    """The bound compares a batch with a record and the same batch without it, here one that adds nothing: to the last bit."""
    task, _, weights = task_of("two-layer-cnn", (1, 28, 28), 70)
    task = replace(task, data=Samples(task.data.tensor / 255, task.data.targets))
    task.data.tensor[20] = float("nan")
    trainer, whole = RecordGradientTrainer(task, RecordClip(0.3)), full_batch([np.arange(70)], 70)
    mask = whole.mask.clone()
    mask[0, 0, 20] = 0
    assert torch.equal(trainer.train(weights, whole), trainer.train(weights, replace(whole, mask=mask)))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_poisson_batch_stands_for_the_whole_one(tiny_task: Dataset) -> None:
    """Over 400 batches: the mean report is the whole batch's, within 6 standard errors a weight."""
    overrides = [
        "model.name=linear",
        "clients.count=1",
        "mechanism.name=dp-sgd",
        "mechanism.noise_multiplier=0.01",
        "shuffling.channel=direct",
    ]
    reports = {}
    for rate in (0.25, 1.0):
        config = parse_config("", [*overrides, f"mechanism.sample_rate={rate}"], origin="test")
        federation, start = build(config, tiny_task, torch.device("cpu"))
        ranges, mechanism = start.state.ranges, federation.mechanism
        release = mechanism.release(ranges)
        assert isinstance(release, GaussianRelease)
        assert release.rate == rate
        assert mechanism.properties.deployable == (rate == 1)
        drawn = []
        for seed in range(400 if rate < 1 else 1):
            sums = train_clients(replace(federation, secret_seed=seed, coin_seed=seed), start.state, np.array([0]))
            drawn.append(mechanism.decode(mechanism.encode(sums, ranges, SeededStreams.for_clients(seed, 1, [0])), ranges)[0])
        reports[rate] = torch.stack(drawn).double()
    error = reports[0.25].std(dim=0) / 20
    assert bool(((reports[0.25].mean(dim=0) - reports[1.0][0]).abs() <= 6 * error + 1e-4).all())
    assert not torch.equal(reports[0.25][0], reports[0.25][1])


@pytest.mark.parametrize("division", [["data.partition=dirichlet"], ["data.partition=labels"], ["data.private_label=7"]])
def test_one_record_must_not_decide_where_others_go(division: list[str], tiny_task: Dataset) -> None:
    overrides = ["model.name=linear", "clients.count=5", "mechanism.name=dp-sgd", "shuffling.channel=direct"]
    with pytest.raises(ConfigError, match="one record affects the client of others"):
        build(parse_config("", [*overrides, *division], origin="test"), tiny_task, torch.device("cpu"))


@pytest.mark.parametrize("scheme", sorted(LABEL_BLIND))
def test_replacing_a_record_leaves_all_others_with_their_clients(scheme: Scheme) -> None:
    labels = np.random.default_rng(1).integers(0, 10, 200)
    before = partition(labels, 7, np.random.default_rng(2), scheme=scheme)
    labels[13] = (labels[13] + 1) % 10
    after = partition(labels, 7, np.random.default_rng(2), scheme=scheme)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", tasks.names())
def test_a_record_without_an_answer_adds_nothing(name: str) -> None:
    """Not even where all others' gradients are as long as they may be: a row that a node's rules leave out shows as its own share only."""
    shape, outputs = ((5,), 3) if name != "language-model" else ((4,), 7)
    one_number = name in ("regression", "poisson")
    task = tasks.create(name, 1 if one_number else outputs)
    module: nn.Module = nn.Linear(5, 1 if one_number else outputs)
    inputs, targets = torch.randn(8, *shape, generator=torch.Generator().manual_seed(1)), torch.arange(8) % outputs
    if name == "language-model":
        module, inputs, targets = nn.Embedding(7, 7), targets[:, None].expand(-1, 4), targets[:, None].repeat(1, 4)
    elif name not in ("classification", "ordinal"):
        targets = targets.float() if one_number else nn.functional.one_hot(targets, outputs).float()
    absent = targets.clone()
    absent[3] = tasks.ABSENT[task.targets]
    assert tasks.absent_targets(absent).tolist() == [place == 3 for place in range(8)]
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({key: value.detach() for key, value in module.named_parameters()})

    def summed(answers: torch.Tensor, places: np.ndarray) -> torch.Tensor:
        local = LocalTask(module, layout, Samples(inputs, answers), (), (), LocalOptimiser(1.0), task=task)
        return RecordGradientTrainer(local, RecordClip(1.0)).train(weights, full_batch([places], len(places)))

    everything, rest = np.arange(8), np.array([0, 1, 2, 4, 5, 6, 7])
    assert torch.equal(summed(absent, everything), summed(targets, rest))
    assert not torch.equal(summed(absent, everything), summed(targets, everything))


@pytest.mark.parametrize("width", [30, 519])
def test_a_client_s_sum_is_the_same_whoever_is_there_as_well(width: int) -> None:
    """To the last lattice point: noise that follows from what it hides would be another one. Rows of 519 floats begin anywhere."""
    task, _, weights = task_of("linear", (width,), 900, 2)
    weights = weights + 0.1 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    trainer = RecordGradientTrainer(task, RecordClip(0.5))
    sizes, nobody = (7, 33, 1, 300, 16, 41, 2, 250, 5), 6

    def sums(first: int, last: int) -> torch.Tensor:
        schedule = full_batch(parts[first:last], max(sizes))
        if first <= nobody < last:  # none of whose records were drawn
            schedule.mask[nobody - first] = 0
        return trainer.train(weights, schedule)

    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    together = sums(0, len(parts))
    for first in range(len(parts) - 2):
        assert torch.equal(sums(first, first + 3), together[first : first + 3])
    assert int(together[nobody].abs().sum()) == 0
    assert int(together.abs().sum(dim=1).gt(0).sum()) == len(parts) - 1
