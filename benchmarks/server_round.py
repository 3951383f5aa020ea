"""Seconds and memory of the server for a relayed Flower round of many nodes: records are opened, joined and averaged.

    python benchmarks/server_round.py [--nodes 1000] [--weights 1000000] [--mechanism duchi] [--linked 1000000]

First the records of all nodes are sealed into a temporary file, which is not timed; a stand-in for the relay reads it a record at a time.
Reports are random bits (duchi) or random lattice points (laplace, 4 bytes a weight). Memory is that of this process and its workers, above
what it was when the round began. The digest is that of the mean and its variance. OMP_NUM_THREADS sets how many workers there may be.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ldpfl import LayerRanges
from ldpfl.flower.relay_collection import RelayCollector
from ldpfl.flower.report_collection import OpenRound
from ldpfl.mechanisms import Duchi, Laplace, payload_bits
from ldpfl.simulation.workers import cores
from ldpfl.transport.shuffling.sealing import OVERHEAD, Binding, generate_key, seal

MECHANISMS = {"duchi": Duchi(1.0), "laplace": Laplace(1.0)}


class RelayOfFile:
    """A stand-in for a relay with one released round, whose sealed records are in a file."""

    def __init__(self, spool: Path, record_bytes: int) -> None:
        self._spool, self._size = spool, record_bytes

    def wait(self, run: str, number: int, timeout_s: float) -> None: ...

    def pull(self, run: str, number: int, terms: Any = None) -> Iterator[bytes]:
        with self._spool.open("rb") as records:
            yield from iter(lambda: records.read(self._size), b"")


def write_round(spool: Path, round_: OpenRound, key: X25519PrivateKey, nodes: int) -> None:
    """Seal random reports of ``nodes`` nodes, and write their records to the file ``spool``."""
    binding, draws = Binding(round_.run, round_.number, round_.plan.fingerprint), np.random.default_rng(0)
    size = payload_bits(round_.mechanism, round_.ranges) // 8
    with spool.open("wb") as records:
        for _ in range(nodes):
            points = draws.integers(-(2**21), 2**21, size // 4) if round_.mechanism.name == "laplace" else None
            payload = draws.bytes(size) if points is None else (points.astype(np.float32) / np.float32(2**20)).tobytes()
            records.write(seal(round_.plan.split(payload), key.public_key(), binding))


class Memory:
    """Peak of the resident size of this process plus the unshared memory of its children, read twenty times a second."""

    def __init__(self) -> None:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._peak = self._current_bytes()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        """Bytes by which memory grew from the beginning to the peak."""
        return self._peak - self._before

    def _current_bytes(self) -> int:
        size = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                size += child.memory_full_info().uss
        return size

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, self._current_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--mechanism", choices=sorted(MECHANISMS), default="duchi")
    parser.add_argument("--linked", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mechanism, ranges = MECHANISMS[options.mechanism], LayerRanges(torch.tensor(0.0), torch.tensor(0.1), (options.weights,))
    round_, key = OpenRound("benchmark", 1, mechanism, ranges, options.nodes, 60.0, options.linked), generate_key()
    with TemporaryDirectory() as folder:
        spool = Path(folder, "records")
        write_round(spool, round_, key, options.nodes)
        relay: Any = RelayOfFile(spool, round_.plan.plaintext_bytes + OVERHEAD)
        collector, memory = RelayCollector(relay=relay, key=key, linked=options.linked), Memory()
        began, processor_began = time.perf_counter(), processor_time()
        with memory:
            received = collector.collect(round_, (), round_.timeout)
            if received.pool is None:
                raise SystemExit(f"nothing was received: {received.refused}")
            aggregate = received.pool.aggregate(mechanism, ranges)
        clock_s, processor_s = time.perf_counter() - began, processor_time() - processor_began
    digest = hashlib.sha256(aggregate.mean.numpy().tobytes() + aggregate.variance.numpy().tobytes()).hexdigest()[:12]
    print(
        f"{mechanism.name}, {options.nodes} nodes x {options.weights:,} weights, {round_.plan.records:,} records a node, {cores()} cores: ",
        end="",
    )
    print(f"{clock_s:.2f} s, {processor_s:.2f} s of the processor, {memory.grown / 1e6:,.0f} MB; mean {digest}")


def processor_time() -> float:
    """Return the processor time of this process and of its ended children, in seconds."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


if __name__ == "__main__":
    main()
