"""Compose releases whose delta is bounded at every epsilon. The results are upper bounds: possible errors of rounding are added.

1. Each release becomes a privacy loss distribution on a lattice, by "connect the dots" (Doroshenko et al. 2022). Delta is convex in
   e^epsilon, so that the chords between lattice points lie above the curve, and the chords belong to a distribution on these points.
2. The losses of several releases add up. One Fourier transform gives the distribution of the sum. It is taken under the weights
   e^(t loss) that center the sum on the epsilon in question (Esscher's tilting), so that errors are small relative to the delta asked for.

The accountants of ldpfl itself use the library dp-accounting here, which convolves without weights. This module uses none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log1p, log2, sqrt
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq, minimize_scalar

Array = NDArray[np.longdouble]


class ReleaseBound(Protocol):
    """Upper bounds on the privacy loss of one release, which hold for both orders of the two inputs.

    Attributes:
        max_loss: largest possible privacy loss; infinity if there is none.
        neglected: probability of the outcomes that :meth:`log_moment` leaves out.
    """

    @property
    def max_loss(self) -> float: ...

    @property
    def neglected(self) -> float: ...

    def delta(self, epsilons: Array) -> Array:
        """Return an upper bound of delta at each of ``epsilons``. No epsilon is below 0."""

    def log_moment(self, order: float) -> float:
        """Return an upper bound of log E[e^(order * loss)], for an order above 0."""


CountedReleases = Sequence[tuple[ReleaseBound, int]]
"""Each kind of release, with the number of such releases."""


LATTICE_POINTS = (2048, 512, 128, 64)
"""Numbers of lattice points for the losses of one release. The first number is taken for which the sum has few enough points."""

MAX_SUM_POINTS = 1 << 21
"""Number of lattice points of the sum. So many take half a second and 100 MB."""

COVERED_DEVIATIONS = 13.0
"""Number of standard deviations of the sum that the lattice reaches to each side."""

DELTA_MARGIN = 1e-6
"""Share of a delta that is added to it, for rounding errors in sums of doubles."""

FOURIER_ERROR = 4e-15
"""Relative error of one Fourier coefficient of a distribution. Its k-th power has k times this error."""


class _SumTooLong(Exception):
    """There are so many releases that the lattice of their sum would have more than :data:`MAX_SUM_POINTS` points."""


def composed_epsilon(kinds: CountedReleases, delta: float, guess: float) -> float:
    """Return an epsilon that holds for ``delta`` over all releases, also if later releases depend on earlier ones.

    It is the smaller one of two bounds: by convolution, and by Renyi divergences. Both hold for every ``guess``; the nearer the guess is
    to the result, the sharper is the result.
    """
    return min(renyi_epsilon(kinds, delta), convolved_epsilon(kinds, delta, guess))


def renyi_epsilon(kinds: CountedReleases, delta: float) -> float:
    """Return an epsilon that holds for ``delta``, by Renyi divergences of every order (Canonne, Kamath and Steinke 2020, Prop. 12)."""
    delta_left = delta - sum(times * release.neglected for release, times in kinds)
    if delta_left <= 0:
        return inf

    def epsilon_at(log_order: float) -> float:
        # The proposition's alpha is 1 + order, and its Renyi divergence is log_moment / order.
        order = exp(log_order)
        factor = order * log(order) - (1 + order) * log1p(order)
        return (sum(times * release.log_moment(order) for release, times in kinds) + factor - log(delta_left)) / order

    return max(0.0, float(minimize_scalar(epsilon_at, bounds=(-18, 18), method="bounded", options={"xatol": 1e-9}).fun))


def convolved_epsilon(kinds: CountedReleases, delta: float, guess: float) -> float:
    """Return an epsilon that holds for ``delta``, by convolution, or infinity if there are too many releases for the lattice."""
    total = sum(times for _, times in kinds)
    # Losses above this are so unlikely that counting them as infinite hardly changes epsilon.
    likely_max_loss = max(_likely_max_loss(release, 1e-4 * delta / total) for release, _ in kinds)
    if likely_max_loss == 0:
        return 0.0
    guess = min(guess, max(total * likely_max_loss, 1e4))  # a stated epsilon may be any number
    for points in LATTICE_POINTS:
        try:
            step = likely_max_loss / points
            distributions = [(_loss_distribution(release, step, points), times) for release, times in kinds]
            if sum(times * distribution.infinite for distribution, times in distributions) > delta:
                return inf
            return _epsilon_of_sum(distributions, step, delta, guess)
        except _SumTooLong:
            continue
    return inf


def convolved_deltas(release: ReleaseBound, times: int, epsilons: Array) -> Array:
    """Return an upper bound of delta of ``times`` equal releases at each of ``epsilons`` (ascending), by convolution.

    The bound is 1 if there are too many releases for the lattice.
    """
    deltas = np.ones_like(epsilons)
    likely_max_loss = _likely_max_loss(release, 1e-9 / times)
    for points in LATTICE_POINTS if likely_max_loss > 0 else ():
        try:
            step = likely_max_loss / points
            distribution = _loss_distribution(release, step, points)
            if times * distribution.infinite >= 1:
                return deltas
            # A bound is sharp near the epsilon that it is centered on. So several are computed, and the smallest one counts.
            for center in np.quantile(epsilons.astype(np.float64), (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)):
                deltas = np.minimum(deltas, _TiltedSum.of([(distribution, times)], step, max(float(center), step)).deltas(epsilons))
            return deltas
        except _SumTooLong:
            continue
    return deltas


def _epsilon_of_sum(laws: Sequence[tuple[_LossDistribution, int]], step: float, delta: float, guess: float) -> float:
    """Return the epsilon of the sum at ``delta``. Each pass centers the lattice on the last epsilon, until it no longer changes.

    The result is infinity if 20 passes do not suffice, or if no epsilon on the lattice has this delta.
    """
    epsilon = guess
    for _ in range(20):
        total = _TiltedSum.of(laws, step, epsilon)
        if total.delta(0.0) <= delta and total.losses[0] <= 0:
            return 0.0
        low, high = max(0.0, float(total.losses[0])), float(total.losses[-1])
        if total.delta(high) > delta:  # the epsilon lies above the lattice
            epsilon = high if high > epsilon else inf
        elif total.delta(low) <= delta:  # the epsilon lies below the lattice
            epsilon = low
        else:
            before = epsilon
            root = brentq(lambda candidate, total=total: log(total.delta(candidate)) - log(delta), low, high, xtol=1e-10 * high)
            epsilon = float(root) * (1 + 1e-9)
            if abs(epsilon - before) <= 1e-3 * epsilon and total.delta(epsilon) <= delta:
                return epsilon
        if not 0 < epsilon < inf:
            break
    return inf


@dataclass(frozen=True, eq=False)
class _LossDistribution:
    """Privacy loss distribution of one release.

    Attributes:
        first: smallest loss, in lattice steps.
        masses: probabilities of the losses ``first``, ``first`` + 1, ... lattice steps.
        infinite: probability of an infinite loss.
    """

    first: int
    masses: Array
    infinite: float

    @property
    def places(self) -> NDArray[np.float64]:
        """The losses, in lattice steps."""
        return self.first + np.arange(self.masses.size, dtype=np.float64)


def _loss_distribution(release: ReleaseBound, step: float, points: int) -> _LossDistribution:
    """Return the distribution on the lattice whose delta lies on the chords between lattice points, so never below the true one.

    It is symmetric in the two inputs: the masses of positive losses under one input are those of negative losses under the other.
    """
    count = ceil(min(points, release.max_loss / step))
    losses = np.arange(count + 1, dtype=np.longdouble) * np.longdouble(step)
    # Round up by more than the error of the curve, then make the curve fall: both keep it an upper bound.
    deltas = np.minimum.accumulate(np.minimum(release.delta(losses) * (1 + 1e-15), 1))
    if losses[-1] >= release.max_loss:
        deltas[-1] = 0
    e_to_losses = np.exp(losses)
    steps = np.diff(np.expm1(losses))  # not of ``e_to_losses``, which is 1 at several of the smallest losses
    # A chord of delta against e^epsilon falls with the mass, under the other input, of the losses above its lower end.
    slopes = np.append((deltas[:-1] - deltas[1:]) / steps, 0)
    masses_above = np.maximum.accumulate(slopes[::-1])[::-1]
    negative_masses = masses_above[:-1] - masses_above[1:]
    positive_masses = negative_masses * e_to_losses[1:]
    infinite = float(deltas[-1])
    zero_mass = max(0.0, float(1 - infinite - positive_masses.sum() - negative_masses.sum()))
    masses = np.concatenate([negative_masses[::-1], [zero_mass], positive_masses])
    present = np.flatnonzero(masses > 0)
    if not present.size:  # every outcome has an infinite loss
        return _LossDistribution(0, np.ones(1, dtype=np.longdouble), 1.0)
    return _LossDistribution(int(present[0]) - count, masses[present[0] : present[-1] + 1], infinite)


@dataclass(frozen=True, eq=False)
class _TiltedSum:
    """Distribution of a sum of losses, on a part of the lattice, under the weights e^(tilt loss).

    Attributes:
        losses: the lattice points.
        weighted: probabilities under the weights.
        log_moment: log E[e^(tilt loss)], which turns weighted probabilities into plain ones.
        tilt: the factor t of the weights.
        truncated: bound on the probability of the losses that the lattice does not reach.
        error: bound on the error of each weighted probability.
    """

    losses: NDArray[np.float64]
    weighted: NDArray[np.float64]
    log_moment: float
    tilt: float
    truncated: float
    error: float

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of delta at ``epsilon``, which must not lie below the smallest loss."""
        above = self.losses > epsilon
        losses = self.losses[above]
        contributions = -np.expm1(epsilon - losses) * self.weighted[above] * np.exp(np.minimum(self.log_moment - self.tilt * losses, 700.0))
        rounding = self.error * exp(min(self.log_moment - self.tilt * epsilon, 700.0))
        return float(contributions.sum()) * (1 + DELTA_MARGIN) + rounding + self.truncated + 1e-300

    def deltas(self, epsilons: Array) -> Array:
        """Return :meth:`delta` at each of ``epsilons``: P(S) - e^epsilon Q(S), where S holds the losses above epsilon."""
        mass = self.weighted * np.exp(np.minimum(self.log_moment - self.tilt * self.losses, 700.0).astype(np.longdouble))
        mass_under_other_input = mass * np.exp(-self.losses.astype(np.longdouble))
        mass_above, other_mass_above = (np.append(np.cumsum(part[::-1])[::-1], 0) for part in (mass, mass_under_other_input))
        first = np.searchsorted(self.losses, epsilons, side="right")
        rounding = self.error * np.exp(np.minimum(self.log_moment - self.tilt * epsilons, 700.0))
        deltas = (mass_above[first] - np.exp(epsilons) * other_mass_above[first]) * (1 + DELTA_MARGIN) + rounding + self.truncated + 1e-300
        # Losses below the lattice are not summed, so that delta is not known at an epsilon below it.
        return np.asarray(np.where(epsilons >= self.losses[0], np.maximum(deltas, 0), 1))

    @classmethod
    def of(cls, laws: Sequence[tuple[_LossDistribution, int]], step: float, epsilon: float) -> _TiltedSum:
        """Return the distribution of the sum of losses, with the number of releases for each law. Weights center it on ``epsilon``.

        Raises:
            _SumTooLong: the lattice of the sum would be too long.
        """

        def log_moment(order: float) -> float:
            return sum(times * _log_moment(law, order * step) for law, times in laws)

        # At this tilt, the weighted mean of the sum is epsilon.
        optimum = minimize_scalar(lambda log_tilt: log_moment(exp(log_tilt)) - exp(log_tilt) * epsilon, bounds=(-12, 12), method="bounded")
        tilt = exp(float(optimum.x))
        all_tilted = [(law, times, _TiltedRelease.of(law, tilt * step)) for law, times in laws]
        mean = sum(times * tilted.mean for _, times, tilted in all_tilted)
        deviation = sqrt(sum(times * tilted.variance for _, times, tilted in all_tilted))
        longest_distribution = max(law.masses.size for law, _ in laws)
        points = 1 << ceil(log2(2 * COVERED_DEVIATIONS * deviation + 2 * longest_distribution + 64))
        if points > MAX_SUM_POINTS:
            raise _SumTooLong
        transform, offset = np.ones(points // 2 + 1, dtype=np.complex128), 0
        for law, times, tilted in all_tilted:
            center = round(tilted.mean)
            offset += times * center
            transform *= _powered_transform(tilted.probabilities, law.first - center, points, times)
        # A Fourier transform is periodic: losses beyond one end of the lattice appear at the other. So the lattice is centered on the mean.
        first = round(mean) - points // 2
        sums = np.roll(fft.irfft(transform, points), -((first - offset) % points))
        places = first + np.arange(points, dtype=np.float64)
        norm = sqrt(float(np.sum(np.abs(transform) ** 2)) * 2 + 1)  # at least that of all coefficients, of which ``transform`` has half
        releases = sum(times for _, times in laws)
        truncated = min(1.0, sum(times * law.infinite for law, times in laws)) + _tail_bound(log_moment, float(places[-1]) * step, tilt)
        return cls(places * step, np.maximum(sums, 0.0), log_moment(tilt), tilt, truncated, releases * FOURIER_ERROR * norm)


def _powered_transform(weights: NDArray[np.float64], first: int, size: int, times: int) -> NDArray[np.complex128]:
    """Return the Fourier transform, to the power of ``times``, of ``weights`` whose first entry lies at the lattice point ``first``."""
    places = (first + np.arange(weights.size)) % size
    transform = fft.rfft(np.bincount(places, weights, size))
    with np.errstate(divide="ignore"):
        log_magnitude, angle = np.log(np.abs(transform)), np.angle(transform)
    return np.asarray(np.exp(times * log_magnitude) * np.exp(1j * times * angle))


def _log_moment(law: _LossDistribution, order: float) -> float:
    """Return log E[e^(order * loss)], where losses are counted in lattice steps."""
    exponents = order * law.places
    top = float(exponents.max())
    return top + log(float(np.dot(law.masses, np.exp(exponents - top))))


class _TiltedRelease(NamedTuple):
    """Probabilities of one release's losses under the weights e^(order * loss), with the mean and the variance in lattice steps."""

    probabilities: NDArray[np.float64]
    mean: float
    variance: float

    @classmethod
    def of(cls, law: _LossDistribution, order: float) -> _TiltedRelease:
        """Return the probabilities of the losses of ``law``, which are counted in lattice steps."""
        exponents = order * law.places
        weights = (law.masses * np.exp(exponents - exponents.max())).astype(np.float64)
        weights /= weights.sum()
        mean = float(np.dot(weights, law.places))
        return cls(weights, mean, float(np.dot(weights, (law.places - mean) ** 2)))


def _tail_bound(log_moment: Callable[[float], float], top: float, tilt: float) -> float:
    """Return an upper bound of the probability of losses above ``top``, by Chernoff's inequality at 61 orders."""
    return min(exp(min(0.0, log_moment(order) - order * top)) for order in tilt * np.logspace(0, 6, 61))


def _likely_max_loss(release: ReleaseBound, delta: float) -> float:
    """Return a loss that one release exceeds with a probability of at most ``delta``. It is nearly the smallest such loss."""
    largest = min(release.max_loss, 1e4)
    candidates = largest * np.logspace(-9, 0, 257)
    sufficient = candidates[release.delta(candidates.astype(np.longdouble)) <= delta]
    return float(sufficient[0]) if sufficient.size else largest
