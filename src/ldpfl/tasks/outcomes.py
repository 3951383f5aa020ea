"""Losses and predictions for counts, ordered classes, and times to an event.

The gradient of each loss with respect to the outputs is bounded (by e^4 or the count, for a count), so that a clipping norm clips few
records.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ldpfl.errors import ConfigError

LINEAR_FROM = 4.0
"""Output above which the expected count, in units of its spread, grows linearly instead of exponentially."""

MIN_COUNT = 1e-12
"""Smallest expected count, in place of smaller ones, since the deviance takes its logarithm."""


def expected_count(outputs: Tensor) -> Tensor:
    """Return the expected count of each output: its exponential, continued above an output of 4 by the tangent at 4.

    So a large output does not give an astronomic count.
    """
    below = outputs.clamp(max=LINEAR_FROM)
    return below.exp() * (1 + outputs - below)


def positive_count(outputs: Tensor) -> Tensor:
    """Return the :func:`expected_count` of each output, at least :data:`MIN_COUNT`."""
    return expected_count(outputs).clamp_min(MIN_COUNT)


def count_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the Poisson deviance (B,) of the counts ``targets`` (B,): the negative log-likelihood less that of a perfect prediction.

    ``outputs`` (B,) are logarithms of expected counts. For outputs up to 4, the gradient is the expected count less the count. Above 4,
    :func:`expected_count` grows more slowly than the exponential, which keeps gradients small.

    The loss of a count above e^4 has no lower bound. A table's counts are clipped to e^4 for training (``reach`` of
    :class:`ldpfl.data.scaling.TargetScale`). Privacy does not depend on it, because each gradient is clipped.
    """
    smallest = targets - torch.xlogy(targets, targets)
    return expected_count(outputs) - targets * outputs - smallest


def ordered_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Return each sample's cross-entropy (B,), averaged over the thresholds between k ordered classes.

    ``logits`` (B, k - 1) are the log odds that the class is above each threshold. The likelihood of a class would be the difference of the
    probabilities at two thresholds. It is not used, because its gradient has no bound where the two come close. The mean over thresholds
    has the same slopes at its optimum (proportional odds). Its residuals lie within [-1, 1], and the thresholds need no order.
    """
    above = classes[:, None] > torch.arange(logits.shape[1], device=logits.device)
    return F.binary_cross_entropy_with_logits(logits, above.to(logits.dtype), reduction="none").mean(dim=-1)


def class_probabilities(logits: Tensor) -> Tensor:
    """Return the probability (N, k) of each of k ordered classes, from the log odds ``logits`` (N, k - 1) of being above each threshold.

    To be above a threshold is at most as probable as to be above a lower one. The model's logits need not obey this, so a larger
    probability is replaced by that of the lower threshold.
    """
    above = logits.sigmoid().cummin(dim=1).values
    one = above.new_ones(len(above), 1)
    # Class i is above threshold i and not above threshold i + 1. All rows are above a threshold before the first (probability 1), and none
    # is above one after the last (0).
    return torch.cat([one, above], dim=1) - torch.cat([above, 1 - one], dim=1)


def median_class(logits: Tensor) -> Tensor:
    """Return the median class (N,) of k classes, from the log odds ``logits`` (N, k - 1) of being above each threshold.

    It has the least expected distance from the true class. It is the number of thresholds that are exceeded with probability above 1/2.
    The logits need not fall from threshold to threshold. So thresholds above the first one that is not exceeded do not count, which agrees
    with :func:`class_probabilities`.
    """
    return (logits.cummin(dim=1).values > 0).sum(dim=1)


def hazard_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood (B,) of discrete hazards, whose log odds are ``logits`` (B, K).

    ``targets`` (B, K) are 1 in the interval of the event, 0 in the intervals before it, and NaN in intervals that were not observed.
    Further columns of ``targets``, which :func:`with_times` appends, are ignored.
    """
    targets = targets[..., : logits.shape[-1]]
    # NaN is replaced before the loss as well as after it, because the gradient of a NaN would be NaN.
    by_interval = F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
    return torch.where(targets.isnan(), torch.zeros_like(by_interval), by_interval).sum(dim=-1)


def survival_probabilities(logits: Tensor) -> Tensor:
    """Return the probability (N, K) that there was no event by the end of each interval, from the log odds ``logits`` (N, K) of hazards."""
    # log(1 - hazard) = -softplus(log odds), and the probability is the product of 1 - hazard over the intervals so far.
    return (-F.softplus(logits).cumsum(dim=1)).exp()


def interval_targets(times: Tensor, events: Tensor, cuts: Tensor) -> Tensor:
    """Return the targets (N, K) of :func:`hazard_losses`, for intervals that end at ``cuts`` (K,).

    ``times`` (N,) are the times of the event, or until which a row was observed. ``events`` (N,) are above 0 for rows with an event.

    A row with an event has 0 in the intervals before it, and 1 in that of the event. A row that was observed until its time without an
    event has 0 in the intervals of which it was observed for at least half. All other targets are NaN: unknown.
    """
    starts = torch.cat([cuts.new_zeros(1), cuts[:-1]])
    until, has_event = times[:, None], events[:, None] > 0  # columns (N, 1), compared with the intervals below
    in_interval = (until > starts) & (until <= cuts)
    in_interval[:, 0] |= times <= cuts[0]  # times of 0 or less belong to the first interval
    targets = torch.full(in_interval.shape, torch.nan, dtype=torch.float32)
    targets[torch.where(has_event, until > cuts, until >= (starts + cuts) / 2)] = 0.0
    targets[has_event & in_interval] = 1.0
    return targets


def with_times(targets: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Append the columns time and event to the ``targets`` (N, K) of :func:`hazard_losses`, (N, K + 2). Metrics of test rows need them."""
    return torch.cat([targets, times[:, None], events[:, None]], dim=1)


def appended_times(targets: Tensor, intervals: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the times (N,) and the events (N,) that :func:`with_times` appended to ``targets`` (N, ``intervals`` + 2).

    Raises:
        ConfigError: the targets have no such columns.
    """
    if targets.shape[1] != intervals + 2:
        raise ConfigError(
            f"the targets for measuring survival have {targets.shape[1]} columns, expected {intervals + 2}: one for each of the "
            f"{intervals} intervals, then time and event, as ldpfl.tasks.outcomes.with_times makes them"
        )
    return targets[:, -2].double().numpy(), targets[:, -1].numpy() > 0


class MetricOfAllRows:
    """A metric that needs all outputs and targets together, on the CPU and the outputs as float64."""

    def __init__(self, function: Callable[[Tensor, Tensor], float]) -> None:
        """``function`` returns the metric for the outputs and the targets of all rows."""
        self._function = function
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep one batch."""
        self._outputs.append(outputs.detach().cpu().double())
        self._targets.append(targets.detach().cpu())

    def compute(self) -> float:
        """Return the metric over all batches."""
        return self._function(torch.cat(self._outputs), torch.cat(self._targets))
