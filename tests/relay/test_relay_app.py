"""The relay's HTTP interface: who may do what, what intruders are told, and that bodies stay within their limits."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from relay_support import RUN, Changes, Clock, InProcess, blob, records, terms, upload_id
from sqlalchemy import event
from starlette.types import ASGIApp, Message, Scope

from ldpfl.relay.app import create_app
from ldpfl.relay.protocol import BLOCK_BYTES
from ldpfl.relay.schema import blocks, parts, rounds, uploads
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.relay.usage_limits import Limits, RateLimit

pytest_plugins = ["relay_fixtures"]

ROUND = f"/v1/rounds/{RUN}/1"
FAST = Limits(requests_per_s=1e6, burst=1e6)


@dataclass
class Site:
    """A relay in this process, with a token for each of its callers."""

    store: Store
    clock: Clock
    app: ASGIApp
    http: httpx.Client
    tokens: dict[str, str]
    changes: Changes

    def __call__(
        self, method: str, path: str, who: str | None = "alice", headers: dict[str, str] | None = None, **parts: Any
    ) -> httpx.Response:
        authorization = {"Authorization": f"Bearer {self.tokens.get(who, who)}"} if who else {}
        return self.http.request(method, path, headers={**authorization, **(headers or {})}, **parts)

    def open(self, number: int = 1, **changes: Any) -> httpx.Response:
        return self("PUT", f"/v1/rounds/{RUN}/{number}", "server", json=terms(**changes).model_dump())

    def begin(self, who: str = "alice", length: int = 640, number: int = 1, upload: str | None = None) -> httpx.Response:
        return self("POST", path_of(upload or upload_id(who), number), who, {"Upload-Length": str(length)})

    def send(self, who: str, offset: int, data: bytes, number: int = 1) -> httpx.Response:
        return self("PATCH", path_of(upload_id(who), number), who, {"Upload-Offset": str(offset)}, content=data)

    def put(self, who: str) -> None:
        assert self.begin(who).status_code == 204
        assert self.send(who, 0, blob(who)).headers["Upload-Complete"] == "?1"


def path_of(upload: str, number: int = 1) -> str:
    return f"/v1/rounds/{RUN}/{number}/uploads/{upload}"


@pytest.fixture
def make_site(sqlite_store: Store, clock: Clock, portal: BlockingPortal) -> Iterator[Callable[[Limits], Site]]:
    known = Tokens(sqlite_store.engine)
    tokens = {name: known.add(name, Role.CLIENT) for name in ("alice", "bob", "carol")}
    tokens |= {name: known.add(name, Role.AGGREGATOR) for name in ("server", "rival")}
    clients = []
    changes = Changes(sqlite_store.engine.url.database)

    def make(limits: Limits) -> Site:
        app = create_app(sqlite_store, limits)
        clients.append(httpx.Client(transport=InProcess(app, portal), base_url="http://relay"))
        return Site(sqlite_store, clock, app, clients[-1], tokens, changes)

    yield make
    for client in clients:
        client.close()
    changes.close()


@pytest.fixture
def site(make_site: Callable[[Limits], Site]) -> Site:
    return make_site(FAST)


def told(response: httpx.Response) -> str:
    """Return the one line that an error consists of."""
    body = response.json()
    assert list(body) == ["error"]
    assert "\n" not in body["error"]
    return str(body["error"])


def test_a_round_from_its_opening_to_its_end(site: Site) -> None:
    assert site.open().json() == {
        "run": RUN,
        "round": 1,
        "state": "open",
        "seconds_left": 100.0,
        "terms": terms().model_dump(),
        "uploads": 0,
    }
    site.put("alice")
    assert site.begin("bob").headers["Upload-Offset"] == "0"
    assert site.send("bob", 0, blob("bob")[:100]).headers["Upload-Offset"] == "100"
    head = site("HEAD", path_of(upload_id("bob")), "bob")
    assert (head.headers["Upload-Offset"], head.headers["Upload-Complete"]) == ("100", "?0")
    assert site.send("bob", 100, blob("bob")[100:]).headers["Upload-Complete"] == "?1"
    assert site("GET", ROUND, "bob").json()["state"] == "open"
    assert "uploads" not in site("GET", ROUND, "bob").json()
    early = site("GET", f"{ROUND}/records?part=0", "server")
    assert (early.status_code, early.headers["Retry-After"]) == (425, "100")
    site.clock.now += 100
    part = site("GET", f"{ROUND}/records?part=0", "server")
    assert part.headers["Content-Type"] == "application/octet-stream"
    assert part.headers["Relay-Parts"] == "1"
    assert records(part.content) == records(blob("alice") + blob("bob"))
    assert site("GET", ROUND, "server").json()["uploads"] == 2
    assert site("DELETE", f"{ROUND}/records", "server").status_code == 204
    assert site("GET", ROUND, "alice").json()["state"] == "gone"
    assert site("GET", f"{ROUND}/records?part=0", "server").status_code == 410


@pytest.mark.thorough_for("GET-/v1/rounds/run-1/1", "DELETE-/v1/rounds/run-1/1", "PUT-/v1/rounds/run-1/1")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", ROUND),
        ("GET", ROUND),
        ("DELETE", ROUND),
        ("POST", path_of(upload_id("alice"))),
        ("PATCH", path_of(upload_id("alice"))),
        ("HEAD", path_of(upload_id("alice"))),
        ("GET", f"{ROUND}/records?part=0"),
        ("DELETE", f"{ROUND}/records"),
    ],
)
def test_without_a_known_token_nothing_is_told_or_done(site: Site, method: str, path: str) -> None:
    site.open()
    site.put("alice")
    before = site.changes.count()
    headers = {"Upload-Offset": "0", "Upload-Length": "640"}
    for who in (None, "x" * 43, "", "not even a token", site.tokens["alice"] + "x"):
        response = site(method, path, who, headers, content=b"x")
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    for authorization in ("Basic YWxpY2U6", site.tokens["alice"], f"Bearer  {site.tokens['alice']}", "Bearer " + "\xff" * 43):
        response = site.http.request(method, path, headers=[(b"Authorization", authorization.encode("latin-1"))])
        assert response.status_code == 401
    assert site.changes.count() == before
    Tokens(site.store.engine).revoke("alice")
    assert site.changes.count() != before  # so a change would have been seen
    assert site(method, path, "alice", headers).status_code == 401


def test_each_role_keeps_to_its_own(site: Site) -> None:
    site.open()
    site.put("alice")
    before = site.changes.count()
    assert site("PUT", ROUND, "alice", json=terms().model_dump()).status_code == 403
    assert site("DELETE", ROUND, "alice").status_code == 403
    assert site("GET", f"{ROUND}/records?part=0", "alice").status_code == 403
    assert site("DELETE", f"{ROUND}/records", "alice").status_code == 403
    assert site.begin("server").status_code == 403
    assert site.send("server", 0, b"x").status_code == 403
    assert site("HEAD", path_of(upload_id("alice")), "server").status_code == 403
    for method, path in (("GET", f"{ROUND}/records?part=0"), ("DELETE", f"{ROUND}/records"), ("DELETE", ROUND)):
        assert site(method, path, "rival").status_code == 403
    assert site("PUT", ROUND, "rival", json=terms().model_dump()).status_code == 403
    assert site.changes.count() == before


def test_intruders_and_mistakes_change_nothing(site: Site) -> None:
    site.open()
    site.open(2)
    site.put("alice")
    assert site.begin("bob").status_code == 204
    before = site.changes.count()
    cases = [
        (site.begin("carol", upload=upload_id("alice")), 409, "taken"),
        (site.begin("alice", upload="x" * 16), 409, "one in each round"),
        (site.begin("carol", 639), 400, "exactly 640"),
        (site.begin("carol", number=3), 404, "no round 3"),
        (site("POST", path_of("short"), "carol", {"Upload-Length": "640"}), 404, "no such upload"),
        (site("POST", path_of(upload_id("carol")), "carol"), 400, "Upload-Length"),
        (site("POST", path_of(upload_id("carol")), "carol", {"Upload-Length": "-1"}), 400, "Upload-Length"),
        (site("POST", path_of(upload_id("carol")), "carol", {"Upload-Length": "9" * 5000}), 400, "Upload-Length"),
        (site.send("alice", 0, blob("alice")), 409, "number 640"),
        (site.send("alice", 640, b"x"), 413, "exactly 640"),
        (site.send("bob", 0, blob("bob") + b"x"), 413, "exactly 640"),
        (site.send("bob", 1, b"x"), 409, "number 0"),
        (site.send("bob", 0, b"x", number=2), 404, "begin the upload first"),
        (site("PATCH", path_of(upload_id("alice")), "bob", {"Upload-Offset": "640"}, content=b"x"), 404, "begin the upload first"),
        (site("PATCH", path_of(upload_id("bob")), "bob", content=b"x"), 400, "Upload-Offset"),
        (site("PATCH", path_of(upload_id("bob")), "bob", {"Upload-Offset": "0"}, content=iter([b"x"])), 411, "Content-Length"),
        (site("GET", f"{ROUND}/records", "server"), 404, "part=0"),
        (site("GET", f"{ROUND}/records?part=-1", "server"), 404, "part=0"),
        (site("DELETE", f"{ROUND}/records", "server"), 409, "nothing to acknowledge"),
        (site("GET", "/v1/rounds/a%2Fb/1"), 404, "Not Found"),
        (site("GET", "/v1/rounds/run-1/one"), 404, "no such round"),
        (site("GET", "/v1/rounds/..%00/1"), 404, "percent sign"),
        (site("GET", "/v1/rounds/run-1/%31"), 404, "percent sign"),
        (site("GET", "/v1/rounds/run-1/01"), 404, "no such round"),
        (site("GET", "/v1/rounds/run-1/0"), 404, "no such round"),
        (site("GET", "/v1/rounds/run-1/1/"), 404, "Not Found"),
        (site("GET", "/"), 404, "Not Found"),
        (site("POST", ROUND), 405, "Not Allowed"),
        (site("BREW", ROUND), 405, "Not Allowed"),
    ]
    for response, status, words in cases:
        assert (response.status_code, words in told(response)) == (status, True), (status, words, response.text)
    assert cases[8][0].headers["Upload-Offset"] == "640"
    assert site.changes.count() == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        json.dumps({**terms().model_dump(), "more": 1}).encode(),
        json.dumps({**terms().model_dump(), "min_clients": "2"}).encode(),
        json.dumps({**terms().model_dump(), "min_clients": True}).encode(),
        json.dumps({**terms().model_dump(), "closes_in_s": 1e400}).encode(),
        json.dumps({**terms().model_dump(), "record_bytes": 10**40}).encode(),
        json.dumps({**terms().model_dump(), "max_uploads": 1}).encode(),
    ],
)
def test_terms_that_cannot_be_read_are_refused(site: Site, body: bytes) -> None:
    before = site.changes.count()
    response = site("PUT", ROUND, "server", content=body)
    assert response.status_code == 400
    assert told(response).startswith("the round's terms are not valid")
    assert site.changes.count() == before


def test_long_terms_are_not_read_to_their_end(site: Site) -> None:
    response = site("PUT", ROUND, "server", content=b" " * 5000)
    assert (response.status_code, "4096" in told(response)) == (413, True)


def test_a_late_upload_is_told_that_the_round_is_over(site: Site) -> None:
    site.open(min_clients=1)
    site.put("alice")
    site.begin("bob")
    site.clock.now += 100
    before = site.changes.count()
    for response in (site.begin("carol"), site.send("bob", 0, b"x"), site.begin("bob")):
        assert (response.status_code, "takes no uploads any more" in told(response)) == (410, True)
    assert site("HEAD", path_of(upload_id("bob")), "bob").status_code == 410
    assert site.begin("alice").headers["Upload-Complete"] == "?1"  # a repetition, not an upload
    assert site.changes.count() == before


def test_no_client_clock_is_ever_used(site: Site) -> None:
    site.open()
    skewed = {"Date": "Mon, 01 Jan 2001 00:00:00 GMT", "Upload-Length": "640"}
    assert site("POST", path_of(upload_id("alice")), "alice", skewed).status_code == 204


def test_too_many_requests_with_one_token_are_told_to_wait(make_site: Callable[[Limits], Site]) -> None:
    site = make_site(Limits(requests_per_s=0.001, burst=3))
    answers = [site("GET", ROUND, "alice") for _ in range(5)]
    assert [response.status_code for response in answers] == [404, 404, 404, 429, 429]
    assert int(answers[-1].headers["Retry-After"]) > 1
    assert site("GET", ROUND, "bob").status_code == 404


def test_so_many_parts_are_in_memory_for_one_aggregator(make_site: Callable[[Limits], Site]) -> None:
    site = make_site(Limits(parts_at_once=2))
    site.open(min_clients=1)
    site.put("alice")
    site.clock.now += 100
    scope = scope_of("GET", f"{ROUND}/records", {"Authorization": f"Bearer {site.tokens['server']}"}, b"part=0")

    async def ask(read: asyncio.Event, sent: list[Message]) -> None:
        async def send(message: Message) -> None:
            sent.append(message)
            await read.wait()

        await site.app(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]

    async def crowd() -> list[int]:
        read, sent = asyncio.Event(), [list[Message]() for _ in range(4)]
        tasks = [asyncio.create_task(ask(read, each)) for each in sent[:3]]
        while not all(sent[:3]):
            await asyncio.sleep(0.01)
        read.set()
        await asyncio.gather(*tasks)
        await ask(read, sent[3])
        assert records(b"".join(message.get("body", b"") for message in sent[3])) == records(blob("alice"))
        return [each[0]["status"] for each in sent]

    answers = asyncio.run(crowd())
    assert (sorted(answers[:3]), answers[3]) == ([200, 200, 429], 200)


def test_a_rate_limit_fills_up_again() -> None:
    clock = Clock()
    limit = RateLimit(Limits(requests_per_s=2, burst=3), clock)

    def allowed() -> int:
        for count in range(100):
            try:
                limit.count_request("alice")
            except Exception:
                return count
        return 100

    assert allowed() == 3
    clock.now += 0.4
    assert allowed() == 0
    clock.now += 0.6
    assert allowed() == 2
    clock.now += 1000
    assert allowed() == 3


def scope_of(method: str, path: str, headers: dict[str, str], query: bytes = b"") -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("relay", 80),
        "client": ("127.0.0.1", 1),
    }


def raw(app: ASGIApp, method: str, path: str, headers: dict[str, str], messages: list[Message]) -> tuple[int, bytes]:
    """Send a request message by message; after the last one nothing comes any more."""

    async def call() -> tuple[int, bytes]:
        sent: list[Message] = []
        waiting = iter(messages)

        async def receive() -> Message:
            message = next(waiting, None)
            if message is None:
                await asyncio.sleep(1000)
            return message or {}

        async def send(message: Message) -> None:
            sent.append(message)

        await app(scope_of(method, path, headers), receive, send)
        status = sent[0]["status"] if sent else 0
        return status, b"".join(message.get("body", b"") for message in sent)

    return asyncio.run(call())


def patch_headers(site: Site, length: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {site.tokens['alice']}", "Upload-Offset": "0", "Content-Length": str(length)}


def test_a_body_that_stalls_or_lies_about_its_length_is_cut_off(make_site: Callable[[Limits], Site]) -> None:
    site = make_site(Limits(requests_per_s=1e6, burst=1e6, block_s=0.05))
    size = terms(record_bytes=64, records_per_upload=3 * BLOCK_BYTES // 64)
    site.store.open_round("server", RUN, 1, size)
    site.begin("alice", size.upload_bytes)
    before = site.changes.count()
    path = path_of(upload_id("alice"))
    first: Message = {"type": "http.request", "body": b"x" * 10, "more_body": True}
    status, body = raw(site.app, "PATCH", path, patch_headers(site, 20), [first])
    assert (status, b"seconds" in body) == (408, True)
    status, body = raw(site.app, "PATCH", path, patch_headers(site, 5), [first])
    assert (status, b"more than 5 bytes" in body) == (413, True)
    assert site.changes.count() == before
    assert raw(site.app, "PATCH", path, patch_headers(site, 20), [first, {"type": "http.disconnect"}])[0] == 400
    assert site.changes.count() == before


def test_of_a_broken_upload_the_whole_blocks_are_kept(site: Site) -> None:
    size = terms(record_bytes=64, records_per_upload=3 * BLOCK_BYTES // 64)
    site.store.open_round("server", RUN, 1, size)
    site.begin("alice", size.upload_bytes)
    pieces: list[Message] = [{"type": "http.request", "body": bytes(BLOCK_BYTES // 4), "more_body": True} for _ in range(7)]
    raw(site.app, "PATCH", path_of(upload_id("alice")), patch_headers(site, size.upload_bytes), [*pieces, {"type": "http.disconnect"}])
    head = site("HEAD", path_of(upload_id("alice")))
    assert head.headers["Upload-Offset"] == str(BLOCK_BYTES)


def test_a_full_disk_is_told_as_such(site: Site) -> None:
    size = terms(records_per_upload=40_000)
    site.store.open_round("server", RUN, 1, size)
    site.begin("alice", size.upload_bytes)
    event.listen(site.store.engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 20"))
    site.store.engine.dispose()
    response = site.send("alice", 0, blob("alice", size))
    assert (response.status_code, told(response)) == (507, "the relay's disk is full; nothing was stored")
    assert site("HEAD", path_of(upload_id("alice"))).headers["Upload-Offset"] == "0"


def test_health_and_metrics(site: Site) -> None:
    site.open()
    site.put("alice")
    assert site("GET", "/health", None).json() == {"status": "ok"}
    metrics = site("GET", "/metrics", None)
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = metrics.text.splitlines()
    assert 'ldpfl_relay_requests_total{method="PATCH",status="204"} 1' in lines
    assert "ldpfl_relay_received_bytes_total 640" in lines
    assert not any(secret in metrics.text for secret in ("alice", RUN, upload_id("alice"), *site.tokens.values()))
    with site.store.engine.begin() as connection:
        for table in (parts, blocks, uploads, rounds):
            table.drop(connection)
    sick = site("GET", "/health", None)
    assert (sick.status_code, sick.headers["Retry-After"], "relay_rounds" in sick.text) == (503, "1", False)


def test_the_log_says_what_happens_to_rounds_and_nothing_of_who(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        site.open()
        site.open()
        site.put("alice")
        site.put("bob")
        site.begin("carol")
        site("GET", ROUND, "x" * 43)
        site.clock.now += 100
        site("GET", f"{ROUND}/records?part=0", "server")
        site("DELETE", f"{ROUND}/records", "server")
    ours = [json.loads(record.getMessage()) for record in caplog.records if record.name.startswith("ldpfl")]
    assert [line["event"] for line in ours] == ["round_opened", "round_released", "round_acknowledged"]
    assert (ours[1]["uploads"], ours[1]["incomplete"], ours[1]["parts"]) == (2, 1, 1)
    assert not any(secret in repr(ours) for secret in ("alice", "bob", "upload-of", *site.tokens.values()))


def test_a_fault_of_our_own_is_one_line_and_repeats_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"secret {site.tokens['alice']}")

    monkeypatch.setattr(site.store, "status", broken)
    response = site("GET", ROUND)
    assert (response.status_code, told(response)) == (
        500,
        "the relay failed at this request: its operator finds the place in its log (request_failed)",
    )
    assert [json.loads(record.getMessage())["error"] for record in caplog.records if record.name == "ldpfl.relay"] == ["RuntimeError"]
    assert site.tokens["alice"] not in caplog.text


def test_it_speaks_http_only(site: Site) -> None:
    with pytest.raises(RuntimeError, match="HTTP only"):
        asyncio.run(site.app({"type": "websocket"}, None, None))  # type: ignore[arg-type]


def test_what_waits_for_too_long_for_the_store_is_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that call the store are few; when something holds it, those who wait for one do not pile up."""
    released, called = threading.Event(), list[str]()
    assert site("GET", ROUND).status_code == 404  # from now on the relay knows whose token this is
    monkeypatch.setattr("ldpfl.relay.app.BUSY_S", 0.3)

    def check() -> None:
        called.append("")
        released.wait(30)

    monkeypatch.setattr(site.store, "check", check)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(site("GET", "/health", None).status_code)) for _ in range(20)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(answers) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answers == [503] * 16
    assert site("GET", ROUND).status_code == 404  # who has a token does not wait with those who have none
    released.set()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * 4 + [503] * 16
    assert len(called) == 4
    assert site("GET", "/health", None).status_code == 200


