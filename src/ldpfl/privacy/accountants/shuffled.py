"""One shuffled bit: n clients answer one question by randomised response, and only the count is seen.

The other clients hold anything. delta is jointly convex and affine in each of their probabilities, so the worst case
has m of them at the upper extreme and the rest at the lower one, for some m = 0..n-1; which m depends on epsilon, so
the curve is the maximum over all of them. Both directions are covered, because swapping the two inputs turns m into
n - 1 - m.

Up to ``EXACT_CLIENTS`` clients every m is a row of its own. Beyond, a row stands for a cell of neighbouring m: of the w
clients whose extreme the cell leaves open, each is a fair coin with probability 2 p0 whichever extreme it holds (the
"blanket" of Balle et al. 2019), and what it shows otherwise is given away. Giving away is safe: it can only raise delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, exp, expm1, sqrt
from typing import TypeVar

import numpy as np

from ldpfl.privacy.accountants.binomial import TAIL, Array, Binomial, fewest_ones, log_pmf_of_sum, log_sigmoid, sigmoid
from ldpfl.privacy.accountants.losses import GridLosses, connect_the_dots, delta_of, epsilon_of, largest_log_moment, largest_with_mass
from ldpfl.privacy.accountants.randomized_response import ROUNDED, composed_epsilon, report_delta

EXACT_CLIENTS = 1024
"""Cohorts up to this size are accounted without cells."""

_CELLS = 256
_LARGE = 30.0
_HALF = 2048
"""Grid points on each side of loss 0; a row's variance grows by less than 1e-4 of itself."""

_KEPT = 10**6
"""Clients up to which the rows of the last question are kept: some 50 MB each time."""

_AT_ONCE = 11
"""Orders whose moments are taken together: some megabytes on the finest grid."""


def single_delta(epsilon0: float, clients: int, epsilon: float) -> float:
    """delta(``epsilon``) of one shuffled report at ``epsilon0`` among ``clients``; exact up to ``EXACT_CLIENTS``, above an upper bound."""
    if clients == 1:
        return report_delta(epsilon0, epsilon)
    return max(delta_of(*row, epsilon) for row in _rows(epsilon0, clients))


