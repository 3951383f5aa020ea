"""Shuffled vectors with Gaussian noise, by a privacy blanket: with some probability a report looks like one of the ball's center.

All clients of a round clip their vectors to one ball and add noise of one law. In units of the noise's standard deviation, the ball has
radius a = mu / 2, and U = N(0, 1) is the law of a report whose input is the center. Another client's input is at distance a at most. So its
report is at least g times as likely as under U, except for reports with a total probability of b(g) under U. Here b(g) is
delta_a(log(1 / g)), the hockey-stick divergence of mu = a. Replace the law of each report by one that is nowhere below g U, at a cost of
g b(g) in total variation. Then a report is a draw of U with probability g. Reveal to the adversary which clients drew something else, and
what they drew. The target client hides among M draws of U, in any dimension. With n clients,

    delta(epsilon) <= E[max(0, G_1 + ... + G_(M + 1)) / (M + 1)] + (1 + e^epsilon) (n - 1) g b(g),   M ~ Bin(n - 1, g).

G is the density of the target's report relative to U under one input, less e^epsilon times that under the other, at a draw of U.

The worst two inputs are at opposite ends of the ball, where G = e^(a Z - a^2 / 2) - e^(epsilon - a Z - a^2 / 2) for a standard normal Z.
For inputs of norms s and t (in standard deviations) G = e^(X - s^2 / 2) - e^(epsilon + Y - t^2 / 2), X and Y normal of variances s^2 and
t^2. The mean of a convex function of G grows as the two grow, and falls as their covariance grows (Plackett's identity: the mixed second
derivative is negative, and what the others leave where means are kept is positive), so it is largest at s = t = a and covariance -a^2:
there G is largest in convex order. As for other blankets (``blanket``), this holds for one report after the other. So inputs may depend on
earlier releases, and clients may come one by one. Inputs must not depend on a client's own earlier noise, as with error feedback.

Over rounds, the curves are composed by their dominating pairs, and total variations add up.
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
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves, split_over_lattice
from ldpfl.privacy.accountants.shuffled_bits import rounded_down, rounded_up
from ldpfl.util.lazy_imports import optimize

_SPENT = 0.01
"""Part of delta that is spent on replacing the reports' laws (the total variation g b(g))."""

_HIDES_NOTHING = 40.0
"""Largest log(1 / g) that is computed. Above it only the local bound is used."""

_GUESSES = (1.0, 3.0, 8.0, 20.0, 40.0)
"""Upper limits of epsilon that are tried, smallest first."""

_FEWEST_HIDDEN = 0.5
"""Smallest expected number of draws of U that is computed. Below it only the local bound is used."""

_TAIL = 1e-14
"""Mean of G above the highest cell, which is added to delta."""

_CELLS = 96
"""Number of cells that the range of the standard normal Z is cut into."""

_POINTS = 128
"""Number of points of the privacy curve of one vector."""

_SIZES = 4
"""Number of distinct cohort sizes, and of distinct values of mu, after rounding."""

_BEYOND = 80.0
"""-log of the probability outside the lattice of sums, on each side, and of the Fourier coefficients that are left out."""

_FINE = 4
"""Smallest number of lattice steps per standard deviation of G, unless the lattice would be too long."""

_FEWEST, _MOST = 1 << 12, 1 << 16
"""Smallest and largest number of lattice points."""

_ROUNDING = 4e-16
"""Rounding error of a Fourier coefficient of one term, and of a transform for each doubling of its length."""


@dataclass(frozen=True)
class Vectors:
    """``times`` vectors of each of ``clients`` clients: ``mu`` is twice the radius of their ball over the noise's standard deviation."""

    mu: float
    clients: int
    times: int


