"""The relay's store on SQLite and on PostgreSQL: what it takes, refuses, releases once and forgets."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from relay_support import (
    RECORD_BYTES,
    RUN,
    TABLES,
    Clock,
    Postgres,
    blob,
    content,
    opened,
    pull,
    put,
    records,
    refused,
    seeded,
    signing_key,
    terms,
    upload_id,
)
from sqlalchemy import event, inspect, text, update

from ldpfl import ConfigError
from ldpfl.relay import Terms
from ldpfl.relay.database import open_engine
from ldpfl.relay.errors import (
    Conflict,
    Forbidden,
    Refusal,
    RoundOver,
    StoreFull,
    StoreUnavailable,
    TooEarly,
    TooLong,
    Unknown,
    WrongLength,
)
from ldpfl.relay.queries import Progress
from ldpfl.relay.schema import SCHEMA, blocks, is_sqlite, meta, parts, rounds, tokens, uploads
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.util.file_owners import require_own

pytest_plugins = ["relay_fixtures"]


def test_a_round_is_opened_once(store: Store, clock: Clock) -> None:
    first = opened(store)
    assert (first.state, first.seconds_left, first.terms, first.uploads) == ("open", 100.0, terms(), 0)
    clock.now += 40
    assert opened(store).seconds_left == 60.0
    refused(store, Conflict, lambda: opened(store, min_clients=3))
    refused(store, Forbidden, lambda: store.open_round("another", RUN, 1, terms()))
    refused(store, Unknown, lambda: store.status("aggregator", RUN, 2))
    refused(store, Unknown, lambda: store.status("aggregator", "run-2", 1))


def test_only_its_aggregator_learns_how_many_have_uploaded(store: Store) -> None:
    opened(store)
    put(store, "alice")
    assert store.status("aggregator", RUN, 1).uploads == 1
    assert store.status("alice", RUN, 1).uploads is None


def test_a_round_ends_at_its_deadline_if_enough_clients_have_uploaded(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    put(store, "bob")
    clock.now += 99.5
    refused(store, TooEarly, lambda: pull(store), "0.5 seconds")
    put(store, "carol")
    clock.now += 0.5
    assert store.status("alice", RUN, 1).state == "released"
    refused(store, RoundOver, lambda: store.begin("dave", RUN, 1, upload_id("dave"), 640))
    assert records(pull(store)) == records(blob("alice") + blob("bob") + blob("carol"))


def test_after_the_deadline_it_waits_for_enough_clients_and_takes_them(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    clock.now += 1000
    assert store.status("aggregator", RUN, 1).state == "waiting"
    refused(store, TooEarly, lambda: pull(store), "waits for 2 clients")
    store.begin("bob", RUN, 1, upload_id("bob"), 640)
    store.append("bob", RUN, 1, upload_id("bob"), 0, blob("bob")[:600])
    refused(store, TooEarly, lambda: pull(store))
    store.append("bob", RUN, 1, upload_id("bob"), 600, blob("bob")[600:])
    refused(store, RoundOver, lambda: store.begin("carol", RUN, 1, upload_id("carol"), 640))
    assert records(pull(store)) == records(blob("alice") + blob("bob"))


def test_an_upload_is_appended_to_in_order_only(store: Store) -> None:
    opened(store)
    mine = ("alice", RUN, 1, upload_id("alice"))
    refused(store, Unknown, lambda: store.append(*mine, 0, b"x"))
    assert store.begin(*mine, 640) == Progress(0, 640)
    assert store.append(*mine, 0, bytes(100)) == Progress(100, 640)
    for offset in (0, 99, 101):
        refused(store, Conflict, lambda offset=offset: store.append(*mine, offset, b"x"), "number 100")  # type: ignore[misc]
    refused(store, TooLong, lambda: store.append(*mine, 100, bytes(541)))
    assert store.begin(*mine, 640) == store.progress(*mine) == Progress(100, 640)
    assert store.append(*mine, 100, bytes(540)).complete
    assert store.begin(*mine, 640).complete
    refused(store, Conflict, lambda: store.append(*mine, 0, bytes(640)))
    refused(store, TooLong, lambda: store.append(*mine, 640, b"x"))


def test_one_upload_a_client_and_an_id_belongs_to_one_client(store: Store) -> None:
    opened(store, max_uploads=2)
    put(store, "alice")
    refused(store, Conflict, lambda: store.begin("alice", RUN, 1, upload_id("alice2"), 640), "one in each round")
    refused(store, Conflict, lambda: store.begin("bob", RUN, 1, upload_id("alice"), 640), "taken")
    refused(store, Unknown, lambda: store.progress("bob", RUN, 1, upload_id("alice")))
    refused(store, Unknown, lambda: store.append("bob", RUN, 1, upload_id("alice"), 0, b"x"))
    refused(store, WrongLength, lambda: store.begin("bob", RUN, 1, upload_id("bob"), 639), "exactly 640 bytes")
    put(store, "bob")
    refused(store, Conflict, lambda: store.begin("carol", RUN, 1, upload_id("carol"), 640), "full")


def test_incomplete_uploads_are_dropped_and_a_complete_one_hears_that_it_is(store: Store, clock: Clock) -> None:
    opened(store, min_clients=1)
    put(store, "alice")
    store.begin("bob", RUN, 1, upload_id("bob"), 640)
    store.append("bob", RUN, 1, upload_id("bob"), 0, blob("bob")[:639])
    clock.now += 100
    assert store.progress("alice", RUN, 1, upload_id("alice")).complete
    refused(store, RoundOver, lambda: store.append("bob", RUN, 1, upload_id("bob"), 639, b"x"))
    refused(store, RoundOver, lambda: store.progress("bob", RUN, 1, upload_id("bob")))
    assert records(pull(store)) == records(blob("alice"))
    for client in ("alice", "bob"):
        refused(store, RoundOver, lambda client=client: store.begin(client, RUN, 1, upload_id(client), 640))  # type: ignore[misc]
        refused(store, RoundOver, lambda client=client: store.progress(client, RUN, 1, upload_id(client)))  # type: ignore[misc]


def test_records_are_the_same_until_acknowledged_and_then_gone(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    put(store, "bob")
    refused(store, Conflict, lambda: store.acknowledge("aggregator", RUN, 1), "nothing to acknowledge")
    clock.now += 100
    refused(store, Unknown, lambda: store.part("aggregator", RUN, 1, 1), "1 parts")
    first = pull(store)
    assert pull(store) == first
    refused(store, Unknown, lambda: store.part("aggregator", RUN, 1, 1), "1 parts")
    refused(store, Unknown, lambda: store.part("aggregator", RUN, 1, 2**31), "1 parts")
    refused(store, Unknown, lambda: store.part("aggregator", RUN, 1, 10**17), "1 parts")
    refused(store, Forbidden, lambda: store.part("another", RUN, 1, 0))
    refused(store, Forbidden, lambda: store.acknowledge("another", RUN, 1))
    assert store.status("aggregator", RUN, 1).uploads == 2
    store.acknowledge("aggregator", RUN, 1)
    after = content(store)
    store.acknowledge("aggregator", RUN, 1)
    assert content(store) == after
    refused(store, RoundOver, lambda: pull(store))
    assert opened(store).state == "gone"
    refused(store, Conflict, lambda: opened(store, min_clients=3))
    refused(store, RoundOver, lambda: store.begin("carol", RUN, 1, upload_id("carol"), 640))


def test_after_the_release_nothing_in_the_store_names_a_client(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    put(store, "bob")
    clock.now += 100
    pull(store)
    by_table = dict(zip(TABLES, content(store), strict=True))
    assert by_table[uploads] == by_table[blocks] == []
    assert upload_id("alice") not in repr(by_table[rounds])
    assert "alice" not in repr(by_table[rounds])
    store.acknowledge("aggregator", RUN, 1)
    by_table = dict(zip(TABLES, content(store), strict=True))
    assert by_table[uploads] == by_table[blocks] == by_table[parts] == []
    assert len(by_table[rounds]) == 1


def test_a_run_belongs_to_the_aggregator_that_began_it(store: Store) -> None:
    opened(store, 1)
    refused(store, Forbidden, lambda: store.open_round("another", RUN, 2, terms()), "begun by another")
    store.cancel("aggregator", RUN, 1)
    refused(store, Forbidden, lambda: store.open_round("another", RUN, 2, terms()))
    assert store.open_round("another", "run-2", 1, terms()).state == "open"
    assert opened(store, 2).state == "open"


def test_of_two_that_begin_a_run_at_once_one_has_it(store: Store, another: Callable[[], Store]) -> None:
    workers = [(store, "one"), (another(), "two"), (store, "three"), (another(), "four")]
    barrier = threading.Barrier(len(workers))

    def begin(numbered: tuple[int, tuple[Store, str]]) -> bool:
        barrier.wait()
        try:
            numbered[1][0].open_round(numbered[1][1], RUN, 1 + numbered[0], terms())
        except Forbidden:
            return False
        return True

    with ThreadPoolExecutor(len(workers)) as pool:
        assert sum(pool.map(begin, enumerate(workers))) == 1


def test_an_aggregator_has_so_many_rounds_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.queries.MAX_ROUNDS_NOT_GONE", 3)
    for number in (1, 2, 3):
        opened(store, number)
    assert opened(store, 3).state == "open"
    refused(store, Conflict, lambda: opened(store, 4), "acknowledge or cancel")
    assert store.open_round("another", "run-2", 1, terms()).state == "open"
    store.cancel("aggregator", RUN, 1)
    assert opened(store, 4).state == "open"


@pytest.mark.parametrize("moved", [-3600.0, 3600.0])
def test_a_clock_that_is_set_moves_no_deadline_of_a_running_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float) -> None:
    wall, off = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + off[0])
    store = Store(open_engine(str(tmp_path / "relay.db")))
    opened(store)
    off[0] = moved
    assert 40 < opened(store).seconds_left <= 100
    store.close()


def test_an_unwanted_round_is_cancelled(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    refused(store, Forbidden, lambda: store.cancel("another", RUN, 1))
    store.cancel("aggregator", RUN, 1)
    store.cancel("aggregator", RUN, 1)
    assert store.status("alice", RUN, 1).state == "gone"
    assert dict(zip(TABLES, content(store), strict=True))[blocks] == []
    refused(store, RoundOver, lambda: store.append("alice", RUN, 1, upload_id("alice"), 0, b""))


def test_rounds_do_not_mix(store: Store, clock: Clock) -> None:
    for number in (1, 2):
        opened(store, number, min_clients=1)
        put(store, "alice", number)
    put(store, "bob", 2)
    clock.now += 100
    assert records(pull(store, 1)) == records(blob("alice"))
    assert records(pull(store, 2)) == records(blob("alice") + blob("bob"))
    store.acknowledge("aggregator", RUN, 1)
    assert records(pull(store, 2)) == records(blob("alice") + blob("bob"))


def test_the_order_is_mixed_across_clients(store: Store, clock: Clock) -> None:
    opened(store)
    put(store, "alice")
    put(store, "bob")
    clock.now += 100
    mixed = pull(store)
    first_half = Counter(mixed[start : start + 3] for start in range(0, len(mixed) // 2, RECORD_BYTES))
    # Hypergeometric with mean 20 of 40: outside 8..32 with probability below 1e-7.
    assert 8 <= first_half[b"ali"] <= 32


def test_workers_that_release_at_once_release_once(store: Store, another: Callable[[], Store], clock: Clock) -> None:
    size = terms(records_per_upload=400)
    store.open_round("aggregator", RUN, 1, size)
    for client in ("alice", "bob", "carol"):
        put(store, client, size=size, block=3000)
    clock.now += 100
    workers = [store, another(), another(), another()]
    barrier = threading.Barrier(len(workers))

    def pull_with(worker: Store) -> bytes:
        barrier.wait()
        return pull(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        pulled = set(pool.map(pull_with, workers))
    assert len(pulled) == 1
    assert records(pulled.pop()) == records(b"".join(blob(client, size) for client in ("alice", "bob", "carol")))


def test_of_workers_that_append_the_same_bytes_one_succeeds(store: Store, another: Callable[[], Store]) -> None:
    opened(store)
    mine = ("alice", RUN, 1, upload_id("alice"))
    store.begin(*mine, 640)
    workers = [store, another(), another(), another()]
    barrier = threading.Barrier(len(workers))

    def append_with(worker: Store) -> bool:
        barrier.wait()
        try:
            return worker.append(*mine, 0, bytes(100)).received == 100
        except Conflict:
            return False

    with ThreadPoolExecutor(len(workers)) as pool:
        assert sum(pool.map(append_with, workers)) == 1
    assert store.progress(*mine) == Progress(100, 640)


def test_workers_that_begin_at_once_do_not_overfill_a_round(store: Store, another: Callable[[], Store]) -> None:
    opened(store, max_uploads=3)
    workers = [store, another()] * 4
    barrier = threading.Barrier(len(workers))

    def begin_with(numbered: tuple[int, Store]) -> bool:
        barrier.wait()
        try:
            numbered[1].begin(f"c{numbered[0]}", RUN, 1, upload_id(f"c{numbered[0]}"), 640)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(len(workers)) as pool:
        assert sum(pool.map(begin_with, enumerate(workers))) == 3


def test_many_clients_upload_at_once_through_several_workers(store: Store, another: Callable[[], Store], clock: Clock) -> None:
    opened(store)
    workers = [store, another()]
    names = [f"c{index}" for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda numbered: put(workers[numbered[0] % 2], numbered[1], block=100), enumerate(names)))
    clock.now += 100
    assert records(pull(store)) == records(b"".join(map(blob, names)))


def test_a_round_of_many_parts_and_a_seed_decides_its_order(place: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.uniform_order.PART_BYTES", 256)
    pulled = []
    for number in (1, 2):
        store = Store(open_engine(place), clock=clock, words=seeded(5))
        opened(store, number, min_clients=1)
        put(store, "alice", number)
        clock.now += 100
        assert store.part("aggregator", RUN, number, 0).count == 4
        pulled.append(pull(store, number))
        store.close()
    assert pulled[0] == pulled[1]
    assert records(pulled[0]) == records(blob("alice"))


def test_the_deadline_is_the_stores_own_clock(place: str) -> None:
    store = Store(open_engine(place))
    assert 99 < opened(store, 1).seconds_left <= 100
    assert opened(store, 2, closes_in_s=0.0).state == "waiting"
    store.close()


def test_a_full_disk_while_mixing_leaves_the_round_as_it_was(place: str, clock: Clock) -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full() -> BinaryIO:
        return FullDisk()

    store = Store(open_engine(place), clock=clock, spool=full)
    opened(store)
    put(store, "alice")
    put(store, "bob")
    clock.now += 100
    refused(store, StoreFull, lambda: pull(store))
    store.close()
    again = Store(open_engine(place), clock=clock)
    assert records(pull(again)) == records(blob("alice") + blob("bob"))
    again.close()


def test_a_full_database_refuses_and_goes_on_when_there_is_room(sqlite_store: Store, clock: Clock) -> None:
    size = terms(records_per_upload=4000)
    whole = blob("alice", size)
    mine = ("alice", RUN, 1, upload_id("alice"))
    room = [0]
    event.listen(sqlite_store.engine, "connect", lambda connection, _: connection.execute(f"PRAGMA max_page_count = {room[0]}"))

    def pages(count: int) -> None:
        room[0] = count
        sqlite_store.engine.dispose()

    with sqlite_store.engine.connect() as connection:
        used = connection.scalar(text("PRAGMA page_count")) or 0
    pages(used + 12)  # room for some 48 KiB of the 62.5
    sqlite_store.open_round("aggregator", RUN, 1, size.model_copy(update={"min_clients": 1}))
    sqlite_store.begin(*mine, len(whole))
    sqlite_store.append(*mine, 0, whole[:30_000])
    refused(sqlite_store, StoreFull, lambda: sqlite_store.append(*mine, 30_000, whole[30_000:]))
    assert sqlite_store.progress(*mine).received == 30_000
    pages(used + 18)
    sqlite_store.append(*mine, 30_000, whole[30_000:])
    clock.now += 100
    # Deleted blocks make room for the parts: a release needs no more pages than the uploads did.
    assert records(pull(sqlite_store)) == records(whole)


def test_a_store_that_does_not_answer_is_said_to_be_unavailable(sqlite_store: Store) -> None:
    with sqlite_store.engine.begin() as connection:
        connection.execute(text("DROP TABLE relay_rounds"))
    with pytest.raises(StoreUnavailable) as caught:
        sqlite_store.check()
    assert "relay_rounds" not in str(caught.value)


@pytest.mark.slow
def test_a_number_that_the_database_cannot_hold_is_no_outage(postgres: Postgres) -> None:
    """Trying again would not help, so no retry is asked for; and the number is not repeated."""
    store = Store(open_engine(postgres.new_store()))
    with pytest.raises(Refusal) as caught:
        store.status("aggregator", RUN, 2**40)
    assert caught.value.status == 400
    assert not caught.value.headers
    assert str(2**40) not in str(caught.value)
    store.close()


def test_a_store_is_opened_again_with_all_it_holds(place: str, clock: Clock) -> None:
    first = Store(open_engine(place), clock=clock)
    opened(first)
    put(first, "alice")
    first.close()
    second = Store(open_engine(place), clock=clock)
    put(second, "bob")
    clock.now += 100
    assert records(pull(second)) == records(blob("alice") + blob("bob"))
    second.close()


def test_several_workers_may_create_a_store_at_once(place: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(open_engine, [place] * 4))
    for engine in engines:
        assert set(inspect(engine).get_table_names(None if is_sqlite(engine) else SCHEMA)) == {table.name for table in TABLES}
        engine.dispose()


def test_a_journal_that_another_worker_ends_meanwhile_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when it was looked for, and is gone when it is looked at; one that stays, and is open to others, is refused."""
    journal = tmp_path / "relay.db-journal"

    def ended(path: Path, *rest: Any, **others: Any) -> Path:
        if path == journal:
            journal.unlink()
        return require_own(path, *rest, **others)

    journal.touch(0o600)
    with monkeypatch.context() as patched:
        patched.setattr("ldpfl.relay.files.require_own", ended)
        open_engine(str(tmp_path / "relay.db")).dispose()
    journal.touch(0o600)
    journal.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        open_engine(str(tmp_path / "relay.db"))


