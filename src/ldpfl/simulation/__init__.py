"""Train many simulated clients fast on one machine, round by round, resumable at any moment."""

from ldpfl.simulation.cohort_training import train_clients, train_cohort
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.gradients import GradientTrainer, RecordGradientTrainer
from ldpfl.simulation.local_steps import BatchSchedule, batch_schedule
from ldpfl.simulation.local_training import LocalTask, LoopTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.rounds import simulate

__all__ = [
    "BatchSchedule",
    "Federation",
    "GradientTrainer",
    "LocalTask",
    "LoopTrainer",
    "RecordGradientTrainer",
    "Trainer",
    "VectorizedTrainer",
    "batch_schedule",
    "simulate",
    "train_clients",
    "train_cohort",
]
