"""Search for the smallest argument at which a decreasing function is at most a target, on logarithmic scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from math import ceil, exp, log

from ldpfl.privacy.accountants.roots import brentq

OfFigure = Callable[[float], float]

_STEPS = 5
"""Number of evaluations of the slow function in :func:`smallest_by` before :func:`smallest` takes over."""

_APART = 0.01
"""Distance of two points, in logarithms of the argument, for estimating a slope."""

_USUALLY = 0.002
"""Typical log(upper bound / lower bound) of epsilon."""


def smallest(value: Callable[[float], float], guess: float, target: float, low: float, high: float, precise: float) -> float | None:
    """Return an x in [low, high] with ``value(x)`` <= ``target``, at most a relative ``precise`` above the smallest. None if there is none.

    ``value`` must be decreasing. A bracket is opened around the guess and then closed by Brent's method, on logarithmic scales.
    """

    @cache
    def excess(position: float) -> float:
        return log(max(value(exp(position)), 1e-300) / target)

    start, step = min(max(log(guess), log(low)), log(high)), 0.004
    left = right = start
    if excess(start) <= 0:
        while left > log(low) and excess(left) <= 0:
            left, right, step = max(left - step, log(low)), left, 2 * step
        if excess(left) <= 0:
            return exp(left)
    else:
        while excess(right) > 0:
            if right >= log(high):
                return None
            left, right, step = right, min(right + step, log(high)), 2 * step
    position = float(brentq(excess, left, right, xtol=precise / 4, rtol=1e-12))
    while excess(position) > 0:
        position += precise / 4
    return exp(position)


def smallest_by(value: OfFigure, near: OfFigure, start: float, target: float, low: float, high: float, precise: float) -> float | None:
    """Return the same as :func:`smallest` for a slow function ``value``, with the help of a faster function ``near`` slightly below it.

    ``start`` is the solution for ``near``. From there, the slope of ``near`` predicts the solution for ``value``. The result is checked by
    ``value`` itself, so it keeps the target whatever ``near`` is. That it is at most a relative ``precise`` too large holds only if both
    functions have about the same slope.
    """
    slope = log(near(start) / near(start * exp(_APART))) / _APART
    position, end = log(start), log(high)
    if slope > 0 and low < start:
        position += _USUALLY / slope
        for _ in range(_STEPS):
            position = min(position, end)
            excess = log(max(value(exp(position)), 1e-300) / target)
            if -precise * slope <= excess <= 0:
                return exp(position)
            position += excess / slope + precise / 4
    return smallest(value, exp(position), target, low, high, precise)


def fewest(value: Callable[[int], float], guess: float, target: float, most: int, precise: float) -> int | None:
    """Return the smallest n in 1 .. ``most`` with ``value(n)`` <= ``target``; None if there is none. ``value`` must be decreasing.

    Above 1 / ``precise``, n may be too small by a relative ``precise``. Each step is a secant step inside a bracket; every eighth step
    halves the bracket.
    """
    above, kept, number, slope = 0, most + 1, min(max(round(guess), 1), most), 0.5
    before: tuple[float, float] | None = None
    for step in count(1):
        position, excess = log(number), log(max(value(number), 1e-300) / target)
        above, kept = (number, kept) if excess > 0 else (above, number)
        width = max(1, int(precise * above))
        if kept - above <= width:
            break
        if before is not None and before[0] != position:
            slope = min(max((before[1] - excess) / (position - before[0]), 0.05), 20.0)
        before = position, excess
        wanted = (above + kept) // 2 if step % 8 == 0 else ceil(exp(min(position + excess / slope, log(most))))
        number = min(max(wanted, above + width), kept - width)
    return above + 1 if kept <= most else None
