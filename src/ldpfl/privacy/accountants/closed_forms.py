"""Published closed forms, to compare with; none is below the exact composition, and the accountants use none of them.

``central_limit_epsilon`` is no bound at all: it may be shown as an estimate only.
"""

from __future__ import annotations

from math import inf, sqrt, tanh

from ldpfl.privacy.accountants.binomial import sigmoid
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon


def central_limit_mu(epsilon0: float, clients: int, count: int) -> float:
    """mu of the normal law that ``count`` shuffled bits among ``clients`` tend to: sqrt(k) tanh(e0/2) / sqrt(n p0 p1)."""
    variance = clients * sigmoid(epsilon0) * sigmoid(-epsilon0)
    return sqrt(count / variance) * tanh(epsilon0 / 2) if variance > 0 else inf


def central_limit_epsilon(epsilon0: float, clients: int, count: int, delta: float) -> float:
    """Epsilon of that normal law: an ESTIMATE, far too small where n p0 is not large (3195 for 5025 at n = 200, e0 = 4)."""
    return gaussian_epsilon(central_limit_mu(epsilon0, clients, count), delta)
