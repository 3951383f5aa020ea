"""Relays as processes on loopback: killed in the middle, two on one store, TLS, and what they leave in their log."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from relay_support import RUN, KillsItself, blob, certificate, on_disk, process, pull, put, records, relay_process, terms, upload_id

from ldpfl import ConfigError
from ldpfl.relay import Patience, RelayAggregator, RelayClient, RelayUnreachable
from ldpfl.relay.database import open_engine
from ldpfl.relay.protocol import BLOCK_BYTES
from ldpfl.relay.serve import Tls, serve
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens

pytest_plugins = ["relay_fixtures"]
pytestmark = pytest.mark.slow

QUICK = Patience(tries=60, first_s=0.05, longest_s=0.2, timeout_s=20.0)
LARGE = terms(record_bytes=64, records_per_upload=6 * BLOCK_BYTES // 64, min_clients=1, closes_in_s=0.0)


def tokens_in(place: str) -> dict[str, str]:
    engine = open_engine(place)
    known = Tokens(engine)
    made = {name: known.add(name, Role.CLIENT) for name in ("alice", "bob", "carol", "dave")} | {
        "server": known.add("server", Role.AGGREGATOR)
    }
    engine.dispose()
    return made


class Slowly(httpx.BaseTransport):
    """Sends bodies over real sockets, a block at a time, and calls ``between`` before each further one."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self._inner, self._between = httpx.HTTPTransport(), between

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            request = httpx.Request("PATCH", request.url, headers=request.headers, content=self._pieces(request.read()))
        return self._inner.handle_request(request)

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        for start in range(0, len(body), BLOCK_BYTES):
            if start:
                self._between(start)
            yield body[start : start + BLOCK_BYTES]

    def close(self) -> None:
        self._inner.close()


@pytest.mark.thorough_for("postgresql")
def test_a_relay_killed_while_it_takes_an_upload_goes_on_after_its_restart(place: str, tmp_path: Path) -> None:
    tokens, log = tokens_in(place), tmp_path / "relay.log"
    store = Store(open_engine(place))
    store.open_round("server", RUN, 1, LARGE)
    sent: list[int] = []
    with relay_process(place, log) as (first, port):
        restarted = threading.Event()

        def kill_after_three(start: int) -> None:
            sent.append(start)
            if start == 3 * BLOCK_BYTES and not restarted.is_set():
                while store.progress("alice", RUN, 1, upload_id("alice")).received < 2 * BLOCK_BYTES:
                    time.sleep(0.005)
                first.kill()
                first.join()
                restarted.set()

        def upload() -> None:
            with RelayClient(f"http://127.0.0.1:{port}", tokens["alice"], transport=Slowly(kill_after_three), patience=QUICK) as alice:
                alice.upload(RUN, 1, upload_id("alice"), blob("alice", LARGE), within_s=60.0)

        with ThreadPoolExecutor(1) as pool:
            uploading = pool.submit(upload)
            assert restarted.wait(30)
            kept = store.progress("alice", RUN, 1, upload_id("alice")).received
            assert kept in (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
            with relay_process(place, log, port):
                uploading.result(30)
                with RelayAggregator(f"http://127.0.0.1:{port}", tokens["server"], patience=QUICK) as server:
                    assert records(b"".join(server.pull(RUN, 1)), 64) == records(blob("alice", LARGE), 64)
    assert len(sent) < 3 + 5  # nothing that was acknowledged was sent again
    store.close()


@pytest.mark.parametrize("last", [1, 2, 5, 9])
@pytest.mark.thorough_except("sqlite-1")
def test_a_relay_killed_while_it_mixes_leaves_the_round_as_it_was(place: str, last: int, tmp_path: Path) -> None:
    """Killed while it scatters (1, 2), and between the 8 parts, when uploads are deleted and parts are half written."""
    store = Store(open_engine(place))
    size = terms(records_per_upload=100, closes_in_s=0.0)
    store.open_round("server", RUN, 1, size)
    for client in ("alice", "bob"):
        put(store, client, size=size)
    with process(_release_and_die, place, last) as killed:
        killed.join(30)
        assert killed.exitcode == -9
    assert store.status("server", RUN, 1).uploads == 2
    assert store.progress("alice", RUN, 1, upload_id("alice")).complete
    first = pull(store, owner="server")
    assert records(first) == records(blob("alice", size) + blob("bob", size))
    assert pull(store, owner="server") == first
    store.close()


def _release_and_die(place: str, last: int) -> None:
    from ldpfl.relay import uniform_order

    uniform_order.PART_BYTES, uniform_order.BATCH_BYTES = 400, 2000
    Store(open_engine(place), words=KillsItself(last)).part("server", RUN, 1, 0)


@pytest.mark.thorough_for("postgresql")
def test_records_outlast_a_killed_aggregator_and_a_killed_relay(place: str, tmp_path: Path) -> None:
    tokens, log = tokens_in(place), tmp_path / "relay.log"
    size = terms(closes_in_s=0.0)
    pulled: list[list[bytes]] = []
    for start in range(2):
        with relay_process(place, log) as (running, port):
            url = f"http://127.0.0.1:{port}"
            if start == 0:
                with RelayAggregator(url, tokens["server"]) as server:
                    server.open_round(RUN, 1, size)
                for name in ("alice", "bob"):
                    with RelayClient(url, tokens[name]) as client:
                        client.upload(RUN, 1, upload_id(name), blob(name), within_s=60.0)
            with RelayAggregator(url, tokens["server"]) as server:
                pulled.append(list(server.pull(RUN, 1)))
            running.kill()
            running.join()
    assert pulled[0] == pulled[1]
    assert records(b"".join(pulled[0])) == records(blob("alice") + blob("bob"))


@pytest.mark.thorough_for("sqlite")
def test_two_relays_share_one_store(place: str, tmp_path: Path) -> None:
    tokens = tokens_in(place)
    size = terms(record_bytes=64, records_per_upload=5000, closes_in_s=0.0, min_clients=4)
    with relay_process(place, tmp_path / "1.log") as (_, one), relay_process(place, tmp_path / "2.log") as (_, two):
        urls = [f"http://127.0.0.1:{port}" for port in (one, two)]
        with RelayAggregator(urls[0], tokens["server"]) as server:
            server.open_round(RUN, 1, size)

        def upload(numbered: tuple[int, str]) -> None:
            with RelayClient(urls[numbered[0] % 2], tokens[numbered[1]]) as client:
                client.upload(RUN, 1, upload_id(numbered[1]), blob(numbered[1], size), within_s=60.0)

        def pull_from(url: str) -> list[bytes]:
            with RelayAggregator(url, tokens["server"]) as server:
                server.wait(RUN, 1, 30)
                return list(server.pull(RUN, 1))

        names = ("alice", "bob", "carol", "dave")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(upload, enumerate(names)))
            first, second = pool.map(pull_from, urls)
        assert first == second
        assert records(b"".join(first), 64) == records(b"".join(blob(name, size) for name in names), 64)
        log = (tmp_path / "1.log").read_text() + (tmp_path / "2.log").read_text()
    assert log.count("round_released") == 1
    assert not any(secret in log for secret in (*names, "upload-of", *tokens.values()))