def single_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Smallest epsilon for ``delta`` of one shuffled report at ``epsilon0`` among ``clients``; exact up to ``EXACT_CLIENTS``."""
    local = composed_epsilon(epsilon0, 1, delta)
    if clients == 1 or local == 0:
        return local
    return min(local, max(_epsilon_rounded_up(row, delta) for row in _rows(epsilon0, clients)))


def _epsilon_rounded_up(row: Row, delta: float) -> float:
    """Return the epsilon of a row for ``delta``, and what rounding can have hidden: for a tiny epsilon, much of it."""
    losses, masses = row
    found, hidden = epsilon_of(losses, masses, delta), ROUNDED * sqrt(losses.size)
    return found + hidden if found > 0 or delta_of(losses, masses, 0.0) > delta - hidden else 0.0


def single_attained_epsilon(epsilon0: float, clients: int, delta: float) -> float:
    """Epsilon for ``delta`` that some data set really has; equal to :func:`single_epsilon` up to ``EXACT_CLIENTS``."""
    if clients <= EXACT_CLIENTS:
        return single_epsilon(epsilon0, clients, delta)
    uppers = {round(share * (clients - 1)) for share in (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 1.0)}
    rows = (_row(epsilon0, [Binomial(upper, epsilon0), Binomial(clients - 1 - upper, -epsilon0)]) for upper in sorted(uppers))
    return max(epsilon_of(*row, delta) for row in rows)


@dataclass(frozen=True, eq=False)
class ShuffledLosses:
    """Upper bounds of the privacy loss of one shuffled bit, a row for each cell of worst cases, on one grid.

    Attributes:
        epsilon0: of one report; no loss is larger.
        clients: whose reports are counted together.
        step: distance of neighbouring losses; they run from -half to half steps.
        masses: (rows, 2 half + 1) probabilities.
        outside: bound of the probability that lies outside the windows; whoever composes k bits adds k times that to delta.
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
        return largest_with_mass(self.losses, self.masses)

    @cached_property
    def _log_moments(self) -> dict[bytes, Array]:
        """What :meth:`log_moment` found: searches for the best order all begin on one grid."""
        return {}

    def log_moment(self, order: Array) -> Array:
        """Largest log E[e^(order * loss)] over the rows, (T,), of what lies inside the windows; not to be written to."""
        key = order.tobytes()
        if key not in self._log_moments:
            found = largest_log_moment(self.losses, self.masses, order, self._peak)
            self._log_moments[key] = np.clip(found, 0.0, self.epsilon0 * order)  # a moment of 1, less what is rounded, has none below 0
        return self._log_moments[key]

    def tilted(self, order: Array) -> tuple[Array, Array, Array]:
        """Return mean, variance and a bound of the third absolute central moment under the weights e^(order * loss), (T, rows) each.

        The third moment is bounded by Cauchy-Schwarz, sqrt(variance * fourth moment): a matrix product for all rows.
        """
        parts = [self._tilted(order[start : start + _AT_ONCE]) for start in range(0, order.size, _AT_ONCE)]
        mean, variance, third = (np.concatenate(found) for found in zip(*parts, strict=True))
        return mean, variance, third

    def _tilted(self, order: Array) -> tuple[Array, Array, Array]:
        weights = np.exp(order[:, None] * (self.losses - self.half * self.step))
        near = weights * self.masses.sum(axis=0)
        pivot = (near @ self.losses / near.sum(axis=1))[:, None]
        apart = self.losses - pivot  # moments around a place that is near each row's mean keep their digits
        powers = [weights]
        for _ in range(4):
            powers.append(powers[-1] * apart)
        raw = (np.concatenate(powers) @ self.masses.T).reshape(5, order.size, -1)
        with np.errstate(invalid="ignore"):  # what has no weight left is no number, and no bound is made of it
            one, two, three, four = raw[1:] / raw[0]
        variance = np.maximum(two - one**2, 0.0)
        fourth = np.maximum(four - 4 * one * three + 6 * one**2 * two - 3 * one**4, variance**2)
        return pivot + one, variance, np.sqrt(variance) * np.sqrt(fourth)  # whose product may be 0 where neither is

    @cached_property
    def dominating(self) -> GridLosses:
        """Return one loss distribution whose delta is at every epsilon the largest of the rows': a dominating pair.

        It may be composed with itself adaptively (Zhu, Dong, Wang 2022). Where the same row is the largest at three
        neighbouring points its masses are taken as they are, for a second difference would lose them in rounding.
        """
        masses = self.masses[:, self.half :]
        curves = _curves(masses, self.step)
        best = np.argmax(curves, axis=0)
        curve = curves[best, np.arange(best.size)]
        fall = np.append(curve[:-1] - curve[1:], 0.0)
        positive = np.maximum((fall[:-1] - exp(-self.step) * fall[1:]) / -np.expm1(-self.step), 0.0)
        same = (best[1:] == best[:-1]) & np.append(best[2:] == best[1:-1], True)
        positive[same] = masses[best[1:], np.arange(1, best.size)][same]
        mirrored = positive * np.exp(-self.losses[self.half + 1 :])
        zero = max(0.0, 1 - float(np.sum(positive + mirrored)))
        return GridLosses(self.step, -self.half, np.concatenate([mirrored[::-1], [zero], positive]), self.outside)


@lru_cache(maxsize=4)  # one round and the whole run ask for the same; for many clients it takes seconds
def shuffled_losses(epsilon0: float, clients: int, half: int = _HALF) -> ShuffledLosses:
    """Return the privacy losses of one shuffled report at ``epsilon0`` among ``clients``, ready for composition.

    On 2 ``half`` + 1 points. Up to 1e8 clients: some ten seconds on one core; below 1,024 clients a tenth of a second.
    """
    return _on_grid(tuple(_rows(epsilon0, clients)), epsilon0, clients, half)


def attained_losses(epsilon0: float, clients: int, half: int = _HALF) -> ShuffledLosses:
    """Return the privacy losses for one real data set, all other clients at the upper extreme, on 2 ``half`` + 1 points."""
    losses = _on_grid([_row(epsilon0, [Binomial(clients - 1, epsilon0)])], epsilon0, clients, half)
    return replace(losses, outside=0.0)  # to leave something out is safe for a lower bound


def _on_grid(rows: Sequence[Row], epsilon0: float, clients: int, half: int) -> ShuffledLosses:
    """Put all rows on one grid that covers every loss of a probability that matters."""
    limit = max(float(np.max(np.abs(losses[mass > TAIL]))) for losses, mass in rows)
    step = limit / half
    masses, outside = [], 0.0
    for losses, mass in rows:
        inside = losses <= limit
        outside = max(outside, float(mass[~inside].sum()))
        masses.append(connect_the_dots(losses[inside], mass[inside], step, -half, 2 * half + 1))
    whole = all(losses.size == clients + 1 for losses, _ in rows) and outside == 0
    grid = np.stack(masses)
    return ShuffledLosses(epsilon0, clients, step, grid / grid.sum(axis=1, keepdims=True), 0.0 if whole else outside + 2 * TAIL)


