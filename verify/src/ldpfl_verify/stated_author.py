"""Decide whether a report can be one of the ldpfl project's code, if a file says so.

Anybody can write the project's name into a file. So a report that no mechanism of the project makes counts as a report of unknown code.
That is the case if no mechanism of the project has this name, or if the mechanism of this name makes reports of another kind or unit, has
other properties of its noise, has a smaller blanket at that epsilon, or loses less to rounding. Any other report keeps the stated author,
because a file cannot show more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import exp, expm1, log, log1p

from scipy.optimize import minimize_scalar
from scipy.stats import norm

from ldpfl_verify.certificate_file import OURS, USERS_CODE, ClientRelease, Kind, Unit
from ldpfl_verify.errors import quoted

DOUBTED = "not known, a file says ldpfl"
"""Author of a report that a file wrongly attributes to the project's code."""

MAX_EPSILON = 30.0
"""Epsilon of a report beyond which the project's mechanisms state no blanket."""

ROUNDING = 1.001
"""Factor by which a blanket may exceed its formula, because the mechanisms draw from lattices."""

SMALLEST_SHARE = 2.0**-32
"""Step of the probabilities with which the project's mechanisms draw one bit."""

MAX_EPSILON_OF_ONE_BIT = 0.6093
"""Epsilon up to which ``hybrid`` sends one bit instead of a number, rounded down."""

_KINDS: Mapping[Kind, frozenset[str]] = {
    "binary": frozenset({"duchi", "harmony", "rotated-sign"}),
    "pure": frozenset({"laplace", "piecewise", "hybrid", "duchi-vector", "privunit-g"}),
    "gaussian": frozenset({"full-dp", "nbafl", "time-varying", "sensitive-dp", "dpa", "ladp-sound", "dp-sgd", "dp-fedavg"}),
    "unprotected": frozenset({"full-dp", "time-varying", "sensitive-dp", "dpa", "adapldp", "ladp", "none"}),
}
"""Mechanisms of the project that make reports of each kind."""

_UNITS: Mapping[str, frozenset[Unit]] = {
    "duchi": frozenset({"weight"}),
    "harmony": frozenset({"weight", "group", "layer"}),
    "rotated-sign": frozenset({"coordinate"}),
    "laplace": frozenset({"weight", "vector"}),
    "piecewise": frozenset({"weight", "vector"}),
    "hybrid": frozenset({"weight", "vector"}),
    "dp-sgd": frozenset({"record", "person"}),
    "none": frozenset({"weight"}),
}
"""What one unit of a report stands for. With every mechanism that is not listed it is the whole vector."""


def with_believed_author(release: ClientRelease) -> ClientRelease:
    """Return ``release``, with the author :data:`DOUBTED` if it names the project's mechanism and no such mechanism makes it."""
    is_doubted = release.author in (OURS, USERS_CODE) and not _project_can_make(release)
    return replace(release, author=DOUBTED) if is_doubted else release


def with_author_of_bits(release: ClientRelease, realised: object) -> ClientRelease:
    """Return ``release`` of bits, with the author :data:`DOUBTED` if the project's bits cannot have the epsilon ``realised``.

    Beside the epsilon that is charged, a ledger states the ``realised`` epsilon of the rounded probabilities. It is computed again here,
    because a file with a wrong one was not written by the project's mechanism.

    Raises:
        ValueError: ``realised`` is no number above 0, or exceeds the epsilon that is counted.
    """
    counted = release.parameter or 0.0
    if isinstance(realised, bool) or not isinstance(realised, int | float) or not 0 < realised <= counted:
        raise ValueError(
            f"bits at epsilon {counted:g} have a realised epsilon of {quoted(realised)}: expected above 0 and at most {counted:g}"
        )
    is_doubted = release.author in (OURS, USERS_CODE) and realised < _least_realised(counted)
    return replace(release, author=DOUBTED) if is_doubted else release


def _least_realised(epsilon: float) -> float:
    """Return the smallest epsilon of a bit after rounding, rounded down: its rarer value is one step more probable than at ``epsilon``."""
    rarer = 1 / (exp(min(epsilon, _MAX_EXPONENT)) + 1) + SMALLEST_SHARE
    return log1p(-rarer) - log(rarer) - SMALLEST_SHARE


_MAX_EXPONENT = 700.0
"""Epsilon above which e^epsilon overflows."""


def _project_can_make(release: ClientRelease) -> bool:
    """Return whether the project's mechanism of this name can make such a report: its kind, unit, flags and blanket."""
    if release.mechanism not in _KINDS[release.kind] or release.unit not in _UNITS.get(release.mechanism, {"vector"}):
        return False
    if not _flags_fit_mechanism(release):
        return False
    if release.blanket is None:
        return True
    if release.kind != "pure" or release.parameter is None or release.parameter > MAX_EPSILON:
        return False
    return release.blanket <= _largest_blanket(release.mechanism, release.parameter, release.unit == "weight") * ROUNDING


def _flags_fit_mechanism(release: ClientRelease) -> bool:
    """Return whether the mechanism that ``release`` names can have its number of units, and its flags on the noise."""
    draws_coordinates = release.kind == "binary" and release.mechanism != "duchi" and release.unit != "weight"
    has_one_unit = release.kind == "gaussian" or (release.kind == "pure" and release.unit == "vector")
    return not (
        (release.sampled > 1 and not draws_coordinates)
        or (release.units > 1 and has_one_unit)
        or (release.integers and release.mechanism != "dp-fedavg")
        or (release.alike and (release.kind != "gaussian" or release.unit != "vector"))
        or (release.rate < 1 and release.mechanism != "dp-sgd")
    )


@cache
def _largest_blanket(mechanism: str, epsilon: float, one_number: bool) -> float:
    """Return the largest blanket of a mechanism of kind ``pure``; ``one_number`` if a unit is one number and not a vector."""
    number_blanket = exp(-epsilon / 2)  # also of k numbers with epsilon / k each
    bit_blanket = 2 / (exp(epsilon) + 1) + 2 * SMALLEST_SHARE
    match mechanism:
        case "hybrid" if one_number:
            one_bit_probability = exp(-epsilon / 2) if epsilon > MAX_EPSILON_OF_ONE_BIT else 1.0
            return (1 - one_bit_probability) * number_blanket + one_bit_probability * bit_blanket
        case "duchi-vector":
            # In two dimensions half of all corners are neither near nor far; in other dimensions fewer are, and the blanket is smaller.
            return 2 * bit_blanket / (1 + bit_blanket)
        case "privunit-g":
            return _blanket_of_direction(epsilon)
    return number_blanket  # "laplace", "piecewise", and vectors of "hybrid", which come near to it


def _blanket_of_direction(epsilon: float) -> float:
    """Return the share of a randomised direction that follows a normal law, for the threshold with the largest scale.

    The component along the direction exceeds a threshold t with odds that are e^epsilon times those of a normal value. The share is
    1 / (1 + (e^epsilon - 1) P(normal > t)), and the scale, which is the mean of the component, is share * density(t) * (e^epsilon - 1).
    """
    growth = expm1(epsilon)

    def share(threshold: float) -> float:
        return float(1 / (1 + growth * norm.sf(threshold)))

    best = minimize_scalar(
        lambda threshold: -share(threshold) * norm.pdf(threshold), bounds=(0.0, 10.0), method="bounded", options={"xatol": 1e-7}
    )
    return share(float(best.x))