def test_over_tls_with_an_authority_of_our_own(tmp_path: Path) -> None:
    place = str(tmp_path / "relay.db")
    tokens, tls = tokens_in(place), certificate(tmp_path)
    with relay_process(place, tmp_path / "relay.log", tls=tls) as (_, port):
        trusting = ssl.create_default_context(cafile=str(tls.certificate))
        with RelayAggregator(f"https://127.0.0.1:{port}", tokens["server"], verify=trusting) as server:
            assert server.open_round(RUN, 1, terms()).state == "open"
        once = Patience(tries=1)
        why = rf"https://127\.0\.0\.1:{port} could not be reached \(.*certificate verify failed"
        with (
            RelayAggregator(f"https://127.0.0.1:{port}", tokens["server"], patience=once) as doubting,
            pytest.raises(RelayUnreachable, match=why),
        ):
            doubting.round_status(RUN, 1)
        with RelayAggregator(f"http://127.0.0.1:{port}", tokens["server"], patience=once) as plain, pytest.raises(RelayUnreachable):
            plain.round_status(RUN, 1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "relay.example"])
def test_outside_this_machine_it_needs_tls(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-cert"):
        serve(str(tmp_path / "relay.db"), host, 0, None)
    assert not (tmp_path / "relay.db").exists()


def test_a_certificate_that_cannot_be_read_or_a_taken_port_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    (tmp_path / "no.pem").chmod(0o600)
    with pytest.raises(ConfigError, match="PEM"):
        serve(str(tmp_path / "relay.db"), "127.0.0.1", 0, Tls(tmp_path / "no.pem", tmp_path / "no.pem"))
    with pytest.raises(ConfigError, match=r"none.pem cannot be read"):
        serve(str(tmp_path / "relay.db"), "127.0.0.1", 0, Tls(tmp_path / "none.pem", tmp_path / "none.pem"))
    with relay_process(str(tmp_path / "relay.db"), tmp_path / "relay.log") as (_, port), pytest.raises(ConfigError, match=f"port {port}"):
        serve(str(tmp_path / "other.db"), "127.0.0.1", port, None)


def test_a_relay_that_is_told_to_stop_ends_well_and_leaves_no_name(tmp_path: Path) -> None:
    """Killed right behind the release, started again, stopped: no file of the store names who uploaded, at any of these times."""
    place, size = tmp_path / "relay.db", terms(closes_in_s=0.0)
    tokens = tokens_in(str(place))
    with relay_process(str(place), tmp_path / "relay.log") as (running, port):
        url = f"http://127.0.0.1:{port}"
        with RelayAggregator(url, tokens["server"]) as server:
            server.open_round(RUN, 1, size)
            for name in ("alice", "bob"):
                with RelayClient(url, tokens[name]) as client:
                    client.upload(RUN, 1, upload_id(name), blob(name), within_s=60.0)
            assert b"upload-of-alice" in on_disk(place)
            next(server.pull(RUN, 1))
            running.kill()
            running.join()
    assert b"upload-of-" not in on_disk(place)
    with relay_process(str(place), tmp_path / "relay.log") as (running, _):
        assert b"upload-of-" not in on_disk(place)
        running.terminate()
        running.join(60)
        assert running.exitcode == 0
    assert b"upload-of-" not in on_disk(place)
    assert len((tmp_path / "relay.log").read_text().splitlines()) == 1


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    files.key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        serve(str(tmp_path / "relay.db"), "127.0.0.1", 0, files)
    assert not (tmp_path / "relay.db").exists()


def test_what_a_killed_relay_left_of_a_round_is_deleted_before_the_next_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "relay.db"
    store = Store(open_engine(str(place)))
    store.open_round("server", RUN, 1, terms())
    put(store, "alice")
    monkeypatch.setattr("ldpfl.relay.round_deletion.GoneRounds.delete", lambda self: None)
    store.cancel("server", RUN, 1)
    store.close()
    assert b"upload-of-alice" in on_disk(place)
    with relay_process(str(place), tmp_path / "relay.log"):
        assert b"alice" not in on_disk(place)
