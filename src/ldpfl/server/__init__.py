"""The server: its state, the choice of a round's clients, the aggregation of a round, and checkpoints. Simulator and Flower share it."""

from ldpfl.errors import NotFiniteError
from ldpfl.mechanisms import Perturbed
from ldpfl.server.checkpoint import Checkpoint, initial_checkpoint
from ldpfl.server.cohort import (
    evaluation_event,
    histogram_event,
    once_cohort,
    reserves,
    round_cohort,
    round_event,
    sample_cohort,
    self_sampled_cohort,
)
from ldpfl.server.round_aggregation import Observed, ServerOptimiser, ServerRules, advance, close_idle_round, close_round, close_with
from ldpfl.server.round_log import check_log_size
from ldpfl.server.state import RoundMetrics, ServerState, client_values, has_stopped

__all__ = [
    "Checkpoint",
    "NotFiniteError",
    "Observed",
    "Perturbed",
    "RoundMetrics",
    "ServerOptimiser",
    "ServerRules",
    "ServerState",
    "advance",
    "check_log_size",
    "client_values",
    "close_idle_round",
    "close_round",
    "close_with",
    "evaluation_event",
    "has_stopped",
    "histogram_event",
    "initial_checkpoint",
    "once_cohort",
    "reserves",
    "round_cohort",
    "round_event",
    "sample_cohort",
    "self_sampled_cohort",
]
