"""Blankets: reports behind a shuffler of which a part says nothing, whatever their inputs (Balle, Bell, Gascon and Nissim 2019).

Every report, of any client and input, is between g and g e^epsilon0 times as likely as under one law U. So it is a draw of U with
probability g, and something else otherwise. Tell the adversary who drew something else, and what: the client in question hides among M
draws of U, and

    delta(epsilon) <= E[max(0, G_1 + ... + G_M)] / (g n),   M ~ Bin(n, g),

G being the density of that client's report relative to U under one input, less e^epsilon times that under the other. Two densities with
mean 1 in [g, g e^epsilon0] are least alike where each is at an end of that interval, and the one is large only where the other is small:
of all their differences that one is the largest in convex order, and so is the mean of what is above 0. It takes three values.

This holds as well where each input depends on what was released before, and where clients come one by one: whatever has been seen, the
next G is no larger in convex order, and U is what the others drew.

Of l bits that travel together more is known: g = (2 p0)^l, U is uniform, and k ~ Bin(l, 1/2) of them look like the first input, so that G
is (2 p1)^k (2 p0)^(l - k) - e^epsilon (2 p1)^(l - k) (2 p0)^k. Inputs that differ in fewer bits are no worse: given the other bits, one
that they share has G at m +- s |a - b|, one in which they differ at m +- s (a + b), with the same m. The same holds where a bit is about
one of several coordinates that its client draws in secret: that place is uniform whatever the input, and tells nothing by itself.

The sum is convolved on a lattice. Each value of G is split over its two neighbours so that its mean is kept, which is larger in convex
order too: the result is an upper bound, by about one part in a thousand.
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
from ldpfl.privacy.accountants.clones import binary_report, clone_delta
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves
from ldpfl.privacy.accountants.randomized_response import sum_of_reports_epsilon
from ldpfl.privacy.accountants.shuffled import rounded_down

_HIDES_NOTHING = 30.0
"""Beyond this budget of a record none of 1e10 others is a draw of the blanket."""

_MOST_BITS = 1 << 12
"""Of a record beyond which what holds locally is all that is computed: memory grows with them."""

_POINTS = 384
"""Of the curve of one record."""

_SIZES = 4
"""Cohort sizes that are told apart."""

_SPREADS = 12.0
"""Standard deviations on each side of 0 that the lattice covers: what lies beyond has less than 1e-30."""

_FAR = 3.0
"""Standard deviations below 0 beyond which the middle of the sum makes the lattice wider."""

_FEWEST, _MOST = 1 << 16, 1 << 20

_KINDS = 16
"""Of records that are composed: each takes seconds. Of more what holds locally is said."""

_NOTHING = -80.0
"""Logarithm of what is left out of a characteristic function."""

_ROUNDING = 1e-16
"""What rounding can hide of delta; some ten times what is found by exact arithmetic."""

_DIGITS = 1e-9
"""Part by which the ends of the interval of densities are moved outwards: a stated share is rounded."""


class Record(ABC):
    """What travels together and stays together in the shuffler.

    Attributes:
        epsilon0: of the record as a whole, pure.
        share: g.
        parts: epsilon of each of its parts, and how many there are.
    """

    epsilon0: float

    @property
    @abstractmethod
    def share(self) -> float: ...

    @property
    @abstractmethod
    def parts(self) -> tuple[float, int]: ...

    @abstractmethod
    def gains(self, epsilon: float) -> tuple[Array, Array]:
        """Return the values of G and their probabilities."""

    @property
    def is_countable(self) -> bool:
        """Whether more is worth computing than what holds locally."""
        return self.epsilon0 <= _HIDES_NOTHING

    def delta(self, clients: int, epsilon: float) -> float:
        """Return an upper bound of delta(``epsilon``) of one such record among those of ``clients``.

        Holds in both directions, whatever the others' inputs, for inputs that may depend on what was released before.
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
    def parts(self) -> tuple[float, int]:
        return self.bit_epsilon, self.count

    @property
    def is_countable(self) -> bool:
        return super().is_countable and self.count <= _MOST_BITS

    def gains(self, epsilon: float) -> tuple[Array, Array]:
        alike = np.arange(self.count + 1)
        log_p1, log_p0 = log(2) + log_sigmoid(self.bit_epsilon), log(2) + log_sigmoid(-self.bit_epsilon)
        first = np.exp(alike * log_p1 + (self.count - alike) * log_p0)
        second = np.exp((self.count - alike) * log_p1 + alike * log_p0)
        from scipy.stats import binom  # slow to import

        return np.asarray(first - exp(epsilon) * second), np.asarray(binom.pmf(alike, self.count, 0.5))

    def delta(self, clients: int, epsilon: float) -> float:
        if self.count == 1 and epsilon < self.bit_epsilon:
            return min(1.0, clone_delta(self.bit_epsilon, clients, epsilon, binary_report(self.bit_epsilon)) + _ROUNDING)
        return super().delta(clients, epsilon)


