"""What a config will release, without its data and without training."""

from __future__ import annotations

import numpy as np

from ldpfl import models
from ldpfl.data.loading import image_shape
from ldpfl.experiments.build import initial_ranges, lowest_probability, mechanism_of
from ldpfl.experiments.config import RunConfig
from ldpfl.layout import ParameterLayout
from ldpfl.privacy import Ledger
from ldpfl.simulation import round_cohort, round_event


def planned_ledger(config: RunConfig) -> Ledger:
    """Return the ledger that a complete run of ``config`` will end with.

    Who takes part in which round follows from the seed, so this is the ledger of that very run.

    Raises:
        ConfigError: the data set or the model is unknown, or does not fit.
    """
    shape, classes = image_shape(config.data.name)
    module = models.create(config.model.name, shape, classes, seed=0, options=config.model.options)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    ranges = initial_ranges(config, layout, weights)
    release = mechanism_of(config.mechanism, ranges).release(ranges)
    clients, lowest = config.clients.count, lowest_probability(config)
    joined = np.zeros(clients, dtype=np.int64)
    ledger = Ledger()
    for number in range(1, config.training.rounds + 1):
        cohort = round_cohort(config.seed, number, clients, config.clients.fraction, lowest)
        joined[cohort] += 1
        if cohort.size:
            ledger = ledger.charge(round_event(number, release, cohort.size, joined, config.shuffling.channel, lowest))
    return ledger
