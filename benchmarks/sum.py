"""Time, memory and traffic of sum rounds: 10,000 uploads of 100,000 numbers to a relay process, and their sum opened by the aggregator.

    python benchmarks/sum.py [--uploads 10000] [--dimension 100000] [--bits 32] [--processes 2] [--store PATH_OR_URL] [--relays 1]
    python benchmarks/sum.py --postgres --uploads 1000 10000
    python benchmarks/sum.py --rounds 20 --uploads 100 --dimension 100000
    python benchmarks/sum.py --sums 2000 --uploads 100 --dimension 100000

The relay is a process of its own, or several with one PostgreSQL, reached over loopback by processes that each play many clients: shares
and envelopes are made as a node makes them. "relays" is the relays' processor time while the uploads come, HTTP included. The sum that the
aggregator opens is compared with the sum of what the clients had.

With ``--postgres`` the store is a PostgreSQL server that is started for it, and its processes' time and memory are counted too. Of several
numbers of ``--uploads``, each is a round with relays of its own: so one sees whether memory grows with them.

With ``--rounds`` there are so many rounds at 32 and as many at 64 bits. What is counted is coordinates: each one of each round is a
sum over all clients, and is compared. With ``--sums`` so many sums are made and opened in this process, without a relay between.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ldpfl.relay import RelayAggregator, RelayClient, SumTerms
from ldpfl.transport.sums import Bits, SumBinding, fold, new_seed, open_seeds, seal_seed, shard, signer_of, unshard
from ldpfl.transport.sums.masks import zeros
from postgres import Postgres, postgres
from relay import node_key, relay, resident, tokens_in

RUN = "benchmark"
AT_ONCE = 8
"""Clients of one process that upload at once."""


@dataclass(frozen=True)
class Round:
    """What clients in other processes need to know of one."""

    urls: tuple[str, ...]
    number: int
    terms: SumTerms
    aggregator: bytes

    @property
    def binding(self) -> SumBinding:
        return SumBinding(RUN, self.number, bytes.fromhex(self.terms.agreement), self.terms.dimension, self.terms.bits)


def lattice_points(index: int, number: int, terms: SumTerms) -> NDArray[np.int64]:
    """Return what a client adds: numbers of which ``max_uploads`` fit into the sum."""
    most = 2 ** (terms.bits - 1) // terms.max_uploads - 1
    return np.random.default_rng((number, index)).integers(-most, most, terms.dimension)


def upload(what: Round, clients: list[tuple[int, str]]) -> NDArray[np.int64]:
    """Play clients, one after the other; return the sum of what they had."""
    total, aggregator = np.zeros(what.terms.dimension, np.int64), X25519PublicKey.from_public_bytes(what.aggregator)
    for index, token in clients:
        points, seed = lattice_points(index, what.number, what.terms), new_seed()
        total += points
        share = shard(points, seed, what.terms.bits) + seal_seed(seed, aggregator, node_key(index), what.binding)
        with RelayClient(what.urls[index % len(what.urls)], token, transport=httpx.HTTPTransport(verify=False)) as client:
            client.upload_share(RUN, what.number, share, within_s=600.0)
    return total


def play(what: Round, clients: list[tuple[int, str]]) -> NDArray[np.int64]:
    """Play clients, some at once; return the sum of what they had."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return total_of(pool.map(functools.partial(upload, what), (clients[start::AT_ONCE] for start in range(AT_ONCE))))


def total_of(vectors: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return functools.reduce(np.add, vectors)


def known_nodes(count: int) -> dict[bytes, Ed25519PublicKey]:
    keys = (node_key(index).public_key() for index in range(count))
    return {signer_of(key): key for key in keys}


def processor_s(pids: tuple[int, ...]) -> float:
    """Return the processor time of processes, in seconds."""
    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))


def written_bytes(pids: tuple[int, ...]) -> int:
    """Return how many bytes processes have had written to disks."""
    return sum(psutil.Process(pid).io_counters().write_bytes for pid in pids)


