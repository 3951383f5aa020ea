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


def with_digits(module: nn.Module) -> tuple[nn.Module, Tensor]:
    return module, torch.randint(0, 256, (400, 1, 28, 28), dtype=torch.uint8)


def with_rows(module: nn.Module) -> tuple[nn.Module, Tensor]:
    return module, torch.randn(400, 20)


def with_tokens(module: nn.Module, length: int) -> tuple[nn.Module, Tensor]:
    return module, torch.randint(1, VOCABULARY, (400, length))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp, a table": lambda: with_rows(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))),
    "logistic, MNIST": lambda: with_digits(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))),
    "two-layer CNN": lambda: with_digits(images.TwoLayerCNN((1, 28, 28), 10)),
    "embedding bag": lambda: with_tokens(texts.EmbeddingBag(VOCABULARY, 2, by_place=False), 32),
    "transformer, 1 layer": lambda: with_tokens(texts.Transformer(VOCABULARY, 2, by_place=False, depth=1), 32),
    "transformer, 2 layers": lambda: with_tokens(texts.Transformer(VOCABULARY, 2, by_place=False), 32),
    "transformer, 4 layers": lambda: with_tokens(texts.Transformer(VOCABULARY, 2, by_place=False, depth=4), 32),
    "gru, 4 tokens": lambda: with_tokens(texts.GRU(VOCABULARY, 2, by_place=False), 4),
    "gru, 8 tokens": lambda: with_tokens(texts.GRU(VOCABULARY, 2, by_place=False), 8),
    "gru, 16 tokens": lambda: with_tokens(texts.GRU(VOCABULARY, 2, by_place=False), 16),
    "gru, 32 tokens": lambda: with_tokens(texts.GRU(VOCABULARY, 2, by_place=False), 32),
}


def row_with_empty_cache(name: str, clients: int) -> list[str]:
    """Return :func:`table_row`, with an empty cache of the compiler, so that compiling takes its full time."""
    with TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return table_row(name, clients)


def table_row(name: str, clients: int) -> list[str]:
    """Measure the model ``name`` in this process, and return its row of the table."""
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
    eight_clients = BatchSchedule(index[:8], schedule.mask[:8])
    loop = min(us_per_sample(LoopTrainer(task), weights, eight_clients) for _ in range(3))
    first_cells = [name, f"{weights.numel():,}", f"{loop:.1f}"]
    work = compiled.work(weights)
    began = processor_time()
    compiled.train(weights, BatchSchedule(index[:4, :2], schedule.mask[:4, :2]))
    compile_s = processor_time() - began
    us_by_turn = [[us_per_sample(trainer, weights, schedule) for trainer in (eager, compiled)] for _ in range(4)]
    eager_us, compiled_us = map(min, zip(*us_by_turn, strict=True))
    samples_to_pay_off = f"{compile_s / (eager_us - compiled_us) * 1e6:,.0f}" if eager_us > compiled_us else "never"
    figures = (f"{eager_us:.1f}", f"{work.operations:,}", f"{compile_s:.1f}", f"{compiled_us:.1f}")
    samples_by_rule = work.cost / work.saved * compiled.block * BATCH
    return [*first_cells, *figures, f"{eager_us / compiled_us:.2f}", samples_to_pay_off, f"{samples_by_rule:,.0f}"]


def processor_time() -> float:
    """Return the seconds that this process and the compilers that it called have taken."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def us_per_sample(trainer: Trainer, weights: Tensor, schedule: BatchSchedule) -> float:
    """Train once, and return the microseconds of processor time for each sample."""
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
            row = pool.apply(row_with_empty_cache, (name, options.clients))
            table.add_row(*row)
            print(*row, sep=" | ", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
