"""Sum rounds over HTTP and through their callers: hostile bodies, bounds on what is under way, breaks, and relays that lie."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal
from relay_support import (
    RUN,
    Changes,
    Clock,
    InProcess,
    blob,
    members,
    pull,
    share_for,
    share_id,
    signing_key,
    sum_of,
    sum_terms,
    terms,
    tokens_for,
    upload_id,
)
from starlette.types import Message, Scope

from ldpfl import ProtocolError
from ldpfl.relay import Patience, RelayAggregator, RelayClient, RelayRefused, RelayRoundOver, RelayUnreachable, SumTerms
from ldpfl.relay.app import create_app
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.relay.usage_limits import Limits
from ldpfl.transport.sums import ENVELOPE_BYTES, signer_of

pytest_plugins = ["relay_fixtures"]

FAST = Limits(requests_per_s=1e6, burst=1e6, block_s=0.3)
SIZE = sum_terms()
SHARES = {name: share_for(name) for name in ("alice", "bob", "carol")}


class Site:
    """A relay in this process and its callers; sleeping turns the relay's clock."""

    def __init__(self, store: Store, clock: Clock, portal: BlockingPortal, limits: Limits = FAST) -> None:
        self.tokens = tokens_for(store.engine, SHARES)
        self.store, self.clock, self.portal = store, clock, portal
        self.app = create_app(store, limits)
        self.transport = InProcess(self.app, portal)
        self.server = self.caller(RelayAggregator, "server")
        self.reading: list[str] = []

    def caller(self, kind: Callable[..., Any], name: str) -> Any:
        patience = Patience(tries=3)
        return kind("http://127.0.0.1", self.tokens[name], transport=self.transport, patience=patience, sleep=self.sleep, clock=self.clock)

    def sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def upload(self, name: str, share: bytes | None = None) -> None:
        with self.caller(RelayClient, name) as client:
            client.upload_share(RUN, 1, share or SHARES[name], within_s=50.0)

    def put(self, share: bytes, name: str = "alice", upload: str | None = None, headers: dict[str, str] | None = None) -> httpx.Response:
        request = httpx.Request(
            "PUT",
            f"http://relay/v1/rounds/{RUN}/1/shares/{upload or share_id(share)}",
            headers={"Authorization": f"Bearer {self.tokens[name]}", **(headers or {})},
            content=share,
        )
        return self.transport.handle_request(request)

    def send(self, messages: list[Message | float], length: int, name: str = "alice", hold: threading.Event | None = None) -> int:
        """Send a body message by message, with pauses; return the answer's status."""

        async def talk() -> int:
            answers: list[Message] = []

            async def receive() -> Message:
                while messages and isinstance(messages[0], float):
                    await asyncio.sleep(messages.pop(0))  # type: ignore[arg-type]
                self.reading.append(name)
                while hold is not None and not hold.is_set():
                    await asyncio.sleep(0.005)
                return messages.pop(0) if messages else {"type": "http.disconnect"}  # type: ignore[return-value]

            async def collect(message: Message) -> None:
                answers.append(message)

            await self.app(self.scope(name, length), receive, collect)
            return int(answers[0]["status"])

        return self.portal.call(talk)

    def scope(self, name: str, length: int) -> Scope:
        path = f"/v1/rounds/{RUN}/1/shares/{share_id(SHARES[name])}"
        headers = [(b"authorization", f"Bearer {self.tokens[name]}".encode()), (b"content-length", str(length).encode())]
        about = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        return {"type": "http", "method": "PUT", **about}


@pytest.fixture
def site(sqlite_store: Store, clock: Clock, portal: BlockingPortal) -> Iterator[Site]:
    made = Site(sqlite_store, clock, portal)
    made.server.open_round(RUN, 1, SIZE)
    yield made
    made.server.close()


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def inside(site: Site) -> set[str]:
    site.clock.now += 100
    return members(pull(site.store, owner="server"), SHARES, SIZE)


