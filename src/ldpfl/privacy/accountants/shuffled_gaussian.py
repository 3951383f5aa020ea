"""Vectors with Gaussian noise behind a shuffler: a client hides among what others might have sent had they all stood in the middle.

All clients of a round bound their vectors to one ball, and add noise of one law: in units of its standard deviation the ball has
radius a = mu / 2, and U = N(0, 1) is the report of its middle. Another client's report, at most a away, is at least g times as likely as
under U, but for reports that have b(g) = delta_a(log 1 / g) of U's probability: its hockey-stick divergence, that of mu = a. Replace
each report by one that has g of U in common everywhere, at a cost of g b(g) in total variation, and it is a draw of U with probability
g. Tell the adversary who drew something else, and what. The client in question hides among M draws of U, whatever their dimension:

    delta(epsilon) <= E[max(0, G_1 + ... + G_(M + 1)) / (M + 1)] + (1 + e^epsilon) (n - 1) g b(g),   M ~ Bin(n - 1, g),

G being the density of its report under one input relative to U, less e^epsilon times that under the other, at a draw of U.

The worst two inputs are at opposite ends of the ball, where G = e^(a Z - a^2 / 2) - e^(epsilon - a Z - a^2 / 2) for a standard normal Z.
For inputs of norms s and t (in standard deviations) G = e^(X - s^2 / 2) - e^(epsilon + Y - t^2 / 2), X and Y normal of variances s^2 and
t^2. The mean of a convex function of G grows as the two grow, and falls as their covariance grows (Plackett's identity: the mixed second
derivative is negative, and what the others leave where means are kept is positive), so it is largest at s = t = a and covariance -a^2:
there G is largest in convex order. As for other blankets (``blanket``) that holds one report after the other, so inputs may depend on
what was released before, and clients may come one by one; but not on a client's own earlier noise, as an error feedback would make them.

Over rounds the curves are composed by their dominating pairs, and total variations add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log1p, log2, sqrt

import numpy as np
from scipy import fft
from scipy.special import ndtr

from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.gaussian import gaussian_delta
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves
from ldpfl.privacy.accountants.roots import brentq
from ldpfl.privacy.accountants.shuffled import rounded_down, rounded_up

_SPENT = 0.01
"""Part of delta that pays for reports that are not like U's."""

_HIDES_NOTHING = 40.0
"""Logarithm of 1 / g beyond which nothing is computed."""

_GUESSES = (1.0, 3.0, 8.0, 20.0, 40.0)
"""How large epsilon may come out."""

_FEWEST_HIDDEN = 0.5
"""Expected number of draws of U below which nothing is computed."""

_TAIL = 1e-14
"""Mean of G where it is larger than on the cells: added to delta."""

_CELLS = 96
"""Of the standard normal Z, from one end to the other."""

_POINTS = 128
"""Of the curve of one vector."""

_SIZES = 4
"""Cohort sizes, and values of mu, that are told apart."""

_BEYOND = 80.0
"""Logarithm of 1 over the probability of what lies beyond the lattice of sums, on each side, and of what its transform leaves out."""

_FINE = 4
"""Lattice steps to a standard deviation of G, at least, as long as the lattice is not too long."""

_FEWEST, _MOST = 1 << 12, 1 << 16

_ROUNDING = 4e-16
"""Of a Fourier coefficient of one term, and of a transform for each doubling of its length."""


@dataclass(frozen=True)
class Vectors:
    """``times`` vectors of each of ``clients`` clients: ``mu`` is twice the radius of their ball over the noise's standard deviation."""

    mu: float
    clients: int
    times: int


def shuffled_gaussian_epsilon(kinds: Sequence[Vectors], delta: float, local: float) -> float:
    """Return a certified epsilon for ``delta`` of all these vectors of one client; adaptive. Seconds on one core for each kind.

    Args:
        local: what holds without the shuffler.
    """
    kinds = _merged([kind for kind in kinds if kind.times > 0]) if kinds else []
    others = sum(kind.times * (kind.clients - 1) for kind in kinds)
    if not kinds or delta <= 0 or others == 0 or local == 0:
        return local
    for guess in _GUESSES:  # replacing reports is paid for up to some epsilon: the smaller that is, the more they may have in common
        most = min(guess, local)
        found = _epsilon(kinds, delta, _SPENT * delta / (1 + exp(most)) / others)
        if found <= most or most == local:
            return min(found, local)
    return local


def _epsilon(kinds: Sequence[Vectors], delta: float, variation: float) -> float:
    """Return what holds if replacing a report costs ``variation``; infinity where reports have next to nothing in common."""
    curves = []
    for kind in kinds:
        share = common_share(kind.mu, variation)
        if share is None or share * kind.clients < _FEWEST_HIDDEN:
            return inf
        curves.append(PrivacyCurve(_curve(kind, share), inf, kind.times, 2 * _TAIL))
    return composed_curves(curves, (1 - _SPENT) * delta, _POINTS)


def shuffled_gaussian_attained(kinds: Sequence[Vectors]) -> float:
    """Return the mu that the sum of all reports of a round has, over all rounds: whoever sees the reports can add them up."""
    return sqrt(sum(kind.times * kind.mu**2 / kind.clients for kind in kinds))


