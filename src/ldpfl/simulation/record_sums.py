"""Sums over records that are released like a round of training: the vector that each record adds, and the release of the sum.

A record adds a vector. Any two records' vectors, whatever the records are, lie no farther apart than :data:`APART`. So replacing a record
moves its client's sum by no more than it may move a sum of clipped gradients, which is twice the clipping norm. So the mechanism protects
the sum with the same noise, and the ledger charges the same release.

The proof is about the integers (lattice points) that are sent. A vector is multiplied by a scale and rounded towards 0. Two vectors whose
coordinates have the same sign move apart by less than 1 in that coordinate, and two of different signs move closer. So d coordinates add
less than sqrt(d) to a distance, and :func:`points_per_unit` leaves room for that: no two records' integers lie farther apart than 2
``steps``. A person's vector is the mean of the vectors of its rows, and a mean of such vectors lies no farther from another mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division
from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.lattice import LatticeMechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.simulation.local_steps import ALIGNED
from ldpfl.simulation.local_training import AT_ONCE, LocalTask
from ldpfl.transport.shuffling import PartialPool, ReportPool, mix
from ldpfl.util.randomness import Purpose, SeededStreams, bound_stream

_LOG = logging.getLogger(__name__)

APART = 2.0
"""Largest distance between the vectors of any two records."""

_INSIDE = 1 - 2.0**-30
"""Factor that makes vectors shorter by more than the rounding errors of float64 can make them longer."""

_VALUES_AT_ONCE = 1 << 21
"""Maximum number of values of records' vectors in memory at once: 16 MiB in float64."""
_SUMS_AT_ONCE = 1 << 22
"""Maximum number of values of clients' sums in memory at once: 32 MiB in int64."""


class RecordVectors(Protocol):
    """Rule for the vector that a record adds to a sum."""

    @property
    def size(self) -> int:
        """Length of the vectors."""

    @property
    def one_by_one(self) -> bool:
        """Whether vectors are computed one by one. Else the rounding of a vector may depend on its place in the batch."""

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        """Return the vector of each sample at ``rows`` (R,), as (R, size) float64 on the CPU. Zeros stand for a sample without an answer.

        Any two vectors lie no farther apart than :data:`APART`, and neither do a vector and zeros.
        """


def points_per_unit(steps: int, size: int) -> float:
    """Return the number of lattice points that stand for 1 in a vector of ``size`` numbers. The clipping norm is ``steps`` points.

    Two records' vectors are at most APART apart, and rounding adds less than sqrt(size) points to their distance. The points of two
    records may be at most 2 ``steps`` apart, twice the clipping norm.
    """
    return (2 * steps - isqrt(size) - 1) * _INSIDE / APART


def lattice_points(vectors: Tensor, steps: int) -> Tensor:
    """Return ``vectors`` (R, size) float64 as lattice points (R, size) int64. A vector with NaN or infinity counts as zeros."""
    usable = vectors.isfinite().all(dim=1)
    if not bool(usable.all()):
        vectors = vectors.where(usable[:, None], 0.0)
    return (vectors * points_per_unit(steps, vectors.shape[1])).trunc().to(torch.int64)


