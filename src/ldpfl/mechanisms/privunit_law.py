"""How PrivUnitG randomises a direction: exactly, on a lattice, as in :mod:`ldpfl.mechanisms.exact_noise`.

Each entry of alpha u + g is a real number that floating point computes to a known error; where an entry's lattice point is in doubt, once
in thousands of reports, all is computed again from more random bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1, log, pi, sqrt
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_expit, log_ndtr, ndtri, ndtri_exp

from ldpfl.mechanisms import exact_noise
from ldpfl.mechanisms.coins import happens
from ldpfl.mechanisms.exact_noise import (
    NORMAL,
    WORD,
    Floats,
    Integers,
    largest_probability,
    longer,
    more_bits,
    tail_bits,
    words64,
)
from ldpfl.util.randomness import RandomSource

STEPS = 1 << 10
"""Lattice points to a standard deviation of the noise across the direction."""

_SMALLEST_TAIL = 2.0**-53
_LARGEST_NORMAL = float(-ndtri(_SMALLEST_TAIL))
"""What is exceeded with that probability, about 8.21."""

_SUMMED = 2.0**-46
"""Part of the sum of sizes by which NumPy's pairwise sums, of products of two floats, may be wrong."""

_ALPHA, _RARE = 2.0**-36, 2.0**-18
"""Part of 1 + |alpha| by which :meth:`DirectionLaw.alpha` may be wrong, for shares that far from 0 and 1: next to 1 a float64 has
few digits of what is left, 2^-36 of it at that distance."""


@dataclass(frozen=True)
class DirectionLaw:
    """How a unit vector u is randomised: Z = (alpha u + g) / scale, with g standard normal orthogonally to u.

    alpha is a standard normal value on condition of lying above ``gamma`` with probability ``p``, else below it. Without
    condition it would lie above with probability q: the densities of Z for any two u differ by the factor
    (p / q) / ((1 - p) / (1 - q)) at most, and ``threshold`` is the largest for which p = threshold / 2^64 keeps that within
    e^epsilon, q being what the float ``gamma`` is exceeded with. ``scale`` is E[alpha], written m in the paper.
    """

    threshold: int
    log_q: float
    gamma: float
    scale: float

    @property
    def p(self) -> float:
        """Probability of the side above ``gamma``."""
        return float(self.threshold / 2**WORD)

    @property
    def blanket(self) -> float:
        """Share of Z that is normal in all directions, whatever u is: what there is of a point below ``gamma``."""
        return float((2**WORD - self.threshold) / 2**WORD / -expm1(self.log_q))

    @property
    def second_moment(self) -> float:
        """E[alpha^2] = 1 + gamma m.

        A normal value a has E[a; a > gamma] = phi(gamma), E[a^2; a > gamma] = q + gamma phi(gamma) and, as the whole is
        1, E[a^2; a < gamma] = 1 - q - gamma phi(gamma). Weighted by p / q and (1 - p) / (1 - q), the first gives
        m = phi(gamma) (p / q - (1 - p) / (1 - q)), and the others 1 + gamma m.
        """
        return 1 + self.gamma * self.scale

    def alpha(self, above: NDArray[np.bool_], tail: Floats) -> Floats:
        """Return what alpha exceeds with probabilities ``tail`` (k,) in (0, 1], given its sides of gamma (k,).

        By the nearer tail, and the far one by its logarithm, so that nothing cancels.
        """
        mass = -expm1(self.log_q)  # 1 - q
        left = (1 - tail) * mass
        low = np.where(left < 0.5, ndtri(left), -ndtri(exp(self.log_q) + tail * mass))
        return np.asarray(np.where(above, -ndtri_exp(np.log(tail) + self.log_q), low))

    def bound(self, dimension: int) -> float:
        """Return what no entry of Z exceeds in size, whatever the direction: what exceeds it, of one report in 2^50, is cut off.

        m Z_j = alpha u_j + h_j, with h = g - <g, u> u the part of g across u. |alpha| is largest at an end of either side.
        With |g_i| <= G and a = |u_j|, Cauchy-Schwarz over the other entries of u gives
        |h_j| <= G ((1 - a^2) + a sqrt(1 - a^2) sqrt(d - 1)), which is G (1 + sqrt(d)) / 2 at most: with a = sin(x) it is
        G / 2 (1 + cos(2x) + sqrt(d - 1) sin(2x)). The two maxima are added, though one direction does not attain both.
        """
        ends = self.alpha(np.array([True, False]), np.array([_SMALLEST_TAIL, 1 - _SMALLEST_TAIL]))
        return (max(float(ends[0]), -float(ends[1])) + _LARGEST_NORMAL * (1 + sqrt(dimension)) / 2) / self.scale


