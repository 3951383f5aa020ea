"""The randomisation of a direction by PrivUnitG: exact, on a lattice, as in :mod:`ldpfl.mechanisms.exact_noise`.

Floating point computes each entry of the noisy direction with a known error bound. If that leaves an entry's lattice point undecided, about
once in thousands of reports, the report is computed again with more random bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1, log, pi, sqrt
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, log_ndtr, ndtri, ndtri_exp

from ldpfl.mechanisms.coins import toss_coins
from ldpfl.mechanisms.exact_noise import (
    NORMAL,
    WORD,
    Floats,
    Integers,
    bits_after_next_draw,
    draw_words64,
    first_tail_bits,
    largest_probability,
    make_bit_drawer,
    sizes_and_errors,
)
from ldpfl.util.lazy_imports import optimize
from ldpfl.util.randomness import RandomSource

STEPS = 1 << 10
"""Number of lattice points per standard deviation of the noise orthogonal to the direction."""

_SMALLEST_TAIL = 2.0**-53
"""Tail probability below which :meth:`DirectionLaw.bound` neglects values."""
_LARGEST_NORMAL = float(-ndtri(_SMALLEST_TAIL))
"""Value that a standard normal number exceeds with the probability ``_SMALLEST_TAIL``, about 8.21."""

_SUM_ERROR = 2.0**-46
"""Relative error of NumPy's pairwise sums of products of two floats."""

_ALPHA_ERROR, _MIN_SHARE = 2.0**-36, 2.0**-18
"""``_ALPHA_ERROR``: error of :meth:`DirectionLaw.alpha`, relative to 1 + |alpha|, for tails between ``_MIN_SHARE`` and 1 - ``_MIN_SHARE``.
Closer to 1, float64 has too few digits of 1 - tail."""


@dataclass(frozen=True)
class DirectionLaw:
    """The law of a randomised unit vector u: Z = (alpha u + g) / scale, with g standard normal in the space orthogonal to u.

    With probability ``p``, alpha is a standard normal value conditioned to lie above ``gamma``, otherwise one conditioned to lie below.
    Unconditioned, it would lie above with probability q. So the densities of Z for any two u differ by at most the factor
    (p / q) / ((1 - p) / (1 - q)). ``threshold`` is the largest integer for which p = threshold / 2^64 keeps that factor within e^epsilon,
    with q computed for the exact value of the float ``gamma``. ``scale`` is E[alpha], m in the paper, which makes Z unbiased.
    """

    threshold: int
    log_q: float
    gamma: float
    scale: float

    @property
    def p(self) -> float:
        """Probability that alpha lies above ``gamma``."""
        return float(self.threshold / 2**WORD)

    @property
    def blanket(self) -> float:
        """Share of the law of Z that does not depend on u: (1 - p) / (1 - q), its lowest density relative to that of a normal vector."""
        return float((2**WORD - self.threshold) / 2**WORD / -expm1(self.log_q))

    @property
    def second_moment(self) -> float:
        """E[alpha^2] = 1 + gamma m, with m = ``scale``.

        Let phi be the standard normal density. A standard normal value a has E[a; a > gamma] = phi(gamma), E[a^2; a > gamma] = q + gamma
        phi(gamma), and so E[a^2; a < gamma] = 1 - q - gamma phi(gamma), because E[a^2] = 1. Weighted by p / q above gamma and
        (1 - p) / (1 - q) below, the first gives m = phi(gamma) (p / q - (1 - p) / (1 - q)), and the others add up to 1 + gamma m.
        """
        return 1 + self.gamma * self.scale

    def alpha(self, above: NDArray[np.bool_], tail: Floats) -> Floats:
        """Return the values (k,) that alpha exceeds with probability ``tail`` (k,) in (0, 1], for k clients.

        ``above`` (k,) says on which side of gamma each alpha lies; ``tail`` is meant on this side. The values are computed from the nearer
        tail of the normal law, or from the logarithm of the far one, so that no digits cancel.
        """
        mass_below = -expm1(self.log_q)  # 1 - q
        left_tail = (1 - tail) * mass_below
        alpha_below = np.where(left_tail < 0.5, ndtri(left_tail), -ndtri(exp(self.log_q) + tail * mass_below))
        return np.asarray(np.where(above, -ndtri_exp(np.log(tail) + self.log_q), alpha_below))

    def bound(self, dimension: int) -> float:
        """Return a bound of the absolute entries of Z for any direction u. One report in 2^50 exceeds it, and is clipped to it.

        Let m be the scale, d the dimension, and G = 8.21 the largest |g_i| that counts. Then m Z_j = alpha u_j + h_j, where
        h = g - <g, u> u is the part of g orthogonal to u. |alpha| is largest at an end of one side of gamma. For |h_j|, let a = |u_j|.
        Cauchy-Schwarz over the other entries of u gives |h_j| <= G ((1 - a^2) + a sqrt(1 - a^2) sqrt(d - 1)). With a = sin(x) this is
        G / 2 (1 + cos(2x) + sqrt(d - 1) sin(2x)), at most G (1 + sqrt(d)) / 2. Both maxima are added, though no direction attains both.
        """
        # The largest alpha above gamma, and the smallest below.
        largest, smallest = self.alpha(np.array([True, False]), np.array([_SMALLEST_TAIL, 1 - _SMALLEST_TAIL]))
        return (max(float(largest), -float(smallest)) + _LARGEST_NORMAL * (1 + sqrt(dimension)) / 2) / self.scale


