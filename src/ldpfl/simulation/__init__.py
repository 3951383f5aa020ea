"""Train many simulated clients fast on one machine, round by round, resumable at any moment."""

from ldpfl.simulation.checkpoint import Checkpoint
from ldpfl.simulation.closing import Observed, ServerRules, close_idle_round, close_round
from ldpfl.simulation.cohort import round_cohort, round_event, sample_cohort, self_sampled_cohort
from ldpfl.simulation.local_training import LocalTask, LoopTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.metrics import RoundMetrics
from ldpfl.simulation.run import Federation, initial_checkpoint, simulate, train_clients
from ldpfl.simulation.schedule import BatchSchedule, batch_schedule

__all__ = [
    "BatchSchedule",
    "Checkpoint",
    "Federation",
    "LocalTask",
    "LoopTrainer",
    "Observed",
    "RoundMetrics",
    "ServerRules",
    "Trainer",
    "VectorizedTrainer",
    "batch_schedule",
    "close_idle_round",
    "close_round",
    "initial_checkpoint",
    "round_cohort",
    "round_event",
    "sample_cohort",
    "self_sampled_cohort",
    "simulate",
    "train_clients",
]
