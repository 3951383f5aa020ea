"""Privacy blankets: shuffled reports that with some probability do not depend on their input (Balle, Bell, Gascon and Nissim 2019).

Every report, for any client and input, is between g and g e^epsilon0 times as likely as under one law U. So the report is a draw of U with
probability g (the share of the blanket), and something else otherwise. Reveal to the adversary which clients drew something else, and what
they drew. The target client still hides among M draws of U, and

    delta(epsilon) <= E[max(0, G_1 + ... + G_M)] / (g n),   M ~ Bin(n, g).

Here n is the number of clients. G is the density of the target's report relative to U under one input, less e^epsilon times the density
under the other input, at a draw of U. Both densities have mean 1 and lie in [g, g e^epsilon0]. The worst case is that each density is
always at an end of that interval, and that one is large only where the other is small. This G is the largest in convex order, so the
mean of its positive part is the largest too. It takes three values.

The bound also holds if inputs depend on earlier releases, and if clients come one by one: whatever was seen before, the next G is no
larger in convex order, and the other clients' draws of U do not depend on it.

For l bits in one message more is known. With p1 = 1 - p0 = 1 / (1 + e^-epsilon0) for one bit, g = (2 p0)^l and U is uniform. A draw of U
agrees with the first input in k ~ Bin(l, 1/2) bits, so G = (2 p1)^k (2 p0)^(l - k) - e^epsilon (2 p1)^(l - k) (2 p0)^k. Inputs that differ
in fewer bits are no worse. To see this, fix the other bits. Let a be their density under the first input, b be e^epsilon times that under
the second, m = a - b and s = p1 - p0. A bit that the inputs share gives G = m +- s |a - b|. A bit in which they differ gives
G = m +- s (a + b), which is farther from the same mean. The bound also holds if each bit is about a coordinate that its client drew in
secret: the index is uniform whatever the input, and reveals nothing by itself.

The sum is convolved on a lattice. Each value of G is split over its two neighbours so that the mean is kept. That makes G larger in
convex order, so the result is still an upper bound. It is about a thousandth too large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, exp, expm1, log, log2, sqrt

import numpy as np
from scipy import fft

from ldpfl.privacy.accountants.binomial import Array, log_sigmoid
from ldpfl.privacy.accountants.clones import clone_delta, clone_probability_for_bits
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves, split_over_lattice
from ldpfl.privacy.accountants.randomized_response import sum_of_reports_epsilon
from ldpfl.privacy.accountants.shuffled_bits import rounded_down

_HIDES_NOTHING = 30.0
"""Largest epsilon of a record that is computed. Above it not even one of 1e10 other clients is expected to draw from the blanket."""

MAX_BITS = 1 << 12
"""Largest number of bits in a record that is computed, since memory grows with it. Above it only the local bound is used."""

_POINTS = 384
"""Number of points of the privacy curve of one record."""

MAX_SIZES = 4
"""Number of distinct cohort sizes after rounding."""

_SPREADS = 12.0
"""Standard deviations on each side of 0 that the lattice covers. The probability outside is below 1e-30."""

_FAR = 3.0
"""If the mean of the sum is farther from 0 than this many standard deviations, the lattice is made wider."""

MIN_LATTICE, MAX_LATTICE = 1 << 16, 1 << 20
"""Smallest and largest number of lattice points."""

MAX_KINDS = 16
"""Largest number of distinct kinds of records that are composed, since each takes seconds. Above it only the local bound is used."""

_NOTHING = -80.0
"""Values of a characteristic function with a logarithm below this are set to 0."""

_TINY = 1e-300
"""Size of a characteristic function below which it counts as this large, since 0 has no logarithm."""

_ROUNDING = 1e-16
"""Allowance for rounding in delta: some ten times the largest error in comparisons with exact arithmetic."""

_DIGITS = 1e-9
"""Relative amount by which the interval of densities is widened, since a stated share is rounded."""


class Record(ABC):
    """One message: the units that travel together and stay together in the shuffler.

    Attributes:
        epsilon0: pure epsilon of the whole record.
        share: g, the probability that the record is a draw of the blanket U.
        epsilon_and_count: epsilon of one unit, and the number of units.
    """

    epsilon0: float

    @property
    @abstractmethod
    def share(self) -> float: ...

    @property
    @abstractmethod
    def epsilon_and_count(self) -> tuple[float, int]: ...

    @abstractmethod
    def gains(self, epsilon: float) -> tuple[Array, Array]:
        """Return the values of G and their probabilities. G is the density under one input, less e^``epsilon`` times that under another."""

    @property
    def is_countable(self) -> bool:
        """Whether a bound behind the shuffler is computed. It is not if epsilon is so large that nobody hides the record."""
        return self.epsilon0 <= _HIDES_NOTHING

    def delta(self, clients: int, epsilon: float) -> float:
        """Return an upper bound of delta(``epsilon``) of one such record among the records of ``clients`` clients.

        It holds in both directions, for any inputs of the others, and for inputs that depend on earlier releases.
        """
        if epsilon >= self.epsilon0:
            return 0.0
        expected = _mean_above_zero(*self.gains(epsilon), clients, self.share)
        return min(1.0, expected / (self.share * clients) + _ROUNDING)


@dataclass(frozen=True)
class Bits(Record):
    """``count`` bits by randomised response at ``bit_epsilon``."""

    bit_epsilon: float
    count: int

    @property
    def epsilon0(self) -> float:  # type: ignore[override]
        return self.bit_epsilon * self.count

    @property
    def share(self) -> float:
        return exp(self.count * (log(2) + log_sigmoid(-self.bit_epsilon)))

    @property
    def epsilon_and_count(self) -> tuple[float, int]:
        return self.bit_epsilon, self.count

    @property
    def is_countable(self) -> bool:
        return super().is_countable and self.count <= MAX_BITS

    def gains(self, epsilon: float) -> tuple[Array, Array]:
        """Return the values of G for each number k of bits that agree with the first input, and their probabilities.

        G is the density under the first input, less e^``epsilon`` times that under the second, relative to uniform bits.
        """
        agreeing = np.arange(self.count + 1)
        # Relative to uniform bits, a bit has the density 2 p1 if it agrees with the input, else 2 p0.
        log_p1, log_p0 = log(2) + log_sigmoid(self.bit_epsilon), log(2) + log_sigmoid(-self.bit_epsilon)
        first = np.exp(agreeing * log_p1 + (self.count - agreeing) * log_p0)
        second = np.exp((self.count - agreeing) * log_p1 + agreeing * log_p0)
        from scipy.stats import binom  # slow to import

        return np.asarray(first - exp(epsilon) * second), np.asarray(binom.pmf(agreeing, self.count, 0.5))

    def delta(self, clients: int, epsilon: float) -> float:
        if self.count == 1 and epsilon < self.bit_epsilon:  # a single bit has a bound that needs no lattice
            return min(1.0, clone_delta(self.bit_epsilon, clients, epsilon, clone_probability_for_bits(self.bit_epsilon)) + _ROUNDING)
        return super().delta(clients, epsilon)


@dataclass(frozen=True)
class Report(Record):
    """Any ``epsilon0``-LDP report with the known blanket ``stated``: its densities lie in [``stated``, ``stated`` e^epsilon0]."""

    epsilon0: float
    stated: float

    @property
    def share(self) -> float:
        return self.stated * (1 - _DIGITS)

    @property
    def epsilon_and_count(self) -> tuple[float, int]:
        return self.epsilon0, 1

    def gains(self, epsilon: float) -> tuple[Array, Array]:
        """Return the three values of G in the worst case, and their probabilities.

        Each of the two densities is at an end of its interval: the first is high and the second low, or the reverse, or they are equal.
        """
        low, high = self.share, self.stated * exp(self.epsilon0) * (1 + _DIGITS)
        p_high = (1 - low) / (high - low)  # probability of ``high`` for a density with mean 1
        p_differ = min(p_high, 1 - p_high)
        equal = high if p_high > 0.5 else low  # value of both densities where they are equal
        weight = exp(epsilon)
        values = np.array([high - weight * low, low - weight * high, -equal * expm1(epsilon)])
        return values, np.array([p_differ, p_differ, 1 - 2 * p_differ])


@dataclass(frozen=True)
class Hidden:
    """Each of ``clients`` clients sends ``records`` equal records."""

    record: Record
    clients: int
    records: int


def blanket_epsilon(kinds: Sequence[Hidden], delta: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for all these records of one client. It holds for adaptive inputs.

    It is never above the bound without a shuffler, which is returned if the records cannot be computed by blankets.
    One core takes seconds for each kind of record. Many cohort sizes are rounded down to a few, which is safe: fewer clients hide less.
    """
    kinds = _merged(kinds)
    reports_of_a_record = [(*kind.record.epsilon_and_count, kind.records) for kind in kinds]
    local = sum_of_reports_epsilon([(epsilon0, count * records) for epsilon0, count, records in reports_of_a_record], delta)
    if not kinds or delta <= 0 or len(kinds) > MAX_KINDS or not all(kind.record.is_countable for kind in kinds):
        return local
    curves = [PrivacyCurve(_delta_curve(kind), kind.record.epsilon0, kind.records, 4 * _ROUNDING) for kind in kinds]
    return min(local, composed_curves(curves, delta, _POINTS))


