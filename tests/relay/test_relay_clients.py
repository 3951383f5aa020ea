"""The relay's callers: uploads that survive breaks, patience that ends, and pulls that notice what is missing."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from relay_support import RUN, Changes, Clock, InProcess, blob, certificate, records, terms, upload_id

from ldpfl import ConfigError, ProtocolError
from ldpfl.relay import (
    Patience,
    RelayAggregator,
    RelayClient,
    RelayNotReleased,
    RelayRefused,
    RelayRoundOver,
    RelayUnreachable,
    Terms,
)
from ldpfl.relay.app import create_app
from ldpfl.relay.protocol import BLOCK_BYTES
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens

pytest_plugins = ["relay_fixtures"]

LARGE = terms(record_bytes=64, records_per_upload=12_000, min_clients=1)  # almost three blocks


@dataclass
class World:
    """A relay and its callers; sleeping turns the relay's clock."""

    transport: InProcess
    clock: Clock
    tokens: dict[str, str]
    changes: Changes
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds

    def client(self, name: str = "alice") -> RelayClient:
        token = self.tokens.get(name, name)
        patience = Patience(tries=4)
        return RelayClient("http://127.0.0.1", token, transport=self.transport, patience=patience, sleep=self.sleep, clock=self.clock)

    def aggregator(self) -> RelayAggregator:
        token = self.tokens["server"]
        patience = Patience(tries=4)
        return RelayAggregator("http://127.0.0.1", token, transport=self.transport, patience=patience, sleep=self.sleep, clock=self.clock)

    def paths(self, method: str) -> list[str]:
        return [request.url.path for request in self.transport.seen if request.method == method]


@pytest.fixture
def world(sqlite_store: Store, clock: Clock, portal: BlockingPortal) -> Iterator[World]:
    known = Tokens(sqlite_store.engine)
    tokens = {name: known.add(name, Role.CLIENT) for name in ("alice", "bob", "carol")} | {"server": known.add("server", Role.AGGREGATOR)}
    changes = Changes(sqlite_store.engine.url.database)
    yield World(InProcess(create_app(sqlite_store), portal), clock, tokens, changes)
    changes.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_whole_round(world: World) -> None:
    with world.aggregator() as server, world.client("alice") as alice, world.client("bob") as bob:
        assert server.open_round(RUN, 1, terms()).state == "open"
        assert server.open_round(RUN, 1, terms()).state == "open"
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        bob.upload(RUN, 1, upload_id("bob"), blob("bob"), within_s=60.0)
        assert alice.round_status(RUN, 1).uploads is None
        with pytest.raises(RelayRefused, match="425") as early:
            list(server.pull(RUN, 1))
        assert early.value.status == 425
        assert server.wait(RUN, 1, 200).uploads == 2
        assert sum(world.slept) == pytest.approx(100)
        pulled = list(server.pull(RUN, 1))
        assert pulled == list(server.pull(RUN, 1))
        assert {len(record) for record in pulled} == {16}
        assert records(b"".join(pulled)) == records(blob("alice") + blob("bob"))
        server.acknowledge(RUN, 1)
        server.acknowledge(RUN, 1)
        assert server.round_status(RUN, 1).state == "gone"
        with pytest.raises(RelayRoundOver):
            alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        with pytest.raises(RelayRoundOver):
            list(server.pull(RUN, 1))
    assert len(world.paths("PATCH")) == 2


def test_a_round_of_many_parts_is_pulled_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.uniform_order.PART_BYTES", 100)
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms(min_clients=1))
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        world.clock.now += 100
        assert records(b"".join(server.pull(RUN, 1))) == records(blob("alice"))
        assert len(world.paths("GET")) == 8 + 2  # the parts, the terms, and how many uploads were mixed


def broken_after(count: int, times: int, world: World) -> Callable[[httpx.Request], httpx.Response | None]:
    """Break the connection ``times`` times, after ``count`` bytes of a PATCH have reached the relay."""
    left = [times]

    def fault(request: httpx.Request) -> httpx.Response | None:
        if request.method != "PATCH" or left[0] == 0:
            return None
        left[0] -= 1
        body = request.read()[:count]
        if body:
            cut = httpx.Request("PATCH", request.url, headers={**request.headers, "Content-Length": str(len(body))}, content=body)
            world.transport.portal.call(world.transport._send, cut)
        raise httpx.ReadError("broken")

    return fault


