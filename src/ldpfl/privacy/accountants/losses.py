"""Discrete privacy loss distributions (PLDs): from a PLD to (epsilon, delta), and composition by convolution.

P and R are the distributions of the output under two neighbouring inputs. The loss of an output is log(P / R). Masses are probabilities
under P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import ceil, exp, expm1, floor, inf, isfinite, isnan, log

import numpy as np
from scipy import fft
from scipy.special import logsumexp

from ldpfl.privacy.accountants.binomial import Array, convolved
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment
from ldpfl.util.lazy_imports import optimize

MAX_SIZE = 1 << 22
"""Largest number of losses that a convolution may produce: about a second, and 300 MB, on one core."""

_SMALLEST = 1e-200  # smaller masses are set to 0 before a composition, in which they would cause overflow

_ROUNDING = 1e-15
"""Relative error of one Fourier coefficient; raising to the k-th power multiplies it by k."""

_ORDERS = 20
"""Number of Chernoff orders on each side for bounding tails. The orders are multiples of 1 / (number of losses)."""

_VANISHES = -75.0
"""Fourier coefficients with a logarithm below this are set to 0: they are smaller than the rounding of the others."""

_MOST_TOO_MUCH = 100.0
"""Largest logarithm of the total mass after composition. Rounding may raise the total above 1, and composition amplifies that."""

_SHORT = 10_000
"""Number of losses up to which :func:`epsilon_of` looks at all losses at once. Looking at the highest first would save nothing."""

_FLAT = 600.0
"""Largest difference of losses whose exponentials neither overflow nor vanish."""


@dataclass(frozen=True, eq=False)
class GridLosses:
    """Losses on a grid: ``masses[i]`` is the probability of the loss (first + i) * step, and ``infinite`` that of an infinite loss."""

    step: float
    first: int
    masses: Array
    infinite: float = 0.0

    @property
    def losses(self) -> Array:
        return np.asarray((self.first + np.arange(self.masses.size)) * self.step)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 with (epsilon, ``delta``)-DP."""
        return epsilon_of(self.losses, self.masses, delta - self.infinite)

    def composed(self, times: int, delta: float) -> GridLosses | None:
        """Return the PLD of ``times`` independent releases, or None if it would be too long or too inexact.

        Tails are truncated where a Chernoff bound shows that their mass is small. The possible error of rounding and truncation is added to
        ``infinite``, so the result stays an upper bound. If this error is not small compared with ``delta``, the result is None.
        """
        if times == 1:
            return self
        tail, error = 1e-6 * delta, times * _ROUNDING
        masses = np.where(self.masses > _SMALLEST, self.masses, 0.0)
        if error > 0.1 * delta or times * log(max(float(masses.sum()), 1.0)) > _MOST_TOO_MUCH:
            return None
        low, high = _convolution_bounds(masses, times, tail)
        if high - low >= MAX_SIZE:
            return None
        # First term: 1 - (1 - p)^times, the probability that some release has an infinite loss, which each has with probability p.
        infinite = -np.expm1(times * np.log1p(-self.infinite)) + tail + error
        return GridLosses(self.step, self.first * times + low, _self_convolved(masses, times, low, high), float(infinite))

    def composed_epsilon(self, times: int, delta: float) -> float:
        """Return the epsilon at ``delta`` of ``times`` releases: the smaller one of convolution and Rényi divergences."""
        composed = self.composed(times, delta)
        by_convolution = composed.epsilon(delta) if composed is not None else inf

        def log_moment(order: Array) -> Array:
            """Return log E[e^(order * loss)] of all releases."""
            return times * largest_log_moment(self.losses, self.masses[None], order)

        return min(by_convolution, epsilon_from_log_moment(log_moment, delta - times * self.infinite))

    def followed_by(self, other: GridLosses) -> GridLosses:
        """Return the PLD of this release together with an independent ``other`` release on the same grid."""
        infinite = self.infinite + other.infinite - self.infinite * other.infinite  # the probability that either loss is infinite
        masses = np.maximum(convolved(self.masses, other.masses), 0.0)
        return GridLosses(self.step, self.first + other.first, masses, infinite + _ROUNDING)


def _convolution_bounds(masses: Array, times: int, tail: float) -> tuple[int, int]:
    """Return (low, high) such that the sum of ``times`` independent indices lies outside with a probability of at most ``tail``.

    ``masses`` are the probabilities of the indices 0, 1, ... The result is that of dp-accounting's ``compute_self_convolve_bounds``, digit
    by digit: the best Chernoff bound of 20 orders on each side. Importing dp-accounting would take longer than a whole plan.
    """
    low, high = 0, (masses.size - 1) * times
    orders = np.concatenate([np.arange(-_ORDERS, 0), np.arange(1, _ORDERS + 1)]) / masses.size
    moments = logsumexp(np.outer(orders, np.arange(masses.size)), b=masses, axis=1)
    for order, moment in zip(orders.tolist(), moments.tolist(), strict=True):
        bound = (times * moment + log(2 / tail)) / order
        if isfinite(bound) and order > 0:
            high = min(high, ceil(bound))
        elif isfinite(bound):
            low = max(low, floor(bound))
    return low, high


