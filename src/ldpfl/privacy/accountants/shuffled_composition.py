"""Composition of many shuffled bits: d bits of each client in each of T rounds, each counted over the cohort.

The result is the smallest of three proved upper bounds (derivations: docs/accounting.md):

* the PLD of a dominating pair, convolved; it holds for inputs that depend on earlier releases;
* Rényi divergences; they hold for such inputs as well;
* the moment bound with its factor sharpened by the theorem of Berry and Esseen (constant 0.56, Shevtsova 2010). The idea is that of
  Alghamdi et al. 2023; here the error is explicit. It needs inputs that are fixed beforehand. Within one round they are, since all weights
  are computed before the first bit is drawn. So the adaptive bound uses it within each round, and convolves the rounds.

The lower bound is the epsilon of one data set, in which all other clients have the upper probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
from ldpfl.privacy.accountants.shuffled_bits import (
    ShuffledLosses,
    attained_losses,
    rounded_down,
    rounded_up,
    shuffled_losses,
    single_attained_epsilon,
    single_epsilon,
)

_BERRY_ESSEEN = 0.56
_CURVE_POINTS = 8192  # epsilons, apart from 0, at which the curve of one round is computed
_MAX_SIZES = 8  # distinct cohort sizes in an upper bound, after rounding
_MAX_ATTAINED_SIZES = 16
"""Number of distinct cohort sizes in a lower bound, after rounding: each takes a sixth of a second."""
_MAX_EPSILONS = 16
"""Number of distinct epsilons of a bit, after rounding: each takes seconds, and tens of megabytes."""

_MAX_WORK = 2e5
"""Largest sum of square roots of cohort sizes, over the distinct bits (epsilon and cohort): some half a minute on one core.

