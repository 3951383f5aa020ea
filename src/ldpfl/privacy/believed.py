"""Whether a release in a file can be this project's, as the file says. Whoever wrote the file may have made it up.

A name that no mechanism of ours has, a kind of release that the mechanism of that name never makes, or a blanket larger than its law has:
then the author is not known, and nothing is proved. What is possible is believed: a file cannot show more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import erfc, exp, expm1, pi, sqrt

from ldpfl.privacy.authors import may_release
from ldpfl.privacy.events import LARGEST_HIDDEN, OURS, BinaryRelease, GaussianRelease, PureRelease, Release

DOUBTED = "not known, a file says ldpfl"
"""Author of a release in a file that says it is ours, and cannot be."""

_SLACK = 1.001
"""Factor by which lattices may move a blanket from its formula: a window of points, by 1e-4 at the largest epsilon."""

_COIN = 2.0**-32
"""Step of the probabilities of one bit."""


def believed(release: Release) -> Release:
    """Return ``release`` as it was read, or with the author :data:`DOUBTED` if it says that it is ours, and cannot be."""
    return replace(release, author=DOUBTED) if release.author == OURS and not _is_possible(release) else release


@lru_cache(maxsize=1024)
def _is_possible(release: Release) -> bool:
    if not may_release(release.mechanism, _kind(release)):
        return False
    if not isinstance(release, PureRelease) or release.blanket is None:
        return True
    law = _BLANKETS[release.mechanism]
    return 0 < release.epsilon <= LARGEST_HIDDEN and release.blanket <= law(release.epsilon, release.unit == "weight") * _SLACK


def _kind(release: Release) -> str:
    match release:
        case BinaryRelease():
            return "binary"
        case PureRelease():
            return "pure"
        case GaussianRelease():
            return "gaussian"
    return "unprotected"


def _rarer(epsilon: float) -> float:
    """Return the probability of the rarer value of one bit."""
    return 1 / (1 + exp(epsilon)) + _COIN


def _half(epsilon: float, _each: bool) -> float:
    """Return the blanket of Laplace noise and of the piecewise law: of k values at epsilon / k each, the same together."""
    return exp(-epsilon / 2)


def _hybrid(epsilon: float, each: bool) -> float:
    """Return that of both parts; of k values at epsilon / k each, what it tends to as k grows."""
    share = -expm1(-epsilon / 2) if epsilon > _BIT_ALONE else 0.0
    return share * exp(-epsilon / 2) + (1 - share) * 2 * _rarer(epsilon) if each else exp(-epsilon / 2)


_BIT_ALONE = 0.6093
"""Epsilon up to which ``hybrid`` sends one bit, a little rounded down."""


def _signs(epsilon: float, _each: bool) -> float:
    """Return that of ``duchi-vector`` in two dimensions, where half of all signs are neither right nor wrong: no others have more."""
    rarer = _rarer(epsilon)
    return 4 * rarer / (1 + 2 * rarer)


def _direction(epsilon: float, _each: bool) -> float:
    """Return that of ``privunit-g`` without lengths, which take from it: 1 / (1 + q (e^epsilon - 1)), q = P(normal > gamma).

    Gamma is where gamma = phi(gamma) (e^epsilon - 1) / (1 + q (e^epsilon - 1)), the law's scale; it lies below 10.
    """
    low, high = 0.0, 10.0
    for _ in range(60):
        gamma = (low + high) / 2
        scale = exp(-gamma * gamma / 2) / sqrt(2 * pi) * expm1(epsilon) * _below(gamma, epsilon)
        low, high = (gamma, high) if scale > gamma else (low, gamma)
    return _below(low, epsilon)


def _below(gamma: float, epsilon: float) -> float:
    return 1 / (1 + erfc(gamma / sqrt(2)) / 2 * expm1(epsilon))


_BLANKETS: Mapping[str, Callable[[float, bool], float]] = {
    "laplace": _half,
    "piecewise": _half,
    "hybrid": _hybrid,
    "duchi-vector": _signs,
    "privunit-g": _direction,
}
"""By mechanism, the largest blanket that it has at an epsilon, of each weight or of a whole vector."""