def shuffled_gaussian_epsilon(kinds: Sequence[Vectors], delta: float, local: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for all vectors of one client, also for adaptive inputs. Takes seconds for each kind.

    Args:
        local: epsilon without the shuffler, which is returned if no smaller bound is found.
    """
    kinds = _merged([kind for kind in kinds if kind.times > 0]) if kinds else []
    reports_of_others = sum(kind.times * (kind.clients - 1) for kind in kinds)
    if not kinds or delta <= 0 or reports_of_others == 0 or local == 0:
        return local
    # Replacing a report's law costs (1 + e^epsilon) times a total variation. A small upper limit of epsilon allows a larger variation, and
    # so a larger common share. A result is valid only if it does not exceed the limit that it assumed.
    for guess in _GUESSES:
        limit = min(guess, local)
        epsilon = _epsilon_with_replaced_laws(kinds, delta, _SPENT * delta / (1 + exp(limit)) / reports_of_others)
        if epsilon <= limit or limit == local:
            return min(epsilon, local)
    return local


def _epsilon_with_replaced_laws(kinds: Sequence[Vectors], delta: float, variation: float) -> float:
    """Return epsilon at ``delta`` if the law of each report may be replaced by one within a total variation of ``variation``.

    Return infinity if the common share g of these laws is too small to hide anything.
    """
    curves = []
    for kind in kinds:
        share = common_share(kind.mu, variation)
        if share is None or share * kind.clients < _FEWEST_HIDDEN:
            return inf
        curves.append(PrivacyCurve(_delta_curve(kind, share), inf, kind.times, 2 * _TAIL))
    return composed_curves(curves, (1 - _SPENT) * delta, _POINTS)


def shuffled_gaussian_attained(kinds: Sequence[Vectors]) -> float:
    """Return mu of the sums of the reports of all rounds. It is a lower bound: the adversary can add up the reports of a round."""
    return sqrt(sum(kind.times * kind.mu**2 / kind.clients for kind in kinds))


def common_share(mu: float, variation: float) -> float | None:
    """Return the largest share g that all clients' reports can have in common with a report on the ball's center.

    Replacing a report's law by one with this share costs g b(g) in total variation, with b(g) = delta(log(1 / g)) of Gaussian noise with
    half of ``mu``. It may cost ``variation`` at most. Return None if g is too small to be useful.
    """

    def excess_variation(log_inverse_share: float) -> float:
        """Return the cost g b(g), less ``variation``, for the share g = e^-``log_inverse_share``."""
        return exp(-log_inverse_share) * gaussian_delta(mu / 2, log_inverse_share) - variation

    if excess_variation(_HIDES_NOTHING) > 0:
        return None
    if excess_variation(0.0) <= 0:
        return 1.0
    return exp(-float(optimize.brentq(excess_variation, 0.0, _HIDES_NOTHING, xtol=1e-9)) - 1e-8)  # rounded down


def vector_delta(mu: float, clients: int, share: float, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of one vector that hides among the M draws of the blanket by other clients.

    That is E[max(0, G_1 + ... + G_(M + 1)) / (M + 1)], M ~ Bin(``clients`` - 1, ``share``), for the G of the module's docstring.
    """
    values, chances = _gains(mu / 2, epsilon)
    expected = _mean_above_zero(values, chances, clients, share) if values.max() > 0 else 0.0
    return min(1.0, expected / (share * clients) + _TAIL)


def _delta_curve(kind: Vectors, share: float) -> Callable[[float], float]:
    """Return :func:`vector_delta` as a function of epsilon."""
    return lambda epsilon: vector_delta(kind.mu, kind.clients, share, epsilon)


def _merged(kinds: Sequence[Vectors]) -> list[Vectors]:
    """Merge equal kinds, after rounding cohort sizes down and mu up to a few values each."""
    clients = rounded_down((kind.clients for kind in kinds), _SIZES)
    mus = rounded_up((kind.mu for kind in kinds), _SIZES)
    times: Counter[tuple[float, int]] = Counter()
    for kind in kinds:
        times[mus[kind.mu], clients[kind.clients]] += kind.times
    return [Vectors(mu, cohort, count) for (mu, cohort), count in times.items()]


def _gains(radius: float, epsilon: float) -> tuple[Array, Array]:
    """Return values and probabilities of a discrete law that stands for G = e^(a Z - a^2 / 2) - e^(``epsilon`` - a Z - a^2 / 2).

    a is ``radius``, and Z is standard normal. In each cell of Z, the mass of G is moved to the two ends of the cell so that its mean is
    kept. That makes G larger in convex order, which is safe. Outside the cells G counts as 0. On the low side G is below 0 there; on the
    high side its mean is at most :data:`_TAIL`.
    """
    reach = radius + 7.66  # P(Z > 7.66) < 1e-14
    ends = np.linspace(-reach, reach, _CELLS + 1)
    gains = np.exp(radius * ends - radius**2 / 2) - np.exp(epsilon - radius * ends - radius**2 / 2)
    chances = _probabilities_between(ends)
    # The mean of G in each cell, times its probability: the factors e^(+-a z - a^2 / 2) shift the normal law by +-a.
    means = _probabilities_between(ends - radius) - exp(epsilon) * _probabilities_between(ends + radius)
    width = np.diff(gains)
    # Where rounding makes both ends equal, it does not matter which one gets the mass.
    to_upper_end = np.clip(np.divide(means - chances * gains[:-1], width, out=np.zeros_like(width), where=width > 0), 0.0, chances)
    weights = np.zeros_like(gains)
    weights[:-1] += chances - to_upper_end
    weights[1:] += to_upper_end
    return np.append(gains, 0.0), np.append(weights, max(0.0, 1 - float(chances.sum())))


def _probabilities_between(ends: Array) -> Array:
    """Return the probability that a standard normal number lies between neighbouring ``ends``, accurate in both tails."""
    low, high = ends[:-1], ends[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)))


