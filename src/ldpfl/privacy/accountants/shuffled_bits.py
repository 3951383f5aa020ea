"""One shuffled bit: each of n clients sends one bit by randomised response, and only the number of 1s is seen.

The other n - 1 clients may hold any values. A client sends 1 with a probability between p0 = 1 / (1 + e^epsilon0) and p1 = 1 - p0. delta is
convex in these probabilities, and affine in each. So in the worst case m other clients have the probability p1 and the rest p0, for some
m = 0..n-1. Which m is worst depends on epsilon, so the curve is the maximum over all m. Both directions are covered, because swapping the
two inputs turns m into n - 1 - m.

Up to ``EXACT_CLIENTS`` clients, each m is a row of its own. For more clients, a row stands for a cell of w neighbouring values of m. The
clients that differ within the cell may have either probability. Each is a fair coin with probability 2 p0 in both cases (the blanket of
Balle et al. 2019); otherwise its bit is revealed to the adversary. Revealing is safe: it can only raise delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, exp, expm1, sqrt
from typing import TypeVar

import numpy as np

from ldpfl.privacy.accountants.binomial import TAIL, Array, Binomial, binomial_quantile, log_pmf_of_sum, log_sigmoid, sigmoid
from ldpfl.privacy.accountants.losses import GridLosses, connect_the_dots, delta_of, epsilon_of, largest_log_moment, largest_with_mass
from ldpfl.privacy.accountants.randomized_response import ROUNDED, composed_epsilon, report_delta

EXACT_CLIENTS = 1024
"""Cohorts up to this size are accounted exactly, without cells."""

_CELLS = 256
"""Number of cells for larger cohorts."""
_LARGE = 30.0
"""Epsilon above which losses are computed from logarithms, to avoid overflow."""
_HALF = 2048
"""Grid points on each side of loss 0. The grid increases a row's variance by less than a relative 1e-4."""

MAX_CACHED_CLIENTS = 10**6
"""Largest cohort whose rows are cached: some 50 MB each."""

_AT_ONCE = 11
"""Number of orders whose moments are computed together: some megabytes on the finest grid."""


def single_delta(epsilon0: float, clients: int, epsilon: float) -> float:
    """Return delta(``epsilon``) of one shuffled bit among ``clients``: exact up to ``EXACT_CLIENTS``, an upper bound for more."""
    if clients == 1:
        return report_delta(epsilon0, epsilon)
    return max(delta_of(*row, epsilon) for row in _rows(epsilon0, clients))


def single_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Return the smallest epsilon at ``delta`` of one shuffled bit: exact up to ``EXACT_CLIENTS``, an upper bound for more."""
    local = composed_epsilon(epsilon0, 1, delta)
    if clients == 1 or local == 0:
        return local
    return min(local, max(_epsilon_rounded_up(row, delta) for row in _rows(epsilon0, clients)))


def _epsilon_rounded_up(row: Row, delta: float) -> float:
    """Return the epsilon at ``delta`` of a row of losses and masses, plus an allowance for rounding, which matters for a tiny epsilon.

    It is 0 only if delta at epsilon 0 is below ``delta`` by at least the allowance.
    """
    losses, masses = row
    epsilon = epsilon_of(losses, masses, delta)
    allowance = ROUNDED * sqrt(losses.size)
    if epsilon == 0 and delta_of(losses, masses, 0.0) <= delta - allowance:
        return 0.0
    return epsilon + allowance


def single_attained_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Return a lower bound of epsilon at ``delta``, attained by some data set; equal to :func:`single_epsilon` up to ``EXACT_CLIENTS``."""
    if clients <= EXACT_CLIENTS:
        return single_epsilon(epsilon0, clients, delta)
    # Numbers of other clients whose bits are 1 with the larger probability. Each is a data set, and a few suffice for a lower bound.
    likely_ones = {round(share * (clients - 1)) for share in (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 1.0)}
    rows = (_row(epsilon0, [Binomial(count, epsilon0), Binomial(clients - 1 - count, -epsilon0)]) for count in sorted(likely_ones))
    return max(epsilon_of(*row, delta) for row in rows)


