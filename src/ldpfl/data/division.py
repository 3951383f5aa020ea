"""Which client holds which samples, in one array for all clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
"""Indices of samples."""


@dataclass(frozen=True, eq=False)
class Division(Sequence[Places]):
    """The sample indices of each client. It takes 8 bytes for each sample and 16 for each client.

    Attributes:
        places: (N,) sample indices of all clients.
        starts, sizes: (K,) where each client's indices begin in ``places``, and how many it has.
    """

    places: Places
    starts: Places
    sizes: Places

    @classmethod
    def of(cls, parts: Sequence[Places]) -> Division:
        """Return the division that gives client i the indices ``parts[i]``."""
        if isinstance(parts, Division):
            return parts
        sizes = np.array([part.size for part in parts], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, dtype=np.int64), *parts]), np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def equal(cls, places: Places, clients: int) -> Division:
        """Return ``places`` cut into equal parts. The remainder of the division is left out."""
        size = len(places) // clients
        return cls(places[: size * clients], np.arange(clients) * size, np.full(clients, size))

    @classmethod
    def by_owner(cls, owners: Places, clients: int) -> Division:
        """Return the division in which sample i belongs to client ``owners[i]``, or to no client if that is -1."""
        sizes = np.bincount(owners[owners >= 0], minlength=clients)
        without_owner = len(owners) - int(sizes.sum())  # their owner is -1, so they come first in the order
        return cls(owners.argsort(kind="stable"), without_owner + np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def shared(cls, places: Places, clients: int) -> Division:
        """Return the division that gives all ``places`` to every client."""
        return cls(places, np.zeros(clients, dtype=np.int64), np.full(clients, len(places)))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Places: ...
    @overload
    def __getitem__(self, client: slice) -> Division: ...
    def __getitem__(self, client: int | slice) -> Places | Division:
        if isinstance(client, slice):
            return Division(self.places, self.starts[client], self.sizes[client])
        client = range(len(self))[client]  # counts a negative number from the end, and raises an IndexError beyond it
        return self.places[self.starts[client] : self.starts[client] + self.sizes[client]]

    def __iter__(self) -> Iterator[Places]:
        return (self[client] for client in range(len(self)))

    def take(self, clients: Places) -> Division:
        """Return the division that contains only ``clients`` (k,), in their order."""
        table, is_real = self._table(clients)
        sizes = self.sizes[clients]
        return Division(table[is_real], np.cumsum(sizes) - sizes, sizes)

    def table(self) -> tuple[Places, NDArray[np.bool_]]:
        """Return the indices as a table (K, largest size), padded with each client's first index, and a mask of the real entries."""
        return self._table(np.arange(len(self)))

    def _table(self, clients: Places) -> tuple[Places, NDArray[np.bool_]]:
        """Return the rows of :meth:`table` for ``clients`` (k,) alone, padded only to the largest size of these clients."""
        sizes = self.sizes[clients, None]
        columns = np.arange(int(sizes.max(initial=0)))
        is_real = columns < sizes
        columns = np.where(is_real, columns, 0)  # 0 repeats the client's first index
        return self.places[self.starts[clients, None] + columns], is_real
