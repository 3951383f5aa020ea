"""What all forms of reports offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

COORDINATE_BLOCK = 1 << 15
"""Coordinates handled at once: their working set stays inside a core's cache. What a seed gives depends on it."""


def coordinate_blocks(dimension: int) -> Iterator[slice]:
    """Cut ``dimension`` coordinates into blocks."""
    return (slice(start, min(start + COORDINATE_BLOCK, dimension)) for start in range(0, dimension, COORDINATE_BLOCK))


def blocks(clients: int, dimension: int, values: int = 4 * COORDINATE_BLOCK) -> Iterator[tuple[range, slice]]:
    """Cut ``clients`` rows of ``dimension`` coordinates into blocks of some ``values``, one block of coordinates after the other."""
    for own in coordinate_blocks(dimension):
        yield from ((rows, own) for rows in client_blocks(clients, own.stop - own.start, values=values))


def client_blocks(clients: int, width: int, most: int = 1 << 30, values: int = 4 * COORDINATE_BLOCK) -> Iterator[range]:
    """Cut ``clients`` rows of ``width`` values into blocks of rows.

    A block has as many rows as hold about ``values`` values, at least one and at most ``most``. Every block covers the same coordinates, so
    the bits that a client draws do not depend on the other clients.
    """
    together = min(most, max(1, values // max(1, width)))
    return (range(row, min(row + together, clients)) for row in range(0, clients, together))


class Reports(Protocol):
    """The reports of ``clients`` clients about ``dimension`` weights; each form is a file beside this one.

    ``bytes_per_client`` is the length of what is there; a mechanism's ``payload_bits`` says it beforehand.
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
        """Return all reports of ``batches``, at least one, in an order that says nothing about clients: uniformly random.

        What a client's guarantee covers as one unit stays together; units that are protected apart are reordered apart.

        Raises:
            PrivacyError: reports of different shapes, or none.
        """
        ...
