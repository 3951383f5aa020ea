"""Gaussian noise on the sum of a Poisson sample: each record is in a round's batch independently with probability q. The sample is secret.

The result is the smaller of two bounds. The first is usually smaller for large q, the second for small q.

First bound, for replacing a record. With C the clipping norm, that moves the sum of a batch with the record by up to 2 C, and does not
change other batches. With the rest of the batch fixed, the two laws are mixtures with a common part. For these, Balle, Barthe and Gaboardi
2018 (Theorem 2) give, with e^a = 1 + (e^epsilon - 1) / q and b = e^(epsilon - a),

    delta(epsilon) <= q ((1 - b) delta_half(a) + b delta_full(a)).

Here delta_full compares batches with either record (distance 2 C), and delta_half a batch with one record and a batch with neither
(distance C). The bound holds for every rest of the batch, and so for their mixture (joint convexity). The curve is composed by convolution.

Second bound: remove the record, and add the other one. dp-accounting composes each of the two steps exactly, with some epsilon and delta.
Replacing then has 2 epsilon and (1 + e^epsilon) delta.
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
"""Largest mu of a round for dp-accounting. Above it nothing is protected, and dp-accounting takes gigabytes."""

_MOST_ROUNDS = 10**6
"""Largest number of rounds for dp-accounting."""
_LARGEST_SUM_OF_MU = 1000.0
"""Largest mu of all rounds by the central limit theorem, for dp-accounting."""

_SMALLEST_MU = 1e-12
"""Smaller values of mu are raised to this, which is safe, because dp-accounting overflows below it."""

_OVERFLOWS = 700.0
"""Epsilon from which e^epsilon may overflow."""

Sampled = tuple[float, float, int]
"""mu of the whole batch when a record is replaced, the probability of being in it, and the number of rounds."""


def sampled_delta(mu: float, rate: float, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) of one round that a record joins with probability ``rate``, when it is replaced.

    It is the first bound of this module: the epsilon without sampling is a, and b = e^(epsilon - a) is the weight of replacing the record.
    """
    if epsilon < _OVERFLOWS:
        ratio = expm1(epsilon) / rate  # may be infinite for a tiny rate
        a = log1p(ratio) if ratio < inf else log(expm1(epsilon) + rate) - log(rate)
        b = min(1.0, exp(epsilon - a))
    else:  # e^epsilon + q - 1 equals e^epsilon up to rounding; the factor makes the result safe
        a, b = (epsilon - log(rate)) * (1 - 1e-15), rate
    return rate * ((1 - b) * gaussian_delta(mu / 2, a) + b * gaussian_delta(mu, a))


def sampled_epsilon(rounds: Sequence[Sampled], delta: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for replacing one record. It is never more than the epsilon without sampling.

    Later rounds may depend on the outputs of earlier ones. Each of ``rounds`` is (mu, sampling rate, number of rounds).
    """
    unsampled = gaussian_epsilon(composed_mu(mu * sqrt(count) for mu, _, count in rounds), delta)
    if delta <= 0 or all(rate == 1 for _, rate, _ in rounds):
        return unsampled
    curves = [PrivacyCurve(lambda epsilon, mu=mu, rate=rate: sampled_delta(mu, rate, epsilon), inf, count) for mu, rate, count in rounds]  # type: ignore[misc]
    second_bound = inf if _takes_long(rounds) else _remove_then_add_epsilon(tuple(rounds), delta)
    return min(unsampled, composed_curves(curves, delta), second_bound)


def sampled_distance(rounds: Sequence[Sampled]) -> float:
    """Return an upper bound of the total variation distance for replacing one record: twice that of adding or removing one."""
    if _takes_long(rounds):
        return 1.0  # always holds
    return min(1.0, 2 * float(_add_or_remove_accountant(tuple(rounds)).get_delta(0.0)))  # the distance is delta at epsilon 0


_LARGEST_SUM = 50.0
"""Largest epsilon of the second bound. Above it the remaining delta is lost to rounding."""


def _remove_then_add_epsilon(rounds: tuple[Sampled, ...], delta: float) -> float:
    """Return epsilon at ``delta`` for removing one record and adding another; infinite where it is too large to be reliable.

    With some epsilon and delta for each of the two steps, both together have 2 epsilon and (1 + e^epsilon) delta. The smallest epsilon for
    which that is at most ``delta`` is found by bisection.
    """
    accountant = _add_or_remove_accountant(rounds)
    low = added_epsilon(rounds, delta)  # too small, since its delta is multiplied by 1 + e^epsilon
    high = added_epsilon(rounds, delta / 1e3)  # raised below until it suffices
    while high <= _LARGEST_SUM and (1 + exp(high)) * accountant.get_delta(high) > delta:
        high *= 1.5
    if high > _LARGEST_SUM:
        return inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if (1 + exp(middle)) * accountant.get_delta(middle) <= delta else (middle, high)
    return 2 * high


def added_epsilon(rounds: Sequence[Sampled], delta: float) -> float:
    """Return epsilon at ``delta`` for adding or removing one record, as most tools for DP-SGD state it; by dp-accounting.

    If dp-accounting would take too long, it is the epsilon without sampling, which is no smaller.
    """
    unsampled = gaussian_epsilon(composed_mu(mu / 2 * sqrt(count) for mu, _, count in rounds), delta)
    if delta <= 0 or all(rate == 1 for _, rate, _ in rounds) or _takes_long(rounds):
        return unsampled
    return min(unsampled, float(_add_or_remove_accountant(tuple(rounds)).get_epsilon(delta)))


def _takes_long(rounds: Sequence[Sampled]) -> bool:
    """Whether dp-accounting would need minutes, or gigabytes: very many rounds, or rounds that hardly protect anything."""
    if max(mu for mu, _, _ in rounds) > _LARGEST_MU or sum(count for _, _, count in rounds) > _MOST_ROUNDS:
        return True
    # By the central limit theorem, all rounds together are about as private as one Gaussian release whose squared mu is this sum. Here
    # ``mu`` is for replacing a record. dp-accounting adds or removes one, which moves a batch half as far: hence (mu / 2)^2.
    return sum(count * rate**2 * expm1(mu**2 / 4) for mu, rate, count in rounds) > _LARGEST_SUM_OF_MU**2


@lru_cache(maxsize=16)
def _add_or_remove_accountant(rounds: tuple[Sampled, ...]) -> PLDAccountant:
    """Return dp-accounting's accountant of ``rounds`` for adding or removing one record, cached.

    Adding a record moves a sum half as far as replacing it, for which ``rounds`` have mu. So the noise multiplier is 2 / mu.
    """
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for mu, rate, count in rounds:
        event = GaussianDpEvent(2 / max(mu, _SMALLEST_MU))
        accountant.compose(SelfComposedDpEvent(event if rate == 1 else PoissonSampledDpEvent(rate, event), count))
    return accountant
