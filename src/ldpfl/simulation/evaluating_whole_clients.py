"""Evaluate the model at clients if all data of a client are protected together: by randomised bits, or by a noisy sum.

A client takes the mean v of its held-back records' vectors (:class:`RecordScores`). Any mean is possible, so a mechanism that protects the
whole vector protects the client.

In bits (:class:`BitScores`), a client sends bits about u = SCALE Q^T v. The rows of Q are orthonormal, and all entries of u lie in [-1, 1].
The mean of all clients' u is estimated from the bits, with noise of one standard deviation s in each entry. So n Q u / SCALE estimates the
sum of n clients' v, with noise of standard deviation n s / SCALE in each entry. Q copies a number several times, so that its figures have
less noise. It turns a one-hot part by a Hadamard matrix. Then each entry of u is 1 or -1 for a client with one record, and a bit loses
nothing by rounding. (Hadamard response: Acharya, Sun and Zhang 2019.)

By a sum (:class:`MeanScores`), a client sends v itself in a ball, with its share of the noise.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import torch
from scipy.linalg import hadamard
from torch import Tensor

from ldpfl.data.samples import Division
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.simulation.evaluating_records import NUMBERS, ClientEvaluation, RecordScores, Weights, as_measured
from ldpfl.simulation.local_training import LocalTask
from ldpfl.simulation.record_sums import NoisySum, OneByOne, RecordVectors, mean_vectors, ranges_of, released_pool
from ldpfl.simulation.score_bins import BINS
from ldpfl.transport.shuffling import PartialPool, ReportPool
from ldpfl.util.randomness import Purpose

SCALE = 8.0
"""Length of the part of u that stands for a one-hot part of length 1: the root of :data:`_HADAMARD_SIZE`."""
_HADAMARD_SIZE = 64
"""Size of the Hadamard matrix for the bins of scores: the smallest power of two that holds them all."""
_LOSS_COPIES, _RIGHT_COPIES = 8, 16
"""Number of entries of u that hold the loss, and whether the prediction is right."""

_ROUNDING_FACTOR = 1 + 2.0**-20
"""Factor on a length, so that rounding to float32 makes no vector longer."""


def _weight(copies: int) -> float:
    """Return the length of the range of a number in v that has so many ``copies`` in u, each in the range [-1, 1]."""
    # A copy is SCALE / sqrt(copies) times the number, whose range is centered at 0.
    return 2 * sqrt(copies) / SCALE


@dataclass(frozen=True)
class ClientScores(RecordScores):
    """The vector v of a held-back record, as in :class:`RecordScores`, and how a client sends the mean of its records' v."""

    def client_values(self, task: LocalTask, weights: Tensor, units: Division, *, confined: bool = False) -> Tensor:
        """Return the private values (K, d) float32 that K clients randomise: the means over their held-back records ``units``, encoded.

        A client without held-back records has zeros, and so sends only noise or uniform bits.

        Args:
            confined: whether records are computed one by one, as in :func:`~ldpfl.simulation.record_sums.client_sums`. Then a record at
                which the task raises an error counts as zeros and changes no other record's vector.
        """
        vectors: RecordVectors = OneByOne(self) if confined else self
        return self.sent_values(mean_vectors(vectors, task, weights, list(units)))

    @abstractmethod
    def sent_values(self, means: Tensor) -> Tensor:
        """Return the values (K, d) float32 that clients with the mean vectors v ``means`` (K, size) randomise."""

    @abstractmethod
    def estimated_sum(self, pool: ReportPool | PartialPool, mechanism: Mechanism, *, single: bool = False) -> NoisySum:
        """Return the noisy sum of all clients' v, estimated from the reports of ``mechanism`` in ``pool``.

        Args:
            single: whether it is publicly known that no client holds back more than one record.
        """