Row = tuple[Array, Array]
"""Losses, ascending, and their probabilities."""


def _rows(epsilon0: float, clients: int) -> Iterable[Row]:
    """Return each worst case, or each cell of them."""
    return _kept_rows(epsilon0, clients) if clients <= _KEPT else _made_rows(epsilon0, clients)


@lru_cache(maxsize=2)  # a plan asks for one bit, what it realises, one round and the whole run in turn
def _kept_rows(epsilon0: float, clients: int) -> tuple[Row, ...]:
    return tuple(_made_rows(epsilon0, clients))


def _made_rows(epsilon0: float, clients: int) -> Iterator[Row]:
    width = 1 if clients <= EXACT_CLIENTS else ceil(clients / _CELLS)
    coins_share = 2 * sigmoid(-epsilon0)
    for low in range(0, clients, width):
        high = min(low + width, clients) - 1
        undecided = high - low
        coins = fewest_ones(TAIL, undecided, coins_share)
        yield _row(epsilon0, [Binomial(low, epsilon0), Binomial(clients - 1 - high, -epsilon0), Binomial(coins, 0.0)])


def _row(epsilon0: float, others: list[Binomial]) -> Row:
    """Return losses and probabilities of the count, given what the other clients add to it."""
    _, logs = log_pmf_of_sum(others)
    # One more place at each end, for the client's own bit; -inf where the others cannot have been.
    with_one, without = np.append(-np.inf, logs), np.append(logs, -np.inf)
    log_p1, log_p0 = log_sigmoid(epsilon0), log_sigmoid(-epsilon0)
    mass = np.exp(np.logaddexp(log_p1 + with_one, log_p0 + without))
    inner = _count_loss(logs[:-1] - logs[1:], epsilon0)
    losses = np.concatenate([[-epsilon0], np.clip(inner, -epsilon0, epsilon0), [epsilon0]])
    return np.maximum.accumulate(losses), mass / mass.sum()


def _count_loss(log_ratio: Array, epsilon0: float) -> Array:
    """Return log((p1 r + p0) / (p0 r + p1)), r the others' probability of one count less over that of this count."""
    if epsilon0 > _LARGE:
        return np.asarray(np.logaddexp(log_ratio, -epsilon0) - np.logaddexp(log_ratio - epsilon0, 0.0))
    ratio = np.exp(log_ratio)  # the form that keeps its digits where the loss is small
    return np.asarray(np.log1p(-expm1(-epsilon0) * (ratio - 1) / (ratio * exp(-epsilon0) + 1)))


def _curves(masses: Array, step: float) -> Array:
    """Return delta at 0, step, 2 step, ... for each row, by a recurrence of positive terms; ``masses`` begin at loss 0."""
    above = np.cumsum(masses[:, ::-1], axis=1)[:, ::-1]  # P(loss >= i step)
    shrink, grown = exp(-step), -expm1(-step)  # 1 - shrink would have no digits of a tiny step
    curve = np.zeros_like(masses)
    for i in range(masses.shape[1] - 2, -1, -1):
        curve[:, i] = grown * above[:, i + 1] + shrink * curve[:, i + 1]
    return curve


def rounded_down(sizes: Iterable[int], most: int | None) -> dict[int, int]:
    """Return for each cohort size one of ``most`` sizes that is no larger, itself if there are no more or no limit: fewer hide less."""
    known = sorted(set(sizes))
    kept = known if most is None or len(known) <= most else [known[round(i * (len(known) - 1) / most)] for i in range(most)]
    return {size: max(other for other in kept if other <= size) for size in known}


Value = TypeVar("Value", int, float)


def rounded_up(values: Iterable[Value], most: int | None) -> dict[Value, Value]:
    """Return for each value one of ``most`` that is no smaller, itself if there are no more or no limit.

    A larger budget, or mu, costs more; of a larger cohort what is attained is attained by fewer, too.
    """
    known = sorted(set(values))
    kept = known if most is None or len(known) <= most else [known[round((i + 1) * (len(known) - 1) / most)] for i in range(most)]
    return {value: min(other for other in kept if other >= value) for value in known}