def test_a_request_that_ends_with_the_relay_is_answered_and_not_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.open()
    sent: list[Message] = []

    async def call() -> None:
        async def receive() -> Message:
            await asyncio.sleep(1000)
            return {}

        async def send(message: Message) -> None:
            sent.append(message)

        under_way = asyncio.ensure_future(
            site.app(scope_of("PUT", ROUND, {"Authorization": f"Bearer {site.tokens['server']}"}), receive, send)
        )
        await asyncio.sleep(0.2)
        under_way.cancel()
        await under_way

    with caplog.at_level(logging.ERROR):
        asyncio.run(call())
    assert sent[0]["status"] == 503
    assert not caplog.messages


def test_a_thread_that_nobody_waits_for_any_more_keeps_its_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who asks and leaves, over and over while the store is held, has as many threads as it likes."""
    released, called = threading.Event(), list[str]()

    def check() -> None:
        called.append("")
        released.wait(30)

    monkeypatch.setattr(site.store, "check", check)

    async def call() -> None:
        async def receive() -> Message:
            await asyncio.sleep(1000)
            return {}

        async def send(message: Message) -> None: ...

        for _ in range(20):
            under_way = asyncio.ensure_future(site.app(scope_of("GET", "/health", {}), receive, send))
            await asyncio.sleep(0.02)
            under_way.cancel()
            await under_way
        assert len(called) == 4
        released.set()
        while len(called) < 5:  # and then it is free for others
            await site.app(scope_of("GET", "/health", {}), receive, send)

    asyncio.run(call())