The time for a bit's losses grows with that root. If the limit is exceeded, epsilons and cohorts are rounded to fewer values.
"""

_UP = 1 + 2.0**-50
"""Factor for rounding epsilon up. Close to the pure sum, the last digits of epsilon change delta by a thousandth."""
_ATTAINED_GRIDS = (1 << 14, 1 << 11, 1 << 10)  # grid points on each side of loss 0, tried in turn for a lower bound


@dataclass(frozen=True)
class ShuffledRounds:
    """``rounds`` rounds in which each of ``clients`` clients sends ``reports`` shuffled bits at ``epsilon0`` each."""

    epsilon0: float
    clients: int
    reports: int
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.clients < 1 or self.reports < 0 or self.rounds < 0:
            raise ConfigError(f"a round needs clients >= 1, reports >= 0 and rounds >= 0, got {self}")
        if not 0 <= self.epsilon0 < inf:
            raise ConfigError(f"epsilon0, the epsilon of a bit, must be finite and not negative, got {self.epsilon0}")

    @property
    def releases(self) -> int:
        """Number of bits that one client sends in all these rounds."""
        return self.reports * self.rounds


def certified_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> tuple[float, float]:
    """Return proved upper bounds of epsilon at ``delta``: for inputs that are fixed beforehand, and for adaptive inputs.

    The adversary sees the counts of all rounds and nothing else. Adaptive inputs depend on earlier releases, as in training. They must not
    depend on a client's own earlier random bits, as with error feedback. One core takes seconds for each group, for up to 1e8 clients and
    1e10 bits per client. If there are many cohort sizes, they are rounded down to a few, which is safe.
    """
    groups = _merge_within_work_limit(lambda sizes, epsilons: _merged(groups, sizes, epsilons), _MAX_SIZES)
    if _shuffling_is_useless(groups, delta):
        local = _local_epsilon(groups, delta)
        return local, local
    if len(groups) == 1 and groups[0].releases == 1:
        single = single_epsilon(groups[0].epsilon0, groups[0].clients, delta)
        return single, single
    return _certified_epsilon_of_merged(groups, delta)


@lru_cache(maxsize=32)  # a plan searches for a setting by its epsilon, and later asks for the same epsilon again
def _certified_epsilon_of_merged(groups: tuple[ShuffledRounds, ...], delta: float) -> tuple[float, float]:
    """Return :func:`certified_epsilon` of ``groups`` that are merged already, cached: for fixed and for adaptive inputs."""
    composition = _Composition(groups, tuple(shuffled_losses(group.epsilon0, group.clients, _grid_half(group)) for group in groups))
    remaining_delta = delta - composition.outside
    renyi, order = best_order(composition.log_moment, remaining_delta)
    fixed = epsilon_from_log_moment(composition.log_moment, remaining_delta, composition.sharp_factor, near=order) * _UP
    # The inputs of a single round are fixed before its first bit is drawn. So there the bound for fixed inputs holds adaptively, too.
    round_by_round = fixed if composition.is_one_round else composition.round_by_round_epsilon(delta)
    adaptive = min(_local_epsilon(groups, delta), renyi * _UP, composition.convolved_epsilon(delta) * _UP, round_by_round)
    return min(adaptive, fixed), adaptive


def attained_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> float:
    """Return a proved lower bound of epsilon at ``delta``: the epsilon of one data set, or less if computing that takes too long.

    In this data set, the bits of all other clients are 1 with the larger probability 1 / (1 + e^-epsilon0).
    """
    merged = _merged(groups, sizes=None, epsilons=None)
    rounded = _merge_within_work_limit(
        lambda sizes, epsilons: _round_up_cohorts(_most_informative(merged, epsilons), sizes), _MAX_ATTAINED_SIZES
    )
    return _attained_epsilon_of_merged(rounded, delta)


@lru_cache(maxsize=64)  # a plan asks again for the result of a search
def _attained_epsilon_of_merged(groups: tuple[ShuffledRounds, ...], delta: float) -> float:
    """Return :func:`attained_epsilon` of ``groups`` that are merged already, cached."""
    if _shuffling_is_useless(groups, delta):
        # The local bound is exact for one epsilon, and at delta 0. For several epsilons, use the largest lower bound of one of them.
        is_exact = delta <= 0 or len(groups) < 2
        return _local_epsilon(groups, delta) if is_exact else max(attained_epsilon([group], delta) for group in groups)
    if len(groups) == 1 and groups[0].releases == 1:
        return single_attained_epsilon(groups[0].epsilon0, groups[0].clients, delta)
    grids = _ATTAINED_GRIDS if len(groups) == 1 else ()
    for half in grids:  # from fine to coarse, until the convolution is short enough
        bit_losses = attained_losses(groups[0].epsilon0, groups[0].clients, half)
        composed = GridLosses(bit_losses.step, -half, bit_losses.masses[0]).composed(groups[0].releases, delta)
        if composed is not None:
            # For a lower bound, the possible error of rounding and truncation makes epsilon smaller, so it is added to delta.
            return epsilon_of(composed.losses, composed.masses, delta + composed.infinite)
    losses = [attained_losses(group.epsilon0, group.clients) for group in groups]
    lower_bound = _attained_by_moments(losses, [group.releases for group in groups], delta)
    if lower_bound == 0 and len(groups) > 1:  # too few releases for the theorem: use the lower bound of a single group
        return max(attained_epsilon([group], delta) for group in groups)
    return lower_bound


def _shuffling_is_useless(groups: Sequence[ShuffledRounds], delta: float) -> bool:
    """Whether shuffling cannot lower epsilon: nothing was released, there are no other clients, delta is 0, or epsilon0 is huge."""
    return not groups or delta <= 0 or all(group.clients == 1 for group in groups) or any(g.epsilon0 > HUGE_BUDGET for g in groups)


def _local_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> float:
    """Return epsilon at ``delta`` of all bits of one client without a shuffler."""
    return sum_of_reports_epsilon([(group.epsilon0, group.releases) for group in groups], delta)


@dataclass(frozen=True, eq=False)
class _Composition:
    """Upper bounds for groups of rounds. ``losses`` has the privacy losses of one bit of each group."""

    groups: tuple[ShuffledRounds, ...]
    losses: tuple[ShuffledLosses, ...]

    @property
    def is_one_round(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].rounds == 1

    @property
    def outside(self) -> float:
        """Upper bound of the probability that the loss of some bit is outside the window in which its losses are computed."""
        return sum(group.releases * bit_losses.outside for group, bit_losses in zip(self.groups, self.losses, strict=True))

    def log_moment(self, order: Array) -> Array:
        """Return an upper bound of log E[e^(t loss)] of all bits of one client, for each t of ``order`` (T,)."""
        parts = [group.releases * bit_losses.log_moment(order) for group, bit_losses in zip(self.groups, self.losses, strict=True)]
        return np.asarray(np.sum(parts, axis=0))

    def sharp_factor(self, order: Array) -> Array:
        """Return :func:`_sharpened_factor` for all bits of one client."""
        return _sharpened_factor(self.losses, [group.releases for group in self.groups], order)

    def convolved_epsilon(self, delta: float) -> float:
        """Return epsilon by convolving the dominating pair of a bit; infinity for several groups, or if the convolution is too long."""
        if len(self.groups) > 1:
            return inf
        composed = self.losses[0].dominating.composed(self.groups[0].releases, delta)
        return composed.epsilon(delta) if composed is not None else inf

    def round_by_round_epsilon(self, delta: float) -> float:
        """Return epsilon by :func:`round_curve` within each round, and by convolution over rounds; infinite if none is found."""
        rounds = sum(group.rounds for group in self.groups)
        negligible_delta = 1e-4 * delta / rounds
        groups_and_losses = list(zip(self.groups, self.losses, strict=True))
        largest_epsilon = max(round_limit(bit_losses, group.reports, negligible_delta) for group, bit_losses in groups_and_losses)
        if largest_epsilon == 0:  # no grid has the step 0
            return inf
        step = largest_epsilon / _CURVE_POINTS
        epsilons = step * np.arange(_CURVE_POINTS + 1)
        total: GridLosses | None = None
        for group, bit_losses in groups_and_losses:
            curve = round_curve(bit_losses, group.reports, epsilons, negligible_delta)
            group_losses = from_curve(curve, step).composed(group.rounds, delta)
            if group_losses is None:  # the convolution would be too long or too inexact
                return inf
            total = group_losses if total is None else total.followed_by(group_losses)
        return total.epsilon(delta) if total is not None else inf


def round_limit(losses: ShuffledLosses, reports: int, negligible: float) -> float:
    """Return an epsilon at which the delta of one round is below ``negligible``."""
    return epsilon_from_log_moment(lambda order: reports * losses.log_moment(order), negligible)


def round_curve(losses: ShuffledLosses, reports: int, epsilons: Array, negligible: float) -> Array:
    """Return an upper bound of delta at ``epsilons`` for one round of ``reports`` bits, whose inputs are fixed before the first is drawn.

    It is the smallest of three bounds: by moments, by the normal law, and by convolution. ``losses`` are those of one bit. Deltas below
    ``negligible`` need not be computed closely.
    """
    _, order = best_order(lambda order: reports * losses.log_moment(order), negligible)
    orders = order * np.logspace(-3, 0.5, 71)  # any order gives a bound; larger deltas need smaller orders
    logs = reports * losses.log_moment(orders) + _sharpened_factor([losses], [reports], orders)
    curve = np.exp(np.minimum(np.min(logs[:, None] - orders[:, None] * epsilons, axis=0), 0.0)) + reports * losses.outside
    curve = np.fmin(curve, _normal_curve(losses, reports, epsilons))  # fmin ignores a NaN, which bounds nothing
    # Callers set ``negligible`` to some 1e-4 of a round's delta. Against a round's delta, the error of the convolution must be small.
    composed = losses.dominating.composed(reports, 1e4 * negligible)
    if composed is not None:
        curve = np.minimum(curve, curve_of(composed.losses, composed.masses, epsilons) + composed.infinite + 1e-15)
    return np.asarray(curve)


def _normal_curve(losses: ShuffledLosses, reports: int, epsilons: Array) -> Array:
    """Return an upper bound of delta at ``epsilons`` by the Berry-Esseen theorem: the total loss of many bits is nearly normal.

    It is close for epsilons near the mean of the loss. For a normal loss of mean M and standard deviation s, with a = M - epsilon,
    delta = Phi(a / s) - phi(a / s) m(s - a / s). Here Phi and phi are the standard normal distribution function and density, and
    m(x) = (1 - Phi(x)) / phi(x). delta rises with M. Only an interval is known for s, so the first term takes its largest value there, and
    the second its smallest. 1 - e^-y rises from 0 to 1, so the distance between the distribution functions of the loss and of the normal
    law counts once.
    """
    mean, variance, third = losses.tilted(np.zeros(1))
    least_s, largest_s = sqrt(reports * float(variance.min())), sqrt(reports * float(variance.max()))
    if least_s == 0:
        return np.ones_like(epsilons)
    with np.errstate(over="ignore", invalid="ignore"):  # a tiny deviation gives infinity or NaN, and no bound follows from either
        a = reports * float(mean.max()) - epsilons
        first = np.maximum(ndtr(a / least_s), ndtr(a / largest_s))
        largest_argument = np.maximum(least_s - a / least_s, largest_s - a / largest_s)
        # Where its argument is far below 0 the second term overflows; leaving it out only raises the bound.
        capped = np.maximum(largest_argument, -20.0) / sqrt(2)
        second = np.where(largest_argument > -20, np.exp(-((a / least_s) ** 2) / 2) * erfcx(capped) / 2, 0.0)
        error = _BERRY_ESSEEN * reports * float(third.max()) / least_s / least_s / least_s  # its cube may be 0 where it is not
    return np.asarray(first - second + error + reports * losses.outside)


def _sharpened_factor(losses: Sequence[ShuffledLosses], counts: Sequence[int], order: Array) -> Array:
    """Return the logarithm of a factor F with delta <= F E[e^(t (loss - epsilon))] for fixed inputs, for each t of ``order`` (T,).

    F is the smaller of :func:`renyi_factor` and a factor by the Berry-Esseen theorem. Under the weights e^(t loss) the total loss has a
    variance of at least V, and third absolute moments that sum to at most R. delta is a mean of e^(-t y) (1 - e^-y) over y = loss - epsilon
    > 0. For a normal loss, whose density is at most 1 / sqrt(2 pi V), the mean is at most 1 / (t (1 + t) sqrt(2 pi V)). The distribution
    functions of the loss and of the normal law differ by at most C R / V^1.5, where C is ``_BERRY_ESSEEN``. The averaged function rises to
    its largest value g and falls again, so this difference adds at most 2 g times as much.
    """
    renyi = renyi_factor(order)
    variance, third = np.zeros_like(order), np.zeros_like(order)
    for bit_losses, count in zip(losses, counts, strict=True):
        _, variances, thirds = bit_losses.tilted(order)
        variance += count * variances.min(axis=1)
        third += count * thirds.max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        main = 1 / (np.sqrt(2 * pi * variance) * order * (1 + order))
        error = 2 * np.exp(renyi) * _BERRY_ESSEEN * third / variance**1.5
        sharp = np.log(main + error)
    return np.where(np.isfinite(sharp), np.minimum(renyi, sharp), renyi)


def _attained_by_moments(losses: Sequence[ShuffledLosses], counts: Sequence[int], delta: float) -> float:
    """Return an epsilon at which the true delta is certainly larger than ``delta``; 0 if the Berry-Esseen theorem gives no such epsilon.

    Take the order t for which the weights e^(t loss) give the loss the mean epsilon, and K = log E[e^(t loss)]. Then the true delta is at
    least e^(K - t epsilon) times the normal expectation of e^(-t y) (1 - e^-y) over y > 0, less the Berry-Esseen error.
    """

    def excess(exponent: float) -> tuple[float, float]:
        """Return, for the order 10^``exponent``, a lower bound of log(delta at epsilon / ``delta``), and that epsilon."""
        t = 10**exponent
        order = np.array([t])
        mean = variance = third = log_moment = 0.0
        for bit_losses, count in zip(losses, counts, strict=True):
            bit_mean, bit_variance, bit_third = (float(rows[0, 0]) for rows in bit_losses.tilted(order))
            mean, variance, third = mean + count * bit_mean, variance + count * bit_variance, third + count * bit_third
            log_moment += count * float(bit_losses.log_moment(order)[0])
        if variance < 1e-200:
            return -inf, 0.0
        width = sqrt(variance / 2)
        # E[e^(-a y); y > 0] is erfcx(a width) / 2 for normal y of mean 0. The normal expectation is the difference for a = t and t + 1.
        normal = (float(erfcx(t * width)) - float(erfcx((t + 1) * width))) / 2
        attained_factor = normal - 2 * float(np.exp(renyi_factor(order))[0]) * _BERRY_ESSEEN * third / variance**1.5
        return (log_moment - t * mean + log(attained_factor) - log(delta) if attained_factor > 0 else -inf), mean

    exponents = np.linspace(-8, 3, 221).tolist()
    attained = [exponent for exponent in exponents if excess(exponent)[0] >= 0]
    if not attained:
        return 0.0
    low, high = attained[-1], attained[-1] + exponents[1] - exponents[0]
    for _ in range(30):  # bisection: the lower end always holds
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle)[0] >= 0 else (low, middle)
    return excess(low)[1]  # a larger order gives a larger epsilon, so ``low`` is the largest order found to hold


def _grid_half(group: ShuffledRounds) -> int:
    """Return the number of grid points on each side of loss 0.

    The grid is finer where a few large losses are composed, so that their rounding does not average out.
    """
    return 1 << 14 if group.clients <= 128 and group.releases <= 10_000 else 1 << 11


def _merged(groups: Sequence[ShuffledRounds], sizes: int | None, epsilons: int | None) -> tuple[ShuffledRounds, ...]:
    """Merge equal rounds, after rounding cohorts down to ``sizes`` values and epsilons up to ``epsilons`` values; None: no rounding.

    Rounding in these directions is safe only for upper bounds.
    """
    rounds: Counter[tuple[float, int, int]] = Counter()
    groups = [group for group in groups if group.releases > 0 and group.epsilon0 > 0]
    rounded_clients = rounded_down((group.clients for group in groups), sizes)
    rounded_epsilons = rounded_up({group.epsilon0 for group in groups}, epsilons)
    for group in groups:
        rounds[rounded_epsilons[group.epsilon0], rounded_clients[group.clients], group.reports] += group.rounds
    return tuple(ShuffledRounds(epsilon0, clients, reports, count) for (epsilon0, clients, reports), count in rounds.items())


def _merge_within_work_limit(merge: Callable[[int, int], tuple[ShuffledRounds, ...]], sizes: int) -> tuple[ShuffledRounds, ...]:
    """Return the rounds that ``merge(sizes, epsilons)`` returns for the largest numbers that :data:`_MAX_WORK` allows.

    The arguments are how many distinct cohort sizes, and distinct epsilons of a bit, the rounds keep after rounding. Both numbers begin at
    their maximum, ``sizes`` and ``_MAX_EPSILONS``, and are halved until the work is small enough.
    """
    epsilons = _MAX_EPSILONS
    while True:
        groups = merge(sizes, epsilons)
        work = sum(sqrt(clients) for _, clients in {(group.epsilon0, group.clients) for group in groups})
        if work <= _MAX_WORK or sizes == epsilons == 1:
            return groups
        sizes, epsilons = max(1, sizes // 2), max(1, epsilons // 2)


def _most_informative(groups: Sequence[ShuffledRounds], most: int) -> Sequence[ShuffledRounds]:
    """Return the rounds of at most ``most`` distinct epsilons of a bit: those epsilons at which all bits together reveal most.

    A bit with a small epsilon reveals about its square. Leaving rounds out is safe for a lower bound.
    """
    releases: Counter[float] = Counter()
    for group in groups:
        releases[group.epsilon0] += group.releases
    informative = sorted(releases, key=lambda epsilon0: epsilon0**2 * releases[epsilon0])[-most:]
    return [group for group in groups if group.epsilon0 in informative]


def _round_up_cohorts(groups: Sequence[ShuffledRounds], sizes: int) -> tuple[ShuffledRounds, ...]:
    """Round cohorts up to a few sizes. This is safe for a lower bound, since more clients hide more."""
    up = rounded_up({group.clients for group in groups}, sizes)
    return _merged([replace(group, clients=up[group.clients]) for group in groups], sizes=None, epsilons=None)
