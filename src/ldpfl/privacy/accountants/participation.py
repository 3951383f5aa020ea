"""Amplification by secret participation (random check-in): nobody knows which clients took part in a round.

A cohort that the server chose, or that anyone can see, does not amplify: then account only the rounds that a client really joined. Here
every client joins independently with probability q, and only the number K of reports is seen. Given K, the target of n clients is among
them with probability g = K / n. For a random subset of fixed size under replacement,
delta'(epsilon) = g delta_K(log(1 + (e^epsilon - 1) / g)) (Balle, Barthe, Gaboardi 2018). This is averaged over K. One coin decides for all
weights of a round, so amplification is applied after composing the weights and before composing the rounds.
"""

from __future__ import annotations

from math import log, log1p

import numpy as np
from numpy.typing import NDArray

from ldpfl.privacy.accountants.binomial import Array, Binomial
from ldpfl.privacy.accountants.losses import from_curve
from ldpfl.privacy.accountants.shuffled_bits import shuffled_losses
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, round_curve, round_limit

_POINTS = 4096  # epsilons, apart from 0, at which the curve of one round is computed
_WIDTH = 1.03
"""Largest ratio of the cohort sizes that are merged into one cell."""

_NEGLIGIBLE = 1e-9  # largest probability of the cohort sizes that are left out


def unamplified_epsilon(epsilon: float | Array, share: float) -> Array:
    """Return the epsilon before amplification that becomes ``epsilon`` after it: log(1 + (e^epsilon - 1) / g).

    g = ``share`` is the probability that the target takes part.
    """
    epsilon = np.asarray(epsilon, dtype=np.float64)
    if share == 1:
        return epsilon
    large = np.maximum(epsilon, 1.0)  # log((e^epsilon - (1 - g)) / g) without overflow
    return np.where(
        epsilon < 1.0, np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / share), large - log(share) + np.log1p((share - 1) * np.exp(-large))
    )


def self_sampled_round_delta(setting: ShuffledRounds, rate: float, epsilon: float) -> float:
    """Return an upper bound of delta(``epsilon``) for one round of ``setting.reports`` shuffled bits, joined with probability ``rate``."""
    return float(_round_curve(setting, rate, np.array([epsilon]), _NEGLIGIBLE)[0])


def self_sampled_epsilon(setting: ShuffledRounds, rate: float, delta: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for all rounds of ``setting``. Each client joins each round with probability ``rate``.

    Later inputs may depend on earlier outputs. Return infinity if no bound is found; then use the local composition.
    """
    negligible = min(_NEGLIGIBLE, 1e-4 * delta / setting.rounds)
    sizes, _, _ = cohort_sizes(setting.clients, rate, negligible)
    smallest_cohort = int(sizes[0])  # in it epsilon is largest
    step = round_limit(shuffled_losses(setting.epsilon0, smallest_cohort), setting.reports, negligible) / _POINTS
    curve = _round_curve(setting, rate, step * np.arange(_POINTS + 1), negligible)
    return from_curve(curve, step).composed_epsilon(setting.rounds, delta)


def cohort_sizes(clients: int, rate: float, negligible: float) -> tuple[NDArray[np.int64], Array, float]:
    """Return the likely cohort sizes, their probabilities, and the total probability (at most ``negligible``) of other sizes.

    Size 0 counts neither as likely nor as other, since an empty round releases nothing.
    """
    if rate == 1:
        return np.array([clients]), np.ones(1), 0.0
    low, logs = Binomial(clients, log(rate) - log1p(-rate)).log_pmf()
    sizes, weights = low + np.arange(logs.size), np.exp(logs)
    likely = (np.cumsum(weights) > negligible / 2) & (np.cumsum(weights[::-1])[::-1] > negligible / 2) & (sizes > 0)
    left_out = float(weights[~likely & (sizes > 0)].sum())
    return sizes[likely], weights[likely], left_out


def _round_curve(setting: ShuffledRounds, rate: float, epsilons: Array, negligible: float) -> Array:
    """Return an upper bound of delta at ``epsilons`` of one round, averaged over the cohort size.

    Neighbouring sizes are merged to a cell, in the safe direction. A client hides among as few others as in the cell's smallest cohort, and
    takes part with the probability that belongs to its largest cohort. ``negligible`` bounds the probability of sizes that are left out.
    """
    sizes, weights, other_sizes_probability = cohort_sizes(setting.clients, rate, negligible)
    curve = np.full_like(epsilons, other_sizes_probability + 1e-15)  # plus an allowance for rounding
    first = 0
    while first < sizes.size:
        last = int(np.searchsorted(sizes, sizes[first] * _WIDTH, side="right")) - 1
        share = float(sizes[last]) / setting.clients
        losses = shuffled_losses(setting.epsilon0, int(sizes[first]))
        deltas = round_curve(losses, setting.reports, unamplified_epsilon(epsilons, share), negligible)
        curve += float(weights[first : last + 1].sum()) * share * deltas
        first = last + 1
    return curve
