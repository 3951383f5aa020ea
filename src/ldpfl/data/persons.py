"""Persons who have several rows: which rows are whose, and which of them count in a round.

A person is all rows of one name in one client's data. Nothing here looks at what else stands in a row. Whether a person is trained on,
and at which client, follows from its own name by a public rule. Which of its rows count in a round follows from its own rows. So
replacing all rows of one person by those of another who is trained on at the same client changes no other person's vector.

How a gradient is rounded depends on its lane, which is its place in a block of the computation. A person's lane follows from its own name
too (:attr:`Persons.lanes`). So it does not depend on where rows stand, on how many rows others have, or on what others are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import MISSING_WORDS, no_value
from ldpfl.errors import ConfigError

Numbers = NDArray[np.int64]
Names = NDArray[np.object_]
"""The name of a person for each row."""

DEFAULT_ROWS = 8
"""Rows of a person that count in a round, at most, where no setting says another number."""


def numbered(names: Iterable[str | tuple[int, str]]) -> Numbers:
    """Return a number for each of ``names``, the same for equal names, from 0 in ascending order of the names.

    The order in which the names are given does not count: it is that of rows, which one person's rows would change for all others.
    """
    given = list(names)
    numbers = {name: number for number, name in enumerate(sorted(set(given)))}
    return np.array([numbers[name] for name in given], dtype=np.int64)


def names_of(given: Iterable[object]) -> list[str]:
    """Return the names of persons as a table's are read, "" where nobody is named.

    Whole numbers become text. Texts lose the space around them and are brought to one Unicode form (NFC). Anything else names nobody.
    """
    return [_name_of(value) for value in given]


def _name_of(value: object) -> str:
    if isinstance(value, str):
        return "" if no_value(value, MISSING_WORDS) else normalize("NFC", value.strip())
    if isinstance(value, bool):
        return ""
    if isinstance(value, Integral):
        return str(int(value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else ""


def uniform_by_name(names: Iterable[str], label: str) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each of ``names``, which follows from that name and the public ``label`` alone.

    It has 53 bits of a SHA-256. Numbers of one name by different labels tell nothing of each other.
    """
    known: dict[str, float] = {}

    def number(name: str) -> float:
        if name not in known:
            digest = hashlib.sha256(f"{label}\0{name}".encode(errors="surrogatepass")).digest()
            known[name] = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
        return known[name]

    return np.array([number(name) for name in names], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Persons:
    """Which rows are whose; build it with :meth:`of`.

    Attributes:
        rows: positions of all rows that count, person by person.
        first: (P,) where in ``rows`` those of a person begin.
        counts: (P,) how many rows a person has.
        lanes: (P,) the lane of a person, as a share of all lanes in [0, 1), which its own name alone decides.
        most: rows of a person that count in one round, at most. A person takes so many places in each round, whether or not it has so
            many rows: how a gradient is rounded depends on its place, so the places of others must not depend on this person's rows.
    """

    rows: Numbers
    first: Numbers
    counts: Numbers
    lanes: NDArray[np.float64]
    most: int

    @classmethod
    def of(cls, names: Sequence[str], most: int, *, clients: Numbers | None = None, answered: NDArray[np.bool_] | None = None) -> Persons:
        """Return the persons of the rows that have a name, in ascending order of their clients and names.

        Args:
            names: (N,) the name of each row's person. A row of nobody, "", adds nothing, as if it were not there.
            most: rows of a person that count in one round, at most.
            clients: (N,) the client of each row, by whom persons of one name differ; None if there is one client.
            answered: (N,) whether a row has an answer to learn. A row without one does not count, unless its person has no other: then
                that person takes part and teaches nothing. None if all have one.

        Raises:
            ConfigError: no row has a name, or no row of a person is to count.
        """
        if most < 1:
            raise ConfigError(f"data.person_rows is the number of a person's rows that count in a round, at least 1, got {most}")
        named = np.flatnonzero([name != "" for name in names])
        if not named.size:
            raise ConfigError("no row names a person")
        owners = np.zeros(named.size, dtype=np.int64) if clients is None else clients[named]
        numbers = numbered(zip(owners.tolist(), (names[row] for row in named.tolist()), strict=True))
        counted = np.ones(named.size, dtype=bool) if answered is None else answered[named]
        told = np.bincount(numbers[counted], minlength=int(numbers.max()) + 1)
        kept = np.flatnonzero(counted | (told[numbers] == 0))
        rows = named[kept[np.argsort(numbers[kept], kind="stable")]]
        counts = np.bincount(numbers[kept])
        first = np.cumsum(counts) - counts
        return cls(rows, first, counts, uniform_by_name((names[row] for row in rows[first].tolist()), "lane"), most)

    def __len__(self) -> int:
        return len(self.counts)

    def rows_of(self, persons: Numbers) -> tuple[Numbers, Numbers]:
        """Return all rows (N,) of ``persons`` (P,), person by person, and with each row how many its person has (N,)."""
        counts = self.counts[persons]
        before = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(self.first[persons], counts) + np.arange(counts.sum()) - before
        return self.rows[places], np.repeat(counts, counts)

    def turn(self, persons: Tensor, round_number: int) -> tuple[Tensor, Tensor]:
        """Return the rows (P, most) of ``persons`` (P,) that count in a round, from 1, and a mask (P, most) of those that are there.

        A person with more rows than count has them take turns, in their order, from round to round. One with fewer has copies of its
        first row in the other places, which the mask blanks out.
        """
        own = persons.cpu().numpy()
        counts, places = self.counts[own][:, None], np.arange(self.most)
        begin = np.where(counts > self.most, (round_number - 1) * self.most, 0)
        there = places < counts
        index = self.rows[self.first[own][:, None] + np.where(there, (begin + places) % counts, 0)]
        mask = torch.from_numpy(there.astype(np.float32))
        return torch.from_numpy(index).to(persons.device), mask.to(persons.device)
