"""Metrics of predicted times to an event: Harrell's concordance, and the integrated Brier score."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Places = NDArray[np.intp]


def count_comparable_pairs(times: Floats, events: NDArray[np.bool_], predicted_times: Floats) -> tuple[Floats, Floats]:
    """Return for each row the number of comparable pairs with it (n,), and how many of them are predicted in the right order (n,).

    A pair is comparable if one row had its event before the other's time, or at the time at which the other row was censored (left without
    an event; Harrell et al. 1982). It is right if the row with the earlier event has the smaller predicted time. Equal predicted times
    count a half.
    """
    # Rows are sorted by time, so that the rows that are comparable with an event are all rows from some position on.
    order = np.lexsort((~events, times))  # at the same time, events come first: rows censored then count as later
    times, events = times[order], events[order]
    ranks = np.unique(predicted_times[order], return_inverse=True)[1]  # equal predicted times have equal ranks
    rows = len(times)
    # Position of the first row that comes later than each row's time: events at the same time come first, and are not later.
    first_later = np.searchsorted(times, times) + _tied_events(times, events)
    with_event = np.flatnonzero(events)
    later_rows = (rows - first_later)[with_event]
    pairs, right = np.zeros(rows), np.zeros(rows)
    # Pairs of each event with a later row, which are wrong if the later row's rank is lower. An equal rank counts a half as lower, so it
    # counts a half as right. The later rows are the first `later_rows` rows of `ranks[::-1]`.
    pairs[with_event] = later_rows
    right[with_event] = later_rows - _count_ranked_below(ranks[::-1], later_rows, ranks[with_event])
    # Pairs of each row with an earlier event, which are right if the event's rank is lower. An event is earlier than a row if the event's
    # first later row is at or before that row.
    earlier_events = np.searchsorted(first_later[with_event], np.arange(rows), side="right")
    pairs += earlier_events
    right += _count_ranked_below(ranks[with_event], earlier_events, ranks)
    sorted_position = np.empty_like(order)  # of each row of the arguments
    sorted_position[order] = np.arange(rows)
    return pairs[sorted_position], right[sorted_position]


def concordance(times: Floats, events: NDArray[np.bool_], predicted_times: Floats) -> float:
    """Return Harrell's C: the share of comparable pairs whose order is predicted right; NaN where no pair is comparable."""
    pairs, right = count_comparable_pairs(times, events, predicted_times)
    return float(right.sum() / pairs.sum()) if pairs.any() else float("nan")


def brier_errors(times: Floats, events: NDArray[np.bool_], survival: Floats, cuts: Floats, end: float) -> Floats:
    """Return each row's weighted squared error (n,), integrated over time from 0 to ``end`` and divided by that time.

    The mean of these errors is the integrated Brier score (Graf et al. 1999). ``survival`` (n, K) is the predicted probability that a
    row's time lies beyond each of ``cuts`` (K,). Between cuts it is interpolated, and after the last it stays. So models with other cuts,
    which may be measured under noise, are scored over the same time. An error is weighted by the inverse of the probability (Kaplan-Meier)
    that a row is not yet censored: at the moment of the error, or just before the row's own event. Time at which this probability is 0 is
    left out. If no other is left, or ``end`` is NaN, errors are NaN.
    """
    distinct_times, stay_probability = _stay_probability(times, events)  # stay_probability[i]: not censored after i distinct times
    moments = np.linspace(0, end, _MOMENTS)
    stay_at_moment = stay_probability[np.searchsorted(distinct_times, moments, side="right")]
    moments, stay_at_moment = moments[stay_at_moment > 0], stay_at_moment[stay_at_moment > 0]
    if isnan(end) or len(moments) < 2:
        return np.full(len(times), np.nan)
    predicted = _interpolated(survival, cuts, moments)
    stay_before_own_time = stay_probability[np.searchsorted(distinct_times, times)]  # above 0: the row itself is not yet censored
    beyond = times[:, None] > moments
    had_event = events[:, None] & ~beyond
    # Rows that were censored before a moment have the error 0 there. The weights of the other rows make up for them.
    errors = np.where(beyond, (1 - predicted) ** 2 / stay_at_moment, np.where(had_event, predicted**2 / stay_before_own_time[:, None], 0.0))
    integrated: Floats = np.trapezoid(errors, moments, axis=1) / moments[-1]
    return integrated


