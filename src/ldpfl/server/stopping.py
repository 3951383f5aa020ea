"""When a run stops early: once the loss on public rows has not fallen for so many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from ldpfl.server.round_metrics import RoundMetrics


def has_stopped(history: Sequence[RoundMetrics], patience: int) -> bool:
    """Tell whether what was trained in ``history`` has not become better for ``patience`` rounds."""
    return _rounds_without_gain(history) >= patience


def _rounds_without_gain(history: Sequence[RoundMetrics]) -> int:
    """Return how many validated rounds came after the one with the lowest loss."""
    losses = [metrics.validation for metrics in history if metrics.validation is not None]
    return 0 if not losses else len(losses) - 1 - losses.index(min(losses, key=comparable))


def comparable(loss: float) -> float:
    """Return a loss that can be compared: one that is no number is the worst."""
    return loss if isfinite(loss) else inf
