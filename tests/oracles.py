"""Published formulas and enumerations that the accountants are held against, and bounds side by side; the package uses none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import e, exp, expm1, log, log1p, prod, sqrt, tanh

import mpmath
import numpy as np

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.binomial import Array, sigmoid
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment
from ldpfl.privacy.accountants.participation import cohort_sizes, unamplified_epsilon
from ldpfl.privacy.accountants.randomized_response import log_moment
from ldpfl.privacy.accountants.shuffled_bits import single_delta
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, attained_epsilon, certified_epsilon

_ENUMERABLE = 64


@dataclass(frozen=True)
class Bracket:
    """Bounds on epsilon: [lower, upper] for fixed inputs, [lower, adaptive] for inputs that depend on earlier releases.

    Attributes:
        lower: the epsilon of some data set.
        upper: proved for inputs that are fixed before the first round.
        adaptive: proved for inputs that depend on earlier releases, as in training.
    """

    lower: float
    upper: float
    adaptive: float


def shuffled_epsilon(groups: Sequence[ShuffledRounds], delta: float) -> Bracket:
    """Bound epsilon at ``delta`` against an adversary that sees the counts of all rounds and nothing else."""
    upper, adaptive = certified_epsilon(groups, delta)
    return Bracket(min(attained_epsilon(groups, delta), upper), upper, adaptive)


def optimal_composition_epsilon(epsilon0: float, count: int, delta: float) -> float:
    """Kairouz, Oh, Viswanath 2015, Theorem 3.4: the smallest of three expressions, the pure sum among them."""
    drift = count * epsilon0 * tanh(epsilon0 / 2)
    spread = epsilon0 * sqrt(2 * count)
    first = drift + spread * sqrt(log(e + epsilon0 * sqrt(count) / delta))
    return min(count * epsilon0, first, drift + spread * sqrt(log(1 / delta)))


def advanced_composition_epsilon(epsilon0: float, count: int, delta: float) -> float:
    """Dwork, Rothblum, Vadhan 2010, Theorem III.3. Above epsilon0 of about 0.5 it is worse than the pure sum."""
    return epsilon0 * sqrt(2 * count * log(1 / delta)) + count * epsilon0 * expm1(epsilon0)


def zcdp_epsilon(epsilon0: float, count: int, delta: float) -> float:
    """Bun, Steinke 2016, Proposition 1.3, with the exact rho of randomised response: rho + 2 sqrt(rho ln(1/delta))."""
    rho = count * report_zcdp(epsilon0)
    return rho + 2 * sqrt(rho * log(1 / delta))


def report_rdp(epsilon0: float, alpha: float | Array) -> Array:
    """Renyi divergence of order ``alpha`` > 1 of one report: log(p1^a p0^(1-a) + p0^a p1^(1-a)) / (a - 1)."""
    return np.asarray(log_moment(epsilon0, np.asarray(alpha) - 1) / (np.asarray(alpha) - 1))


def report_zcdp(epsilon0: float) -> float:
    """Zero-concentrated DP of one report: rho = epsilon0 tanh(epsilon0 / 2), the supremum of D_alpha / alpha."""
    return epsilon0 * tanh(epsilon0 / 2)


def composed_rdp_epsilon(epsilon0: float, reports: int, delta: float) -> float:
    """Return epsilon by exact Renyi divergences and the conversion of Canonne, Kamath, Steinke 2020; never below the exact one."""
    return epsilon_from_log_moment(lambda order: reports * log_moment(epsilon0, order), delta)


def amplified_epsilon(epsilon: float, share: float) -> float:
    """log(1 + g (e^epsilon - 1)) for a secret random subset with ``share`` g of all clients; its delta is g times as large."""
    if share == 1 or epsilon == 0:
        return epsilon
    if epsilon < 1:
        return log1p(share * expm1(epsilon))
    return float(np.logaddexp(log1p(-share), log(share) + epsilon))


def self_sampled_delta(epsilon0: float, clients: int, rate: float, epsilon: float) -> float:
    """Upper bound of delta(``epsilon``) for one shuffled bit of each client that takes part, with probability ``rate``."""
    sizes, weights, _ = cohort_sizes(clients, rate, 0.0)
    shares = sizes / clients
    deltas = [single_delta(epsilon0, int(size), float(unamplified_epsilon(epsilon, size / clients))) for size in sizes]
    return float(np.dot(weights * shares, deltas))


def self_sampled_delta_exact(epsilon0: float, clients: int, rate: float, epsilon: float) -> float:
    """delta(``epsilon``) of one bit, exactly, by enumeration: what the bound above gives away. Up to 64 clients.

    Seen are how many reports say + and how many say -. The others hold the worst of all mixtures of the two extremes.
    """
    if clients > _ENUMERABLE:
        raise ConfigError(f"exact self-sampling is enumerated up to {_ENUMERABLE} clients, got {clients}")
    if epsilon >= epsilon0:
        return 0.0
    p1, p0 = rate * sigmoid(epsilon0), rate * sigmoid(-epsilon0)
    plus, minus = _polynomial(p1, p0), _polynomial(p0, p1)
    worst = 0.0
    for upper in range(clients):
        others: Array = np.ones((1, 1))
        for index in range(clients - 1):
            others = _times(others, plus if index < upper else minus)
        gap = _times(others, plus) - exp(epsilon) * _times(others, minus)
        worst = max(worst, float(np.maximum(gap, 0.0).sum()))
    return worst


def _polynomial(plus: float, minus: float) -> Array:
    """One client: nothing, one +, or one -."""
    return np.array([[1 - plus - minus, minus], [plus, 0.0]])


def _times(left: Array, right: Array) -> Array:
    product = np.zeros((left.shape[0] + 1, left.shape[1] + 1))
    for row in range(2):
        for column in range(2):
            product[row : row + left.shape[0], column : column + left.shape[1]] += left * right[row, column]
    return product


def enumerated_reports_delta(groups: Sequence[tuple[float, int]], epsilon: float) -> float:
    """delta(``epsilon``) of groups of (epsilon, number) reports of randomised response, to fifty digits: the sum over all their losses."""
    with mpmath.workdps(50):
        laws = []
        for epsilon0, number in groups:
            odds = mpmath.exp(mpmath.mpf(epsilon0))
            scale = (1 + odds) ** number
            laws.append(
                [(mpmath.mpf(epsilon0) * (2 * k - number), mpmath.binomial(number, k) * odds**k / scale) for k in range(number + 1)]
            )
        total = mpmath.mpf(0)
        for outcomes in product(*laws):
            loss = sum(loss for loss, _ in outcomes)
            if loss > epsilon:
                total += prod(mass for _, mass in outcomes) * -mpmath.expm1(epsilon - loss)
        return float(total)


def clone_closed_form(epsilon0: float, clients: int, delta: float) -> float:
    """FMT 2021, Theorem 3.1: ln(1 + tanh(e0/2) (8 sqrt(e^e0 ln(4/d) / n) + 8 e^e0 / n)), or e0 where its condition fails."""
    if clients <= 1 or epsilon0 > log(clients / (16 * log(2 / delta))):
        return epsilon0
    growth = exp(epsilon0)
    return log1p(tanh(epsilon0 / 2) * (8 * sqrt(growth * log(4 / delta) / clients) + 8 * growth / clients))


def gaussian_rdp_epsilon(mu: float, delta: float) -> float:
    """Epsilon by Renyi divergences alpha mu^2 / 2 and the conversion of Canonne, Kamath, Steinke 2020; above the exact one."""
    return epsilon_from_log_moment(lambda order: order * (order + 1) * mu**2 / 2, delta)


def gaussian_mironov_epsilon(mu: float, delta: float) -> float:
    """Epsilon by Renyi divergences and the conversion of Mironov 2017: mu^2 / 2 + mu sqrt(2 ln(1/delta)); looser still."""
    return mu**2 / 2 + mu * sqrt(2 * log(1 / delta))
