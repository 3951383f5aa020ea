"""Persons who have several rows: which rows belong to which person, and which of them count in a round.

A person is all rows of one name in one client's data. Nothing here looks at the other cells of a row. Whether a person is trained on,
and at which client, follows from its own name by a public rule. Which of its rows count in a round follows from its own rows. So
replacing all rows of one person by those of another who is trained on at the same client changes no other person's vector.

How a gradient is rounded depends on its lane, which is its position in a block of the computation. A person's lane follows from its own
name too (:attr:`Persons.lanes`). So the lane does not depend on the order of the rows, or on other persons' names and numbers of rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral
from unicodedata import category, normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import MISSING_WORDS, means_no_value
from ldpfl.errors import ConfigError

Numbers = NDArray[np.int64]
Names = NDArray[np.object_]
"""The name of a person for each row."""

DEFAULT_ROWS = 8
"""Default maximum number of a person's rows that count in a round."""


def number_names(names: Iterable[str | tuple[int, str]]) -> Numbers:
    """Return a number for each of ``names``: equal for equal names, from 0 in ascending order of the names.

    The order of ``names`` does not matter. It is the order of rows, and otherwise one person's rows would change all others' numbers.
    """
    all_names = list(names)
    number_of = {name: number for number, name in enumerate(sorted(set(all_names)))}
    return np.array([number_of[name] for name in all_names], dtype=np.int64)


def normalise_names(given: Iterable[object]) -> list[str]:
    """Normalise the names of persons as in a table. The result is "" for a value that names nobody.

    Whole numbers become text, and texts are normalised by :func:`normalise_text`. Any other value names nobody.
    """
    return [_normalise_name(value) for value in given]


