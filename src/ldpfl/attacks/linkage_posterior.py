"""How an observer guesses senders by arrival times: the probability that a report is of a window, and how often such guesses are right.

In shapes, d is the number of parameters and n the number of clients, and so of windows. A client sends one report for each parameter.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import ndtr
from scipy.stats import mannwhitneyu

Array = NDArray[np.floating[Any]]

CONFIDENCE = 0.9
"""A report counts as linked to a window from this probability on."""

_NEGLIGIBLE = 1e-6
"""Share of the delay below which jitter blurs the ends of a window less than rounding does."""

PASSES = 12
"""Number of passes of Sinkhorn's scaling."""


def arrival_density(lag: Array, delay: float, jitter: float) -> Array:
    """Return the density of an arrival at ``lag`` seconds after its window's start, up to a factor that is the same for all lags.

    It arrives after a delay, uniform on (0, ``delay``), plus a normal error of standard deviation ``jitter``, both in seconds.
    """
    if delay == jitter == 0:
        return np.asarray((lag == 0).astype(lag.dtype))
    distance = np.abs(lag - delay / 2)
    if jitter < _NEGLIGIBLE * delay:
        return np.asarray((distance <= delay * (0.5 + 10 * _NEGLIGIBLE)).astype(lag.dtype))  # uniform; a little wider, for rounding
    if delay < 1e-3 * jitter:  # the density is nearly normal, and the difference below would lose its digits
        return np.asarray(np.exp(-((distance / jitter) ** 2) / 2))
    # The density is symmetric; in the lower tail nothing cancels.
    return np.asarray(ndtr((delay / 2 - distance) / jitter) - ndtr(-(delay / 2 + distance) / jitter))


def matching_probabilities(weights: Array, passes: int = PASSES) -> Array:
    """Return nearly the probability of each pair in a random matching, by scaling rows and columns of ``weights`` (..., n, n).

    Each row then sums to 1, and each column almost. The probabilities are exact if all matchings are equally likely, or if only one is
    possible. In other cases they are less extreme than the exact ones, in almost the same order.

    Source: Sinkhorn 1967; that it approximates marginals weighted by permanents, Linial, Samorodnitsky, Wigderson 2000 (from memory).
    """
    probabilities = separate_probabilities(weights)
    for _ in range(passes):
        probabilities /= np.maximum(probabilities.sum(axis=-2, keepdims=True), 1e-30)
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
    return np.asarray(probabilities)


def separate_probabilities(weights: Array) -> Array:
    """Return the exact probability that each report is from each window, given the report's own arrival time and no other report's."""
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def client_probabilities(posterior: Array, owners: Array) -> Array:
    """Return the probability (d, n, n) that each report is from each client, for d parameters and n clients.

    A window is the time in which one client sends, so there are n windows. ``posterior[k, i, w]`` is the probability that report i of
    parameter k was sent in window w, and ``owners[w, c]`` that window w is that of client c. One large matrix product is much faster than
    one for each parameter.
    """
    return np.asarray((posterior.reshape(-1, len(owners)) @ owners).reshape(posterior.shape))


def probability_right(posterior: Array, axis: int) -> Array:
    """Return the probability (d, n) that the guess with the largest posterior along ``axis`` is right. A tie is decided at random.

    ``posterior`` (d, n, n) is for d parameters and n clients. For each parameter, the true pairs are on the diagonal.
    """
    tied = posterior >= posterior.max(axis=axis, keepdims=True) * (1 - 1e-5)  # a difference by rounding is a tie
    return np.asarray(np.diagonal(tied, axis1=1, axis2=2) / np.count_nonzero(tied, axis=axis))


def pair_scores(posterior: Array, pairs: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the probability, by ``posterior`` (d, n, n), that two reports, for different parameters, come from one window.

    The first result is for ``pairs`` random pairs of one client, the second for as many pairs of different clients. ``posterior`` has the
    probability that a client's report for a parameter is from a window: axes parameter, client, window.
    """
    parameters, clients, _ = posterior.shape
    first = generator.integers(parameters, size=pairs)
    second = (first + generator.integers(1, parameters, size=pairs)) % parameters  # uniform among the parameters other than the first
    client = generator.integers(clients, size=pairs)
    other = (client + generator.integers(1, clients, size=pairs)) % clients  # likewise
    first_posterior = posterior[first, client]
    same_client, different_clients = posterior[second, client], posterior[second, other]
    # For each pair p, the sum over windows k of the probability that both reports are from k.
    return np.einsum("pk,pk->p", first_posterior, same_client), np.einsum("pk,pk->p", first_posterior, different_clients)


def area_under_curve(alike: Array, unlike: Array) -> float:
    """Return the probability that a score of ``alike`` is higher than one of ``unlike``; ties count half (Mann and Whitney)."""
    largest = max(float(alike.max()), float(unlike.max()), 1e-30)
    # Scores that differ only by rounding are ties.
    wins = mannwhitneyu(np.round(alike / largest, 6), np.round(unlike / largest, 6), method="asymptotic").statistic
    return float(wins / (alike.size * unlike.size))


def max_linked_reports(scores: Array, hits: Array, sure: NDArray[np.bool_]) -> int:
    """Return the maximum number of reports that are linked to one window, each with a probability of ``CONFIDENCE`` or more.

    A window is the time span in which one client sends its reports.

    Args:
        scores: (d, n) the best report's score for each of d parameters and n windows.
        hits: (d, n) probability that this report is from the window.
        sure: (d, n) whether the report's own arrival time alone links it to the window.

    A score is lower than the probability that the guess is right, so it is calibrated: it counts as the share of right guesses among those
    with this score. An observer would estimate that share in simulated rounds. Here it is estimated for each half of the parameters on the
    other half, which is independent.
    """
    half = len(scores) // 2
    linked = sure.copy()
    for judged, rehearsed in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        linked[judged] |= scores[judged] >= _confident_score(scores[rehearsed].ravel(), hits[rehearsed].ravel())
    return int(np.count_nonzero(linked, axis=0).max())


def _confident_score(scores: Array, hits: Array) -> float:
    """Return the lowest score from which on guesses are right with a probability of ``CONFIDENCE``; infinite if there is none.

    One wrong guess is added above the highest score, so that a few lucky guesses do not suffice.
    """
    order = np.argsort(scores, kind="stable")
    share_of_hits = isotonic_regression(np.append(hits[order], 0.0)).x[:-1]  # rises with the score; without the added guess
    confident = np.flatnonzero(share_of_hits >= CONFIDENCE - 1e-9)  # the share may be a little lower by rounding
    return float(scores[order[confident[0]]]) if confident.size else inf
