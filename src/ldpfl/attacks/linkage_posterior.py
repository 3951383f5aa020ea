"""What an observer of arrival times makes of them: how probably each report is of each window, and how good such guesses are."""

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
"""Jitter below this share of T blurs the ends of a window less than rounding does."""

PASSES = 12
"""Number of passes of Sinkhorn's scaling."""


def arrival_density(lag: Array, delay: float, jitter: float) -> Array:
    """Return the density of D + J at ``lag`` seconds after a window's start, up to a factor that is the same for all lags."""
    if delay == jitter == 0:
        return np.asarray((lag == 0).astype(lag.dtype))
    distance = np.abs(lag - delay / 2)
    if jitter < _NEGLIGIBLE * delay:
        return np.asarray((distance <= delay * (0.5 + 10 * _NEGLIGIBLE)).astype(lag.dtype))
    if delay < 1e-3 * jitter:
        return np.asarray(np.exp(-((distance / jitter) ** 2) / 2))
    # The density is symmetric; in the lower tail nothing cancels.
    return np.asarray(ndtr((delay / 2 - distance) / jitter) - ndtr(-(delay / 2 + distance) / jitter))


def scaled(weights: Array, passes: int = PASSES) -> Array:
    """Scale ``weights`` (..., n, n) so that each row sums to 1 and each column almost to 1: nearly the marginals of a random matching.

    The marginals are exact if all matchings are equally likely, or if only one is possible. In other cases they are less extreme than the
    exact ones, in almost the same order.

    Source: Sinkhorn 1967; that it approximates marginals weighted by permanents, Linial, Samorodnitsky, Wigderson 2000 (from memory).
    """
    result = each_alone(weights)
    for _ in range(passes):
        result /= np.maximum(result.sum(axis=-2, keepdims=True), 1e-30)
        result /= result.sum(axis=-1, keepdims=True)
    return np.asarray(result)


def each_alone(weights: Array) -> Array:
    """Return the exact probability that each report is from each window, given only the report's own arrival time."""
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def product_of(posterior: Array, names: Array) -> Array:
    """Return the probability (d, n, n) that each report is from each client.

    ``posterior`` (d, n, n) has the probability that a report is from a window, and ``names`` (n, n) that a window is a client's. One large
    matrix product is much faster than one for each parameter.
    """
    return np.asarray((posterior.reshape(-1, len(names)) @ names).reshape(posterior.shape))


def share_right(posterior: Array, axis: int) -> Array:
    """Return the probability that the guess with the largest posterior along ``axis`` is right. The true pairs are on the diagonal."""
    largest = posterior.max(axis=axis, keepdims=True) * (1 - 1e-5)
    tied = posterior >= largest
    return np.asarray(np.diagonal(tied, axis1=1, axis2=2) / np.count_nonzero(tied, axis=axis))


def pair_scores(posterior: Array, pairs: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the probability that two reports, for different parameters, share a window.

    The first result is for ``pairs`` random pairs of one client, the second for as many pairs of different clients.
    """
    parameters, clients, _ = posterior.shape
    first = generator.integers(parameters, size=pairs)
    second = (first + generator.integers(1, parameters, size=pairs)) % parameters
    client = generator.integers(clients, size=pairs)
    other = (client + generator.integers(1, clients, size=pairs)) % clients
    first_posterior = posterior[first, client]
    same_client, different_clients = posterior[second, client], posterior[second, other]
    return np.einsum("pk,pk->p", first_posterior, same_client), np.einsum("pk,pk->p", first_posterior, different_clients)


def area_under_curve(alike: Array, unlike: Array) -> float:
    """Return how often a true pair scores higher than a false one; ties count half (Mann and Whitney)."""
    largest = max(float(alike.max()), float(unlike.max()), 1e-30)
    # What differs by rounding is a tie.
    wins = mannwhitneyu(np.round(alike / largest, 6), np.round(unlike / largest, 6), method="asymptotic").statistic
    return float(wins / (alike.size * unlike.size))


def largest_linked(scores: Array, hits: Array, sure: NDArray[np.bool_]) -> int:
    """Return the size of the largest set of reports of one window, each tied to it with ``CONFIDENCE``.

    Args:
        scores: (d, n) the best report's score for each parameter and window.
        hits: (d, n) probability that this report is from the window.
        sure: (d, n) whether a report's own arrival time is enough, without rehearsal.

    Scaled probabilities are too low. So a score counts as the share of guesses with this score that are right. An observer would estimate
    that share in simulated rounds. Here it is estimated for each half of the parameters on the other half, which is independent.
    """
    half = len(scores) // 2
    linked = sure.copy()
    for judged, rehearsed in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        linked[judged] |= scores[judged] >= _threshold(scores[rehearsed].ravel(), hits[rehearsed].ravel())
    return int(np.count_nonzero(linked, axis=0).max())


def _threshold(scores: Array, hits: Array) -> float:
    """Return the lowest score above which guesses are right with ``CONFIDENCE``; infinite if there is none.

    One wrong guess is added above the highest score, so that a few lucky guesses do not suffice.
    """
    order = np.argsort(scores, kind="stable")
    fitted = isotonic_regression(np.append(hits[order], 0.0)).x[:-1]
    confident = np.flatnonzero(fitted >= CONFIDENCE - 1e-9)
    return float(scores[order[confident[0]]]) if confident.size else inf
