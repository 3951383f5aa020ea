"""Gaussian noise on the sum of a secret sample: each record is in a round's batch with the same probability, by a coin of its own.

Replacing a record moves the sum of a batch that has it by 2 C, and one that does not by nothing. With the rest of the batch fixed, the
two laws are mixtures with a common part, for which Balle, Barthe and Gaboardi 2018 (Theorem 2) give, e^a = 1 + (e^epsilon - 1) / q
and b = e^(epsilon - a),

    delta(epsilon) <= q ((1 - b) delta_half(a) + b delta_full(a)),

delta_full of noise for a distance of 2 C, delta_half for one of C: a batch with one record against one with neither, or with the other.
That holds for every rest of the batch, and so for their mixture (joint convexity). The curve is composed by convolution.

Or else the record is removed, and the other one added: with epsilon and delta for each of the two steps, which dp-accounting composes
exactly, replacing has 2 epsilon and (1 + e^epsilon) delta. The smaller one holds: as a rule the first for large q, the second for small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, expm1, inf, log, log1p, sqrt

from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accountants.losses import PrivacyCurve, composed_curves

_LARGEST_MU = 10.0
"""Beyond it nothing is protected, and dp-accounting takes gigabytes to say so."""

_MOST_ROUNDS = 10**6
_LARGEST_SUM_OF_MU = 1000.0
"""What the central limit theorem makes of all rounds."""

_SMALLEST_MU = 1e-12
"""Below it dp-accounting overflows; more always costs more."""

_OVERFLOWS = 700.0

Sampled = tuple[float, float, int]
"""mu of the whole batch when a record is replaced, the probability of being in it, and the number of rounds."""


def sampled_delta(mu: float, rate: float, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of one round that a record joins with probability ``rate``, when it is replaced."""
    if epsilon < _OVERFLOWS:
        ratio = expm1(epsilon) / rate
        inner = log1p(ratio) if ratio < inf else log(expm1(epsilon) + rate) - log(rate)
        shared = min(1.0, exp(epsilon - inner))
    else:  # what e^epsilon + q - 1 has less than e^epsilon is less than rounding, which is taken off
        inner, shared = (epsilon - log(rate)) * (1 - 1e-15), rate
    return rate * ((1 - shared) * gaussian_delta(mu / 2, inner) + shared * gaussian_delta(mu, inner))


def sampled_epsilon(rounds: Sequence[Sampled], delta: float) -> float:
    """Return a certified epsilon for ``delta`` when one record is replaced; adaptive, and never more than without sampling."""
    whole = gaussian_epsilon(composed_mu(mu * sqrt(count) for mu, _, count in rounds), delta)
    if delta <= 0 or all(rate == 1 for _, rate, _ in rounds):
        return whole
    curves = [PrivacyCurve(lambda epsilon, mu=mu, rate=rate: sampled_delta(mu, rate, epsilon), inf, count) for mu, rate, count in rounds]  # type: ignore[misc]
    two = inf if _takes_long(rounds) else _in_two_steps(tuple(rounds), delta)
    return min(whole, composed_curves(curves, delta), two)


def sampled_distance(rounds: Sequence[Sampled]) -> float:
    """Return an upper bound of the total variation distance when one record is replaced: twice that of adding or removing it."""
    return 1.0 if _takes_long(rounds) else min(1.0, 2 * float(_added_or_removed(tuple(rounds)).get_delta(0.0)))


_LARGEST_SUM = 50.0
"""Epsilon beyond which two steps are not looked at: what is left of delta is lost to rounding."""


def _in_two_steps(rounds: tuple[Sampled, ...], delta: float) -> float:
    accountant = _added_or_removed(rounds)
    low, high = added_epsilon(rounds, delta), added_epsilon(rounds, delta / 1e3)
    while high <= _LARGEST_SUM and (1 + exp(high)) * accountant.get_delta(high) > delta:
        high *= 1.5
    if high > _LARGEST_SUM:
        return inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if (1 + exp(middle)) * accountant.get_delta(middle) <= delta else (middle, high)
    return 2 * high


def added_epsilon(rounds: Sequence[Sampled], delta: float) -> float:
    """Return epsilon for ``delta`` when one record is added or removed, which is what most tools for DP-SGD state; by dp-accounting.

    Where nothing is protected anyway it is that of records which are there for certain, which is no smaller.
    """
    whole = gaussian_epsilon(composed_mu(mu / 2 * sqrt(count) for mu, _, count in rounds), delta)
    if delta <= 0 or all(rate == 1 for _, rate, _ in rounds) or _takes_long(rounds):
        return whole
    return min(whole, float(_added_or_removed(tuple(rounds)).get_epsilon(delta)))


def _takes_long(rounds: Sequence[Sampled]) -> bool:
    """Tell whether dp-accounting needs minutes, or gigabytes, for ``rounds``: very many, or such that protect nothing."""
    if max(mu for mu, _, _ in rounds) > _LARGEST_MU or sum(count for _, _, count in rounds) > _MOST_ROUNDS:
        return True
    return sum(count * rate**2 * expm1(mu**2 / 4) for mu, rate, count in rounds) > _LARGEST_SUM_OF_MU**2


@lru_cache(maxsize=16)
def _added_or_removed(rounds: tuple[Sampled, ...]) -> PLDAccountant:
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for mu, rate, count in rounds:
        event = GaussianDpEvent(2 / max(mu, _SMALLEST_MU))
        accountant.compose(SelfComposedDpEvent(event if rate == 1 else PoissonSampledDpEvent(rate, event), count))
    return accountant