def test_a_store_of_another_version_is_refused(place: str) -> None:
    engine = open_engine(place)
    with engine.begin() as connection:
        connection.execute(update(meta).values(version=5))
    engine.dispose()
    with pytest.raises(ConfigError, match="has version 5, expected 4"):
        open_engine(place)


def test_a_store_whose_tokens_have_no_signing_keys_is_refused_as_one_of_another_version(place: str) -> None:
    """Those of version 3 had none."""
    engine = open_engine(place)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {'' if is_sqlite(engine) else SCHEMA + '.'}relay_tokens DROP COLUMN signing_key"))
        connection.execute(update(meta).values(version=3))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"If another version of ldpfl made this store: .* issue the tokens anew in an empty store"):
        open_engine(place)


@pytest.mark.parametrize("place", ["mysql://host/x", "sqlite://", "postgresql://[", "redis://x/y", "postgresql://relay@host:port/db"])
def test_other_places_are_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        open_engine(place)


def test_a_place_that_cannot_be_opened_is_refused_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_engine(str(tmp_path / "none" / "relay.db"))
    (tmp_path / "text.db").touch(0o600)
    (tmp_path / "text.db").write_text("this is not a database, though it is long enough to have a header of one" * 20)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_engine(str(tmp_path / "text.db"))
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        open_engine(f"postgresql://relay:hunter2@/postgres?host={tmp_path}")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        open_engine(f"postgresql://relay@/postgres?host={tmp_path}&password=hunter2")
    assert "hunter2" not in str(caught.value)


