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
    """One linear layer without bias, from 0: for features that are centered or of one length, where every weight costs noise."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        layer = nn.Linear(prod(shape), classes, bias=False)
        nn.init.zeros_(layer.weight)
        super().__init__(nn.Flatten(), layer)


class CenteredLinear(nn.Module):
    """One linear layer without bias, from 0, on samples less a common center, brought to length 1.

    The center is a layer like any other, but it is measured and not trained: while the broadcast one is 0, which is public, clients put
    their own samples' mean in the place of a gradient, see :mod:`ldpfl.simulation.gradients`. So it is randomised, charged and sent
    as everything else.
    """

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(prod(shape)))
        self.weight = nn.Parameter(torch.zeros(classes, prod(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        offset = inputs.flatten(1) - self.center.detach()
        return F.linear(offset / offset.norm(dim=1, keepdim=True).clamp_min(1e-6), self.weight)


class MLP(nn.Sequential):
    """Hidden layers of ``hidden`` units, ``depth`` of them, on whatever a sample is."""

    def __init__(self, shape: InputShape, outputs: int, *, hidden: int = 64, depth: int = 1) -> None:
        sizes = [prod(shape), *[hidden] * depth]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(sizes[-1], outputs))


class Parallel(nn.Module):
    """One score, and an offset for each output: thresholds of ordered classes, or hazards of intervals (proportional odds).

    A threshold costs one weight so, and not as many as there are inputs.
    """

    def __init__(self, score: nn.Module, outputs: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.zeros(outputs))
        self.score = score

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.score(inputs) + self.offsets)
