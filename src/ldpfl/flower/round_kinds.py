"""The rounds of a run on Flower, and what each round asks nodes for.

The sequence of rounds follows from the config alone, so that each node can check the server's request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ldpfl.data.scaling import STAGES
from ldpfl.errors import AskedForOther
from ldpfl.experiments.build import config_for_measuring
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.record_sums import config_for_evaluation, is_evaluated
from ldpfl.mechanisms.dp_sgd import DpSgdSettings

Kind = Literal["statistics", "training", "least-squares", "evaluation"]
"""What a round asks for. ``statistics``: histograms of a table's columns, before training. ``training``: what the mechanism protects, such
as gradients. ``least-squares``: sums of products, for a linear head. ``evaluation``: figures of records that clients hold back."""


@dataclass(frozen=True)
class PlannedRound:
    """A round of a run.

    Attributes:
        number: number of the round at the relay, in budgets and in the ledger, from 1. Rounds of all kinds are numbered together.
        kind: kind of values that nodes are asked for.
        trained: number of training rounds before this round.
    """

    number: int
    kind: Kind
    trained: int

    @property
    def is_training(self) -> bool:
        """Whether the round changes the model."""
        return self.kind in ("training", "least-squares")

    def __str__(self) -> str:
        if self.kind == "statistics":
            return f"statistics {self.number} of {STAGES}"
        return f"round {self.trained + 1}" if self.is_training else f"evaluation after round {self.trained}"


def planned_round(config: RunConfig, number: int) -> PlannedRound:
    """Return the round with this ``number`` of a run of ``config``.

    First come the rounds of statistics, then training. If clients evaluate the model, they do so after every ``evaluation.every`` rounds of
    training (0: never in between), and in the last round of the run.

    Raises:
        AskedForOther: the run includes an evaluation at clients, and ``number`` is greater than its last round.
    """
    rounds, every = config.training.rounds, config.evaluation.every
    training: Kind = "training" if config.training.method == "gradient" else "least-squares"
    place = number - statistics_rounds(config)  # of the round after the statistics, from 1
    if place <= 0:
        return PlannedRound(number, "statistics", trained=0)
    if not is_evaluated(config):
        return PlannedRound(number, training, trained=place - 1)
    if number > last_round(config, rounds):
        raise AskedForOther(
            f"the server asks for round {number}, but the config that it sent has only {last_round(config, rounds)} rounds: the server's "
            "operator has to correct this; nothing was sent"
        )
    if number == last_round(config, rounds):
        return PlannedRound(number, "evaluation", trained=rounds)
    block = every + 1  # rounds are in blocks of `every` training rounds and one evaluation
    if every and place % block == 0:
        return PlannedRound(number, "evaluation", trained=place // block * every)
    evaluations_before = (place - 1) // block if every else 0
    return PlannedRound(number, training, trained=place - 1 - evaluations_before)


def statistics_rounds(config: RunConfig) -> int:
    """Return how many rounds of a run of ``config`` measure the columns of nodes' tables, before the first round of training."""
    measured = config.data.at_nodes and config.data.scaling == "measured" and isinstance(config.mechanism, DpSgdSettings)
    return STAGES if measured else 0


def last_round(config: RunConfig, rounds: int) -> int:
    """Return the number of the last round, of any kind, of a run of ``config`` with ``rounds`` training rounds."""
    every, rounds_before_training = config.evaluation.every, statistics_rounds(config)
    if not is_evaluated(config) or rounds == 0:
        return rounds_before_training + rounds
    evaluations = ((rounds - 1) // every if every else 0) + 1  # one after every `every` training rounds, and one at the end
    return rounds_before_training + rounds + evaluations


def config_for_kind(config: RunConfig, kind: Kind) -> RunConfig:
    """Return ``config`` with the mechanism of a round of this ``kind``.

    Raises:
        ConfigError: ``config`` does not allow such a round.
    """
    if kind == "statistics":
        return config_for_measuring(config)
    return config_for_evaluation(config, records=mean_held_back_records(config)) if kind == "evaluation" else config


def mean_held_back_records(config: RunConfig) -> int:
    """Return the mean number of records (or persons) that a client holds back for evaluation, as the config states it: 1 or more.

    A node's own number is private and not used. Without ``evaluation.records``, the number follows from ``mechanism.records``, the mean
    number of records that remain for training.
    """
    # If a client has N records and holds back the share s of them, (1 - s) N remain for training.
    share, trained = config.evaluation.share, getattr(config.mechanism, "records", 0)
    return max(1, config.evaluation.records or round(trained * share / (1 - share)))
