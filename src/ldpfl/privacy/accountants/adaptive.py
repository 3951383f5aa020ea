"""A budget that holds however each report was chosen, also after all earlier ones were seen: a privacy filter.

Composition theorems that pick the best of several bounds afterwards need figures that were fixed beforehand. A server chooses the
next epsilon by what it saw, and so may always go on where chance was on its side: of 30 reports at 0.5, accounted exactly, it can
replace the second half by two of 1.8 and four of 0.5 where that fits, and stay within the budget's epsilon at 1.6 times its
delta.

The rule here: a report may leave if, with it, at least one of two sums stays within the budget's epsilon. One is that of the pure costs.
The other is that of the Renyi divergences of one order, fixed with the budget, plus what that order pays for delta.

Proof that the whole is (epsilon, delta)-DP. If every path kept the second sum, then the Renyi divergence of the whole would be at most
the sum's bound (Feldman & Zrnic 2021, Theorem 3.1), and that gives delta (Canonne, Kamath, Steinke 2020, Proposition 12). A path on
which the second sum is exceeded keeps the first one to its end: its loss is at most epsilon there, and it adds nothing to delta. Cut
all such paths before the report with which they exceed the second sum: all others stay as they are, and now every path keeps it. So
delta is no larger than that of a tree that keeps the second sum throughout.
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
"""More than what divergences of reports at 1e-9 lose by rounding, and sums of thousands of them."""

_ORDERS = 10.0 ** np.linspace(-8, 6, 2801)
"""Of which one is fixed: by how much an order exceeds 1."""


@lru_cache(maxsize=256)
def filter_order(epsilon: float, delta: float) -> float:
    """Return t, for the Renyi order 1 + t that a budget of ``epsilon`` at ``delta`` is kept by: infinite where the pure sum alone counts.

    It lets the most reports through where each of them costs next to nothing, that is (1 + t) rho for the same rho at all orders.
    """
    if delta <= 0 or epsilon <= 0:
        return inf
    room = (epsilon - _price(_ORDERS, delta)) / (1 + _ORDERS)
    # To three digits: what other machines round differently changes nothing.
    return float(f"{_ORDERS[int(np.argmax(room))]:.3g}") if room.max() > 0 else inf


def filtered_epsilon(releases: Iterable[tuple[Release, int]], order: float, delta: float) -> float:
    """Return the smallest epsilon for which the rule above, at the order 1 + ``order``, lets all ``releases`` through, rounded up."""
    composed = accountant(releases)
    pure = composed.epsilon(0.0)
    if order == inf or delta <= 0 or not all(release.protected for release in composed.releases):
        return pure
    t = np.array([order])
    return min(pure, max(0.0, float((composed.divergence(t) + _price(t, delta))[0])) * _UP) if composed.releases else 0.0


def hidden_epsilon(sent: Iterable[tuple[BinaryRelease, int, int, int]], order: float, delta: float) -> float:
    """Return the same against who sees what a relay lets through, by the divergences of that order alone; infinite if none is known.

    Args:
        sent: bits that were released, the clients that they were hidden among, how many travelled together, and how often.
    """
    from ldpfl.privacy.accountants.clones import any_report, binary_report, clone_log_moment, clone_outside  # most nodes need none of it

    if order == inf:
        return inf
    divergence, missed = 0.0, 0.0
    for release, clients, linked, count in sent:
        bits = min(linked, release.units)
        epsilon, records = bits * release.epsilon, ceil(release.units / bits) * count
        share = binary_report(epsilon) if bits == 1 else any_report(epsilon)
        divergence += records * clone_log_moment(epsilon, clients, order, share) / order
        missed += records * clone_outside(clients, share)
    if missed >= delta:
        return inf
    return max(0.0, divergence + float(_price(np.array([order]), delta - missed)[0])) * _UP


def summed_epsilon(sent: Iterable[tuple[GaussianRelease, int, int]], order: float, delta: float) -> float:
    """Return the same against who sees nothing but sums of lattice points, in which the noise of all clients adds up.

    Args:
        sent: what one client released, the clients whose noise counts, its own included, and how often.
    """
    return filtered_epsilon([(in_sum(release, clients), count) for release, clients, count in sent], order, delta * (1 - ROUNDED))


def in_sum(release: GaussianRelease, clients: int) -> GaussianRelease:
    """Return what is left of a release where only a sum is seen, with the noise of ``clients``."""
    return replace(release, mu=release.mu / sqrt(clients))


def epsilon_needed(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """Return about the smallest budget, at ``delta``, whose own rule lets all ``releases`` through."""
    counted = list(releases)
    pure = filtered_epsilon(counted, inf, delta)
    candidates = [pure]
    if delta > 0:
        each = np.array([filtered_epsilon(counted, float(f"{order:.3g}"), delta) for order in _ORDERS[::8]])
        low, high = float(each.min()), float(min(pure, each.min() * 4 + 1))
        for _ in range(60):
            middle = (low + high) / 2
            if filtered_epsilon(counted, filter_order(middle, delta), delta) <= middle:
                candidates.append(middle)
                high = middle
            else:
                low = middle
    return min(candidates)


def _price(order: Array, delta: float) -> Array:
    """What an order pays for ``delta``."""
    return np.asarray((renyi_factor(order) - log(delta)) / order)