@lru_cache(maxsize=256)
def direction_law(epsilon: float) -> DirectionLaw:
    """Return the law with the smallest error, that is with the largest m = E[alpha], among all that spend ``epsilon``.

    p is the probability that alpha exceeds gamma, and q that a standard normal value does. In epsilon = ln(p / (1 - p)) + ln((1 - q) / q),
    the first term is spent on the choice of the side of gamma, and the second on the position of gamma. The derivative of m by the first
    term has the sign of gamma - m, so the maximum is where m = gamma.
    """

    def slope(logit: float) -> float:
        """Return m - gamma, if the first term is ``logit``. It has the opposite sign of the derivative of m."""
        return _scale_at(epsilon, logit) - _gamma_at(epsilon, logit)

    logit = optimize.brentq(slope, 0.0, epsilon, xtol=1e-15 * epsilon)
    gamma = _gamma_at(epsilon, logit)

    def odds(context: Any) -> Any:
        """Return the largest p / (1 - p) that epsilon allows: e^epsilon q / (1 - q)."""
        q = NORMAL.tail_beyond(context.mpf(gamma), context)
        return context.exp(epsilon) * q / (1 - q)

    return DirectionLaw(threshold=largest_probability(odds), log_q=float(log_ndtr(-gamma)), gamma=gamma, scale=_scale_at(epsilon, logit))


def _gamma_at(epsilon: float, logit: float) -> float:
    """Return gamma, the limit between the two sides of alpha, if the part ``logit`` of epsilon is spent on the choice of the side.

    A standard normal value lies above gamma with the probability q for which ln(q / (1 - q)) = ``logit`` - ``epsilon``.
    """
    return float(-ndtri_exp(log_expit(logit - epsilon)))


def _scale_at(epsilon: float, logit: float) -> float:
    """Return m = E[alpha] = phi(gamma) (p / q) (1 - e^-epsilon) for ``logit`` = ln(p / (1 - p)). In this form no digits cancel.

    phi is the standard normal density; p and q are the probabilities of alpha > gamma as drawn, and of a standard normal value.
    """
    log_density = -(_gamma_at(epsilon, logit) ** 2) / 2 - log(2 * pi) / 2
    log_p_over_q = float(log_expit(logit) - log_expit(logit - epsilon))
    return exp(log_density + log_p_over_q) * -expm1(-epsilon)


def randomised_directions(law: DirectionLaw, directions: Floats, source: RandomSource, rows: range) -> Floats:
    """Draw Z (k, d) for the unit vectors ``directions`` (k, d) of the k clients in ``rows``. The mean of Z is the unit vector."""
    points = _Draws.of(law, directions, source, rows).points()
    largest = law.bound(directions.shape[1]) * law.scale  # largest entry, before it is divided by the scale
    return np.asarray((points / STEPS).clip(-largest, largest) / law.scale)


