"""The attack depends on its arguments alone, and learns what an unprotected model knows of a class it has no image of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from conftest import CLASSES
from ldpfl import ParameterLayout, models
from ldpfl.attacks import GanConfig, Generator, Target, attack, generate, train_generator
from ldpfl.attacks.gan import shifted
from ldpfl.data import Dataset, Samples
from ldpfl.errors import ConfigError, DataError
from ldpfl.models import InputShape

QUICK = GanConfig(steps=3, batch_size=8, latent=4, width=8)
LABEL = 3


def target_of(task: Dataset, *, steps: int = 0) -> Target:
    """A two-layer CNN for the bars of ``task``, trained for some steps."""
    module = models.create("two-layer-cnn", task.shape, CLASSES, seed=1)
    layout = ParameterLayout.from_module(module)
    target = Target(module, layout, torch.empty(0), CLASSES, task.mean, task.std)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    optimiser = torch.optim.Adam(parameters.values(), 3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(target.logits(parameters, task.train.tensor.float() / 255), task.train.targets).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return replace(target, weights=layout.flatten({name: p.detach() for name, p in parameters.items()}))


def without(images: Samples, label: int) -> Samples:
    return images.take((images.targets != label).nonzero()[:, 0])


@pytest.fixture(scope="module")
def own(tiny_task: Dataset) -> Samples:
    return without(tiny_task.train, LABEL).take(torch.arange(60))


@pytest.fixture(scope="module")
def target(tiny_task: Dataset) -> Target:
    return target_of(tiny_task)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 20, 20), (2, 17, 30)])
def test_a_generator_gives_images_of_the_shape_in_the_unit_range(shape: InputShape) -> None:
    generator = Generator(shape, 7, latent=5, width=8)
    images = generator(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), torch.arange(6))
    assert images.shape == (6, *shape)
    assert images.min() >= 0
    assert images.max() <= 1


def test_equal_arguments_give_equal_images_whatever_the_global_state(target: Target, own: Samples) -> None:
    torch.manual_seed(1)
    _, first = attack(target, own, LABEL, 5, QUICK, 7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    _, again = attack(target, own, LABEL, 5, QUICK, 7)
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())  # and the attack leaves that state as it was
    assert not torch.equal(first, attack(target, own, LABEL, 5, QUICK, 8)[1])
    assert (first.shape, first.dtype) == ((5, 1, 20, 20), torch.uint8)


def test_the_global_model_and_the_images_are_left_as_they_were(target: Target, own: Samples) -> None:
    weights, module = target.weights.clone(), {name: p.detach().clone() for name, p in target.module.named_parameters()}
    pixels = own.tensor.clone()
    train_generator(target, own, LABEL, QUICK, 0)
    assert torch.equal(weights, target.weights)
    assert torch.equal(pixels, own.tensor)
    assert all(torch.equal(module[name], p) for name, p in target.module.named_parameters())
    assert all(p.grad is None for p in target.module.parameters())


def test_weights_come_from_the_broadcast_not_from_the_module(target: Target, own: Samples) -> None:
    other = replace(target, weights=target.weights + 0.1)
    assert not torch.equal(attack(target, own, LABEL, 5, QUICK, 7)[1], attack(other, own, LABEL, 5, QUICK, 7)[1])


def test_more_images_than_are_made_at_once(target: Target, own: Samples) -> None:
    generator = train_generator(target, own, LABEL, QUICK, 0)
    many = generate(generator, LABEL, 300, 1)
    assert many.shape == (300, 1, 20, 20)
    assert torch.equal(many, generate(generator, LABEL, 300, 1))
    assert len(torch.unique(many.flatten(1), dim=0)) == 300


@pytest.mark.slow
@pytest.mark.thorough
def test_an_unprotected_model_gives_its_class_away_and_an_untrained_one_does_not(tiny_task: Dataset, own: Samples) -> None:
    """A bar marks the label by its rows; no image of the attacker has one in these rows, so only the model can tell.

    No chance is involved: seeds are fixed.
    """
    config = GanConfig(steps=150, batch_size=32, latent=8, width=16, shift=0)
    found: list[float] = []
    for steps in (40, 0):
        images = attack(target_of(tiny_task, steps=steps), own, LABEL, 50, config, 0)[1].float() / 255
        rows = images.mean(dim=(0, 1, 3))
        found.append(float(rows[2 * LABEL : 2 * LABEL + 2].mean() - rows.mean()))
    trained, untrained = found
    assert trained > 0.15
    assert untrained < trained / 2


def test_progress_counts_every_step_and_may_stop_the_attack(target: Target, own: Samples) -> None:
    seen: list[tuple[int, int]] = []
    train_generator(target, own, LABEL, QUICK, 0, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_generator(target, own, LABEL, QUICK, 0, stop)


def test_a_client_that_holds_the_label_alone_can_attack_too(target: Target, tiny_task: Dataset) -> None:
    only = tiny_task.train.take((tiny_task.train.targets == LABEL).nonzero()[:1, 0])
    assert attack(target, only, LABEL, 2, QUICK, 0)[1].shape == (2, 1, 20, 20)


@pytest.mark.parametrize(("offset", "rows", "columns"), [((0, 0), 0, 0), ((1, -2), 1, -2), ((-3, 3), -3, 3)])
def test_a_shift_moves_every_pixel_and_fills_with_black(offset: Sequence[int], rows: int, columns: int) -> None:
    image = torch.arange(1.0, 50.0).view(1, 1, 7, 7)
    moved = shifted(image, torch.tensor([offset]))
    for row in range(7):
        for column in range(7):
            come_from = row - rows, column - columns
            inside = 0 <= come_from[0] < 7 and 0 <= come_from[1] < 7
            assert moved[0, 0, row, column] == (image[0, 0, come_from[0], come_from[1]] if inside else 0)


def test_each_image_has_its_own_shift_for_all_its_channels() -> None:
    images = torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    moved = shifted(images, torch.tensor([[0, 0], [1, 0]]))
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, :, 1:], images[1, :, :-1])


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_outside_the_classes_is_refused(target: Target, own: Samples, label: int) -> None:
    with pytest.raises(ConfigError, match="0 to 9"):
        train_generator(target, own, label, QUICK, 0)
    with pytest.raises(ConfigError, match="label must be 0 to 9"):
        generate(Generator((1, 20, 20), CLASSES), label, 1, 0)


def test_nothing_to_learn_from_is_refused(target: Target, own: Samples) -> None:
    with pytest.raises(DataError, match="has no images"):
        train_generator(target, own.take(torch.arange(0)), LABEL, QUICK, 0)
    with pytest.raises(DataError, match="NaN or infinite weights"):
        train_generator(replace(target, weights=target.weights * float("nan")), own, LABEL, QUICK, 0)
    with pytest.raises(DataError, match="NaN or infinite at step"):
        train_generator(replace(target, weights=target.weights * 1e30), own, LABEL, QUICK, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_size", 1),
        ("latent", 0),
        ("width", 3),
        ("shift", -1),
        ("noise", -0.1),
        ("noise", float("nan")),
        ("label_share", 0.0),
        ("label_share", 1.0),
        ("class_weight", 0.0),
        ("generator_learning_rate", float("inf")),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(QUICK, **{name: value})  # type: ignore[arg-type]
