"""Time and memory of a relay process that takes 100 uploads of 21,840 sealed reports, mixes them and hands them out.

    python benchmarks/relay.py [--uploads 100] [--records 21840] [--record-bytes 64] [--threads 8] [--store PATH_OR_URL]
    python benchmarks/relay.py --crowd 500 [--records 1] [--window 150] [--away 40] [--store PATH]

The relay is a process of its own, reached over loopback by several client threads of this one. Its size includes
PyTorch's libraries, which the package loads. Records are random bytes, as sealed ones are; that all of them come back
is checked by the sum of their hashes. Peak memory is the kernel's, which needs Linux.

With ``--crowd`` so many clients upload at the same moment, each from a thread of its own and with the round's window as its
patience, and the relay is killed in the middle and comes back after ``--away`` seconds; what counts is how many are lost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

from ldpfl.relay import RelayAggregator, RelayClient, Terms
from ldpfl.relay.database import open_engine
from ldpfl.relay.tokens import Role, Tokens

SERVER = [sys.executable, "-c", "from ldpfl.cli.relay import app; app()", "serve"]
RUN = "benchmark"


@contextmanager
def relay(store: str, port: int = 0) -> Iterator[tuple[int, str]]:
    """Start a relay; yield its process id and URL."""
    process = subprocess.Popen([*SERVER, "--port", str(port), "--store", store], stderr=subprocess.PIPE, text=True)
    try:
        if process.stderr is None:
            raise RuntimeError("the relay has no output")
        port = json.loads(process.stderr.readline())["port"]
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def resident(pid: int, field: str) -> float:
    """Return the current (VmRSS) or peak (VmHWM) resident size of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{field}:"))


