"""The rounds of a simulated federation: train, encode, mix, then the server's end of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.mechanisms import Gaussian, payload_bits
from ldpfl.mechanisms.base import in_round
from ldpfl.mechanisms.dp_sgd import require_dp_sgd
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy import Release, RoundEvent
from ldpfl.privacy.authors import released
from ldpfl.server import Checkpoint, Observed, close_idle_round, close_round, close_with, evaluation_event, round_event
from ldpfl.simulation.cohort_training import ClientsDone, chunk_size_for
from ldpfl.simulation.evaluating_records import ClientEvaluation
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.personal_layers import personal_layers_after_round
from ldpfl.simulation.record_sums import client_sums, released_sum
from ldpfl.simulation.shares import ONE_PROCESS, ClientFacts, Collected, RoundNoise, RoundStart, Workers, cut_into_shares, one_thread
from ldpfl.transport.shuffling import mix
from ldpfl.util.randomness import Purpose, require_secret


def simulate(
    federation: Federation,
    start: Checkpoint,
    rounds: int,
    clients_done: ClientsDone = lambda done, total: None,
    workers: Workers = ONE_PROCESS,
) -> Iterator[Checkpoint]:
    """Yield the checkpoint after each round, from ``start`` up to ``rounds`` rounds in all.

    Raises:
        PrivacyError: a client's values cannot be randomised, for example because they are NaN. The round is lost, earlier rounds are not.
    """
    checkpoint, chunk_size = start, federation.chunk_size
    joined = _rounds_joined(federation, start.state.round)  # (N,) number of releases that each client took part in
    while checkpoint.state.round < rounds:
        cohort = federation.cohort(checkpoint.state.round + 1)
        if cohort.size == 0 or federation.has_stopped(checkpoint.history):
            checkpoint = _untrained_round(federation, checkpoint, cohort, joined)
        elif federation.head is not None:  # a linear model that is solved for, not trained
            checkpoint = _solved_round(federation, federation.head, checkpoint, cohort, joined)
        else:
            chunk_size = chunk_size or chunk_size_for(federation, checkpoint.state, cohort)
            checkpoint = _trained_round(federation, checkpoint, cohort, joined, chunk_size, rounds, clients_done, workers)
        joined[cohort] += 1
        if federation.judged is not None and federation.judged.is_due(checkpoint.state.round):
            joined += 1  # all clients take part in an evaluation
            checkpoint = _evaluate_at_clients(federation, federation.judged, checkpoint, joined)
        yield checkpoint


def _untrained_round(federation: Federation, before: Checkpoint, cohort: NDArray[np.int64], joined: NDArray[np.int64]) -> Checkpoint:
    """Return the checkpoint that follows ``before`` when nobody trains: no client has joined, or the run has stopped early.

    The round is charged like any other. Random check-in charges it because nobody may learn who joined. After an early stop it is charged
    because released values decided when to stop, while the guarantee is proved for a number of rounds that is fixed beforehand.
    """
    after = close_idle_round(replace(federation.rules, score=partial(_score_with_personal, federation, before.personal)), before)
    if cohort.size == 0 and federation.participation.self_sampling is None:
        return after  # everybody knows that nobody took part
    mechanism = in_round(federation.mechanism, before.state.public())
    release = released(mechanism, before.state.ranges, federation.mechanism)
    return replace(after, ledger=before.ledger.charge(_event(federation, before.state.round + 1, release, cohort.size, cohort, joined)))


def _score_with_personal(federation: Federation, personal: Tensor | None, weights: Tensor) -> float:
    """Return the main metric of the model with ``weights`` (d,), with all clients' ``personal`` layers (N, p) if it has any."""
    with one_thread(federation.device):
        return federation.score(weights, personal)


def _event(
    federation: Federation, number: int, release: Release, clients: int, cohort: NDArray[np.int64], joined: NDArray[np.int64]
) -> RoundEvent:
    """Return the privacy event of a round in which ``clients`` of ``cohort`` reported. ``joined`` (N,) counts clients' earlier releases."""
    participation = federation.participation
    return round_event(
        federation.ledger_number(number),
        federation.charged(release),
        clients,
        joined + np.bincount(cohort, minlength=joined.size),
        participation.channel,
        participation.self_sampling,
        once=participation.once_over is not None,
        colluding=participation.colluding,
    )


