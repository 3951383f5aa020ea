"""The central-limit closed form for shuffled bits. It is an estimate and bounds nothing; the accountants do not use it."""

from __future__ import annotations

from math import inf, sqrt, tanh

from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon


def central_limit_mu(epsilon0: float, clients: int, count: int) -> float:
    """Return mu of the Gaussian limit of k = ``count`` shuffled bits among n = ``clients``: sqrt(k) tanh(e0/2) / sqrt(n p0 p1).

    e0 is ``epsilon0``, the epsilon of a bit, and p1 = 1 - p0 = 1 / (1 + e^-e0) is the probability of a truthful bit.
    """
    variance = clients * sigmoid(epsilon0) * sigmoid(-epsilon0)
    return sqrt(count / variance) * tanh(epsilon0 / 2) if variance > 0 else inf


def central_limit_epsilon(epsilon0: float, clients: int, count: int, delta: float) -> float:
    """Return epsilon of the limit in :func:`central_limit_mu`. An ESTIMATE: too small unless n p0 is large.

    Example: 3195 instead of 5025 at n = 200, e0 = 4.
    """
    return gaussian_epsilon(central_limit_mu(epsilon0, clients, count), delta)
