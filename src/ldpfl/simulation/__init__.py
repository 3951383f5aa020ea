"""Train many simulated clients fast on one machine, round by round, resumable at any moment."""

from ldpfl.simulation.local_training import LocalTask, LoopTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.run import Federation, simulate, train_clients
from ldpfl.simulation.schedule import BatchSchedule, batch_schedule

__all__ = [
    "BatchSchedule",
    "Federation",
    "LocalTask",
    "LoopTrainer",
    "Trainer",
    "VectorizedTrainer",
    "batch_schedule",
    "simulate",
    "train_clients",
]