def _normalise_name(value: object) -> str:
    """Return the name in one cell, by the rules of :func:`normalise_names`. A float such as 7.0 is a number that pandas has converted."""
    if isinstance(value, str):
        name = normalise_text(value)
        return "" if means_no_value(name, MISSING_WORDS) else name
    if isinstance(value, bool):
        return ""
    if isinstance(value, Integral):
        return str(int(value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else ""


_NUMBER = re.compile(r"[+-]?(?:\d+|(?:\d+[.,]\d*|[.,]\d+)(?:[eE][+-]?\d{1,3})?|\d+[eE][+-]\d{1,3})")
"""Matches a number as programs write it, also with a decimal comma."""

_MAX_NUMBER_LENGTH = 60
"""Maximum number of characters, and of digits before or after the point, of a name that is read as a number."""


def written_number(text: str) -> Decimal | None:
    """Return the number that a program wrote as ``text``, or None. A code such as 12E5, without a point or a sign, is no number."""
    return Decimal(text.replace(",", ".")) if _NUMBER.fullmatch(text) else None


_GROUPED_NUMBER = re.compile(r"([+-]?\d{1,3}(?:(?:,\d{3})+(?=\.|$)|(?: \d{3})+|(?:'\d{3})+|(?:\.\d{3}){2,}))(?:[.,]0+)?")
"""Matches a whole number with a sign between thousands. One point is not such a sign but a decimal point."""
_APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"))


def visible_text(text: str) -> str:
    """Return ``text`` without characters of no width, with plain blanks, hyphens and apostrophes, and in one Unicode form (NFKC)."""
    if not text.isascii():
        shown = "".join(sign for sign in text if category(sign) != "Cf" and not "\ufe00" <= sign <= "\ufe0f")  # variation selectors
        one_form = normalize("NFKC", shown.translate(_APOSTROPHES))
        text = "".join("-" if sign == "\u2212" or category(sign) == "Pd" else sign for sign in one_form)
    return " ".join(text.split())


def normalise_text(text: str) -> str:
    """Return the form in which names are compared: the :func:`visible_text`, and numbers in one form.

    One file may write 1700 as 1700.0, +1700, 01700, 1.7E3 or 1,700. Two persons whose names become equal are protected as one, and so each
    of them. One person with two names would count as two, and its epsilon would be larger than stated.
    """
    name = visible_text(text).replace(" -", "-").replace("- ", "-")
    if grouped := _GROUPED_NUMBER.fullmatch(name):
        name = re.sub(r"[^\d+-]", "", grouped[1])
    number = written_number(name) if len(name) <= _MAX_NUMBER_LENGTH else None
    if number is None or abs(number.adjusted()) >= _MAX_NUMBER_LENGTH:
        return name
    digits = f"{number:f}" if number else "0"  # a number 0 may have a sign
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def client_name(text: str) -> str:
    """Return the name of a client that a cell gives as ``text``. Whole numbers are normalised, but leading zeros stay: names are shown."""
    name = visible_text(text)
    number = normalise_text(name)
    return number if number.isdecimal() and not (name.isascii() and name.isdecimal()) else name


def uniform_by_name(names: Iterable[str], label: str) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each of ``names``, which depends only on that name and the public ``label``.

    The number is made of 53 bits of a SHA-256, as many as a float holds. One name's numbers under different labels are independent.
    """
    number_by_name: dict[str, float] = {}

    def number_of(name: str) -> float:
        """Return the number of ``name``, computed once for equal names."""
        if name not in number_by_name:
            digest = hashlib.sha256(f"{label}\0{name}".encode(errors="surrogatepass")).digest()
            number_by_name[name] = (int.from_bytes(digest[:8]) >> 11) * 2.0**-53
        return number_by_name[name]

    return np.array([number_of(name) for name in names], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Persons:
    """Which rows belong to which person. Build it with :meth:`of`.

    Attributes:
        rows: indices of all rows that count, person by person.
        first: (P,) where in ``rows`` each person's rows begin.
        counts: (P,) number of rows of each person.
        lanes: (P,) lane of each person, as a share of all lanes in [0, 1). It depends only on the person's name.
        most: maximum number of a person's rows in one round. Each person takes this many positions in a round, even with fewer rows.
            A gradient's rounding depends on its position, so other persons' positions must not depend on this person's rows.
    """

    rows: Numbers
    first: Numbers
    counts: Numbers
    lanes: NDArray[np.float64]
    most: int

    @classmethod
    def of(cls, names: Sequence[str], most: int, *, clients: Numbers | None = None, answered: NDArray[np.bool_] | None = None) -> Persons:
        """Return the persons of all rows with a name, sorted by client and name.

        Args:
            names: (N,) name of each row's person. A row with the name "" is ignored.
            most: maximum number of a person's rows that count in one round.
            clients: (N,) client of each row. The same name at two clients is two persons. None if there is one client.
            answered: (N,) whether each row has a target; None if all have one. Rows without a target do not count. A person with only
                such rows keeps them: it takes part and contributes nothing.

        Raises:
            ConfigError: no row has a name, or ``most`` is below 1.
        """
        if most < 1:
            raise ConfigError(f"data.person_rows, the maximum number of a person's rows used in a round, is {most}, expected at least 1")
        named_rows = np.flatnonzero([name != "" for name in names])
        if not named_rows.size:
            raise ConfigError("the column that data.person names is empty in all rows: name another column, or leave data.person out")
        owners = np.zeros(named_rows.size, dtype=np.int64) if clients is None else clients[named_rows]
        numbers = number_names(zip(owners.tolist(), (names[row] for row in named_rows.tolist()), strict=True))
        has_target = np.ones(named_rows.size, dtype=bool) if answered is None else answered[named_rows]
        targets_by_person = np.bincount(numbers[has_target], minlength=int(numbers.max()) + 1)
        counting = np.flatnonzero(has_target | (targets_by_person[numbers] == 0))  # indices into named_rows
        rows = named_rows[counting[np.argsort(numbers[counting], kind="stable")]]  # person by person
        counts = np.bincount(numbers[counting])
        first = np.cumsum(counts) - counts
        lanes = uniform_by_name((names[row] for row in rows[first].tolist()), "lane")
        return cls(rows, first, counts, lanes, most)

    def __len__(self) -> int:
        return len(self.counts)

    def all_rows_of(self, persons: Numbers) -> tuple[Numbers, Numbers]:
        """Return all rows (N,) of ``persons`` (P,), person by person, and for each row the number of its person's rows (N,)."""
        counts = self.counts[persons]
        starts = np.repeat(np.cumsum(counts) - counts, counts)  # for each row, where its person's rows start in the result
        places = np.repeat(self.first[persons], counts) + np.arange(counts.sum()) - starts
        return self.rows[places], np.repeat(counts, counts)

    def rows_in_round(self, persons: Tensor, round_number: int) -> tuple[Tensor, Tensor]:
        """Return the rows (P, most) of ``persons`` (P,) that count in the round ``round_number``, and a mask (P, most) of real rows.

        Rounds are counted from 1. The rows of a person with more than ``most`` take turns from round to round. A person with fewer rows
        is padded with copies of its first row, for which the mask is 0.
        """
        numbers = persons.cpu().numpy()
        counts = self.counts[numbers][:, None]
        places = np.arange(self.most)
        rows_used_before = np.where(counts > self.most, (round_number - 1) * self.most, 0)
        is_real = places < counts
        place_in_person = np.where(is_real, (rows_used_before + places) % counts, 0)
        rows = self.rows[self.first[numbers][:, None] + place_in_person]
        mask = torch.from_numpy(is_real.astype(np.float32))
        return torch.from_numpy(rows).to(persons.device), mask.to(persons.device)