def _self_convolved(masses: Array, times: int, low: int, high: int) -> Array:
    """Return the distribution of the sum of ``times`` independent indices, from ``low`` to ``high``; the mass outside wraps around.

    ``masses`` are the probabilities of the indices 0, 1, ... Only frequencies whose power does not vanish are computed: for many releases,
    these are a few around 0.
    """
    size = fft.next_fast_len(max(high - low + 1, masses.size), real=True)
    transform = fft.rfft(masses, size)
    magnitude = np.abs(transform)
    candidates = np.flatnonzero(magnitude > exp(_VANISHES / times) / 2)  # take logarithms of these only
    log_size = times * np.log(magnitude[candidates])
    present, log_size = candidates[log_size > _VANISHES], log_size[log_size > _VANISHES]
    power = np.exp(log_size + 1j * (times * np.angle(transform[present])))
    transform[:] = 0.0
    transform[present] = power
    return np.asarray(np.maximum(np.roll(fft.irfft(transform, size), -low)[: high - low + 1], 0.0))


@dataclass(frozen=True)
class PrivacyCurve:
    """An upper bound of delta as a function of epsilon for one kind of release, in both directions.

    Attributes:
        delta: returns delta at an epsilon >= 0; decreasing.
        limit: an upper bound of the loss.
        times: number of releases of this kind.
        smallest_delta: smallest value of delta that is reliable in floating point.
    """

    delta: Callable[[float], float]
    limit: float
    times: int
    smallest_delta: float = 1e-18

    def at(self, epsilon: float) -> float:
        """Return delta at ``epsilon``; 1, which always holds, if the computation gives NaN."""
        delta = self.delta(epsilon)
        return 1.0 if isnan(delta) else delta


def composed_curves(curves: Sequence[PrivacyCurve], delta: float, points: int = 1024) -> float:
    """Return an upper bound of epsilon at ``delta`` for all releases together, also adaptive ones; infinite if none is found.

    Each curve is evaluated at ``points`` losses, up to one that is exceeded with negligible probability. The privacy loss distributions of
    the dominating pairs are then convolved.
    """
    total = sum(curve.times for curve in curves)
    if total == 1:
        return _single_epsilon(next(curve for curve in curves if curve.times), delta)
    step = max((_largest_likely_loss(curve, 1e-4 * delta / total) for curve in curves), default=0.0) / points
    if step == 0:  # every curve is negligible already at epsilon 0
        return 0.0 if all(curve.at(0.0) * curve.times * len(curves) <= delta for curve in curves) else inf
    losses = []
    for curve in curves:
        last = points if curve.limit == inf else min(points, ceil(curve.limit / step))
        losses.append(from_curve(np.array([curve.at(index * step) for index in range(last + 1)]), step))
    if len(curves) == 1:
        return losses[0].composed_epsilon(total, delta)
    composed = [loss.composed(curve.times, delta) for loss, curve in zip(losses, curves, strict=True)]
    known = [loss for loss in composed if loss is not None]
    return reduce(GridLosses.followed_by, known).epsilon(delta) if len(known) == len(curves) else inf


def _largest_likely_loss(curve: PrivacyCurve, delta: float) -> float:
    """Return a loss at which the curve's delta has fallen to about ``delta``."""
    return _epsilon_at_delta(curve, max(delta, curve.smallest_delta), 1e-3) * 1.01


def _single_epsilon(curve: PrivacyCurve, delta: float) -> float:
    """Return an epsilon at ``delta`` of one release: where its curve falls to ``delta``, or slightly above, so that it is safe."""
    if delta < curve.smallest_delta:
        return curve.limit
    epsilon = _epsilon_at_delta(curve, delta, 1e-6)
    step = max(1e-6 * epsilon, 1e-12)
    while epsilon < curve.limit and curve.at(epsilon) > delta:
        epsilon, step = epsilon + step, 2 * step
    return min(epsilon, curve.limit)


def _epsilon_at_delta(curve: PrivacyCurve, delta: float, precision: float) -> float:
    """Return the epsilon at which the curve falls to ``delta``, too large or too small by the relative ``precision`` at most.

    If the curve does not fall so far, return its limit. That epsilon holds at every delta, since no loss is larger.
    """
    if curve.at(0.0) <= delta:
        return 0.0
    high = min(curve.limit, 1e-6)
    while high < curve.limit and curve.at(high) > delta:
        high = min(curve.limit, 4 * high)
    if curve.at(high) > delta:
        return curve.limit
    return float(optimize.brentq(lambda epsilon: curve.at(epsilon) - delta, 0.0, high, xtol=precision * high, rtol=precision))