@dataclass(frozen=True)
class Report(Record):
    """Any report at ``epsilon0`` whose densities lie in [``stated``, ``stated`` e^epsilon0]: by a mechanism whose blanket is known."""

    epsilon0: float
    stated: float

    @property
    def share(self) -> float:
        return self.stated * (1 - _DIGITS)

    @property
    def parts(self) -> tuple[float, int]:
        return self.epsilon0, 1

    def gains(self, epsilon: float) -> tuple[Array, Array]:
        low, high = self.share, self.stated * exp(self.epsilon0) * (1 + _DIGITS)
        often = (1 - low) / (high - low)  # with which a density of mean 1 is large
        both = high if often > 0.5 else low
        apart = min(often, 1 - often)
        loss = exp(epsilon)
        values = np.array([high - loss * low, low - loss * high, -both * expm1(epsilon)])
        return values, np.array([apart, apart, 1 - 2 * apart])


@dataclass(frozen=True)
class Hidden:
    """``records`` records of each of ``clients`` clients, one kind like the other."""

    record: Record
    clients: int
    records: int


def blanket_epsilon(kinds: Sequence[Hidden], delta: float) -> float:
    """Return a certified epsilon for ``delta`` of all these records of one client; adaptive.

    Seconds on one core for a kind of record. Many cohort sizes are rounded down to a few, which is safe.
    """
    kinds = _merged(kinds)
    parts = [(*kind.record.parts, kind.records) for kind in kinds]
    local = sum_of_reports_epsilon([(epsilon0, count * records) for epsilon0, count, records in parts], delta)
    if not kinds or delta <= 0 or len(kinds) > _KINDS or not all(kind.record.is_countable for kind in kinds):
        return local
    curves = [PrivacyCurve(_curve(kind), kind.record.epsilon0, kind.records, 4 * _ROUNDING) for kind in kinds]
    return min(local, composed_curves(curves, delta, _POINTS))


def _curve(kind: Hidden) -> Callable[[float], float]:
    return lambda epsilon: kind.record.delta(kind.clients, epsilon)


def _merged(kinds: Sequence[Hidden]) -> list[Hidden]:
    """Add up what is alike, after rounding cohorts down to a few sizes."""
    kinds = [kind for kind in kinds if kind.records > 0 and kind.record.epsilon0 > 0]
    rounded = rounded_down((kind.clients for kind in kinds), _SIZES)
    records: Counter[tuple[Record, int]] = Counter()
    for kind in kinds:
        records[kind.record, rounded[kind.clients]] += kind.records
    return [Hidden(*key, count) for key, count in records.items()]


def _mean_above_zero(values: Array, chances: Array, clients: int, share: float) -> float:
    """Return an upper bound of E[max(0, sum of M values)], M ~ Bin(``clients``, ``share``), up to rounding."""
    spread = sqrt(clients * share * float(np.dot(chances, values**2)))
    # A sum of bounded terms: by Bernstein's inequality what lies beyond this has less than e^(-_SPREADS^2 / 2) / 2.
    reach = _SPREADS * spread + _SPREADS**2 / 3 * float(np.abs(values).max())
    middle = clients * share * abs(float(np.dot(chances, values)))
    if middle > _FAR * spread:  # else the far side of the sum, which is below 0, would wrap around to where it counts
        reach += middle
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