@pytest.mark.thorough_except("262151", "768000")
@pytest.mark.parametrize("count", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 7, 12_000 * 64])
def test_an_upload_goes_on_where_it_broke(world: World, count: int) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, LARGE)
        world.transport.fault = broken_after(count, 2, world)
        alice.upload(RUN, 1, upload_id("alice"), blob("alice", LARGE), within_s=60.0)
        world.clock.now += 100
        assert records(b"".join(server.pull(RUN, 1)), 64) == records(blob("alice", LARGE), 64)
    offsets = [int(request.headers["Upload-Offset"]) for request in world.transport.seen if request.method == "PATCH"]
    assert offsets[0] == 0
    assert all(later - earlier == count for earlier, later in pairwise(offsets))


@pytest.mark.slow
def test_an_upload_is_tried_for_the_time_that_it_has_and_no_longer(world: World) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, LARGE)
        world.transport.fault = broken_after(0, 10**9, world)
        with pytest.raises(RelayUnreachable, match="for 90 seconds"):
            alice.upload(RUN, 1, upload_id("alice"), blob("alice", LARGE), within_s=90.0)
        assert sum(world.slept) == pytest.approx(90)
        assert max(world.slept) <= Patience().longest_upload_s
        assert len(world.paths("PATCH")) > 15  # more than the tries of other calls
        # One try, however little time there is; and as long as each break brings some bytes, it goes on.
        world.transport.fault = broken_after(40_000, 10**9, world)
        alice.upload(RUN, 1, upload_id("alice"), blob("alice", LARGE), within_s=90.0)


def test_a_relay_that_is_away_or_full_for_longer_than_usual_patience_loses_no_upload(world: World) -> None:
    def away(request: httpx.Request) -> httpx.Response | None:
        if world.clock.now > back:
            return None
        if len(world.slept) % 2:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, content=b"Service Unavailable")

    with world.aggregator() as server, world.client() as alice, world.client("bob") as bob:
        server.open_round(RUN, 1, terms(closes_in_s=300.0))
        back = world.clock.now + 80
        world.transport.fault = away
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=120.0)
        back = world.clock.now + 80
        with pytest.raises(RelayUnreachable, match="for 60 seconds"):
            bob.upload(RUN, 1, upload_id("bob"), blob("bob"), within_s=60.0)
        world.clock.now = back + 1
        assert server.round_status(RUN, 1).uploads == 1


@pytest.mark.parametrize(("asked", "least"), [("3", 3.0), ("86400", 5.0)])
def test_an_upload_waits_as_long_as_it_is_asked_to_if_it_has_the_time(world: World, asked: str, least: float) -> None:
    answers = [httpx.Response(503, headers={"Retry-After": asked}, json={"error": "later"})]
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms())
        world.transport.fault = lambda request: answers.pop() if answers else None
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
    assert len(world.slept) == 1
    assert least <= world.slept[0] <= 30.0


def test_the_time_outs_of_one_request_end_with_the_time_of_the_upload(world: World) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms())
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=7.0)
    for request in world.transport.seen:
        most = 7.0 if "uploads" in request.url.path else Patience().timeout_s
        assert set(request.extensions["timeout"].values()) == {most}


