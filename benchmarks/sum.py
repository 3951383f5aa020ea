"""Time, memory and traffic of sum rounds: 10,000 uploads of 100,000 numbers to a relay process, and their sum opened by the aggregator.

    python benchmarks/sum.py [--uploads 10000] [--dimension 100000] [--bits 32] [--processes 2] [--store PATH_OR_URL]
    python benchmarks/sum.py --rounds 20 --uploads 100 --dimension 100000

The relay is a process of its own, reached over loopback by processes that each play many clients: shares and envelopes are made as
a node makes them. "relay" is the relay's processor time while the uploads come, HTTP included. The sum that the aggregator opens is
compared with the sum of what the clients had.

With ``--rounds`` there are so many rounds at 32 and as many at 64 bits. What is counted is coordinates: each one of each round is a
sum over all clients, and is compared.
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
from ldpfl.summing import Bits, SumBinding, new_seed, open_seeds, seal_seed, shard, signer_of, unshard
from relay import node_key, relay, resident, tokens_in

RUN = "benchmark"
AT_ONCE = 8
"""Clients of one process that upload at once."""


@dataclass(frozen=True)
class Round:
    """What clients in other processes need to know of one."""

    url: str
    number: int
    terms: SumTerms
    aggregator: bytes

    @property
    def binding(self) -> SumBinding:
        return SumBinding(RUN, self.number, bytes.fromhex(self.terms.agreement), self.terms.dimension, self.terms.bits)


def points_of(index: int, number: int, terms: SumTerms) -> NDArray[np.int64]:
    """Return what a client adds: numbers of which ``max_uploads`` fit into the sum."""
    most = 2 ** (terms.bits - 1) // terms.max_uploads - 1
    return np.random.default_rng((number, index)).integers(-most, most, terms.dimension)


def upload(what: Round, clients: list[tuple[int, str]]) -> NDArray[np.int64]:
    """Play clients, one after the other; return the sum of what they had."""
    total, aggregator = np.zeros(what.terms.dimension, np.int64), X25519PublicKey.from_public_bytes(what.aggregator)
    for index, token in clients:
        points, seed = points_of(index, what.number, what.terms), new_seed()
        total += points
        share = shard(points, seed, what.terms.bits) + seal_seed(seed, aggregator, node_key(index), what.binding)
        with RelayClient(what.url, token, transport=httpx.HTTPTransport(verify=False)) as client:
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


class Counting(httpx.HTTPTransport):
    """Counts the bytes of bodies that come back."""

    received = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        self.received += int(response.headers.get("content-length", 0))
        return response


def terms_for(options: argparse.Namespace, bits: Bits) -> SumTerms:
    return SumTerms(
        dimension=options.dimension,
        bits=bits,
        min_clients=options.uploads,
        closes_in_s=0.0,
        max_uploads=options.uploads,
        agreement="0" * 64,
    )


def one_large(options: argparse.Namespace, store: str, terms: SumTerms) -> None:
    """Print what one round costs."""
    number = int(time.time()) % 10**9
    clients, token = tokens_in(store, number, options.uploads, sums=True)
    key, nodes = X25519PrivateKey.generate(), known_nodes(options.uploads)
    seconds, marks = dict[str, float](), [0.0]

    def step(name: str) -> None:
        marks.append(time.perf_counter())
        seconds[name] = marks[-1] - marks[-2]

    counting = Counting()
    with relay(store) as (pid, url), RelayAggregator(url, token, transport=counting) as aggregator:
        process = psutil.Process(pid)
        aggregator.open_round(RUN, number, terms)
        what = Round(url, number, terms, key.public_key().public_bytes_raw())
        chunks = [list(enumerate(clients))[start :: options.processes] for start in range(options.processes)]
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("forkserver")) as pool:
            list(pool.map(abs, range(options.processes)))
            idle, cpu = resident(pid, "VmRSS"), sum(process.cpu_times()[:2])
            marks[0] = time.perf_counter()
            expected = total_of(pool.map(functools.partial(play, what), chunks))
            step("uploads, wall")
        seconds["uploads, relay"] = sum(process.cpu_times()[:2]) - cpu
        taking = resident(pid, "VmHWM")
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
        peak = resident(pid, "VmHWM")
    if not (found == expected).all():
        raise RuntimeError("the sum is not that of what the clients had")
    table = Table(title=f"{options.uploads:,} uploads of {terms.dimension:,} numbers of {terms.bits} bits, {store.partition('://')[0]}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, took in seconds.items():
        table.add_row(f"{name}, s", f"{took:.1f}")
    table.add_section()
    table.add_row("relay idle, after uploads, peak, MB", f"{idle:.0f}, {taking:.0f}, {peak:.0f}")
    table.add_row("downloaded by the aggregator, bytes", f"{downloaded:,}")
    if "://" not in store:
        table.add_row("store, MB", f"{Path(store).stat().st_size / 1e6:.1f}")
    Console().print(table)


def many_small(options: argparse.Namespace, store: str) -> None:
    """Print how many sums of ``--rounds`` rounds are exact, at 32 and at 64 bits."""
    clients, token = tokens_in(store, 1, options.uploads, sums=True)
    key, nodes = X25519PrivateKey.generate(), known_nodes(options.uploads)
    widths: tuple[Bits, ...] = (32, 64)
    with relay(store) as (_, url), RelayAggregator(url, token, transport=httpx.HTTPTransport(verify=False)) as aggregator:
        for bits in widths:
            terms, exact, began = terms_for(options, bits), 0, time.perf_counter()
            for number in range(bits * 10**6, bits * 10**6 + options.rounds):
                what = Round(url, number, terms, key.public_key().public_bytes_raw())
                exact += exact_sums(what, list(enumerate(clients)), aggregator, key, nodes)
            sums, seconds = options.rounds * terms.dimension, time.perf_counter() - began
            print(f"{bits} bits: {options.rounds} rounds of {options.uploads} clients, {exact:,} of {sums:,} sums exact, {seconds:.0f} s")


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
    parser.add_argument("--uploads", type=int, default=10_000)
    parser.add_argument("--dimension", type=int, default=100_000)
    parser.add_argument("--bits", type=int, choices=(32, 64), default=32)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", default="", help="a new SQLite file in a temporary folder if left out")
    parser.add_argument("--rounds", type=int, default=0, help="instead, so many rounds, all sums of which are compared")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or str(Path(folder) / "relay.db")
        if options.rounds:
            many_small(options, store)
        else:
            one_large(options, store, terms_for(options, options.bits))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
