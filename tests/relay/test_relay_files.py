"""What the relay's store leaves on disks: nothing of a round that is over, also if it is killed, read by others, or out of room."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from relay_support import (
    RUN,
    TABLES,
    Clock,
    Postgres,
    blob,
    content,
    on_disk,
    opened,
    pull,
    put,
    records,
    refused,
    terms,
    upload_id,
)
from sqlalchemy import event, text, update

from ldpfl import ConfigError
from ldpfl.relay import session
from ldpfl.relay.database import open_engine, writing
from ldpfl.relay.errors import (
    StoreFull,
    StoreUnavailable,
)
from ldpfl.relay.round_deletion import GoneRounds
from ldpfl.relay.schema import parts, rounds, uploads
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.relay.uniform_order import scatter

pytest_plugins = ["relay_fixtures"]


@pytest.mark.parametrize("ends", [["release", "acknowledge"], ["release", "cancel"], ["cancel"]])
@pytest.mark.slow
@pytest.mark.thorough_for("ends1", "ends0")
def test_nothing_of_an_upload_stays_in_the_sqlite_files(sqlite_store: Store, clock: Clock, tmp_path: Path, ends: list[str]) -> None:
    """With so many clients that tables and indexes have several levels, whose pages are moved and merged."""
    uploaded = {f"n-{index * 7919 % 1000:03d}-n": os.urandom(640) for index in range(250)}
    opened(sqlite_store, max_uploads=250)
    for name, data in uploaded.items():
        sqlite_store.begin(name, RUN, 1, upload_id(name), 640)
        sqlite_store.append(name, RUN, 1, upload_id(name), 0, data)
    assert all(name.encode() in on_disk(tmp_path / "relay.db") for name in uploaded)
    clock.now += 100
    for end in ends:
        if end == "release":
            pull(sqlite_store)
        else:
            getattr(sqlite_store, end)("aggregator", RUN, 1)
        files = on_disk(tmp_path / "relay.db")
        assert re.findall(rb"n-\d{3}|upload-of", files) == []
        assert not any(data[:64] in files for data in uploaded.values())
        assert {path.name for path in tmp_path.iterdir()} <= {"relay.db", "relay.db.reserve"}
    assert not any(data[16 * place : 16 * place + 16] in files for data in uploaded.values() for place in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cancel", "release"])
@pytest.mark.parametrize(("seed", "clients"), [(1, 300), (2, 100)])  # in both of them such copies are left where nothing is written anew
@pytest.mark.thorough_except("2-100-cancel")
def test_nothing_stays_either_where_another_round_is_open(
    seed: int, clients: int, end: str, sqlite_store: Store, clock: Clock, tmp_path: Path
) -> None:
    """Their rows share pages, and SQLite leaves copies in the room that it moves rows out of; overwriting a row does not reach those."""
    chance = random.Random(seed)
    uploaded: dict[str, bytes] = {}
    begun = [(number, f"n{number}-{client:03d}-n") for number in (1, 2) for client in range(clients)]
    for number in (1, 2):
        opened(sqlite_store, number, max_uploads=clients)
    for phase in ("begin", "append"):
        chance.shuffle(begun)
        for number, name in begun:
            if phase == "begin":
                sqlite_store.begin(name, RUN, number, upload_id(name), 640)
            else:
                uploaded[name] = chance.randbytes(640)
                sqlite_store.append(name, RUN, number, upload_id(name), 0, uploaded[name])
    if end == "cancel":
        sqlite_store.cancel("aggregator", RUN, 1)
    else:
        clock.now += 100
        pull(sqlite_store)
    files = on_disk(tmp_path / "relay.db")
    assert len(set(re.findall(rb"n2-\d{3}-n", files))) == clients
    assert re.findall(rb"n1-\d{3}", files) == []
    # What is released has all records in a random order: four that stand as they were uploaded are of a copy.
    pieces = [uploaded[name][place : place + 64] for number, name in begun if number == 1 for place in range(0, 640, 64)]
    assert not any(piece in files for piece in pieces)


@contextmanager
def reader(path: Path) -> Iterator[None]:
    """Somebody else who reads the store, and holds it for as long."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM relay_rounds").fetchone()
        yield


