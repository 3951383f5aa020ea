"""The server: its state, and the one transition that a round makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms import Mechanism, Perturbed
from ldpfl.mechanisms.base import PublicState, is_finite
from ldpfl.ranges import LayerRanges, RangeRule
from ldpfl.server.optimiser import ServerOptimiser
from ldpfl.shuffling import Aggregate, PartialPool, ReportPool


class NotFiniteError(PrivacyError):
    """What a round's reports add up to is no model: somebody reported huge values, or training diverged."""


@dataclass(frozen=True, eq=False)
class ServerState:
    """What the server knows after a round; all of it is public.

    Attributes:
        round: rounds completed.
        weights: (d,) float32 global vector.
        ranges: what the clients of the next round clamp to.
        previous: (d,) what was broadcast for that round; None before the first.
        velocity: (d,) what momentum carries over to the next round; None without momentum, and before the first round.
        average: (d,) mean of the weights after the rounds that are averaged; None where none was yet.
        size: (d,) moving second moment of the steps; None without a rule that needs it, and before the first round.
        best: (d,) what had the lowest loss on validation rows; None where nothing is validated.
    """

    round: int
    weights: Tensor
    ranges: LayerRanges
    previous: Tensor | None = None
    velocity: Tensor | None = None
    average: Tensor | None = None
    size: Tensor | None = None
    best: Tensor | None = None

    @property
    def model(self) -> Tensor:
        """(d,) what the run has to show for itself: the best, or the average, where there is one, else the weights that are broadcast."""
        if self.best is not None:
            return self.best
        return self.weights if self.average is None else self.average

    def public(self) -> PublicState:
        """Return what everybody knows when the next round begins."""
        return PublicState(self.round + 1, self.weights, self.previous, self.ranges.sizes)


def client_values(trained: Tensor, state: ServerState, perturbed: Perturbed) -> Tensor:
    """Turn ``trained`` weights or gradients (K, d) into what clients put into the mechanism: themselves or, in place, their change."""
    return trained.sub_(state.weights) if perturbed == "update" else trained


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
    velocity = None if perturbed == "weights" else optimiser.velocity(state.velocity, aggregate.mean, state.round + 1)
    size = None if perturbed == "weights" else optimiser.size(state.size, aggregate.mean)
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
    """Return what ``rule`` makes of the weights that were heard; a layer of which none was keeps its range.

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
