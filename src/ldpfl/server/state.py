"""The server's state after a round, the metrics of the round, and the decision on early stopping."""

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
    """The server's state after a round. All of it is public.

    Attributes:
        round: number of completed rounds.
        weights: (d,) float32 global weights.
        ranges: clipping ranges of the next round. With adaptive clipping, their radius is its clipping norm.
        previous: (d,) weights that were broadcast in the last round; None before the first.
        velocity: (d,) momentum for the next round; None without momentum, and before the first round.
        average: (d,) mean of the weights over the averaged rounds; None before the first of them.
        size: (d,) moving average of squared mean updates, for FedAdam and FedYogi. None for other optimisers, and before the first round.
        best: (d,) weights with the lowest loss on validation rows; None without validation.
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
        """Final model (d,): the best weights if there are any, else the average if there is one, else the weights that are broadcast."""
        if self.best is not None:
            return self.best
        return self.weights if self.average is None else self.average

    def public(self) -> PublicState:
        """Return the public facts at the start of the next round."""
        return PublicState(self.round + 1, self.weights, self.previous, self.ranges.sizes)


def client_values(trained: Tensor, state: ServerState, perturbed: Perturbed) -> Tensor:
    """Return the values (K, d) that clients randomise: the ``trained`` weights or gradients themselves, or the update from ``state``.

    An update is computed in place, so it overwrites ``trained``.
    """
    return trained.sub_(state.weights) if perturbed == "update" else trained


@dataclass(frozen=True)
class RoundMetrics:
    """Metrics of one finished round.

    ``clipped_fraction`` and ``clipped_records`` depend on values that never leave a real client, so only a simulation knows them.

    Attributes:
        score: main metric of the new global model, such as the accuracy, from 0 to 1, of a classifier.
        clients: cohort size.
        uplink_bytes_per_client: measured number of bytes of one client's message.
        clipped_fraction: by layer, share of (client, weight) values outside their clipping range; empty on a real server.
        clipped_records: share of the round's records whose gradient exceeded the clipping norm; None if per-record gradients are not
            clipped, and on a real server.
        noise_std: by layer, largest standard deviation of the noise in the mean. With ``dp-sgd`` in multiples of the clipping norm.
        radius: by layer, radius of the range used in this round, or the adaptive clipping norm.
        seconds: wall time of the round.
        validation: loss of the new model on the rows for early stopping; None if nothing was trained or validated.
        noise: figures of a noise schedule, by name (see ``simulation.shares``). If the noise depends on the data, only a simulation
            knows them.
        at_clients: result of an evaluation at clients, with the noisy sums over held-back records, their noise, and the number of records.
            None after rounds without an evaluation.
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
    """Return whether the validation loss in ``history`` has not fallen for ``patience`` rounds, at least 1."""
    losses = [loss_for_comparison(metrics.validation) for metrics in history if metrics.validation is not None]
    rounds_since_best = len(losses) - 1 - losses.index(min(losses)) if losses else 0
    return rounds_since_best >= patience


def loss_for_comparison(loss: float) -> float:
    """Return ``loss`` for comparisons. A loss that is not finite, also -infinity, is a failure and becomes infinity, the worst loss."""
    return loss if isfinite(loss) else inf
