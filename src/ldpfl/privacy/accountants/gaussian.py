"""Gaussian noise: the exact privacy curve, calibration, and composition.

A release of sensitivity D with noise of standard deviation sigma is mu-GDP (Gaussian differential privacy) with mu = D / sigma (Dong, Roth,
Su 2022). Releases compose exactly: mu^2 of the whole is the sum of their mu^2. When one client's data are replaced, a sum of vectors
clipped to norm C has sensitivity 2 C.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, hypot, inf, log, pi, sqrt

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

from ldpfl.errors import ConfigError
from ldpfl.util.lazy_imports import optimize

_LARGE_MU = 1e4
"""Above this mu the first term of the curve alone gives epsilon: at most 1e-7 of it too large if delta is at most 0.5. A root of the curve
could be too small."""
_SMALL_MU = 1e-5
"""Below this mu the two terms of the curve agree in nearly all digits, so their difference is computed from the derivative."""

ROUNDED = 1e-9
"""Part of delta that is charged for sums of rounded Gaussians. They differ from one Gaussian by much less, see decision 0023."""

_LARGEST_EPSILON = 1e100
"""Largest epsilon that is calibrated. Above 1e154 its square overflows."""

_STEPS = 5000
"""Largest number of steps in a search for mu, which may have to halve an interval down to 1e-300."""


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return delta(``epsilon``) of mu-GDP: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Balle, Wang 2018, Theorem 8)."""
    if mu < 1e-150:
        return 0.0
    if mu == inf:
        return 1.0
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if mu < _SMALL_MU:  # the difference is mu times the derivative half way between the two terms
        middle = epsilon / mu / sqrt(2)
        return exp(-(near**2) / 2) * mu / sqrt(2) * (1 / sqrt(pi) - middle * float(erfcx(middle)))
    if near > 0:  # factor out e^(-near^2 / 2), so that the difference of the two terms keeps its digits
        return exp(-(near**2) / 2) * float(erfcx(near / sqrt(2)) - erfcx(far / sqrt(2))) / 2
    return float(ndtr(-near) - np.exp(epsilon + log_ndtr(-far)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 at ``delta`` of mu-GDP; infinite for delta 0 or infinite mu. For a large mu it is rounded up."""
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if delta <= 0 or mu == inf:
        return inf
    # An upper bound of epsilon: the first term of the curve alone falls to delta there.
    high = mu * mu / 2 + mu * float(-ndtri(delta)) if delta < 0.5 else mu * mu / 2 + 1
    if mu > _LARGE_MU:
        return high * (1 + 1e-15)  # more than the rounding of its two terms
    return float(optimize.brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-14 * high, rtol=1e-14))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu that is (``epsilon``, ``delta``)-DP.

    Raises:
        ConfigError: epsilon is not positive and finite, or delta not between 0 and 1.
    """
    _check_epsilon_and_delta(epsilon, delta)
    high = 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    # The delta of mu-GDP is below mu, so mu exceeds the lower end. ``xtol`` is tiny so that a tiny mu is precise, too.
    return float(
        optimize.brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, min(1e-12, delta), high, xtol=1e-300, rtol=1e-14, maxiter=_STEPS)
    )


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Return the smallest standard deviation that gives (``epsilon``, ``delta``)-DP: the analytic Gaussian mechanism (Balle, Wang 2018)."""
    return sensitivity / gaussian_mu(epsilon, delta)


def classical_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Return sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon, proved only for epsilon < 1 (Dwork, Roth 2014, Theorem A.1).

    Raises:
        ConfigError: epsilon >= 1, where the formula may give too little noise; use :func:`gaussian_sigma`.
    """
    _check_epsilon_and_delta(epsilon, delta)
    if epsilon >= 1:
        raise ConfigError(
            f"the classical Gaussian formula is proved for epsilon < 1, got {epsilon:g}: lower it, or calibrate exactly "
            '(in Python with gaussian_sigma; in a recipe with mechanism.constant = "exact", if the mechanism has that setting)'
        )
    return sensitivity * sqrt(2 * log(1.25 / delta)) / epsilon


def ladp_constant(epsilon: float, delta: float) -> float:
    """Return c0 of LaDP-FL: noise of standard deviation c0 D / epsilon is (``epsilon``, ``delta``)-DP for a fixed sensitivity D.

    c0 = (A + sqrt(A^2 + 2 epsilon)) / 2 with A^2 = 2 ln(sqrt(2 / pi) / delta), and A = 1 for delta >= sqrt(2 / pi). It holds for every
    epsilon, and is 1.4 to 3 times the exact constant in practice. Source: LaDP-FL, Theorem 3 and equation (11), reconstructed from its
    proof sketch (confidence high), at P_max = 1: the paper's c is P_max c0.

    Raises:
        ConfigError: epsilon is not positive and finite, or delta not between 0 and 1.
    """
    _check_epsilon_and_delta(epsilon, delta)
    largest = sqrt(2 / pi)
    a = sqrt(2 * log(largest / delta)) if delta < largest else 1.0
    return (a + sqrt(a * a + 2 * epsilon)) / 2


def composed_mu(mus: Iterable[float]) -> float:
    """Return mu of all releases together: the root of the sum of squares. Exact, also for adaptive composition."""
    return hypot(*mus)


def _check_epsilon_and_delta(epsilon: float, delta: float) -> None:
    """Raise a :class:`ConfigError` unless noise can be calibrated to ``epsilon`` and ``delta``."""
    if not 0 < epsilon < inf:
        raise ConfigError(f"epsilon must be positive and finite, got {epsilon}")
    if epsilon > _LARGEST_EPSILON:
        raise ConfigError(
            f"epsilon must be at most {_LARGEST_EPSILON:g}, got {epsilon:g}: such an epsilon protects nothing, choose a smaller one"
        )
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie between 0 and 1, got {delta}")
