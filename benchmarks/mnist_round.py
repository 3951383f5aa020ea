"""A round of MNIST, 100 clients x 600 digits, two-layer CNN, an epoch at batch size 10: eager and compiled, by one and two processes.

    python benchmarks/mnist_round.py --data-dir DIR [--repeats 3] [--workers 1 2]

Each setting in turn, ``--repeats`` times; seconds of a round (the second of two, so that processes have begun and steps are compiled), and
the ratio to the first setting of the same turn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from ldpfl import data
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.simulation import simulate
from ldpfl.simulation.workers import workers

SETTINGS = [
    "model.name=two-layer-cnn",
    "clients.count=100",
    "training.epochs=1",
    "training.batch_size=10",
    "training.rounds=100",
    "shuffling.channel=direct",
]


def main() -> None:
    """Time every setting in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    task, cpu = data.load("mnist", options.data_dir), torch.device("cpu")
    federations = {
        compiling: build(parse_config("", [*SETTINGS, f"training.compile={compiling}"], origin="here"), task, cpu)
        for compiling in ("off", "on")
    }
    compiling_and_workers = [(compiling, worker_count) for compiling in federations for worker_count in options.workers]
    seconds_by_setting: dict[tuple[str, int], list[float]] = {pair: [] for pair in compiling_and_workers}
    for _ in range(options.repeats):
        for compiling, worker_count in compiling_and_workers:
            federation, start = federations[compiling]
            with workers(worker_count, cpu) as pool:
                rounds = simulate(federation, start, 2, workers=pool)
                next(rounds)
                began = time.perf_counter()
                next(rounds)
                seconds_by_setting[compiling, worker_count].append(time.perf_counter() - began)
    table = Table(title=f"a round of 60,000 samples, {options.repeats} turns")
    for heading in ("compiled", "workers", "seconds", "samples/s", "times the first", "from .. to"):
        table.add_column(heading, justify="right")
    for pair in compiling_and_workers:
        base = seconds_by_setting[compiling_and_workers[0]]
        ratios = [first / other for first, other in zip(base, seconds_by_setting[pair], strict=True)]
        seconds = median(seconds_by_setting[pair])
        spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        table.add_row(pair[0], str(pair[1]), f"{seconds:.2f}", f"{60_000 / seconds:,.0f}", f"{median(ratios):.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
