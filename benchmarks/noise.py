"""Milliseconds that a client takes to encode a report with each mechanism that adds noise, on one core: python benchmarks/noise.py

The fastest of some repetitions, with bits of the operating system; ``PYTHONPATH`` may name another version's ``src`` to compare with.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table

from ldpfl import LayerRanges, SecureSource, mechanisms

SIZES = (21_840, 1_000_000)
MECHANISMS = {
    "duchi": mechanisms.create("duchi", epsilon=1.0),
    "laplace": mechanisms.create("laplace", epsilon=1.0),
    "piecewise": mechanisms.create("piecewise", epsilon=1.0),
    "hybrid": mechanisms.create("hybrid", epsilon=1.0),
    "privunit-g": mechanisms.create("privunit-g", epsilon=4.0),
    "full-dp": mechanisms.create("full-dp", epsilon=1.0),
}


def fastest_ms(name: str, weights: int, repeats: int) -> float:
    """Return the milliseconds of the fastest of ``repeats`` encodings of one client's report."""
    one = torch.ones(1, dtype=torch.float64)
    ranges, values = LayerRanges(0 * one, one, (weights,)), torch.rand(1, weights) - 0.5
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        MECHANISMS[name].encode(values, ranges, SecureSource())
        seconds.append(time.perf_counter() - began)
    return 1000 * min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    table = Table("mechanism", *(f"{size:,} weights, ms" for size in SIZES))
    for name in MECHANISMS:
        table.add_row(name, *(f"{fastest_ms(name, size, max(3, repeats * SIZES[0] // size)):.2f}" for size in SIZES))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
