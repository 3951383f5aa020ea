"""Compose all releases of one client against an adversary that sees and keeps every report with its sender.

Each accountant names the kinds of release that it composes; ``registry`` picks the first that fits. All hold for adaptive composition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf, sqrt
from typing import ClassVar

import numpy as np

from ldpfl.privacy.accountants.base import Accountant
from ldpfl.privacy.accountants.binomial import TAIL, Array
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accountants.moments import epsilon_from_log_moment
from ldpfl.privacy.accountants.randomized_response import MOST_REPORTS, composed_delta, log_moment, pure_sum, sum_of_reports_epsilon
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, PureRelease, Release, UnprotectedRelease


class LocalAccountant(Accountant):
    """Composes releases of some kinds.

    Attributes:
        kinds: kinds of release that it composes.
        releases: how often each was made.
    """

    kinds: ClassVar[frozenset[type]]

    def __init__(self, releases: Mapping[Release, int] | None = None) -> None:
        self.releases = Counter(releases or {})

    @classmethod
    def supports(cls, kinds: Iterable[type]) -> bool:
        """Whether this accountant composes releases of all these kinds."""
        return cls.kinds >= set(kinds)

    def divergence(self, order: Array) -> Array:
        """Return the Rényi divergences of all releases together at the orders 1 + ``order``, for the privacy filter of a budget.

        Infinite in accountants that do not compute it: then the filter uses only the pure sum.
        """
        return np.full_like(order, inf)

    @property
    def pure(self) -> list[tuple[float, int]]:
        """Reports of pure mechanisms, as (epsilon, number)."""
        pure = ((release, times) for release, times in self.releases.items() if isinstance(release, BinaryRelease | PureRelease))
        return [(release.parameter, release.units * times) for release, times in pure]

    @property
    def mu(self) -> float:
        """mu of all Gaussian releases together."""
        gaussian = ((release, times) for release, times in self.releases.items() if isinstance(release, GaussianRelease))
        return composed_mu(release.parameter * sqrt(release.units * times) for release, times in gaussian)


class PureAccountant(LocalAccountant):
    """Reports of pure mechanisms. Epsilon is exact if all have one epsilon, or a few; else it is a bound that is at most their sum.

    More than :data:`MOST_REPORTS` reports are charged their sum.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({BinaryRelease, PureRelease})

    def epsilon(self, delta: float) -> float:
        is_exact = sum(number for _, number in self.pure) <= MOST_REPORTS
        return sum_of_reports_epsilon(self.pure, delta if is_exact else 0.0)

    def distance(self) -> float:
        """Return an upper bound of the total variation distance: exact but for ``TAIL`` if all reports have one epsilon."""
        epsilons, number = {epsilon for epsilon, _ in self.pure}, sum(number for _, number in self.pure)
        if len(epsilons) != 1 or number > MOST_REPORTS:
            return self._distance_by_deltas()
        return min(1.0, composed_delta(epsilons.pop(), number, 0.0) + TAIL)

    def divergence(self, order: Array) -> Array:
        return _divergence_of_reports(self.pure, order)


class GaussianAccountant(LocalAccountant):
    """Gaussian noise. Epsilon is exact; if records are sampled, it is an upper bound."""

    kinds: ClassVar[frozenset[type]] = frozenset({GaussianRelease})

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at ``delta``; an upper bound of it if records are sampled."""
        if not self._is_sampled:
            return gaussian_epsilon(self.mu, delta)
        from ldpfl.privacy.accountants.poisson import sampled_epsilon  # it loads all of dp-accounting

        return sampled_epsilon(self.rounds, delta)

    def distance(self) -> float:
        """Return the total variation distance; an upper bound of it if records are sampled."""
        unsampled = gaussian_delta(self.mu, 0.0)
        if not self._is_sampled:
            return unsampled
        from ldpfl.privacy.accountants.poisson import sampled_distance  # as in epsilon

        return min(unsampled, sampled_distance(self.rounds))

    def divergence(self, order: Array) -> Array:
        return _divergence_of_noise(self.mu, order)  # sampling is ignored, which only overstates the cost

    @property
    def rounds(self) -> list[tuple[float, float, int]]:
        """(mu, sampling rate, number of rounds) of each kind of round."""
        gaussian = [(release, times) for release, times in self.releases.items() if isinstance(release, GaussianRelease)]
        return [(release.mu * sqrt(release.units), release.rate, times) for release, times in gaussian]

    @property
    def _is_sampled(self) -> bool:
        """Whether records take part in some rounds with a probability below 1."""
        return any(rate < 1 for _, rate, _ in self.rounds)


class RenyiAccountant(LocalAccountant):
    """Pure reports and Gaussian noise together: the smaller of two bounds, by Rényi divergences and by basic composition.

    Basic composition adds the sum of the pure epsilons to the exact epsilon of the noise at delta. Proof, also for adaptive composition:
    take a view whose pure reports come from the first input, and whose noisy vectors come from the second. It differs from the first
    input's view in the noise alone. It is at most e^sum times as likely as the second input's view.
    """

    kinds: ClassVar[frozenset[type]] = PureAccountant.kinds | GaussianAccountant.kinds

    def epsilon(self, delta: float) -> float:
        """Return an epsilon at ``delta``. Infinite at delta 0, since Gaussian noise has no pure epsilon, and for an infinite mu."""
        reports, mu = self.pure, self.mu
        if delta <= 0 or mu == inf:
            return inf
        basic = gaussian_epsilon(mu, delta) + pure_sum(*reports)
        if sum(number for _, number in reports) > MOST_REPORTS:
            return basic

        def total(order: Array) -> Array:
            """Return log E[e^(order * loss)] of all reports and all noise together."""
            pure = np.sum([number * log_moment(epsilon, order) for epsilon, number in reports], axis=0)
            return np.asarray(pure + order * (order + 1) * mu**2 / 2)  # a loss of variance mu^2 and mean mu^2 / 2

        return min(basic, epsilon_from_log_moment(total, delta))

    def distance(self) -> float:
        return self._distance_by_deltas()

    def divergence(self, order: Array) -> Array:
        return _divergence_of_reports(self.pure, order) + _divergence_of_noise(self.mu, order)


class NoAccountant(LocalAccountant):
    """Something left without protection: no epsilon holds."""

    kinds: ClassVar[frozenset[type]] = RenyiAccountant.kinds | {UnprotectedRelease}

    def epsilon(self, delta: float) -> float:
        return inf


def _divergence_of_reports(pure: list[tuple[float, int]], order: Array) -> Array:
    """Return the Rényi divergence of order 1 + ``order`` of pure reports, given as (epsilon, number)."""
    return np.asarray(np.sum([number * log_moment(epsilon, order) / order for epsilon, number in pure], axis=0))


def _divergence_of_noise(mu: float, order: Array) -> Array:
    """Return the Rényi divergence of order 1 + ``order`` of Gaussian noise."""
    return np.asarray((1 + order) * mu**2 / 2)
