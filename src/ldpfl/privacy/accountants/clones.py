"""Amplification by clones: shuffling any epsilon0-LDP report, also of a whole vector (Feldman, McMillan, Talwar 2021).

With probability ``clone_share`` another client's report is a clone: a draw from one of the target's two possible reports, each with
probability 1/2. So the adversary's view is at most as informative as the pair (A + D, C - A + 1 - D). Here C ~ Bin(n - 1, clone_share) is
the number of clones, A ~ Bin(C, 1/2) how many of them look like the target's first report, and D ~ Bern(e^epsilon0 / (1 + e^epsilon0))
the target itself. For an arbitrary, adaptively chosen randomiser the share is e^-epsilon0 (FMT 2021, Theorem 3.1). The larger share
2 / (e^epsilon0 + 1) is proved here only for binary randomised response, where it is elementary (the blanket of Balle et al. 2019). Even
there the count alone reveals less, see ``shuffled_bits.py``.
"""

from __future__ import annotations

from math import exp, inf, log, log1p

import numpy as np

from ldpfl.privacy.accountants.binomial import Array, Binomial, binomial_quantile, log_sigmoid, sigmoid
from ldpfl.privacy.accountants.losses import from_curve
from ldpfl.privacy.accountants.randomized_response import composed_epsilon, report_delta
from ldpfl.util.lazy_imports import optimize

_POINTS = 2048
"""Number of steps of the grid of epsilons on which the rounds are convolved."""

_COIN_CELLS = 64
"""Number of values that the number of clones is rounded down to, before a convolution. It saves time."""

_OUTSIDE = 1e-30
"""Probability of the numbers of clones that are left out."""

_ROUNDED = 1e-15
"""Allowance for rounding in a delta or a tiny epsilon: some ten times the largest error in comparisons with 40 digits."""

_HIDES_NOTHING = 30.0
"""Largest epsilon that is computed. Above it, even among 1e10 others there is a clone with probability below 1e-3 only."""


def clone_probability(epsilon0: float) -> float:
    """Return the probability that another client's report is a clone, for an arbitrary epsilon0-LDP randomiser."""
    return exp(-epsilon0)


def clone_probability_for_bits(epsilon0: float) -> float:
    """Return the probability that another client's report is a clone, for a bit by randomised response.

    The bit may be about a known coordinate, or about one that its client drew in secret.
    """
    return 2 * sigmoid(-epsilon0)


def clone_log_moment(epsilon0: float, clients: int, order: float, clone_share: float) -> float:
    """Return an upper bound of log E[e^(order * loss)] of one report that hides among clones (reports like it from other clients).

    The loss is that of the pair of distributions in the module's docstring. The bound assumes the smallest likely number of clones, since
    fewer clones hide less. With the tiny probability :func:`clone_outside` there are fewer, and the bound does not hold. The computation
    takes milliseconds for any number of clients.
    """
    clones = _fewest_clones(clients, clone_share) if epsilon0 <= _HIDES_NOTHING else 0
    # A is the number of clones that look like the target's first report, and D, the target itself, is 1 with probability p1 or p0.
    _, logs = Binomial(clones, 0.0).log_pmf()  # of A: a clone looks like either report with probability 1/2
    with_report, without = np.append(-np.inf, logs), np.append(logs, -np.inf)  # of A + D if D is 1, and if D is 0
    log_p1, log_p0 = log_sigmoid(epsilon0), log_sigmoid(-epsilon0)
    # Log probabilities of A + D for the target's two inputs.
    first, second = (
        np.logaddexp(log_with + with_report, log_without + without) for log_with, log_without in ((log_p1, log_p0), (log_p0, log_p1))
    )
    # What a window of the binomial leaves out is below 1e-30, and no loss exceeds epsilon0.
    inside = float(np.logaddexp.reduce(first + order * np.minimum(first - second, epsilon0)))
    return min(order * epsilon0, max(0.0, float(np.logaddexp(inside, log(_OUTSIDE) + order * epsilon0))))


def clone_outside(clients: int, clone_share: float) -> float:
    """Return the probability that there are fewer clones than :func:`clone_log_moment` assumes. Its callers add this to delta."""
    return _OUTSIDE if _fewest_clones(clients, clone_share) else 0.0


def _fewest_clones(clients: int, clone_share: float) -> int:
    """Return the smallest likely number of clones: there are fewer with a probability of at most ``_OUTSIDE``."""
    if clone_share >= 1:
        return clients - 1
    return max(0, binomial_quantile(_OUTSIDE, clients - 1, clone_share) - 1)


def clone_delta(epsilon0: float, clients: int, epsilon: float, clone_share: float) -> float:
    """Return an upper bound of delta(``epsilon``) of one ``epsilon0``-LDP report, shuffled among those of ``clients`` clients.

    With the probability ``clone_share``, another client's report is a clone: it is distributed as if it came from this client.
    """
    if epsilon0 > _HIDES_NOTHING:
        return report_delta(epsilon0, epsilon)
    return float(_deltas(epsilon0, np.array([float(epsilon)]), *_clone_counts(clients, clone_share))[0])


