"""Losses, predictions and metrics for counts, ordered classes, and times to an event.

The gradient of each loss with respect to the outputs is bounded, so that a clipping norm clips few records.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ldpfl.errors import ConfigError
from ldpfl.tasks.survival import concordance

LINEAR_FROM = 4.0
"""Output above which the expected count, in units of its spread, grows linearly instead of exponentially."""

LEAST_COUNT = 1e-12
"""Expected count that a smaller one is taken for, since the deviance takes its logarithm."""


def expected_count(outputs: Tensor) -> Tensor:
    """Return the expected count of each output: its exponential, continued by the tangent above an output of 4."""
    below = outputs.clamp(max=LINEAR_FROM)
    return below.exp() * (1 + outputs - below)


def count_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the Poisson deviance of counts (B,); its gradient is the exponential less the count.

    It is the negative log-likelihood less the least one that any output has, so it is not negative.
    """
    least = targets - torch.xlogy(targets, targets)
    return expected_count(outputs) - targets * outputs - least


def ordered_losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Return each sample's cross-entropy (B,), averaged over the thresholds between ordered classes.

    ``logits`` (B, k - 1) are the log odds that the class is above each threshold. The likelihood of a class would be the difference of two
    such probabilities, and its gradient has no bound where they come close. The sum over thresholds has the same slopes at its optimum
    (proportional odds). Its residuals lie within [-1, 1], and the thresholds need no order.
    """
    above = classes[:, None] > torch.arange(logits.shape[1], device=logits.device)
    return F.binary_cross_entropy_with_logits(logits, above.to(logits.dtype), reduction="none").mean(dim=-1)


def class_chances(logits: Tensor) -> Tensor:
    """Return the probability (N, k) of each ordered class. A threshold's probability is capped by those of the thresholds below it."""
    above = logits.sigmoid().cummin(dim=1).values
    ends = above.new_ones(len(above), 1)
    return torch.cat([ends, above], dim=1) - torch.cat([above, 1 - ends], dim=1)


def middle_class(logits: Tensor) -> Tensor:
    """Return the median class (N,), which has the least expected distance from the true one."""
    return (logits.cummin(dim=1).values > 0).sum(dim=1)


def hazard_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood (B,) of discrete hazards: ``targets`` (B, K) are 1 in the interval of the event, 0 in the
    intervals before, and NaN in all that were not seen. Columns after these, see :func:`with_times`, are left alone."""
    targets = targets[..., : logits.shape[-1]]
    by_interval = F.binary_cross_entropy_with_logits(logits, targets.nan_to_num(), reduction="none")
    return torch.where(targets.isnan(), torch.zeros_like(by_interval), by_interval).sum(dim=-1)


def survival(logits: Tensor) -> Tensor:
    """Return the probability (N, K) that there was no event by the end of each interval."""
    return (-F.softplus(logits).cumsum(dim=1)).exp()


def by_interval(times: Tensor, events: Tensor, cuts: Tensor) -> Tensor:
    """Return the targets (N, K) of :func:`hazard_losses`, for intervals that end at ``cuts`` (K,).

    A time that ended without the event counts for an interval of which it saw at least a half.
    """
    starts = torch.cat([cuts.new_zeros(1), cuts[:-1]])
    times, events = times[:, None], events[:, None] > 0
    inside = (times > starts) & (times <= cuts)
    inside[:, 0] |= times[:, 0] <= cuts[0]
    targets = torch.full(inside.shape, torch.nan, dtype=torch.float32)
    targets[torch.where(events, times > cuts, times >= (starts + cuts) / 2)] = 0.0
    targets[events & inside] = 1.0
    return targets


def with_times(targets: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return ``targets`` (N, K) of :func:`hazard_losses` with time and event behind them (N, K + 2), as rows to measure on have them."""
    return torch.cat([targets, times[:, None], events[:, None]], dim=1)


def times_in(targets: Tensor, intervals: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the times (N,) and the events (N,) that :func:`with_times` appended to the targets of this number of ``intervals``.

    Raises:
        ConfigError: the targets have no such columns.
    """
    if targets.shape[1] != intervals + 2:
        raise ConfigError(
            f"targets to measure survival on have {targets.shape[1]} columns: give {intervals + 2}, one for each of the {intervals} "
            "intervals, then time and event (ldpfl.tasks.outcomes.with_times)"
        )
    return targets[:, -2].double().numpy(), targets[:, -1].numpy() > 0


class Collected:
    """Collects outputs and targets, for metrics that need all of them together."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep one batch."""
        self._outputs.append(outputs.detach().cpu().double())
        self._targets.append(targets.detach().cpu())

    def collected(self) -> tuple[Tensor, Tensor]:
        """Return the outputs and the targets of all batches."""
        return torch.cat(self._outputs), torch.cat(self._targets)


class DevianceExplained(Collected):
    """Share of the Poisson deviance around the mean that a model explains (D2, as R2 is of squares)."""

    def compute(self) -> float:
        """Return 1 less the deviance of the model over that of the mean count; NaN if all counts are equal."""
        outputs, targets = self.collected()
        counts = targets.double()
        expected, mean = expected_count(outputs.reshape(counts.shape)).clamp_min(LEAST_COUNT), counts.mean().clamp_min(LEAST_COUNT)
        # The terms that both deviances share: they depend on the counts alone.
        count_terms = torch.special.xlogy(counts, counts.clamp_min(LEAST_COUNT)) - counts
        explained, around_mean = (count_terms - torch.special.xlogy(counts, prediction) + prediction for prediction in (expected, mean))
        return 1 - float(explained.sum() / around_mean.sum()) if bool((counts != counts[0]).any()) else float("nan")


class R2(Collected):
    """Share of the squared distance from the mean that a model explains."""

    def compute(self) -> float:
        """Return 1 less the squared error of the model over that of the mean; NaN if all targets are equal."""
        outputs, targets = self.collected()
        numbers = targets.double()
        errors, around_mean = numbers - outputs.reshape(numbers.shape), numbers - numbers.mean()
        return 1 - float(errors.square().sum() / around_mean.square().sum()) if bool((numbers != numbers[0]).any()) else float("nan")


class MeanClassError(Collected):
    """Mean distance of the median class from the true one, in classes."""

    def compute(self) -> float:
        logits, classes = self.collected()
        return float((middle_class(logits) - classes).abs().double().mean())


class Concordance(Collected):
    """Harrell's C, on the times themselves: the share of comparable pairs in which the earlier event had the lower predicted survival."""

    def compute(self) -> float:
        logits, targets = self.collected()
        times, events = times_in(targets, logits.shape[1])
        return concordance(times, events, survival(logits).sum(dim=1).numpy())
