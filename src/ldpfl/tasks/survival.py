"""Metrics of predicted times to an event: Harrell's concordance, and the integrated Brier score."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Places = NDArray[np.intp]


def compared(times: Floats, events: NDArray[np.bool_], lasting: Floats) -> tuple[Floats, Floats]:
    """Return for each row the number of comparable pairs with it (n,), and the number of those that are predicted in the right order (n,).

    A pair is comparable if one row had its event before the other's time, or at the time at which the other one left without an event
    (Harrell et al. 1982). It is right if the row with the earlier event has the smaller ``lasting`` (n,); equal ones count a half.
    """
    order = np.lexsort((~events, times))  # at one time events come first, so that those who left then are among the later rows
    times, events, ranks = times[order], events[order], np.unique(lasting[order], return_inverse=True)[1]
    rows = len(times)
    first_later = np.searchsorted(times, times) + _tied_events(times, events)
    own = np.flatnonzero(events)
    later = (rows - first_later)[own]
    pairs, right = np.zeros(rows), np.zeros(rows)
    pairs[own], right[own] = later, later - _ranked_below(ranks[::-1], later, ranks[own])
    before = np.searchsorted(first_later[own], np.arange(rows), side="right")
    pairs += before
    right += _ranked_below(ranks[own], before, ranks)
    back = np.empty_like(order)
    back[order] = np.arange(rows)
    return pairs[back], right[back]


def concordance(times: Floats, events: NDArray[np.bool_], lasting: Floats) -> float:
    """Return Harrell's C: the share of comparable pairs whose order is predicted right; NaN where no pair is comparable."""
    pairs, right = compared(times, events, lasting)
    return float(right.sum() / pairs.sum()) if pairs.any() else float("nan")


def brier_errors(times: Floats, events: NDArray[np.bool_], lasting: Floats, cuts: Floats) -> Floats:
    """Return each row's weighted squared error (n,), integrated over time from 0 to the last of ``cuts`` (K,) and divided by that time.

    Its mean is the integrated Brier score (Graf et al. 1999). ``lasting`` (n, K) is the predicted probability that a row's time lies
    beyond each cut. A row counts by the inverse of the probability (Kaplan-Meier) of not having left before. Cuts that nobody stayed
    to see are left out; without any, the errors are NaN.
    """
    when, staying = _staying(times, events)
    at_cut = staying[np.searchsorted(when, cuts, side="right")]
    cuts, lasting, at_cut = cuts[at_cut > 0], lasting[:, at_cut > 0], at_cut[at_cut > 0]
    if not cuts.size:
        return np.full(len(times), np.nan)
    before_own = staying[np.searchsorted(when, times)]  # not to have left before its own time: above 0, for the row itself did not
    beyond = times[:, None] > cuts
    had_event = events[:, None] & ~beyond
    errors = np.where(beyond, (1 - lasting) ** 2 / at_cut, np.where(had_event, lasting**2 / before_own[:, None], 0.0))
    at_zero = np.zeros((len(times), 1))  # everybody is predicted to last longer than no time
    found: Floats = np.trapezoid(np.hstack([at_zero, errors]), np.concatenate([[0.0], cuts]), axis=1) / cuts[-1]
    return found


def _staying(times: Floats, events: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the times of the rows, and the probability of not having left before the first of them, and by each of them (Kaplan-Meier).

    Who had an event at a time is no longer there to leave at that time.
    """
    when, places = np.unique(times, return_inverse=True)
    left, had = np.bincount(places, weights=~events), np.bincount(places, weights=events)
    there = np.cumsum((left + had)[::-1])[::-1] - had
    return when, np.concatenate([[1.0], np.cumprod(1 - left / np.maximum(there, 1))])


def _tied_events(times: Floats, events: NDArray[np.bool_]) -> _Places:
    """Return the number of events at each row's time."""
    places = np.unique(times, return_inverse=True)[1]
    return np.bincount(places, weights=events).astype(np.intp)[places]


def _ranked_below(ranks: NDArray[Any], firsts: _Places, limits: NDArray[Any]) -> Floats:
    """Return for each ``limits`` (m,) how many of the first ``firsts`` (m,) of ``ranks`` (n,) lie below it; equal ones count a half.

    The first 6 of them, say, are a block of 4 and a block of 2. Blocks of one width are sorted at once, so that n log(n)^2 steps suffice.
    """
    found, apart = np.zeros(len(limits)), int(max(ranks.max(initial=0), limits.max(initial=0))) + 1
    for bit in range(len(ranks).bit_length()):
        blocks = np.arange(len(ranks)) >> bit
        values = np.sort(blocks * apart + ranks)
        own = np.flatnonzero(firsts >> bit & 1)
        block = (firsts[own] >> bit) - 1
        wanted = block * apart + limits[own]
        found[own] += (np.searchsorted(values, wanted) + np.searchsorted(values, wanted, side="right")) / 2 - (block << bit)
    return found
