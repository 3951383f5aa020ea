"""Split a round's cohort into shares, train each share, and collect its reports and what only a simulation can see."""

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
from ldpfl.mechanisms.reports.bits import BitCounts
from ldpfl.mechanisms.reports.vectors import VectorReports, VectorTotal
from ldpfl.server import ServerState, client_values
from ldpfl.simulation.cohort_training import ClientsDone, chunks_of_cohort, train_with_personal_layers
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.counted_steps import CLIENTS_PER_SCHEDULE, CountedSteps
from ldpfl.simulation.federation import Evaluation, Federation
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.local_steps import ALIGNED, MOST_CLIENTS, split_evenly
from ldpfl.simulation.personal_layers import KeptLayers
from ldpfl.util.randomness import client_blocks

_MAX_SHARES = 64
"""Maximum number of shares of a cohort."""

ChunkDone = Callable[[int], None]
"""Called with the number of clients that were trained since the last call."""


@dataclass(frozen=True, eq=False)
class Share:
    """A part of a round's cohort, with the facts that these clients know about themselves."""

    clients: NDArray[np.int64]
    facts: ClientFacts


@dataclass(frozen=True, eq=False)
class RoundStart:
    """The broadcast of a round, and two numbers that affect speed and not results.

    Attributes:
        state: state of the server.
        mechanism: the local randomiser.
        chunk_size: number of clients that are trained at once.
        rounds_left: number of rounds that follow.
    """

    state: ServerState
    mechanism: Mechanism
    chunk_size: int
    rounds_left: int = 0


@dataclass(frozen=True, eq=False)
class Collected:
    """Result of a share: the clients' reports, and what only a simulation can see. It holds no trained weights that are sent.

    Attributes:
        clients: number of clients.
        reports: reports of these clients.
        noise: noise in the reports, for mechanisms with a noise schedule.
        outside: (L,) number of values outside their range, by layer; None if no range bounds them.
        clipped_records, records: number of records whose gradient was clipped, and of all records.
        kept: personal layers that the clients keep, in parts; empty if the model has none. They stay at the simulated clients.
    """

    clients: int
    reports: tuple[Reports, ...]
    noise: tuple[SentNoise, ...]
    outside: NDArray[np.int64] | None
    clipped_records: int
    records: int
    kept: tuple[KeptLayers, ...] = ()