@lru_cache(maxsize=256)
def direction_law(epsilon: float) -> DirectionLaw:
    """Return the law with the smallest error, that is with the largest m, among all that spend ``epsilon``.

    ln(p / (1 - p)) of it go to the choice of the side and ln((1 - q) / q) to the place of gamma. The derivative of m by
    the former has the sign of gamma - m, so the maximum is where the two cross.
    """
    logit = brentq(lambda value: _scale(epsilon, value) - _gamma(epsilon, value), 0.0, epsilon, xtol=1e-15 * epsilon)
    gamma = _gamma(epsilon, logit)

    def odds(context: Any) -> Any:
        above = NORMAL.tail(context.mpf(gamma), context)
        return context.exp(epsilon) * above / (1 - above)

    return DirectionLaw(largest_probability(odds), float(log_ndtr(-gamma)), gamma, _scale(epsilon, logit))


def _gamma(epsilon: float, logit: float) -> float:
    return float(-ndtri_exp(log_expit(logit - epsilon)))


def _scale(epsilon: float, logit: float) -> float:
    """phi(gamma) (p / q) (1 - e^-epsilon): the same m, without a difference."""
    log_density = -(_gamma(epsilon, logit) ** 2) / 2 - log(2 * pi) / 2
    return exp(log_density + float(log_expit(logit) - log_expit(logit - epsilon))) * -expm1(-epsilon)


def randomised_directions(law: DirectionLaw, directions: Floats, source: RandomSource, rows: range) -> Floats:
    """Return Z (k, d) for the ``directions`` (k, d) of unit vectors, of the clients in ``rows``; E[Z] is that vector."""
    points = _Draws.of(law, directions, source, rows).points()
    most = law.bound(directions.shape[1]) * law.scale
    return np.asarray((points / STEPS).clip(-most, most) / law.scale)


