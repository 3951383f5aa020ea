"""Speed of vectorised local training against the plain loop, with the same threads, on a real data set.

    python benchmarks/local_training.py [--data mnist] [--data-dir DIR] [--clients 100] [--threads 2]
    python benchmarks/local_training.py --data table --model mlp

``table`` is made up: 60,000 rows of 20 numbers.

Trains one epoch of the two-layer CNN over all training samples (60,000 for MNIST) at batch size 10, both ways, in
turn. Also prints how far the weights are apart after 20 steps, and the loop's speed is measured on every tenth client
unless ``--whole`` is given.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ldpfl import ParameterLayout, data, models
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, Trainer, VectorizedTrainer, batch_schedule
from ldpfl.simulation.cohort_training import choose_chunk_size
from ldpfl.simulation.local_steps import LocalOptimiser, split_evenly
from ldpfl.util.randomness import Purpose, SeededStreams, stream

BATCH_SIZE = 10


def schedule_of(schedule: BatchSchedule, chosen: slice) -> BatchSchedule:
    """Return the schedule of the ``chosen`` clients alone."""
    return BatchSchedule(schedule.index[chosen], schedule.mask[chosen])


def samples_per_second(trainer: Trainer, weights: torch.Tensor, schedule: BatchSchedule, chunk: int) -> float:
    """Train all clients, ``chunk`` at a time, and return the samples per second."""
    began = time.perf_counter()
    for piece in split_evenly(schedule.clients, chunk):
        trainer.train(weights, schedule_of(schedule, piece))
    return float(schedule.mask.sum()) / (time.perf_counter() - began)


def made_up_table() -> data.Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60_000, 20, generator=generator)
    samples = data.Samples(inputs, (inputs[:, 0] + torch.randn(60_000, generator=generator) > 0).long())
    return data.Dataset("table", samples, samples, 2, (), (), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("LDPFL_DATA_DIR"))
    parser.add_argument("--model", default="two-layer-cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grouped", action="store_true", help="leave convolutions over few channels as vmap makes them")
    parser.add_argument("--whole", action="store_true", help="let the loop train every client too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = made_up_table() if options.data == "table" else data.load(options.data, options.data_dir)
    module = models.create(options.model, task.shape, task.outputs, seed=0)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters()})
    task_of_clients = LocalTask(module, layout, task.train, task.mean, task.std, LocalOptimiser(0.03))
    parts = data.partition(task.train.targets.numpy(), options.clients, stream(0, Purpose.PARTITION))
    orders = [SeededStreams.of(range(options.clients), 0, Purpose.BATCH_ORDER, 1, 0)]
    schedule = batch_schedule(parts, orders, batch_size=BATCH_SIZE)

    vectorised, loop = VectorizedTrainer(task_of_clients, patches=not options.grouped), LoopTrainer(task_of_clients)
    chunk = choose_chunk_size(vectorised, weights, schedule, torch.device("cpu"))
    loop_schedule = schedule if options.whole else schedule_of(schedule, slice(None, None, 10))
    eight_clients = schedule_of(schedule, slice(0, 8)).head(20)
    largest_difference = float((vectorised.train(weights, eight_clients) - loop.train(weights, eight_clients)).abs().max())

    table = Table(title=f"{options.model} on {options.data}, {options.clients} clients, batch {BATCH_SIZE}, {options.threads} threads")
    for heading in ("run", "vectorised, samples/s", "loop, samples/s", "ratio"):
        table.add_column(heading, justify="right")
    for run in range(1, options.repeats + 1):
        ours = samples_per_second(vectorised, weights, schedule, chunk)
        theirs = samples_per_second(loop, weights, loop_schedule, 1)
        table.add_row(str(run), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    table.caption = f"chunks of {chunk} clients; weights apart after 20 steps: {largest_difference:.1e}"
    Console().print(table)


if __name__ == "__main__":
    main()
