"""The root of a function, by Brent's method: digit by digit what ``scipy.optimize.brentq`` finds.

Importing ``scipy.optimize`` takes a tenth of the time of a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

_Point = tuple[float, float]
"""x, and the function there."""

_PRECISE = 4 * 2.0**-52


def brentq(
    function: Callable[[float], float], low: float, high: float, xtol: float = 2e-12, rtol: float = _PRECISE, maxiter: int = 100
) -> float:
    """Return x in [low, high] with a sign change of ``function`` within ``xtol`` + ``rtol`` |x| (Brent 1973, chapter 4).

    Raises:
        ValueError: the signs at both ends are the same, or a value is no number.
        RuntimeError: ``maxiter`` steps are too few.
    """
    # ``now`` is the best x so far, ``before`` the one before it, and ``opposite`` the last x at which the function has the other sign.
    before, now = float(low), float(high)
    at_before, at_now = _value_at(function, before), _value_at(function, now)
    if at_before == 0:
        return before
    if at_now == 0:
        return now
    if (at_before < 0) == (at_now < 0):
        raise ValueError(f"a function has the same sign at {low:g} and {high:g}: there may be no root between them")
    opposite = at_opposite = step = previous_step = 0.0
    for _ in range(maxiter):
        if at_before != 0 and at_now != 0 and (at_before < 0) != (at_now < 0):
            opposite, at_opposite = before, at_before
            step = previous_step = now - before
        if abs(at_opposite) < abs(at_now):
            before, now, opposite = now, opposite, now
            at_before, at_now, at_opposite = at_now, at_opposite, at_now
        precision = (xtol + rtol * abs(now)) / 2
        half = (opposite - now) / 2
        if at_now == 0 or abs(half) < precision:
            return now
        if abs(previous_step) > precision and abs(at_now) < abs(at_before):
            try:
                next_step = _interpolated((before, at_before), (now, at_now), (opposite, at_opposite))
            except ZeroDivisionError:  # rounding made two of the function's values equal
                next_step = inf
            # Take the interpolated step only if it is short enough, else halve the interval.
            step, previous_step = (
                (next_step, step) if 2 * abs(next_step) < min(abs(previous_step), 3 * abs(half) - precision) else (half, half)
            )
        else:
            step = previous_step = half
        before, at_before = now, at_now
        now += step if abs(step) > precision else (precision if half > 0 else -precision)
        at_now = _value_at(function, now)
    raise RuntimeError(f"no root was found in {maxiter} steps; the last was at {now:g}")


def _interpolated(before: _Point, now: _Point, opposite: _Point) -> float:
    """Return the step in x from ``now`` to the root of a line through two points, or of an inverse parabola through three.

    Two points remain if ``before`` and ``opposite`` have the same x.
    """
    if before[0] == opposite[0]:
        return -now[1] * (now[0] - before[0]) / (now[1] - before[1])
    first, second = (before[1] - now[1]) / (before[0] - now[0]), (opposite[1] - now[1]) / (opposite[0] - now[0])
    return -now[1] * (opposite[1] * second - before[1] * first) / (second * first * (opposite[1] - before[1]))


def _value_at(function: Callable[[float], float], x: float) -> float:
    """Return the function's value at ``x``. NaN raises a :class:`ValueError`, since its sign is unknown."""
    value = float(function(x))
    if isnan(value):
        raise ValueError(f"a function whose root is looked for has no value at {x:g}")
    return value
