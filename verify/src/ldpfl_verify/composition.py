"""Compose releases whose delta is known at every epsilon: upper bounds, with what rounding and truncation can hide added.

Each release becomes a law of privacy losses on a lattice (Doroshenko et al. 2022, "connect the dots"): delta is convex in e^epsilon, so
the chords between lattice points lie above it, and chords belong to losses at those points alone. Losses add up; their sum is found by
one Fourier transform under the weights e^(t loss) that center it on the epsilon in question (Esscher's tilting), so that errors are
relative to the delta that is asked for. Where ``ldpfl.privacy`` lets dp-accounting convolve without weights, this does it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p, log2, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq, minimize_scalar

Array = NDArray[np.longdouble]


class Release(Protocol):
    """One release, in both orders of the two inputs.

    Attributes:
        limit: no loss is larger; infinity where any may be.
        outside: probability of what :meth:`log_moment` leaves out.
    """

    @property
    def limit(self) -> float: ...

    @property
    def outside(self) -> float: ...

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``, none below 0."""

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], order > 0."""


Releases = Sequence[tuple[Release, int]]
"""Each kind with the number of times that it was released."""


_POINTS = (2048, 512, 128, 64)
"""Of the law of one release, up to a loss that next to none has: as many as leave the sum short enough."""

_LONGEST = 1 << 21
"""Points of the sum: half a second, and 100 MB."""

_SPREADS = 13.0
_MARGIN = 1e-6
"""Part of a delta that is added to it, for what rounding may have taken from sums of doubles."""
_ROUNDING = 4e-15
"""Relative error of one Fourier coefficient of a law; its k-th power has k times that."""


class _TooLong(Exception):
    """There are so many releases that their sum does not fit on a lattice of any use."""


def composed_epsilon(kinds: Releases, delta: float, near: float) -> float:
    """Return an epsilon that holds for ``delta`` of all releases, adaptive; sharpest where it comes out ``near`` what is guessed.

    The smaller of what the convolution gives and what Renyi divergences do, which look at the worst case of each order by itself.
    """
    return min(renyi_epsilon(kinds, delta), convolved_epsilon(kinds, delta, near))


def renyi_epsilon(kinds: Releases, delta: float) -> float:
    """Return an epsilon that holds for ``delta``, by Renyi divergences of every order (Canonne, Kamath and Steinke 2020, Prop. 12)."""
    inside = delta - sum(times * release.outside for release, times in kinds)
    if inside <= 0:
        return inf

    def epsilon(place: float) -> float:
        order = exp(place)
        factor = order * log(order) - (1 + order) * log1p(order)
        return (sum(times * release.log_moment(order) for release, times in kinds) + factor - log(inside)) / order

    return max(0.0, float(minimize_scalar(epsilon, bounds=(-18, 18), method="bounded", options={"xatol": 1e-9}).fun))


def convolved_epsilon(kinds: Releases, delta: float, near: float) -> float:
    """Return an epsilon that holds for ``delta``, by convolution; infinity where there are too many releases for it."""
    total = sum(times for _, times in kinds)
    top = max(_top(release, 1e-4 * delta / total) for release, _ in kinds)
    if top == 0:
        return 0.0
    for points in _POINTS:
        try:
            laws = [(_law(release, top / points, points), times) for release, times in kinds]
            if sum(times * law.infinite for law, times in laws) > delta:
                return inf
            return _solved(laws, top / points, delta, near)
        except _TooLong:
            continue
    return inf


def convolved_deltas(release: Release, times: int, epsilons: Array) -> Array:
    """Return delta at each of ``epsilons`` (ascending) of ``times`` releases, by convolution: 1 where there are too many for it."""
    total = np.ones_like(epsilons)
    top = _top(release, 1e-9 / times)
    for points in _POINTS if top > 0 else ():
        try:
            law = _law(release, top / points, points)
            if times * law.infinite >= 1:
                return total
            for near in np.quantile(epsilons.astype(np.float64), (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)):
                total = np.minimum(total, _Sum.of([(law, times)], top / points, max(float(near), top / points)).deltas(epsilons))
            return total
        except _TooLong:
            continue
    return total


def _solved(laws: Sequence[tuple[_Law, int]], step: float, delta: float, near: float) -> float:
    """Look for epsilon on the stretch around what was found before, until it stays."""
    found = near
    for _ in range(20):
        total = _Sum.of(laws, step, found)
        if total.delta(0.0) <= delta and total.losses[0] <= 0:
            return 0.0
        low, high = max(0.0, float(total.losses[0])), float(total.losses[-1])
        if total.delta(high) > delta:
            found = high if high > found else inf
        elif total.delta(low) <= delta:
            found = low
        else:
            before, found = found, float(brentq(lambda at, total=total: log(total.delta(at)) - log(delta), low, high, xtol=1e-10 * high))
            found *= 1 + 1e-9
            if abs(found - before) <= 1e-3 * found and total.delta(found) <= delta:
                return found
        if not 0 < found < inf:
            break
    return inf


@dataclass(frozen=True, eq=False)
class _Law:
    """Masses at ``first`` + i lattice steps; ``infinite`` where nothing is protected."""

    first: int
    masses: Array
    infinite: float

    @property
    def places(self) -> NDArray[np.float64]:
        return self.first + np.arange(self.masses.size, dtype=np.float64)


def _law(release: Release, step: float, points: int) -> _Law:
    """Return the law under the chords of the curve; swapping the two inputs swaps losses with their negatives."""
    count = ceil(min(points, release.limit / step))
    places = np.arange(count + 1, dtype=np.longdouble) * np.longdouble(step)
    # The smallest curve above both: rounding up first keeps what rounding took.
    curve = np.minimum.accumulate(np.minimum(release.delta(places) * (1 + 1e-15), 1))
    if places[-1] >= release.limit:
        curve[-1] = 0
    growth = np.exp(places)
    slopes = np.append((curve[:-1] - curve[1:]) / np.diff(growth), 0)  # under the other input: mass of losses at or above
    slopes = np.maximum.accumulate(slopes[::-1])[::-1]
    other = slopes[:-1] - slopes[1:]
    own = other * growth[1:]
    infinite = float(curve[-1])
    zero = max(0.0, float(1 - infinite - own.sum() - other.sum()))
    masses = np.concatenate([other[::-1], [zero], own])
    present = np.flatnonzero(masses > 0)
    if not present.size:  # all of it is where nothing is protected
        return _Law(0, np.ones(1, dtype=np.longdouble), 1.0)
    return _Law(int(present[0]) - count, masses[present[0] : present[-1] + 1], infinite)


@dataclass(frozen=True, eq=False)
class _Sum:
    """The law of the sum under weights e^(tilt loss), on a stretch of the lattice."""

    losses: NDArray[np.float64]
    weighted: NDArray[np.float64]
    log_moment: float
    tilt: float
    beside: float
    error: float

    def delta(self, epsilon: float) -> float:
        above = self.losses > epsilon
        losses = self.losses[above]
        gained = -np.expm1(epsilon - losses) * self.weighted[above] * np.exp(np.minimum(self.log_moment - self.tilt * losses, 700.0))
        rounding = self.error * exp(min(self.log_moment - self.tilt * epsilon, 700.0))
        return float(gained.sum()) * (1 + _MARGIN) + rounding + self.beside + 1e-300

    def deltas(self, epsilons: Array) -> Array:
        """Return the same at each of ``epsilons``."""
        mass = self.weighted * np.exp(np.minimum(self.log_moment - self.tilt * self.losses, 700.0).astype(np.longdouble))
        other = mass * np.exp(-self.losses.astype(np.longdouble))
        above, below = (np.append(np.cumsum(part[::-1])[::-1], 0) for part in (mass, other))
        first = np.searchsorted(self.losses, epsilons, side="right")
        rounding = self.error * np.exp(np.minimum(self.log_moment - self.tilt * epsilons, 700.0))
        found = (above[first] - np.exp(epsilons) * below[first]) * (1 + _MARGIN) + rounding + self.beside + 1e-300
        # What lies below the stretch is not in it: there, nothing is known.
        return np.asarray(np.where(epsilons >= self.losses[0], np.maximum(found, 0), 1))

    @classmethod
    def of(cls, laws: Sequence[tuple[_Law, int]], step: float, epsilon: float) -> _Sum:
        def log_moment(order: float) -> float:
            return sum(times * _log_moment(law, order * step) for law, times in laws)

        found = minimize_scalar(lambda place: log_moment(exp(place)) - exp(place) * epsilon, bounds=(-12, 12), method="bounded")
        tilt = exp(float(found.x))
        parts = [(law, times, *_weights(law, tilt * step)) for law, times in laws]
        mean = sum(times * average for _, times, _, average, _ in parts)
        spread = sqrt(sum(times * variance for _, times, _, _, variance in parts))
        longest = max(law.masses.size for law, _ in laws)
        size = 1 << ceil(log2(2 * _SPREADS * spread + 2 * longest + 64))
        if size > _LONGEST:
            raise _TooLong
        power, offset = np.ones(size // 2 + 1, dtype=np.complex128), 0
        for law, times, weights, average, _ in parts:
            center = round(average)
            offset += times * center
            power *= _power(weights, law.first - center, size, times)
        # The sum lies around its mean; what is further away than the lattice reaches wraps around.
        first = round(mean) - size // 2
        sums = np.roll(fft.irfft(power, size), -((first - offset) % size))
        places = first + np.arange(size, dtype=np.float64)
        norm = sqrt(float(np.sum(np.abs(power) ** 2)) * 2 + 1)
        releases = sum(times for _, times in laws)
        beside = min(1.0, sum(times * law.infinite for law, times in laws)) + _beyond(log_moment, float(places[-1]) * step, tilt)
        return cls(places * step, np.maximum(sums, 0.0), log_moment(tilt), tilt, beside, releases * _ROUNDING * norm)


def _power(weights: NDArray[np.float64], first: int, size: int, times: int) -> NDArray[np.complex128]:
    """Return the Fourier transform of ``weights``, the first of them at ``first``, to the power of ``times``."""
    places = (first + np.arange(weights.size)) % size
    transform = fft.rfft(np.bincount(places, weights, size))
    with np.errstate(divide="ignore"):
        size_of, angle = np.log(np.abs(transform)), np.angle(transform)
    return np.asarray(np.exp(times * size_of) * np.exp(1j * times * angle))


def _log_moment(law: _Law, order: float) -> float:
    """Return log E[e^(order place)], order in lattice steps."""
    exponents = order * law.places
    top = float(exponents.max())
    return top + log(float(np.dot(law.masses, np.exp(exponents - top))))


def _weights(law: _Law, order: float) -> tuple[NDArray[np.float64], float, float]:
    exponents = order * law.places
    weights = (law.masses * np.exp(exponents - exponents.max())).astype(np.float64)
    weights /= weights.sum()
    average = float(np.dot(weights, law.places))
    return weights, average, float(np.dot(weights, (law.places - average) ** 2))


def _beyond(log_moment: Callable[[float], float], top: float, tilt: float) -> float:
    """Return a bound of the probability of losses above ``top``, by Chernoff."""
    return min(exp(min(0.0, log_moment(order) - order * top)) for order in tilt * np.logspace(0, 6, 61))


def _top(release: Release, delta: float) -> float:
    """Return a loss that one release exceeds with ``delta`` at most, and not much more than that."""
    largest = min(release.limit, 1e4)
    places = largest * np.logspace(-9, 0, 257)
    enough = places[release.delta(places.astype(np.longdouble)) <= delta]
    return float(enough[0]) if enough.size else largest
