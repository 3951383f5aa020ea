"""Records that one core seals and opens in a second, and the time to cut and to join a round.

    python benchmarks/sealing.py [--weights 21840] [--clients 5]

Each client's report of one bit a weight becomes as many records of 64 bytes as there are weights. By the clock, and by
the time that the processor gave to this process: where other programs share the core, the latter is what a free one does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ldpfl import LayerRanges, SeededStreams
from ldpfl.mechanisms import Duchi
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import Binding, generate_key, open_records, seal

Result = TypeVar("Result")


def timed(action: Callable[[], Result]) -> tuple[Result, float, float]:
    """Return the result of ``action``, its seconds by the clock, and its seconds of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    result = action()
    return result, time.perf_counter() - clock, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=21_840)
    parser.add_argument("--clients", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights, clients = options.weights, options.clients

    mechanism, ranges = Duchi(1.0), LayerRanges(torch.tensor(0.0), torch.tensor(0.1), (weights,))
    reports = mechanism.encode(torch.zeros(clients, weights), ranges, SeededStreams.for_clients(0, 1, range(clients)))
    plan, key = RecordPlan(mechanism, ranges), generate_key()
    binding = Binding("benchmark", 1, plan.fingerprint)

    cut, *cutting = timed(lambda: [plan.split(payload) for payload in reports.payloads()])
    blob, *sealing = timed(lambda: b"".join(seal(records, key.public_key(), binding) for records in cut))
    records = np.random.default_rng(0).permutation(np.frombuffer(blob, dtype=np.uint8).reshape(weights * clients, -1)).tobytes()
    (opened, _), *opening = timed(lambda: open_records(records, plan.plaintext_bytes, key, binding))
    _, *joining = timed(lambda: plan.join(opened, clients))

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(title=f"{weights:,} weights, {clients} clients, {len(blob) // (weights * clients)} bytes a record; load {load}")
    for heading in ("", "records/s by the clock", "records/s of processor time", "ms a client"):
        table.add_column(heading, justify="right")
    for name, (clock, processor) in (("split", cutting), ("seal", sealing), ("open", opening), ("join", joining)):
        rates = (f"{weights * clients / seconds:,.0f}" for seconds in (clock, processor))
        table.add_row(name, *rates, f"{1e3 * clock / clients:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
