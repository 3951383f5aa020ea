"""Check whether a release that was read from a file can be this project's, as the file states. The file may be forged.

The stated author is rejected, and nothing is proved, in two cases: the release names no built-in mechanism, or it states something that
this mechanism never does. The check covers the kind of release, the protected unit, the properties of the noise, and the size of the
blanket. A release that passes keeps the stated author, since a file cannot prove more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import erfc, exp, expm1, log, pi, sqrt

from ldpfl.privacy.authors import may_release
from ldpfl.privacy.events import KIND_NAMES, LARGEST_HIDDEN, OURS, USERS_CODE, BinaryRelease, GaussianRelease, PureRelease, Release

DOUBTED = "not known, a file says ldpfl"
"""Author of a release that a file attributes to this project although no built-in mechanism makes it."""

_SLACK = 1.001
"""Factor by which a blanket may exceed its formula. Rounding to lattice points changes it by up to 1e-4, at the largest epsilon."""

MAX_EXPONENT = 700.0
"""Above it e^epsilon overflows."""

_COIN = 2.0**-32
"""Resolution of a bit's probabilities: they are multiples of this."""


def with_checked_author(release: Release) -> Release:
    """Return ``release``, with the author :data:`DOUBTED` if it states this project as its author but no built-in mechanism can make it."""
    is_stated = release.author in (OURS, USERS_CODE)
    return replace(release, author=DOUBTED) if is_stated and not _can_be_built_in(release) else release


@lru_cache(maxsize=1024)
def _can_be_built_in(release: Release) -> bool:
    """Whether a built-in mechanism can make this release."""
    if not may_release(release.mechanism, KIND_NAMES.get(type(release), ""), release.unit):
        return False
    match release:
        case BinaryRelease():
            return _are_possible_bits(release)
        case PureRelease():
            return (release.unit == "weight" or release.units == 1) and _has_possible_blanket(release)
        case GaussianRelease():
            return _is_possible_noise(release)
    return True


def _are_possible_bits(release: BinaryRelease) -> bool:
    """Whether the stated built-in mechanism can release these bits.

    Only a mechanism that samples coordinates may state more than one. Rounding the probabilities of a bit lowers the epsilon that it
    realises. ``realised`` must not be lower than this rounding can make it.
    """
    if release.sampled > 1 and (release.mechanism == "duchi" or release.unit == "weight"):
        return False
    rarer = _rarer_probability(min(release.epsilon, MAX_EXPONENT))
    lowest = log((1 - rarer) / rarer) - _COIN  # the subtraction allows for rounding of the logarithm
    return release.realised is None or release.realised >= lowest


def _has_possible_blanket(release: PureRelease) -> bool:
    """Whether the blanket is at most the largest that the mechanism can have at this epsilon. Above ``LARGEST_HIDDEN`` it has none."""
    if release.blanket is None:
        return True
    largest_blanket = _BLANKETS[release.mechanism]
    return 0 < release.epsilon <= LARGEST_HIDDEN and release.blanket <= largest_blanket(release.epsilon, release.unit == "weight") * _SLACK


def _is_possible_noise(release: GaussianRelease) -> bool:
    """Whether a built-in mechanism can add this noise: one unit; integers only by ``dp-fedavg``; sampling only of records or persons."""
    return release.units == 1 and (not release.integers or release.mechanism == "dp-fedavg") and (release.rate == 1 or release.of_part)


def _rarer_probability(epsilon: float) -> float:
    """Return the largest probability that the rarer value of one bit can have, rounding included."""
    return 1 / (1 + exp(epsilon)) + _COIN


def _half_epsilon_blanket(epsilon: float, _each_weight: bool) -> float:
    """Return the blanket e^(-epsilon / 2) of ``laplace`` and ``piecewise``. A vector of k values at epsilon / k each has the same one."""
    return exp(-epsilon / 2)


def _hybrid_blanket(epsilon: float, each_weight: bool) -> float:
    """Return the blanket of ``hybrid``, a mixture of ``piecewise`` and one bit; for a vector, the limit for many values (the largest)."""
    piecewise_share = -expm1(-epsilon / 2) if epsilon > _BIT_ALONE else 0.0
    bit_blanket = 2 * _rarer_probability(epsilon)
    return piecewise_share * exp(-epsilon / 2) + (1 - piecewise_share) * bit_blanket if each_weight else exp(-epsilon / 2)


_BIT_ALONE = 0.6093
"""Epsilon up to which ``hybrid`` sends one bit only (Wang et al. 2019: 0.61), rounded down."""


def _signs_blanket(epsilon: float, _each_weight: bool) -> float:
    """Return the blanket of ``duchi-vector`` in two dimensions, which is the largest of all dimensions.

    There half of the sign vectors are orthogonal to the input, and so equally likely under every input.
    """
    rarer = _rarer_probability(epsilon)
    return 4 * rarer / (1 + 2 * rarer)


def _direction_blanket(epsilon: float, _each_weight: bool) -> float:
    """Return the blanket of ``privunit-g`` without the length, which would lower it.

    It is 1 / (1 + q (e^epsilon - 1)), where q = P(N(0, 1) > gamma). The threshold gamma, below 10, solves
    gamma = phi(gamma) (e^epsilon - 1) / (1 + q (e^epsilon - 1)), with phi the standard normal density. It is found by bisection.
    """
    low, high = 0.0, 10.0
    for _ in range(60):  # 10 / 2**60 is below float64's resolution
        gamma = (low + high) / 2
        right_side = exp(-gamma * gamma / 2) / sqrt(2 * pi) * expm1(epsilon) * _blanket_at(gamma, epsilon)
        if right_side > gamma:
            low = gamma
        else:
            high = gamma
    return _blanket_at(low, epsilon)


def _blanket_at(gamma: float, epsilon: float) -> float:
    """Return the blanket of ``privunit-g`` for the threshold ``gamma``."""
    return 1 / (1 + erfc(gamma / sqrt(2)) / 2 * expm1(epsilon))


_BLANKETS: Mapping[str, Callable[[float, bool], float]] = {
    "laplace": _half_epsilon_blanket,
    "piecewise": _half_epsilon_blanket,
    "hybrid": _hybrid_blanket,
    "duchi-vector": _signs_blanket,
    "privunit-g": _direction_blanket,
}
"""Largest blanket of each mechanism, as a function of epsilon and of whether each weight is a unit (else the whole vector is)."""
