"""The server's end of a round: aggregate, step, next ranges, account. The simulator and Flower share it.

:func:`close_round` goes from pooled reports to the next checkpoint; :func:`advance` is the part of it that changes the model. All of it is
post-processing of released reports, so it costs no privacy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import cos, inf, pi
from typing import Literal

import torch
from torch import Tensor

from ldpfl.errors import ConfigError, NotFiniteError
from ldpfl.mechanisms import Mechanism, Perturbed
from ldpfl.mechanisms.base import is_finite
from ldpfl.mechanisms.lattice import LatticeMechanism
from ldpfl.mechanisms.ranges import LayerRanges, NormQuantile, RangeRule
from ldpfl.privacy import RoundEvent
from ldpfl.server.checkpoint import Checkpoint
from ldpfl.server.state import RoundMetrics, ServerState, loss_for_comparison
from ldpfl.transport.shuffling import Aggregate, PartialPool, ReportPool

Schedule = Literal["constant", "linear", "cosine"]
"""Schedule of a learning rate: constant, or falling to 0 linearly or along half a cosine."""

Rule = Literal["sgd", "adam", "yogi"]
"""Optimiser of the server: plain steps, or steps that are scaled for each weight by its past steps (FedAdam, FedYogi)."""

_BETA_2, _TINY = 0.99, 1e-3
"""beta 2, of the moving average of squares, and tau, which is added to its root, of FedAdam and FedYogi (Reddi et al. 2021, section 4)."""


def scheduled_rate(rate: float, schedule: Schedule, round_number: int, rounds: int) -> float:
    """Return the learning rate of the round ``round_number``, counted from 1, of a schedule that starts at ``rate``.

    A falling schedule would reach 0 in the round after the last of ``rounds``.
    """
    elapsed = min(round_number - 1, rounds) / rounds  # at most 1, also if the run was extended
    if schedule == "constant":
        return rate
    if schedule == "linear":
        return rate * (1 - elapsed)
    return rate * ((1 + cos(pi * elapsed)) / 2)  # half a cosine


@dataclass(frozen=True)
class ServerOptimiser:
    """Steps on the server (FedAvgM, Hsu et al. 2019; FedAdam and FedYogi, Reddi et al. 2021).

    Attributes:
        learning_rate: factor on the step.
        momentum: fraction of the last step that is added to the next (heavy ball).
        schedule: schedule of the learning rate over ``rounds``.
        rounds: number of rounds of the run.
        measured: number of weights, at the start of the vector, that are measured in the first round and then fixed. The others are
            trained from the second round on. With 0, all weights are trained from the first round on.
        average: share of the rounds, at the end of the run, over which weights are averaged; 0 uses the last weights.
        rule: ``adam`` and ``yogi`` divide each weight's step by the root of a moving average of its squared steps. Then momentum is an
            exponential moving average as well.
        decay: factor on the distance from the weights to ``start``. The product is added to each mean (weight decay).
        start: (d,) initial weights; needed for ``decay``.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    schedule: Schedule = "constant"
    rounds: int = 1
    average: float = 0.0
    measured: int = 0
    rule: Rule = "sgd"
    decay: float = 0.0
    start: Tensor | None = field(default=None, compare=False)

    def with_weight_decay(self, mean: Tensor, weights: Tensor) -> Tensor:
        """Return the ``mean`` (d,) of a round with the weight decay from ``weights`` (d,) toward the initial weights."""
        if not self.decay or self.start is None:
            return mean
        return mean + self.decay * (self.start - weights)

    def velocity(self, previous: Tensor | None, mean: Tensor, round_number: int) -> Tensor:
        """Return the direction (d,) of a round's step, from the ``mean`` update or gradient and the ``previous`` direction.

        Momentum adds directions for the rule "sgd", and averages them for the other rules. The first round that trains has no momentum.
        """
        # If the first ``measured`` weights are measured, round 1 sets only these, to the mean of what clients measured. Later rounds train
        # only the others.
        if self.measured:
            mean = mean.clone()
            unchanged_part = mean[self.measured :] if round_number == 1 else mean[: self.measured]
            unchanged_part.zero_()  # a view, so this changes ``mean``
        first_training_round = 2 if self.measured else 1
        if round_number <= first_training_round:
            previous = None
        if self.rule != "sgd":
            return mean * (1 - self.momentum) if previous is None else torch.lerp(mean, previous, self.momentum)
        return mean if previous is None or self.momentum == 0 else torch.add(mean, previous, alpha=self.momentum)

    def size(self, previous: Tensor | None, mean: Tensor) -> Tensor | None:
        """Return the moving average (d,) of squared mean updates after this round's ``mean``; None for the rule "sgd".

        ``previous`` is the moving average after the round before. In the first round it is None, which counts as tau^2 (``_TINY``).
        """
        if self.rule == "sgd":
            return None
        squares = mean.square()
        previous = torch.full_like(mean, _TINY**2) if previous is None else previous
        if self.rule == "adam":
            return torch.lerp(squares, previous, _BETA_2)
        return previous - (1 - _BETA_2) * squares * torch.sign(previous - squares)  # FedYogi moves toward the squares by a part of them

    def step(self, velocity: Tensor, size: Tensor | None) -> Tensor:
        """Return the step (d,) at a learning rate of 1. ``size`` is the result of :meth:`size`, which scales the step of each weight."""
        return velocity if size is None else velocity / (size.sqrt() + _TINY)

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1. It is 1 in a round that measures weights."""
        if self.measured and round_number == 1:
            return 1.0
        return scheduled_rate(self.learning_rate, self.schedule, round_number, self.rounds)

    def average_weights(self, previous: Tensor | None, weights: Tensor, round_number: int) -> Tensor | None:
        """Return the mean (d,) of the weights over the last share ``average`` of the run's rounds; None before the first such round.

        ``previous`` is the mean over the earlier ones of these rounds.
        """
        averaged_rounds = round_number - int((1 - self.average) * self.rounds)  # number of averaged rounds so far, this one included
        if self.average == 0 or averaged_rounds < 1:
            return None
        return weights.clone() if previous is None else previous + (weights - previous) / averaged_rounds


@dataclass(frozen=True)
class ServerRules:
    """The server's settings for aggregating a round. They are the same for all rounds of a run.

    Attributes:
        names: names of the layers.
        perturbed: whether reports are of trained weights, of updates, or of gradients.
        rule: rule for the next ranges, or for the next clipping norm.
        optimiser: optimiser that turns a mean update or gradient into a step.
        score: function from global weights (d,) to the main metric.
        validate: function from global weights (d,) to the loss on the rows for early stopping; None without early stopping.
    """

    names: tuple[str, ...]
    perturbed: Perturbed
    rule: RangeRule | NormQuantile
    optimiser: ServerOptimiser
    score: Callable[[Tensor], float]
    validate: Callable[[Tensor], float] | None = None


@dataclass(frozen=True)
class Observed:
    """Figures of a round that depend on the clients' values. A simulation knows them, a real server does not.

    Attributes:
        clipped: share of values outside their range, by layer.
        clipped_records: share of records whose gradient was clipped.
        noise_std: actual standard deviation of the noise in the mean, by layer. Without it, the largest possible one is recorded.
        noise: figures of a noise schedule.
        memory: what clients remember after the round.
    """

    clipped: Sequence[float] = ()
    clipped_records: float | None = None
    noise_std: Sequence[float] | None = None
    noise: dict[str, float] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)


def close_round(
    rules: ServerRules,
    before: Checkpoint,
    mechanism: Mechanism,
    pool: ReportPool | PartialPool,
    *,
    event: RoundEvent,
    uplink_bytes: int,
    observed: Observed,
    began: float,
) -> Checkpoint:
    """Aggregate a round: return the checkpoint that follows ``before`` once the reports in ``pool`` have arrived.

    Args:
        mechanism: mechanism of this round.
        event: privacy event of the round, for the ledger.
        uplink_bytes: number of bytes of one client's message.
        observed: figures that only a simulation knows; empty on a real server. Without the noise that a simulation measured, the
            mechanism's largest possible noise is recorded.
        began: ``time.perf_counter()`` when the round began.

    Raises:
        PrivacyError: the reports are of another model, or their mean is not finite.
    """
    ranges = before.state.ranges
    state = advance(before.state, pool, mechanism, perturbed=rules.perturbed, rule=rules.rule, optimiser=rules.optimiser)
    largest_std = mechanism.noise(ranges).largest_std(pool.clients).tolist()
    if observed.noise_std is None:
        observed = replace(observed, noise_std=largest_std)
    return close_with(rules, before, state, pool.clients, event=event, uplink_bytes=uplink_bytes, observed=observed, began=began)


def close_with(
    rules: ServerRules,
    before: Checkpoint,
    state: ServerState,
    clients: int,
    *,
    event: RoundEvent,
    uplink_bytes: int,
    observed: Observed,
    began: float,
) -> Checkpoint:
    """Return the checkpoint that follows ``before`` after reports of ``clients`` clients led to ``state``.

    The other arguments are those of :func:`close_round`, which calls this function.
    """
    ranges = before.state.ranges
    state, validation = _with_best_model(rules, before, state)  # from here on, ``state`` has the best model
    metrics = RoundMetrics(
        round=state.round,
        score=rules.score(state.model),
        clients=clients,
        uplink_bytes_per_client=uplink_bytes,
        clipped_fraction=_by_layer(rules, observed.clipped),
        clipped_records=observed.clipped_records,
        noise_std=_by_layer(rules, observed.noise_std or ()),
        radius=_by_layer(rules, ranges.radius.tolist()),
        seconds=time.perf_counter() - began,
        validation=validation,
        noise=observed.noise,
    )
    return replace(before, state=state, history=(*before.history, metrics), ledger=before.ledger.charge(event), memory=observed.memory)


def advance(
    state: ServerState,
    pool: ReportPool | PartialPool,
    mechanism: Mechanism,
    *,
    perturbed: Perturbed,
    rule: RangeRule | NormQuantile,
    optimiser: ServerOptimiser | None = None,
) -> ServerState:
    """Return the state after a round in which ``pool`` holds the reports of all clients.

    If clients reported trained weights, their mean replaces the global weights. Otherwise ``optimiser`` turns the mean update or gradient
    into a step; the default adds the mean unchanged. All clients weigh the same, as in LDP-FL Algorithm 1, line 11, because weighting by
    data size would reveal data sizes. Weights that are in no report keep their value, and ranges are updated from the other weights alone.

    Raises:
        NotFiniteError: the mean or the new weights are not finite. Sums of finite reports may overflow.
        PrivacyError: there is no report, or the reports are of another model.
    """
    optimiser = optimiser or ServerOptimiser()
    aggregate = pool.aggregate(mechanism, state.ranges)
    if not is_finite(aggregate.mean):
        raise NotFiniteError(
            f"the mean of the reports of round {state.round + 1} is not finite: its reports stay charged, but the model is left as it was. "
            "If that repeats, set a smaller training.learning_rate"
        )
    velocity: Tensor | None = None
    size: Tensor | None = None
    if perturbed == "weights":
        weights = aggregate.mean
    else:
        mean = optimiser.with_weight_decay(aggregate.mean, state.weights)
        velocity = optimiser.velocity(state.velocity, mean, state.round + 1)
        size = optimiser.size(state.size, mean)  # the moving average by whose root FedAdam and FedYogi divide; None for "sgd"
        weights = torch.add(state.weights, optimiser.step(velocity, size), alpha=optimiser.rate(state.round + 1))
    if aggregate.reported is not None:  # a mask (d,) of the weights that are in some report
        weights = torch.where(aggregate.reported, weights, state.weights)
    if not is_finite(weights):
        raise NotFiniteError(
            f"the weights after round {state.round + 1} are not finite: its reports stay charged, but the model is left as it was. "
            "If that repeats, set a smaller training.server_learning_rate or training.learning_rate"
        )
    if isinstance(rule, NormQuantile):
        ranges = _next_norm(state.ranges, pool, mechanism, rule)
    else:
        ranges = _next_ranges(state.ranges, aggregate, rule)
    return ServerState(
        round=state.round + 1,
        weights=weights,
        ranges=ranges,
        previous=state.weights,
        velocity=velocity if optimiser.momentum else None,
        size=size,
        average=optimiser.average_weights(state.average, weights, state.round + 1),
    )


def _next_norm(ranges: LayerRanges, pool: ReportPool | PartialPool, mechanism: Mechanism, rule: NormQuantile) -> LayerRanges:
    """Return ranges whose radius is the next clipping norm, from the share of vectors that were not clipped.

    That share is estimated from the reports, each of which states with noise how many of its vectors were clipped.
    """
    if not (isinstance(mechanism, LatticeMechanism) and isinstance(pool, ReportPool)):  # other reports do not count clipped vectors
        raise TypeError(
            f"reports of the mechanism {mechanism.name} do not count clipped vectors, which clipping.target_quantile needs: "
            "leave that setting out"
        )
    return rule.ranges_after_round(ranges, mechanism.fraction_within([pool.reports], ranges))


def _next_ranges(ranges: LayerRanges, aggregate: Aggregate, rule: RangeRule) -> LayerRanges:
    """Return the next ranges by ``rule`` from the reported weights. A layer without reported weights keeps its range.

    If the rule's result is not a valid range, all layers keep their ranges. Noise can make such a result, and must not end a run whose
    reports are already charged.
    """
    reported = aggregate.reported
    try:
        if reported is None:  # all weights were reported
            return rule.update(ranges, aggregate.mean, aggregate.variance)
        updated = rule.update(ranges.part(reported), aggregate.mean[reported], aggregate.variance[reported])
        return ranges.with_part(updated, reported)
    except ConfigError:
        return ranges


def close_idle_round(rules: ServerRules, before: Checkpoint) -> Checkpoint:
    """Return the checkpoint that follows ``before`` after a round without reports: the model is unchanged and nothing is charged."""
    state = replace(before.state, round=before.state.round + 1, previous=before.state.weights)
    zeros = [0.0] * len(rules.names)
    metrics = RoundMetrics(
        round=state.round,
        score=rules.score(state.model),
        clients=0,
        uplink_bytes_per_client=0,
        clipped_fraction=_by_layer(rules, zeros),
        noise_std=_by_layer(rules, zeros),
        radius=_by_layer(rules, state.ranges.radius.tolist()),
        seconds=0.0,
    )
    return replace(before, state=state, history=(*before.history, metrics))


def _with_best_model(rules: ServerRules, before: Checkpoint, state: ServerState) -> tuple[ServerState, float | None]:
    """Return ``state`` with the model of the lowest validation loss so far, and the loss of the current model.

    Without early stopping, the loss is None and ``state`` is unchanged.
    """
    if rules.validate is None:
        return state, None
    loss = rules.validate(state.model)  # the current model, since ``state`` has no best one yet
    earlier_losses = [loss_for_comparison(metrics.validation) for metrics in before.history if metrics.validation is not None]
    is_best = loss_for_comparison(loss) < min(earlier_losses, default=inf)
    return replace(state, best=state.model if is_best else before.state.best), loss


def _by_layer(rules: ServerRules, figures: Sequence[float]) -> dict[str, float]:
    """Return ``figures`` by layer name, or an empty dict if there are none."""
    return dict(zip(rules.names, figures, strict=True)) if figures else {}
