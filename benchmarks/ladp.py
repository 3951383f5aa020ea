"""Seconds of a simulated round with each noise schedule, against Full DP, on one core.

    python benchmarks/ladp.py [--clients 40] [--fraction 0.25] [--epochs 1] [--batch-size 50] [--rounds 10] [--model two-layer-cnn]

All schedules go on round by round in turn, in the same process, so that ratios hold when the machine's speed drifts; the order
turns from round to round. Each is given the same cohorts and batches of ``mnist-5k``. The first round of each warms up and is
not counted. ``times full-dp`` is the median over rounds of the ratio to Full DP in the same round; ``of it the rest`` is what is not
local training: noise, reports, shuffling, aggregation, and the evaluation of the new model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ldpfl import data
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.server import Checkpoint
from ldpfl.simulation import BatchSchedule, Federation, Trainer, simulate

SCHEDULES = ("full-dp", "nbafl", "time-varying", "dpa", "sensitive-dp", "adapldp", "ladp", "ladp-sound")


@dataclass
class TimedTrainer:
    """A trainer that adds up the seconds that its training takes."""

    trainer: Trainer
    seconds: float = field(default=0.0)

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        began = time.perf_counter()
        trained = self.trainer.train(weights, schedule, round_number)
        self.seconds += time.perf_counter() - began
        return trained


def timed_federation(name: str, options: argparse.Namespace, task: data.Dataset) -> tuple[Federation, Checkpoint]:
    """Return a federation with the mechanism ``name`` and a timed trainer, and its start. A cohort is trained in one chunk."""
    settings = {
        "model.name": options.model,
        "clients.count": options.clients,
        "clients.fraction": options.fraction,
        "training.rounds": options.rounds + 1,
        "training.epochs": options.epochs,
        "training.batch_size": options.batch_size,
        "training.clip_norm": 1.0,
        "mechanism.name": name,
        "mechanism.perturbed": "update",
        **({} if name == "none" else {"mechanism.epsilon": 0.9}),
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    federation, start = build(parse_config("", overrides, origin="benchmark"), task, torch.device("cpu"))
    cohort = max(1, round(options.fraction * options.clients))
    return replace(federation, trainer=TimedTrainer(federation.trainer), chunk_size=cohort), start


def measure(options: argparse.Namespace, task: data.Dataset) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return by schedule the seconds of each round, and its seconds without local training."""
    names = ["none", *SCHEDULES]
    federations = {name: timed_federation(name, options, task) for name in names}
    runs: dict[str, Iterator[Checkpoint]] = {name: simulate(*federations[name], options.rounds + 1) for name in names}
    round_seconds: dict[str, list[float]] = {name: [] for name in names}
    other_seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            trainer = federations[name][0].trainer
            training_before = trainer.seconds if isinstance(trainer, TimedTrainer) else 0.0
            began = time.perf_counter()
            next(runs[name])
            seconds = time.perf_counter() - began
            training_seconds = trainer.seconds - training_before if isinstance(trainer, TimedTrainer) else 0.0
            round_seconds[name].append(seconds)
            other_seconds[name].append(seconds - training_seconds)
    return {name: times[1:] for name, times in round_seconds.items()}, {name: times[1:] for name, times in other_seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="two-layer-cnn")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    round_seconds, other_seconds = measure(options, data.load("mnist-5k"))

    table = Table(title=f"{options.model}, {options.fraction * options.clients:.0f} of {options.clients} clients, {options.rounds} rounds")
    for heading in ("schedule", "ms a round", "times full-dp", "of it the rest, ms"):
        table.add_column(heading, justify="right")
    for name in round_seconds:
        ratios = [ours / theirs for ours, theirs in zip(round_seconds[name], round_seconds["full-dp"], strict=True)]
        figures = (1e3 * statistics.median(round_seconds[name]), statistics.median(ratios), 1e3 * statistics.median(other_seconds[name]))
        table.add_row(name, f"{figures[0]:,.0f}", f"{figures[1]:.3f}", f"{figures[2]:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