def client_sums(
    vectors: RecordVectors,
    task: LocalTask,
    weights: Tensor,
    units: Division,
    steps: int,
    persons: Persons | None = None,
    *,
    confined: bool = False,
) -> Tensor:
    """Return the sum (K, size) int64 of the lattice points of each client's ``units``: its records, or its ``persons``.

    Args:
        confined: whether records are computed one by one, as on a node, so that no record decides how another is rounded. A record for
            which the model or the loss raises then adds nothing, so that nobody else learns of the failure.
    """
    vectors = OneByOne(vectors) if confined else vectors
    sums = torch.zeros(len(units), vectors.size, dtype=torch.int64)
    owners = np.repeat(np.arange(len(units)), units.sizes)
    indices = np.concatenate([np.empty(0, dtype=np.int64), *units])  # NumPy refuses to join nothing
    at_once = max(1, _VALUES_AT_ONCE // vectors.size)
    for start in range(0, len(indices), at_once):
        batch = indices[start : start + at_once]
        if persons is None:
            values = _row_vectors(vectors, task, weights, batch)
        else:
            rows, _ = persons.all_rows_of(batch)  # person after person
            units_of_batch = np.split(rows, np.cumsum(persons.counts[batch])[:-1])
            values = mean_vectors(vectors, task, weights, units_of_batch, persons.lanes[batch])
        sums.index_add_(0, torch.from_numpy(owners[start : start + at_once]), lattice_points(values, steps))
    return sums


def mean_vectors(
    vectors: RecordVectors, task: LocalTask, weights: Tensor, units: Sequence[NDArray[np.int64]], lanes: NDArray[np.float64] | None = None
) -> Tensor:
    """Return the mean (U, size) of the vectors of each unit's rows: of a person's rows, or of a client's records. Zeros if it has none.

    The rounding of a vector may depend on its place in a batch and on the batch's length. A unit's mean must depend on nothing of the other
    units, not even on their numbers of rows. So units with few rows share batches of a fixed length, in which each unit has a fixed place.
    Any row fills the place of a unit that has no row left. A unit with many rows has batches of its own.

    Args:
        lanes: (U,) place of each unit in its batches, as a share in [0, 1). By default it follows from the order of the units, which must
            then be public. The order of persons is not: it changes if a person is replaced by one with another name.
    """
    sizes = np.array([len(rows) for rows in units], dtype=np.int64)
    most_rows = max(1, _VALUES_AT_ONCE // vectors.size)
    length = max(1, min(AT_ONCE, most_rows, len(units))) if lanes is None else min(ALIGNED, most_rows)
    places = np.arange(len(units)) % length if lanes is None else (lanes * length).astype(np.int64)
    is_sharing = (sizes <= _MAX_SHARED_ROWS) & (not vectors.one_by_one)
    sums = torch.zeros(len(units), vectors.size, dtype=torch.float64)
    for members in _batches(np.flatnonzero(is_sharing), places, length):
        for row_number in range(_MAX_SHARED_ROWS):
            is_left = (members >= 0) & (sizes[members] > row_number)
            if not is_left.any():
                break
            rows = np.zeros(length, dtype=np.int64)
            rows[is_left] = [units[unit][row_number] for unit in members[is_left]]
            sums[members[is_left]] += _row_vectors(vectors, task, weights, rows)[is_left]
    for unit in np.flatnonzero(~is_sharing).tolist():
        for start in range(0, int(sizes[unit]), most_rows):
            sums[unit] += _row_vectors(vectors, task, weights, units[unit][start : start + most_rows]).sum(dim=0)
    return sums / torch.from_numpy(np.maximum(sizes, 1))[:, None]


def _batches(units: NDArray[np.int64], places: NDArray[np.int64], length: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches (length,) of ``units`` in which each unit u stands at its place, ``places[u]``. -1 stands for an empty place."""
    by_place = [units[places[units] == place] for place in range(length)]
    for number in range(max(map(len, by_place))):
        yield np.array([members[number] if number < len(members) else -1 for members in by_place])


_MAX_SHARED_ROWS = 8
"""Maximum number of rows of a unit that shares batches with others. More would mean more filling, fewer more batches."""


@dataclass(frozen=True)
class OneByOne:
    """A rule that computes the ``vectors`` of records one by one. A record that fails has zeros."""

    vectors: RecordVectors
    one_by_one: bool = True

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return self.vectors.size

    def of(self, task: LocalTask, weights: Tensor, rows: Tensor) -> Tensor:
        """Return the vector of each record (R, size). A warning names only the kinds of errors, whose texts may hold private values."""
        values, error_kinds = torch.zeros(len(rows), self.size, dtype=torch.float64), set[str]()
        for index in range(len(rows)):
            try:
                values[index] = self.vectors.of(task, weights, rows[index : index + 1])[0]
            except (Exception, SystemExit) as error:  # a user's model may also exit
                error_kinds.add(type(error).__name__)
        if error_kinds:
            kinds = ", ".join(sorted(error_kinds))
            _LOG.warning(
                "some records add nothing to the sum, because the model or its loss raises %s for them: make both accept every record",
                kinds,
            )
        return values


def _row_vectors(vectors: RecordVectors, task: LocalTask, weights: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return the vector of each of the task's ``rows`` (R,), as (R, size)."""
    return vectors.of(task, weights, torch.from_numpy(rows).to(task.data.device))


@dataclass(frozen=True)
class NoisySum:
    """The sum over all records of all clients that the server learns.

    Attributes:
        points: (size,) float64 sum of lattice points, with noise.
        noise: standard deviation of the noise in each coordinate, in lattice points.
    """

    points: NDArray[np.float64]
    noise: float

    def in_units(self, steps: int) -> NoisySum:
        """Return the sum in units of the records' vectors, from this sum in lattice points. The clipping norm is ``steps`` points."""
        unit = points_per_unit(steps, self.points.size)
        return NoisySum(self.points / unit, self.noise / unit)


def released_sum(
    sums_of: Callable[[range], Tensor],
    clients: int,
    size: int,
    mechanism: DpSgd,
    *,
    seed: int,
    purpose: Purpose,
    number: int,
    context: bytes = b"",
) -> NoisySum:
    """Return the sum over ``clients`` as the ``mechanism`` releases it over its channel.

    Args:
        sums_of: returns the sums (k, size) int64 of the clients in a range, in lattice points.
        seed: secret seed of the noise. The noise also depends on the values that it hides.
        number: number of this release among those of this ``purpose``, from 1.
        context: public facts that differ between releases, such as the weights. Releases with other facts have other noise.
    """
    pool = released_pool(sums_of, clients, ranges_of(size), mechanism, seed=seed, purpose=purpose, number=number, context=context)
    return noisy_sum(pool, mechanism, size)


def released_pool(
    values_of: Callable[[range], Tensor],
    clients: int,
    ranges: LayerRanges,
    mechanism: Mechanism,
    *,
    seed: int,
    purpose: Purpose,
    number: int,
    context: bytes = b"",
) -> ReportPool:
    """Return the mixed reports of ``clients`` clients, whose values (k, size) ``values_of`` returns; more in :func:`released_sum`."""
    reports, at_once = [], max(1, _SUMS_AT_ONCE // ranges.dimension)
    summed = isinstance(mechanism, LatticeMechanism) and mechanism.summed
    for first in range(0, clients, at_once):
        batch = range(first, min(first + at_once, clients))
        values = values_of(batch)
        keys = [] if summed else [(number, client) for client in batch]  # all noise of a sum is drawn where it is mixed
        reports.append(mechanism.encode(values, ranges, SeededStreams.bound(seed, purpose, keys, values, context)))
    # A round's mixing has the key (round,), so no round shares the random bits of the key (0, number).
    return mix(reports, bound_stream(seed, Purpose.MIXING, (0, number), SummedReports.total_without_noise(reports), context))


def noisy_sum(pool: ReportPool | PartialPool, mechanism: DpSgd, size: int) -> NoisySum:
    """Return the noisy sum of vectors of this ``size``, in lattice points, from the reports of ``mechanism`` in ``pool``."""
    # The mechanism states a mean over records, in multiples of the clipping norm.
    ranges, points_per_mean = ranges_of(size), mechanism.records * mechanism.sample_rate * pool.clients * mechanism.steps
    points = pool.aggregate(mechanism, ranges).mean.double().numpy() * points_per_mean
    return NoisySum(points, float(mechanism.noise(ranges).largest_std(pool.clients)[0]) * points_per_mean)


def ranges_of(size: int) -> LayerRanges:
    """Return the ranges that a mechanism needs for a vector of ``size`` numbers: one layer with numbers in [-1, 1]."""
    return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (size,))