def test_tokens_are_stored_as_hashes_and_can_be_revoked(store: Store) -> None:
    known = Tokens(store.engine)
    token = known.add("alice", Role.CLIENT)
    other = known.add("server", Role.AGGREGATOR)
    assert len(token) == 43
    assert token != other
    assert (known.owner(token).name, known.owner(token).role) == ("alice", Role.CLIENT)
    assert [owner.name for owner in known.all()] == ["alice", "server"]
    key = signing_key("bob").public_key()
    assert known.owner(known.add("bob", Role.CLIENT, key)).signing_key == key
    known.revoke("bob")
    assert token not in repr(content(store))
    assert token.encode() not in b"".join(row[0] for row in dict(zip(TABLES, content(store), strict=True))[tokens])
    with pytest.raises(ConfigError, match="has a token already"):
        known.add("alice", Role.CLIENT)
    known.revoke("alice")
    for wrong in (token, "", "x" * 43, "é" * 43, other[:-1], "'; DROP TABLE relay_tokens; --"):
        with pytest.raises(Refusal) as caught:
            known.owner(wrong)
        assert caught.value.status == 401
    with pytest.raises(ConfigError, match="no token"):
        known.revoke("alice")
    assert known.add("alice", Role.CLIENT) != token
    for name in ("", "-x", "a b", "x" * 65, "a\n"):
        with pytest.raises(ConfigError, match="cannot name"):
            known.add(name, Role.CLIENT)


