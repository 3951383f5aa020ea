"""Linked bits behind a shuffler: records of l bits, each by randomised response, of which only the multiset is seen.

Where clones take l bits for any report at l times epsilon, this uses that they are independent. Of another client's record each bit is a
fair coin with probability 2 p0, whatever its input; with probability g = (2 p0)^l all of them are, and such a record is uniform: the
blanket of Balle et al. 2019, which is the optimal decomposition (Su et al. 2025). Whatever is not uniform is given away. Then

    delta(epsilon) = E[max(0, G_1 + ... + G_M)] / (g n),   M ~ Bin(n, g),

G being the density of the client's record under one input less e^epsilon times that under the other, relative to uniform ones. For
inputs that differ in every bit, and k ~ Bin(l, 1/2) bits that look like the first, G is (2 p1)^k (2 p0)^(l - k) - e^epsilon (2 p1)^(l - k)
(2 p0)^k. Inputs that differ in fewer are no worse: given the other bits, a bit that they share has G at m +- s |a - b|, one in which they
differ at m +- s (a + b), with the same m: larger in convex order, and so is the mean of what is above 0.

The same holds where a bit is about one of several coordinates that its client draws in secret: that place is uniform whatever the input,
tells nothing by itself, and G is the same. So a bit of a sampled coordinate costs what one of a known coordinate costs, to a blanket.

The sum is convolved on a lattice. Each value of G is split over its two neighbours so that its mean is kept, which is larger in convex
order too: the result is an upper bound, by about one part in a thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log, log2, sqrt

import numpy as np
from scipy import fft

from ldpfl.privacy.accountants.binomial import Array, log_sigmoid
from ldpfl.privacy.accountants.clones import binary_report, clone_delta
from ldpfl.privacy.accountants.losses import Curve, composed_curves
from ldpfl.privacy.accountants.randomized_response import sum_of_reports_epsilon
from ldpfl.privacy.accountants.shuffled import rounded_down

_HIDES_NOTHING = 30.0
"""Beyond this budget of a record none of 1e10 others is uniform."""

_MOST_BITS = 1 << 12
"""Of a record beyond which what holds locally is all that is computed: memory grows with them."""

_POINTS = 384
"""Of the curve of one record."""

_SIZES = 4
"""Cohort sizes that are told apart."""

_SPREADS = 12.0
"""Standard deviations on each side of 0 that the lattice covers: what lies beyond has less than 1e-30."""

_FEWEST, _MOST = 1 << 16, 1 << 20

_NOTHING = -80.0
"""Logarithm of what is left out of a characteristic function."""

_ROUNDING = 1e-16
"""What rounding can hide of delta; some ten times what is found by exact arithmetic."""


@dataclass(frozen=True)
class LinkedRecords:
    """``records`` records of each of ``clients`` clients, each of ``bits`` bits at ``epsilon0``."""

    epsilon0: float
    bits: int
    clients: int
    records: int


def linked_delta(epsilon0: float, bits: int, clients: int, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of one shuffled record of ``bits`` bits among those of ``clients``.

    Holds in both directions, whatever the others' inputs, for inputs that may depend on what was released before.
    """
    if epsilon >= bits * epsilon0:
        return 0.0
    share = binary_report(epsilon0)
    if bits == 1:
        return clone_delta(epsilon0, clients, epsilon, share)
    uniform = exp(bits * (log(2) + log_sigmoid(-epsilon0)))
    values, chances = _gains(epsilon0, bits, epsilon)
    expected = _mean_above_zero(values, chances, clients, uniform)
    return min(1.0, expected / (uniform * clients) + _ROUNDING)


