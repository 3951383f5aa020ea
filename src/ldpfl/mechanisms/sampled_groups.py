"""Consecutive groups of weights, of each of which a client samples one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import total_clients
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK, blocks
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.util.randomness import RandomSource, draw_block


@dataclass(frozen=True, eq=False)
class Groups:
    """How the weights of all layers are cut.

    Attributes:
        sizes: (G,) weights of each group, layer by layer.
        starts: (G,) where each begins.
        largest: (L,) the size of each layer's first group, which is its largest.
        ranges: center and radius as before, but a layer's size is its number of groups.
    """

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    largest: NDArray[np.int64]
    ranges: LayerRanges

    @classmethod
    def of(cls, ranges: LayerRanges, group: int | None) -> Groups:
        largest, counts, last = _cut(ranges, group)
        sizes = np.repeat(largest, counts)
        sizes[np.cumsum(counts) - 1] = last
        return cls(sizes, np.cumsum(sizes) - sizes, largest, LayerRanges(ranges.centers, ranges.radii, counts.tolist()))

    def scale(self, gain: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return each group's center, and the step s r ``gain`` that one sign makes, (G,) both."""
        center, radius = self.ranges.expand()
        return center.numpy(), self.sizes * radius.numpy() * gain

    def count_clients(self, reports: Sequence[IndexedBitReports], ranges: LayerRanges) -> int:
        clients = total_clients(reports, ranges, IndexedBitReports)
        if not all(np.array_equal(batch.group_sizes, self.sizes) for batch in reports):
            raise PrivacyError("a report cuts the weights into other groups than this mechanism does")
        return clients

    def entries(self, reports: Sequence[IndexedBitReports]) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (rows, sampled coordinates, signs -1 or 1), a few clients of one batch at a time."""
        step = max(1, COORDINATE_BLOCK // self.sizes.size)
        for batch in reports:
            for start in range(0, batch.clients, step):
                rows = slice(start, start + step)
                yield rows, batch.index[rows] + self.starts, 2 * batch.signs[rows].astype(np.int64) - 1


@dataclass(frozen=True, eq=False)
class GroupCounts:
    """How many groups there are of which size: what :class:`Groups` tells of each, without a table of all of them.

    A client judges a round by this, before it has agreed to anything: a few bytes of a server can claim a very large model.

    Attributes:
        sizes: (2 L,) weights of a group, in the order of the groups; the same size may be there several times.
        counts: (2 L,) how many groups in a row have it, maybe none.
    """

    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, ranges: LayerRanges, group: int | None) -> GroupCounts:
        largest, counts, last = _cut(ranges, group)
        return cls(np.stack([largest, last], axis=1).ravel(), np.stack([counts - 1, np.ones_like(counts)], axis=1).ravel())

    @property
    def groups(self) -> int:
        """Number of all groups."""
        return int(self.counts.sum())

    @property
    def largest(self) -> int:
        """Weights of the largest group."""
        return int(self.sizes.max())


def _cut(ranges: LayerRanges, group: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return of each layer: the size of its groups, how many there are, and the size of its last one, (L,) all.

    Raises:
        ConfigError: the layers cannot be cut into groups of this size.
    """
    layers = np.array(ranges.sizes, dtype=np.int64)
    if group is not None and group > layers.max():
        raise ConfigError(f"a group of {group} weights is larger than the layer of {layers.max()}, the largest there is")
    largest = layers if group is None else np.minimum(layers, group)
    if largest.max() >> 32:
        raise ConfigError(f"a group of {largest.max()} weights is more than 32 bits can index")
    counts = -(-layers // largest)
    return largest, counts, layers - largest * (counts - 1)


def sample_places(source: RandomSource, clients: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draw one index below each of ``sizes`` for every client: the upper half of a 64-bit word times the size.

    The probability of an index is within 2**-64 of 1 / size: at most size / 2**64 of it, far below what any number of
    draws shows. It is the same whatever the values, so that it touches no epsilon. Groups of one weight alone draw nothing.
    """
    index = np.zeros((clients, sizes.size), dtype=np.int64)
    if sizes.max() == 1:
        return index
    for rows, own in blocks(clients, sizes.size):
        size = sizes[own].astype(np.uint64)
        words = draw_block(source, rows, 2 * size.size).view(np.uint32).astype(np.uint64)
        high, low = words[:, 0::2] * size, words[:, 1::2] * size
        index[rows.start : rows.stop, own] = (high + (low >> np.uint64(32))) >> np.uint64(32)
    return index
