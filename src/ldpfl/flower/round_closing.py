"""Aggregate a round at the server: a training step, a least-squares solution, figures measured at clients, or column histograms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ldpfl.experiments.client_evaluation import told
from ldpfl.flower.report_collection import Received
from ldpfl.flower.round_kinds import held_back_mean
from ldpfl.flower.run_progress import Course
from ldpfl.flower.sent_vectors import vectors_of
from ldpfl.flower.statistics import kept_with
from ldpfl.mechanisms.dp_sgd import of_records
from ldpfl.privacy import RoundEvent
from ldpfl.server import Checkpoint, NotFiniteError, Observed, close_round, close_with
from ldpfl.simulation.evaluating import RecordScores, as_measured
from ldpfl.simulation.evaluating_clients import ClientScores
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.measuring import point_of, taken_off
from ldpfl.simulation.record_sums import NoisySum, noisy_sum
from ldpfl.transport.shuffling import PartialPool, ReportPool


def closed(course: Course, received: Received, pool: ReportPool | PartialPool, event: RoundEvent) -> Checkpoint:
    """Aggregate the reports in ``pool`` for the current round, and return the checkpoint that follows the course's last one.

    Raises:
        NotFiniteError: the aggregate is not finite.
        PrivacyError: the reports are of another model.
    """
    if course.planned.kind == "training":
        return close_round(
            course.rules,
            course.last,
            course.round.mechanism,
            pool,
            event=event,
            uplink_bytes=received.uplink_bytes,
            observed=Observed(memory=course.last.memory),
            began=course.began,
        )
    vectors = None if course.planned.kind == "statistics" else vectors_of(course.config, course.planned.kind)
    if isinstance(vectors, ClientScores):
        return _after_evaluation(course, pool.clients, event, vectors.told(pool, course.round.mechanism))
    mechanism = of_records(course.round.mechanism)
    sums = noisy_sum(pool, mechanism, course.round.ranges.dimension)
    if not np.isfinite(sums.points).all():
        raise NotFiniteError(f"the sums of {course.planned} are not finite; the round is dropped")
    if vectors is None:
        point = point_of(mechanism.steps, len(course.stages.columns))
        sums = NoisySum(sums.points + taken_off(point, mechanism) * pool.clients, sums.noise)
        memory = kept_with(course.last.memory, course.planned.number, sums, point)
        return replace(course.last, memory=memory, ledger=course.last.ledger.charge(event))
    total = sums.in_units(mechanism.steps)
    if isinstance(vectors, LeastSquares):
        return _after_least_squares(course, received, pool.clients, event, total, vectors, mechanism.records)
    return _after_evaluation(course, pool.clients, event, total)


def _after_least_squares(
    course: Course, received: Received, clients: int, event: RoundEvent, total: NoisySum, head: LeastSquares, records_each: float
) -> Checkpoint:
    """Return the checkpoint whose weights are the least-squares solution of the noisy sums ``total``."""
    before, records = course.last, records_each * clients
    weights = head.solved(total, records)
    state = replace(before.state, round=before.state.round + 1, weights=weights, previous=before.state.weights)
    return close_with(
        course.rules,
        before,
        state,
        clients,
        event=event,
        uplink_bytes=received.uplink_bytes,
        observed=Observed(noise_std=[total.noise / records] * len(course.layout.names), memory=before.memory),
        began=course.began,
    )


def _after_evaluation(course: Course, clients: int, event: RoundEvent, total: NoisySum) -> Checkpoint:
    """Return the last checkpoint with the figures that clients measured, computed from the noisy sums ``total``."""
    before = course.last
    by_client = isinstance(vectors_of(course.config, "evaluation"), ClientScores)
    measured = as_measured(total, clients if by_client else held_back_mean(course.config) * clients, stated=not by_client)
    history = (*before.history[:-1], replace(before.history[-1], at_clients=measured))
    return replace(before, history=history, ledger=before.ledger.charge(event))


def figures_said(course: Course) -> str:
    """Return the figures that clients measured last, each with its 95 % interval, as text for the log; empty if there are none."""
    if course.planned.kind != "evaluation" or (metrics := course.last.history[-1]).at_clients is None:
        return ""
    vectors = vectors_of(course.config, "evaluation")
    if not isinstance(vectors, RecordScores):
        return ""
    figures = told(vectors, metrics.round, metrics.at_clients)["figures"]
    return "".join(f", {name} {figure['value']:.4f} ({figure['low']:.4f} to {figure['high']:.4f})" for name, figure in figures.items())
