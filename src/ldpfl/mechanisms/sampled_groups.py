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
        ranges: the layers' ranges, but with the number of groups as the size of each layer.
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
        return cls(sizes, np.cumsum(sizes) - sizes, largest, LayerRanges(ranges.centers, ranges.radii, counts.tolist()))

    def centers_and_steps(self, gain: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each group's center, and the step s r ``gain`` that one sign stands for (group size s, radius r), (G,) both."""
        center, radius = self.ranges.expand()
        return center.numpy(), self.sizes * radius.numpy() * gain

    def count_clients(self, reports: Sequence[IndexedBitReports], ranges: LayerRanges) -> int:
        """Return the number of clients of ``reports``, after checking that the reports are about these groups."""
        clients = total_clients(reports, ranges, IndexedBitReports)
        if not all(np.array_equal(batch.group_sizes, self.sizes) for batch in reports):
            raise PrivacyError("a report has other group sizes than this mechanism: set mechanism.group alike at clients and server")
        return clients

    def entries(self, reports: Sequence[IndexedBitReports]) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for a few clients of a batch at a time: their rows, the coordinates that they sampled, and the signs -1 or 1 they sent."""
        clients_per_block = max(1, COORDINATE_BLOCK // self.sizes.size)
        for batch in reports:
            for start in range(0, batch.clients, clients_per_block):
                rows = slice(start, start + clients_per_block)
                yield rows, batch.index[rows] + self.starts, 2 * batch.signs[rows].astype(np.int64) - 1


@dataclass(frozen=True, eq=False)
class GroupCounts:
    """Group sizes and their numbers, as in :class:`Groups` but without a table of all groups.

    A client uses this to check a round before it agrees. A table would be unsafe: a few bytes from a server can claim a very large model.

    Attributes:
        sizes: (2 L,) number of weights of a group, in the order of the groups; a size may occur several times.
        counts: (2 L,) number of consecutive groups with this size; may be 0.
    """

    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ranges: LayerRanges, group: int | None) -> GroupCounts:
        """Return two sizes for each layer: that of all its groups but the last, and that of the last."""
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
    layers = np.array(ranges.sizes, dtype=np.int64)
    if group is not None and group > layers.max():
        raise ConfigError(f"group is {group}, but the largest layer has {layers.max()} weights: set group to {layers.max()} or less")
    largest = layers if group is None else np.minimum(layers, group)
    if largest.max() >> 32:
        raise ConfigError(f"a group has {largest.max()} weights, more than 2^32: set a smaller group")
    counts = -(-layers // largest)
    return largest, counts, layers - largest * (counts - 1)


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
        high, low = words[:, 0::2] * size, words[:, 1::2] * size  # each half of a 64-bit word, times the size
        index[rows.start : rows.stop, groups] = (high + (low >> np.uint64(32))) >> np.uint64(32)
    return index