def test_who_reads_the_store_holds_up_writers_and_spoils_nothing(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.relay.database._SQLITE_WAIT_S", 0.2)
    store = Store(open_engine(str(tmp_path / "relay.db")), clock=clock)
    opened(store)
    put(store, "alice")
    put(store, "bob")
    clock.now += 100
    with reader(tmp_path / "relay.db"):
        refused(store, StoreUnavailable, lambda: pull(store))
        refused(store, StoreUnavailable, lambda: store.cancel("aggregator", RUN, 1))
        assert store.status("aggregator", RUN, 1).uploads == 2
    pulled = pull(store)
    with reader(tmp_path / "relay.db"):
        refused(store, StoreUnavailable, lambda: store.acknowledge("aggregator", RUN, 1))
        assert pull(store) == pulled
    assert b"upload-of-" not in on_disk(tmp_path / "relay.db")
    store.acknowledge("aggregator", RUN, 1)
    assert b"alice" not in on_disk(tmp_path / "relay.db")
    store.close()


def test_a_request_waits_for_a_long_one_of_its_own_process(sqlite_store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than another process may hold the store."""
    monkeypatch.setattr("ldpfl.relay.database._SQLITE_WAIT_S", 0.1)
    sqlite_store.engine.dispose()
    opened(sqlite_store, min_clients=1)
    put(sqlite_store, "alice")
    clock.now += 100
    mixing = threading.Event()

    def slow(*arguments: Any) -> Any:
        mixing.set()
        time.sleep(0.5)
        return scatter(*arguments)

    monkeypatch.setattr("ldpfl.relay.store.scatter", slow)
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(pull, sqlite_store)
        assert mixing.wait(30)
        assert sqlite_store.open_round("aggregator", RUN, 2, terms()).state == "open"
        assert records(pulled.result(30)) == records(blob("alice"))


def test_a_store_with_a_write_ahead_log_is_converted_before_it_is_served(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ldpfl.relay.database._SQLITE_WAIT_S", 0.2)
    path = tmp_path / "relay.db"
    first = Store(open_engine(str(path)), clock=clock)
    opened(first)
    first.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        assert old.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        old.execute("UPDATE relay_rounds SET run = 'run-7'")
        assert path.with_name("relay.db-wal").exists()
        old.execute("BEGIN")
        old.execute("SELECT * FROM relay_rounds").fetchone()
        with pytest.raises(ConfigError, match="held by another process"):
            open_engine(str(path))
        old.execute("COMMIT")
    second = Store(open_engine(str(path)), clock=clock)
    assert second.status("aggregator", "run-7", 1).state == "open"
    assert [file.name for file in tmp_path.iterdir()] == ["relay.db"]
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    second.close()


def test_a_write_ahead_log_that_another_program_sets_meanwhile_keeps_nothing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would keep what was deleted, for as long as somebody has the file open."""
    monkeypatch.setattr("ldpfl.relay.database._SQLITE_WAIT_S", 0.2)
    store = Store(open_engine(str(tmp_path / "relay.db")), clock=clock)
    opened(store, min_clients=1)
    with closing(sqlite3.connect(tmp_path / "relay.db", isolation_level=None)) as other:
        assert other.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        other.execute("BEGIN")
        other.execute("SELECT * FROM relay_rounds").fetchone()
        with pytest.raises(StoreUnavailable):
            put(store, "alice")
        assert "store_unfit" in caplog.text
    assert b"alice" not in on_disk(tmp_path / "relay.db")
    put(store, "alice")
    clock.now += 100
    assert records(pull(store)) == records(blob("alice"))
    store.acknowledge("aggregator", RUN, 1)
    assert b"alice" not in on_disk(tmp_path / "relay.db")
    assert not (tmp_path / "relay.db-wal").exists()
    store.close()


def test_two_relays_end_a_write_ahead_log_together(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a connection, which keeps the log until it is closed."""
    monkeypatch.setattr("ldpfl.relay.database._SQLITE_WAIT_S", 0.2)
    first, second = (Store(open_engine(str(tmp_path / "relay.db")), clock=clock) for _ in range(2))
    opened(first, min_clients=1)
    with closing(sqlite3.connect(tmp_path / "relay.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
    for store in (first, second):
        assert store.status("aggregator", RUN, 1).state == "open"
    for store in (first, second):  # the first cannot set the mode while the second has a connection
        with suppress(StoreUnavailable):
            store.status("aggregator", RUN, 1)
    put(first, "alice")
    put(second, "bob")
    assert first.status("aggregator", RUN, 1).uploads == 2
    assert not (tmp_path / "relay.db-wal").exists()
    first.close()
    second.close()


@pytest.mark.parametrize("end", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("mode", [0o666, 0o640, 0o604, 0o620])
def test_a_store_that_others_may_use_is_refused(tmp_path: Path, end: str, mode: int) -> None:
    open_engine(str(tmp_path / "relay.db")).dispose()
    file = tmp_path / f"relay.db{end}"
    file.touch()
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        open_engine(str(tmp_path / "relay.db"))
    assert "\n" not in str(caught.value)
    file.chmod(0o600)
    if end in ("", "-journal"):  # an empty one is none
        open_engine(str(tmp_path / "relay.db")).dispose()


@pytest.mark.slow
def test_what_a_killed_process_left_of_a_round_that_is_gone_is_deleted_at_the_next_start(
    place: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Store(open_engine(place), clock=clock)
    for number in (1, 2, 3):
        opened(first, number)
        put(first, "alice", number)
        put(first, "bob", number)
    clock.now += 100
    pull(first, 2)
    with monkeypatch.context() as patch:
        patch.setattr(GoneRounds, "delete", lambda self: None)  # killed right behind the mark
        first.cancel("aggregator", RUN, 1)
        first.acknowledge("aggregator", RUN, 2)
    first.close()
    second = Store(open_engine(place), clock=clock)
    assert second.status("aggregator", RUN, 1).state == "gone"
    assert "alice" in repr(content(second))
    second.tidy()
    by_table = dict(zip(TABLES, content(second), strict=True))
    assert by_table[parts] == []
    assert len(by_table[uploads]) == 2  # of the round that is open
    assert records(pull(second, 3)) == records(blob("alice") + blob("bob"))
    second.close()


@pytest.mark.slow
def test_a_tidying_that_fails_is_logged_and_done_at_the_next_end_of_a_round(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        opened(store, number)
        put(store, "alice", number)
    with monkeypatch.context() as patch:
        patch.setattr(GoneRounds, "delete", mock.Mock(side_effect=StoreUnavailable("held")))
        with pytest.raises(StoreUnavailable):
            store.cancel("aggregator", RUN, 1)
        store.tidy()
    assert [json.loads(record.getMessage())["event"] for record in caplog.records if record.levelname == "ERROR"] == ["tidy_failed"]
    store.cancel("aggregator", RUN, 2)
    assert dict(zip(TABLES, content(store), strict=True))[uploads] == []


def test_ending_rounds_takes_a_share_of_the_time_whatever_that_costs(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one who ends tiny rounds of his own, over and over, has all that others have uploaded written anew each time."""
    written: list[float] = []
    now = [0.0]

    def slow(self: GoneRounds, request: int) -> bool:
        written.append(now[0])
        now[0] += 6.0  # for a GB of other rounds
        return True

    leftovers = GoneRounds(sqlite_store.engine)
    leftovers._scrub_time._clock = lambda: now[0]
    leftovers._scrub_time._updated_at = 0.0
    monkeypatch.setattr(GoneRounds, "_scrub", slow)
    for _ in range(600):
        leftovers.scrub()
        now[0] += 1.0
    assert leftovers.has_pending_work
    assert len(written) * 6.0 <= 0.1 * now[0] + 6.0
    assert len(written) > 5
    leftovers.delete(at_once=True)
    assert not leftovers.has_pending_work


@pytest.mark.thorough
def test_postgres_is_vacuumed_at_the_start_and_after_a_round(postgres: Postgres, clock: Clock) -> None:
    store = Store(open_engine(postgres.new_store()), clock=clock)
    said: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *call: said.append(call[2]))
    store.tidy()
    for number, uploaded in ((1, True), (2, False)):  # nothing was there of the second one: else ending it over and over would cost much
        opened(store, number)
        if uploaded:
            put(store, "client-1", number)
        store.cancel("aggregator", RUN, number)
    assert [text for text in said if text.startswith("VACUUM")] == [
        f"{command} ldpfl_relay.relay_{name}"
        for command in ("VACUUM", "VACUUM (FULL, VERBOSE)")
        for name in ("blocks", "uploads", "parts", "tokens")
    ] * 2
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("other_round", [False, True])
def test_files_of_postgres_do_not_tell_who_sent_what_after_the_release(postgres: Postgres, clock: Clock, other_round: bool) -> None:
    """Freed room of tables, of their long values and of indexes is not overwritten, whether or not another round keeps the tables alive."""
    database = postgres.new_database()
    store = Store(open_engine(postgres.url(database)), clock=clock)
    size = terms(record_bytes=64, records_per_upload=1000)
    for number, clients in ((1, ("alice-1", "bob-1")), (2, ("carol-2", "dave-2"))):
        if number == 1 or other_round:
            opened(store, number, record_bytes=64, records_per_upload=1000, closes_in_s=100.0 * number)
            for client in clients:
                put(store, client, number, size=size, block=50_000)
    postgres.command("CHECKPOINT", database=database)
    assert b"alice-1" in _tables_on_disk(postgres, database)
    clock.now += 150
    pull(store)
    postgres.command("CHECKPOINT", database=database)
    assert upload_id("alice-1").encode() not in _tables_on_disk(postgres, database)
    store.acknowledge("aggregator", RUN, 1)
    postgres.command("CHECKPOINT", database=database)
    left = _tables_on_disk(postgres, database)
    assert b"alice-1" not in left  # each record of her upload has her name
    assert (b"carol-2" in left) == other_round
    assert not store.untidy
    store.close()


@pytest.mark.slow
def test_files_of_postgres_do_not_tell_whose_token_was_revoked(postgres: Postgres) -> None:
    database = postgres.new_database()
    engine = open_engine(postgres.url(database))
    held = Tokens(engine)
    for name in ("alice-1", "bob-1"):
        held.add(name, Role.CLIENT)
    postgres.command("CHECKPOINT", database=database)
    assert b"alice-1" in _tables_on_disk(postgres, database)
    held.revoke("alice-1")
    postgres.command("CHECKPOINT", database=database)
    left = _tables_on_disk(postgres, database)
    assert b"alice-1" not in left
    assert b"bob-1" in left
    engine.dispose()


@pytest.mark.slow
def test_rows_that_a_transaction_of_another_relay_keeps_are_removed_later(postgres: Postgres, clock: Clock) -> None:
    database = postgres.new_database()
    store, other = (Store(open_engine(postgres.url(database)), clock=clock) for _ in range(2))
    opened(store, 1)
    opened(store, 2, closes_in_s=1000.0)
    for client in ("alice-1", "bob-1"):
        put(store, client)
    store.tidy()
    clock.now += 150
    with writing(other.engine) as connection:
        connection.execute(update(rounds).where(rounds.c.round == 2).values(uploads=rounds.c.uploads))
        pull(store)
        assert store.untidy
    store.tidy()
    assert not store.untidy
    postgres.command("CHECKPOINT", database=database)
    assert upload_id("alice-1").encode() not in _tables_on_disk(postgres, database)
    store.close()
    other.close()


@pytest.mark.slow
def test_large_tables_are_rewritten_once_they_are_small(postgres: Postgres, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting takes room and holds up all uploads, so it waits as long as other rounds hold much."""
    monkeypatch.setattr("ldpfl.relay.round_deletion._REWRITTEN_BYTES", 10_000)
    database = postgres.new_database()
    store = Store(open_engine(postgres.url(database)), clock=clock)
    said: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *call: said.append(call[2]))
    store.tidy()
    size = terms(records_per_upload=400)
    for number, clients in ((1, ("alice-1", "bob-1")), (2, ("carol-2", "dave-2"))):
        opened(store, number, records_per_upload=400, closes_in_s=100.0 * number)
        for client in clients:
            put(store, client, number, size=size, block=20_000)
    clock.now += 150
    pull(store)
    store.acknowledge("aggregator", RUN, 1)
    del said[:]
    for _ in range(3):
        store.tidy()
    assert store.untidy
    assert [text for text in said if text.startswith("VACUUM")] == []  # in vain, as long as round 2 is open
    clock.now += 150
    pull(store, 2)
    assert [text for text in said if "FULL" in text] == [
        f"VACUUM (FULL, VERBOSE) ldpfl_relay.relay_{name}" for name in ("blocks", "uploads", "tokens")
    ]
    store.acknowledge("aggregator", RUN, 2)
    assert not store.untidy
    postgres.command("CHECKPOINT", database=database)
    assert b"upload-of-" not in _tables_on_disk(postgres, database)
    store.close()


def _tables_on_disk(postgres: Postgres, database: str) -> bytes:
    """Return all bytes of the files in which PostgreSQL keeps the tables and indexes of ``database``."""
    oid = postgres.command(f"SELECT oid FROM pg_database WHERE datname = '{database}'").strip()
    return b"".join(file.read_bytes() for file in sorted((postgres.folder / "data" / "base" / oid).iterdir()))


def test_a_full_disk_takes_the_end_of_a_round_by_giving_up_its_reserve(sqlite_store: Store, clock: Clock, tmp_path: Path) -> None:
    reserve = tmp_path / "relay.db.reserve"
    sqlite_store.tidy()
    assert reserve.stat().st_blocks * 512 >= reserve.stat().st_size > 2**20
    assert reserve.stat().st_mode & 0o777 == 0o600

    def full(*call: Any) -> None:
        if call[2].startswith(("UPDATE", "INSERT", "DELETE")) and reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    opened(sqlite_store)
    put(sqlite_store, "alice")
    event.listen(sqlite_store.engine, "before_cursor_execute", full)
    refused(sqlite_store, StoreFull, lambda: put(sqlite_store, "bob"))
    assert reserve.exists()  # nothing else may have it
    sqlite_store.cancel("aggregator", RUN, 1)
    assert b"alice" not in on_disk(tmp_path / "relay.db")
    assert reserve.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_ends_on_a_disk_that_is_full(small_disk: Path, clock: Clock, released: bool) -> None:
    size = terms(record_bytes=1024, records_per_upload=2 * 1024, min_clients=1, max_uploads=100)
    store = Store(open_engine(str(small_disk / "relay.db")), clock=clock)
    store.tidy()
    store.open_round("aggregator", RUN, 1, size)
    put(store, "alice", size=size, block=2**18)
    if released:
        clock.now += 100
        pull(store)
    store.open_round("aggregator", RUN, 2, size)
    with pytest.raises(StoreFull):  # noqa: PT012  (which of them is one too many depends on the disk)
        for index in range(40):
            put(store, f"c{index}", 2, size=size, block=2**18)
    with suppress(OSError), (small_disk / "full").open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))
    (store.acknowledge if released else store.cancel)("aggregator", RUN, 1)
    assert store.status("aggregator", RUN, 1).state == "gone"
    assert b"alice" not in on_disk(small_disk / "relay.db")
    store.cancel("aggregator", RUN, 2)
    assert b"upload-of-" not in on_disk(small_disk / "relay.db")
    (small_disk / "full").unlink()
    store.open_round("aggregator", RUN, 3, size)
    put(store, "alice", 3, size=size, block=2**18)
    store.close()


def fill(disk: Path, name: str, left: int) -> None:
    """Take all room of a disk but ``left`` bytes."""
    found = os.statvfs(disk)
    with (disk / name).open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - left)


@pytest.mark.slow
@pytest.mark.thorough
def test_full_disks_wear_nothing_down(small_disk: Path, clock: Clock) -> None:
    """Each time that the disk is full, ending a round gives up the room that is kept for that: it comes back whole, or nothing is taken."""
    size = terms(record_bytes=1024, records_per_upload=1024, min_clients=1, max_uploads=100)
    store = Store(open_engine(str(small_disk / "relay.db")), clock=clock)
    store.tidy()
    store.open_round("aggregator", RUN, 1, size)
    put(store, "alice", size=size, block=2**18)
    for number in range(2, 12):
        store.open_round("mallory", "run-2", number, size)
        with pytest.raises(StoreFull):  # noqa: PT012  (which of them is one too many depends on the disk)
            for index in range(60):
                whole = blob(f"m{index}", size)
                store.begin(f"m{index}", "run-2", number, upload_id(f"m{index}"), len(whole))
                for start in range(0, len(whole), 2**18):
                    store.append(f"m{index}", "run-2", number, upload_id(f"m{index}"), start, whole[start : start + 2**18])
        store.cancel("mallory", "run-2", number)
    store.cancel("aggregator", RUN, 1)
    assert b"alice" not in on_disk(small_disk / "relay.db")
    store.close()


@pytest.mark.parametrize("room", [3 * 2**20, 6 * 2**20])
def test_without_the_room_to_end_rounds_no_upload_is_taken_until_there_is(small_disk: Path, clock: Clock, room: int) -> None:
    fill(small_disk, "others", room)
    store = Store(open_engine(str(small_disk / "relay.db")), clock=clock)
    store.tidy()
    assert store.untidy  # so that it is tried again
    store.open_round("aggregator", RUN, 1, terms(min_clients=1))
    with pytest.raises(StoreFull):
        put(store, "alice")
    (small_disk / "others").unlink()
    put(store, "alice")
    assert not store.untidy
    store.cancel("aggregator", RUN, 1)
    store.close()


def test_a_store_in_a_folder_where_others_may_make_files_is_refused(tmp_path: Path) -> None:
    """SQLite would roll a journal beside it back into it, whoever made that."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="folder that other users can write to"):
        open_engine(str(shared / "relay.db"))
    with pytest.raises(ConfigError, match="folder that other users can write to"):  # also one that is there already
        open_engine(str(shared / "relay.db"))


@pytest.mark.slow
@pytest.mark.thorough
def test_postgres_lets_nobody_wait_for_long_nor_hold_a_round_for_ever(
    postgres: Postgres, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = postgres.new_store()
    store = Store(open_engine(place), clock=clock)
    store.open_round("aggregator", RUN, 1, terms(min_clients=1))
    with store.engine.connect() as connection:
        assert connection.scalar(text("SHOW lock_timeout")) == "5s"
        connection.rollback()
        assert connection.scalar(text("SHOW lock_timeout")) == "5s"  # whatever became of the transaction before
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"
        with monkeypatch.context() as patched:
            patched.setitem(session.SETTINGS, "lock_timeout", "500ms")
            hasty = Store(open_engine(place), clock=clock)
        connection.execute(text("LOCK TABLE ldpfl_relay.relay_rounds"))
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            hasty.begin("alice", RUN, 1, upload_id("alice"), terms().upload_bytes)
        assert time.monotonic() - began > 0.4
        hasty.close()
    store.begin("alice", RUN, 1, upload_id("alice"), terms().upload_bytes)
    store.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_uploads_that_never_pause_keep_nobody_on_postgres_from_a_round(postgres: Postgres, clock: Clock) -> None:
    """PostgreSQL lets new sharers of a row in before one who waits for it alone."""
    size, block = 2**27, 2**18
    store = Store(open_engine(postgres.new_store()), clock=clock)
    store.open_round("aggregator", RUN, 1, terms(record_bytes=1024, records_per_upload=size // 1024, min_clients=1, max_uploads=20))
    over = threading.Event()

    def upload(client: str) -> None:
        received = store.begin(client, RUN, 1, upload_id(client), size).received
        while received < size and not over.is_set():
            received = store.append(client, RUN, 1, upload_id(client), received, bytes(block)).received

    with ThreadPoolExecutor(14) as pool:
        others = [pool.submit(upload, f"c{index}") for index in range(14)]
        try:
            time.sleep(1.0)
            for index in range(3):
                store.begin(f"late{index}", RUN, 1, upload_id(f"late{index}"), size)
            assert not any(other.done() for other in others)
        finally:
            over.set()
    for other in others:
        other.result()
    store.close()


@pytest.mark.thorough
def test_postgres_keeps_no_samples_of_what_it_stored(postgres: Postgres, clock: Clock) -> None:
    """Its planner's statistics would outlive the rows: names, upload ids and short uploads."""
    store = Store(open_engine(postgres.new_store()), clock=clock)
    store.open_round("aggregator", RUN, 1, terms(min_clients=1))
    for client in ("alice", "bob"):
        put(store, client)
    with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("relay_uploads", "relay_blocks", "relay_parts", "relay_tokens"):
            connection.execute(text(f"ANALYZE ldpfl_relay.{table}"))
        found = connection.execute(text("SELECT tablename, attname FROM pg_stats WHERE tablename LIKE 'relay_%'")).all()
    assert [tuple(row) for row in found if row.tablename != "relay_rounds"] == []
    store.close()


def test_what_one_end_of_a_round_has_deleted_does_not_hide_what_another_could_not(
    sqlite_store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        sqlite_store.open_round("aggregator", RUN, number, terms(min_clients=1))
        put(sqlite_store, "alice", number)
    sqlite_store.tidy()
    scrub = GoneRounds._scrub

    def meanwhile(leftovers: GoneRounds, request: int) -> bool:
        monkeypatch.setattr(GoneRounds, "_scrub", scrub)
        with monkeypatch.context() as patched:  # another thread's call, which finds no room
            patched.setattr(GoneRounds, "_delete_batch", lambda *_: (_ for _ in ()).throw(StoreFull("no room")))
            with pytest.raises(StoreFull):
                sqlite_store.cancel("aggregator", RUN, 2)
        return scrub(leftovers, request)

    monkeypatch.setattr(GoneRounds, "_scrub", meanwhile)
    sqlite_store.cancel("aggregator", RUN, 1)
    assert sqlite_store.untidy
    sqlite_store.tidy()
    assert not sqlite_store.untidy
    assert b"alice" not in on_disk(Path(str(sqlite_store.engine.url.database)))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("CREATE TRIGGER keep AFTER INSERT ON relay_uploads BEGIN SELECT 1; END", "its trigger keep is not the relay's"),
        ("CREATE VIEW names AS SELECT client FROM relay_uploads", "its view names is not"),
        ("CREATE TABLE names (client)", "its table names is not"),
        ("CREATE INDEX names ON relay_uploads (client)", "its index names is not"),
        ("ALTER TABLE relay_uploads ADD arrived DEFAULT 0", "its table relay_uploads is not"),
        ("DROP INDEX relay_rounds_of_owner", "it has no index relay_rounds_of_owner"),
    ],
)
def test_a_sqlite_file_that_somebody_has_prepared_is_refused(tmp_path: Path, command: str, named: str) -> None:
    open_engine(str(tmp_path / "relay.db")).dispose()
    with closing(sqlite3.connect(tmp_path / "relay.db")) as other:
        other.execute(command)
        other.commit()
    with pytest.raises(ConfigError, match=f"is not as the relay makes it: {named}.* an empty store"):
        open_engine(str(tmp_path / "relay.db"))


def test_a_sqlite_store_is_private_durable_and_overwrites_what_it_deletes(tmp_path: Path) -> None:
    store = Store(open_engine(str(tmp_path / "relay.db")))
    opened(store)
    for path in tmp_path.glob("relay.db*"):
        assert path.stat().st_mode & 0o077 == 0, path
    with store.engine.connect() as connection:
        values = [connection.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous", "secure_delete", "foreign_keys")]
    assert values == ["delete", 3, 1, 1]
    store.close()