@dataclass(frozen=True)
class _Draws:
    """The random bits of the reports of k clients, so far as they are drawn: the first 64 of each number.

    Attributes:
        directions: (k, d).
        above: (k,) the side of alpha.
        alphas: (k,) uint64, of alpha.
        words: (k, d) int64, of g.
        source, rows: where more of them come from.
    """

    law: DirectionLaw
    directions: Floats
    above: NDArray[np.bool_]
    alphas: NDArray[np.uint64]
    words: Integers
    source: RandomSource
    rows: range

    @classmethod
    def of(cls, law: DirectionLaw, directions: Floats, source: RandomSource, rows: range) -> _Draws:
        above = happens(law.threshold, source, rows, 1)[:, 0]
        words = words64(source, rows, 1 + directions.shape[1])
        return cls(law, directions, above, words[:, 0].astype(np.uint64), words[:, 1:], source, rows)

    def points(self) -> Integers:
        """Return the lattice points of alpha u + g, g taken across the unit vector u."""
        values, errors = self._estimate()
        least, most = (np.floor((values + sign * errors) * STEPS + 0.5) for sign in (-1, 1))
        doubtful = least != most
        for row in np.flatnonzero(doubtful.any(axis=1)).tolist():
            places = np.flatnonzero(doubtful[row])
            least[row, places] = self._exactly(row, places)
        return least.astype(np.int64)

    def _estimate(self) -> tuple[Floats, Floats]:
        """Return the entries and what each may be wrong by; infinitely much where the first bits are too few for an estimate."""
        u, sizes = self.directions, np.abs(self.directions)
        g, error = exact_noise.sizes(NORMAL, self.words)
        covered = (sizes * (g + error)).sum(axis=1)
        np.copysign(g, self.words.view(np.float64), out=g)  # a number's sign is its first bit
        share = (self.alphas + 0.5) * 2.0**-WORD
        usable = (share > _RARE) & (share < 1 - _RARE) & ((self.words & np.int64(2**63 - 1)).min(axis=1) >= 2**24)
        alpha = np.where(usable, self.law.alpha(self.above, share.clip(_RARE, 1 - _RARE)), 0.0)
        along = alpha - (g * u).sum(axis=1)
        off = np.abs((u * u).sum(axis=1) - 1) + _SUMMED  # u stands for the unit vector of its direction
        error_along = _ALPHA * (1 + np.abs(alpha)) + (sizes * error).sum(axis=1) + (off + _SUMMED) * (covered + np.abs(alpha))
        moved = error_along + np.abs(along) * 2 * off
        errors = error + sizes * moved[:, None] + 2.0**-48 * (np.abs(g) + np.abs(along)[:, None] * sizes)
        return g + along[:, None] * u, np.where(usable[:, None], errors, np.inf)

    def _exactly(self, row: int, places: Integers) -> Integers:
        """Return the lattice points of one client at ``places``, from as many bits as they take."""
        words, more = self.words[row], more_bits(self.source, self.rows[row])
        alpha, firsts = int(self.alphas[row]), [tail_bits(word) for word in words]
        signs, bits = [-1 if word < 0 else 1 for word in words], WORD
        while True:
            alpha, firsts, bits = alpha << WORD | more(), [first << WORD | more() for first in firsts], longer(bits)
            context = mpmath.MPContext()
            context.prec = bits + 2 * WORD
            u = [context.mpf(float(entry)) for entry in self.directions[row]]
            norm = context.sqrt(context.fsum(entry**2 for entry in u))
            middle = context.mpf(2) ** -bits
            g = [sign * _exceeded((first + context.mpf(0.5)) * middle, context) for sign, first in zip(signs, firsts, strict=True)]
            share = (alpha + context.mpf(0.5)) * middle
            along = self._alpha(row, share, context) - context.fdot(u, g) / norm
            # What the bits to come may move: each size by 1.3 times its tail's logarithm at most; |u_i| <= 1.
            error = middle + 2 * (context.fsum(1 / (first + context.mpf(0.5)) for first in firsts) + middle / min(share, 1 - share))
            entries = [g[place] + along * u[place] / norm for place in places]
            bounds = [[int(context.floor((entry + sign * error) * STEPS + context.mpf(0.5))) for sign in (-1, 1)] for entry in entries]
            if all(low == high for low, high in bounds):
                return np.array([low for low, _ in bounds], dtype=np.int64)

    def _alpha(self, row: int, share: Any, context: Any) -> Any:
        q = NORMAL.tail(context.mpf(self.law.gamma), context)
        tail = share * q if self.above[row] else q + share * (1 - q)
        return _exceeded(tail, context) if tail < 0.5 else -_exceeded(1 - tail, context)


def _exceeded(tail: Any, context: Any) -> Any:
    """Return what a normal value exceeds with probability ``tail``, below 1/2, by Newton's method on the tail's logarithm."""
    size = context.mpf(-float(ndtri_exp(float(context.log(tail)))))
    for _ in range(64):
        found = NORMAL.tail(size, context)
        step = context.log(found / tail) * found * context.sqrt(2 * context.pi) * context.exp(size**2 / 2)
        size += step
        if abs(step) < context.mpf(2) ** (-context.prec // 2 - 8):  # it doubles the digits that are right
            return size
    raise ArithmeticError("a quantile was not found")