class Counting(httpx.HTTPTransport):
    """Counts the bytes of bodies that come back."""

    received = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.received += int(response.headers.get("content-length", 0))
        return response


def terms_for(options: argparse.Namespace, bits: Bits, uploads: int) -> SumTerms:
    return SumTerms(
        dimension=options.dimension,
        bits=bits,
        min_clients=uploads,
        closes_in_s=0.0,
        max_uploads=uploads,
        agreement="0" * 64,
    )


def one_large(options: argparse.Namespace, store: str, terms: SumTerms, server: Postgres | None) -> None:
    """Print what one round costs."""
    number, uploads = int(time.time()) % 10**9, terms.max_uploads
    clients, token = tokens_in(store, number, uploads, sums=True)
    key, nodes = X25519PrivateKey.generate(), known_nodes(uploads)
    seconds, marks = dict[str, float](), [0.0]

    def step(name: str) -> None:
        marks.append(time.perf_counter())
        seconds[name] = marks[-1] - marks[-2]

    counting = Counting()
    with ExitStack() as stack:
        pids, urls = zip(*(stack.enter_context(relay(store)) for _ in range(options.relays)), strict=True)
        aggregator = stack.enter_context(RelayAggregator(urls[0], token, transport=counting))
        aggregator.open_round(RUN, number, terms)
        what = Round(urls, number, terms, key.public_key().public_bytes_raw())
        chunks = [list(enumerate(clients))[start :: options.processes] for start in range(options.processes)]
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("forkserver")) as pool:
            list(pool.map(abs, range(options.processes)))
            stored = server.processor_s() if server else 0.0
            idle, cpu, written = resident(pids[0], "VmRSS"), processor_s(pids), written_bytes(pids)
            marks[0] = time.perf_counter()
            expected = total_of(pool.map(functools.partial(play, what), chunks))
            step("uploads, wall")
        seconds["uploads, relays"] = processor_s(pids) - cpu
        memory = 0.0
        if server:
            seconds["uploads, PostgreSQL"], memory = server.processor_s() - stored, server.own_memory()
        taking, written = resident(pids[0], "VmHWM"), written_bytes(pids) - written
        aggregator.wait(RUN, number, 10)
        aggregator.pull_sum(RUN, number, terms)
        step("release and pull")
        before = counting.received
        total, envelopes = aggregator.pull_sum(RUN, number, terms)
        step("pull once more")
        downloaded = counting.received - before
        seeds = open_seeds(envelopes, key, nodes, what.binding, terms.min_clients)
        step("open_seeds")
        found = unshard(total, seeds)
        step("unshard")
        aggregator.acknowledge(RUN, number)
        step("acknowledge")
        peak = resident(pids[0], "VmHWM")
        busy = processor_s(pids) - cpu + (server.processor_s() - stored if server else 0.0)
        seconds["all, on two cores"] = (busy + seconds["open_seeds"] + seconds["unshard"]) / 2
    if not (found == expected).all():
        raise RuntimeError("the sum is not that of what the clients had")
    table = Table(title=f"{uploads:,} uploads of {terms.dimension:,} numbers of {terms.bits} bits, {store.partition('://')[0]}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, took in seconds.items():
        table.add_row(f"{name}, s", f"{took:.1f}")
    table.add_section()
    table.add_row("first relay idle, after uploads, peak, MB", f"{idle:.0f}, {taking:.0f}, {peak:.0f}")
    table.add_row("downloaded by the aggregator, bytes", f"{downloaded:,}")
    if server:
        table.add_row("PostgreSQL's own, after uploads, MB", f"{memory:.0f}")
    if "://" not in store:
        table.add_row("store, MB", f"{Path(store).stat().st_size / 1e6:.1f}")
        table.add_row("written to the disk while uploads come, MB", f"{written / 1e6:.0f}")
    Console().print(table)


def many_small(options: argparse.Namespace, store: str, uploads: int) -> None:
    """Print how many sums of ``--rounds`` rounds are exact, at 32 and at 64 bits."""
    clients, token = tokens_in(store, 1, uploads, sums=True)
    key, nodes = X25519PrivateKey.generate(), known_nodes(uploads)
    widths: tuple[Bits, ...] = (32, 64)
    with relay(store) as (_, url), RelayAggregator(url, token, transport=httpx.HTTPTransport(verify=False)) as aggregator:
        for bits in widths:
            terms, exact, began = terms_for(options, bits, uploads), 0, time.perf_counter()
            for number in range(bits * 10**6, bits * 10**6 + options.rounds):
                what = Round((url,), number, terms, key.public_key().public_bytes_raw())
                exact += exact_sums(what, list(enumerate(clients)), aggregator, key, nodes)
            sums, seconds = options.rounds * terms.dimension, time.perf_counter() - began
            print(f"{bits} bits: {options.rounds} rounds of {uploads} clients, {exact:,} of {sums:,} sums exact, {seconds:.0f} s")


def many_here(options: argparse.Namespace) -> None:
    """Print how many of ``--sums`` sums are exact in all coordinates, at 32 and at 64 bits."""
    widths: tuple[Bits, ...] = (32, 64)
    for bits in widths:
        (uploads,) = options.uploads
        terms, began = terms_for(options, bits, uploads), time.process_time()
        exact = sum(is_exact(number, terms) for number in range(bits * 10**6, bits * 10**6 + options.sums))
        sums = f"{exact:,} of {options.sums:,} sums over {uploads} clients of {terms.dimension:,} numbers"
        print(f"{bits} bits: {sums} exact, {time.process_time() - began:.0f} s of one core")


def is_exact(number: int, terms: SumTerms) -> bool:
    """Whether a sum is right in each coordinate."""
    total, expected = zeros(terms.dimension, terms.bits), np.zeros(terms.dimension, np.int64)
    seeds = [new_seed() for _ in range(terms.max_uploads)]
    for index, seed in enumerate(seeds):
        points = lattice_points(index, number, terms)
        expected += points
        fold(total, shard(points, seed, terms.bits))
    return bool((unshard(total, seeds) == expected).all())


def exact_sums(
    what: Round,
    clients: list[tuple[int, str]],
    aggregator: RelayAggregator,
    key: X25519PrivateKey,
    nodes: dict[bytes, Ed25519PublicKey],
) -> int:
    """Return how many coordinates of a round's sum are exact."""
    aggregator.open_round(RUN, what.number, what.terms)
    expected = play(what, clients)
    total, envelopes = aggregator.pull_sum(RUN, what.number, what.terms)
    found = unshard(total, open_seeds(envelopes, key, nodes, what.binding, what.terms.min_clients))
    aggregator.acknowledge(RUN, what.number)
    return int((found == expected).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, nargs="+", default=[10_000], help="several numbers are several rounds, one after the other")
    parser.add_argument("--dimension", type=int, default=100_000)
    parser.add_argument("--bits", type=int, choices=(32, 64), default=32)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", default="", help="a new SQLite file in a temporary folder if left out")
    parser.add_argument("--postgres", action="store_true", help="start a PostgreSQL server as the store")
    parser.add_argument("--relays", type=int, default=1, help="processes on one PostgreSQL")
    parser.add_argument("--rounds", type=int, default=0, help="instead, so many rounds, all sums of which are compared")
    parser.add_argument("--sums", type=int, default=0, help="instead, so many sums without a relay")
    options = parser.parse_args()
    if options.sums:
        many_here(options)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(postgres()) if options.postgres else None
        for uploads in options.uploads:
            store = server.new_store(f"of_{uploads}") if server else options.store or str(Path(folder) / f"{uploads}.db")
            if options.rounds:
                many_small(options, store, uploads)
            else:
                one_large(options, store, terms_for(options, options.bits, uploads), server)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