@dataclass(frozen=True)
class _Draws:
    """Random bits of the reports of k clients: the first 64 bits of each real number.

    Attributes:
        directions: unit vectors, (k, d).
        above: whether alpha lies above gamma, (k,).
        alpha_bits: first bits of alpha's tail on its side of gamma, (k,) uint64.
        noise_words: first bits of the entries of g, (k, d) int64: the sign, then the tail.
        source, rows: source of further bits, and the clients' rows in it.
    """

    law: DirectionLaw
    directions: Floats
    above: NDArray[np.bool_]
    alpha_bits: NDArray[np.uint64]
    noise_words: Integers
    source: RandomSource
    rows: range

    @classmethod
    def of(cls, law: DirectionLaw, directions: Floats, source: RandomSource, rows: range) -> _Draws:
        """Draw the bits of the clients in ``rows``: first the side of gamma on which alpha lies, then alpha's bits, then those of g."""
        above = toss_coins(law.threshold, source, rows, 1)[:, 0]
        words = draw_words64(source, rows, 1 + directions.shape[1])
        return cls(law, directions, above, words[:, 0].astype(np.uint64), words[:, 1:], source, rows)

    def points(self) -> Integers:
        """Return the lattice points (k, d) of alpha u + g, with g projected to the space orthogonal to the unit vector u."""
        values, errors = self._estimate()
        # If both ends of the error interval round to one point, that point is right. The others are computed with more bits.
        points = np.floor((values - errors) * STEPS + 0.5)
        doubtful = points != np.floor((values + errors) * STEPS + 0.5)
        for row in np.flatnonzero(doubtful.any(axis=1)).tolist():
            columns = np.flatnonzero(doubtful[row])
            points[row, columns] = self._exact_points(row, columns)
        return points.astype(np.int64)

    def _estimate(self) -> tuple[Floats, Floats]:
        """Return the entries of alpha u + g and bounds of their floating-point errors, (k, d) both. g is projected as in :meth:`points`.

        The bounds are infinite for a client with a tail so close to 0 or 1 that 64 bits and float64 leave too few digits.
        """
        u, entry_sizes = self.directions, np.abs(self.directions)
        g, g_error = sizes_and_errors(NORMAL, self.noise_words)
        largest_dot = (entry_sizes * (g + g_error)).sum(axis=1)  # bounds |<g, u>|
        np.copysign(g, self.noise_words.view(np.float64), out=g)  # a number's sign is its first bit
        share = (self.alpha_bits + 0.5) * 2.0**-WORD  # tail of alpha on its side of gamma
        # Tails that have enough significant bits: those of the noise are 2^-40 or more.
        usable = (share > _MIN_SHARE) & (share < 1 - _MIN_SHARE) & ((self.noise_words & np.int64(2**63 - 1)).min(axis=1) >= 2**24)
        alpha = np.where(usable, self.law.alpha(self.above, share.clip(_MIN_SHARE, 1 - _MIN_SHARE)), 0.0)
        along = alpha - (g * u).sum(axis=1)  # factor of u: alpha, less the part of g along u
        length_error = np.abs((u * u).sum(axis=1) - 1) + _SUM_ERROR  # u stands for the exact unit vector of its direction
        # Bounds of the error of ``along`` and of its product with u: from alpha and g, from sums, and since u is not exactly of length 1.
        error_along = _ALPHA_ERROR * (1 + np.abs(alpha)) + (entry_sizes * g_error).sum(axis=1)
        error_along += (length_error + _SUM_ERROR) * (largest_dot + np.abs(alpha))
        error_along += np.abs(along) * 2 * length_error
        rounding = 2.0**-48 * (np.abs(g) + np.abs(along)[:, None] * entry_sizes)
        errors = g_error + entry_sizes * error_along[:, None] + rounding
        return g + along[:, None] * u, np.where(usable[:, None], errors, np.inf)

    def _exact_points(self, row: int, columns: Integers) -> Integers:
        """Return the lattice points of the client at index ``row``, at the coordinates ``columns``, drawing as many bits as needed.

        They are those of alpha u + g - <g, u> u for the client's unit vector u, as in :meth:`points`.
        """
        words, draw_more_bits = self.noise_words[row], make_bit_drawer(self.source, self.rows[row])
        alpha_bits, tails = int(self.alpha_bits[row]), [first_tail_bits(word) for word in words]  # as integers of ``bits`` bits
        signs, bits = [-1 if word < 0 else 1 for word in words], WORD
        while True:
            alpha_bits, tails = alpha_bits << WORD | draw_more_bits(), [tail << WORD | draw_more_bits() for tail in tails]
            bits = bits_after_next_draw(bits)
            context = mpmath.MPContext()  # mpmath's own is shared by all threads
            context.prec = bits + 2 * WORD
            u = [context.mpf(float(entry)) for entry in self.directions[row]]
            norm = context.sqrt(context.fsum(entry**2 for entry in u))
            last_bit = context.mpf(2) ** -bits  # tails are taken in the middle between two values of the bits
            g = [sign * _normal_quantile((tail + context.mpf(0.5)) * last_bit, context) for sign, tail in zip(signs, tails, strict=True)]
            share = (alpha_bits + context.mpf(0.5)) * last_bit
            along = self._alpha(row, share, context) - context.fdot(u, g) / norm
            # Further bits change each size by at most 1.3 times the change of its tail's logarithm; |u_i| <= 1.
            error = last_bit + 2 * (context.fsum(1 / (tail + context.mpf(0.5)) for tail in tails) + last_bit / min(share, 1 - share))
            entries = [g[column] + along * u[column] / norm for column in columns]  # u / norm is the exact unit vector
            lowest, highest = (
                [int(context.floor((entry + end) * STEPS + context.mpf(0.5))) for entry in entries] for end in (-error, error)
            )
            if lowest == highest:
                return np.array(lowest, dtype=np.int64)

    def _alpha(self, row: int, share: Any, context: Any) -> Any:
        """Return alpha of client ``row``, to the digits of ``context``, from ``share``: alpha's tail on its side of gamma."""
        q = NORMAL.tail_beyond(context.mpf(self.law.gamma), context)
        tail = share * q if self.above[row] else q + share * (1 - q)
        return _normal_quantile(tail, context) if tail < 0.5 else -_normal_quantile(1 - tail, context)


def _normal_quantile(tail: Any, context: Any) -> Any:
    """Return the normal quantile that is exceeded with probability ``tail`` < 1/2, by Newton's method on the tail's logarithm."""
    size = context.mpf(-float(ndtri_exp(float(context.log(tail)))))
    for _ in range(64):
        tail_there = NORMAL.tail_beyond(size, context)
        # The derivative of log(tail) by the size is -(density / tail).
        step = context.log(tail_there / tail) * tail_there * context.sqrt(2 * context.pi) * context.exp(size**2 / 2)
        size += step
        if abs(step) < context.mpf(2) ** (-context.prec // 2 - 8):  # each step doubles the number of right digits
            return size
    raise ArithmeticError("the search for a normal quantile did not converge in 64 steps")
