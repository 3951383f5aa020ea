"""The steps that a client takes: SGD with momentum or Adam, weight decay, and a pull towards the broadcast weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from ldpfl.server.optimiser import Schedule, scheduled

Kind = Literal["sgd", "adam"]

BETA, BETA_2, TINY = 0.9, 0.999, 1e-8
"""Of Adam (Kingma and Ba 2015), as in PyTorch."""


@dataclass(frozen=True)
class LocalOptimiser:
    """What a client makes of its mini-batches' gradients.

    Attributes:
        learning_rate: of the first round.
        momentum: classical, for SGD.
        kind: ``sgd`` (LDP-FL, Algorithm 1, line 21) or ``adam``, whose moments begin anew in each round.
        weight_decay: factor on the weights, which is added to the gradient.
        proximal: factor on the way from the broadcast weights, which is added to the gradient (FedProx, Li et al. 2020).
        schedule: of the learning rate over ``rounds``.
        rounds: of the run.
    """

    learning_rate: float
    momentum: float = 0.0
    kind: Kind = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0
    schedule: Schedule = "constant"
    rounds: int = 1

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1."""
        return scheduled(self.learning_rate, self.schedule, round_number, self.rounds)

    @property
    def is_plain(self) -> bool:
        """Whether steps are gradients at one learning rate, with momentum at most."""
        return self.kind == "sgd" and self.schedule == "constant" and not self.pulls

    @property
    def pulls(self) -> bool:
        """Whether anything but the loss has a gradient."""
        return bool(self.weight_decay or self.proximal)


class Descent:
    """The steps of many clients in one round; every parameter is (K, *shape)."""

    def __init__(self, optimiser: LocalOptimiser, parameters: Sequence[Tensor], round_number: int) -> None:
        self._optimiser, self._parameters, self._rate = optimiser, parameters, optimiser.rate(round_number)
        kept = 2 if optimiser.kind == "adam" else 1 if optimiser.momentum else 0
        self._state = [tuple(torch.zeros_like(parameter) for _ in range(kept)) for parameter in parameters]
        self._start = [parameter.detach().clone() for parameter in parameters] if optimiser.proximal else []
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], active: Tensor) -> None:
        """Take one step. A client that has finished has a zero gradient; nothing else must carry it on either: ``active`` (K,) is 0."""
        self._steps += 1
        for number, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if self._optimiser.pulls:
                gradient = self._pulled(number, gradient)
            if not self._state[number]:
                carried = gradient * beside(active, gradient) if self._optimiser.pulls else gradient
                parameter.sub_(carried, alpha=self._rate)
            else:
                direction = self._direction(self._state[number], gradient)
                parameter.sub_(direction * beside(active, direction), alpha=self._rate)

    def _pulled(self, number: int, gradient: Tensor) -> Tensor:
        """Return the gradient with those of weight decay and of the distance from the broadcast."""
        parameter = self._parameters[number]
        gradient = gradient + self._optimiser.weight_decay * parameter
        return gradient + self._optimiser.proximal * (parameter - self._start[number]) if self._start else gradient

    def _direction(self, state: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        if self._optimiser.kind == "sgd":
            return state[0].mul_(self._optimiser.momentum).add_(gradient)
        first, second = state[0].lerp_(gradient, 1 - BETA), state[1].mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
        unbiased = second.sqrt() / sqrt(1 - BETA_2**self._steps)
        return first / (1 - BETA**self._steps) / (unbiased + TINY)


def beside(clients: Tensor, values: Tensor) -> Tensor:
    """Return ``clients`` (K,) so shaped that it multiplies ``values`` (K, *shape) client by client."""
    return clients.view(-1, *[1] * (values.dim() - 1))
