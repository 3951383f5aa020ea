"""What only a simulation can see of a round: what clients remember, how much noise there was, and how much was clipped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.mechanisms import Gaussian, Mechanism, Reports
from ldpfl.mechanisms.gaussian import NoisyReports, SensitivitySchedule
from ldpfl.mechanisms.reports.base import client_blocks
from ldpfl.ranges import LayerRanges

Memory = Mapping[str, Tensor]
"""By name, a row for each client of the federation. Private to the clients: the server's side of a round must not see it."""


class ScheduledNoise:
    """The clients' side of a round: binds the mechanism to clients, and records what its noise was.

    For a mechanism without a schedule it does nothing.
    """

    def __init__(self, mechanism: Mechanism, samples: NDArray[np.int64], joined: NDArray[np.int64], memory: Memory) -> None:
        """``samples`` and ``joined`` (N,) are of all clients: data set sizes, and rounds joined before this one."""
        self._mechanism = mechanism
        self._samples, self._joined = torch.from_numpy(samples), torch.from_numpy(joined)
        self._before, self._after = memory, dict(memory)
        self._clients: list[Tensor] = []
        self._sigma: list[Tensor] = []
        self._norms: list[Tensor] = []

    def bind(self, clients: NDArray[np.int64], dimension: int) -> Mechanism:
        """Return the mechanism for ``clients``."""
        if not isinstance(self._mechanism, Gaussian):
            return self._mechanism
        if not self._before:
            self._before = self._mechanism.schedule.initial_memory(len(self._samples), dimension)
            self._after = {name: rows.clone() for name, rows in self._before.items()}
        own = torch.from_numpy(clients)
        remembered = {name: rows[own] for name, rows in self._before.items()}
        return self._mechanism.for_clients({"samples": self._samples[own], "joined": self._joined[own], **remembered})

    def record(self, bound: Mechanism, clients: NDArray[np.int64], values: Tensor, ranges: LayerRanges, reports: Reports) -> None:
        """Take down what the ``clients`` that ``bound`` belongs to sent, (K, d) ``values`` before noise."""
        if not (isinstance(bound, Gaussian) and isinstance(reports, NoisyReports)):
            return
        own = torch.from_numpy(clients)
        self._clients.append(own)
        self._sigma.append(reports.sigma)
        self._norms.append(reports.noise_norm)
        for name, rows in bound.remember(values, ranges, reports).items():
            if self._after[name] is self._before.get(name):
                self._after[name] = self._after[name].clone()  # the checkpoint before this round keeps its own
            self._after[name][own] = rows

    def memory(self) -> dict[str, Tensor]:
        """Return what all clients remember after the round."""
        return self._mechanism.schedule.settle(self._after) if isinstance(self._mechanism, Gaussian) else {}

    def std(self) -> Tensor | None:
        """Return the standard deviation (L,) of the noise in the mean; None without a schedule."""
        return self._by_client(self._sigma).square().sum(dim=0).sqrt() / sum(map(len, self._sigma)) if self._sigma else None

    def figures(self, sizes: tuple[int, ...]) -> dict[str, float]:
        """Return the round's figures, empty without a schedule; only a simulation can know them where noise depends on the data.

        ``protected_fraction``: share of weights that got noise, over clients. ``norm``: L2 norms of the clients' noise added up,
        LaDP-FL's "noise scale". ``multiplier_median``, ``multiplier_max``: noise of a layer over that of Full DP.
        ``paper_epsilon``: what the paper charges a client for the round, q = 1.
        """
        if not (self._sigma and isinstance(self._mechanism, Gaussian) and self._mechanism.public):
            return {}
        sigma, schedule = self._by_client(self._sigma), self._mechanism.schedule
        shares = torch.tensor(sizes).double() / sum(sizes)
        figures = {
            "protected_fraction": float(((sigma > 0).double() @ shares).mean()),
            "norm": float(self._by_client(self._norms).sum()),
            "paper_epsilon": schedule.paper_epsilon(self._mechanism.public, sigma),
        }
        if isinstance(schedule, SensitivitySchedule) and bool((sigma > 0).any()):
            multipliers = sigma[sigma > 0] / schedule.full_sigma
            figures |= {"multiplier_median": float(multipliers.median()), "multiplier_max": float(multipliers.max())}
        return figures

    def _by_client(self, parts: list[Tensor]) -> Tensor:
        """Return the cohort's rows in the order of the clients' numbers: sums round by order, and that of a cohort means nothing."""
        return torch.cat(parts)[torch.cat(self._clients).argsort()]


class ClippedRecords:
    """Counts the records whose gradient is longer than it may be."""

    def __init__(self) -> None:
        self._clipped, self._all = 0, 0

    def add(self, too_long: Tensor) -> None:
        """Count records (R,), of which some are ``too_long``."""
        self._clipped += int(too_long.sum())
        self._all += len(too_long)

    @property
    def share(self) -> float | None:
        """Clipped part of the records; None where there was none."""
        return self._clipped / self._all if self._all else None


class ClippedCounter:
    """Counts, layer by layer, the values that lie outside their range."""

    def __init__(self, ranges: LayerRanges) -> None:
        center, radius = ranges.expand()
        self._low, self._high = (center - radius).float().numpy(), (center + radius).float().numpy()
        self._sizes = ranges.sizes
        self._starts = np.cumsum((0, *ranges.sizes[:-1]))
        self._outside = np.zeros(len(ranges.sizes), dtype=np.int64)
        self._clients = 0

    def add(self, values: Tensor) -> None:
        """Count ``values`` (K, d)."""
        for rows in client_blocks(*values.shape):
            own = values[rows.start : rows.stop].numpy()
            outside = ((own < self._low) | (own > self._high)).sum(axis=0, dtype=np.int64)
            self._outside += np.add.reduceat(outside, self._starts)
        self._clients += len(values)

    def fractions(self) -> list[float]:
        """Return the clipped share of each layer."""
        return [int(count) / (size * max(self._clients, 1)) for count, size in zip(self._outside, self._sizes, strict=True)]