@pytest.mark.thorough_except("32")
@pytest.mark.parametrize("bits", [32, 64])
def test_a_whole_round(site: Site, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.protocol.SUM_PART_BYTES", 1600)
    monkeypatch.setattr("ldpfl.relay.sum_store._IN_MEMORY_BYTES", 1000)
    size = sum_terms(dimension=1000, bits=bits)
    shares = {name: share_for(name, size, 2) for name in SHARES}
    assert site.server.open_round(RUN, 2, size).terms == size
    assert site.server.open_round(RUN, 2, size).state == "open"
    for name in ("alice", "bob", "alice"):
        with site.caller(RelayClient, name) as client:
            assert client.round_status(RUN, 2).terms == size
            client.upload_share(RUN, 2, shares[name], within_s=50.0)
    with pytest.raises(RelayRefused, match="425"):
        site.server.pull_sum(RUN, 2, size)
    assert site.server.wait(RUN, 2, 200).uploads == 2
    total, envelopes = site.server.pull_sum(RUN, 2, size)
    assert total.dtype == np.dtype(f"<u{bits // 8}")
    assert (total == sum_of((shares["alice"], shares["bob"]), size)).all()
    assert sorted(envelopes) == sorted(shares[name][-ENVELOPE_BYTES:] for name in ("alice", "bob"))
    again, same = site.server.pull_sum(RUN, 2, size)
    assert (again == total).all()
    assert same == envelopes
    with pytest.raises(ProtocolError, match="pull_sum"):
        list(site.server.pull(RUN, 2))
    site.server.acknowledge(RUN, 2)
    with pytest.raises(RelayRoundOver):
        site.server.pull_sum(RUN, 2, size)
    with site.caller(RelayClient, "carol") as client, pytest.raises(RelayRoundOver):
        client.upload_share(RUN, 2, shares["carol"], within_s=50.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"dimension": 0},
        {"dimension": 2**26 + 1},
        {"dimension": 2**25 + 1, "bits": 64},
        {"bits": 16},
        {"bits": 32.5},
        {"bits": True},
        {"record_bytes": 16},
        {"max_uploads": 1},
        {"max_uploads": 1_000_001},
        {"agreement": "x"},
        {"closes_in_s": -1},
    ],
)
def test_terms_that_no_round_can_have_are_refused(site: Site, changes: dict[str, Any]) -> None:
    request = httpx.Request(
        "PUT",
        f"http://relay/v1/rounds/{RUN}/2",
        headers={"Authorization": f"Bearer {site.tokens['server']}"},
        json=SIZE.model_dump() | changes,
    )
    answer = site.transport.handle_request(request)
    assert answer.status_code == 400
    assert not answer.json()["error"].startswith("the round's terms are not valid: sum")


def test_what_a_round_may_be_at_most() -> None:
    assert SumTerms(**sum_terms(dimension=2**26, max_uploads=1_000_000).model_dump()).upload_bytes == 2**28 + ENVELOPE_BYTES


def test_requests_that_are_wrong_get_a_clear_answer_and_change_nothing(site: Site) -> None:
    changes = Changes(site.store.engine.url.database)
    site.tokens["dora"] = Tokens(site.store.engine).add("dora", Role.CLIENT)
    share, before = SHARES["alice"], changes.count()
    wrong = {
        "no client": (site.put(share, "server"), 403),
        "longer": (site.put(b"x" + share), 400),
        "shorter": (site.put(share[1:]), 400),
        "nothing": (site.put(b"", upload="0" * 64), 400),
        "another id": (site.put(share, upload=share_id(SHARES["bob"])), 400),
        "no hash": (site.put(share, upload="x" * 64), 404),
        "capitals": (site.put(share, upload=share_id(share).upper()), 404),
        "huge": (site.put(share, headers={"Content-Length": "9" * 18}), 400),
        "no number": (site.put(share, headers={"Content-Length": "-1"}), 400),
        "another one's envelope": (site.put(SHARES["bob"]), 403),
        "no signature": (site.put(share[:-100] + bytes(100)), 403),
        "no signing key": (site.put(share_for("dora"), "dora"), 403),
    }
    assert {case: answer.status_code for case, (answer, _) in wrong.items()} == {case: status for case, (_, status) in wrong.items()}
    assert all(0 < len(answer.json()["error"]) < 200 for answer, _ in wrong.values())
    assert changes.count() == before
    changes.close()
    assert site.put(share).status_code == 204


