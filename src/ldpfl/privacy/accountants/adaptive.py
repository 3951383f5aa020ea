"""A privacy filter: a budget that holds even if each report is chosen after all earlier ones were seen.

Composition theorems that pick the best of several bounds afterwards need epsilons that were fixed beforehand. Here the server chooses the
next epsilon by what it saw, and may go on only when chance favoured it. Example: 30 reports at 0.5, accounted exactly. In favourable
cases the server replaces the second half by two reports at 1.8 and four at 0.5. It then stays within the budget's epsilon, but at 1.6 times
its delta.

The filter: a report may leave if, with it, at least one of two sums stays within the budget's epsilon. The first is the sum of the pure
epsilons. The second is the sum of the Rényi divergences of one order, fixed with the budget, plus the order's price for delta.

Proof that everything together is (epsilon, delta)-DP. A path is one sequence of reports that may occur. Suppose every path kept the second
sum. Then the Rényi divergence of the whole is at most the sum's bound (Feldman & Zrnic 2021, Theorem 3.1), and that gives delta (Canonne,
Kamath, Steinke 2020, Proposition 12). A path that exceeds the second sum keeps the first one to its end. Its loss is at most epsilon, so
it adds nothing to delta. Cut all such paths just before the report with which they exceed the second sum. The other paths do not change,
and now every path keeps the second sum. So delta is no larger than that of a tree that keeps the second sum throughout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, log, sqrt

import numpy as np

from ldpfl.privacy.accountants.binomial import Array
from ldpfl.privacy.accountants.gaussian import ROUNDED
from ldpfl.privacy.accountants.moments import renyi_factor
from ldpfl.privacy.accountants.registry import accountant
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, Release

_UP = 1 + 1e-7
"""Factor that makes up for rounding: it exceeds the error of divergences of reports at 1e-9, and of sums of thousands of them."""

_ORDERS = 10.0 ** np.linspace(-8, 6, 2801)
"""Candidates t for the filter's Rényi order 1 + t."""


@lru_cache(maxsize=256)
def filter_order(epsilon: float, delta: float) -> float:
    """Return t for the Rényi order 1 + t of a budget of ``epsilon`` at ``delta``; infinite if only the pure sum counts.

    The order is the one that allows the most reports if each is cheap, so that its divergence is (1 + t) rho with a rho that does not
    depend on the order.
    """
    if delta <= 0 or epsilon <= 0:
        return inf
    allowed_rho = (epsilon - _epsilon_for_delta(_ORDERS, delta)) / (1 + _ORDERS)  # (1 + t) rho + (what delta costs) = epsilon
    # Three digits only, so that machines which round differently get the same order.
    return float(f"{_ORDERS[int(np.argmax(allowed_rho))]:.3g}") if allowed_rho.max() > 0 else inf


def filtered_epsilon(releases: Iterable[tuple[Release, int]], order: float, delta: float) -> float:
    """Return the smallest epsilon, rounded up, at which this module's filter of Rényi order 1 + ``order`` allows all ``releases``.

    It is the smaller of two sums: of the pure epsilons, and of the Rényi divergences plus the epsilon that their conversion to ``delta``
    adds. Only the first one counts if ``order`` is infinite.
    """
    composed = accountant(releases)
    pure = composed.epsilon(0.0)
    if order == inf or delta <= 0 or not all(release.protected for release in composed.releases):
        return pure  # infinite if a release is unprotected
    if not composed.releases:
        return 0.0
    t = np.array([order])
    by_divergence = max(0.0, float((composed.divergence(t) + _epsilon_for_delta(t, delta))[0])) * _UP
    return min(pure, by_divergence)


def hidden_epsilon(sent: Iterable[tuple[BinaryRelease, int, int, int]], order: float, delta: float) -> float:
    """Return epsilon as :func:`filtered_epsilon`, but against an adversary that sees only mixed bits.

    Only the sum of Rényi divergences is used, of the upper bound in :mod:`~ldpfl.privacy.accountants.clones`. Return infinity if ``order``
    is infinite, or if ``delta`` is too small for that bound.

    Args:
        sent: (release, clients that its bits were mixed among, bits in one message, number of times) for each kind.
        order, delta: as in :func:`filtered_epsilon`. The bound on a divergence fails with a tiny probability, which is taken off delta.
    """
    from ldpfl.privacy.accountants.clones import (  # most nodes need none of it
        clone_log_moment,
        clone_outside,
        clone_probability,
        clone_probability_for_bits,
    )

    if order == inf:
        return inf
    divergence, failure_probability = 0.0, 0.0
    for release, clients, linked, count in sent:
        bits = min(linked, release.units)
        message_epsilon = bits * release.epsilon
        messages = ceil(release.units / bits) * count
        share = clone_probability_for_bits(message_epsilon) if bits == 1 else clone_probability(message_epsilon)
        # The Rényi divergence of order 1 + t is log E[e^(t * loss)] / t.
        divergence += messages * clone_log_moment(message_epsilon, clients, order, share) / order
        failure_probability += messages * clone_outside(clients, share)
    if failure_probability >= delta:
        return inf
    return max(0.0, divergence + float(_epsilon_for_delta(np.array([order]), delta - failure_probability)[0])) * _UP


def summed_epsilon(sent: Iterable[tuple[GaussianRelease, int, int]], order: float, delta: float) -> float:
    """Return epsilon as :func:`filtered_epsilon`, but against an adversary that sees only sums of lattice points with all clients' noise.

    Args:
        sent: (release of one client, number of clients whose noise counts, its own included, number of times) for each kind.
    """
    return filtered_epsilon([(in_sum(release, clients), count) for release, clients, count in sent], order, delta * (1 - ROUNDED))


def in_sum(release: GaussianRelease, clients: int) -> GaussianRelease:
    """Return ``release`` as it counts if only a sum with the noise of ``clients`` clients is seen: mu is divided by sqrt(clients)."""
    return replace(release, mu=release.mu / sqrt(clients))


def epsilon_needed(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """Return approximately the smallest budget at ``delta`` whose own filter allows all ``releases``.

    A budget fixes the order of its filter, so the budget is searched by bisection. It lies above the smallest epsilon of any order.
    """
    releases = list(releases)
    pure = filtered_epsilon(releases, inf, delta)
    sufficient_budgets = [pure]
    if delta > 0:
        # The best of many fixed orders, rounded as by filter_order, is a lower end. The upper end is likely to suffice; the pure sum does.
        epsilons = np.array([filtered_epsilon(releases, float(f"{order:.3g}"), delta) for order in _ORDERS[::8]])
        low, high = float(epsilons.min()), float(min(pure, epsilons.min() * 4 + 1))
        for _ in range(60):
            middle = (low + high) / 2
            if filtered_epsilon(releases, filter_order(middle, delta), delta) <= middle:
                sufficient_budgets.append(middle)
                high = middle
            else:
                low = middle
    return min(sufficient_budgets)


def _epsilon_for_delta(order: Array, delta: float) -> Array:
    """Return the epsilon that converting a Rényi divergence of order 1 + ``order`` to ``delta`` adds."""
    return np.asarray((renyi_factor(order) - log(delta)) / order)
