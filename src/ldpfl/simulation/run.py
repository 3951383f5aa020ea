"""The rounds of a simulated federation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.images import Images
from ldpfl.errors import PrivacyError
from ldpfl.mechanisms import Mechanism, Perturbed, Reports
from ldpfl.privacy.events import Channel
from ldpfl.randomness import Purpose, SeededStreams, stream
from ldpfl.ranges import RangeRule
from ldpfl.server import (
    Checkpoint,
    Observed,
    ServerRules,
    ServerState,
    client_values,
    close_idle_round,
    close_round,
    round_cohort,
    round_event,
)
from ldpfl.shuffling import mix
from ldpfl.simulation.chunking import choose_chunk_size, split_evenly
from ldpfl.simulation.local_training import LocalTask, Trainer, accuracy
from ldpfl.simulation.observing import ClippedCounter, ScheduledNoise
from ldpfl.simulation.schedule import BatchSchedule, batch_schedule

_PROBED_CLIENTS = 256

ClientsDone = Callable[[int, int], None]
"""Called with (clients trained so far, cohort size) while a round goes on."""


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over the rounds of a run.

    Attributes:
        seed: all random streams derive from it.
        task: model, layout, training images and optimiser.
        trainer: turns a broadcast vector into the clients' trained vectors.
        samples: for each client the positions of its samples in the task's images.
        evaluation: images that the global model is measured on after each round.
        mechanism: what clients do to their values before they leave.
        perturbed: whether those values are trained weights or their change.
        rule: how the server chooses the next ranges.
        server_learning_rate: factor on the mean update.
        fraction: part of the clients that takes part in a round, drawn by the server.
        self_sampling: lowest probability with which a client joins, if each decides for itself (then ``fraction`` has no effect).
        epochs, batch_size: of local training.
        channel: what stands between clients and server in the deployment that is simulated; only the ledger depends on it.
        chunk_size: clients trained at once; ``None`` lets a probe choose. On a CPU it changes speed, never results.
    """

    seed: int
    task: LocalTask
    trainer: Trainer
    samples: tuple[NDArray[np.int64], ...]
    evaluation: Images
    mechanism: Mechanism
    perturbed: Perturbed
    rule: RangeRule
    server_learning_rate: float
    fraction: float
    epochs: int
    batch_size: int
    channel: Channel = "ideal-shuffler"
    self_sampling: float | None = None
    chunk_size: int | None = None

    @property
    def batch_width(self) -> int:
        """Batch size, or the size of the largest client where that is smaller; the same in every chunk."""
        return min(self.batch_size, max(own.size for own in self.samples))

    def cohort(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients of a round, in ascending order; none, if all of them decide so."""
        return round_cohort(self.seed, round_number, len(self.samples), self.fraction, self.self_sampling)

    @property
    def rules(self) -> ServerRules:
        """The server's part of all this."""
        names, rate = self.task.layout.names, self.server_learning_rate
        return ServerRules(names, self.perturbed, self.rule, rate, lambda weights: accuracy(self.task, weights, self.evaluation))

    @property
    def device(self) -> torch.device:
        return self.task.images.pixels.device


def simulate(
    federation: Federation, start: Checkpoint, rounds: int, clients_done: ClientsDone = lambda done, total: None
) -> Iterator[Checkpoint]:
    """Yield the checkpoint after each round, from ``start`` up to ``rounds`` rounds in all.

    Raises:
        PrivacyError: a client's values must not leave (NaN for instance). The round is lost, earlier ones are not.
    """
    checkpoint, chunk_size = start, federation.chunk_size
    joined = _rounds_joined(federation, start.state.round)
    while checkpoint.state.round < rounds:
        cohort = federation.cohort(checkpoint.state.round + 1)
        joined[cohort] += 1
        if cohort.size == 0:
            checkpoint = close_idle_round(federation.rules, checkpoint)
        else:
            chunk_size = chunk_size or _probe_chunk_size(federation, checkpoint.state, cohort)
            checkpoint = _round(federation, checkpoint, cohort, joined, chunk_size, clients_done)
        yield checkpoint


def _round(
    federation: Federation,
    before: Checkpoint,
    cohort: NDArray[np.int64],
    joined: NDArray[np.int64],
    chunk_size: int,
    clients_done: ClientsDone,
) -> Checkpoint:
    """Return what follows ``before`` when ``cohort`` takes part."""
    began = time.perf_counter()
    number, ranges = before.state.round + 1, before.state.ranges
    mechanism = federation.mechanism.in_round(before.state.public())
    earlier = joined.copy()
    earlier[cohort] -= 1
    noise = ScheduledNoise(mechanism, np.array([own.size for own in federation.samples]), earlier, before.memory)
    reports, clipped = _collect(federation, before.state, cohort, noise, chunk_size, clients_done)
    # From here on nothing knows which client sent what.
    pool = mix(reports, stream(federation.seed, Purpose.MIXING, number))
    recorded = noise.std()
    return close_round(
        federation.rules,
        before,
        mechanism,
        pool,
        event=lambda clients: round_event(number, mechanism.release(ranges), clients, joined, federation.channel, federation.self_sampling),
        uplink_bytes=pool.reports.bytes_per_client,
        observed=Observed(
            clipped=clipped.fractions(),
            noise_std=None if recorded is None else recorded.tolist(),
            noise=noise.figures(ranges.sizes),
            memory=noise.memory(),
        ),
        began=began,
    )


def _rounds_joined(federation: Federation, rounds: int) -> NDArray[np.int64]:
    """Return how many of the first ``rounds`` rounds each client took part in."""
    joined = np.zeros(len(federation.samples), dtype=np.int64)
    for number in range(1, rounds + 1):
        joined[federation.cohort(number)] += 1
    return joined


def train_cohort(
    federation: Federation,
    state: ServerState,
    cohort: NDArray[np.int64],
    chunk_size: int | None = None,
    clients_done: ClientsDone = lambda done, total: None,
) -> Tensor:
    """Return what each client of ``cohort`` would put into the mechanism in the round after ``state``, (K, d) float32.

    Row i belongs to ``cohort[i]``. These are private values, un-noised: for audits of a simulation, which hold them to
    judge what the server learns of them; nothing that plays the server may be given them.
    """
    if chunk_size is None:
        chunk_size = federation.chunk_size or _probe_chunk_size(federation, state, cohort)
    values, done = torch.empty(len(cohort), state.ranges.dimension), 0
    for places, trained in _trained(federation, state, cohort, chunk_size):
        values[torch.from_numpy(places)] = trained
        done += places.size
        clients_done(done, len(cohort))
    return values


def _trained(
    federation: Federation, state: ServerState, cohort: NDArray[np.int64], chunk_size: int
) -> Iterator[tuple[NDArray[np.intp], Tensor]]:
    """Train the cohort in chunks and yield each chunk's places in ``cohort`` and its clients' values, (k,) and (k, d)."""
    # Clients of like size together: fewer blanked-out steps. Streams belong to clients, so the order changes no result.
    order = np.argsort([federation.samples[client].size for client in cohort], kind="stable")
    for piece in split_evenly(len(cohort), chunk_size):
        places = order[piece]
        trained = train_clients(federation, state, cohort[places])
        yield places, client_values(trained, state, federation.perturbed)


def train_clients(federation: Federation, state: ServerState, clients: NDArray[np.int64]) -> Tensor:
    """Return the weights (k, d) that ``clients`` have after local training in the round after ``state``: private values, on the CPU."""
    return federation.trainer.train(state.weights, _schedule(federation, state, clients)).cpu()


def _collect(
    federation: Federation,
    state: ServerState,
    cohort: NDArray[np.int64],
    noise: ScheduledNoise,
    chunk_size: int,
    clients_done: ClientsDone,
) -> tuple[list[Reports], ClippedCounter]:
    """Train the cohort and return its reports; trained weights of a chunk are dropped as soon as it has reported."""
    reports: list[Reports] = []
    clipped = ClippedCounter(state.ranges)
    done = 0
    for places, values in _trained(federation, state, cohort, chunk_size):
        clients = cohort[places]
        streams = SeededStreams.for_clients(federation.seed, state.round + 1, clients.tolist())
        mechanism = noise.bind(clients, state.ranges.dimension)
        try:
            reports.append(mechanism.encode(values, state.ranges, streams))
        except PrivacyError as error:
            raise PrivacyError(f"round {state.round + 1} stopped: {error}") from error
        noise.record(mechanism, clients, values, state.ranges, reports[-1])
        clipped.add(values)
        done += places.size
        clients_done(done, len(cohort))
    return reports, clipped


def _schedule(federation: Federation, state: ServerState, clients: NDArray[np.int64]) -> BatchSchedule:
    generators = [stream(federation.seed, Purpose.BATCH_ORDER, state.round + 1, int(client)) for client in clients]
    samples = [federation.samples[client] for client in clients]
    schedule = batch_schedule(samples, generators, epochs=federation.epochs, batch_size=federation.batch_width)
    return schedule.to(federation.device)


def _probe_chunk_size(federation: Federation, state: ServerState, cohort: NDArray[np.int64]) -> int:
    largest_first = sorted(cohort.tolist(), key=lambda client: -federation.samples[client].size)
    schedule = _schedule(federation, state, np.array(largest_first[:_PROBED_CLIENTS]))
    return choose_chunk_size(federation.trainer, state.weights, schedule, federation.device)
