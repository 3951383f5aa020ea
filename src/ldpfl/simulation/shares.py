"""A round's cohort in shares: what one of them is, and what comes of it, in whichever process it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms import BitReports, Mechanism, Reports
from ldpfl.mechanisms.reports.bits import BitCounts
from ldpfl.mechanisms.reports.vectors import VectorReports, VectorTotal
from ldpfl.server import ServerState, client_values
from ldpfl.simulation.chunking import ALIGNED, MOST_CLIENTS, split_evenly
from ldpfl.simulation.cohort_training import in_chunks, train_clients
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.counted_steps import TOGETHER, CountedSteps
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.observing import ClientFacts, ClippedCounter, ClippedRecords, SentNoise

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
    steps = CountedSteps.of(federation, start.state, start.mechanism, share.clients, clipped)
    for rows in in_chunks(federation, share.clients, start.chunk_size, MOST_CLIENTS if steps is None else TOGETHER):
        left = rows if steps is None else rows[steps.add(share.clients[rows])]
        if left.size:
            sent, batch = _reported(federation, start, share, left, clipped)
            noise += [] if sent is None else [sent]
            _keep(reports, batch)
        chunk_done(len(rows))
    if steps is not None and steps.clients:
        reports.append(steps.reports())
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