def cut_into_shares(federation: Federation, cohort: NDArray[np.int64], facts: ClientFacts) -> list[Share]:
    """Cut a ``cohort`` into shares, with clients of similar size together, so that fewer steps are padding.

    The shares depend only on the cohort, not on the number of workers. ``facts`` are those of all clients of the federation.
    """
    order = np.argsort(federation.samples.sizes[cohort], kind="stable")
    # Whole blocks, and whole multiples of the memory alignment, so that the cut does not affect rounding.
    unit = federation.trainer.block if isinstance(federation.trainer, CompiledTrainer) else ALIGNED
    share_size = unit * -(-len(cohort) // (unit * _MAX_SHARES))  # rounded up to whole units
    pieces = split_evenly(len(cohort), share_size, unit)
    return [Share(cohort[order[piece]], facts.take(cohort[order[piece]])) for piece in pieces]


def collect(federation: Federation, start: RoundStart, share: Share, chunk_done: ChunkDone = lambda clients: None) -> Collected:
    """Train a ``share`` (a group of the round's clients) and return its reports. Trained weights are dropped after each chunk of clients.

    Where :class:`CountedSteps` can count clients' bits in the compiled training step, these clients have no separate encoding.

    Raises:
        PrivacyError: a client's values cannot be randomised, for example because they are NaN.
    """
    clipped_records, clipped_values = ClippedRecords(), ClippedCounter(start.state.ranges)
    if isinstance(federation.trainer, RecordGradientTrainer):
        federation = replace(federation, trainer=replace(federation.trainer, watch=clipped_records.add))
    reports: list[Reports] = []
    noise: list[SentNoise] = []
    kept: list[KeptLayers] = []
    counter = None
    if isinstance(federation.trainer, CompiledTrainer):
        ends = clipped_values.low, clipped_values.high
        counter = CountedSteps.of(federation, federation.trainer, start.state, start.mechanism, share.clients, ends)
    most = MOST_CLIENTS if counter is None else CLIENTS_PER_SCHEDULE  # counted clients leave no vectors in memory, so they may be more
    for rows in chunks_of_cohort(federation, share.clients, start.chunk_size, most):
        uncounted = rows if counter is None else rows[counter.add(share.clients[rows])]
        if uncounted.size:
            chunk_noise, chunk_reports, layers = _train_and_encode(federation, start, share, uncounted, clipped_values)
            if chunk_noise is not None:
                noise.append(chunk_noise)
            if layers is not None:
                kept.append(layers)
            _add_reports(reports, chunk_reports)
        chunk_done(len(rows))
    if counter is not None and counter.clients:
        reports.append(counter.reports())
        clipped_values.add_counts(counter.outside)
    outside = None if federation.perturbed == "gradient" else clipped_values.outside  # no range bounds a gradient
    clipped, records = clipped_records.clipped, clipped_records.all
    return Collected(len(share.clients), tuple(reports), tuple(noise), outside, clipped, records, kept=tuple(kept))


def _train_and_encode(
    federation: Federation, start: RoundStart, share: Share, rows: NDArray[np.intp], clipped: ClippedCounter
) -> tuple[SentNoise | None, Reports, KeptLayers | None]:
    """Train the clients at ``rows`` of a ``share``. Return noise, reports and personal layers, and add values to the counts ``clipped``."""
    clients, facts = share.clients[rows], share.facts.take(rows)
    mechanism = facts.with_noise_of_clients(start.mechanism)
    trained, personal = train_with_personal_layers(federation, start.state, clients, facts.personal)
    values = client_values(trained, start.state, federation.perturbed)
    try:
        kept = None if personal is None else KeptLayers.of(clients, personal)
        streams = federation.streams(start.state, clients, values, mechanism)
        batch = mechanism.encode(values, start.state.ranges, streams)
    except PrivacyError as error:
        raise PrivacyError(f"round {start.state.round + 1} stopped: {error}") from error
    if federation.perturbed != "gradient":
        clipped.add(values)
    return SentNoise.of(mechanism, clients, values, start.state.ranges, batch), batch, kept


def _add_reports(reports: list[Reports], batch: Reports) -> None:
    """Add ``batch`` to ``reports``. Bits are reduced to counts and vectors to sums, which is all that a round needs of them.

    All batches of a round have one type, so for bits and vectors ``reports`` holds nothing but their total.
    """
    total = reports.pop() if reports and type(batch) in (BitReports, VectorReports) else None
    if type(batch) is BitReports:  # subclasses need each client's bits together
        reports.append(total.plus(batch) if isinstance(total, BitCounts) else batch.to_counts())
    elif type(batch) is VectorReports:  # subclasses hold more than values
        reports.append(total.plus(batch) if isinstance(total, VectorTotal) else batch.to_total())
    else:
        reports.append(batch)


def without_parts_for_this_process(federation: Federation) -> Federation:
    """Return ``federation`` without the parts that only the process that starts the workers needs, so that less is sent to them."""
    return replace(federation, encoder=None, evaluation=Evaluation(federation.evaluation.samples), stopping=None, judged=None)


class Workers(Protocol):
    """Something that trains the shares of a round: this process, other processes, or a cluster."""

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Return the result of each of ``shares``, in their order.

        Raises:
            PrivacyError: a client's values cannot be randomised.
        """

    def score(self, federation: Federation, weights: Tensor) -> float:
        """Return the main metric of the model with ``weights``, see :meth:`Federation.score`."""


class OneProcess:
    """Trains all shares in this process, with one thread, since more threads would round differently."""

    def collect(self, federation: Federation, start: RoundStart, shares: Sequence[Share], clients_done: ClientsDone) -> list[Collected]:
        """Train the clients of ``shares`` here, and return each share's result. Call ``clients_done`` after each chunk of clients."""
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
    """Limit PyTorch to one thread on a CPU. The number of threads decides how a product is split, and so how it is rounded."""
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
"""What clients remember between rounds: tensors by name, with one row for each client. It is private and must not reach the server."""


@dataclass(frozen=True, eq=False)
class ClientFacts:
    """Facts that each of k clients knows before a round: how many samples it has, how often it took part, its memory, its own layers."""

    samples: Tensor
    joined: Tensor
    memory: Memory
    personal: Tensor | None = None

    def take(self, rows: NDArray[np.int64] | slice) -> ClientFacts:
        """Return the facts of the clients at ``rows``."""
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        memory = {name: values[index] for name, values in self.memory.items()}
        return ClientFacts(self.samples[index], self.joined[index], memory, None if self.personal is None else self.personal[index])

    def with_noise_of_clients(self, mechanism: Mechanism) -> Mechanism:
        """Return ``mechanism`` with the noise of these clients. It is unchanged unless its noise follows a schedule."""
        if not isinstance(mechanism, Gaussian):
            return mechanism
        return mechanism.for_clients({"samples": self.samples, "joined": self.joined, **self.memory})


@dataclass(frozen=True, eq=False)
class SentNoise:
    """The noise of ``clients`` (k,) in a round: standard deviation ``sigma`` (k, L), L2 ``norms`` (k,), and their memory afterwards."""

    clients: NDArray[np.int64]
    sigma: Tensor
    norms: Tensor
    memory: Memory

    @classmethod
    def of(
        cls, mechanism: Mechanism, clients: NDArray[np.int64], values: Tensor, ranges: LayerRanges, reports: Reports
    ) -> SentNoise | None:
        """Return the noise in the ``reports`` of ``values`` (k, d); None if the mechanism is none of LaDP-FL's Gaussian ones.

        These choose each round's noise by what a client has sent before, so the result also has what the clients remember for their next
        round. ``mechanism`` already knows what they remembered before this round (:meth:`ClientFacts.with_noise_of_clients`).
        """
        if not (isinstance(mechanism, Gaussian) and isinstance(reports, NoisyReports)):
            return None
        return cls(clients, reports.sigma, reports.noise_norm, mechanism.remember(values, ranges, reports))


class RoundNoise:
    """The noise of a whole round. It is empty for a mechanism without a noise schedule."""

    def __init__(self, mechanism: Mechanism, before: Memory, sent: Sequence[SentNoise]) -> None:
        """Join what all clients remembered ``before`` the round (tensors by name, a row for each) with the new rows of the senders."""
        self._mechanism, self._sent = mechanism, sent
        self._memory = dict(before)
        for name in {name for part in sent for name in part.memory}:
            self._memory[name] = self._memory[name].clone()  # the checkpoint before this round still uses the original
        for part in sent:
            for name, rows in part.memory.items():
                self._memory[name][torch.from_numpy(part.clients)] = rows

    def memory(self) -> dict[str, Tensor]:
        """Return what all clients remember after the round, by name; empty for a mechanism whose clients remember nothing."""
        return self._mechanism.schedule.memory_after_round(self._memory) if isinstance(self._mechanism, Gaussian) else {}

    def std(self) -> Tensor | None:
        """Return the standard deviation (L,) of the noise in the mean of all reports, by layer; None without a schedule of noise."""
        if not self._sent:
            return None
        sigma = self._by_client([part.sigma for part in self._sent])
        return sigma.square().sum(dim=0).sqrt() / len(sigma)

    def figures(self, sizes: tuple[int, ...]) -> dict[str, float]:
        """Return the round's figures by name; empty without a schedule. Where noise depends on the data, only a simulation knows them.

        ``protected_fraction``: share of weights that got noise, mean over clients. ``norm``: sum of the L2 norms of the clients' noise,
        LaDP-FL's "noise scale". ``multiplier_median``, ``multiplier_max``: noise of a layer divided by that of Full DP, over clients and
        layers with noise. ``paper_epsilon``: epsilon that the paper charges a client for the round if all clients take part (q = 1).
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
        """Return the cohort's rows sorted by client number. A sum's rounding depends on the order, so the order must be fixed."""
        return torch.cat(parts)[torch.from_numpy(np.concatenate([part.clients for part in self._sent])).argsort()]


class ClippedRecords:
    """Counts the records whose gradient exceeds the clipping norm."""

    def __init__(self) -> None:
        self.clipped, self.all = 0, 0

    def add(self, too_long: Tensor) -> None:
        """Count records. ``too_long`` (R,) is True for those whose gradient exceeds the clipping norm."""
        self.clipped += int(too_long.sum())
        self.all += len(too_long)


_MAX_UINT8 = 255
"""Largest value of a uint8 counter."""


class ClippedCounter:
    """Counts in ``outside`` (L,), for each layer, the values outside their range, which is ``low`` to ``high`` (d,)."""

    def __init__(self, ranges: LayerRanges) -> None:
        center, radius = ranges.expand()
        self.low, self.high = (center - radius).float().numpy(), (center + radius).float().numpy()
        self._starts = np.cumsum((0, *ranges.sizes[:-1]))  # first coordinate of each layer
        self.outside = np.zeros(len(ranges.sizes), dtype=np.int64)

    def add(self, values: Tensor) -> None:
        """Count the ``values`` (K, d) outside their range. Blocks of clients are so small that a uint8 holds the count of a coordinate."""
        for rows in client_blocks(len(values), values.shape[1], most=_MAX_UINT8):
            block = values[rows.start : rows.stop].numpy()
            outside = (block < self.low) | (block > self.high)
            self.add_counts(outside.sum(axis=0, dtype=np.uint8))

    def add_counts(self, outside: NDArray[np.uint8 | np.int32]) -> None:
        """Add the number of clients whose value lies ``outside`` the range, for each coordinate (d,)."""
        self.outside += np.add.reduceat(outside, self._starts, dtype=np.int64)