def horizon(times: Floats, events: NDArray[np.bool_]) -> float:
    """Return the end of the time over which models are scored: when nine tenths of the events of the rows have happened.

    It depends on no model. It is NaN if no row has an event after time 0.
    """
    distinct_times, stay_probability = _stay_probability(times, events)
    # At the time of the last event, everybody may be censored, and no weight is known.
    is_weighted = stay_probability[np.searchsorted(distinct_times, times, side="right")] > 0
    of_events = times[events & is_weighted & (times > 0)]
    return float(np.quantile(of_events, _HORIZON_SHARE, method="lower")) if of_events.size else nan


_HORIZON_SHARE = 0.9
_MOMENTS = 101
"""Number of moments, from 0 to the horizon, at which the error is computed for the integral."""


def _interpolated(survival: Floats, cuts: Floats, moments: Floats) -> Floats:
    """Return the probability (n, M) to last beyond each of ``moments`` (M,), from that for each of ``cuts`` (K,), rising.

    At time 0 the probability is 1. Between two cuts it is linear in time, and after the last cut it stays.
    """
    known = np.hstack([np.ones((len(survival), 1)), survival])
    places = np.interp(moments, np.concatenate([[0.0], cuts]), np.arange(len(cuts) + 1.0))
    before = np.minimum(places.astype(np.intp), len(cuts) - 1)
    weight_after = places - before
    interpolated: Floats = known[:, before] * (1 - weight_after) + known[:, before + 1] * weight_after
    return interpolated


def _stay_probability(times: Floats, events: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return the distinct times (k,), and the probability (k + 1,) that a row is not yet censored, without regard to events (Kaplan-Meier).

    Probability 0 is 1, before all times. Probability i is for the moment after the i-th distinct time. A row with an event at a time can
    no longer be censored at that time.
    """
    distinct_times, places = np.unique(times, return_inverse=True)
    censored_counts, event_counts = np.bincount(places, weights=~events), np.bincount(places, weights=events)
    at_risk = np.cumsum((censored_counts + event_counts)[::-1])[::-1] - event_counts  # 0 only where nobody is censored
    return distinct_times, np.concatenate([[1.0], np.cumprod(1 - censored_counts / np.maximum(at_risk, 1))])


def _tied_events(times: Floats, events: NDArray[np.bool_]) -> _Places:
    """Return the number of events at each row's time."""
    places = np.unique(times, return_inverse=True)[1]
    return np.bincount(places, weights=events).astype(np.intp)[places]


def _count_ranked_below(ranks: NDArray[Any], prefix_lengths: _Places, limits: NDArray[Any]) -> Floats:
    """Count, for each of ``limits`` (m,), the lower ranks among the first ``prefix_lengths`` (m,) of ``ranks`` (n,).

    An equal rank counts a half. A prefix is cut into blocks whose widths are powers of two, by the bits of its length. The first 6 ranks,
    for example, are a block of 4 and a block of 2. All blocks of one width are sorted together, so that n log(n)^2 steps suffice.
    """
    below = np.zeros(len(limits))
    block_offset = int(max(ranks.max(initial=0), limits.max(initial=0))) + 1  # above all ranks
    for bit in range(len(ranks).bit_length()):
        blocks = np.arange(len(ranks)) >> bit  # number of each rank's block of width 2^bit
        # An offset for each block keeps the sorted ranks of different blocks apart.
        values = np.sort(blocks * block_offset + ranks)
        chosen = np.flatnonzero(prefix_lengths >> bit & 1)  # limits whose prefix has a block of this width
        block = (prefix_lengths[chosen] >> bit) - 1  # its number: wider blocks of the prefix stand before it, narrower ones after it
        wanted = block * block_offset + limits[chosen]
        # The mean of both sides counts equal ranks a half. The ranks of the blocks before this one, 2^bit in each, are subtracted.
        below[chosen] += (np.searchsorted(values, wanted) + np.searchsorted(values, wanted, side="right")) / 2 - (block << bit)
    return below
