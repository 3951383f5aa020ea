"""Sum rounds of relays that are processes: killed under load, two on one store, refusals over sockets, and memory that does not grow."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from relay_support import RUN, envelope_of, free_port, members, on_disk, relay_process, share_for, share_id, sum_terms, tokens_for
from sqlalchemy import select

from ldpfl.relay import Patience, RelayAggregator, RelayClient, RelayRefused, RelayRoundOver, RelayUnreachable, SumTerms
from ldpfl.relay.database import open_engine
from ldpfl.relay.schema import READ_ONLY, blocks, parts
from ldpfl.relay.store import Store

pytest_plugins = ["relay_fixtures"]
pytestmark = pytest.mark.slow

BORNE = Patience(tries=300, first_s=0.02, longest_s=0.2, longest_upload_s=0.3, timeout_s=60.0)


def tokens_in(place: str, clients: list[str]) -> dict[str, str]:
    engine = open_engine(place)
    made = tokens_for(engine, clients)
    engine.dispose()
    return made


def plain() -> httpx.HTTPTransport:
    return httpx.HTTPTransport(verify=False)  # so that no list of authorities is read for each of many clients


class Load:
    """Clients that upload through the relays at ``ports``, some of them twice; ``acknowledged`` are those who heard that they are in."""

    def __init__(self, tokens: dict[str, str], size: SumTerms, ports: list[int]) -> None:
        self.tokens, self.size, self.ports = tokens, size, ports
        self.shares = {name: share_for(name, size) for name in tokens if name != "server"}
        self.acknowledged: set[str] = set()

    def upload(self, name: str) -> None:
        chance = random.Random(name)
        for _ in range(1 + (chance.random() < 0.2)):
            port = chance.choice(self.ports)
            with RelayClient(f"http://127.0.0.1:{port}", self.tokens[name], transport=plain(), patience=BORNE) as client:
                client.upload_share(RUN, 1, self.shares[name], within_s=600.0)
        self.acknowledged.add(name)

    def run(self, threads: int = 8) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self.upload, self.shares))

    def released(self) -> set[str]:
        url = f"http://127.0.0.1:{self.ports[0]}"
        with RelayAggregator(url, self.tokens["server"], transport=plain(), patience=BORNE) as server:
            total, envelopes = server.pull_sum(RUN, 1, self.size)
            again, same = server.pull_sum(RUN, 1, self.size)
        assert (total == again).all()
        assert envelopes == same
        return members(total.tobytes() + b"".join(envelopes), self.shares, self.size)


def keep_killing(place: str, log: Path, port: int, over: threading.Event, seed: int) -> int:
    """Run a relay and kill it at random times, again and again, until it is ``over``; return how often."""
    chance, kills = random.Random(seed), 0
    while not over.is_set():
        with relay_process(place, log, port) as (running, _):
            over.wait(chance.uniform(0.05, 1.0))
            running.kill()
            running.join()
            kills += 1
    return kills


@pytest.mark.parametrize("clients", [60, 120])
@pytest.mark.thorough_except("sqlite-60")
def test_relays_that_are_killed_under_load_lose_nothing_and_count_nothing_twice(place: str, clients: int, tmp_path: Path) -> None:
    """On PostgreSQL two relays share the store, and both are killed; on SQLite one at a time has the file."""
    size = sum_terms(dimension=20_000, min_clients=1, max_uploads=clients, closes_in_s=1000.0)
    tokens = tokens_in(place, [f"c{index}" for index in range(clients)])
    store = Store(open_engine(place))
    store.open_round("server", RUN, 1, size)
    ports = [free_port() for _ in range(2 if "postgresql" in place else 1)]
    load, over = Load(tokens, size, ports), threading.Event()
    with ThreadPoolExecutor(len(ports)) as pool:
        killing = [pool.submit(keep_killing, place, tmp_path / f"{port}.log", port, over, port) for port in ports]
        try:
            load.run()
        finally:
            over.set()
        assert sum(each.result(60) for each in killing) >= 1
    assert store.status("server", RUN, 1).uploads == clients
    store.close()
    late = Store(open_engine(place), clock=lambda: time.time() + 2000)
    late.part("server", RUN, 1, 0)
    late.close()
    with relay_process(place, tmp_path / "last.log", ports[0]):
        assert load.released() == load.acknowledged == set(load.shares)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.thorough_except("sqlite-0")
def test_a_relay_that_dies_for_good_leaves_a_sum_of_exactly_those_it_lists(place: str, seed: int, tmp_path: Path) -> None:
    """Clients give up soon; who heard that it is in is in, and of the others the sum and the list say the same."""
    size = sum_terms(dimension=5000, min_clients=100, max_uploads=100, closes_in_s=0.0)
    tokens = tokens_in(place, [f"c{index}" for index in range(100)])
    shares = {name: share_for(name, size) for name in tokens if name != "server"}
    store, acknowledged = Store(open_engine(place)), set[str]()
    store.open_round("server", RUN, 1, size)
    with relay_process(place, tmp_path / "relay.log") as (running, port):

        def upload(name: str) -> None:
            with (
                RelayClient(f"http://127.0.0.1:{port}", tokens[name], transport=plain(), patience=BORNE) as client,
                suppress(RelayUnreachable),
            ):
                client.upload_share(RUN, 1, shares[name], within_s=1.0)
                acknowledged.add(name)

        with ThreadPoolExecutor(8) as pool:
            uploading = [pool.submit(upload, name) for name in shares]
            last, deadline = random.Random(seed).randrange(5, 80), time.monotonic() + 60
            while len(acknowledged) < last:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            running.kill()
            for each in uploading:
                each.cancel()
    with store.engine.connect().execution_options(**READ_ONLY) as connection:
        held = [data for (data,) in (*connection.execute(select(parts.c.data)), *connection.execute(select(blocks.c.data)))]
    inside = members(b"".join(held), shares, size)
    assert len(inside) == store.status("server", RUN, 1).uploads
    assert acknowledged <= inside
    store.close()


@pytest.mark.thorough_for("postgresql")
def test_a_relay_that_is_killed_between_release_and_acknowledgement_hands_out_the_same_again(place: str, tmp_path: Path) -> None:
    size = sum_terms(dimension=2_000_000, closes_in_s=0.0)  # two parts, and envelopes
    tokens, port = tokens_in(place, ["alice", "bob"]), free_port()
    shares = {name: share_for(name, size) for name in ("alice", "bob")}
    with RelayAggregator(f"http://127.0.0.1:{port}", tokens["server"], transport=plain(), patience=BORNE) as server:
        pulled = []
        for start in range(3):
            with relay_process(place, tmp_path / f"{start}.log", port) as (running, _):
                if not start:
                    server.open_round(RUN, 1, size)
                    for name, share in shares.items():
                        with RelayClient(f"http://127.0.0.1:{port}", tokens[name], transport=plain()) as client:
                            client.upload_share(RUN, 1, share, within_s=60.0)
                total, envelopes = server.pull_sum(RUN, 1, size)
                pulled.append((total.tobytes(), tuple(envelopes)))
                if start == 2:
                    server.acknowledge(RUN, 1)
                running.kill()
        with relay_process(place, tmp_path / "last.log", port), pytest.raises(RelayRoundOver):
            server.pull_sum(RUN, 1, size)
    assert len(set(pulled)) == 1
    assert members(pulled[0][0] + b"".join(pulled[0][1]), shares, size) == set(shares)


@pytest.mark.thorough_for("sqlite")
def test_two_relays_share_one_store(place: str, tmp_path: Path) -> None:
    size = sum_terms(dimension=30_000, bits=64, min_clients=40, max_uploads=40, closes_in_s=0.0)
    tokens = tokens_in(place, [f"c{index}" for index in range(40)])
    with relay_process(place, tmp_path / "1.log") as (_, one), relay_process(place, tmp_path / "2.log") as (_, two):
        with RelayAggregator(f"http://127.0.0.1:{one}", tokens["server"]) as server:
            server.open_round(RUN, 1, size)
        load = Load(tokens, size, [one, two])
        load.run()
        assert load.released() == set(load.shares)
        logs = (tmp_path / "1.log").read_text() + (tmp_path / "2.log").read_text()
    assert logs.count("round_released") == 1
    assert not any(name in logs for name in ('"c10"', "shares/", *tokens.values()))


@pytest.mark.thorough
def test_a_refusal_arrives_before_the_body_is_read(tmp_path: Path) -> None:
    """A body that nobody wants is not taken, and its sender hears why, over real sockets."""
    place, size = str(tmp_path / "relay.db"), sum_terms(dimension=2_000_000, min_clients=1, closes_in_s=0.0)
    tokens = tokens_in(place, ["alice", "bob"])
    shares = {name: share_for(name, size) for name in ("alice", "bob")}
    with relay_process(place, tmp_path / "relay.log") as (_, port):
        url = f"http://127.0.0.1:{port}"
        with (
            RelayAggregator(url, tokens["server"]) as server,
            RelayClient(url, tokens["alice"]) as alice,
            RelayClient(url, tokens["bob"]) as bob,
        ):
            server.open_round(RUN, 1, size)
            with pytest.raises(RelayRefused, match="exactly"):
                alice.upload_share(RUN, 1, shares["alice"][1:], within_s=10.0)
            alice.upload_share(RUN, 1, shares["alice"], within_s=10.0)
            for _ in range(10):
                with pytest.raises(RelayRoundOver):
                    bob.upload_share(RUN, 1, shares["bob"], within_s=10.0)
            total, envelopes = server.pull_sum(RUN, 1, size)
            assert members(total.tobytes() + b"".join(envelopes), shares, size) == {"alice"}
    assert share_id(shares["alice"]).encode() not in on_disk(Path(place))


@pytest.mark.thorough
@pytest.mark.parametrize("more", [300, 1000])
def test_memory_and_store_do_not_grow_with_the_number_of_uploads(more: int, tmp_path: Path) -> None:
    """After 200 uploads of 400 KB, further ones take 1 KB each in the store (envelope, name, indexes), and no memory that counts."""
    place, first = tmp_path / "relay.db", 200
    size = sum_terms(dimension=100_000, min_clients=1, max_uploads=more, closes_in_s=1000.0)
    tokens = tokens_in(str(place), [f"c{index}" for index in range(more)])
    vector = np.random.default_rng(5).bytes(size.sum_bytes)
    with relay_process(str(place), tmp_path / "relay.log") as (running, port):
        with RelayAggregator(f"http://127.0.0.1:{port}", tokens["server"]) as server:
            server.open_round(RUN, 1, size)
        relay = psutil.Process(running.pid)

        def upload(index: int) -> None:
            with RelayClient(f"http://127.0.0.1:{port}", tokens[f"c{index}"], transport=plain()) as client:
                client.upload_share(RUN, 1, vector + envelope_of(index.to_bytes(80, "big"), f"c{index}", size), within_s=60.0)

        def sizes(indices: range) -> tuple[int, int]:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(upload, indices))
            return relay.memory_info().rss, place.stat().st_size

        memory, stored = sizes(range(first))
        more_memory, more_stored = sizes(range(first, more))
    assert more_memory - memory < 20e6
    assert more_stored - stored < 1000 * (more - first) + 100_000