@dataclass(frozen=True)
class BitScores(ClientScores):
    """The vector v of a held-back record, as in :class:`RecordScores`, and its form u, about whose entries clients send one bit each.

    There is no confusion matrix. The gap between predicted and observed is left out, because it is small beside the noise of a bit.
    """

    @property
    def has_cells(self) -> bool:
        """False: a confusion matrix would cost too many bits."""
        return False

    @cached_property
    def weights(self) -> Weights:
        """Scale of each part of a record's vector v, such that each entry of u, about which a bit is sent, lies in [-1, 1]."""
        if not self.of_classes:
            return Weights(loss=_weight(1))
        return Weights(loss=_weight(_LOSS_COPIES), right=_weight(_RIGHT_COPIES), bin=1.0)

    @property
    def entries(self) -> int:
        """Number of entries of u."""
        return _LOSS_COPIES + _RIGHT_COPIES + _HADAMARD_SIZE if self.of_classes else 1

    @cached_property
    def rotation(self) -> Tensor:
        """The matrix Q (size, entries) of u = SCALE Q^T v: v is a record's vector, and bits are sent about the entries of u."""
        if not self.of_classes:
            return torch.ones(1, 1, dtype=torch.float64)
        rotation = torch.zeros(self.size, self.entries, dtype=torch.float64)
        # Several copies of the loss, and of whether the prediction is right, have less noise together. The gap's row stays 0.
        rotation[0, :_LOSS_COPIES] = 1 / sqrt(_LOSS_COPIES)
        rotation[1, _LOSS_COPIES : _LOSS_COPIES + _RIGHT_COPIES] = 1 / sqrt(_RIGHT_COPIES)
        bins = hadamard(_HADAMARD_SIZE)[: 2 * BINS] / sqrt(_HADAMARD_SIZE)
        rotation[NUMBERS:, _LOSS_COPIES + _RIGHT_COPIES :] = torch.from_numpy(bins)
        return rotation

    @property
    def ranges(self) -> LayerRanges:
        """Public ranges of u: all entries lie in [-1, 1]."""
        return ranges_of(self.entries)

    def sent_values(self, means: Tensor) -> Tensor:
        """Return u = SCALE Q^T v, (K, entries) float32, of each client's mean vector v in ``means`` (K, size); Q is :attr:`rotation`."""
        return (SCALE * means @ self.rotation).clamp(-1, 1).float()

    def estimated_sum(self, pool: ReportPool | PartialPool, mechanism: Mechanism, *, single: bool = False) -> NoisySum:
        """Return the noisy sum of n clients' mean vectors v, estimated from the bits in ``pool``.

        Bits are about u = SCALE Q^T v. They give the clients' mean u, and so the sum n Q u / SCALE. The noise that is returned is the
        largest, that of bits about an entry of 0. If each client has a ``single`` record, the entries of its one-hot part are 1 or -1. Bits
        about these vary less: the variance of a client's estimate is smaller by 1.
        """
        clients, ranges = pool.clients, self.ranges
        mean = pool.aggregate(mechanism, ranges).mean.double()
        largest = float(mechanism.noise(ranges).largest_std(clients)[0])
        less_variance = 1 / clients if single else 0.0  # of a mean over the clients
        deviation = sqrt(max(largest**2 - less_variance, 0.0))
        return NoisySum((clients / SCALE * self.rotation @ mean).numpy(), clients * deviation / SCALE)


@dataclass(frozen=True)
class MeanScores(ClientScores):
    """The vector v of a held-back record, whose mean over a client's records is sent as a vector of length 1 at most."""

    @property
    def longest(self) -> float:
        """Maximum length of v. The absolute value of each number is at most half its weight, and each one-hot part has a single entry."""
        weights = self.weights
        return sqrt((weights.loss**2 + weights.right**2 + weights.gap**2) / 4 + weights.cell**2 + weights.bin**2) * _ROUNDING_FACTOR

    def sent_values(self, means: Tensor) -> Tensor:
        """Return ``means`` (K, size), the clients' mean vectors v, as float32, divided by the maximum length of v."""
        return (means / self.longest).float()

    def estimated_sum(self, pool: ReportPool | PartialPool, mechanism: Mechanism, *, single: bool = False) -> NoisySum:
        """Return the noisy sum of all clients' mean vectors v from their reports of v / ``longest``. ``single`` has no effect."""
        sum_per_mean, ranges = pool.clients * self.longest, self.ranges  # from the mean of the reports to the sum of v
        mean = pool.aggregate(mechanism, ranges).mean.double().numpy()
        return NoisySum(mean * sum_per_mean, float(mechanism.noise(ranges).largest_std(pool.clients)[0]) * sum_per_mean)


@dataclass(frozen=True, eq=False)
class WholeClientEvaluation(ClientEvaluation):
    """The evaluation at clients if clients are protected, not records. A client counts once, however many records it holds back."""

    vectors: ClientScores

    def measured(self, task: LocalTask, weights: Tensor, seed: int, number: int) -> dict[str, Any]:
        """Evaluate the model after round ``number``. Return the noisy sum of the clients' mean vectors, in the form that is stored."""
        vectors = self.vectors.fitted_to(weights)

        def values_of(batch: range) -> Tensor:
            return vectors.client_values(task, weights, self.units[batch.start : batch.stop])

        context, clients = b"evaluation" + weights.numpy().tobytes(), len(self.units)
        pool = released_pool(
            values_of, clients, vectors.ranges, self.mechanism, seed=seed, purpose=Purpose.EVALUATION, number=number, context=context
        )
        single = bool(self.units.sizes.max(initial=0) <= 1)  # no client holds back more than one record
        return as_measured(vectors, vectors.estimated_sum(pool, self.mechanism, single=single), clients)
