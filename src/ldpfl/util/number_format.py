"""Figures as people read them: few digits, rounded away from what would flatter."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from math import isfinite


def number(value: float | str, rounding: str = ROUND_CEILING) -> str:
    """Return a figure with four digits or so, and thousands apart; rounded up, as befits a bound from above, unless told otherwise.

    What binary fractions add to a figure of few digits, less than a part in 1e12 of it, is not rounded up.
    """
    if isinstance(value, str):
        return value
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    exact = Decimal(f"{value:.12e}")
    digits = 3 - exact.adjusted() if exact < 100 or exact >= 10**9 else 1 if exact < Decimal("9999.9") else 0
    shown = exact.quantize(Decimal(1).scaleb(-digits), rounding)
    return f"{float(shown):.4g}" if exact < 100 or exact >= 10**9 else f"{shown:,}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return ``count`` with thousands apart and the ``noun`` in its singular or ``plural``, which is the noun with an s if none is given.

    ``counted(1, "report")`` is "1 report", and ``counted(2000, "entry", "entries")`` is "2,000 entries".
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
