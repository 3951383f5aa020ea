"""What is recorded of a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
        noise: figures of a noise schedule, by name (see ``simulation.observing``); where noise depends on the data, only a
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
