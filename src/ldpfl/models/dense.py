"""Models for anything that can be flattened: rows of a table, features, images."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl.models.images import InputShape


class LogisticRegression(nn.Sequential):
    """One linear layer."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(prod(shape), classes))


class Linear(nn.Sequential):
    """One linear layer without bias, initialised to 0. It suits features that are centered or have norm 1. Each weight costs noise."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        layer = nn.Linear(prod(shape), classes, bias=False)
        nn.init.zeros_(layer.weight)
        super().__init__(nn.Flatten(), layer)


class CenteredLinear(nn.Module):
    """One linear layer without bias, initialised to 0, on samples that are centered by a common center and scaled to norm 1.

    The center is a layer that is measured instead of trained. In the round whose broadcast center is 0, clients send the mean of their
    samples instead of a gradient, see :mod:`ldpfl.simulation.gradients`. So the center is randomised and charged like all other values.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(prod(shape)))
        self.weight = nn.Parameter(torch.zeros(classes, prod(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        centered = inputs.flatten(1) - self.center.detach()  # the center gets no gradient
        norms = centered.norm(dim=1, keepdim=True).clamp_min(1e-6)  # a sample at the center stays near 0
        return F.linear(centered / norms, self.weight)


class MLP(nn.Sequential):
    """A multilayer perceptron with ``depth`` hidden layers of ``hidden`` units, on flattened samples."""

    def __init__(self, shape: InputShape, outputs: int, *, hidden: int = 64, depth: int = 1) -> None:
        sizes = [prod(shape), *[hidden] * depth]
        layers: list[nn.Module] = [nn.Flatten()]
        for input_size, output_size in pairwise(sizes):
            layers += [nn.Linear(input_size, output_size), nn.ReLU()]
        super().__init__(*layers, nn.Linear(sizes[-1], outputs))


class Parallel(nn.Module):
    """One score for each sample, plus an offset for each output: a threshold of ordered classes, or the hazard of an interval.

    This is a proportional-odds model. Each further output costs one weight, rather than one weight for each input.
    """

    def __init__(self, score: nn.Module, outputs: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.zeros(outputs))
        self.score = score

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.score(inputs) + self.offsets)
