"""What a server makes of a round's mean: a step, with momentum and a schedule, and an average of what came of it.

All of it is post-processing of what was released, so it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["constant", "linear"]
"""Of the server's learning rate: the same in all rounds, or falling to 0 in equal steps."""


@dataclass(frozen=True)
class ServerOptimiser:
    """SGD on the server (FedAvgM, Hsu et al. 2019; Reddi et al. 2021).

    Attributes:
        learning_rate: factor on the step.
        momentum: part of the last step that is carried on (heavy ball).
        schedule: of the learning rate over ``rounds``.
        rounds: of the run.
        measured: how many weights, the first ones, are measured in the first round, and kept; the others are trained from the second on.
        average: share of the run, counted from its end, over which weights are averaged; 0 keeps the last ones.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    schedule: Schedule = "constant"
    rounds: int = 1
    average: float = 0.0
    measured: int = 0

    def velocity(self, before: Tensor | None, mean: Tensor, round_number: int) -> Tensor:
        """Return the direction (d,) of a round's step, from the last one and the mean update or gradient."""
        if self.measured:
            mean = mean.clone()
            (mean[self.measured :] if round_number == 1 else mean[: self.measured]).zero_()
        first = round_number <= (2 if self.measured else 1)
        return mean if before is None or first or self.momentum == 0 else torch.add(mean, before, alpha=self.momentum)

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1; what is measured is taken as it is."""
        if self.measured and round_number == 1:
            return 1.0
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (1 - min(round_number - 1, self.rounds) / self.rounds)

    def averaged(self, before: Tensor | None, weights: Tensor, round_number: int) -> Tensor | None:
        """Return the mean (d,) of the weights after the rounds that are averaged so far; None before they begin."""
        position = round_number - int((1 - self.average) * self.rounds)
        if self.average == 0 or position < 1:
            return None
        return weights.clone() if before is None else before + (weights - before) / position
