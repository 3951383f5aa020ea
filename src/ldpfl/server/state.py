"""What a server knows between two rounds; all of it is public."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ldpfl.mechanisms import Perturbed
from ldpfl.mechanisms.base import PublicState
from ldpfl.ranges import LayerRanges


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