def clone_epsilon(epsilon0: float, clients: int, delta: float, clone_share: float) -> float:
    """Return the smallest epsilon at ``delta`` for one report of each of ``clients`` clients, by clones; never above ``epsilon0``.

    ``clone_share`` is the probability that another client's report is a clone.
    """
    if epsilon0 > _HIDES_NOTHING:
        return composed_epsilon(epsilon0, 1, delta)
    if delta <= 0:
        return epsilon0
    counts, weights = _clone_counts(clients, clone_share)

    def excess(epsilon: float) -> float:
        """Return delta at this epsilon, less the given ``delta``."""
        return float(_deltas(epsilon0, np.array([float(epsilon)]), counts, weights)[0]) - delta

    at_zero = excess(0.0)
    if at_zero <= -_ROUNDED:
        return 0.0
    epsilon_found = float(optimize.brentq(excess, 0.0, epsilon0, xtol=1e-13 * max(epsilon0, 1e-3), rtol=1e-12)) if at_zero > 0 else 0.0
    return min(epsilon0, epsilon_found + 2e-12 * epsilon0 + _ROUNDED)  # added: more than the tolerance of the root


def composed_clone_epsilon(epsilon0: float, clients: int, rounds: int, delta: float, clone_share: float) -> float:
    """Return an upper bound of epsilon at ``delta`` for ``rounds`` rounds with one shuffled report of each client. It holds adaptively.

    It is the smaller of two bounds: the convolution of the rounds with clones, and the local composition. ``clone_share`` is the
    probability that another client's report is a clone.
    """
    local = composed_epsilon(epsilon0, rounds, delta)
    if rounds == 0 or epsilon0 > _HIDES_NOTHING:
        return local
    if rounds == 1:
        return min(local, clone_epsilon(epsilon0, clients, delta, clone_share))
    if delta <= 0:
        return local
    # The grid of epsilons ends where all rounds together have a ten-thousandth of the given delta: a longer grid would gain nothing.
    negligible_epsilon = clone_epsilon(epsilon0, clients, 1e-4 * delta / rounds, clone_share)
    if negligible_epsilon == 0:  # no grid has the step 0; the local bound always holds
        return local
    step = negligible_epsilon / _POINTS
    counts, weights = _in_cells(*_clone_counts(clients, clone_share))
    curve = _deltas(epsilon0, step * np.arange(_POINTS + 1), counts, weights)
    return min(local, from_curve(curve, step).composed_epsilon(rounds, delta))


def _clone_counts(clients: int, clone_share: float) -> tuple[Array, Array]:
    """Return the possible numbers of clones and their probabilities. Numbers left out have a total probability below 1e-30.

    A clone is another client whose report is drawn independently of its own data, which has the probability ``clone_share``.
    """
    log_odds = inf if clone_share >= 1 else log(clone_share) - log1p(-clone_share)
    if log_odds == inf or clients == 1:
        return np.array([float(clients - 1)]), np.ones(1)
    low, logs = Binomial(clients - 1, log_odds).log_pmf()
    return low + np.arange(logs.size, dtype=np.float64), np.exp(logs)


def _in_cells(counts: Array, weights: Array) -> tuple[Array, Array]:
    """Round the numbers of clones down to a few values. This is safe, since fewer clones hide less."""
    if counts.size <= _COIN_CELLS:
        return counts, weights
    starts = np.linspace(0, counts.size, _COIN_CELLS, endpoint=False).astype(np.int64)
    return counts[starts], np.add.reduceat(weights, starts)


def _deltas(epsilon0: float, epsilons: Array, counts: Array, weights: Array) -> Array:
    """Return delta at each of ``epsilons`` of a report that hides among clones: a mean over the numbers C of clones, ``counts``.

    Their probabilities are ``weights``. For each C, delta is a difference of two upper tails of A ~ Bin(C, 1/2), the number of clones that
    look like the target's first report.
    """
    from scipy.stats import binom  # slow to import

    p1, p0 = sigmoid(epsilon0), sigmoid(-epsilon0)
    deltas = np.zeros_like(epsilons)
    for index, epsilon in enumerate(epsilons.tolist()):
        if epsilon >= epsilon0:
            continue
        largest_delta = p1 - exp(epsilon) * p0  # no delta is larger
        if largest_delta <= 0:
            continue
        # The likelihood ratio of a count a rises with a / (C - a + 1). It exceeds e^epsilon where that fraction exceeds ``border``.
        border = (exp(epsilon) * p1 - p0) / largest_delta
        smallest_a = np.minimum(np.floor(border * (counts + 1) / (1 + border)), counts) + 1  # counts + 1: all clones, and the report
        # The target adds 1 to the count, or 0: the tails are P(A >= smallest_a - 1) and P(A >= smallest_a).
        gain = largest_delta * binom.sf(smallest_a - 2, counts, 0.5)
        loss = (exp(epsilon) * p1 - p0) * binom.sf(smallest_a - 1, counts, 0.5)
        deltas[index] = float(np.dot(weights, np.maximum(gain - loss, 0.0)))
    return deltas
