"""Speed of local training, eager and compiled, against a plain loop over clients, with the same threads, on a real data set.

    python benchmarks/local_training.py [--data mnist] [--data-dir DIR] [--clients 100] [--threads 2]
    python benchmarks/local_training.py --data table --model mlp

``table`` is made up: 60,000 rows of 20 numbers.

Trains one epoch of the model over all training samples (60,000 for MNIST) at batch size 10, in each way in turn. The plain loop is what
one would write by hand: it checks nothing, and trains every tenth client unless ``--whole`` is given. Compiling is not timed. Also prints
how far the weights are from those of ``LoopTrainer`` after 20 steps.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from ldpfl import ParameterLayout, data, models
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, Trainer, VectorizedTrainer, batch_schedule
from ldpfl.simulation.cohort_training import choose_chunk_size
from ldpfl.simulation.compiled_training import CompiledTrainer
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


class PlainLoop:
    """Trains one client after another with ``torch.optim.SGD``, as one would write it by hand."""

    def __init__(self, task: LocalTask) -> None:
        self._task = task

    def train(self, weights: torch.Tensor, schedule: BatchSchedule, round_number: int = 1) -> torch.Tensor:
        """Return the weights (K, d) of the K clients after training from ``weights`` (d,)."""
        task, trained = self._task, []
        module = copy.deepcopy(task.module)
        for batches in schedule.index:
            module.load_state_dict(task.layout.unflatten(weights))
            optimiser = torch.optim.SGD(module.parameters(), lr=task.optimiser.rate(round_number))
            for index in batches:
                inputs, targets = task.batch(index)
                optimiser.zero_grad()
                functional.cross_entropy(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            trained.append(task.layout.flatten({name: value.detach() for name, value in module.named_parameters()}))
        return torch.stack(trained)


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

    vectorised = VectorizedTrainer(task_of_clients, patches=not options.grouped)
    chunk = choose_chunk_size(vectorised, weights, schedule, torch.device("cpu"))
    loop_schedule = schedule if options.whole else schedule_of(schedule, slice(None, None, 10))
    ways: dict[str, tuple[Trainer, BatchSchedule, int]] = {
        "eager": (vectorised, schedule, chunk),
        "compiled": (CompiledTrainer(task_of_clients, BATCH_SIZE), schedule, options.clients),
        "plain loop": (PlainLoop(task_of_clients), loop_schedule, 1),
    }
    eight_clients = schedule_of(schedule, slice(0, 8)).head(20)
    expected = LoopTrainer(task_of_clients).train(weights, eight_clients)
    apart = {way: float((trainer.train(weights, eight_clients) - expected).abs().max()) for way, (trainer, *_) in ways.items()}

    table = Table(title=f"{options.model} on {options.data}, {options.clients} clients, batch {BATCH_SIZE}, {options.threads} threads")
    for heading in ("run", *(f"{way}, samples/s" for way in ways), "eager / loop", "compiled / loop"):
        table.add_column(heading, justify="right")
    for run in range(1, options.repeats + 1):
        eager, compiled, loop = (samples_per_second(trainer, weights, batches, many) for trainer, batches, many in ways.values())
        table.add_row(str(run), f"{eager:,.0f}", f"{compiled:,.0f}", f"{loop:,.0f}", f"{eager / loop:.2f}", f"{compiled / loop:.2f}")
    distances = ", ".join(f"{way} {distance:.1e}" for way, distance in apart.items())
    table.caption = f"eager in chunks of {chunk} clients; weights apart from LoopTrainer's after 20 steps: {distances}"
    Console().print(table)


if __name__ == "__main__":
    main()
