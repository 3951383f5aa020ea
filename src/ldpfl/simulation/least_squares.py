"""Least squares for a linear head: sums of products of features, which are released once, and the solution of what they say.

A record with features u and target t, both of length 1 at most, adds the upper triangle of u u' and all of u t'. Off-diagonal entries
of the triangle are multiplied by sqrt(2), so that it is as long as |u|^2. With weights a^2 + b^2 = 1 of the two parts, the inner product
of two records' vectors is a^2 c^2 + b^2 c s, where c and s are those of their features and of their targets, between -1 and 1. It is
least at c = -b^2 / 2 a^2, or at c = -1: :func:`_distance` follows, and it is below 2, the distance of two opposite vectors of length 1.
So vectors are made longer, and the same noise hides them.

The noise in the mean of u u' is that of a symmetric matrix whose largest eigenvalue is about sqrt(2 p) times the standard deviation of an
entry of its diagonal, for p features (Wigner's semicircle law). What the released matrix says below a multiple of that is noise, so that
its eigenvalues are brought up to there. A mean of products has none below 0 anyway.

The released sums are all that the server uses, so what it makes of them costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.simulation.local_training import LocalTask
from ldpfl.simulation.record_sums import APART, NoisySum
from ldpfl.tasks import without_answer

_INSIDE = 1 - 2.0**-40
"""Features and targets are made so much shorter, so that rounding leaves none longer than 1."""
_LEAST = 1e-9
"""Least eigenvalue, as a share of their sum: what is divided by must not be 0 where there is no noise."""


@dataclass(frozen=True)
class LeastSquares:
    """How a record's vector is made, and what a server makes of their sum. All of it is public.

    Attributes:
        inputs: features of a sample.
        outputs: of the model.
        classes: whether a target is a class; else it is a number.
        bias: whether the model has one, after its weights.
        norm: longest vector of features, without the constant of the bias.
        bound: largest target that is a number.
        target_share: b^2, the share of the products with targets.
        floor, ridge: least eigenvalue, and what is added to each, as multiples of the noise's largest eigenvalue.
    """

    inputs: int
    outputs: int
    classes: bool
    bias: bool
    norm: float = 1.0
    bound: float = 3.0
    target_share: float = 0.5
    floor: float = 0.5
    ridge: float = 0.0

    @property
    def width(self) -> int:
        """Features with the constant of the bias, p."""
        return self.inputs + self.bias

    @property
    def size(self) -> int:
        return self.width * (self.width + 1) // 2 + self.width * self.outputs

    @property
    def ranges(self) -> LayerRanges:
        """Those of the sum, for what a mechanism asks of its vectors."""
        return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (self.size,))

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        inputs, targets = task.batch(rows)
        if not isinstance(inputs, Tensor):
            raise TypeError("least squares takes samples of one tensor")
        return self.vectors(inputs.flatten(1).cpu(), targets.cpu())

    def vectors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the vectors (R, size) of records with ``inputs`` (R, inputs) and ``targets`` (R,)."""
        features, told = self._features(inputs), self._targets(targets)
        first, second = self._triangle
        products = features[:, first] * features[:, second] * self._weights
        crossed = (features[:, :, None] * told[:, None, :]).flatten(1) * self._target_weight
        found = torch.cat([products, crossed], dim=1)
        return found.where(~without_answer(targets)[:, None], 0.0)

    def solved(self, total: NoisySum, records: float) -> Tensor:
        """Return the weights (d,) float32 of the head by the sum over so many ``records``, in the order of the model's layers."""
        mean, noise, size = total.points / records, total.noise / records, len(self._triangle[0])
        first, second = (own.numpy() for own in self._triangle)
        curvature = np.zeros((self.width, self.width))
        curvature[first, second] = curvature[second, first] = mean[:size] / self._weights.numpy()
        crossed = mean[size:].reshape(self.width, self.outputs) / self._target_weight
        values, vectors = np.linalg.eigh(curvature)
        edge = sqrt(2 * self.width) * noise / self._feature_weight
        least = max(self.floor * edge, _LEAST * float(np.abs(values).sum()), float(np.finfo(np.float64).tiny))
        solution = vectors @ ((vectors.T @ crossed) / (np.maximum(values, least) + self.ridge * edge)[:, None])
        # A softmax of k times indicators of k classes is, to first order around equal shares, these indicators themselves.
        solution *= self.outputs * sqrt(1 - 1 / self.outputs) if self.classes else self.bound
        longest = sqrt(self.norm**2 + self.bias)
        head = torch.from_numpy(solution / longest).float()
        return torch.cat([head[: self.inputs].T.flatten(), *([head[self.inputs]] if self.bias else [])])

    def _features(self, inputs: Tensor) -> Tensor:
        """Return features (R, width) of length 1 at most, float64."""
        rows = inputs.double()
        rows = rows * (self.norm * _INSIDE / torch.linalg.vector_norm(rows, dim=1).clamp_min(self.norm))[:, None]
        if self.bias:
            rows = F.pad(rows, (0, 1), value=_INSIDE)
        return rows / sqrt(self.norm**2 + self.bias)

    def _targets(self, targets: Tensor) -> Tensor:
        """Return targets (R, outputs) of length 1 at most, float64: of a class its indicator less that of an average class."""
        if not self.classes:
            return (targets.double().reshape(-1, 1) / self.bound).clamp(-_INSIDE, _INSIDE)
        shown = F.one_hot(targets.clamp(0, self.outputs - 1), self.outputs).double() - 1 / self.outputs
        return shown * (_INSIDE / sqrt(1 - 1 / self.outputs))

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        first, second = torch.triu_indices(self.width, self.width)
        return first, second

    @cached_property
    def _weights(self) -> Tensor:
        """Weight of each entry of the triangle, (p (p + 1) / 2,)."""
        first, second = self._triangle
        return self._feature_weight * torch.where(first == second, 1.0, sqrt(2)).double()

    @property
    def _feature_weight(self) -> float:
        return self._length * sqrt(1 - self.target_share)

    @property
    def _target_weight(self) -> float:
        return self._length * sqrt(self.target_share)

    @property
    def _length(self) -> float:
        """Length of the longest vectors. A coordinate stays below 1, so that sums over records fit the mechanism's lattice."""
        return min(APART / _distance(self.target_share), 1 / sqrt(1 - self.target_share))


def _distance(target_share: float) -> float:
    """Return the largest distance of two records' vectors of length 1, where products with targets have this share of the square."""
    share = 1 - target_share
    if target_share <= 2 * share:
        return sqrt(2 + target_share**2 / (2 * share))
    return 2 * sqrt(target_share)