def fingerprint(data: bytes, record_bytes: int) -> int:
    """Return a number that depends on the records in ``data``, but not on their order."""
    return sum(hash(data[start : start + record_bytes]) for start in range(0, len(data), record_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=100)
    parser.add_argument("--records", type=int, default=21_840)
    parser.add_argument("--record-bytes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--store", default="", help="a new SQLite file in a temporary folder if left out")
    parser.add_argument("--crowd", type=int, default=0, help="instead, so many clients that upload at once")
    parser.add_argument("--window", type=float, default=150.0, help="seconds that their round is open")
    parser.add_argument("--away", type=float, default=0.0, help="seconds that the relay is away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (measure_crowd if options.crowd else measure_throughput)(options, options.store or str(Path(folder) / "relay.db"))


def node_key(index: int) -> Ed25519PrivateKey:
    """Return the key by which a client signs what it adds to sums."""
    return Ed25519PrivateKey.from_private_bytes(index.to_bytes(32, "big"))


def tokens_in(store: str, number: int, count: int, *, sums: bool = False) -> tuple[list[str], str]:
    """Add tokens for ``count`` clients and an aggregator to the relay's ``store``, and return them. Sums need clients with signing keys."""
    engine = open_engine(store)
    tokens = Tokens(engine)
    keys = [node_key(index).public_key() if sums else None for index in range(count)]
    clients = [tokens.add(f"client-{number}-{index}", Role.CLIENT, key) for index, key in enumerate(keys)]
    aggregator = tokens.add(f"server-{number}", Role.AGGREGATOR)
    engine.dispose()
    return clients, aggregator


def measure_crowd(options: argparse.Namespace, store: str) -> None:
    """Let all clients of a round upload at once, and print how many were lost and when the last one was through."""
    number, count = int(time.time()) % 10**9, options.crowd
    size = options.records * options.record_bytes
    clients, token = tokens_in(store, number, count)
    terms = Terms(
        record_bytes=options.record_bytes,
        records_per_upload=options.records,
        min_clients=1,
        closes_in_s=options.window,
        max_uploads=count,
        agreement="0" * 64,
    )
    arrival_seconds: list[float] = []
    with ExitStack() as stack:
        running = stack.enter_context(ExitStack())
        _, url = running.enter_context(relay(store))
        aggregator = stack.enter_context(RelayAggregator(url, token))
        aggregator.open_round(RUN, number, terms)
        began = time.monotonic()

        def upload(index: int) -> None:
            with RelayClient(url, clients[index]) as client:
                client.upload(RUN, number, f"{index:032x}", os.urandom(size), within_s=options.window - (time.monotonic() - began))
            arrival_seconds.append(time.monotonic() - began)

        with ThreadPoolExecutor(count) as pool:
            uploads = [pool.submit(upload, index) for index in range(count)]
            if options.away:
                time.sleep(0.2)
                running.close()
                time.sleep(options.away)
                running.enter_context(relay(store, int(url.rpartition(":")[2])))
            failures = [type(error).__name__ for error in (future.exception() for future in uploads) if error is not None]
        arrived = aggregator.round_status(RUN, number).uploads
    print(f"{count} uploads of {size} bytes at once, window {options.window:g} s, relay away for {options.away:g} s:")
    arrival_seconds.sort()
    half, last = arrival_seconds[len(arrival_seconds) // 2], arrival_seconds[-1]
    print(f"{count - (arrived or 0)} lost {failures[:3]}, half there after {half:.1f} s, all after {last:.1f} s")


def measure_throughput(options: argparse.Namespace, store: str) -> None:
    """Run one round over the relay, check that all records come back, and print the time and memory of its steps."""
    number = int(time.time()) % 10**9
    terms = Terms(
        record_bytes=options.record_bytes,
        records_per_upload=options.records,
        min_clients=options.uploads,
        closes_in_s=0.0,
        max_uploads=options.uploads,
        agreement="0" * 64,
    )
    clients, token = tokens_in(store, number, options.uploads)
    blobs = [os.urandom(terms.upload_bytes) for _ in clients]
    expected = sum(fingerprint(blob, terms.record_bytes) for blob in blobs)
    with relay(store) as (pid, url), RelayAggregator(url, token) as aggregator:
        idle = resident(pid, "VmRSS")
        aggregator.open_round(RUN, number, terms)

        def upload(index: int) -> None:
            with RelayClient(url, clients[index]) as client:
                client.upload(RUN, number, f"{index:032x}", blobs[index], within_s=600.0)

        began = time.perf_counter()
        with ThreadPoolExecutor(options.threads) as pool:
            list(pool.map(upload, range(options.uploads)))
        uploaded_at, peak_uploading = time.perf_counter(), resident(pid, "VmHWM")
        pulling = aggregator.pull(RUN, number)
        pulled = [next(pulling)]
        mixed_at = time.perf_counter()
        pulled += pulling
        pulled_at = time.perf_counter()
        aggregator.acknowledge(RUN, number)
        acknowledged_at, peak = time.perf_counter(), resident(pid, "VmHWM")
    if sum(map(hash, pulled)) != expected or len(pulled) != options.uploads * options.records:
        raise RuntimeError("other records came back than were uploaded")
    steps = {
        "upload": (began, uploaded_at),
        "mix": (uploaded_at, mixed_at),
        "pull": (mixed_at, pulled_at),
        "acknowledge": (pulled_at, acknowledged_at),
    }
    table = Table(
        title=f"{options.uploads} uploads of {options.records:,} records of {options.record_bytes} bytes, {options.threads} threads"
    )
    for heading in ("", "seconds", "MB/s"):
        table.add_column(heading, justify="right")
    size = terms.upload_bytes * options.uploads / 1e6
    for name, (start, end) in {**steps, "all": (began, acknowledged_at)}.items():
        table.add_row(name, f"{end - start:.1f}", f"{size / (end - start):.0f}")
    table.add_section()
    for name, megabytes in (("relay idle", idle), ("peak, uploads", peak_uploading), ("peak, all", peak)):
        table.add_row(f"{name}, MB", f"{megabytes:.0f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