def _trained_round(
    federation: Federation,
    before: Checkpoint,
    cohort: NDArray[np.int64],
    joined: NDArray[np.int64],
    chunk_size: int,
    rounds: int,
    clients_done: ClientsDone,
    workers: Workers,
) -> Checkpoint:
    """Return the checkpoint that follows ``before`` once ``cohort`` has trained; for ``joined`` see :func:`_event`."""
    began = time.perf_counter()
    number, ranges = before.state.round + 1, before.state.ranges
    mechanism = in_round(federation.mechanism, before.state.public())
    memory = before.memory
    if isinstance(mechanism, Gaussian) and not memory:
        memory = mechanism.schedule.initial_memory(len(federation.samples), ranges.dimension)
    facts = ClientFacts(torch.from_numpy(federation.samples.sizes), torch.from_numpy(joined), memory, before.personal)
    start = RoundStart(before.state, mechanism, chunk_size, rounds_left=rounds - number)
    collected = workers.collect(federation, start, cut_into_shares(federation, cohort, facts), clients_done)
    noise = RoundNoise(mechanism, memory, [sent for part in collected for sent in part.noise])
    reports = [batch for part in collected for batch in part.reports]
    personal = before.personal  # None if the model has no personal layers
    if personal is not None:
        personal = personal_layers_after_round(personal, [layers for part in collected for layers in part.kept])
    # From here on nothing knows which client sent what.
    pool = mix(reports, federation.mixing_generator(before.state, reports))
    noise_std = noise.std()
    score = partial(workers.score, federation) if personal is None else partial(_score_with_personal, federation, personal)
    return close_round(
        replace(federation.rules, score=score),
        replace(before, personal=personal),
        mechanism,
        pool,
        event=_event(federation, number, released(mechanism, ranges, federation.mechanism), pool.clients, cohort, joined),
        uplink_bytes=pool.reports.bytes_per_client,
        observed=Observed(
            clipped=_clipped_shares(collected, ranges),
            clipped_records=_clipped_record_share(collected),
            # The noise that a schedule drew depends on the data. So a user's own data have only the largest possible noise recorded.
            noise_std=None if noise_std is None or federation.own_data else noise_std.tolist(),
            noise={} if federation.own_data else noise.figures(ranges.sizes),
            memory=noise.memory(),
        ),
        began=began,
    )


def _solved_round(
    federation: Federation, head: LeastSquares, before: Checkpoint, cohort: NDArray[np.int64], joined: NDArray[np.int64]
) -> Checkpoint:
    """Return the checkpoint that follows ``before`` when ``cohort`` sends the sums from which a linear head is solved in one round."""
    began, number, mechanism = time.perf_counter(), before.state.round + 1, require_dp_sgd(federation.mechanism)
    units, task = federation.samples.take(cohort), federation.task

    def sums_of(clients: range) -> Tensor:
        return client_sums(head, task, before.state.weights, units[clients.start : clients.stop], mechanism.steps, federation.persons)

    seed, purpose = require_secret(federation.secret_seed), Purpose.LEAST_SQUARES
    with one_thread(federation.device):
        lattice_sum = released_sum(sums_of, len(cohort), head.size, mechanism, seed=seed, purpose=purpose, number=number)
    records = mechanism.records * len(cohort)
    total = lattice_sum.in_units(mechanism.steps)
    state = replace(before.state, round=number, weights=head.solved(total, records), previous=before.state.weights)
    return close_with(
        federation.rules,
        before,
        state,
        len(cohort),
        event=_event(federation, number, released(mechanism, before.state.ranges), len(cohort), cohort, joined),
        uplink_bytes=payload_bits(mechanism, head.ranges) // 8,
        observed=Observed(noise_std=[total.noise / records] * len(task.layout.names)),
        began=began,
    )


def _evaluate_at_clients(federation: Federation, evaluation: ClientEvaluation, before: Checkpoint, joined: NDArray[np.int64]) -> Checkpoint:
    """Return ``before`` with its model evaluated at all clients, and charged. ``joined`` (N,) counts clients' releases, with this one."""
    number = before.state.round
    with one_thread(federation.device):
        result = evaluation.measured(federation.task, before.state.model, require_secret(federation.secret_seed), number)
    event_number = federation.ledger_number(number) + 1  # the evaluation follows its round in the ledger
    release, participation = federation.charged(evaluation.release), federation.participation
    event = evaluation_event(event_number, release, joined, participation.channel, participation.colluding)
    history = (*before.history[:-1], replace(before.history[-1], at_clients=result))
    return replace(before, history=history, ledger=before.ledger.charge(event))


def _clipped_shares(collected: Sequence[Collected], ranges: LayerRanges) -> list[float]:
    """Return the share of values outside their range, by layer; an empty list if values have no range."""
    clients = sum(part.clients for part in collected)
    # All parts have a number, or none has one: whether values have a range is the same for all clients.
    outside = [part.outside for part in collected if part.outside is not None]
    if not outside:
        return []
    return [int(count) / (size * clients) for count, size in zip(np.sum(outside, axis=0), ranges.sizes, strict=True)]


def _clipped_record_share(collected: Sequence[Collected]) -> float | None:
    """Return the share of records whose gradient was clipped; None if per-record gradients are not clipped."""
    records = sum(part.records for part in collected)
    return sum(part.clipped_records for part in collected) / records if records else None


def _rounds_joined(federation: Federation, rounds: int) -> NDArray[np.int64]:
    """Return how often each client (N,) took part so far: in histograms, in the first ``rounds`` rounds, and in their evaluations."""
    joined = np.full(len(federation.samples), federation.measured, dtype=np.int64)
    for number in range(1, rounds + 1):
        joined[federation.cohort(number)] += 1
    return joined if federation.judged is None else joined + federation.judged.before(rounds + 1)
