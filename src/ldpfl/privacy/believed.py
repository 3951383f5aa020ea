"""Whether a release in a file can be this project's, as the file says. Whoever wrote the file may have made it up.

The author is not known, and nothing is proved, where a release has a name that no mechanism of ours has, or states what the mechanism of
that name never does: its kind, the unit that it protects, what its noise has in common with that of others, or a larger blanket than its
law has. What is possible is believed: a file cannot show more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import erfc, exp, expm1, log, pi, sqrt

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
    if not may_release(release.mechanism, _kind(release), release.unit):
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
    """Tell whether bits are about a coordinate that was drawn only where the mechanism draws one, and spend what their noise lets them."""
    if release.sampled > 1 and (release.mechanism == "duchi" or release.unit == "weight"):
        return False
    rarer = _rarer(min(release.epsilon, 700.0))
    return release.realised is None or release.realised >= log((1 - rarer) / rarer) - _COIN


def _has_possible_blanket(release: PureRelease) -> bool:
    if release.blanket is None:
        return True
    law = _BLANKETS[release.mechanism]
    return 0 < release.epsilon <= LARGEST_HIDDEN and release.blanket <= law(release.epsilon, release.unit == "weight") * _SLACK


def _is_possible_noise(release: GaussianRelease) -> bool:
    """Tell whether only sums over clients are said to add up, and only records and persons to have coins of their own."""
    return release.units == 1 and (not release.integers or release.mechanism == "dp-fedavg") and (release.rate == 1 or release.of_part)


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
