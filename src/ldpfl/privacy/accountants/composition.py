"""What all releases of one client cost against a server that keeps everything and trusts nobody in between."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_epsilon
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment
from ldpfl.privacy.accountants.randomized_response import log_moment, sum_of_reports_epsilon


def local_epsilon(reports: Sequence[tuple[float, int]], mus: Sequence[float], delta: float) -> float:
    """Return epsilon for ``delta`` of pure reports, given as (epsilon, number), and Gaussian releases, given as mu.

    Exact for reports of one epsilon, and for Gaussian releases alone; mixtures are composed by Renyi divergences. Adaptive.
    With ``delta`` = 0: the pure sum, infinite as soon as there is Gaussian noise.
    """
    if not mus:
        return sum_of_reports_epsilon(reports, delta)
    mu = composed_mu(mus)
    if not reports:
        return gaussian_epsilon(mu, delta)
    if delta <= 0 or mu == inf:
        return inf

    def total(order: Array) -> Array:
        pure = np.sum([number * log_moment(epsilon, order) for epsilon, number in reports], axis=0)
        return np.asarray(pure + order * (order + 1) * mu**2 / 2)

    return epsilon_from_log_moment(total, delta)
