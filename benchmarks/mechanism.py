"""Processor time of each mechanism's ``encode``, and of counting its bits, on one core, against ``torch.rand`` for as many float32.

    python benchmarks/mechanism.py [--sizes 256x7850 10x1000000] [--repeats 7]

All figures of a table come from the same process, measured in turn, so that ratios hold when the machine's speed drifts. The memory of
``duchi`` is the peak resident size during one encode + count over the size before it, in a process of its own; the kernel's peak is reset
in between, which needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ldpfl import LayerRanges, SecureSource, SeededStreams, mechanisms
from ldpfl.mechanisms import BitReports, Mechanism
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.util.randomness import RandomSource


def processor_seconds(action: Callable[[], object]) -> float:
    """Return the processor time that one call of ``action`` takes."""
    began = time.process_time()
    action()
    return time.process_time() - began


def encode_and_count(mechanism: Mechanism, values: torch.Tensor, ranges: LayerRanges, source: Callable[[], RandomSource]) -> None:
    """Encode ``values`` with fresh random words. If the reports are bits, count the ones too, as a server does."""
    reports = mechanism.encode(values, ranges, source())
    if type(reports) is BitReports:
        reports.to_counts()


def seeded(clients: int) -> SeededStreams:
    return SeededStreams.for_clients(0, 1, np.arange(clients))


def values_and_ranges(clients: int, weights: int) -> tuple[torch.Tensor, LayerRanges]:
    """Return random values (clients, weights), and a range that clips a few of them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(clients, weights, generator=generator).mul_(0.05), LayerRanges(0.0, 0.075, (weights,))


def encode_actions(clients: int, weights: int) -> dict[str, Callable[[], object]]:
    """Return a function for each mechanism that encodes the same values, and one that draws as many numbers by torch.rand."""
    values, ranges = values_and_ranges(clients, weights)
    generator = torch.Generator().manual_seed(0)
    source = partial(seeded, clients)
    actions: dict[str, Callable[[], object]] = {"torch.rand": lambda: torch.rand(clients, weights, generator=generator)}
    for name in mechanisms.names(alone=True):
        actions[name] = partial(encode_and_count, mechanisms.with_defaults(name, 1.0), values, ranges, source)
    sums = (values * STEPS).to(torch.int64)
    actions["dp-sgd"] = partial(encode_and_count, DpSgd(RecordClip(1.0), 10.0), sums, ranges, source)
    actions["duchi, secure"] = partial(encode_and_count, mechanisms.with_defaults("duchi", 1.0), values, ranges, SecureSource)
    return actions


def send_extra_bytes(clients: int, weights: int, answer: Connection) -> None:
    """Send to ``answer`` by how many bytes the peak resident size grows. All code is loaded before, by a small input."""
    torch.set_num_threads(1)
    duchi = mechanisms.with_defaults("duchi", 1.0)
    encode_and_count(duchi, *values_and_ranges(2, weights), partial(seeded, 2))
    values, ranges = values_and_ranges(clients, weights)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = resident_bytes("VmRSS")
    encode_and_count(duchi, values, ranges, partial(seeded, clients))
    answer.send(resident_bytes("VmHWM") - before)


def resident_bytes(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def extra_bytes_per_value(clients: int, weights: int) -> float:
    """Return the bytes of memory for each weight and client that ``duchi`` needs beside the values, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_extra_bytes, args=(clients, weights, theirs))
    process.start()
    grown = float(ours.recv())
    process.join()
    return grown / (clients * weights)


def measured_table(clients: int, weights: int, repeats: int) -> Table:
    """Measure all mechanisms in turn, and return the table. The first turn warms up and does not count."""
    seconds: dict[str, list[float]] = {}
    actions = encode_actions(clients, weights)
    for _ in range(repeats + 1):
        for name, action in actions.items():
            seconds.setdefault(name, []).append(processor_seconds(action))
    memory = extra_bytes_per_value(clients, weights)
    table = Table(
        title=f"encode, and count bits: {clients:,} clients x {weights:,} weights, one core, median of {repeats}",
        caption=f"duchi takes {memory:.2f} bytes a weight and client beside the values",
    )
    for heading in ("", "ns a weight and client", "times torch.rand"):
        table.add_column(heading, justify="right")
    rand_seconds = statistics.median(seconds["torch.rand"][1:])
    for name, seconds_of_action in seconds.items():
        median = statistics.median(seconds_of_action[1:])
        table.add_row(name, f"{median / (clients * weights) * 1e9:.2f}", f"{median / rand_seconds:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["256x7850", "10x1000000"], metavar="CLIENTSxWEIGHTS")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        clients, weights = map(int, size.split("x"))
        Console().print(measured_table(clients, weights, options.repeats))


if __name__ == "__main__":
    main()
