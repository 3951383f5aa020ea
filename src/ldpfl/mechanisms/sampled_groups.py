"""Groups of consecutive weights. A client samples one weight of each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import total_clients
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, blocks, draw_block


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups into which the weights of all layers are cut. A client samples one weight of each.

    Attributes:
        sizes: (G,) number of weights of each group, layer by layer.
        starts: (G,) index of each group's first weight.
        largest: (L,) the size of each layer's first group, which is its largest.
        ranges: the layers' ranges, with the number of groups as the size of each layer: these are the ranges of one weight of each group.
    """

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    largest: NDArray[np.int64]
    ranges: LayerRanges

    @classmethod
    def of(cls, ranges: LayerRanges, group: int | None) -> Groups:
        """Cut each layer into groups of ``group`` weights, the last of which may be smaller; None takes each layer as one group."""
        largest, counts, last = _group_sizes_and_counts(ranges, group)
        sizes = np.repeat(largest, counts)
        sizes[np.cumsum(counts) - 1] = last  # the last group of each layer
        ranges_of_groups = LayerRanges(ranges.centers, ranges.radii, counts.tolist())  # as if each group were one weight
        return cls(sizes=sizes, starts=np.cumsum(sizes) - sizes, largest=largest, ranges=ranges_of_groups)

    def centers_and_steps(self, gain: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each group's center, and the step s r ``gain`` that a sign adds or subtracts, (G,) both; group size s, radius r."""
        center, radius = self.ranges.expand()
        return center.numpy(), self.sizes * radius.numpy() * gain

    def count_clients(self, reports: Sequence[IndexedBitReports], ranges: LayerRanges) -> int:
        """Return the number of clients of ``reports``. Raise a PrivacyError if there are none, or if they are about other groups."""
        clients = total_clients(reports, ranges, IndexedBitReports)
        if not all(np.array_equal(batch.group_sizes, self.sizes) for batch in reports):
            raise PrivacyError("a report has other group sizes than this mechanism: set mechanism.group alike at clients and server")
        return clients

    def entries(self, reports: Sequence[IndexedBitReports]) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for a few clients at a time, their rows in their batch, the coordinates that they sampled, and their signs -1 or 1."""
        clients_per_block = max(1, COORDINATE_BLOCK // self.sizes.size)
        for batch in reports:
            for start in range(0, batch.clients, clients_per_block):
                rows = slice(start, start + clients_per_block)
                yield rows, batch.index[rows] + self.starts, 2 * batch.signs[rows].astype(np.int64) - 1


@dataclass(frozen=True, eq=False)
class GroupCounts:
    """The sizes of groups, and how many groups have each size. Like :class:`Groups`, but without an entry for each group.

    A client uses this to check a round before it agrees. A table would be unsafe: a few bytes from a server can claim a very large model.

    Attributes:
        sizes: (2 L,) number of weights of a group, in the order of the groups; a size may occur several times.
        counts: (2 L,) number of consecutive groups with this size; may be 0.
    """

    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ranges: LayerRanges, group: int | None) -> GroupCounts:
        """Return the counts with two sizes for each layer: the size of all its groups but the last, and that of the last."""
        largest, counts, last = _group_sizes_and_counts(ranges, group)
        return cls(np.stack([largest, last], axis=1).ravel(), np.stack([counts - 1, np.ones_like(counts)], axis=1).ravel())

    @property
    def groups(self) -> int:
        """Number of all groups."""
        return int(self.counts.sum())

    @property
    def largest(self) -> int:
        """Number of weights of the largest group."""
        return int(self.sizes.max())


def _group_sizes_and_counts(ranges: LayerRanges, group: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return for each layer: the size of its groups, the number of groups, and the size of the last group, (L,) each.

    Raises:
        ConfigError: the layers cannot be cut into groups of this size.
    """
    layer_sizes = np.array(ranges.sizes, dtype=np.int64)
    most = layer_sizes.max()
    if group is not None and group > most:
        raise ConfigError(f"group is {group}, but the largest layer has {most} weights: set group to {most} or less")
    group_sizes = layer_sizes if group is None else np.minimum(layer_sizes, group)
    if group_sizes.max() >= 1 << 32:  # products in :func:`sample_places` would overflow
        raise ConfigError(f"a group has {group_sizes.max()} weights, expected less than 2^32: set mechanism.group to a smaller number")
    counts = -(-layer_sizes // group_sizes)  # rounded up, without a sum that could overflow
    return group_sizes, counts, layer_sizes - group_sizes * (counts - 1)


def sample_places(source: RandomSource, clients: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draw one index below each of ``sizes`` (G,) for every client, (clients, G): floor(size U), U a random number of 64 bits in [0, 1).

    The probability of an index differs from 1 / size by at most 2**-64, which no feasible number of draws reveals. It does not depend on
    the values, so it costs no epsilon. If all groups have one weight, nothing is drawn.
    """
    index = np.zeros((clients, sizes.size), dtype=np.int64)
    if sizes.max() == 1:
        return index
    for rows, groups in blocks(clients, sizes.size):
        size = sizes[groups].astype(np.uint64)
        words = draw_block(source, rows, 2 * size.size).view(np.uint32).astype(np.uint64)
        # floor(size U) is the part of size x (64-bit word) above 64 bits. Halves of the word are multiplied apart, so that none overflows.
        high, low = words[:, 0::2] * size, words[:, 1::2] * size
        index[rows.start : rows.stop, groups] = (high + (low >> np.uint64(32))) >> np.uint64(32)
    return index
