"""Steps of the server: momentum, schedules, averages, and what is measured and not trained."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from ldpfl.server import ServerOptimiser


def walk(optimiser: ServerOptimiser, means: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weights, velocity, average = torch.zeros(3), None, None
    for number, mean in enumerate(means, start=1):
        velocity = optimiser.velocity(velocity, mean, number)
        weights = weights + optimiser.rate(number) * velocity
        average = optimiser.average_weights(average, weights, number)
    return weights, average


def means(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.3, 0.9)])
def test_steps_are_those_of_torch_sgd(rate: float, momentum: float) -> None:
    parameter = torch.zeros(3, requires_grad=True)
    sgd = torch.optim.SGD([parameter], lr=rate, momentum=momentum)
    for mean in means(6):
        parameter.grad = -mean
        sgd.step()
    found, average = walk(ServerOptimiser(rate, momentum, rounds=6), means(6))
    torch.testing.assert_close(found, parameter.detach())
    assert average is None


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_adaptive_steps_are_those_of_the_paper(rule: Literal["adam", "yogi"]) -> None:
    """Reddi et al. 2021, algorithm 2, weight by weight in plain Python."""
    beta, beta_2, tau, rate = 0.9, 0.99, 1e-3, 0.1
    optimiser, weights, velocity, size = ServerOptimiser(rate, beta, rule=rule), torch.zeros(3), None, None
    for number, mean in enumerate(means(5), start=1):
        velocity, size = optimiser.velocity(velocity, mean, number), optimiser.size(size, mean)
        weights = weights + optimiser.rate(number) * optimiser.step(velocity, size)
    for place in range(3):
        x, m, v = 0.0, 0.0, tau**2
        for step in means(5):
            delta = float(step[place])
            m = beta * m + (1 - beta) * delta
            v = beta_2 * v + (1 - beta_2) * delta**2 if rule == "adam" else v - (1 - beta_2) * delta**2 * math.copysign(1, v - delta**2)
            x += rate * m / (math.sqrt(v) + tau)
        assert float(weights[place]) == pytest.approx(x, rel=1e-4)


def test_a_linear_schedule_falls_to_nothing_after_the_last_round() -> None:
    optimiser = ServerOptimiser(2.0, schedule="linear", rounds=4)
    assert [optimiser.rate(number) for number in range(1, 6)] == [2.0, 1.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(("share", "averaged"), [(0.5, 3), (1.0, 6), (0.2, 2)])
def test_the_average_is_that_of_the_last_rounds(share: float, averaged: int) -> None:
    steps, expected = means(6), torch.zeros(3)
    for number in range(6 - averaged + 1, 7):
        expected += torch.stack(steps[:number]).sum(dim=0) / averaged
    _, average = walk(ServerOptimiser(rounds=6, average=share), steps)
    torch.testing.assert_close(average, expected)


def test_what_is_measured_is_taken_as_it_is_once_and_then_kept() -> None:
    steps = means(4)
    found, _ = walk(ServerOptimiser(0.5, 0.9, rounds=4, measured=1), steps)
    assert found[0] == steps[0][0]
    trained, _ = walk(ServerOptimiser(0.5, 0.9, rounds=3), steps[1:])
    torch.testing.assert_close(found[1:], trained[1:])
