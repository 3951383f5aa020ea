"""Time and memory of ``duchi`` encode + aggregate on one core, against ``torch.rand`` for as many float32.

    python benchmarks/mechanism.py [--clients 100] [--weights 21840] [--repeats 7]

All figures of a row come from the same process, measured in turn, so that ratios hold when the machine's speed drifts.
Memory is the peak resident size during one encode + aggregate over the size before it, in a process of its own; the
kernel's peak is reset in between, which needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ldpfl import LayerRanges, SecureSource, SeededStreams, mechanisms
from ldpfl.randomness import RandomSource


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def encode_aggregate(values: torch.Tensor, ranges: LayerRanges, source: RandomSource) -> None:
    mechanism = mechanisms.create("duchi", epsilon=1.0)
    mechanism.aggregate([mechanism.encode(values, ranges, source)], ranges)


def source_named(name: str, clients: int) -> RandomSource:
    return SecureSource() if name == "secure" else SeededStreams.for_clients(0, 1, range(clients))


def extra_bytes(clients: int, weights: int, name: str, answer: Connection) -> None:
    """Report by how much the peak resident size grew, after everything was loaded once on a small input."""
    torch.set_num_threads(1)
    small = LayerRanges(torch.tensor(0.0), torch.tensor(0.075), (weights,))
    encode_aggregate(torch.zeros(2, weights), small, source_named(name, 2))
    values = torch.randn(clients, weights).mul_(0.05)
    Path("/proc/self/clear_refs").write_text("5")  # peak := current
    before = resident("VmRSS")
    encode_aggregate(values, small, source_named(name, clients))
    answer.send(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_memory(clients: int, weights: int, name: str) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=extra_bytes, args=(clients, weights, name, theirs))
    process.start()
    grown = float(ours.recv())
    process.join()
    return grown / (clients * weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--weights", type=int, default=21_840)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients, weights = options.clients, options.weights
    values = torch.randn(clients, weights).mul_(0.05)
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.075), (weights,))
    generator = torch.Generator().manual_seed(0)
    actions: dict[str, Callable[[], object]] = {
        "torch.rand": lambda: torch.rand(clients, weights, generator=generator),
        "duchi, seeded": lambda: encode_aggregate(values, ranges, source_named("seeded", clients)),
        "duchi, secure": lambda: encode_aggregate(values, ranges, source_named("secure", clients)),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(options.repeats + 1):
        for name, action in actions.items():
            times[name].append(seconds(action))
    table = Table(title=f"encode + aggregate, {clients} clients x {weights:,} weights, one core, median of {options.repeats}")
    for heading in ("", "ns a weight and client", "times torch.rand", "extra bytes a weight and client"):
        table.add_column(heading, justify="right")
    base = statistics.median(times["torch.rand"][1:])
    for name, measured in times.items():
        median = statistics.median(measured[1:])
        memory = f"{measure_memory(clients, weights, name.split()[-1]):.2f}" if name.startswith("duchi") else ""
        table.add_row(name, f"{median / (clients * weights) * 1e9:.2f}", f"{median / base:.2f}", memory)
    Console().print(table)


if __name__ == "__main__":
    main()