def answering(methods: dict[str, list[tuple[int, int]]], seen: list[str]) -> httpx.MockTransport:
    """A relay that answers each method with its (status, offset) in turn, the last one for ever; ``seen`` gets the methods."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        assert len(seen) < 1_000, "it hangs"
        answers = methods[request.method]
        status, offset = answers.pop(0) if len(answers) > 1 else answers[0]
        return httpx.Response(status, headers={"Upload-Offset": str(offset)})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("patch", "head"),
    [
        ([(204, 0)], [(204, 0)]),  # taken, it says, and has nothing
        ([(409, 0)], [(204, 0)]),  # always elsewhere, and never is
        ([(204, 9), (204, 5), (204, 9), (503, 0)], [(204, 5), (204, 0), (204, 5)]),  # forth and back is no progress
    ],
)
def test_answers_that_bring_nothing_forward_end_too(patch: list[tuple[int, int]], head: list[tuple[int, int]]) -> None:
    clock, seen = Clock(), list[str]()
    transport = answering({"POST": [(201, 0)], "PATCH": patch, "HEAD": head}, seen)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    with RelayClient("http://127.0.0.1", "t", transport=transport, sleep=sleep, clock=clock) as client:
        with pytest.raises(RelayUnreachable, match="for 60 seconds"):
            client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=60.0)
        assert clock.now == pytest.approx(1_000_060)


def test_a_stalled_upload_that_goes_on_is_whole() -> None:
    seen: list[str] = []
    transport = answering({"POST": [(201, 0)], "PATCH": [(204, 0), (409, 40), (204, 100)], "HEAD": [(204, 0), (204, 40)]}, seen)
    with RelayClient("http://127.0.0.1", "t", transport=transport, patience=Patience(3, 0.0, 0.0)) as client:
        client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=60.0)
    assert seen == ["POST", "PATCH", "HEAD", "PATCH", "HEAD", "PATCH"]


@pytest.mark.parametrize("method", ["POST", "PATCH", "HEAD"])
@pytest.mark.parametrize("offset", [101, 10**17, 10**18, int("9" * 4_300)])
def test_an_offset_beyond_the_upload_is_noticed(method: str, offset: int) -> None:
    answers = {"POST": [(201, 0)], "PATCH": [(503, 0)], "HEAD": [(204, 0)]} | {method: [(204, offset)]}
    with (
        RelayClient("http://127.0.0.1", "t", transport=answering(answers, []), patience=Patience(4, 0.0, 0.0)) as client,
        pytest.raises(ProtocolError, match="no number up to 100 in its header Upload-Offset"),
    ):
        client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=60.0)


@pytest.mark.parametrize("text", ["9" * 5_000, "1" + "0" * 18, "65537", "-1", "1.0", "\u0661", ""])
def test_numbers_in_headers_that_cannot_be_are_noticed(world: World, text: str) -> None:
    headers = {b"Relay-Parts": text.encode(), b"Upload-Offset": text.encode()}

    def false(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(200, headers=headers, content=b"") if request.url.path.count("/") > 4 else None

    with world.client() as alice, world.aggregator() as server:
        server.open_round(RUN, 1, terms())
        world.transport.fault = false
        with pytest.raises(ProtocolError, match="no number up to 1 in its header Relay-Parts"):
            list(server.pull(RUN, 1))
        with pytest.raises(ProtocolError, match="no number up to 640 in its header Upload-Offset"):
            alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)


def test_a_wait_of_thousands_of_digits_is_not_asked_for(world: World) -> None:
    world.transport.fault = lambda request: httpx.Response(503, headers={"Retry-After": "9" * 5_000}, content=b"")
    with world.aggregator() as server, pytest.raises(RelayRefused, match="503"):
        server.round_status(RUN, 1)
    assert [low <= slept <= 2 * low for low, slept in zip((0.125, 0.25, 0.5), world.slept, strict=True)] == [True] * 3


def test_answers_that_cannot_be_unpacked_are_like_a_broken_connection(world: World) -> None:
    broken = [True, True]

    def fault(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b"not gzip") if broken and broken.pop() else None

    world.transport.fault = fault
    with world.aggregator() as server:
        assert server.open_round(RUN, 1, terms()).state == "open"
        assert len(world.slept) == 2
        broken += [True] * 4
        with pytest.raises(RelayUnreachable, match="4 times in a row"):
            server.round_status(RUN, 1)


def test_a_reason_nested_too_deeply_is_not_read(world: World) -> None:
    world.transport.fault = lambda request: httpx.Response(404, content=b"[" * 60_000)
    with world.client() as alice, pytest.raises(RelayRefused, match="Not Found"):
        alice.round_status(RUN, 1)


def test_what_the_relay_says_does_nothing_to_a_log_or_a_screen(world: World) -> None:
    said = "no\n2026-01-01 all is well\x1b[2J\x07\u202e" + "x" * 10_000
    world.transport.fault = lambda request: httpx.Response(404, json={"error": said})
    with world.client() as alice, pytest.raises(RelayRefused) as refused:
        alice.round_status(RUN, 1)
    assert str(refused.value).startswith("the relay refused (404): no2026-01-01 all is well[2Jx")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 250


def test_answers_are_asked_for_unpacked_and_read_to_a_bound(world: World) -> None:
    pulled = [0]

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for _ in range(100_000):
                pulled[0] += 10_000
                yield bytes(10_000)

    size = terms(min_clients=1, closes_in_s=0.0)
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, size)
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        assert {request.headers["Accept-Encoding"] for request in world.transport.seen} == {"identity"}
        for status in (200, 404, 503):
            world.transport.fault = lambda request, status=status: httpx.Response(status, stream=Endless())  # type: ignore[misc]
            for action in (lambda: alice.round_status(RUN, 1), lambda: server.acknowledge(RUN, 1)):
                pulled[0] = 0
                with pytest.raises(ProtocolError, match="longer than 65,536 bytes" if status == 200 else f"refused .{status}"):
                    action()
                assert pulled[0] < 4 * 100_000  # of each try
        world.transport.fault = lambda request: (
            httpx.Response(200, stream=Endless(), headers={"Relay-Parts": "1"}) if "records" in request.url.path else None
        )
        pulled[0] = 0
        with pytest.raises(ProtocolError, match="longer than"):
            list(server.pull(RUN, 1))
        assert pulled[0] < 4 * 4 * 2**20 + 64 * 16 + 20_000


def test_more_records_than_were_uploaded_are_not_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.uniform_order.PART_BYTES", 100)
    asked = [0]

    def more(request: httpx.Request) -> httpx.Response | None:
        if "records" not in request.url.path:
            return None
        asked[0] += 1
        return httpx.Response(200, headers={"Relay-Parts": "8"}, content=bytes(640))

    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms(min_clients=1, closes_in_s=0.0))
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        world.transport.fault = more
        with pytest.raises(ProtocolError, match="the relay sent 80 records"):
            list(server.pull(RUN, 1))
    assert asked == [2]


def test_an_answer_that_drips_ends_with_the_time_of_the_upload() -> None:
    """A server on a real socket that sends a byte of its head every 50 ms, for ever."""
    ended, began = threading.Event(), time.monotonic()

    def drip(listener: socket.socket) -> None:
        while not ended.is_set():
            with suppress(OSError), listener.accept()[0] as connection:
                while not ended.wait(0.05) and time.monotonic() < began + 40:
                    connection.send(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        with (
            RelayClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "t") as client,
            pytest.raises(RelayUnreachable, match="for 1 seconds"),
        ):
            client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=1.0)
        assert time.monotonic() - began < 20
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize("run", ["", "..", "a/b", "a/../../x", "a?b", "a#b", "a%2Fb", "a b", "a\r\nb", "é", "x" * 65])
def test_names_that_no_run_has_are_not_sent(world: World, run: str) -> None:
    with world.client() as alice, world.aggregator() as server:
        for action in (
            lambda: alice.round_status(run, 1),
            lambda: alice.upload(run, 1, upload_id("alice"), blob("alice"), within_s=60.0),
            lambda: server.open_round(run, 1, terms()),
            lambda: server.wait(run, 1, 1),
            lambda: list(server.pull(run, 1)),
            lambda: server.acknowledge(run, 1),
            lambda: server.cancel(run, 1),
        ):
            with pytest.raises(ProtocolError, match="the name of the run is not valid"):
                action()
        with pytest.raises(ProtocolError, match="no such upload"):
            alice.upload(RUN, 1, run, blob("alice"), within_s=60.0)
        with pytest.raises(ProtocolError, match="no such round"):
            alice.round_status(RUN, -1)
    assert world.transport.seen == []


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 507])
def test_answers_that_may_get_better_are_tried_again(world: World, status: int) -> None:
    answers = [httpx.Response(status, headers={"Retry-After": "3"}, json={"error": "later"})] * 2
    with world.aggregator() as server:
        world.transport.fault = lambda request: answers.pop() if answers else None
        assert server.open_round(RUN, 1, terms()).state == "open"
        assert world.slept == [3.0, 3.0]
        world.transport.fault = lambda request: httpx.Response(status, headers={"Retry-After": "86400"}, json={"error": "later"})
        with pytest.raises(RelayRefused, match="later") as refused:
            server.round_status(RUN, 1)
        assert refused.value.status == status
        assert max(world.slept) == Patience().longest_s


def test_refusals_are_told_at_once_and_change_nothing(world: World) -> None:
    with world.aggregator() as server, world.client() as alice, world.client("bob") as bob, world.client("x" * 43) as stranger:
        server.open_round(RUN, 1, terms())
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        before = world.changes.count()
        for action, status in (
            (lambda: bob.upload(RUN, 1, upload_id("bob"), blob("bob")[:-1], within_s=60.0), 400),
            (lambda: bob.upload(RUN, 1, upload_id("bob"), b"", within_s=60.0), 400),
            (lambda: bob.upload(RUN, 1, upload_id("alice"), blob("bob"), within_s=60.0), 409),
            (lambda: alice.upload(RUN, 1, upload_id("again"), blob("alice"), within_s=60.0), 409),
            (lambda: alice.upload(RUN, 2, upload_id("alice"), blob("alice"), within_s=60.0), 404),
            (lambda: stranger.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0), 401),
            (lambda: server.open_round(RUN, 1, terms(min_clients=3)), 409),
            (lambda: server.acknowledge(RUN, 1), 409),
        ):
            with pytest.raises(RelayRefused) as refused:
                action()
            assert refused.value.status == status
        assert world.changes.count() == before
    assert world.slept == []


def test_a_token_of_another_role_is_refused(world: World) -> None:
    with RelayAggregator("http://localhost", world.tokens["alice"], transport=world.transport) as false, world.aggregator() as server:
        server.open_round(RUN, 1, terms())
        for action in (
            lambda: false.open_round(RUN, 1, terms()),
            lambda: list(false.pull(RUN, 1)),
            lambda: false.acknowledge(RUN, 1),
            lambda: false.cancel(RUN, 1),
        ):
            with pytest.raises(RelayRefused, match="needs the token of aggregator") as refused:
                action()
            assert refused.value.status == 403


@pytest.mark.slow
@pytest.mark.thorough
def test_waiting_ends_with_a_reason(world: World) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms())
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        with pytest.raises(RelayNotReleased, match="is still open after 5 seconds"):
            server.wait(RUN, 1, 5)
        with pytest.raises(RelayNotReleased, match="has 1 upload of the 2 it waits for after 200 seconds"):
            server.wait(RUN, 1, 200)
        server.cancel(RUN, 1)
        assert server.wait(RUN, 1, 1).state == "gone"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_last_question_of_a_wait_has_time_for_its_answer(world: World) -> None:
    """Else the end of a round that too few clients joined would look like a relay that is away, and end the run."""
    with world.aggregator() as server:
        server.open_round(RUN, 1, terms())
        with pytest.raises(RelayNotReleased, match="has 0 uploads of the 2 it waits for"):
            server.wait(RUN, 1, 200)
    assert world.transport.seen[-1].extensions["timeout"]["read"] >= Patience().timeout_s


def test_a_relay_that_is_away_for_a_while_does_not_end_the_waiting(world: World) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms(min_clients=1))
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        away_until = world.clock.now + 50
        world.transport.fault = lambda request: httpx.Response(503) if world.clock.now < away_until else None
        assert server.wait(RUN, 1, 200).uploads == 1


def test_a_pull_notices_what_is_missing(world: World) -> None:
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms(min_clients=1))
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        world.clock.now += 100
        whole = b"".join(server.pull(RUN, 1))
        for data, words in (
            (whole[:-16], "the relay sent 39 records"),
            (whole[:-1], "639 bytes, which its terms do not allow"),
            (whole + whole[:16], "the relay sent 41 records"),
        ):

            def lossy(request: httpx.Request, data: bytes = data) -> httpx.Response | None:
                return httpx.Response(200, headers={"Relay-Parts": "1"}, content=data) if "records" in request.url.path else None

            world.transport.fault = lossy
            with pytest.raises(ProtocolError, match=words):
                list(server.pull(RUN, 1))


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"state": "open"}'])
def test_a_server_that_is_no_relay_is_noticed(world: World, body: bytes) -> None:
    world.transport.fault = lambda request: httpx.Response(200, content=body)
    with world.client() as alice, world.aggregator() as server:
        with pytest.raises(ProtocolError, match="cannot be read"):
            alice.round_status(RUN, 1)
        with pytest.raises(ProtocolError, match="Upload-Offset"):
            alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        with pytest.raises(ProtocolError, match="cannot be read"):
            list(server.pull(RUN, 1))
    world.transport.fault = lambda request: httpx.Response(404, content=b"<html>")
    with world.client() as alice, pytest.raises(RelayRefused, match="Not Found"):
        alice.round_status(RUN, 1)


@pytest.mark.parametrize(
    "url", ["http://relay.example", "http://192.168.0.1:8473", "http://0.0.0.0", "ftp://localhost", "relay", "", "https://"]
)
def test_a_token_travels_only_by_tls_or_on_this_machine(url: str) -> None:
    with pytest.raises(ConfigError, match="relay"):
        RelayClient(url, "x" * 43)


def test_a_relay_that_cannot_be_reached_is_named_with_the_reason_and_without_a_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    patience = Patience(tries=2, first_s=0.0)
    url = f"http://own:secret@127.0.0.1:{port}/"
    with RelayAggregator(url, "t", patience=patience) as server, pytest.raises(RelayUnreachable) as counted:
        server.round_status(RUN, 1)
    with RelayClient(f"http://127.0.0.1:{port}", "t", patience=patience) as client, pytest.raises(RelayUnreachable) as timed:
        client.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=0.1)
    for caught, tried in ((counted, "2 times in a row"), (timed, "for 0 seconds")):
        text = str(caught.value)
        assert text.startswith(f"the relay http://127.0.0.1:{port} could not be reached (")
        assert "refused" in text
        assert text.endswith(tried)


def test_an_answer_of_another_server_names_its_url(world: World) -> None:
    world.transport.fault = lambda request: httpx.Response(200, content=b"<html>")
    with world.client() as alice:
        for call in (lambda: alice.round_status(RUN, 1), alice.signer):
            with pytest.raises(ProtocolError, match=r"answer of http://127\.0\.0\.1 about a .* cannot be read: check .* URL"):
                call()


@pytest.mark.parametrize("url", ["https://relay.example", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1"])
def test_other_urls_are_accepted(url: str) -> None:
    RelayClient(url, "x" * 43, transport=httpx.MockTransport(lambda request: httpx.Response(200))).close()


def test_the_token_is_neither_in_errors_nor_in_representations(world: World) -> None:
    with world.client() as alice:
        assert world.tokens["alice"] not in repr(alice)
        with pytest.raises(RelayRefused) as refused:
            alice.round_status(RUN, 7)
        assert world.tokens["alice"] not in repr(refused.value)


def test_terms_are_checked_before_they_are_sent() -> None:
    with pytest.raises(ValueError, match="min_clients"):
        Terms(record_bytes=64, records_per_upload=1, min_clients=2, closes_in_s=1.0, max_uploads=1, agreement="0" * 64)


def test_a_relay_s_cookies_are_not_kept() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(404, headers={"Set-Cookie": "name=alice; Path=/"}, json={"error": "no"})

    with RelayClient("http://127.0.0.1", "token", transport=httpx.MockTransport(answer)) as client:
        for _ in range(2):
            with pytest.raises(RelayRefused):
                client.round_status(RUN, 1)
    assert len(seen) == 2
    assert not any("cookie" in request.headers for request in seen)


def test_a_relay_that_takes_its_time_to_answer_does_not_hold_an_aggregator() -> None:
    """It says that the round is about to close, over and over, so that hardly any time is spent waiting."""
    now = [0.0]

    def answer(request: httpx.Request) -> httpx.Response:
        now[0] += 2.0
        status = {"run": RUN, "round": 1, "state": "open", "seconds_left": 0.0, "terms": terms().model_dump(), "uploads": 0}
        return httpx.Response(200, json=status)

    server = RelayAggregator(
        "http://127.0.0.1", "token", transport=httpx.MockTransport(answer), sleep=lambda seconds: None, clock=lambda: now[0]
    )
    with server, pytest.raises(RelayNotReleased, match="after 5 seconds"):
        server.wait(RUN, 1, 5.0)
    assert now[0] < 10


def saying(**changes: object) -> httpx.MockTransport:
    """A relay that answers every request with the status of a round."""
    status = {"run": RUN, "round": 1, "state": "released", "seconds_left": 0.0, "terms": terms().model_dump(), "uploads": 2, **changes}
    return httpx.MockTransport(lambda request: httpx.Response(200, json=status, headers={"Relay-Parts": "1"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "run-2"},
        {"round": 2},
        {"uploads": 9},  # of 8
        {"uploads": -1},
        {"seconds_left": 8 * 24 * 3600.0},
        {"terms": terms().model_dump() | {"record_bytes": 2**30}},
    ],
)
def test_a_status_that_cannot_be_true_is_noticed(changes: dict[str, object]) -> None:
    """What is read of the records, and held in memory, goes by it."""
    with RelayAggregator("http://127.0.0.1", "token", transport=saying(**changes)) as server, pytest.raises(ProtocolError):
        list(server.pull(RUN, 1))


def test_a_round_that_was_opened_with_other_terms_is_noticed() -> None:
    with RelayAggregator("http://127.0.0.1", "token", transport=saying()) as server:
        assert server.open_round(RUN, 1, terms()).uploads == 2
        with pytest.raises(ProtocolError, match="other terms"):
            server.open_round(RUN, 1, terms(records_per_upload=41))


def test_bytes_taken_one_by_one_are_no_progress() -> None:
    """Each has all that is left sent once more: waits grow as for failures, so that there are few."""
    clock, seen, taken = Clock(), list[str](), [0]

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        taken[0] += request.method == "PATCH"
        return httpx.Response(204, headers={"Upload-Offset": str(taken[0])})

    def sleep(seconds: float) -> None:
        clock.now += seconds

    with (
        RelayClient("http://127.0.0.1", "t", transport=httpx.MockTransport(answer), sleep=sleep, clock=clock) as client,
        pytest.raises(RelayUnreachable),
    ):
        client.upload(RUN, 1, upload_id("alice"), bytes(1_000_000), within_s=600.0)
    assert clock.now == pytest.approx(1_000_600)
    assert seen.count("PATCH") < 600  # a mean of half the longest wait, 2.5 s, would be 240


@pytest.mark.parametrize("place", ["http://[", "\u2603://x", "http://x:99999999/"])
def test_an_answer_that_points_nowhere_is_a_failure_like_others(place: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(307, headers={b"Location": place.encode()}))
    patience = Patience(2, 0.0, 0.0)
    with RelayAggregator("http://127.0.0.1", "t", transport=transport, patience=patience) as server, pytest.raises(ProtocolError):
        server.round_status(RUN, 1)


def test_a_connection_that_begins_when_the_time_is_over_is_cut() -> None:
    """TLS may begin after the clock has run out, on a socket that was not there to be cut then; time-outs are for single pieces."""
    mine, theirs = socket.socketpair()
    mine.settimeout(20)

    class Stream:
        def get_extra_info(self, name: str) -> socket.socket | None:
            return mine if name == "socket" else None

    class Slow(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            time.sleep(0.5)
            request.extensions["trace"]("connection.start_tls.complete", {"return_value": Stream()})
            if mine.recv(1) == b"":  # it would drip for ever
                raise httpx.ReadError("cut")
            raise AssertionError

    with mine, theirs, RelayClient("http://127.0.0.1", "t", transport=Slow()) as client, pytest.raises(RelayUnreachable):
        client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=0.1)


def test_a_connection_that_is_used_again_is_cut_too_if_another_one_was_opened_since() -> None:
    """A relay with two addresses answers 503 from each; the answer that never ends then comes over the older connection."""
    pairs = [socket.socketpair(), socket.socketpair()]
    unused = [mine for mine, _ in pairs]

    class TwoAddresses(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if unused:
                opened = unused.pop(0)
                stream = type("Stream", (), {"get_extra_info": staticmethod(lambda name: opened)})
                request.extensions["trace"]("connection.connect_tcp.complete", {"return_value": stream})
                return httpx.Response(503)
            pairs[0][0].settimeout(30)
            if pairs[0][0].recv(1) == b"":
                raise httpx.ReadError("cut")
            raise AssertionError

    began, patience = time.monotonic(), Patience(first_s=0.01, longest_s=0.01)
    with (
        RelayClient("http://127.0.0.1", "t", transport=TwoAddresses(), patience=patience) as client,
        pytest.raises(RelayUnreachable),
    ):
        client.upload(RUN, 1, upload_id("alice"), bytes(100), within_s=1.0)
    assert time.monotonic() - began < 20
    for both in pairs:
        for end in both:
            end.close()


def test_a_long_page_about_a_relay_that_is_away_costs_no_upload(world: World) -> None:
    answers = [httpx.Response(502, content=b"<html>" * 100_000)]
    with world.aggregator() as server, world.client() as alice:
        server.open_round(RUN, 1, terms())
        world.transport.fault = lambda request: answers.pop() if answers else None
        alice.upload(RUN, 1, upload_id("alice"), blob("alice"), within_s=60.0)
        assert server.round_status(RUN, 1).uploads == 1


def test_of_a_relay_s_addresses_one_that_is_silent_does_not_use_up_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, the first of which takes no connection: half of the time goes there, then the other one answers."""
    files, serving, calling = certificate(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    serving.load_cert_chain(files.certificate, files.key)
    calling.check_hostname, calling.verify_mode = False, ssl.CERT_NONE
    with socket.create_server(("127.0.0.1", 0)) as answering, silent(answering.getsockname()[1]) as (dead, port):

        def answer() -> None:
            with suppress(OSError), serving.wrap_socket(answering.accept()[0], server_side=True) as connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        thread = threading.Thread(target=answer)
        thread.start()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in (dead, "127.0.0.1")]
        looked_up = socket.getaddrinfo

        def look_up(host: str, *rest: Any, **more: Any) -> Any:
            return found if host == "relay.example" else looked_up(host, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        began = time.monotonic()
        with (
            RelayClient(
                f"https://relay.example:{port}", "token", verify=calling, patience=Patience(tries=1, timeout_s=2.0, total_s=2.0)
            ) as client,
            pytest.raises(ProtocolError, match="cannot be read"),  # what it answers is no status
        ):
            client.round_status(RUN, 1)
        assert time.monotonic() - began > 0.9
        thread.join()


@contextmanager
def silent(port: int) -> Iterator[tuple[str, int]]:
    """Yield an address whose queue of connections is full, so that another one is not even refused."""
    with socket.create_server(("127.0.1.77", port), backlog=0) as full, ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(full.getsockname())
        yield full.getsockname()


def test_a_token_is_checked_without_sending_anything_else(world: World) -> None:
    with world.client() as alice:
        assert alice.signer() is None
    for name, status in (("server", 403), ("x" * 43, 401)):
        with world.client(name) as other, pytest.raises(RelayRefused) as refused:
            other.signer()
        assert refused.value.status == status
    assert {(request.method, request.url.path) for request in world.transport.seen} == {("GET", "/v1/token")}
    assert all(request.read() == b"" for request in world.transport.seen)


def test_what_is_no_relay_knows_no_token() -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>welcome</html>"))
    with (
        RelayClient("http://127.0.0.1", "token", transport=page) as client,
        pytest.raises(ProtocolError, match="about a token cannot be read"),
    ):
        client.signer()