def _mean_above_zero(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return an upper bound of E[max(0, S)], where S is the sum of M ~ Bin(``clients``, ``share``) draws from ``values``.

    ``chances`` are the probabilities of the values.

    The values are split over neighbouring points of a lattice so that their mean is kept, which can only raise the result. The law of S is
    the inverse transform of its characteristic function. An allowance for rounding is added: the error of the transform relative to its
    norm, at the worst lattice points (Cauchy-Schwarz).
    """
    reach = max(_rarely_exceeded_value(values, chances, clients, share), _rarely_exceeded_value(-values, chances, clients, share))
    step = sqrt(float(np.dot(chances, values**2))) / _FINE
    size = int(min(_MOST, max(_FEWEST, 2 ** ceil(log2(2 * reach / step)))))
    step = 2 * reach / size
    places, weights = split_over_lattice(values, chances, step)
    # The characteristic function less 1: where it matters this is small, and added to 1 it would lose its digits.
    term_less_1 = fft.rfft(np.bincount(places.astype(np.int64) % size, weights, size)) - 1
    scaled = share * term_less_1
    with np.errstate(divide="ignore"):
        log_size = 0.5 * np.log1p(np.maximum(2 * scaled.real + scaled.real**2 + scaled.imag**2, -1.0))
    present = np.flatnonzero(clients * log_size > -_BEYOND)
    power = np.zeros(size // 2 + 1, dtype=np.complex128)
    power[present] = np.exp(clients * (log_size[present] + 1j * np.arctan2(scaled.imag[present], 1 + scaled.real[present])))
    mass = fft.irfft(power, size)
    # Sums of 0 or more are in the first half of the lattice; those below 0 wrap around to the second half.
    error = _ROUNDING * (log2(size) + clients * share) * sqrt(float(np.dot(mass, mass))) * sqrt(size) * reach
    return float(np.dot(np.maximum(mass[: size // 2], 0.0), np.arange(size // 2))) * step + error


def _rarely_exceeded_value(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return a value that the sum of Bin(``clients``, ``share``) draws exceeds with a probability below e^-``_BEYOND`` (Chernoff bound)."""
    largest = float(values.max())
    smallest_bound = largest * clients
    for scale in np.geomspace(1e-4, 60.0, 80) / largest:  # any scale gives a bound
        moment_less_1 = share * float(np.dot(chances, np.expm1(np.minimum(scale * values, 700.0))))
        smallest_bound = min(smallest_bound, (clients * log1p(max(moment_less_1, _TAIL - 1)) + _BEYOND) / scale)
    return max(smallest_bound, largest)