def test_a_body_without_a_stated_length_is_refused(site: Site) -> None:
    request = httpx.Request(
        "PUT",
        f"http://relay/v1/rounds/{RUN}/1/shares/{share_id(SHARES['alice'])}",
        headers={"Authorization": f"Bearer {site.tokens['alice']}"},
        stream=httpx.ByteStream(SHARES["alice"]),
    )
    assert "Content-Length" not in request.headers
    assert site.transport.handle_request(request).status_code == 411


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([body(SHARES["alice"][:100])], 400),
        ([body(SHARES["alice"] + b"x")], 413),
        ([body(SHARES["alice"][:100], more=True)], 400),  # and then the caller leaves
        ([body(SHARES["alice"][:100], more=True), 5.0, body(SHARES["alice"][100:])], 408),
        ([body(SHARES["alice"][:100], more=True), 0.05, body(SHARES["alice"][100:])], 204),
    ],
)
def test_bodies_that_lie_stall_or_break_off_leave_nothing(site: Site, messages: list[Message | float], status: int) -> None:
    changes = Changes(site.store.engine.url.database)
    before = changes.count()
    assert site.send(list(messages), len(SHARES["alice"])) == status
    assert (changes.count() != before) == (status == 204)
    changes.close()
    site.upload("alice")  # its place is free again
    site.upload("bob")
    assert inside(site) == {"alice", "bob"}


def test_one_upload_at_a_time_of_a_token_and_so_many_bytes_of_all(sqlite_store: Store, clock: Clock, portal: BlockingPortal) -> None:
    length = SIZE.upload_bytes
    site = Site(sqlite_store, clock, portal, Limits(block_s=10.0, sum_bytes=2 * length + 100))
    site.server.open_round(RUN, 1, SIZE)
    held = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(site.send, [body(SHARES[name])], length, name, held) for name in ("alice", "bob")]
        deadline = time.monotonic() + 30
        while len(site.reading) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        full = site.put(SHARES["carol"], "carol")
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        twice = site.put(SHARES["alice"])
        assert (twice.status_code, twice.headers["Retry-After"]) == (429, "1")
        held.set()
        assert [each.result(30) for each in slow] == [204, 204]
    site.upload("carol")
    assert inside(site) == {"alice", "bob", "carol"}


def test_who_leaves_while_it_is_added_up_is_in_the_sum(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free, fold = threading.Event(), threading.Event(), site.store.sums._add_shares

    def held_up(*arguments: Any) -> Any:
        begun.set()
        free.wait(30)
        return fold(*arguments)

    monkeypatch.setattr(site.store.sums, "_add_shares", held_up)

    async def ask_and_leave() -> None:
        async def receive() -> Message:
            return body(SHARES["alice"])

        async def collect(message: Message) -> None:
            pass

        asking = asyncio.ensure_future(site.app(site.scope("alice", SIZE.upload_bytes), receive, collect))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    site.portal.call(ask_and_leave)
    assert site.put(SHARES["alice"]).status_code == 429  # it is under way, though nobody waits for it
    free.set()
    site.upload("alice")
    site.upload("bob")
    assert inside(site) == {"alice", "bob"}


def test_a_disk_that_is_full_below_a_body_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(BytesIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr("ldpfl.relay.app.empty_body", lambda length: Full())
        assert site.put(SHARES["alice"]).status_code == 507
    assert site.put(SHARES["alice"]).status_code == 204


class Flaky:
    """Breaks requests as often as is said, before or after the relay has answered them."""

    def __init__(self, inner: InProcess, before: int, after: int) -> None:
        self.inner, self.before, self.after = inner, before, after

    def __call__(self, request: httpx.Request) -> httpx.Response | None:
        if request.method != "PUT" or "shares" not in request.url.path:
            return None
        if self.before:
            self.before -= 1
            raise httpx.ConnectError("away")
        if self.after:
            self.after -= 1
            self.inner.portal.call(self.inner._send, request)
            raise httpx.ReadError("broken off behind the last byte")
        return None


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 1), (4, 3)])
def test_after_breaks_an_upload_is_sent_again_and_counts_once(site: Site, before: int, after: int) -> None:
    site.transport.fault = Flaky(site.transport, before, after)
    site.upload("alice")
    site.upload("bob")
    site.transport.fault = lambda request: None
    assert inside(site) == {"alice", "bob"}


def test_an_upload_ends_with_its_time(site: Site) -> None:
    site.transport.fault = lambda request: httpx.Response(503, json={"error": "busy"})
    began = site.clock.now
    with pytest.raises(RelayUnreachable, match="50 seconds"):
        site.upload("alice")
    assert site.clock.now - began == pytest.approx(50.0)


