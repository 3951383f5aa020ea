"""Search for the smallest argument at which a decreasing function is at most a target, on logarithmic scales."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from math import ceil, exp, inf, log, log10

from ldpfl.errors import ConfigError
from ldpfl.util.lazy_imports import optimize
from ldpfl.util.number_format import number

Decreasing = Callable[[float], float]
"""A positive decreasing function, such as epsilon as a function of the noise."""

_MAX_SLOW_STEPS = 5
"""Maximum number of evaluations of the slow function in :func:`smallest_argument_of_slow` before :func:`smallest_argument` takes over."""

_SLOPE_INTERVAL = 0.01
"""Distance of two points, as a difference of logarithms of the argument, between which a slope is estimated."""

_TYPICAL_GAP = 0.002
"""Typical log(upper bound / lower bound) of epsilon."""

_FIRST_STEP = 0.004
"""First step from the guess, as a difference of logarithms. Each further step is twice as long."""

_TINY = 1e-300
"""Smallest value whose logarithm is taken, in place of 0."""


MIN_STRENGTH, MAX_STRENGTH = 1e-6, 1e4
"""Range of a search for the strength of a mechanism: its epsilon, or 1 / noise multiplier. A larger strength means less noise."""

STRENGTH_TOLERANCE = 1e-3
"""Relative precision of the strength that is found."""


def reachable_range(epsilon_of: Callable[[float], float]) -> str:
    """Return the finite epsilons at the smallest and the largest strength that a mechanism accepts, as "0.1 to 8"; "" if there are none.

    Only powers of ten are tried. ``epsilon_of`` raises a :class:`ConfigError` for a strength that the mechanism does not accept.
    """
    powers = [10.0**power for power in range(round(log10(MIN_STRENGTH)), round(log10(MAX_STRENGTH)) + 1)]
    epsilons = []
    for order in (powers, powers[::-1]):
        for strength in order:
            with suppress(ConfigError):
                epsilons.append(epsilon_of(strength))
                break
    reachable = [epsilon for epsilon in epsilons if epsilon < inf]
    return f"{number(min(reachable))} to {number(max(reachable))}" if reachable else ""


def smallest_argument(function: Decreasing, guess: float, target: float, low: float, high: float, tolerance: float) -> float | None:
    """Return the smallest x in [low, high] with ``function(x)`` <= ``target``; None if there is no such x.

    The result may be too large by a relative ``tolerance``. ``function`` must be decreasing. From ``guess``, steps of growing length find
    two points with the solution between them. Brent's method then narrows this bracket, on logarithmic scales.
    """

    @cache
    def excess(position: float) -> float:
        """Return log(function value / target) at the argument exp(``position``). It is at most 0 where the target is kept."""
        return log(max(function(exp(position)), _TINY) / target)

    start, step = min(max(log(guess), log(low)), log(high)), _FIRST_STEP
    left = right = start
    if excess(start) <= 0:
        while left > log(low) and excess(left) <= 0:  # the target is kept: go left until it is not
            left, right, step = max(left - step, log(low)), left, 2 * step
        if excess(left) <= 0:  # it is kept down to ``low``
            return exp(left)
    else:
        while excess(right) > 0:  # the target is missed: go right until it is kept
            if right >= log(high):
                return None
            left, right, step = right, min(right + step, log(high)), 2 * step
    # Brent's method may end slightly left of the solution. Its error of a quarter of the tolerance leaves room for steps to the right.
    position = float(optimize.brentq(excess, left, right, xtol=tolerance / 4, rtol=1e-12))
    while excess(position) > 0:
        position += tolerance / 4
    return exp(position)


def smallest_argument_of_slow(
    slow: Decreasing, fast: Decreasing, start: float, target: float, low: float, high: float, tolerance: float
) -> float | None:
    """Return :func:`smallest_argument` of the function ``slow``, in fewer calls, with the help of a faster function slightly below it.

    ``start`` is the solution for ``fast``. From there, the slope of ``fast`` predicts the solution for ``slow``. The result is checked by
    ``slow`` itself, so it reaches the target whatever ``fast`` is. It is at most a relative ``tolerance`` too large only if both functions
    have about the same slope.
    """
    slope = log(fast(start) / fast(start * exp(_SLOPE_INTERVAL))) / _SLOPE_INTERVAL  # how fast log(fast) falls by log(argument)
    position, end = log(start), log(high)
    if slope > 0 and low < start:  # at ``low``, ``fast`` may lie far below the target, so that it predicts nothing
        position += _TYPICAL_GAP / slope
        for _ in range(_MAX_SLOW_STEPS):
            position = min(position, end)
            excess = log(max(slow(exp(position)), _TINY) / target)
            if -tolerance * slope <= excess <= 0:  # within the target, and at most the tolerance to the right of the solution
                return exp(position)
            position += excess / slope + tolerance / 4  # along the slope to the solution, and slightly beyond it
    return smallest_argument(slow, exp(position), target, low, high, tolerance)


def smallest_count(function: Callable[[int], float], guess: float, target: float, highest: int, tolerance: float) -> int | None:
    """Return the smallest n in 1 .. ``highest`` with ``function(n)`` <= ``target``; None if there is none. ``function`` must be decreasing.

    Above 1 / ``tolerance``, n may be too small by a relative ``tolerance``. The search keeps a bracket: a number that is too small, and
    one that is enough. Each step follows the secant through the last two points, within the bracket; every eighth step halves the bracket.
    """
    too_few, enough, tried = 0, highest + 1, min(max(round(guess), 1), highest)
    slope = 0.5  # of -log(value) by log(n), until two points are known: epsilon behind a shuffler falls as 1 / sqrt(n)
    previous: tuple[float, float] | None = None
    for step in count(1):
        position, excess = log(tried), log(max(function(tried), _TINY) / target)
        too_few, enough = (tried, enough) if excess > 0 else (too_few, tried)
        width = max(1, int(tolerance * too_few))
        if enough - too_few <= width:
            break
        if previous is not None:
            previous_position, previous_excess = previous
            if previous_position != position:
                # The bounds are for rounding errors, by which the slope between two close points may be 0 or negative.
                slope = min(max((previous_excess - excess) / (position - previous_position), 0.05), 20.0)
        previous = position, excess
        proposed = (too_few + enough) // 2 if step % 8 == 0 else ceil(exp(min(position + excess / slope, log(highest))))
        tried = min(max(proposed, too_few + width), enough - width)
    return too_few + 1 if enough <= highest else None
