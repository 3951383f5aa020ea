"""Many shuffled bits: d weights in each of T rounds, each one counted over the cohort.

Three upper bounds, all certified, and the smallest counts (derivations: docs/accounting.md):

* a dominating loss distribution, convolved; inputs may adapt to what was released before;
* Renyi divergences; adaptive as well;
* the moment bound with its factor sharpened by the theorem of Berry and Esseen (constant 0.56, Shevtsova 2010), the
  idea of Alghamdi et al. 2023 with an explicit error. It needs inputs that are fixed beforehand. Within one round they are:
  all weights are computed before the first bit is drawn. So the adaptive number takes this bound for each round and convolves
  the rounds.

Beside them stands the epsilon that one real data set attains, all other clients at the upper extreme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, log, pi, sqrt

import numpy as np
from scipy.special import erfcx, ndtr

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.losses import GridLosses, curve_of, epsilon_of, from_curve
from ldpfl.privacy.accountants.moments import best_order, epsilon_from_log_moment, renyi_factor
from ldpfl.privacy.accountants.randomized_response import HUGE_BUDGET, sum_of_reports_epsilon
from ldpfl.privacy.accountants.shuffled import (
    ShuffledLosses,
    attained_losses,
    rounded_down,
    rounded_up,
    shuffled_losses,
    single_attained_epsilon,
    single_epsilon,
)

_BERRY_ESSEEN = 0.56
_CURVE_POINTS = 8192
_SIZES = 8
_ATTAINED_SIZES = 16
"""Different cohorts that are told apart where an epsilon is attained: each takes a sixth of a second."""
_BUDGETS = 16
"""Different budgets of a bit that are told apart: each takes seconds, and tens of megabytes."""

_UP = 1 + 2.0**-50
"""Next to the pure sum delta falls so steeply that the last digits of an epsilon are a thousandth of it."""
_ATTAINED_GRIDS = (1 << 14, 1 << 11, 1 << 10)


@dataclass(frozen=True)
class Bracket:
    """What is known of epsilon: it lies in [lower, upper], or [lower, adaptive] where later inputs depend on earlier outputs.

    Attributes:
        lower: attained by a data set.
        upper: certified for inputs that are fixed before the first round.
        adaptive: certified where inputs depend on what was released before, as in training. They may not depend on a client's own
            earlier random bits, as an error feedback would make them.
    """

    lower: float
    upper: float
    adaptive: float


@dataclass(frozen=True)
class ShuffledRounds:
    """``rounds`` rounds in which each of ``clients`` clients sends ``reports`` shuffled bits at ``epsilon0`` each."""

    epsilon0: float
    clients: int
    reports: int
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.clients < 1 or self.reports < 0 or self.rounds < 0:
            raise ConfigError(f"a round needs clients and no negative counts, got {self}")
        if not 0 <= self.epsilon0 < inf:
            raise ConfigError(f"the budget of a bit must be finite and not negative, got {self.epsilon0}")

    @property
    def releases(self) -> int:
        return self.reports * self.rounds


def shuffled_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> Bracket:
    """Bound epsilon for ``delta`` against whoever sees the counts of all rounds and nothing else.

    Seconds on one core for a group, for up to 1e8 clients and 1e10 reports a client. Rounds are grouped by what was sent and
    by how many; many different cohort sizes are rounded down to a few, which is safe.
    """
    upper, adaptive = certified_epsilon(groups, delta)
    return Bracket(min(attained_epsilon(groups, delta), upper), upper, adaptive)


def certified_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> tuple[float, float]:
    """Return certified upper bounds of epsilon: for inputs that are fixed beforehand, and for adaptive ones."""
    groups = _merged(groups, _SIZES, _BUDGETS)
    if _nothing_to_hide_in(groups, delta):
        return _local(groups, delta), _local(groups, delta)
    if len(groups) == 1 and groups[0].releases == 1:
        single = single_epsilon(groups[0].epsilon0, groups[0].clients, delta)
        return single, single
    return _certified(groups, delta)


@lru_cache(maxsize=32)  # a search ends with what a plan then begins with
def _certified(groups: tuple[ShuffledRounds, ...], delta: float) -> tuple[float, float]:
    rounds = _Composition(groups, tuple(shuffled_losses(group.epsilon0, group.clients, _half(group)) for group in groups))
    inside = delta - rounds.outside
    renyi, order = best_order(rounds.log_moment, inside)
    fixed = epsilon_from_log_moment(rounds.log_moment, inside, rounds.sharp_factor, near=order) * _UP
    across = fixed if rounds.is_one_round else rounds.by_rounds(delta)
    adaptive = min(_local(groups, delta), renyi * _UP, rounds.convolved(delta) * _UP, across)
    return min(adaptive, fixed), adaptive


def attained_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> float:
    """Return the epsilon of one data set: by convolution, or where that is too long, its certified lower bound."""
    return _attained(_of_few_sizes(_of_few_budgets(_merged(groups, None, None))), delta)


@lru_cache(maxsize=64)  # as above
def _attained(groups: tuple[ShuffledRounds, ...], delta: float) -> float:
    if _nothing_to_hide_in(groups, delta):
        # Of one budget, or where no failure is allowed, that is exact; of several, what one of them attains by itself.
        exact = delta <= 0 or len(groups) < 2
        return _local(groups, delta) if exact else max(attained_epsilon([group], delta) for group in groups)
    if len(groups) == 1 and groups[0].releases == 1:
        return single_attained_epsilon(groups[0].epsilon0, groups[0].clients, delta)
    for half in _ATTAINED_GRIDS if len(groups) == 1 else ():
        own = attained_losses(groups[0].epsilon0, groups[0].clients, half)
        composed = GridLosses(own.step, -half, own.masses[0]).composed(groups[0].releases, delta)
        if composed is not None:
            # Here what rounding and truncation can hide is no reason to count more: the other way round.
            return epsilon_of(composed.losses, composed.masses, delta + composed.infinite)
    losses = [attained_losses(group.epsilon0, group.clients) for group in groups]
    found = _attained_by_moments(losses, [group.releases for group in groups], delta)
    if found == 0 and len(groups) > 1:  # too few releases for the theorem: then at least what one kind of round attains
        return max(attained_epsilon([group], delta) for group in groups)
    return found


def _nothing_to_hide_in(groups: Sequence[ShuffledRounds], delta: float) -> bool:
    """Tell whether shuffling changes nothing: nothing was released, no others, no failure allowed, or a budget that hides nothing."""
    return not groups or delta <= 0 or all(group.clients == 1 for group in groups) or any(g.epsilon0 > HUGE_BUDGET for g in groups)


def _local(groups: Sequence[ShuffledRounds], delta: float) -> float:
    return sum_of_reports_epsilon([(group.epsilon0, group.releases) for group in groups], delta)


@dataclass(frozen=True, eq=False)
class _Composition:
    """Upper bounds for groups of rounds, each with the losses of one of its bits."""

    groups: tuple[ShuffledRounds, ...]
    losses: tuple[ShuffledLosses, ...]

    @property
    def is_one_round(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].rounds == 1

    @property
    def outside(self) -> float:
        """What the windows of all bits leave out, in probability."""
        return sum(group.releases * own.outside for group, own in zip(self.groups, self.losses, strict=True))

    def log_moment(self, order: Array) -> Array:
        parts = [group.releases * own.log_moment(order) for group, own in zip(self.groups, self.losses, strict=True)]
        return np.asarray(np.sum(parts, axis=0))

    def sharp_factor(self, order: Array) -> Array:
        return _sharp_factor(self.losses, [group.releases for group in self.groups], order)

    def convolved(self, delta: float) -> float:
        """Return epsilon by the dominating pair of each bit, where the convolution is not too long."""
        if len(self.groups) > 1:
            return inf
        composed = self.losses[0].dominating.composed(self.groups[0].releases, delta)
        return composed.epsilon(delta) if composed is not None else inf

    def by_rounds(self, delta: float) -> float:
        """Return epsilon by the sharpened bound within each round and convolution over the rounds."""
        rounds = sum(group.rounds for group in self.groups)
        negligible = 1e-4 * delta / rounds
        top = max(round_limit(own, group.reports, negligible) for group, own in zip(self.groups, self.losses, strict=True))
        if top == 0:
            return inf
        step = top / _CURVE_POINTS
        epsilons = step * np.arange(_CURVE_POINTS + 1)
        total: GridLosses | None = None
        for group, own in zip(self.groups, self.losses, strict=True):
            part = from_curve(round_curve(own, group.reports, epsilons, negligible), step).composed(group.rounds, delta)
            if part is None:
                return inf
            total = part if total is None else total.followed_by(part)
        return total.epsilon(delta) if total is not None else inf


def round_limit(losses: ShuffledLosses, reports: int, negligible: float) -> float:
    """Return an epsilon at which the delta of one round is below ``negligible``."""
    return epsilon_from_log_moment(lambda order: reports * losses.log_moment(order), negligible)


def round_curve(losses: ShuffledLosses, reports: int, epsilons: Array, negligible: float) -> Array:
    """Return an upper bound of delta at ``epsilons`` for one round of ``reports`` bits, fixed before the first is drawn.

    It is good down to deltas of ``negligible``.
    """
    _, order = best_order(lambda order: reports * losses.log_moment(order), negligible)
    orders = order * np.logspace(-3, 0.5, 71)
    logs = reports * losses.log_moment(orders) + _sharp_factor([losses], [reports], orders)
    curve = np.exp(np.minimum(np.min(logs[:, None] - orders[:, None] * epsilons, axis=0), 0.0)) + reports * losses.outside
    curve = np.fmin(curve, _normal_curve(losses, reports, epsilons))
    composed = losses.dominating.composed(reports, 1e4 * negligible)
    if composed is not None:
        curve = np.minimum(curve, curve_of(composed.losses, composed.masses, epsilons) + composed.infinite + 1e-15)
    return np.asarray(curve)


def _normal_curve(losses: ShuffledLosses, reports: int, epsilons: Array) -> Array:
    """Return the Berry-Esseen upper bound of delta around the mean of the loss, where no tilt is needed.

    For a normal loss of mean M and deviation s, with a = M - epsilon, delta = Phi(a / s) - phi(a / s) m(s - a / s), m(x) =
    (1 - Phi(x)) / phi(x). It rises with M; what is known of s is an interval, so the first term takes its largest and the second
    its smallest value there. 1 - e^-y rises from 0 to 1, so a distance between distribution functions counts once.
    """
    mean, variance, third = losses.tilted(np.zeros(1))
    low, high = sqrt(reports * float(variance.min())), sqrt(reports * float(variance.max()))
    if low == 0:
        return np.ones_like(epsilons)
    with np.errstate(over="ignore", invalid="ignore"):  # next to no deviation, of which the theorem says nothing
        above = reports * float(mean.max()) - epsilons
        first = np.maximum(ndtr(above / low), ndtr(above / high))
        furthest = np.maximum(low - above / low, high - above / high)
        # Far above the mean of the loss the second term overflows; leaving it out only raises the bound.
        second = np.where(furthest > -20, np.exp(-((above / low) ** 2) / 2) * erfcx(np.maximum(furthest, -20.0) / sqrt(2)) / 2, 0.0)
        error = _BERRY_ESSEEN * reports * float(third.max()) / low / low / low  # low**3 may be 0 where low is not
    return np.asarray(first - second + error + reports * losses.outside)


def _sharp_factor(losses: Sequence[ShuffledLosses], counts: Sequence[int], order: Array) -> Array:
    """Return the logarithm of the smaller of the Renyi factor and the Berry-Esseen one, (T,).

    Under the weights e^(t loss) the total loss has variance at least V and third absolute moments of at most R in sum. The
    density of a normal law is at most 1 / sqrt(2 pi V), and e^(-t y) (1 - e^-y) integrates to 1 / (t (1 + t)); that function
    rises to g and falls again, so a distance C R / V^1.5 between distribution functions costs at most 2 g times it.
    """
    renyi = renyi_factor(order)
    variance, third = np.zeros_like(order), np.zeros_like(order)
    for own, count in zip(losses, counts, strict=True):
        _, rows, thirds = own.tilted(order)
        variance += count * rows.min(axis=1)
        third += count * thirds.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        main = 1 / (np.sqrt(2 * pi * variance) * order * (1 + order))
        error = 2 * np.exp(renyi) * _BERRY_ESSEEN * third / variance**1.5
        sharp = np.log(main + error)
    return np.where(np.isfinite(sharp), np.minimum(renyi, sharp), renyi)


def _attained_by_moments(losses: Sequence[ShuffledLosses], counts: Sequence[int], delta: float) -> float:
    """Return an epsilon at which delta is certainly larger than ``delta``; 0 where the theorem says nothing.

    At the order whose weights center the loss on epsilon, delta is e^(K - t epsilon) times the normal expectation of
    e^(-t y) (1 - e^-y), y > 0, less the Berry-Esseen error.
    """

    def excess(exponent: float) -> tuple[float, float]:
        t = 10**exponent
        order = np.array([t])
        mean = variance = third = log_moment = 0.0
        for own, count in zip(losses, counts, strict=True):
            first, second, absolute = (float(rows[0, 0]) for rows in own.tilted(order))
            mean, variance, third = mean + count * first, variance + count * second, third + count * absolute
            log_moment += count * float(own.log_moment(order)[0])
        if variance < 1e-200:
            return -inf, 0.0
        width = sqrt(variance / 2)
        normal = (float(erfcx(t * width)) - float(erfcx((t + 1) * width))) / 2
        left = normal - 2 * float(np.exp(renyi_factor(order))[0]) * _BERRY_ESSEEN * third / variance**1.5
        return (log_moment - t * mean + log(left) - log(delta) if left > 0 else -inf), mean

    exponents = np.linspace(-8, 3, 221).tolist()
    enough = [exponent for exponent in exponents if excess(exponent)[0] >= 0]
    if not enough:
        return 0.0
    low, high = enough[-1], enough[-1] + exponents[1] - exponents[0]
    for _ in range(30):  # bisection: the lower end always holds
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle)[0] >= 0 else (low, middle)
    return excess(low)[1]


def _half(group: ShuffledRounds) -> int:
    """A finer grid where a few large losses are composed, so that their rounding does not average out."""
    return 1 << 14 if group.clients <= 128 and group.releases <= 10_000 else 1 << 11


def _merged(groups: Sequence[ShuffledRounds], sizes: int | None, budgets: int | None) -> tuple[ShuffledRounds, ...]:
    """Add up rounds that are alike, their cohorts rounded down to a few ``sizes``, their ``budgets`` up: safe for an upper bound alone."""
    rounds: Counter[tuple[float, int, int]] = Counter()
    groups = [group for group in groups if group.releases > 0 and group.epsilon0 > 0]
    rounded, up = rounded_down((group.clients for group in groups), sizes), rounded_up({group.epsilon0 for group in groups}, budgets)
    for group in groups:
        rounds[up[group.epsilon0], rounded[group.clients], group.reports] += group.rounds
    return tuple(ShuffledRounds(*key, count) for key, count in rounds.items())


def _of_few_budgets(groups: Sequence[ShuffledRounds]) -> Sequence[ShuffledRounds]:
    """Leave out rounds of all but a few budgets, those that tell least: what the others attain, all of them do."""
    told: Counter[float] = Counter()
    for group in groups:
        told[group.epsilon0] += group.releases
    kept = sorted(told, key=lambda budget: budget**2 * told[budget])[-_BUDGETS:]
    return [group for group in groups if group.epsilon0 in kept]


def _of_few_sizes(groups: Sequence[ShuffledRounds]) -> tuple[ShuffledRounds, ...]:
    """Round cohorts up to a few sizes: more clients hide more, so what is attained among them is attained."""
    up = rounded_up({group.clients for group in groups}, _ATTAINED_SIZES)
    return _merged([replace(group, clients=up[group.clients]) for group in groups], None, None)
