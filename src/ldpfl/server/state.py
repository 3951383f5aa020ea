"""What a server knows after a round: its state, the figures of the round, and whether the run stops early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from typing import Any

from torch import Tensor

from ldpfl.mechanisms import Perturbed
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.ranges import LayerRanges


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server knows after a round; all of it is public.

    Attributes:
        round: rounds completed.
        weights: (d,) float32 global vector.
        ranges: what the clients of the next round clamp to.
        previous: (d,) what was broadcast for that round; None before the first.
        velocity: (d,) what momentum carries over to the next round; None without momentum, and before the first round.
        average: (d,) mean of the weights after the rounds that are averaged; None where none was yet.
        size: (d,) moving second moment of the steps; None without a rule that needs it, and before the first round.
        best: (d,) what had the lowest loss on validation rows; None where nothing is validated.
    """

    round: int
    weights: Tensor
    ranges: LayerRanges
    previous: Tensor | None = None
    velocity: Tensor | None = None
    average: Tensor | None = None
    size: Tensor | None = None
    best: Tensor | None = None

    @property
    def model(self) -> Tensor:
        """(d,) what the run has to show for itself: the best, or the average, where there is one, else the weights that are broadcast."""
        if self.best is not None:
            return self.best
        return self.weights if self.average is None else self.average

    def public(self) -> PublicState:
        """Return what everybody knows when the next round begins."""
        return PublicState(self.round + 1, self.weights, self.previous, self.ranges.sizes)


def client_values(trained: Tensor, state: ServerState, perturbed: Perturbed) -> Tensor:
    """Turn ``trained`` weights or gradients (K, d) into what clients put into the mechanism: themselves or, in place, their change."""
    return trained.sub_(state.weights) if perturbed == "update" else trained


@dataclass(frozen=True)
class RoundMetrics:
    """Figures of one finished round.

    ``clipped_fraction`` and ``clipped_records`` are computed from values that never leave a real client: only a simulation can know them.

    Attributes:
        score: the figure by which the new global model is judged: of a classifier its accuracy, 0 to 1.
        clients: cohort size.
        uplink_bytes_per_client: measured length of one client's message.
        clipped_fraction: by layer, share of (client, weight) values outside the range they were clamped to; empty on a real server.
        clipped_records: share of the round's records whose gradient was longer than the clipping norm; None where gradients of records
            are not clipped, and on a real server.
        noise_std: by layer, largest standard deviation of the noise in the mean.
        radius: by layer, radius of the range used in this round.
        seconds: wall time of the round.
        validation: loss of what this round led to, on the rows that say when to stop; None where nothing was trained or validated.
        noise: figures of a noise schedule, by name (see ``simulation.shares``); where noise depends on the data, only a
            simulation can know them.
        at_clients: the noisy sum of what clients measured on records that they hold back, the noise in it, and how many records these
            are; None after rounds in which nothing was measured.
    """

    round: int
    score: float
    clients: int
    uplink_bytes_per_client: int
    clipped_fraction: dict[str, float]
    noise_std: dict[str, float]
    radius: dict[str, float]
    seconds: float
    validation: float | None = None
    noise: dict[str, float] = field(default_factory=dict)
    clipped_records: float | None = None
    at_clients: dict[str, Any] | None = None

    def reproducible(self) -> dict[str, Any]:
        """Return the figures that a second run of the same config repeats exactly."""
        figures = asdict(self)
        del figures["seconds"]
        return figures


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
