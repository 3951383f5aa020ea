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
from ldpfl.mechanisms.ranges import LayerRanges, RangeRule
from ldpfl.privacy import RoundEvent
from ldpfl.server.checkpoint import Checkpoint
from ldpfl.server.state import RoundMetrics, ServerState, comparable
from ldpfl.transport.shuffling import Aggregate, PartialPool, ReportPool

Schedule = Literal["constant", "linear", "cosine"]
"""Of a learning rate: the same in all rounds, or falling to 0 in equal steps, or along half a wave."""

Rule = Literal["sgd", "adam", "yogi"]
"""What the server makes of its steps: plain ones, or each weight's by how large they were (FedAdam, FedYogi)."""

_BETA_2, _TINY = 0.99, 1e-3
"""Of FedAdam and FedYogi, with tau (Reddi et al. 2021, section 4)."""


def scheduled(rate: float, schedule: Schedule, round_number: int, rounds: int) -> float:
    """Return the learning rate of a round, from 1, that began with ``rate``."""
    gone = min(round_number - 1, rounds) / rounds
    if schedule == "constant":
        return rate
    return rate * (1 - gone if schedule == "linear" else (1 + cos(pi * gone)) / 2)


@dataclass(frozen=True)
class ServerOptimiser:
    """Steps on the server (FedAvgM, Hsu et al. 2019; FedAdam and FedYogi, Reddi et al. 2021).

    Attributes:
        learning_rate: factor on the step.
        momentum: part of the last step that is carried on (heavy ball).
        schedule: of the learning rate over ``rounds``.
        rounds: of the run.
        measured: how many weights, the first ones, are measured in the first round, and kept; the others are trained from the second on.
        average: share of the run, counted from its end, over which weights are averaged; 0 keeps the last ones.
        rule: ``adam`` and ``yogi`` divide each weight's step by a moving size of its steps; then the mean of steps is a moving one as well.
        decay: part of the way back to ``start`` that is added to each mean.
        start: (d,) initial weights; needed for a decay.
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

    def decayed(self, mean: Tensor, weights: Tensor) -> Tensor:
        """Return the ``mean`` (d,) of a round with the pull from ``weights`` (d,) back to the initial ones."""
        if not self.decay or self.start is None:
            return mean
        return mean + self.decay * (self.start - weights)

    def velocity(self, before: Tensor | None, mean: Tensor, round_number: int) -> Tensor:
        """Return the direction (d,) of a round's step, from the last one and the mean update or gradient."""
        if self.measured:
            mean = mean.clone()
            (mean[self.measured :] if round_number == 1 else mean[: self.measured]).zero_()
        first = round_number <= (2 if self.measured else 1)
        if self.rule != "sgd":
            return mean * (1 - self.momentum) if before is None or first else torch.lerp(mean, before, self.momentum)
        return mean if before is None or first or self.momentum == 0 else torch.add(mean, before, alpha=self.momentum)

    def size(self, before: Tensor | None, mean: Tensor) -> Tensor | None:
        """Return the moving second moment (d,) of the steps; None where there is none."""
        if self.rule == "sgd":
            return None
        squares = mean.square()
        before = torch.full_like(mean, _TINY**2) if before is None else before
        if self.rule == "adam":
            return torch.lerp(squares, before, _BETA_2)
        return before - (1 - _BETA_2) * squares * torch.sign(before - squares)

    def step(self, velocity: Tensor, size: Tensor | None) -> Tensor:
        """Return the step (d,) at a learning rate of 1."""
        return velocity if size is None else velocity / (size.sqrt() + _TINY)

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1; what is measured is taken as it is."""
        if self.measured and round_number == 1:
            return 1.0
        return scheduled(self.learning_rate, self.schedule, round_number, self.rounds)

    def averaged(self, before: Tensor | None, weights: Tensor, round_number: int) -> Tensor | None:
        """Return the mean (d,) of the weights after the rounds that are averaged so far; None before they begin."""
        position = round_number - int((1 - self.average) * self.rounds)
        if self.average == 0 or position < 1:
            return None
        return weights.clone() if before is None else before + (weights - before) / position


@dataclass(frozen=True)
class ServerRules:
    """What the server does with the reports of a round; the same over all rounds of a run.

    Attributes:
        names: of the layers.
        perturbed: whether reports are of trained weights, of their change, or of gradients.
        rule: how the next ranges are chosen.
        optimiser: what is made of a mean update or gradient.
        score: judges new global weights (d,).
        validate: their loss on rows that say when to stop; None where none do.
    """

    names: tuple[str, ...]
    perturbed: Perturbed
    rule: RangeRule
    optimiser: ServerOptimiser
    score: Callable[[Tensor], float]
    validate: Callable[[Tensor], float] | None = None


@dataclass(frozen=True)
class Observed:
    """What only those who hold the clients' values can know of a round: a simulation does, a server does not.

    Attributes:
        clipped: by layer, share of values outside their range.
        clipped_records: share of records whose gradient was clipped.
        noise_std: by layer, the noise of the mean as it was; without it the largest possible is recorded.
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
    """Return what follows ``before`` when the reports in ``pool`` have arrived.

    Args:
        mechanism: of this round.
        event: the ledger's record of the round.
        uplink_bytes: length of one client's message.
        observed: empty on a server.
        began: ``time.perf_counter()`` when the round began.

    Raises:
        PrivacyError: reports of another model, or a mean that is not finite.
    """
    ranges = before.state.ranges
    state = advance(before.state, pool, mechanism, perturbed=rules.perturbed, rule=rules.rule, optimiser=rules.optimiser)
    largest = mechanism.noise(ranges).largest_std(pool.clients).tolist()
    if observed.noise_std is None:
        observed = replace(observed, noise_std=largest)
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
    """Return what follows ``before`` when reports of so many ``clients`` led to ``state``; other arguments as in :func:`close_round`."""
    ranges = before.state.ranges
    state, validation = _validated(rules, before, state)
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
    rule: RangeRule,
    optimiser: ServerOptimiser | None = None,
) -> ServerState:
    """Return the state after a round whose shuffled reports are ``pool``.

    Weights that no report spoke about keep their value, and ranges are updated from the other weights alone.
    Every client counts the same, as in LDP-FL Algorithm 1, line 11: weights by data size would tell data sizes.
    ``optimiser`` makes a step of the mean update or gradient, by default that itself; trained weights are taken as they are.

    Raises:
        NotFiniteError: a mean or new weights that are not finite: reports of finite values may add up to that.
        PrivacyError: no report, or reports of another model.
    """
    optimiser = optimiser or ServerOptimiser()
    aggregate = pool.aggregate(mechanism, state.ranges)
    if not is_finite(aggregate.mean):
        raise NotFiniteError(f"the mean of round {state.round + 1} is not finite; the round is dropped")
    mean = optimiser.decayed(aggregate.mean, state.weights)
    velocity = None if perturbed == "weights" else optimiser.velocity(state.velocity, mean, state.round + 1)
    size = None if perturbed == "weights" else optimiser.size(state.size, mean)
    if velocity is None:
        weights = aggregate.mean
    else:
        weights = torch.add(state.weights, optimiser.step(velocity, size), alpha=optimiser.rate(state.round + 1))
    if aggregate.reported is not None:
        weights = torch.where(aggregate.reported, weights, state.weights)
    if not is_finite(weights):
        raise NotFiniteError(f"the weights after round {state.round + 1} are not finite; the round is dropped")
    return ServerState(
        round=state.round + 1,
        weights=weights,
        ranges=_next_ranges(state.ranges, aggregate, rule),
        previous=state.weights,
        velocity=velocity if optimiser.momentum else None,
        size=size,
        average=optimiser.averaged(state.average, weights, state.round + 1),
    )


