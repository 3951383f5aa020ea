"""Time of ``harmony`` encode + aggregate on one core: it follows the number of groups, not that of the weights.

    python benchmarks/harmony.py [--clients 100] [--weights 1000000] [--repeats 5]

The first table grows the model and keeps one weight a layer, with ``duchi`` beside it as far as it finishes in time; the
second keeps the model (``--weights``) and cuts it finer. All clients hold the same values, one row in memory.

``fill`` is what writing one value into a new vector of the model's size takes: the only part that grows with the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from ldpfl import LayerRanges, SeededStreams
from ldpfl.mechanisms import Duchi, Mechanism, guarantee_of, payload_bits
from ldpfl.mechanisms.harmony import Harmony

LAYERS = 8
MODELS = (10_000, 100_000, 1_000_000, 10_000_000)
DUCHI_UP_TO = 1_000_000
"""Beyond, 100 clients keep ``duchi`` busy for some ten seconds a repeat."""


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of ``repeats`` calls of ``action``, after a call that only warms up."""
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(mechanism: Mechanism, values: torch.Tensor, ranges: LayerRanges, repeats: int) -> tuple[float, float]:
    """Return the seconds of encoding and of aggregating. Creating the clients' random streams is in neither of them."""
    clients = values.shape[0]
    source = SeededStreams.for_clients(0, 1, range(clients))
    reports = mechanism.encode(values, ranges, source)
    encoding = median_seconds(lambda: mechanism.encode(values, ranges, source), repeats)
    return encoding, median_seconds(lambda: mechanism.aggregate([reports], ranges), repeats)


def values_and_ranges(clients: int, weights: int) -> tuple[torch.Tensor, LayerRanges]:
    """Return the same random values for all clients, and the ranges of ``LAYERS`` equal layers."""
    values = torch.randn(1, weights, generator=torch.Generator().manual_seed(0)).mul_(0.05)
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(0.075), (weights // LAYERS,) * LAYERS)
    return values.expand(clients, weights), ranges


def milliseconds_text(*seconds: float) -> list[str]:
    return [f"{1e3 * value:,.2f}" for value in seconds]


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients, repeats = options.clients, options.repeats

    title = f"one weight a layer, {LAYERS} layers, {clients} clients, ms (median of {repeats})"
    table = new_table(title, "weights", "bits a client", "encode", "aggregate", "of it fill", "duchi encode", "duchi aggregate")
    for weights in MODELS:
        values, ranges = values_and_ranges(clients, weights)
        mechanism = Harmony(1.0)
        fill = median_seconds(partial(torch.full, (weights,), 0.5), repeats)
        seconds = [*measure(mechanism, values, ranges, repeats), fill]
        if weights <= DUCHI_UP_TO:
            seconds += measure(Duchi(1.0), values, ranges, 1)
        table.add_row(f"{weights:,}", f"{payload_bits(mechanism, ranges):,}", *milliseconds_text(*seconds))
    Console().print(table)

    values, ranges = values_and_ranges(clients, options.weights)
    title = f"{options.weights:,} weights cut into groups, {clients} clients, ms"
    table = new_table(title, "group", "groups", "bits a client", "encode", "aggregate", "ns a group and client")
    for group in [10**power for power in range(10) if 10**power < ranges.sizes[0]] + [None]:
        mechanism = Harmony(1.0, group)
        units = guarantee_of(mechanism, ranges).units_per_round
        times = measure(mechanism, values, ranges, 1 if units > 10_000 else repeats)
        ns_per_group = f"{sum(times) / (units * clients) * 1e9:,.1f}"
        name = "layer" if group is None else f"{group:,}"
        table.add_row(name, f"{units:,}", f"{payload_bits(mechanism, ranges):,}", *milliseconds_text(*times), ns_per_group)
    Console().print(table)


if __name__ == "__main__":
    main()
