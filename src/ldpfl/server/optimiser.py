"""What a server makes of a round's mean: a step, with momentum and a schedule, and an average of what came of it.

All of it is post-processing of what was released, so it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]
"""Of a learning rate: the same in all rounds, or falling to 0 in equal steps, or along half a wave."""

Rule = Literal["sgd", "adam", "yogi"]
"""What the server makes of its steps: plain ones, or each weight's by how large they were (FedAdam, FedYogi)."""

_BETA_2, _TINY = 0.99, 1e-3
"""Of FedAdam and FedYogi, with tau (Reddi et al. 2021, section 4)."""


def scheduled(rate: float, schedule: Schedule, round_number: int, rounds: int) -> float:
    """Return the learning rate of a round, from 1, that began with ``rate``."""
    gone = min(round_number - 1, rounds) / rounds
    if schedule == "constant":
        return rate
    return rate * (1 - gone if schedule == "linear" else (1 + cos(pi * gone)) / 2)


@dataclass(frozen=True)
class ServerOptimiser:
    """Steps on the server (FedAvgM, Hsu et al. 2019; FedAdam and FedYogi, Reddi et al. 2021).

    Attributes:
        learning_rate: factor on the step.
        momentum: part of the last step that is carried on (heavy ball).
        schedule: of the learning rate over ``rounds``.
        rounds: of the run.
        measured: how many weights, the first ones, are measured in the first round, and kept; the others are trained from the second on.
        average: share of the run, counted from its end, over which weights are averaged; 0 keeps the last ones.
        rule: ``adam`` and ``yogi`` divide each weight's step by a moving size of its steps; then the mean of steps is a moving one as well.
        decay: part of the way back to ``start`` that is added to each mean.
        start: (d,) initial weights; needed for a decay.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    schedule: Schedule = "constant"
    rounds: int = 1
    average: float = 0.0
    measured: int = 0
    rule: Rule = "sgd"
    decay: float = 0.0
    start: Tensor | None = field(default=None, compare=False)

    def decayed(self, mean: Tensor, weights: Tensor) -> Tensor:
        """Return the ``mean`` (d,) of a round with the pull from ``weights`` (d,) back to the initial ones."""
        if not self.decay or self.start is None:
            return mean
        return mean + self.decay * (self.start - weights)

    def velocity(self, before: Tensor | None, mean: Tensor, round_number: int) -> Tensor:
        """Return the direction (d,) of a round's step, from the last one and the mean update or gradient."""
        if self.measured:
            mean = mean.clone()
            (mean[self.measured :] if round_number == 1 else mean[: self.measured]).zero_()
        first = round_number <= (2 if self.measured else 1)
        if self.rule != "sgd":
            return mean * (1 - self.momentum) if before is None or first else torch.lerp(mean, before, self.momentum)
        return mean if before is None or first or self.momentum == 0 else torch.add(mean, before, alpha=self.momentum)

    def size(self, before: Tensor | None, mean: Tensor) -> Tensor | None:
        """Return the moving second moment (d,) of the steps; None where there is none."""
        if self.rule == "sgd":
            return None
        squares = mean.square()
        before = torch.full_like(mean, _TINY**2) if before is None else before
        if self.rule == "adam":
            return torch.lerp(squares, before, _BETA_2)
        return before - (1 - _BETA_2) * squares * torch.sign(before - squares)

    def step(self, velocity: Tensor, size: Tensor | None) -> Tensor:
        """Return the step (d,) at a learning rate of 1."""
        return velocity if size is None else velocity / (size.sqrt() + _TINY)

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1; what is measured is taken as it is."""
        if self.measured and round_number == 1:
            return 1.0
        return scheduled(self.learning_rate, self.schedule, round_number, self.rounds)

    def averaged(self, before: Tensor | None, weights: Tensor, round_number: int) -> Tensor | None:
        """Return the mean (d,) of the weights after the rounds that are averaged so far; None before they begin."""
        position = round_number - int((1 - self.average) * self.rounds)
        if self.average == 0 or position < 1:
            return None
        return weights.clone() if before is None else before + (weights - before) / position