def test_a_round_needs_sensible_terms() -> None:
    for changes in (
        {"min_clients": 9},
        {"record_bytes": 0},
        {"records_per_upload": 2**28, "record_bytes": 2},
        {"max_uploads": 10**6, "records_per_upload": 2**20},
        {"closes_in_s": float("nan")},
        {"closes_in_s": -1.0},
        {"closes_in_s": 1e9},
    ):
        with pytest.raises(ValueError, match=r"."):
            terms(**changes)
    assert isinstance(terms(), Terms)


@pytest.mark.thorough
def test_postgres_stores_are_apart(postgres: Postgres) -> None:
    first, second = (Store(open_engine(postgres.new_store())) for _ in range(2))
    opened(first)
    with pytest.raises(Unknown):
        second.status("aggregator", RUN, 1)
    first.close()
    second.close()


def test_a_clock_that_is_behind_after_a_restart_keeps_a_round_open_for_its_window_at_most(sqlite_store: Store, clock: Clock) -> None:
    opened(sqlite_store, closes_in_s=100.0)
    clock.now -= 30 * 24 * 3600
    assert sqlite_store.status("aggregator", RUN, 1).seconds_left == 100.0
    put(sqlite_store, "alice")


def test_after_a_restart_a_round_is_over_when_its_window_is_though_the_clock_is_behind(sqlite_store: Store, clock: Clock) -> None:
    opened(sqlite_store, closes_in_s=100.0)
    clock.now -= 30 * 24 * 3600
    sqlite_store.tidy()  # as it does when it begins to serve
    clock.now += 101
    assert sqlite_store.status("aggregator", RUN, 1).state == "waiting"
