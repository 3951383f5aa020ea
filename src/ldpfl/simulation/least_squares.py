"""Least squares for a linear head: sums of products of features are released once, and the server solves for the head's weights.

A record with features u and target t, both of length 1 at most, adds the upper triangle of u u' and all of u t'. Off-diagonal entries
of the triangle are multiplied by sqrt(2), so that it is as long as |u|^2. With weights a^2 + b^2 = 1 of the two parts, the inner product
of two records' vectors is a^2 c^2 + b^2 c s. Here c is the inner product of their features and s that of their targets, both between -1 and
1. It is least for s = 1 at c = -b^2 / 2 a^2, or at c = -1. :func:`_distance` follows from that. It is below 2, the distance of two opposite
vectors of length 1. So vectors can be longer than 1 under the same noise.

The noise in the mean of u u' is a symmetric matrix, whose largest eigenvalue is about sqrt(2 p) times the standard deviation of an entry of
its diagonal, for p features (Wigner's semicircle law). Eigenvalues of the released matrix below a multiple of that are mostly noise, so
they are raised to it. Without noise, no eigenvalue would be below 0.

The server uses only the released sums, so the solution costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.simulation.local_training import LocalTask
from ldpfl.simulation.record_sums import APART, NoisySum, ranges_of
from ldpfl.tasks import absent_targets
from ldpfl.tasks.weighted_metrics import Floats

_INSIDE = 1 - 2.0**-40
"""Factor that makes features and targets shorter, so that rounding leaves none longer than 1."""
_MAX_EXPLAINED = 0.9
"""Largest share of the variance of two classes that counts as explained, so that probabilities stay apart from 0 and 1."""
_MIN_EIGENVALUE_SHARE = 1e-9
"""Least eigenvalue, as a share of the sum of all. It prevents a division by 0 if there is no noise."""


@dataclass(frozen=True)
class LeastSquares:
    """The rule for a record's vector, and the server's solution from the sum of these vectors. All attributes are public.

    Attributes:
        inputs: number of features of a sample.
        outputs: number of outputs of the model.
        classes: whether a target is a class; else it is a number.
        bias: whether the model has a bias, which follows its weights.
        norm: clipping norm of the features, without the constant of the bias.
        bound: clipping bound of a target that is a number.
        target_share: b^2, the share of the products with targets.
        floor, ridge: least eigenvalue, and number that is added to each eigenvalue, as multiples of the noise's largest eigenvalue.
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
        """Number p of features, with the constant of the bias."""
        return self.inputs + self.bias

    @property
    def size(self) -> int:
        """Number of entries of a record's vector."""
        return self.width * (self.width + 1) // 2 + self.width * self.outputs

    @property
    def ranges(self) -> LayerRanges:
        """Public ranges of the vector that a client sends."""
        return ranges_of(self.size)

    @property
    def one_by_one(self) -> bool:
        """False: vectors are computed many at once."""
        return False

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        """Return a vector of products (inputs by inputs, inputs by target) for each of the task's records at ``rows`` (R,): (R, size).

        ``weights`` is unused, since the products do not depend on the model. All rules for a record's vector take it.
        """
        inputs, targets = task.batch(rows)
        if not isinstance(inputs, Tensor):
            raise TypeError("least squares needs samples of one tensor, got several tensors")
        return self.vectors(inputs.flatten(1).cpu(), targets.cpu())

    def vectors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the vectors (R, size) of records with ``inputs`` (R, inputs) and ``targets`` (R,); zeros for a record without an answer.

        A vector has the weighted products of each pair of features, then those of each feature with each target.
        """
        features, scaled_targets = self._features(inputs), self._targets(targets)
        first, second = self._triangle
        feature_products = features[:, first] * features[:, second] * self._weights
        target_products = (features[:, :, None] * scaled_targets[:, None, :]).flatten(1) * self._target_weight
        vectors = torch.cat([feature_products, target_products], dim=1)
        return vectors.where(~absent_targets(targets)[:, None], 0.0)

    def solved(self, total: NoisySum, records: float) -> Tensor:
        """Return the weights (d,) float32 of the head from the ``total`` over ``records`` records, in the order of the model's layers.

        They solve curvature @ head = crossed, for the means of u u' and of u t' over records with features u and targets t. Eigenvalues of
        the curvature that may be noise are raised to a bound, as the file's docstring explains.
        """
        mean, noise = total.points / records, total.noise / records
        first, second = (index.numpy() for index in self._triangle)
        triangle, products_with_targets = np.split(mean, [len(first)])
        curvature = np.zeros((self.width, self.width))
        curvature[first, second] = curvature[second, first] = triangle / self._weights.numpy()
        crossed = products_with_targets.reshape(self.width, self.outputs) / self._target_weight
        eigenvalues, eigenvectors = np.linalg.eigh(curvature)
        largest_noise = sqrt(2 * self.width) * noise / self._feature_weight  # largest eigenvalue of the noise
        least_eigenvalue = max(
            self.floor * largest_noise, _MIN_EIGENVALUE_SHARE * float(np.abs(eigenvalues).sum()), float(np.finfo(np.float64).tiny)
        )
        raised = np.maximum(eigenvalues, least_eigenvalue) + self.ridge * largest_noise
        solution = eigenvectors @ ((eigenvectors.T @ crossed) / raised[:, None])
        # The solution is for scaled features and targets, so it is scaled back here and below.
        if self.classes and self.outputs == 2 and self.bias:
            least_share = max(noise / self._target_weight * self._longest, 1 / records)  # of a class: the noise in it, or one record
            solution = self._as_log_odds(solution, curvature[-1, :-1], crossed, least_share)
        else:
            # A softmax of k times indicators of k classes is, to first order around equal shares, these indicators themselves.
            solution *= self.outputs * sqrt(1 - 1 / self.outputs) if self.classes else self.bound
        head = torch.from_numpy(solution / self._longest).float()
        return torch.cat([head[: self.inputs].T.flatten(), *([head[self.inputs]] if self.bias else [])])

    def _as_log_odds(self, solution: Floats, products_with_bias: Floats, crossed: Floats, least_share: float) -> Floats:
        """Return the ``solution`` (p, 2) for two classes, rescaled to logits by the theory of linear discriminants (Fisher 1936).

        Let f be the linear fit of the indicator of class 1, q its share, and R2 the explained share of the variance q (1 - q). If both
        classes have normal features of one covariance, then the log odds are log(q / (1 - q)) + (f - q - R2 (1/2 - q)) / (q (1 - q)
        (1 - R2)). That follows from the formulas of both for the difference of the classes' means.

        ``least_share`` is the least distance of q from 0 and 1. ``crossed`` (p, 2) and ``products_with_bias`` (p - 1,) are means of the
        features' products with the targets and with the constant of the bias.
        """
        half = sqrt(1 / 2)  # the length of a centered indicator
        share = min(max(1 / 2 + float(crossed[-1, 1]) * self._longest * half, least_share), 1 - least_share)  # q
        variance = share * (1 - share)
        covariances = half * crossed[:-1, 1] - products_with_bias * self._longest * (share - 1 / 2)  # of the features with the indicator
        explained = min(max(half * float(solution[:-1, 1] @ covariances) / variance, 0.0), _MAX_EXPLAINED)
        slope = 1 / (variance * (1 - explained))
        logit = solution[:, 1] * half * slope
        # The constant of the bias is 1 / length, so an offset is multiplied by the length.
        logit[-1] += self._longest * (log(share / (1 - share)) + (1 / 2 - share) * (1 - explained) * slope)
        return np.stack([-logit / 2, logit / 2], axis=1)

    @property
    def _longest(self) -> float:
        """Length of the longest features, with 1 for the constant of the bias."""
        return sqrt(self.norm**2 + self.bias)

    def _features(self, inputs: Tensor) -> Tensor:
        """Return features (R, width) float64: clipped to :attr:`norm`, with the constant of the bias, and scaled to length 1 at most."""
        rows = inputs.double()
        rows = rows * (self.norm * _INSIDE / torch.linalg.vector_norm(rows, dim=1).clamp_min(self.norm))[:, None]
        if self.bias:
            rows = F.pad(rows, (0, 1), value=_INSIDE)
        return rows / self._longest

    def _targets(self, targets: Tensor) -> Tensor:
        """Return targets (R, outputs) float64 of length 1 at most. For a class: its one-hot indicator minus the mean of all indicators."""
        if not self.classes:
            return (targets.double().reshape(-1, 1) / self.bound).clamp(-_INSIDE, _INSIDE)
        centered = F.one_hot(targets.clamp(0, self.outputs - 1), self.outputs).double() - 1 / self.outputs
        return centered * (_INSIDE / sqrt(1 - 1 / self.outputs))

    @cached_property
    def _triangle(self) -> tuple[Tensor, Tensor]:
        """Row and column indices of the upper triangle of a matrix of p features, (p (p + 1) / 2,) each."""
        first, second = torch.triu_indices(self.width, self.width)
        return first, second

    @cached_property
    def _weights(self) -> Tensor:
        """Weight of each entry of the triangle, (p (p + 1) / 2,). An entry off the diagonal stands for two of the matrix, hence sqrt(2)."""
        first, second = self._triangle
        return self._feature_weight * torch.where(first == second, 1.0, sqrt(2)).double()

    @property
    def _feature_weight(self) -> float:
        """Factor on the products of features in a vector: its length times a = sqrt(1 - b^2)."""
        return self._length * sqrt(1 - self.target_share)

    @property
    def _target_weight(self) -> float:
        """Factor on the products of features with targets in a vector: its length times b."""
        return self._length * sqrt(self.target_share)

    @property
    def _length(self) -> float:
        """Length of the longest vectors, such that two of them lie at most APART apart, and their sums fit the mechanism's lattice."""
        # For the lattice, the second bound keeps each coordinate at most 1.
        return min(APART / _distance(self.target_share), 1 / sqrt(1 - self.target_share))


def _distance(target_share: float) -> float:
    """Return the largest distance of two records' vectors of length 1; the file's docstring derives it.

    ``target_share`` is b^2, the share of the products with targets in the squared length, and a^2 that of the products of features.
    """
    feature_share = 1 - target_share
    if target_share <= 2 * feature_share:  # the inner product is least if that of the features is c = -b^2 / 2 a^2; else at c = -1
        return sqrt(2 + target_share**2 / (2 * feature_share))
    return 2 * sqrt(target_share)