@dataclass(frozen=True, eq=False)
class ShuffledLosses:
    """Upper bounds of the privacy loss of one shuffled bit on one grid, with one row for each cell of worst cases.

    Attributes:
        epsilon0: epsilon of one bit; no loss is larger.
        clients: number of clients whose bits are counted together.
        step: distance of neighbouring losses, which run from -half to half steps.
        masses: (rows, 2 half + 1) probabilities of the losses.
        outside: bound of the probability, in each row, of losses that are not on the grid. Composing k bits adds k times this to delta.
    """

    epsilon0: float
    clients: int
    step: float
    masses: Array
    outside: float

    @property
    def half(self) -> int:
        return int(self.masses.shape[1]) // 2

    @property
    def losses(self) -> Array:
        return np.arange(-self.half, self.half + 1) * self.step

    @cached_property
    def _peak(self) -> float:
        """The largest loss that has a positive probability in some row."""
        return largest_with_mass(self.losses, self.masses)

    @cached_property
    def _log_moments(self) -> dict[bytes, Array]:
        """Cached results of :meth:`log_moment`, by the bytes of the orders: all searches for the best order begin with the same orders."""
        return {}

    def log_moment(self, order: Array) -> Array:
        """Return the largest log E[e^(order * loss)] over the rows, for each order, (T,). Do not write to the result: it is cached."""
        key = order.tobytes()
        if key not in self._log_moments:
            log_moment = largest_log_moment(self.losses, self.masses, order, self._peak)
            # The true moment lies in [1, e^(epsilon0 * order)]; rounding may put it outside.
            self._log_moments[key] = np.clip(log_moment, 0.0, self.epsilon0 * order)
        return self._log_moments[key]

    def tilted(self, order: Array) -> tuple[Array, Array, Array]:
        """Return mean, variance and a bound of the third absolute central moment under the weights e^(order * loss), (T, rows) each.

        By Cauchy-Schwarz, the third moment is at most sqrt(variance * fourth moment). One matrix product gives these two for all rows.
        """
        parts = [self._tilted(order[start : start + _AT_ONCE]) for start in range(0, order.size, _AT_ONCE)]
        mean, variance, third = (np.concatenate(found) for found in zip(*parts, strict=True))
        return mean, variance, third

    def _tilted(self, order: Array) -> tuple[Array, Array, Array]:
        """Return (means, variances, bounds of third absolute moments) as :meth:`tilted`, for so few orders that the arrays stay small."""
        weights = np.exp(order[:, None] * (self.losses - self.half * self.step))  # relative to the largest loss, against overflow
        summed_weights = weights * self.masses.sum(axis=0)
        pivot = (summed_weights @ self.losses / summed_weights.sum(axis=1))[:, None]
        distances = self.losses - pivot  # the pivot is near each row's mean, so that moments around it keep their digits
        powers = [weights]
        for _ in range(4):
            powers.append(powers[-1] * distances)
        raw = (np.concatenate(powers) @ self.masses.T).reshape(5, order.size, -1)  # moments 0 to 4 around the pivot, not normalised
        with np.errstate(invalid="ignore"):  # a row whose weights vanish gives NaN; no bound is derived from it
            m1, m2, m3, m4 = raw[1:] / raw[0]
        # Central moments, from those around the pivot.
        variance = np.maximum(m2 - m1**2, 0.0)
        fourth = np.maximum(m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4, variance**2)
        third_bound = np.sqrt(variance) * np.sqrt(fourth)  # two roots: the product under one root may underflow to 0
        return pivot + m1, variance, third_bound

    @cached_property
    def dominating(self) -> GridLosses:
        """The loss distribution of a dominating pair: at every epsilon its delta is the largest of the rows' deltas.

        It may be composed with itself adaptively (Zhu, Dong, Wang 2022). The masses follow from second differences of the curve of deltas.
        Where one row is the largest at three neighbouring points, its own masses are used, since rounding would spoil the differences.
        """
        masses = self.masses[:, self.half :]
        curves = _curves(masses, self.step)
        largest_row = np.argmax(curves, axis=0)
        curve = curves[largest_row, np.arange(largest_row.size)]
        fall = np.append(curve[:-1] - curve[1:], 0.0)
        positive = np.maximum((fall[:-1] - exp(-self.step) * fall[1:]) / -np.expm1(-self.step), 0.0)  # masses of positive losses
        # Whether one row is the largest at a point and at both of its neighbours. The last point has only one.
        is_one_row = (largest_row[1:] == largest_row[:-1]) & np.append(largest_row[2:] == largest_row[1:-1], True)
        positive[is_one_row] = masses[largest_row[1:], np.arange(1, largest_row.size)][is_one_row]
        negative = positive * np.exp(-self.losses[self.half + 1 :])  # the pair may be swapped, so a loss of -x has e^-x times the mass of x
        zero = max(0.0, 1 - float(np.sum(positive + negative)))
        return GridLosses(self.step, -self.half, np.concatenate([negative[::-1], [zero], positive]), self.outside)