def linked_epsilon(kinds: Sequence[LinkedRecords], delta: float) -> float:
    """Return a certified epsilon for ``delta`` of all these records of one client; adaptive.

    Seconds on one core for a kind of record. Many cohort sizes are rounded down to a few, which is safe.
    """
    kinds = _merged(kinds)
    local = sum_of_reports_epsilon([(kind.epsilon0, kind.bits * kind.records) for kind in kinds], delta)
    if not kinds or delta <= 0 or any(kind.bits * kind.epsilon0 > _HIDES_NOTHING or kind.bits > _MOST_BITS for kind in kinds):
        return local
    curves = [Curve(_curve(kind), kind.bits * kind.epsilon0, kind.records, 4 * _ROUNDING) for kind in kinds]
    return min(local, composed_curves(curves, delta, _POINTS))


def _curve(kind: LinkedRecords) -> Callable[[float], float]:
    return lambda epsilon: linked_delta(kind.epsilon0, kind.bits, kind.clients, epsilon)


def _merged(kinds: Sequence[LinkedRecords]) -> list[LinkedRecords]:
    """Add up what is alike, after rounding cohorts down to a few sizes."""
    kinds = [kind for kind in kinds if kind.records > 0 and kind.epsilon0 > 0]
    rounded = rounded_down((kind.clients for kind in kinds), _SIZES)
    records: Counter[tuple[float, int, int]] = Counter()
    for kind in kinds:
        records[kind.epsilon0, kind.bits, rounded[kind.clients]] += kind.records
    return [LinkedRecords(*key, count) for key, count in records.items()]


def _gains(epsilon0: float, bits: int, epsilon: float) -> tuple[Array, Array]:
    """Return the values of G and their probabilities, (l + 1,) both."""
    alike = np.arange(bits + 1)
    log_p1, log_p0 = log(2) + log_sigmoid(epsilon0), log(2) + log_sigmoid(-epsilon0)
    first, second = np.exp(alike * log_p1 + (bits - alike) * log_p0), np.exp((bits - alike) * log_p1 + alike * log_p0)
    from scipy.stats import binom  # slow to import

    return np.asarray(first - exp(epsilon) * second), np.asarray(binom.pmf(alike, bits, 0.5))


def _mean_above_zero(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return an upper bound of E[max(0, sum of M values)], M ~ Bin(``clients``, ``share``), up to rounding."""
    spread = sqrt(clients * share * float(np.dot(chances, values**2)))
    # A sum of bounded terms: by Bernstein's inequality what lies beyond this has less than e^(-_SPREADS^2 / 2) / 2.
    reach = _SPREADS * spread + _SPREADS**2 / 3 * float(np.abs(values).max())
    size = int(min(_MOST, max(_FEWEST, 2 ** ceil(log2(32 * _SPREADS * sqrt(clients))))))
    step = 2 * reach / size
    below = np.floor(values / step)
    part = values / step - below
    places, weights = np.concatenate([below, below + 1]), np.concatenate([chances * (1 - part), chances * part])
    power = np.zeros(size // 2 + 1, dtype=np.complex128)
    rough = np.abs(1 - share + share * fft.rfft(np.bincount(places.astype(np.int64) % size, weights, size)))
    present = np.flatnonzero(clients * np.log(np.maximum(rough, 1e-300)) > _NOTHING)
    power[present] = _power(2 * np.pi * present / size, places, weights, clients, share)
    # Sums wrap around at the ends of the lattice, where next to nothing is.
    mass = fft.irfft(power, size)[: size // 2]
    return float(np.dot(np.maximum(mass, 0.0), np.arange(size // 2))) * step


def _power(frequency: Array, places: Array, weights: Array, clients: int, share: float) -> Array:
    """Return the conjugate of the sum's characteristic function, that of one term to the power ``clients``, to nearly all digits."""
    half = np.outer(frequency, places) / 2
    sine = np.sin(half)
    real, imaginary = (-2 * sine**2) @ weights * share, (-2 * sine * np.cos(half)) @ weights * share  # of what 1 is added to
    size = 0.5 * np.log1p(np.maximum(2 * real + real**2 + imaginary**2, -1 + 1e-300))
    return np.asarray(np.exp(clients * (size + 1j * np.arctan2(imaginary, 1 + real))))