def _delta_curve(kind: Hidden) -> Callable[[float], float]:
    """Return delta of one record of this kind as a function of epsilon."""
    return lambda epsilon: kind.record.delta(kind.clients, epsilon)


def _merged(kinds: Sequence[Hidden]) -> list[Hidden]:
    """Merge equal kinds, after rounding cohort sizes down to a few."""
    kinds = [kind for kind in kinds if kind.records > 0 and kind.record.epsilon0 > 0]
    rounded = rounded_down((kind.clients for kind in kinds), MAX_SIZES)
    records: Counter[tuple[Record, int]] = Counter()
    for kind in kinds:
        records[kind.record, rounded[kind.clients]] += kind.records
    return [Hidden(record, clients, count) for (record, clients), count in records.items()]


def _mean_above_zero(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return an upper bound of E[max(0, S)], up to rounding, where S is the sum of Bin(``clients``, ``share``) draws from ``values``.

    ``chances`` are the values' probabilities. Each value is split over two neighbouring points of a lattice so that its mean is kept, which
    can only raise the result. The law of S is the inverse transform of its characteristic function, computed where that is not negligible.
    """
    spread = sqrt(clients * share * float(np.dot(chances, values**2)))
    # By Bernstein's inequality, the sum exceeds ``reach`` with probability below e^(-_SPREADS^2 / 2) / 2.
    reach = _SPREADS * spread + _SPREADS**2 / 3 * float(np.abs(values).max())
    mean_size = clients * share * abs(float(np.dot(chances, values)))
    if mean_size > _FAR * spread:  # else the far side of the sum, which is below 0, would wrap around to where it counts
        reach += mean_size
    # This many points make some 16 steps of the root mean square of one term, since ``spread`` is sqrt(clients) times that.
    size = int(min(MAX_LATTICE, max(MIN_LATTICE, 2 ** ceil(log2(32 * _SPREADS * sqrt(clients))))))
    step = 2 * reach / size
    places, weights = split_over_lattice(values, chances, step)
    transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    # The size of one term's characteristic function, up to rounding, shows at which frequencies the sum's function is not negligible.
    rough_size = np.abs(1 - share + share * fft.rfft(np.bincount(places.astype(np.int64) % size, weights, size)))
    present = np.flatnonzero(clients * np.log(np.maximum(rough_size, _TINY)) > _NOTHING)
    transform[present] = _characteristic_function_of_sum(2 * np.pi * present / size, places, weights, clients, share)
    # Sums of 0 or more are in the first half. Sums wrap around at the ends of the lattice, where the probability is negligible.
    mass = fft.irfft(transform, size)[: size // 2]
    return float(np.dot(np.maximum(mass, 0.0), np.arange(size // 2))) * step


def _characteristic_function_of_sum(frequency: Array, places: Array, weights: Array, clients: int, share: float) -> Array:
    """Return the conjugate of the sum's characteristic function at each ``frequency``, without loss of digits.

    The sum has ``clients`` independent terms. A term is 0 with probability 1 - ``share``; else it is one of ``places``, drawn by
    ``weights``. The characteristic function of one term is raised to the power ``clients``. The logarithm of its size is computed from
    the function less 1 where that is small, since digits would cancel there. Where the function itself is small, and may be 0, the
    logarithm is computed from the function.
    """
    half = np.outer(frequency, places) / 2
    sine = np.sin(half)
    real, imaginary = (-2 * sine**2) @ weights * share, (-2 * sine * np.cos(half)) @ weights * share  # the function less 1
    excess = 2 * real + real**2 + imaginary**2  # the squared size less 1
    log_size_near_1 = 0.5 * np.log1p(np.maximum(excess, -0.5))
    log_size = np.where(excess > -0.5, log_size_near_1, np.log(np.maximum(np.hypot(1 + real, imaginary), _TINY)))
    return np.asarray(np.exp(clients * (log_size + 1j * np.arctan2(imaginary, 1 + real))))