@lru_cache(maxsize=4)  # one round and the whole run ask for the same; for many clients it takes seconds
def shuffled_losses(epsilon0: float, clients: int, half: int = _HALF) -> ShuffledLosses:
    """Return the privacy losses of one shuffled report at ``epsilon0`` among ``clients``, ready for composition.

    The grid has 2 ``half`` + 1 points. One core takes some ten seconds for up to 1e8 clients, and a tenth of a second below 1,024 clients.
    """
    return _on_grid(tuple(_rows(epsilon0, clients)), epsilon0, clients, half)


def attained_losses(epsilon0: float, clients: int, half: int = _HALF) -> ShuffledLosses:
    """Return the privacy losses of one data set, on a grid as in :func:`shuffled_losses`: all other bits are 1 with the larger probability.

    That is p1 = 1 / (1 + e^-``epsilon0``).
    """
    losses = _on_grid([_row(epsilon0, [Binomial(clients - 1, epsilon0)])], epsilon0, clients, half)
    return replace(losses, outside=0.0)  # probability outside may be ignored in a lower bound


def _on_grid(rows: Sequence[Row], epsilon0: float, clients: int, half: int) -> ShuffledLosses:
    """Put all rows on one grid of 2 ``half`` + 1 losses that covers every loss with a probability above ``TAIL``.

    The probability of losses beyond the grid becomes ``outside``.
    """
    limit = max(float(np.max(np.abs(losses[mass > TAIL]))) for losses, mass in rows)
    step = limit / half
    masses, outside = [], 0.0
    for losses, mass in rows:
        inside = losses <= limit
        outside = max(outside, float(mass[~inside].sum()))
        masses.append(connect_the_dots(losses[inside], mass[inside], step, -half, 2 * half + 1))
    # 2 TAIL is for counts outside the windows of the rows. Rows with all counts from 0 to ``clients`` left none out.
    is_complete = all(losses.size == clients + 1 for losses, _ in rows) and outside == 0
    grid = np.stack(masses)
    return ShuffledLosses(epsilon0, clients, step, grid / grid.sum(axis=1, keepdims=True), 0.0 if is_complete else outside + 2 * TAIL)


Row = tuple[Array, Array]
"""Losses, ascending, and their probabilities."""


def _rows(epsilon0: float, clients: int) -> Iterable[Row]:
    """Return the losses and probabilities of each candidate for the worst case: the number m of other clients with the larger probability.

    For more than ``EXACT_CLIENTS`` clients, neighbouring numbers m are one cell.
    """
    return _cached_rows(epsilon0, clients) if clients <= MAX_CACHED_CLIENTS else _computed_rows(epsilon0, clients)


@lru_cache(maxsize=2)  # a plan asks for one bit, what it realises, one round and the whole run in turn
def _cached_rows(epsilon0: float, clients: int) -> tuple[Row, ...]:
    """Return the rows of :func:`_computed_rows`, cached."""
    return tuple(_computed_rows(epsilon0, clients))


def _computed_rows(epsilon0: float, clients: int) -> Iterator[Row]:
    """Yield the rows of :func:`_rows`, by the number m of other clients whose bits are 1 with the larger probability.

    In a cell of m from ``low`` to ``high``, high - low clients may have either probability. With either, a client's bit is a fair coin with
    twice the smaller probability. The smallest likely number of coins is used, and the other bits are revealed. Both can only raise delta.
    """
    width = 1 if clients <= EXACT_CLIENTS else ceil(clients / _CELLS)
    coin_probability = 2 * sigmoid(-epsilon0)
    for low in range(0, clients, width):
        high = min(low + width, clients) - 1
        coins = binomial_quantile(TAIL, high - low, coin_probability)
        yield _row(epsilon0, [Binomial(low, epsilon0), Binomial(clients - 1 - high, -epsilon0), Binomial(coins, 0.0)])


