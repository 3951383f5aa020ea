"""What all forms of reports offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

COORDINATE_BLOCK = 1 << 15
"""Coordinates handled at once: their working set stays inside a core's cache. Clients draw random bits in the order of these blocks."""


def coordinate_blocks(dimension: int) -> Iterator[slice]:
    """Cut ``dimension`` coordinates into blocks of ``COORDINATE_BLOCK``."""
    return (slice(start, min(start + COORDINATE_BLOCK, dimension)) for start in range(0, dimension, COORDINATE_BLOCK))


def blocks(clients: int, dimension: int, values: int = 4 * COORDINATE_BLOCK) -> Iterator[tuple[range, slice]]:
    """Cut ``clients`` rows of ``dimension`` coordinates into blocks (rows, columns) of about ``values`` values; rows vary faster."""
    for columns in coordinate_blocks(dimension):
        yield from ((rows, columns) for rows in client_blocks(clients, columns.stop - columns.start, values=values))


def client_blocks(clients: int, width: int, most: int = 1 << 30, values: int = 4 * COORDINATE_BLOCK) -> Iterator[range]:
    """Cut ``clients`` rows of ``width`` values into blocks of rows.

    A block has as many rows as hold about ``values`` values, at least one and at most ``most``. Every block covers the same coordinates, so
    the bits that a client draws do not depend on the other clients.
    """
    rows_per_block = min(most, max(1, values // max(1, width)))
    return (range(row, min(row + rows_per_block, clients)) for row in range(0, clients, rows_per_block))


class Reports(Protocol):
    """The reports of ``clients`` clients about ``dimension`` weights; each form is a file beside this one.

    ``bytes_per_client`` is the length of one client's report on the wire. ``payload_bits`` of a mechanism gives it without reports.
    """

    @property
    def clients(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def bytes_per_client(self) -> int: ...

    def payloads(self) -> Iterable[bytes]: ...

    @classmethod
    def mix(cls, batches: Sequence[Any], generator: np.random.Generator) -> Reports:
        """Return all reports of ``batches`` in a uniformly random order, which says nothing about clients.

        Called by :func:`ldpfl.transport.shuffling.mix`, which checks that there are reports, all of one class and dimension.

        A unit is a part of a report that has a guarantee of its own, such as one weight. A unit stays together. Different units of a report
        are reordered independently.

        Raises:
            PrivacyError: reports that differ in another way.
        """
        ...
