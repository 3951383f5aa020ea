"""Format numbers for people: few digits, rounded in the unfavourable direction."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from math import isfinite


def number(value: float | str, rounding: str = ROUND_CEILING) -> str:
    """Format a number with about four digits and thousands separators. By default it is rounded up, as an upper bound must be.

    Rounding errors of binary fractions, relative to the number less than 1e-12, are not rounded up.
    """
    if isinstance(value, str):
        return value
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    exact = Decimal(f"{value:.12e}")
    digits = 3 - exact.adjusted() if exact < 100 or exact >= 10**9 else 1 if exact < Decimal("9999.9") else 0
    shown = exact.quantize(Decimal(1).scaleb(-digits), rounding)
    return f"{float(shown):.4g}" if exact < 100 or exact >= 10**9 else f"{shown:,}"


NO_EPSILON = "none"
"""Text in the place of an infinite epsilon: no bound is known, or nothing is protected."""


def epsilon_text(epsilon: float | str, rounding: str = ROUND_CEILING) -> str:
    """Format an epsilon as :func:`number` does. An infinite one, which JSON holds as the word ``"infinity"``, becomes "none"."""
    return number(float(epsilon), rounding) if isfinite(float(epsilon)) else NO_EPSILON


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return ``count`` with thousands separators, and the ``noun`` in singular or ``plural``; the default plural is the noun with an s.

    ``counted(1, "report")`` is "1 report", and ``counted(2000, "entry", "entries")`` is "2,000 entries".
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
