"""What only a simulation can see of a round: what clients remember, how much noise there was, and how much was clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.mechanisms import Gaussian, Mechanism, Reports
from ldpfl.mechanisms.gaussian import NoisyReports, SensitivitySchedule
from ldpfl.mechanisms.reports.base import client_blocks
from ldpfl.ranges import LayerRanges

Memory = Mapping[str, Tensor]
"""By name, a row for each client. Private to the clients: the server's side of a round must not see it."""


@dataclass(frozen=True, eq=False)
class ClientFacts:
    """What k clients know of themselves before a round: how many samples they hold, how many rounds they joined, what they remember."""

    samples: Tensor
    joined: Tensor
    memory: Memory

    def take(self, rows: NDArray[np.int64] | slice) -> ClientFacts:
        """Return the facts of some of these clients."""
        own = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        return ClientFacts(self.samples[own], self.joined[own], {name: kept[own] for name, kept in self.memory.items()})

    def bound(self, mechanism: Mechanism) -> Mechanism:
        """Return the ``mechanism`` of these clients; the same, unless its noise follows a schedule."""
        if not isinstance(mechanism, Gaussian):
            return mechanism
        return mechanism.for_clients({"samples": self.samples, "joined": self.joined, **self.memory})


@dataclass(frozen=True, eq=False)
class SentNoise:
    """The noise of ``clients`` (k,) in a round: ``sigma`` (k, L), its norm (k,), and what they remember of the round."""

    clients: NDArray[np.int64]
    sigma: Tensor
    norms: Tensor
    memory: Memory

    @classmethod
    def of(cls, bound: Mechanism, clients: NDArray[np.int64], values: Tensor, ranges: LayerRanges, reports: Reports) -> SentNoise | None:
        """Return the noise in ``reports`` of ``values`` (k, d); None without a schedule."""
        if not (isinstance(bound, Gaussian) and isinstance(reports, NoisyReports)):
            return None
        return cls(clients, reports.sigma, reports.noise_norm, bound.remember(values, ranges, reports))


class RoundNoise:
    """The noise of a whole round. For a mechanism without a schedule it knows nothing."""

    def __init__(self, mechanism: Mechanism, before: Memory, sent: Sequence[SentNoise]) -> None:
        """``before`` is what all clients of the federation remembered."""
        self._mechanism, self._sent = mechanism, sent
        self._memory = dict(before)
        for name in {name for part in sent for name in part.memory}:
            self._memory[name] = self._memory[name].clone()  # the checkpoint before this round keeps its own
        for part in sent:
            for name, rows in part.memory.items():
                self._memory[name][torch.from_numpy(part.clients)] = rows

    def memory(self) -> dict[str, Tensor]:
        """Return what all clients remember after the round."""
        return self._mechanism.schedule.settle(self._memory) if isinstance(self._mechanism, Gaussian) else {}

    def std(self) -> Tensor | None:
        """Return the standard deviation (L,) of the noise in the mean; None without a schedule."""
        if not self._sent:
            return None
        sigma = self._by_client([part.sigma for part in self._sent])
        return sigma.square().sum(dim=0).sqrt() / len(sigma)

    def figures(self, sizes: tuple[int, ...]) -> dict[str, float]:
        """Return the round's figures, empty without a schedule; only a simulation can know them where noise depends on the data.

        ``protected_fraction``: share of weights that got noise, over clients. ``norm``: L2 norms of the clients' noise added up,
        LaDP-FL's "noise scale". ``multiplier_median``, ``multiplier_max``: noise of a layer over that of Full DP.
        ``paper_epsilon``: what the paper charges a client for the round, q = 1.
        """
        if not (self._sent and isinstance(self._mechanism, Gaussian) and self._mechanism.public):
            return {}
        sigma, schedule = self._by_client([part.sigma for part in self._sent]), self._mechanism.schedule
        shares = torch.tensor(sizes).double() / sum(sizes)
        figures = {
            "protected_fraction": float(((sigma > 0).double() @ shares).mean()),
            "norm": float(self._by_client([part.norms for part in self._sent]).sum()),
            "paper_epsilon": schedule.paper_epsilon(self._mechanism.public, sigma),
        }
        if isinstance(schedule, SensitivitySchedule) and bool((sigma > 0).any()):
            multipliers = sigma[sigma > 0] / schedule.full_sigma
            figures |= {"multiplier_median": float(multipliers.median()), "multiplier_max": float(multipliers.max())}
        return figures

    def _by_client(self, parts: list[Tensor]) -> Tensor:
        """Return the cohort's rows in the order of the clients' numbers: sums round by order, and that of a cohort means nothing."""
        return torch.cat(parts)[torch.from_numpy(np.concatenate([part.clients for part in self._sent])).argsort()]


class ClippedRecords:
    """Counts the records whose gradient is longer than it may be."""

    def __init__(self) -> None:
        self.clipped, self.all = 0, 0

    def add(self, too_long: Tensor) -> None:
        """Count records (R,), of which some are ``too_long``."""
        self.clipped += int(too_long.sum())
        self.all += len(too_long)


_COUNTED = 255
"""The most that a uint8 counter holds."""


class ClippedCounter:
    """Counts, layer by layer, the values that lie outside their range, which is ``low`` to ``high`` (d,): ``outside`` (L,)."""

    def __init__(self, ranges: LayerRanges) -> None:
        center, radius = ranges.expand()
        self.low, self.high = (center - radius).float().numpy(), (center + radius).float().numpy()
        self._starts = np.cumsum((0, *ranges.sizes[:-1]))
        self.outside = np.zeros(len(ranges.sizes), dtype=np.int64)

    def add(self, values: Tensor) -> None:
        """Count ``values`` (K, d)."""
        for rows in client_blocks(len(values), values.shape[1], most=_COUNTED):
            own = values[rows.start : rows.stop].numpy()
            outside = (own < self.low) | (own > self.high)
            self.add_counts(outside.sum(axis=0, dtype=np.uint8))

    def add_counts(self, outside: NDArray[np.uint8 | np.int32]) -> None:
        """Add how many clients' values lie ``outside`` the range of each coordinate (d,)."""
        self.outside += np.add.reduceat(outside, self._starts, dtype=np.int64)
