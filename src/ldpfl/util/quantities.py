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
"""Maximum number of rounds of a run. The limits of files with an entry for each round follow from it."""

MAX_COUNT = 10**15
"""Maximum number of rows, clients, weights or bits in a run's files. Floats represent it exactly."""

Repeats = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
"""Type of a round's number, or of a number of rounds."""


def cohort_size(fraction: float, clients: int) -> int:
    """Return how many of ``clients`` clients are asked in a round: the ``fraction`` of them, rounded up, and at least 1.

    Rounding errors of the product are ignored: 0.07 * 100 gives 7.
    """
    return min(clients, max(1, ceil(fraction * clients - 1e-9)))


def is_number(value: object, *, whole: bool = False) -> bool:
    """Whether ``value`` is a number of Python's or NumPy's types; an integer, if ``whole``."""
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