def _row(epsilon0: float, others: list[Binomial]) -> Row:
    """Return the privacy loss and the probability of each count of 1s, if one client's true bit is 1, at ``epsilon0`` among ``others``.

    The loss of a count is the logarithm of its probability if the client's true bit is 1, over its probability if that is 0.
    """
    _, logs = log_pmf_of_sum(others)
    # One more count, for the client's own bit; -inf for counts that the other clients cannot produce.
    with_one, without = np.append(-np.inf, logs), np.append(logs, -np.inf)
    log_p1, log_p0 = log_sigmoid(epsilon0), log_sigmoid(-epsilon0)
    mass = np.exp(np.logaddexp(log_p1 + with_one, log_p0 + without))
    # The smallest count is possible only if the client's own bit is 0, and the largest only if it is 1: losses -epsilon0 and epsilon0.
    inner = _count_loss(logs[:-1] - logs[1:], epsilon0)
    losses = np.concatenate([[-epsilon0], np.clip(inner, -epsilon0, epsilon0), [epsilon0]])
    return np.maximum.accumulate(losses), mass / mass.sum()  # losses ascend with the count, but rounding may make them fall


def _count_loss(log_ratio: Array, epsilon0: float) -> Array:
    """Return the privacy loss of a count k of 1s: log((p1 r + p0) / (p0 r + p1)), p1 = 1 - p0 = 1 / (1 + e^-epsilon0).

    ``log_ratio`` is log r, with r = P(the others count k - 1) / P(the others count k).
    """
    if epsilon0 > _LARGE:
        return np.asarray(np.logaddexp(log_ratio, -epsilon0) - np.logaddexp(log_ratio - epsilon0, 0.0))
    ratio = np.exp(log_ratio)  # this form keeps its digits if the loss is small
    return np.asarray(np.log1p(-expm1(-epsilon0) * (ratio - 1) / (ratio * exp(-epsilon0) + 1)))


def _curves(masses: Array, step: float) -> Array:
    """Return delta at the epsilons 0, step, 2 step, ... for each row; ``masses`` begin at loss 0.

    With s = ``step``, delta(i s) = (1 - e^-s) P(loss > i s) + e^-s delta((i + 1) s). All terms are positive, so no digits cancel.
    """
    at_least = np.cumsum(masses[:, ::-1], axis=1)[:, ::-1]  # P(loss >= i step)
    factor, one_less_factor = exp(-step), -expm1(-step)  # 1 - factor would have no digits of a tiny step
    curve = np.zeros_like(masses)
    for i in range(masses.shape[1] - 2, -1, -1):
        curve[:, i] = one_less_factor * at_least[:, i + 1] + factor * curve[:, i + 1]
    return curve


def rounded_down(sizes: Iterable[int], most: int | None) -> dict[int, int]:
    """Map each cohort size to one of at most ``most`` sizes that is no larger. Safe for upper bounds, since fewer clients hide less."""
    kept = distinct = sorted(set(sizes))
    if most is not None and len(distinct) > most:  # evenly spaced in rank, with the smallest
        kept = [distinct[round(i * (len(distinct) - 1) / most)] for i in range(most)]
    return {size: max(smaller for smaller in kept if smaller <= size) for size in distinct}


Value = TypeVar("Value", int, float)


def rounded_up(values: Iterable[Value], most: int | None) -> dict[Value, Value]:
    """Map each value to one of at most ``most`` values that is no smaller.

    Safe for upper bounds if the values are epsilons or mus, since larger ones cost more. Safe for lower bounds if they are cohort sizes.
    """
    kept = distinct = sorted(set(values))
    if most is not None and len(distinct) > most:  # evenly spaced in rank, with the largest
        kept = [distinct[round((i + 1) * (len(distinct) - 1) / most)] for i in range(most)]
    return {value: min(larger for larger in kept if larger >= value) for value in distinct}