def largest_with_mass(losses: Array, rows: Array) -> float:
    """Return the largest of ``losses`` (N,) that has a mass in any of ``rows`` (R, N)."""
    return float(losses[np.flatnonzero(rows.any(axis=0))[-1]])


def largest_log_moment(losses: Array, rows: Array, order: Array, peak: float | None = None) -> Array:
    """Return the largest log E[e^(order * loss)] over ``rows`` of masses (R, N) on ``losses`` (N,), for each order (T,).

    ``peak`` is the result of :func:`largest_with_mass`, for repeated calls. Losses are taken relative to it, so that nothing important
    underflows.
    """
    peak = largest_with_mass(losses, rows) if peak is None else peak
    moments = np.max(rows @ np.exp(np.minimum(np.outer(losses - peak, order), 0.0)), axis=0)
    # A moment that still underflows is unknown, so it counts as infinite.
    return np.asarray(np.where(moments > 0, np.log(np.maximum(moments, 1e-300)) + peak * order, inf))


def epsilon_of(losses: Array, masses: Array, delta: float) -> float:
    """Return the smallest epsilon >= 0 that is (epsilon, ``delta``)-DP for the PLD of ``losses`` (ascending) and ``masses``.

    P and R are the laws of the output under two neighbouring inputs. delta(epsilon) is the largest P(S) - e^epsilon R(S) over the sets S of
    the highest losses, so epsilon is the largest log((P(S) - delta) / R(S)). R(S) is kept as a logarithm where losses of many thousands
    would overflow or vanish.
    """
    if delta <= 0:
        return inf
    set_masses = np.cumsum(masses[::-1])  # P(S) of the sets of the highest 1, 2, ... losses
    if not (set_masses > delta).any():
        return 0.0 if np.isfinite(set_masses[-1]) else inf  # a NaN means that nothing is known
    # R(S) grows with S, and P(S) is at most the total mass. So no larger set exceeds log(total / R) of the largest small set. Usually this
    # shows that the maximum is at a small set, up to a fifth of the mass, and the loop ends early.
    is_flat = losses[-1] - losses[0] < _FLAT
    fifth = min(int(np.searchsorted(set_masses, 0.2 * set_masses[-1])) + 1, set_masses.size)
    sizes = (fifth, set_masses.size) if set_masses.size > _SHORT else (set_masses.size,)
    for size in sizes:
        tail_masses = set_masses[:size]
        log_lower = _log_second_probability(losses[::-1][:size], masses[::-1][:size], is_flat)
        relevant = tail_masses > delta
        if relevant.any():
            epsilon = float(np.max(np.log(tail_masses[relevant] - delta) - log_lower[relevant]))
            bound_of_larger_sets = log(set_masses[-1]) - log_lower[-1]
            if bound_of_larger_sets + 1e-9 * max(1.0, abs(epsilon)) <= epsilon:  # the addend covers rounding
                break
    return inf if isnan(epsilon) else max(0.0, epsilon)


def _log_second_probability(losses: Array, masses: Array, is_flat: bool) -> Array:
    """Return log R(S) of the sets S of the first 1, 2, ... of ``losses`` (descending), whose ``masses`` are probabilities under P.

    P and R are the laws of the output under two neighbouring inputs. A loss is log(P / R), so its mass under R is mass * e^-loss.
    """
    with np.errstate(divide="ignore"):
        if is_flat:  # ten times as fast
            return np.asarray(np.log(np.cumsum(masses * np.exp(losses[0] - losses))) - losses[0])
        return np.asarray(np.logaddexp.accumulate(np.log(masses) - losses))


def delta_of(losses: Array, masses: Array, epsilon: float) -> float:
    """Return delta(epsilon) = sum of mass * (1 - e^(epsilon - loss)) over losses above ``epsilon``."""
    above = losses > epsilon
    return float(np.dot(masses[above], -np.expm1(epsilon - losses[above])))


def curve_of(losses: Array, masses: Array, epsilons: Array) -> Array:
    """Return delta at each of ``epsilons`` for the PLD of ``losses`` (ascending) and ``masses``, to an absolute error of some 1e-15.

    delta is P(S) - e^epsilon R(S) for the set S of losses above epsilon: see :func:`epsilon_of`.
    """
    first_probability = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
    with np.errstate(divide="ignore"):
        log_second_probability = np.append(np.logaddexp.accumulate((np.log(masses) - losses)[::-1])[::-1], -np.inf)
    above = np.searchsorted(losses, epsilons, side="right")
    subtracted = np.exp(np.minimum(epsilons + log_second_probability[above], 0.0))
    return np.asarray(np.maximum(first_probability[above] - subtracted, 0.0))


