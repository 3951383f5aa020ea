"""Format numbers for people: few digits, rounded in the unfavourable direction."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from math import isfinite


def number(value: float | str, rounding: str = ROUND_CEILING) -> str:
    """Format a number for people. By default it is rounded up, as an upper bound must be.

    From 100 to 10,000 it has one decimal, and from there to 10**9 none, with thousands separators. Any other number has four significant
    digits. Rounding errors of binary fractions, which are below 1e-12 of the number, are ignored. A text is returned as it is.
    """
    if isinstance(value, str):
        return value
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    exact = Decimal(f"{value:.12e}")
    if 100 <= exact < 10**9:
        rounded = exact.quantize(Decimal("0.1") if exact < Decimal("9999.9") else Decimal(1), rounding)
        return f"{rounded:,}"
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 3), rounding)  # to four significant digits
    return f"{float(rounded):.4g}"


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


def format_duration(seconds: float) -> str:
    """Format a duration in the unit in which it has about two digits."""
    for unit, name in ((3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    if seconds < 0.1:
        return "less than 0.1 s"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size_text(count: float) -> str:
    """Format a number of bytes with three significant digits and a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"
