"""Published closed forms, to compare with; none is below the exact composition, and the accountants use none of them.

``central_limit_epsilon`` is no bound at all: it may be shown as an estimate only.
"""

from __future__ import annotations

from math import e, expm1, inf, log, sqrt, tanh

from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accountants.randomized_response import report_zcdp


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


def central_limit_mu(epsilon0: float, clients: int, count: int) -> float:
    """mu of the normal law that ``count`` shuffled bits among ``clients`` tend to: sqrt(k) tanh(e0/2) / sqrt(n p0 p1)."""
    variance = clients * sigmoid(epsilon0) * sigmoid(-epsilon0)
    return sqrt(count / variance) * tanh(epsilon0 / 2) if variance > 0 else inf


def central_limit_epsilon(epsilon0: float, clients: int, count: int, delta: float) -> float:
    """Epsilon of that normal law: an ESTIMATE, far too small where n p0 is not large (3195 for 5025 at n = 200, e0 = 4)."""
    return gaussian_epsilon(central_limit_mu(epsilon0, clients, count), delta)
