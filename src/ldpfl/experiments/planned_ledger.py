"""Compute the ledger that a run of a config will end with, without training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from ldpfl.data.scaling import STAGES
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import initial_ranges, lowest_join_probability, measures_columns, measuring_mechanism, mechanism_of, model_of
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import NO_CALLER_OBJECTS, CallerObjects, check_persons_named, describe_data
from ldpfl.experiments.personal import split_layers, weights_of_layers
from ldpfl.experiments.record_sums import config_for_evaluation, evaluation_vector_layout, least_squares_solver, rounds_evaluated_at_clients
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.base import PublicState, in_round
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy import Ledger, Release
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import resting_on_users_code, without_claim
from ldpfl.server import evaluation_event, histogram_event, once_cohort, round_cohort, round_event

_MAX_CLIENT_ROUNDS = 2 * 10**8
"""Maximum number of clients times rounds, which takes about ten seconds."""


def planned_ledger(config: RunConfig, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> Ledger:
    """Return the ledger that a complete run of ``config``, on the data or model ``caller_objects``, will end with.

    The seed decides who takes part in which round, so the ledger is exact.

    Raises:
        ConfigError: the data set or the model is unknown, or does not fit; or the ledger cannot be foreseen, because it depends on
            training, or because random check-in on a user's own data depends on these data.
    """
    weights, ranges = initial_weights_and_ranges(config, caller_objects)
    mechanism = mechanism_of(config, ranges)
    evaluated_rounds = set(rounds_evaluated_at_clients(config))
    evaluation = evaluation_release(config) if evaluated_rounds else None
    stages = STAGES if measures_columns(config, describe_data(config, caller_objects).unscaled, mechanism) else 0
    _check_foreseeable(config, mechanism)
    clients, self_sampling, once = config.clients.count, lowest_join_probability(config), config.clients.once
    ledger, channel, colluding = Ledger(), config.shuffling.channel, config.shuffling.colluding
    if stages:  # histograms that measure a table's columns, before the first round
        histogram = released(measuring_mechanism(config, mechanism), ranges)
        for stage in range(1, stages + 1):
            ledger = ledger.charge(histogram_event(stage, histogram, clients, channel, colluding))
    # How many charged events each client has taken part in, and the number of the last event.
    events_joined, event_number = np.full(clients, stages, dtype=np.int64), stages
    for round_number in range(1, config.training.rounds + 1):
        if once:
            cohort = once_cohort(config.seed, round_number, clients, config.training.rounds)
        else:
            cohort = round_cohort(config.seed, round_number, clients, config.clients.fraction, self_sampling)
        events_joined[cohort] += 1
        event_number += 1
        # A round without clients is charged only with random check-in: nobody may learn who joined, nor that nobody did.
        if cohort.size or self_sampling is not None:
            mechanism_in_round = in_round(mechanism, PublicState(round_number, weights, None, ranges.sizes))
            release = released(mechanism_in_round, ranges, mechanism)
            event = round_event(event_number, release, cohort.size, events_joined, channel, self_sampling, once=once, colluding=colluding)
            ledger = ledger.charge(event)
        if round_number in evaluated_rounds and evaluation is not None:
            events_joined, event_number = events_joined + 1, event_number + 1
            ledger = ledger.charge(evaluation_event(event_number, evaluation, events_joined, channel, colluding))
    if not config.users_code:
        return ledger
    return Ledger(tuple(replace(event, release=resting_on_users_code(event.release)) for event in ledger.events))


def _check_foreseeable(config: RunConfig, mechanism: Mechanism) -> None:
    """Raise a :class:`ConfigError` if the ledger depends on training or on private data, or takes too long to plan."""
    if not mechanism.properties.foreseeable:
        raise ConfigError(
            f"the guarantee of mechanism {mechanism.name!r} depends on the data or on the course of training, so it cannot be planned: "
            "train the model, then give the run's folder to ldpfl ledger"
        )
    if lowest_join_probability(config) is not None and config.data.brought:
        raise ConfigError(
            "clients.self_sampling is on, so only the run itself decides which of your clients take part: set privacy.target_epsilon to "
            "'off', train the model, then give the run's folder to ldpfl ledger"
        )
    clients, rounds = config.clients.count, config.training.rounds
    if clients * rounds > _MAX_CLIENT_ROUNDS:
        raise ConfigError(
            f"{clients:,} clients times {rounds:,} rounds is more than the {_MAX_CLIENT_ROUNDS:,} that can be planned: set clients.count "
            "or training.rounds lower"
        )


def evaluation_release(config: RunConfig) -> Release:
    """Return the release of one evaluation at clients. It is the same for any number of outputs, so two are assumed.

    A paper's claim about its mechanism is about training, so it is left out.
    """
    ranges = evaluation_vector_layout(config, outputs=2).ranges
    return without_claim(released(mechanism_of(config_for_evaluation(config), ranges), ranges))


def check_settings_fit_together(config: RunConfig, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> None:
    """Raise, without training, if the model, the data set and the mechanism of a run do not fit together.

    Raises:
        ConfigError, PrivacyError: they do not fit together.
    """
    # Each of these calls raises if something does not fit. Their results are not needed.
    check_persons_named(config.data)
    lowest_join_probability(config)
    _, ranges = initial_weights_and_ranges(config, caller_objects)
    payload_bits(mechanism_of(config, ranges), ranges)


def initial_weights_and_ranges(config: RunConfig, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> tuple[Tensor, LayerRanges]:
    """Return the initial weights (d,) that clients share, and the clipping ranges of the first round.

    Raises:
        ConfigError: the data set or the model is unknown, or they do not fit.
    """
    data = describe_data(config, caller_objects)
    least_squares_solver(config, data)  # raises if a setting does not fit least squares
    module = model_of(config, data, caller_objects.module)
    layout, _ = split_layers(config, module)
    weights = weights_of_layers(module, layout)
    return weights, initial_ranges(config, layout, weights)
