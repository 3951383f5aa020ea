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
"""Of Sinkhorn's scaling."""


def arrival_density(lag: Array, delay: float, jitter: float) -> Array:
    """Return the density of D + J at ``lag`` seconds after a window's start, up to a factor that is the same for all lags."""
    if delay == jitter == 0:
        return np.asarray((lag == 0).astype(lag.dtype))
    off = np.abs(lag - delay / 2)
    if jitter < _NEGLIGIBLE * delay:
        return np.asarray((off <= delay * (0.5 + 10 * _NEGLIGIBLE)).astype(lag.dtype))
    if delay < 1e-3 * jitter:
        return np.asarray(np.exp(-((off / jitter) ** 2) / 2))
    # The density is symmetric; in the lower tail nothing cancels.
    return np.asarray(ndtr((delay / 2 - off) / jitter) - ndtr(-(delay / 2 + off) / jitter))


def scaled(weights: Array, passes: int = PASSES) -> Array:
    """Scale ``weights`` (..., n, n) until columns add up to almost 1 and rows exactly: the marginals of a random matching, nearly.

    Exact where all matchings are equally likely or only one is possible; between, less sure of itself than the exact marginals are,
    in almost the same order.

    Source: Sinkhorn 1967; that it approximates marginals weighted by permanents, Linial, Samorodnitsky, Wigderson 2000 (from memory).
    """
    result = each_alone(weights)
    for _ in range(passes):
        result /= np.maximum(result.sum(axis=-2, keepdims=True), 1e-30)
        result /= result.sum(axis=-1, keepdims=True)
    return np.asarray(result)


def each_alone(weights: Array) -> Array:
    """Return how probably each report is of each window, by its own arrival time alone: exact."""
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def product_of(posterior: Array, names: Array) -> Array:
    """Return how probably each report is each client's: one large matrix product, much faster than one for each parameter."""
    return np.asarray((posterior.reshape(-1, len(names)) @ names).reshape(posterior.shape))


def share_right(posterior: Array, axis: int) -> Array:
    """Return how probably the guess of the largest posterior along ``axis`` is right; the true pairs lie on the diagonal."""
    largest = posterior.max(axis=axis, keepdims=True) * (1 - 1e-5)
    tied = posterior >= largest
    return np.asarray(np.diagonal(tied, axis1=1, axis2=2) / np.count_nonzero(tied, axis=axis))


def pair_scores(posterior: Array, pairs: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return how probably pairs of reports of two parameters share a window: of true pairs, and of pairs of different clients."""
    parameters, clients, _ = posterior.shape
    first = generator.integers(parameters, size=pairs)
    second = (first + generator.integers(1, parameters, size=pairs)) % parameters
    client = generator.integers(clients, size=pairs)
    other = (client + generator.integers(1, clients, size=pairs)) % clients
    own = posterior[first, client]
    return np.einsum("pk,pk->p", own, posterior[second, client]), np.einsum("pk,pk->p", own, posterior[second, other])


def area_under_curve(alike: Array, unlike: Array) -> float:
    """Mann and Whitney: how often a true pair scores higher than a false one, ties half."""
    largest = max(float(alike.max()), float(unlike.max()), 1e-30)
    # What differs by rounding is a tie.
    wins = mannwhitneyu(np.round(alike / largest, 6), np.round(unlike / largest, 6), method="asymptotic").statistic
    return float(wins / (alike.size * unlike.size))


def largest_linked(scores: Array, hits: Array, sure: NDArray[np.bool_]) -> int:
    """Return the size of the largest set of reports of one window, each tied to it with ``CONFIDENCE``.

    Args:
        scores: (d, n) the best report's score for each parameter and window.
        hits: how probably this report is the window's.
        sure: whether a report's own arrival time is enough, which needs no rehearsal.

    Scaling is too modest, so a score counts for the share of right guesses that it goes with. The observer would rehearse that on
    rounds it simulates; here each half of the parameters, which are independent, rehearses the other.
    """
    half = len(scores) // 2
    linked = sure.copy()
    for own, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        linked[own] |= scores[own] >= _threshold(scores[other].ravel(), hits[other].ravel())
    return int(np.count_nonzero(linked, axis=0).max())


def _threshold(scores: Array, hits: Array) -> float:
    """Return the lowest score from which on guesses are right with ``CONFIDENCE``; infinite if there is none.

    One wrong guess is put above the highest score, so that a few lucky ones are not taken for confidence.
    """
    order = np.argsort(scores, kind="stable")
    fitted = isotonic_regression(np.append(hits[order], 0.0)).x[:-1]
    enough = np.flatnonzero(fitted >= CONFIDENCE - 1e-9)
    return float(scores[order[enough[0]]]) if enough.size else inf
