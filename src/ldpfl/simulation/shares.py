"""A round's cohort in shares: who trains one, what comes of it, and what only a simulation can see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms import BitReports, Gaussian, Mechanism, Reports
from ldpfl.mechanisms.gaussian import NoisyReports, SensitivitySchedule
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import client_blocks
from ldpfl.mechanisms.reports.bits import BitCounts
from ldpfl.mechanisms.reports.vectors import VectorReports, VectorTotal
from ldpfl.server import ServerState, client_values
from ldpfl.simulation.cohort_training import ClientsDone, in_chunks, train_clients
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.counted_steps import TOGETHER, CountedSteps
from ldpfl.simulation.federation import Evaluation, Federation
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.local_steps import ALIGNED, MOST_CLIENTS, split_evenly

_SHARES = 64
"""How many shares a cohort is cut into at most."""

ChunkDone = Callable[[int], None]
"""Called with how many clients were trained since the last call."""


@dataclass(frozen=True, eq=False)
class Share:
    """Some clients of a round's cohort, and what they know of themselves."""

    clients: NDArray[np.int64]
    facts: ClientFacts


@dataclass(frozen=True, eq=False)
class RoundStart:
    """What all clients are told in a round; how many are trained at once, and how many rounds follow: that changes speed, not results."""

    state: ServerState
    mechanism: Mechanism
    chunk_size: int
    rounds_left: int = 0


@dataclass(frozen=True, eq=False)
class Collected:
    """What came of a share: reports, and what a simulation sees beside them. No trained weights.

    Attributes:
        outside: (L,) values outside their range, by layer; None where no range bounds them.
        clipped_records, records: records whose gradient was shortened, and all of them.
    """

    clients: int
    reports: tuple[Reports, ...]
    noise: tuple[SentNoise, ...]
    outside: NDArray[np.int64] | None
    clipped_records: int
    records: int


def cut(federation: Federation, cohort: NDArray[np.int64], facts: ClientFacts) -> list[Share]:
    """Cut a ``cohort`` into shares that depend on nothing but the cohort: clients of like size together, so that fewer steps are blank.

    ``facts`` are of all clients of the federation.
    """
    order = np.argsort(federation.samples.sizes[cohort], kind="stable")
    unit = federation.trainer.block if isinstance(federation.trainer, CompiledTrainer) else ALIGNED
    pieces = split_evenly(len(cohort), unit * -(-len(cohort) // (unit * _SHARES)), unit)
    return [Share(cohort[order[piece]], facts.take(cohort[order[piece]])) for piece in pieces]


def collect(federation: Federation, start: RoundStart, share: Share, chunk_done: ChunkDone = lambda clients: None) -> Collected:
    """Train the clients of a ``share`` and return their reports; trained weights of a chunk are dropped as soon as it has reported.

    Raises:
        PrivacyError: a client's values must not leave (NaN for instance).
    """
    records, clipped = ClippedRecords(), ClippedCounter(start.state.ranges)
    if isinstance(federation.trainer, RecordGradientTrainer):
        federation = replace(federation, trainer=replace(federation.trainer, watch=records.add))
    reports: list[Reports] = []
    noise: list[SentNoise] = []
    steps = None
    if isinstance(federation.trainer, CompiledTrainer):
        ends = clipped.low, clipped.high
        steps = CountedSteps.of(federation, federation.trainer, start.state, start.mechanism, share.clients, ends)
    for rows in in_chunks(federation, share.clients, start.chunk_size, MOST_CLIENTS if steps is None else TOGETHER):
        left = rows if steps is None else rows[steps.add(share.clients[rows])]
        if left.size:
            sent, batch = _reported(federation, start, share, left, clipped)
            noise += [] if sent is None else [sent]
            _keep(reports, batch)
        chunk_done(len(rows))
    if steps is not None and steps.clients:
        reports.append(steps.reports())
        clipped.add_counts(steps.outside)
    outside = None if federation.perturbed == "gradient" else clipped.outside
    return Collected(len(share.clients), tuple(reports), tuple(noise), outside, records.clipped, records.all)


def _reported(
    federation: Federation, start: RoundStart, share: Share, rows: NDArray[np.intp], clipped: ClippedCounter
) -> tuple[SentNoise | None, Reports]:
    """Train some clients of a ``share`` together, and return their reports and the noise in them."""
    clients, mechanism = share.clients[rows], share.facts.take(rows).bound(start.mechanism)
    values = client_values(train_clients(federation, start.state, clients), start.state, federation.perturbed)
    try:
        streams = federation.streams(start.state, clients, values, mechanism)
        batch = mechanism.encode(values, start.state.ranges, streams)
    except PrivacyError as error:
        raise PrivacyError(f"round {start.state.round + 1} stopped: {error}") from error
    if federation.perturbed != "gradient":
        clipped.add(values)
    return SentNoise.of(mechanism, clients, values, start.state.ranges, batch), batch


def _keep(reports: list[Reports], batch: Reports) -> None:
    """Add to ``reports`` what a round needs of ``batch``: of bits how many are set, of vectors their sum."""
    before = reports.pop() if reports and type(batch) in (BitReports, VectorReports) else None
    if type(batch) is BitReports:  # other bits stay together, a client's in a row
        reports.append(before.plus(batch) if isinstance(before, BitCounts) else batch.counted())
    elif type(batch) is VectorReports:  # others say more than their values
        reports.append(before.plus(batch) if isinstance(before, VectorTotal) else batch.summed())
    else:
        reports.append(batch)


def for_shares(federation: Federation) -> Federation:
    """Return ``federation`` without what no share needs."""
    return replace(federation, encoder=None, evaluation=Evaluation(federation.evaluation.samples), stopping=None, judged=None)


class Workers(Protocol):
    """What does the shares of a round."""

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Return what comes of each of ``shares``, in their order.

        Raises:
            PrivacyError: a client's values must not leave.
        """
        ...

    def score(self, federation: Federation, weights: Tensor) -> float:
        """Return the figure by which the model with ``weights`` is judged, :meth:`Federation.score`."""
        ...


class OneProcess:
    """This process, by one thread: more would round differently."""

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        total = sum(len(share.clients) for share in shares)
        done = 0

        def chunk_done(clients: int) -> None:
            nonlocal done
            done += clients
            clients_done(done, total)

        with one_thread(federation.device):
            return [collect(federation, start, share, chunk_done) for share in shares]

    def score(self, federation: Federation, weights: Tensor) -> float:
        with one_thread(federation.device):
            return federation.score(weights)


ONE_PROCESS = OneProcess()


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let PyTorch work by one thread on a CPU: how a product is cut up decides how it rounds."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
