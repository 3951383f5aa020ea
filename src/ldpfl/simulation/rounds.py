"""The rounds of a simulated federation: train, encode, mix, then the server's end of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms import BitReports, Reports
from ldpfl.privacy import Release, RoundEvent
from ldpfl.privacy.authors import released
from ldpfl.server import Checkpoint, Observed, ServerState, close_idle_round, close_round, round_event
from ldpfl.shuffling import mix
from ldpfl.simulation.cohort_training import ClientsDone, chunk_size_for, trained_in_chunks
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.observing import ClippedCounter, ClippedRecords, ScheduledNoise


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
        if cohort.size == 0 or federation.has_stopped(checkpoint.history):
            checkpoint = _untrained_round(federation, checkpoint, cohort, joined)
        else:
            chunk_size = chunk_size or chunk_size_for(federation, checkpoint.state, cohort)
            checkpoint = _round(federation, checkpoint, cohort, joined, chunk_size, clients_done)
        joined[cohort] += 1
        yield checkpoint


def _untrained_round(federation: Federation, before: Checkpoint, cohort: NDArray[np.int64], joined: NDArray[np.int64]) -> Checkpoint:
    """Return what follows ``before`` when nobody trains: each client has decided so, in secret, or the run has stopped early.

    It is charged like any other round. After an early stop, because when to stop was decided by what was released, and what is proved
    for a number of rounds that is fixed beforehand holds for this one only.
    """
    after = close_idle_round(federation.rules, before)
    if cohort.size == 0 and federation.self_sampling is None:
        return after
    mechanism = federation.mechanism.in_round(before.state.public())
    release = released(mechanism, before.state.ranges, federation.mechanism)
    return replace(after, ledger=before.ledger.charge(_event(federation, before.state.round + 1, release, cohort.size, cohort, joined)))


def _event(
    federation: Federation, number: int, release: Release, clients: int, cohort: NDArray[np.int64], joined: NDArray[np.int64]
) -> RoundEvent:
    """Return the ledger's record of round ``number``, in which ``clients`` of the ``cohort`` reported."""
    return round_event(
        federation.measured + number,
        release,
        clients,
        joined + np.bincount(cohort, minlength=joined.size),
        federation.channel,
        federation.self_sampling,
        once=federation.once_over is not None,
    )


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
    noise = ScheduledNoise(mechanism, federation.samples.sizes, joined, before.memory)
    records = ClippedRecords()
    if isinstance(federation.trainer, RecordGradientTrainer):
        federation = replace(federation, trainer=replace(federation.trainer, watch=records.add))
    reports, clipped = _collect(federation, before.state, cohort, noise, chunk_size, clients_done)
    # From here on nothing knows which client sent what.
    pool = mix(reports, federation.mixing(before.state, reports))
    recorded = noise.std()
    return close_round(
        federation.rules,
        before,
        mechanism,
        pool,
        event=_event(federation, number, released(mechanism, ranges, federation.mechanism), pool.clients, cohort, joined),
        uplink_bytes=pool.reports.bytes_per_client,
        observed=Observed(
            clipped=() if federation.perturbed == "gradient" else clipped.fractions(),  # no range bounds gradients
            clipped_records=records.share,
            # What noise there was tells what it hides: of a user's own data it is not kept, but for how large it may be.
            noise_std=None if recorded is None or federation.own_data else recorded.tolist(),
            noise={} if federation.own_data else noise.figures(ranges.sizes),
            memory=noise.memory(),
        ),
        began=began,
    )


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
    for places, values in trained_in_chunks(federation, state, cohort, chunk_size):
        clients = cohort[places]
        mechanism = noise.bind(clients, state.ranges.dimension)
        try:
            streams = federation.streams(state, clients, values, mechanism)
            reports.append(mechanism.encode(values, state.ranges, streams))
        except PrivacyError as error:
            raise PrivacyError(f"round {state.round + 1} stopped: {error}") from error
        noise.record(mechanism, clients, values, state.ranges, reports[-1])
        if type(reports[-1]) is BitReports:  # other bits stay together, a client's in a row
            reports[-1] = reports[-1].counted()  # all that mixing keeps
        if federation.perturbed != "gradient":
            clipped.add(values)
        done += places.size
        clients_done(done, len(cohort))
    return reports, clipped


def _rounds_joined(federation: Federation, rounds: int) -> NDArray[np.int64]:
    """Return how many of the first ``rounds`` rounds each client took part in, and of the histograms before them."""
    joined = np.full(len(federation.samples), federation.measured, dtype=np.int64)
    for number in range(1, rounds + 1):
        joined[federation.cohort(number)] += 1
    return joined