def _next_ranges(ranges: LayerRanges, aggregate: Aggregate, rule: RangeRule) -> LayerRanges:
    """Return what ``rule`` makes of the weights that were reported; a layer of which none was keeps its range.

    All layers do where the rule leaves what ranges can be: noise that feeds on itself must not end a run whose reports are charged.
    """
    try:
        return _ruled(ranges, aggregate, rule)
    except ConfigError:
        return ranges


def _ruled(ranges: LayerRanges, aggregate: Aggregate, rule: RangeRule) -> LayerRanges:
    if aggregate.reported is None:
        return rule.update(ranges, aggregate.mean, aggregate.variance)
    reported = rule.update(ranges.part(aggregate.reported), aggregate.mean[aggregate.reported], aggregate.variance[aggregate.reported])
    return ranges.with_part(reported, aggregate.reported)


def close_idle_round(rules: ServerRules, before: Checkpoint) -> Checkpoint:
    """Return what follows ``before`` when no report came: the same model, and nothing released."""
    state = replace(before.state, round=before.state.round + 1, previous=before.state.weights)
    nothing = [0.0] * len(rules.names)
    metrics = RoundMetrics(
        round=state.round,
        score=rules.score(state.model),
        clients=0,
        uplink_bytes_per_client=0,
        clipped_fraction=_by_layer(rules, nothing),
        noise_std=_by_layer(rules, nothing),
        radius=_by_layer(rules, state.ranges.radius.tolist()),
        seconds=0.0,
    )
    return replace(before, state=state, history=(*before.history, metrics))


def _validated(rules: ServerRules, before: Checkpoint, state: ServerState) -> tuple[ServerState, float | None]:
    """Return ``state`` with the best model so far, and its own loss."""
    if rules.validate is None:
        return state, None
    loss = rules.validate(state.model)
    earlier = [comparable(metrics.validation) for metrics in before.history if metrics.validation is not None]
    is_best = comparable(loss) < min(earlier, default=inf)
    return replace(state, best=state.model if is_best else before.state.best), loss


def _by_layer(rules: ServerRules, figures: Sequence[float]) -> dict[str, float]:
    """Return ``figures`` by layer name; nothing, where they are not known."""
    return dict(zip(rules.names, figures, strict=True)) if figures else {}
