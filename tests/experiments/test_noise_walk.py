"""The server's step for images: as long as noise allows, and never so long that training diverges, whatever the images hold."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ldpfl.experiments.build import mechanism_of, model_of
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.noise_walk import longest_total_step
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.table_rules import choose_automatic_settings
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout

BETWEEN = torch.tensor([1.0, -1.0]) / sqrt(2)
CLIP, CLIENTS = 30.0, 4


def chosen(noise: float, shape: tuple[int, ...] = (1, 28, 28), model: str = "linear", given: nn.Module | None = None) -> tuple[Any, float]:
    """Return the training settings that ``auto`` chooses, and the noise of the mean gradient, all rounds taken together."""
    of_mechanism = [f"mechanism.{name}={value}" for name, value in (("noise_multiplier", noise), ("clip_norm", CLIP), ("records", 250))]
    config = load_recipe("own", ["privacy.target_epsilon='off'", f"model.name='{model}'", f"clients.count={CLIENTS}", *of_mechanism])
    data = Description(shape, 2, records=1000)
    module = model_of(config, data, given)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: part.detach() for name, part in module.named_parameters()})
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (layout.dimension,))
    mechanism = mechanism_of(config, ranges)
    start = choose_automatic_settings(config, data, module, layout, weights, mechanism, CLIENTS, ())
    spread = float(mechanism.noise(ranges).largest_std(CLIENTS)[0]) * CLIP / sqrt(config.training.rounds)
    return start.config.training, spread


@pytest.mark.parametrize("size", [16, 28])
def test_noise_moves_an_output_of_a_linear_model_by_one(size: int) -> None:
    """All steps together times the noise, for a row as long as its pixels make it; there is no pull. Within 35 %: 64 drawn changes."""
    training, noise = chosen(100.0, (1, size, size))
    length = training.server_learning_rate / CLIP * training.rounds / (1 - training.server_momentum)
    assert length * noise * sqrt(size**2 + 1) == pytest.approx(1, rel=0.35)
    assert training.server_weight_decay == 0
    assert chosen(200.0, (1, size, size))[0].server_learning_rate == pytest.approx(training.server_learning_rate / 2, rel=0.05)


def test_a_step_without_noise_is_stable_for_the_brightest_images() -> None:
    """A softmax of two classes has a curvature of 1/2 at most; heavy ball diverges from 2 (1 + b) / L on."""
    rates = [chosen(noise)[0].server_learning_rate for noise in (1e-3, 1e-2)]
    assert rates[0] == rates[1]
    white = 4.0 * 28**2
    edge = 2 * 1.8 / (white / 2) * CLIP
    assert 0.9 < rates[0] / edge < 1.1


def test_noise_in_two_layers_multiplies() -> None:
    """A model whose output is a product of its weights: noise of each is small, and that of both together is not."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(400, 2)), nn.Parameter(torch.zeros(400, 2))

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.first * self.second).sum(dim=0).expand(len(inputs), 2)

    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    # The outputs' difference is a sum of 800 products of two normal deviates, over sqrt(2): 20 s^2.
    found = longest_total_step(Products(), inputs, BETWEEN, noise=0.01, max_change=1.0, max_length=1e6)
    assert 20 * (0.01 * found) ** 2 == pytest.approx(1, rel=0.7)  # four draws: false alarm below 1 in 1,000, and the seed is fixed


def test_noise_that_makes_outputs_infinite_moves_them_too_far() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.weight * 1e30).exp().expand(len(inputs), 2)

    found = longest_total_step(Steep(), torch.zeros(16, 3), BETWEEN, noise=1.0, max_change=1.0, max_length=1.0)
    assert 0 < found < 1e-17


@pytest.mark.thorough
def test_a_convolutional_network_gets_a_step_of_its_own() -> None:
    """It is shorter with more noise, faster than in proportion where noise multiplies from layer to layer."""
    few, many = (chosen(noise, model="two-layer-cnn")[0].server_learning_rate for noise in (30.0, 300.0))
    assert 0 < many < few / 5


def test_a_model_of_one_row_at_a_time_gets_a_step_too() -> None:
    """What a user's own module does with several rows is not relied on."""

    class OneRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(784, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.as_tensor(self.line(inputs.reshape(1, 784)))

    training, _ = chosen(100.0, given=OneRow())
    assert training.server_learning_rate == pytest.approx(chosen(100.0)[0].server_learning_rate, rel=0.35)
