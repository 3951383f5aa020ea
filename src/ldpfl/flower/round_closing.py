"""Aggregate a round at the server: a training step, a least-squares solution, figures measured at clients, or column histograms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ldpfl.experiments.evaluation_figures import client_evaluation_entry
from ldpfl.flower.report_collection import Received
from ldpfl.flower.round_kinds import mean_held_back_records
from ldpfl.flower.run_progress import RunProgress
from ldpfl.flower.sent_vectors import summed_vectors
from ldpfl.flower.statistics import memory_with_counts
from ldpfl.mechanisms.dp_sgd import require_dp_sgd
from ldpfl.privacy import RoundEvent
from ldpfl.server import Checkpoint, NotFiniteError, Observed, close_round, close_with
from ldpfl.simulation.evaluating_records import RecordScores, as_measured
from ldpfl.simulation.evaluating_whole_clients import ClientScores
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.measuring import count_offset, points_per_row
from ldpfl.simulation.record_sums import NoisySum, noisy_sum
from ldpfl.transport.shuffling import PartialPool, ReportPool


def aggregate_round(progress: RunProgress, received: Received, pool: ReportPool | PartialPool, event: RoundEvent) -> Checkpoint:
    """Aggregate the reports in ``pool`` for the current round, and return the checkpoint after it.

    A round of training or of least squares gives new weights. An evaluation adds figures to the last checkpoint, and statistics add the
    columns' counts to its memory.

    Args:
        received: what arrived in the round. Only the length of a client's message is used, since ``pool`` has the reports.
        event: entry for the round in the ledger.

    Raises:
        NotFiniteError: the aggregate is not finite.
        PrivacyError: the reports are of another model.
    """
    if progress.planned.kind == "training":
        return close_round(
            progress.rules,
            progress.checkpoint,
            progress.round.mechanism,
            pool,
            event=event,
            uplink_bytes=received.uplink_bytes,
            observed=Observed(memory=progress.checkpoint.memory),
            began=progress.round_began,
        )
    vectors = None if progress.planned.kind == "statistics" else summed_vectors(progress.config, progress.planned.kind)
    if isinstance(vectors, ClientScores):  # evaluation: clients are protected as a whole, and each has sent a report of its figures
        return _after_evaluation(progress, vectors, pool.clients, event, vectors.estimated_sum(pool, progress.round.mechanism))
    mechanism = require_dp_sgd(progress.round.mechanism)
    sums = noisy_sum(pool, mechanism, progress.round.ranges.dimension)  # in points of the mechanism's integer lattice
    if not np.isfinite(sums.points).all():
        raise NotFiniteError(
            f"the sums of {progress.planned} have NaN or infinity, so its reports change nothing, and their privacy budget is spent; if "
            "that repeats, set a smaller learning rate"
        )
    if vectors is None:  # statistics: each client has subtracted a public offset from each count, see `count_offset`
        points_a_row = points_per_row(mechanism.steps, len(progress.stages.columns))
        counts = NoisySum(sums.points + count_offset(points_a_row, mechanism) * pool.clients, sums.noise)
        memory = memory_with_counts(progress.checkpoint.memory, progress.planned.number, counts, points_a_row)
        return replace(progress.checkpoint, memory=memory, ledger=progress.checkpoint.ledger.charge(event))
    total = sums.in_units(mechanism.steps)
    if isinstance(vectors, LeastSquares):
        return _after_least_squares(progress, received, pool.clients, event, total, vectors, mechanism.records)
    return _after_evaluation(progress, vectors, pool.clients, event, total)  # records are protected, and each has added its figures


def _after_least_squares(
    progress: RunProgress, received: Received, clients: int, event: RoundEvent, total: NoisySum, head: LeastSquares, records_each: float
) -> Checkpoint:
    """Return the checkpoint whose weights are the least-squares solution of the noisy sums ``total`` of ``clients`` clients.

    Args:
        received, event: as for :func:`aggregate_round`.
        head: solver for the model's last layer.
        records_each: mean number of records of a client as the config states it, since the true number is private.
    """
    before, records = progress.checkpoint, records_each * clients
    weights = head.solved(total, records)
    state = replace(before.state, round=before.state.round + 1, weights=weights, previous=before.state.weights)
    noise_std = [total.noise / records] * len(progress.layout.names)  # the same noise in each layer
    return close_with(
        progress.rules,
        before,
        state,
        clients,
        event=event,
        uplink_bytes=received.uplink_bytes,
        observed=Observed(noise_std=noise_std, memory=before.memory),
        began=progress.round_began,
    )


def _after_evaluation(progress: RunProgress, vectors: RecordScores, clients: int, event: RoundEvent, total: NoisySum) -> Checkpoint:
    """Return the last checkpoint with the figures that ``clients`` clients measured: the noisy sums ``total`` of their ``vectors``."""
    before = progress.checkpoint
    by_client = isinstance(vectors, ClientScores)
    # The number of added vectors. That of records is taken from the config (`stated`), because nodes do not send their own numbers.
    count = clients if by_client else mean_held_back_records(progress.config) * clients
    measured = as_measured(vectors.fitted_to(before.state.model), total, count, stated=not by_client)
    history = (*before.history[:-1], replace(before.history[-1], at_clients=measured))
    return replace(before, history=history, ledger=before.ledger.charge(event))


def evaluation_text(progress: RunProgress) -> str:
    """Return the figures that clients measured last, each with its 95 % interval, as text for the log; empty if there are none."""
    if progress.planned.kind != "evaluation":
        return ""
    metrics, vectors = progress.checkpoint.history[-1], summed_vectors(progress.config, "evaluation")
    if metrics.at_clients is None or not isinstance(vectors, RecordScores):  # the latter always is: the vectors of an evaluation are scores
        return ""
    figures = client_evaluation_entry(vectors, metrics.round, metrics.at_clients)["figures"]
    return "".join(f", {name} {figure['value']:.4f} ({figure['low']:.4f} to {figure['high']:.4f})" for name, figure in figures.items())