def connect_the_dots(losses: Array, masses: Array, step: float, first: int, size: int) -> Array:
    """Return masses on the grid (first + i) * step, i < size, whose delta is nowhere below that of the given losses.

    Each loss is split over its two neighbours so that its mass under both inputs is kept (Doroshenko et al. 2022,
    Algorithm 1). Losses below the grid move up to its first point; none may lie above it.
    """
    position = np.maximum(losses / step - first, 0.0)
    if position.max(initial=0.0) > size - 1 + 1e-9:
        raise ValueError("a loss lies above the grid: moving it down would not be safe")
    below = np.minimum(position.astype(np.int64), size - 2)
    upper_share = np.clip(np.expm1(-(position - below) * step) / np.expm1(-step), 0.0, 1.0)  # keeps the mean of e^-loss
    grid: Array = np.bincount(below, weights=masses * (1 - upper_share), minlength=size).astype(np.float64)
    return grid + np.bincount(below + 1, weights=masses * upper_share, minlength=size)


def split_over_lattice(values: Array, chances: Array, step: float) -> tuple[Array, Array]:
    """Return multiples of ``step``, as whole numbers, and their probabilities, to stand for ``values`` and their probabilities ``chances``.

    Each value is split over the two multiples beside it so that its mean is kept. This makes the law larger in convex order. A multiple
    may occur more than once.
    """
    below = np.floor(values / step)
    upper_share = values / step - below
    return np.concatenate([below, below + 1]), np.concatenate([chances * (1 - upper_share), chances * upper_share])


def from_curve(deltas: Array, step: float) -> GridLosses:
    """Return symmetric losses whose delta(i * step), i = 0..n-1, is nowhere below the true, convex curve under ``deltas``.

    ``deltas`` may be any upper bound of a delta that holds in both directions. The curve is first lowered to its convex hull over
    e^epsilon, which the true curve cannot exceed. A loss of -x has e^-x times the mass of x, since the two inputs may be swapped. The delta
    at the last point becomes the mass of an infinite loss.
    """
    # A NaN is replaced by 1, which always holds.
    curve = _convex_hull(np.minimum(np.minimum.accumulate(np.nan_to_num(deltas, nan=1.0, posinf=1.0)), 1.0), step)
    fall = np.append(curve[:-1] - curve[1:], 0.0)  # fall[i] between i and i + 1
    # With s = ``step``, fall[i] = (1 - e^-s) (m[i+1] + m[i+2] e^-s + ...), where m[i] is the mass at i. Solved for m[i]:
    positive = np.maximum((fall[:-1] - exp(-step) * fall[1:]) / -np.expm1(-step), 0.0)  # mass at i = 1..n-1
    negative = positive * np.exp(-step * np.arange(1, positive.size + 1))
    infinite = float(curve[-1])
    zero = max(0.0, 1 - infinite - float(np.sum(positive + negative)))
    return GridLosses(step, -positive.size, np.concatenate([negative[::-1], [zero], positive]), infinite)


def _convex_hull(curve: Array, step: float) -> Array:
    """Return the largest function below ``curve`` that is convex in e^epsilon, at the same points 0, ``step``, 2 ``step``, ..."""
    corners: list[int] = []  # points at which the hull touches the curve
    for index in range(curve.size):
        while len(corners) > 1 and _slope(curve, corners[-2], corners[-1], step) <= _slope(curve, corners[-1], index, step):
            corners.pop()  # this corner lies on or above the line between its neighbours
        corners.append(index)
    hull = curve.copy()
    for left, right in pairwise(corners):
        inside = np.arange(left + 1, right)
        length = (inside - left) * step
        # Interpolate in e^epsilon: (e^length - 1) / (e^((right - left) step) - 1) of the way, computed by logarithms against overflow.
        share = np.exp(length + np.log(-np.expm1(-length)) - _log_expm1((right - left) * step))
        hull[left + 1 : right] = curve[left] + (curve[right] - curve[left]) * share
    return hull


def _slope(curve: Array, left: int, right: int, step: float) -> float:
    """Return the logarithm of the fall of the curve from the point ``left`` to ``right``, per unit of e^epsilon."""
    fall = float(curve[left] - curve[right])
    return (log(fall) if fall > 0 else -inf) - left * step - _log_expm1((right - left) * step)


def _log_expm1(x: float) -> float:
    """Return log(e^x - 1) for x > 0, without overflow."""
    return x + log(-expm1(-x))
