"""The server's end of a round: aggregate, step, next ranges, account. The simulator and Flower share it.

:func:`close_round` goes from pooled reports to the next checkpoint; :func:`advance` is the part of it that changes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from ldpfl.errors import ConfigError, NotFiniteError
from ldpfl.mechanisms import Mechanism, Perturbed
from ldpfl.mechanisms.base import is_finite
from ldpfl.privacy import RoundEvent
from ldpfl.ranges import LayerRanges, RangeRule
from ldpfl.server.checkpoint import Checkpoint
from ldpfl.server.optimiser import ServerOptimiser
from ldpfl.server.round_metrics import RoundMetrics
from ldpfl.server.state import ServerState
from ldpfl.server.stopping import comparable
from ldpfl.shuffling import Aggregate, PartialPool, ReportPool


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