def common_share(mu: float, variation: float) -> float | None:
    """Return the largest g for which g b(g) is at most ``variation``; None where it says next to nothing."""

    def missing(budget: float) -> float:
        return exp(-budget) * gaussian_delta(mu / 2, budget) - variation

    if missing(_HIDES_NOTHING) > 0:
        return None
    return exp(-float(brentq(missing, 0.0, _HIDES_NOTHING, xtol=1e-9)) - 1e-8) if missing(0.0) > 0 else 1.0


def vector_delta(mu: float, clients: int, share: float, epsilon: float) -> float:
    """Return an upper bound of E[max(0, G_1 + ... + G_(M + 1)) / (M + 1)], M ~ Bin(``clients`` - 1, ``share``)."""
    values, chances = _gains(mu / 2, epsilon)
    expected = _mean_above_zero(values, chances, clients, share) if values.max() > 0 else 0.0
    return min(1.0, expected / (share * clients) + _TAIL)


def _curve(kind: Vectors, share: float) -> Callable[[float], float]:
    return lambda epsilon: vector_delta(kind.mu, kind.clients, share, epsilon)


def _merged(kinds: Sequence[Vectors]) -> list[Vectors]:
    """Add up what is alike, after rounding cohorts down, and mu up, to a few values each."""
    clients = rounded_down((kind.clients for kind in kinds), _SIZES)
    mus = rounded_up((kind.mu for kind in kinds), _SIZES)
    times: Counter[tuple[float, int]] = Counter()
    for kind in kinds:
        times[mus[kind.mu], clients[kind.clients]] += kind.times
    return [Vectors(*key, count) for key, count in times.items()]


def _gains(radius: float, epsilon: float) -> tuple[Array, Array]:
    """Return values and probabilities of a law that is larger than that of G in convex order, but for its mean on the far ends.

    Between two ends of a cell of Z, G is put on these ends so that its mean is kept. Beyond the last cell it counts as 0: on the low side
    it is below that, on the high side its mean is :data:`_TAIL` at most.
    """
    reach = radius + 7.66  # P(Z > 7.66) < 1e-14
    ends = np.linspace(-reach, reach, _CELLS + 1)
    gains = np.exp(radius * ends - radius**2 / 2) - np.exp(epsilon - radius * ends - radius**2 / 2)
    chances = _between(ends)
    means = _between(ends - radius) - exp(epsilon) * _between(ends + radius)
    width = np.diff(gains)
    # Ends that rounding makes equal have the same share at either.
    above = np.clip(np.divide(means - chances * gains[:-1], width, out=np.zeros_like(width), where=width > 0), 0.0, chances)
    weights = np.zeros_like(gains)
    weights[:-1] += chances - above
    weights[1:] += above
    return np.append(gains, 0.0), np.append(weights, max(0.0, 1 - float(chances.sum())))


def _between(ends: Array) -> Array:
    """Return the probability that a standard normal number lies between each two ``ends``, to all digits on either side."""
    low, high = ends[:-1], ends[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)))


def _mean_above_zero(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return an upper bound of E[max(0, sum of M values)], M ~ Bin(``clients``, ``share``).

    What rounding may hide is added: an error of the transform, relative to its norm, at the worst places there are (Cauchy-Schwarz).
    """
    reach = max(_reach(values, chances, clients, share), _reach(-values, chances, clients, share))
    step = sqrt(float(np.dot(chances, values**2))) / _FINE
    size = int(min(_MOST, max(_FEWEST, 2 ** ceil(log2(2 * reach / step)))))
    step = 2 * reach / size
    below = np.floor(values / step)
    part = values / step - below
    places, weights = np.concatenate([below, below + 1]), np.concatenate([chances * (1 - part), chances * part])
    one = fft.rfft(np.bincount(places.astype(np.int64) % size, weights, size)) - 1  # what 1 is added to is small where it counts
    term = share * one
    with np.errstate(divide="ignore"):
        log_size = 0.5 * np.log1p(np.maximum(2 * term.real + term.real**2 + term.imag**2, -1.0))
    present = np.flatnonzero(clients * log_size > -_BEYOND)
    power = np.zeros(size // 2 + 1, dtype=np.complex128)
    power[present] = np.exp(clients * (log_size[present] + 1j * np.arctan2(term.imag[present], 1 + term.real[present])))
    mass = fft.irfft(power, size)
    error = _ROUNDING * (log2(size) + clients * share) * sqrt(float(np.dot(mass, mass))) * sqrt(size) * reach
    return float(np.dot(np.maximum(mass[: size // 2], 0.0), np.arange(size // 2))) * step + error


def _reach(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return what the sum exceeds with a probability of less than e^-:data:`_BEYOND` (Chernoff)."""
    most = float(values.max())
    best = most * clients
    for scale in np.geomspace(1e-4, 60.0, 80) / most:
        grown = share * float(np.dot(chances, np.expm1(np.minimum(scale * values, 700.0))))
        best = min(best, (clients * log1p(max(grown, _TAIL - 1)) + _BEYOND) / scale)
    return max(best, most)
