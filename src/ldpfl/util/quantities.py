"""Numbers that people write in settings: their types, which pydantic checks, and how many clients a share of them is."""

from __future__ import annotations

from math import ceil
from numbers import Integral, Real
from typing import Annotated

from pydantic import Field, FiniteFloat

Positive = Annotated[FiniteFloat, Field(gt=0)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
MAX_ROUNDS = 100_000
"""Rounds of a run, at most: the bounds of all files that have an entry a round follow from it."""

MAX_COUNT = 10**15
"""The largest number of rows, clients, weights or bits that a run's files are read with: floats have room for it."""

Repeats = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
"""Rounds, or a number of them."""


def cohort_size(fraction: float, clients: int) -> int:
    """Return how many of ``clients`` are asked in a round with this ``fraction`` of them: rounded up, at least 1.

    Rounding errors of the product are ignored: 0.07 * 100 gives 7.
    """
    return min(clients, max(1, ceil(fraction * clients - 1e-9)))


def is_number(value: object, *, whole: bool = False) -> bool:
    """Whether ``value`` is a number of Python's or NumPy's types; an integer, if ``whole``."""
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