def test_what_the_relay_refuses_is_said_at_once(site: Site) -> None:
    site.upload("alice")
    for share in (share_for("another", by="alice"), share_for("another", sum_terms(dimension=11), by="alice")):
        with pytest.raises(RelayRefused):
            site.upload("alice", share)
    with pytest.raises(RelayRefused, match="shares of a sum"), site.caller(RelayClient, "bob") as bob:
        bob.upload(RUN, 1, upload_id("bob"), blob("bob"), within_s=5.0)


def test_a_client_learns_by_which_key_it_has_to_sign(site: Site) -> None:
    """Before it computes, and before it charges its budget."""
    known = Tokens(site.store.engine)
    site.tokens["dora"] = known.add("dora", Role.CLIENT)
    site.tokens["new alice"] = known.renew("alice", signing_key("new alice").public_key())
    names = {"alice": "alice", "new alice": "new alice", "dora": None}
    for token, key in names.items():
        with site.caller(RelayClient, token) as client:
            assert client.signer() == (None if key is None else signer_of(signing_key(key).public_key()).hex())
    with pytest.raises(RelayRefused, match="403"), site.caller(RelayClient, "server") as server:
        server.signer()
    with pytest.raises(RelayRefused, match=r"\(403\): this token has no signing key"):
        site.upload("dora", share_for("dora"))
    site.upload("new alice", share_for("alice", by="new alice"))
    with pytest.raises(RelayRefused, match="one in each round"):  # both tokens are one client
        site.upload("alice")


def test_a_round_of_records_takes_no_share(site: Site) -> None:
    site.server.open_round(RUN, 2, terms())
    with pytest.raises(RelayRefused, match="sealed records"), site.caller(RelayClient, "bob") as bob:
        bob.upload_share(RUN, 2, SHARES["bob"], within_s=5.0)
    with pytest.raises(ProtocolError, match="other terms"):
        _lying(site, lambda path, answer: {**answer, "terms": terms().model_dump()}).open_round(RUN, 1, SIZE)


def _lying(site: Site, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Any:
    """Return an aggregator whose relay changes what it says of rounds."""

    def fault(request: httpx.Request) -> httpx.Response | None:
        answer = site.portal.call(site.transport._send, request)
        if request.url.path.endswith("/records"):
            return None
        return httpx.Response(answer.status_code, json=change(request.url.path, answer.json()))

    site.transport.fault = fault
    return site.server


Part = Callable[[int, bytes], tuple[bytes, str]]


@pytest.mark.thorough_except("<lambda>0", "<lambda>7", "<lambda>6", "<lambda>9")
@pytest.mark.parametrize(
    "part",
    [
        lambda index, data: (data + b"x", "2"),
        lambda index, data: (data[1:], "2"),
        lambda index, data: (data + data, "2"),
        lambda index, data: (b"", "2"),
        lambda index, data: (data, "1"),
        lambda index, data: (data, "0"),
        lambda index, data: (data, "3"),
        lambda index, data: (data, "999999999"),
        lambda index, data: (data, ""),
        lambda index, data: (bytes(2**20), "2"),
        lambda index, data: (data if index == 0 else data[:ENVELOPE_BYTES], "2"),
        lambda index, data: (data if index == 0 else data[:ENVELOPE_BYTES] * 9, "2"),
        lambda index, data: (data if index == 0 else data[:ENVELOPE_BYTES] * 3, "2"),
    ],
)
def test_a_relay_that_hands_out_something_else_is_noticed(site: Site, part: Part) -> None:
    site.upload("alice")
    site.upload("bob")
    site.clock.now += 100
    released = {index: site.store.part("server", RUN, 1, index).data for index in (0, 1)}

    def fault(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/records"):
            return None
        index = int(request.url.params["part"])
        data, count = part(index, released.get(index, b""))
        return httpx.Response(200, content=data, headers={"Relay-Parts": count})

    site.transport.fault = fault
    with pytest.raises(ProtocolError):
        site.server.pull_sum(RUN, 1, SIZE)


@pytest.mark.parametrize("uploads", [0, 1, 3, None])
def test_a_relay_that_states_another_number_of_uploads_is_noticed(site: Site, uploads: int | None) -> None:
    site.upload("alice")
    site.upload("bob")
    site.clock.now += 100
    with pytest.raises(ProtocolError):
        _lying(site, lambda path, answer: {**answer, "uploads": uploads}).pull_sum(RUN, 1, SIZE)
