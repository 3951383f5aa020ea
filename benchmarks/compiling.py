"""What compiling a training step costs and saves, by kind of model: python benchmarks/compiling.py [--models mlp gru-8] [--clients 40]

Made-up samples, batches of 10, one thread. A row a model: microseconds of processor time a sample by a loop over clients, and for many
clients at once (eager); operations of an eager step; seconds of processor time until a compiled step has run for the first time, without
PyTorch's cache on disk; microseconds a sample by compiled steps, in turns with eager ones, the fastest of each; and after how many samples
the compiler's time is won back, as measured and by the rule of ``auto``. Each model is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the compiler is then a child of this process

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ldpfl import ParameterLayout, data
from ldpfl.models import images, texts
from ldpfl.simulation import BatchSchedule, LocalTask, LoopTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.local_steps import LocalOptimiser

BATCH, STEPS, VOCABULARY = 10, 4, 1000


def digits(module: nn.Module) -> tuple[nn.Module, Tensor]:
    return module, torch.randint(0, 256, (400, 1, 28, 28), dtype=torch.uint8)


def rows(module: nn.Module) -> tuple[nn.Module, Tensor]:
    return module, torch.randn(400, 20)


def tokens(module: nn.Module, length: int) -> tuple[nn.Module, Tensor]:
    return module, torch.randint(1, VOCABULARY, (400, length))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp, a table": lambda: rows(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))),
    "logistic, MNIST": lambda: digits(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))),
    "two-layer CNN": lambda: digits(images.TwoLayerCNN((1, 28, 28), 10)),
    "embedding bag": lambda: tokens(texts.EmbeddingBag(VOCABULARY, 2, by_place=False), 32),
    "transformer, 1 layer": lambda: tokens(texts.Transformer(VOCABULARY, 2, by_place=False, depth=1), 32),
    "transformer, 2 layers": lambda: tokens(texts.Transformer(VOCABULARY, 2, by_place=False), 32),
    "transformer, 4 layers": lambda: tokens(texts.Transformer(VOCABULARY, 2, by_place=False, depth=4), 32),
    "gru, 4 tokens": lambda: tokens(texts.GRU(VOCABULARY, 2, by_place=False), 4),
    "gru, 8 tokens": lambda: tokens(texts.GRU(VOCABULARY, 2, by_place=False), 8),
    "gru, 16 tokens": lambda: tokens(texts.GRU(VOCABULARY, 2, by_place=False), 16),
    "gru, 32 tokens": lambda: tokens(texts.GRU(VOCABULARY, 2, by_place=False), 32),
}


def measured(name: str, clients: int) -> list[str]:
    """Return a row of the table."""
    with TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return timed(name, clients)


def timed(name: str, clients: int) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    layout = ParameterLayout.from_module(module)
    mean, std = ((0.1307,), (0.3081,)) if inputs.dtype == torch.uint8 else ((), ())
    samples = data.Samples(inputs, torch.arange(len(inputs)) % 2)
    task = LocalTask(module, layout, samples, mean, std, LocalOptimiser(0.1))
    weights = layout.flatten({name: value.detach() for name, value in module.named_parameters()})
    index = torch.arange(clients * STEPS * BATCH).reshape(clients, STEPS, BATCH) % len(inputs)
    schedule = BatchSchedule(index, torch.ones(index.shape))
    eager, compiled = VectorizedTrainer(task), CompiledTrainer(task, BATCH)
    few = BatchSchedule(index[:8], schedule.mask[:8])
    loop = min(us_a_sample(LoopTrainer(task), weights, few) for _ in range(3))
    known = [name, f"{weights.numel():,}", f"{loop:.1f}"]
    work = compiled.work(weights)
    began = processor_time()
    compiled.train(weights, BatchSchedule(index[:4, :2], schedule.mask[:4, :2]))
    first = processor_time() - began
    turns = [[us_a_sample(trainer, weights, schedule) for trainer in (eager, compiled)] for _ in range(4)]
    before, after = map(min, zip(*turns, strict=True))
    back = f"{first / (before - after) * 1e6:,.0f}" if before > after else "never"
    numbers = (f"{before:.1f}", f"{work.operations:,}", f"{first:.1f}", f"{after:.1f}")
    auto = work.cost / work.saved * compiled.block * BATCH
    return [*known, *numbers, f"{before / after:.2f}", back, f"{auto:,.0f}"]


def processor_time() -> float:
    """Return the seconds that this process and the compilers that it called have taken."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def us_a_sample(trainer: Trainer, weights: Tensor, schedule: BatchSchedule) -> float:
    began = time.process_time()
    trainer.train(weights, schedule)
    return (time.process_time() - began) / schedule.mask.numel() * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--clients", type=int, default=40)
    options = parser.parse_args()
    table = Table(title=f"compiled steps, {options.clients} clients, batches of {BATCH}")
    what = ("loop, us", "eager, us", "operations", "compiling, s", "compiled, us", "times", "pays after", "by the rule")
    headings = ("model", "weights", *what)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in options.models:
            row = pool.apply(measured, (name, options.clients))
            table.add_row(*row)
            print(*row, sep=" | ", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
