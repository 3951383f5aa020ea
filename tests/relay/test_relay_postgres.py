"""A PostgreSQL store: the way to it, the settings that the relay makes, tables that others have made, and connections that hang."""

from __future__ import annotations

import json
import select as polling
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from relay_support import (
    RUN,
    Clock,
    Postgres,
    blob,
    certificate,
    opened,
    postgres_programs,
    pull,
    put,
    records,
    relay_process,
    terms,
    upload_id,
)
from sqlalchemy import Connection, create_engine, text

from ldpfl import ConfigError
from ldpfl.relay import database as database_module, postgres_connections as module, serve, session
from ldpfl.relay.database import open_engine, warn_of_log_copies
from ldpfl.relay.errors import StoreUnavailable, UnfitStore
from ldpfl.relay.protocol import BLOCK_BYTES
from ldpfl.relay.schema_and_rights import check_schema
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens

pytest_plugins = ["relay_fixtures"]


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE", "PGSERVICEFILE", "PGSSLROOTCERT", "PGOPTIONS", "PGPORT"):
        monkeypatch.delenv(name, raising=False)


AWAY = "192.0.2.7"  # an address that nobody has


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        (f"postgresql://relay:hunter2@{AWAY}/relay", {}),
        (f"postgresql://relay:hunter2@{AWAY}/relay?sslmode=require", {}),
        (f"postgresql://relay:hunter2@{AWAY}/relay?sslmode=verify-ca", {}),
        ("postgresql://relay:hunter2@db.invalid/relay", {}),
        (f"postgresql://relay:hunter2@/relay?host={AWAY}", {}),
        (f"postgresql://relay:hunter2@localhost/relay?hostaddr={AWAY}", {}),
        (f"postgresql://relay:hunter2@localhost,{AWAY}/relay", {}),
        (f"postgresql://relay:hunter2@/relay?host=/run&host={AWAY}", {}),
        ("postgresql://relay:hunter2@/relay", {"PGHOST": AWAY}),
        ("postgresql://relay:hunter2@localhost/relay", {"PGHOSTADDR": AWAY}),
        (f"postgresql://relay:hunter2@{AWAY}/relay", {"PGSSLMODE": "prefer"}),
        (f"postgresql://relay:hunter2@{AWAY}/relay?sslmode=prefer", {"PGSSLMODE": "verify-full"}),
        ("postgresql://relay:hunter2@/relay", {"PGSERVICE": "far"}),
        ("postgresql://relay:hunter2@/relay?service=far", {}),
    ],
)
def test_elsewhere_than_on_this_machine_a_database_is_reached_with_tls_and_its_name_verified(
    url: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided as libpq reads the URL, the environment and service files, and before anything is sent."""
    (tmp_path / "services").write_text(f"[far]\nhost={AWAY}\nsslmode=require\n")
    for name, value in {"PGSERVICEFILE": str(tmp_path / "services"), **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnfitStore, match=r"over the network .* sslmode=verify-full is needed: add \?sslmode=verify-full") as caught:
        open_engine(url)
    assert "hunter2" not in str(caught.value)


def test_on_this_machine_or_verified_a_database_may_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "services").write_text(f"[far]\nhost={AWAY}\nsslmode=verify-full\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    for url in (
        f"postgresql://relay@{AWAY}/relay?sslmode=verify-full",
        "postgresql://relay@/relay?service=far",
        "postgresql://relay@/relay",
        "postgresql://relay@localhost/relay",
        "postgresql://relay@[::1],127.0.0.5/relay",
        "postgresql://relay@/relay?host=/run/postgresql",
    ):
        module.check_not_readable_on_network(module.connection_parameters(url))
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    module.check_not_readable_on_network(module.connection_parameters(f"postgresql://relay@{AWAY}/relay"))


@pytest.mark.parametrize(
    "url", ["postgresql://relay@/db?service=none", "postgresql://relay@/db?passwort=hunter2", "postgresql://[", "postgres://x"]
)
def test_a_url_that_libpq_does_not_read_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://user@host/database") as caught:
        open_engine(url)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def as_if_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take loopback for a network."""
    monkeypatch.setattr(module, "is_loopback", lambda host: False)


@pytest.mark.slow
@pytest.mark.usefixtures("as_if_away")
def test_a_database_whose_certificate_is_verified_is_used(postgres: Postgres, tmp_path: Path) -> None:
    place = postgres.url(postgres.new_database(), host="127.0.0.1", more="&sslmode=verify-full")
    engine = open_engine(f"{place}&sslrootcert={postgres.authority}")
    with engine.connect() as connection:
        assert connection.connection.driver_connection.pgconn.ssl_in_use  # type: ignore[union-attr]
    engine.dispose()
    with pytest.raises(ConfigError, match=r"cannot be opened, because its server cannot be reached by TLS: .* sslrootcert names"):
        open_engine(f"{place}&sslrootcert={certificate(tmp_path).certificate}")


@pytest.mark.usefixtures("as_if_away")
def test_what_the_connection_really_is_counts_whatever_it_was_to_be(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_not_readable_on_network", lambda found: None)
    place = postgres.url(postgres.new_database(), host="127.0.0.1")
    for mode in ("disable", "require"):
        with pytest.raises(
            UnfitStore, match=rf"leads to 127.0.0.1 and is not both encrypted and verified \(sslmode={mode}\): add .sslmode=verify-full"
        ):
            open_engine(f"{place}&sslmode={mode}")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_relay_makes_its_settings_whatever_those_of_role_and_database_are(postgres: Postgres, clock: Clock) -> None:
    database = postgres.new_database()
    postgres.command(
        f"CREATE ROLE {database} LOGIN",
        f"GRANT CREATE ON DATABASE {database} TO {database}",
        f"ALTER DATABASE {database} SET default_transaction_isolation TO 'repeatable read'",
        f"ALTER DATABASE {database} SET default_transaction_read_only TO on",
        f"ALTER ROLE {database} SET synchronous_commit TO off",
        f"ALTER ROLE {database} SET search_path TO public",
        f"ALTER ROLE {database} SET client_min_messages TO error",
        f"ALTER ROLE {database} SET statement_timeout TO 1",
        f"ALTER ROLE {database} SET lock_timeout TO 0",
        f"ALTER ROLE {database} SET idle_in_transaction_session_timeout TO 0",
        f"ALTER ROLE {database} SET extra_float_digits TO -15",
        f"ALTER ROLE {database} SET quote_all_identifiers TO on",
        f"ALTER ROLE {database} SET default_tablespace TO pg_global",
        f"ALTER ROLE {database} SET log_parameter_max_length_on_error TO -1",
        *(f"ALTER ROLE {database} SET debug_print_{what} TO on" for what in ("parse", "rewritten", "plan")),
    )
    store = Store(open_engine(postgres.url(database, user=database)), clock=clock)
    for isolation in (None, "AUTOCOMMIT", None):  # also after a connection was lent otherwise
        options = {"isolation_level": isolation} if isolation else {}
        with store.engine.connect().execution_options(**options) as connection:
            shown = {name: connection.scalar(text(f"SHOW {name}")) for name in ("transaction_isolation", *SETTINGS)}
        assert {name: shown[name] for name in SETTINGS} == SETTINGS
        assert shown["transaction_isolation"] == "read committed"
    opened(store, min_clients=1)
    put(store, "alice")
    clock.now += 100
    assert records(pull(store)) == records(blob("alice"))
    assert store.open_round("aggregator", RUN, 2, terms(closes_in_s=123.456789)).terms.closes_in_s == 123.456789
    store.close()


SETTINGS = {
    "search_path": "pg_catalog, pg_temp",
    "transaction_read_only": "off",
    "synchronous_commit": "on",
    "session_replication_role": "origin",
    "zero_damaged_pages": "off",
    "ignore_checksum_failure": "off",
    "row_security": "off",
    "quote_all_identifiers": "off",
    "default_tablespace": "",
    "log_parameter_max_length_on_error": "0",
    "debug_print_parse": "off",
    "debug_print_rewritten": "off",
    "debug_print_plan": "off",
    "client_min_messages": "notice",
    "lock_timeout": "5s",
    "statement_timeout": "1min",
    "idle_in_transaction_session_timeout": "1min",
}


@pytest.mark.parametrize(
    ("setting", "value", "needed"), [("session_replication_role", "replica", "origin"), ("zero_damaged_pages", "on", "off")]
)
def test_a_setting_that_the_relay_may_not_make_is_refused(setting: str, value: str, needed: str, postgres: Postgres) -> None:
    database = postgres.new_database()
    postgres.command(f"ALTER DATABASE {database} SET {setting} TO {value}")
    with pytest.raises(UnfitStore, match=f"{setting} = '{value}'.*needs '{needed}': reset it"):
        open_engine(postgres.url(database))


@pytest.mark.thorough_except("DATABASE")
@pytest.mark.parametrize("of", ["ROLE", "DATABASE"])
def test_the_relay_acts_as_the_role_that_it_connects_as(of: str, postgres: Postgres) -> None:
    database = postgres.new_database()
    other = f"{database}_other"
    postgres.command(
        f"CREATE ROLE {database} LOGIN",
        f"CREATE ROLE {other}",
        f"GRANT {other} TO {database}",
        f"GRANT CREATE ON DATABASE {database} TO {database}, {other}",
        f"ALTER {of} {database} SET role TO {other}",
    )
    engine = open_engine(postgres.url(database, user=database))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT session_user, current_user")).one() == (database, database)
    engine.dispose()


@pytest.mark.thorough_except("BYPASSRLS")
@pytest.mark.parametrize("right", ["SUPERUSER", "REPLICATION", "BYPASSRLS"])
def test_a_role_with_more_rights_than_the_relay_needs_is_refused(right: str, postgres: Postgres) -> None:
    database = postgres.new_database()
    member = f"{database}_member"
    postgres.command(f"CREATE ROLE {database} LOGIN {right}", f"CREATE ROLE {member} LOGIN", f"GRANT {database} TO {member}")
    with pytest.raises(UnfitStore, match=rf"as {database}, which has {right}: give the relay a separate role.*CREATE ROLE relay LOGIN"):
        open_engine(postgres.url(database, user=database))
    with pytest.raises(UnfitStore, match=rf"as {member}, which may act as {database}, which has {right}: give the relay a separate role"):
        open_engine(postgres.url(database, user=member))
    postgres.command(f"DROP ROLE {database}")  # which other relays on the server would refuse


@pytest.mark.thorough_except("log_statement TO 'mod'-log_parameter_max_length = '0'")
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("log_statement TO 'all'", "log_parameter_max_length = '0'"),
        ("log_statement TO 'mod'", "log_parameter_max_length = '0'"),
        ("log_min_duration_statement TO 1000", "log_parameter_max_length = '0'"),
        ("log_min_duration_sample TO 0", "log_parameter_max_length = '0'"),
        ("log_transaction_sample_rate TO 0.1", "log_parameter_max_length = '0'"),
        ("auto_explain.log_min_duration TO 0", "auto_explain.log_min_duration = '-1'"),
        ("pgaudit.log_parameter TO on", "pgaudit.log_parameter = 'off'"),
    ],
)
def test_a_server_whose_log_would_hold_what_is_sent_is_refused(setting: str, remedy: str, postgres: Postgres) -> None:
    database = postgres.new_database()
    postgres.command(f"CREATE ROLE {database} LOGIN", f"ALTER ROLE {database} SET {setting}")
    postgres.command(f"GRANT CREATE ON DATABASE {database} TO {database}")
    say = f'ALTER ROLE "{database}" SET {remedy}'
    with pytest.raises(UnfitStore, match=f"log of the store's server would hold clients' names and reports.* {say}"):
        open_engine(postgres.url(database, user=database))
    postgres.command(say)
    open_engine(postgres.url(database, user=database)).dispose()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("track_commit_timestamp", "on", "= on, so it stores when each row came: set track_commit_timestamp = off"),
        ("fsync", "off", "= off, so after a crash of its machine a round that was released may be open again: set fsync = on"),
        ("full_page_writes", "off", "= off, so a crash of its machine may damage the store: set full_page_writes = on"),
        ("max_prepared_transactions", "2", r"FROM pg_prepared_xacts.*ROLLBACK PREPARED 'GID'.*, then set max_prepared_transactions = 0"),
    ],
)
def test_a_server_that_was_started_with_a_setting_that_harms_the_relay_is_refused(setting: str, value: str, expected: str) -> None:
    """A prepared transaction keeps its locks although nobody is connected, so nobody would be named as their holder."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server = Postgres(programs, **{setting: value})
    try:
        with pytest.raises(UnfitStore, match=expected):
            open_engine(server.new_store())
    finally:
        server.stop()


@pytest.mark.thorough_except('ALTER ROLE {} CONNECTION LIMIT 0-too many connections for role "{}"')
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("ALTER ROLE {} CONNECTION LIMIT 0", 'too many connections for role "{}"'),
        ("ALTER ROLE {} NOLOGIN", 'role "{}" is not permitted to log in'),
        ("REVOKE CONNECT ON DATABASE {} FROM PUBLIC", 'permission denied for database "{}"'),
    ],
)
def test_why_the_server_takes_no_connection_is_said(command: str, reason: str, postgres: Postgres) -> None:
    database = postgres.new_database()
    postgres.command(f"CREATE ROLE {database} LOGIN PASSWORD 'hunter2'", command.format(database))
    url = postgres.url(database, user=f"{database}:hunter2")
    with pytest.raises(ConfigError, match=f"cannot be opened: PostgreSQL answers .{reason.format(database)}") as caught:
        open_engine(url)
    assert "hunter2" not in str(caught.value)


def test_what_the_driver_says_of_a_url_is_not_repeated() -> None:
    """Only a server's own words are, and here is no server."""
    with pytest.raises(ConfigError, match=r"cannot be opened \(OperationalError\): check the path or URL, and that its server runs"):
        open_engine("postgresql://relay@/relay?host=/nowhere:%20%20at%20all")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_lock_that_another_role_holds_is_waited_for_for_a_while_and_named(
    postgres: Postgres, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(session.SETTINGS, "lock_timeout", "300ms")
    database = postgres.new_database()
    mallory = f"{database}_mallory"
    postgres.command(f"CREATE ROLE {mallory} LOGIN")
    locking = create_engine(postgres.url(database, user=mallory).replace("postgresql", "postgresql+psycopg", 1))
    with locking.connect() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({database_module._ADVISORY_LOCK})"))
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"is locked by another connection to its database: .*pg_locks.*REVOKE CONNECT"):
            open_engine(postgres.url(database))
        connection.rollback()
        store = Store(open_engine(postgres.url(database)), clock=clock)
        opened(store)
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:what, 0))"), {"what": f"round 1 of {RUN}"})
        with pytest.raises(StoreUnavailable, match="store is locked, by a round that is being mixed or by another user"):
            store.begin("alice", RUN, 1, upload_id("alice"), terms().upload_bytes)
        assert time.monotonic() - began < 30
    locking.dispose()
    put(store, "alice")
    store.close()


@pytest.mark.slow
def test_a_database_that_turns_unfit_later_is_unavailable(postgres: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    database = postgres.new_database()
    store = Store(open_engine(postgres.url(database)))
    store.engine.dispose()
    postgres.command(f"ALTER DATABASE {database} SET session_replication_role TO replica")
    with pytest.raises(StoreUnavailable):
        store.check()
    assert "store_unfit" in caplog.text
    store.close()


@pytest.mark.slow
def test_an_outage_is_logged_once_at_its_beginning_and_once_at_its_end(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = postgres.new_database()
    store = Store(open_engine(postgres.url(database)))
    tries: list[bool] = []  # whether the store answered, for each try of the relay's thread
    ask = store.end_hung_connections

    def ask_and_count() -> None:
        ask()
        tries.append(store.is_available)

    monkeypatch.setattr(store, "end_hung_connections", ask_and_count)
    monkeypatch.setattr(Store, "untidy", True)  # deletions are due, which need the store as well
    monkeypatch.setattr(serve, "_TIDY_S", 0.01)
    with serve._periodic_tidying(store):
        for _ in range(2):
            until(lambda: tries[-1:] == [True])
            postgres.command(
                f"ALTER DATABASE {database} ALLOW_CONNECTIONS false",
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'",
            )
            until(lambda: tries[-3:] == [False] * 3)
            postgres.command(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        until(lambda: tries[-1])
    logged = [json.loads(record.getMessage()) for record in caplog.records if record.levelname == "ERROR"]
    outage = [entry for entry in logged if entry["event"] in ("store_unavailable", "store_available")]
    assert [entry["event"] for entry in outage] == ["store_unavailable", "store_available"] * 2
    assert outage[0]["error"] == "OperationalError"
    # An outage that begins while the thread deletes lets this deletion fail, and no later one.
    assert sum(entry["event"] in ("tidy_failed", "scrub_failed", "hung_not_ended") for entry in logged) <= 2
    store.close()


@pytest.fixture(scope="module")
def copying() -> Iterator[Postgres]:
    """A server that allows logical replication."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server = Postgres(programs, wal_level="logical")
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_slot_that_decodes_the_rows_is_refused_at_each_connection_until_it_is_dropped(
    copying: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    database = copying.new_database()
    store = Store(open_engine(copying.url(database)))  # what others decode in their databases does not matter
    copying.command("SELECT pg_create_logical_replication_slot('cdc', 'test_decoding')", database=database)
    store.engine.dispose()
    with pytest.raises(StoreUnavailable):
        store.check()
    assert "store_unfit" in caplog.text
    with pytest.raises(UnfitStore, match="slot cdc of the store's database keeps clients' names and reports") as caught:
        open_engine(copying.url(database))
    remedy = str(caught.value).split("superuser, ")[1].split(", or")[0]
    assert remedy == "SELECT pg_drop_replication_slot('cdc')"
    open_engine(copying.url(copying.new_database())).dispose()  # the slot decodes one database only
    copying.command(remedy, database=database)
    store.check()
    store.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_an_operator_is_told_of_slots_and_receivers_that_keep_the_write_ahead_log(
    copying: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(copying.new_store())
    warn_of_log_copies(engine)
    assert not caplog.records
    copying.command("SELECT pg_create_logical_replication_slot('others', 'test_decoding')")
    copying.command("SELECT pg_create_physical_replication_slot('standby', true)")
    warn_of_log_copies(engine)
    copying.command(*(f"SELECT pg_drop_replication_slot('{slot}')" for slot in ("others", "standby")))
    with receiving(copying):
        warn_of_log_copies(engine)
    engine.dispose()
    slots, receiver = (json.loads(record.getMessage()) for record in caplog.records)
    assert slots == {"event": "store_log_is_copied", "archive_mode": "off", "slots": "others, standby", "receivers": 0}
    assert receiver == {"event": "store_log_is_copied", "archive_mode": "off", "slots": "", "receivers": 1}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_relay_that_may_not_see_who_copies_the_log_says_so(copying: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    database = copying.new_database()
    engine = open_engine(copying.url(database))
    copying.command("REVOKE SELECT ON pg_catalog.pg_stat_replication FROM PUBLIC", database=database)
    warn_of_log_copies(engine)
    engine.dispose()
    (event,) = (json.loads(record.getMessage()) for record in caplog.records)
    assert event["receivers"] == "unknown"
    copying.command("REVOKE SELECT ON pg_catalog.pg_replication_slots FROM PUBLIC", database=database)
    with pytest.raises(UnfitStore, match=r"may not see the replication slots.*GRANT SELECT ON pg_catalog\.pg_replication_slots TO"):
        open_engine(copying.url(database))


@contextmanager
def receiving(server: Postgres) -> Iterator[None]:
    """Receive the server's write-ahead log without a slot, as a standby may."""
    program = server.programs / "pg_receivewal"
    command: list[str | Path] = [program, "--no-loop", "-D", server.folder, "-h", server.folder, "-p", str(server.port), "-U", "admin"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as receiver:
        try:
            until(lambda: server.command("SELECT count(*) FROM pg_stat_replication") == "1\n")
            yield
        finally:
            receiver.kill()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["on", "off"])
def test_an_archive_of_the_write_ahead_log_is_in_the_relays_log_at_its_start(mode: str, tmp_path: Path) -> None:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server, log = Postgres(programs, archive_mode=mode, archive_command="true"), tmp_path / "log"
    try:
        with relay_process(server.new_store(), log) as (relay, _):
            relay.terminate()
            relay.join(30)
    finally:
        server.stop()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [{"event": "store_log_is_copied", "archive_mode": "on", "slots": "", "receivers": 0}] if mode == "on" else []
    assert [event for event in events if event["event"] != "listening"] == expected


@pytest.mark.slow
def test_the_relay_needs_no_more_than_a_schema_of_its_own(postgres: Postgres, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    database = postgres.new_database()
    place = postgres.url(database, user=database)
    postgres.command(
        f"CREATE ROLE {database} LOGIN",
        f"ALTER ROLE {database} SET log_parameter_max_length = 0",
        f"REVOKE CONNECT, TEMPORARY ON DATABASE {database} FROM PUBLIC",
        f"GRANT CONNECT ON DATABASE {database} TO {database}",
    )
    with pytest.raises(ConfigError, match="CREATE SCHEMA ldpfl_relay AUTHORIZATION"):
        open_engine(place)
    postgres.command(f"CREATE SCHEMA ldpfl_relay AUTHORIZATION {database}", database=database)
    store = Store(open_engine(place), clock=clock)
    opened(store, min_clients=1)
    put(store, "alice")
    clock.now += 100
    assert records(pull(store)) == records(blob("alice"))
    store.acknowledge("aggregator", RUN, 1)
    store.end_hung_connections()
    assert not store.untidy
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    store.close()


@pytest.mark.slow
@pytest.mark.thorough_except("schema")
@pytest.mark.parametrize("prepared", ["schema", "grant"])
def test_tables_that_another_role_made_first_are_refused(postgres: Postgres, prepared: str) -> None:
    """With a trigger that would keep who sent what."""
    database = postgres.new_database()
    mallory = f"{database}_mallory"
    postgres.command(f"CREATE ROLE {database} LOGIN", f"CREATE ROLE {mallory} LOGIN", f"GRANT CREATE ON DATABASE {database} TO {mallory}")
    make = "CREATE SCHEMA ldpfl_relay"
    if prepared == "grant":
        postgres.command(f"CREATE SCHEMA ldpfl_relay AUTHORIZATION {database}", database=database)
        make = "SELECT"
        postgres.command(f"GRANT CREATE, USAGE ON SCHEMA ldpfl_relay TO {mallory}", database=database)
    postgres.command(
        make, "CREATE TABLE ldpfl_relay.relay_uploads (client text)", f"GRANT ALL ON ldpfl_relay.relay_uploads TO {database}",
        database=database, user=mallory,
    )  # fmt: skip
    if prepared == "schema":
        postgres.command(f"GRANT ALL ON SCHEMA ldpfl_relay TO {database}", database=database, user=mallory)
    with pytest.raises(UnfitStore, match=rf"belongs to {mallory}|others have rights in the schema"):
        open_engine(postgres.url(database, user=database))


GRANT_ON_LONG_VALUES = (
    "DO $$ BEGIN EXECUTE (SELECT 'GRANT {} ON ' || CAST(reltoastrelid AS regclass) || ' TO mallory' FROM pg_class "
    "WHERE relname = 'relay_blocks'); END $$"
)

HOSTILE = {
    "belongs to mallory": ["ALTER TABLE relay_uploads OWNER TO mallory"],
    "the schema ldpfl_relay belongs to mallory": ["ALTER SCHEMA ldpfl_relay OWNER TO mallory"],
    "rights in the schema": ["GRANT USAGE ON SCHEMA ldpfl_relay TO mallory"],
    "rights in relay_uploads": ["GRANT SELECT ON relay_uploads TO PUBLIC"],
    "rights in pg_toast_": ["GRANT USAGE ON SCHEMA pg_toast TO mallory", GRANT_ON_LONG_VALUES.format("SELECT")],
    "rights in a column of pg_toast_": [GRANT_ON_LONG_VALUES.format("SELECT (chunk_data)")],
    "rights in a column of relay_uploads": ["GRANT SELECT (client) ON relay_uploads TO mallory"],
    "mallory is a member": ["GRANT relay TO mallory"],
    "mallory may use": ["GRANT pg_read_all_data TO mallory"],
    "lets others act": ["SET LOCAL ROLE relay", "CREATE FUNCTION public.act() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'"],
    "event trigger": [
        "CREATE FUNCTION public.hook() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
        "CREATE EVENT TRIGGER hook ON ddl_command_end EXECUTE FUNCTION public.hook()",
    ],
    "default privileges.* depends on schema ldpfl_relay": [
        "ALTER DEFAULT PRIVILEGES IN SCHEMA ldpfl_relay GRANT SELECT ON TABLES TO mallory"
    ],
    "function .* depends on schema ldpfl_relay": ["CREATE FUNCTION length(uuid) RETURNS int LANGUAGE sql AS 'SELECT 1'"],
    "the column .*others": ["SET LOCAL ROLE relay", "CREATE TABLE others (client text)"],
    "view .*names depends on schema ldpfl_relay": ["CREATE VIEW names AS SELECT 1"],
    "relay_parts.* is not an ordinary table": ["ALTER TABLE relay_parts SET UNLOGGED"],
    "row security": ["ALTER TABLE relay_uploads ENABLE ROW LEVEL SECURITY"],
    "policy few .* depends on table": ["CREATE POLICY few ON relay_uploads USING (false)"],
    "table public.child depends on": ["CREATE TABLE public.child () INHERITS (relay_uploads)"],
    "trigger names on table .* depends on table .*relay_uploads": [
        "CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "CREATE TRIGGER names BEFORE INSERT ON relay_uploads EXECUTE FUNCTION public.keep()",
    ],
    "is switched off": ["ALTER TABLE relay_uploads DISABLE TRIGGER ALL"],
    "rule names on table .* depends on table .*relay_uploads": ["CREATE RULE names AS ON INSERT TO relay_uploads DO ALSO SELECT 1"],
    "rule .* on view public.names depends on column client of table": ["CREATE VIEW public.names AS SELECT client FROM relay_uploads"],
    "statistics object public.samples depends on": ["CREATE STATISTICS public.samples ON client, upload_id FROM relay_uploads"],
    "the publication copies": ["CREATE PUBLICATION copies FOR ALL TABLES"],
    "publication of table .*relay_uploads in publication one depends on": ["CREATE PUBLICATION one FOR TABLE relay_uploads"],
    "publication of schema ldpfl_relay in publication all_of_it": ["CREATE PUBLICATION all_of_it FOR TABLES IN SCHEMA ldpfl_relay"],
    "constraint follows on table public.follower depends on": [
        "CREATE TABLE public.follower (upload bigint, CONSTRAINT follows FOREIGN KEY (upload) REFERENCES relay_uploads ON DELETE CASCADE)"
    ],
    "constraint asks on table public.asking depends on": [
        "CREATE TABLE public.asking (round bigint, client varchar(64), "
        "CONSTRAINT asks FOREIGN KEY (round, client) REFERENCES relay_uploads (round_id, client))"
    ],
    "trigger waits on table public.waiting depends on table .*relay_uploads": [
        "CREATE TABLE public.waiting ()",
        "CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON public.waiting FROM relay_uploads FOR EACH ROW EXECUTE FUNCTION public.keep()",
    ],
    "function public.names.* depends on column client of table": [
        "CREATE FUNCTION public.names() RETURNS SETOF varchar LANGUAGE sql BEGIN ATOMIC SELECT client FROM relay_uploads; END"
    ],
    "default value for column id of table public.counted depends on sequence": [
        "CREATE TABLE public.counted (id bigint DEFAULT nextval('relay_uploads_id_seq'))"
    ],
    "column row of table public.rows depends on type": ["CREATE TABLE public.rows (row relay_uploads)"],
    "the sequence .*2, 1, True": ["ALTER SEQUENCE relay_uploads_id_seq MAXVALUE 2 CYCLE"],
    "the sequence .*relay_uploads_id_seq', ''": ["ALTER SEQUENCE relay_uploads_id_seq OWNED BY NONE"],
    "the sequence .*'more'": ["SET LOCAL ROLE relay", "CREATE SEQUENCE more"],
    "relay_uploads has another replica identity": ["ALTER TABLE relay_uploads REPLICA IDENTITY FULL"],
    "mallory may reach the rows as pg_read_all_data": ["ALTER ROLE mallory LOGIN NOINHERIT", "GRANT pg_read_all_data TO mallory"],
    "mallory may reach the rows as pg_write_all_data": ["ALTER ROLE mallory LOGIN NOINHERIT", "GRANT pg_write_all_data TO mallory"],
    "mallory may reach the rows as pg_execute_server_program": ["ALTER ROLE mallory LOGIN", "GRANT pg_execute_server_program TO mallory"],
    "mallory may reach the rows as pg_read_server_files": [
        "ALTER ROLE mallory LOGIN",
        "CREATE ROLE files NOINHERIT",
        "GRANT pg_read_server_files TO files",
        "GRANT files TO mallory",
    ],
    "mallory may reach the rows as pg_write_server_files": ["ALTER ROLE mallory LOGIN", "GRANT pg_write_server_files TO mallory"],
    "mallory may reach the rows as mallory, which has REPLICATION": ["ALTER ROLE mallory LOGIN REPLICATION"],
    "mallory may reach the rows as copying, which has REPLICATION": [
        "ALTER ROLE mallory LOGIN",
        "CREATE ROLE copying REPLICATION",
        "GRANT copying TO mallory",
    ],
    "mallory may reach the rows as boss, which is a superuser": ["CREATE ROLE boss SUPERUSER NOLOGIN", "GRANT boss TO mallory"],
    "serving may reach the rows as pg_execute_server_program": [
        "CREATE ROLE serving NOLOGIN",
        "GRANT pg_execute_server_program TO serving",
        "CREATE FUNCTION public.read() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'",
        "ALTER FUNCTION public.read() OWNER TO serving",
    ],
    "copying may reach the rows as copying, which has REPLICATION": ["CREATE ROLE copying NOLOGIN REPLICATION"],
    "pg_monitor may reach the rows as pg_read_server_files": ["GRANT pg_read_server_files TO pg_monitor"],
    r"mallory may call .*: REVOKE EXECUTE ON FUNCTION pg_read_binary_file\(text\) FROM mallory\.": [
        "GRANT EXECUTE ON FUNCTION pg_read_binary_file(text) TO mallory"
    ],
    r"PUBLIC may call .*: REVOKE EXECUTE ON FUNCTION lo_import\(text\) FROM PUBLIC": [
        "GRANT EXECUTE ON FUNCTION lo_import(text) TO PUBLIC"
    ],
    r"PUBLIC may call .*: REVOKE EXECUTE ON FUNCTION pg_read_binary_file\(text\) FROM PUBLIC": [  # NULL stands for the default rights
        "UPDATE pg_proc SET proacl = NULL WHERE oid = 'pg_read_binary_file(text)'::regprocedure"
    ],
    r"pg_monitor may call .* pg_read_file\(text\) FROM pg_monitor": ["GRANT EXECUTE ON FUNCTION pg_read_file(text) TO pg_monitor"],
    r"mallory may call .* pg_stat_reset\(\) FROM mallory": ["ALTER FUNCTION pg_stat_reset() OWNER TO mallory"],
    r"mallory may call .* pg_stat_reset_slru\(text\) FROM mallory": [  # what a name says is not what runs
        "UPDATE pg_proc SET prosrc = 'pg_read_file_all' WHERE proname = 'pg_stat_reset_slru'",
        "GRANT EXECUTE ON FUNCTION pg_stat_reset_slru(text) TO mallory",
    ],
    r"mallory may call .* pg_stat_file\(text\) FROM mallory": ["ALTER FUNCTION pg_stat_file(text) OWNER TO mallory"],
    r"mallory may call .* public.dblink_connect_u\(text\) FROM mallory": [
        "CREATE EXTENSION dblink SCHEMA public",
        "GRANT EXECUTE ON FUNCTION public.dblink_connect_u(text) TO mallory",
    ],
    r"mallory may call .* public.pg_buffercache_pages\(\) FROM mallory": [
        "CREATE EXTENSION pg_buffercache SCHEMA public",
        "GRANT EXECUTE ON FUNCTION public.pg_buffercache_pages() TO mallory",
        # As an update of the extension would list it that grants something else.
        "UPDATE pg_init_privs SET initprivs = proacl FROM pg_proc WHERE pg_proc.oid = objoid AND proname = 'pg_buffercache_pages'",
    ],
    "mallory may change .*: REVOKE ALTER SYSTEM ON PARAMETER archive_command FROM mallory": [
        "GRANT ALTER SYSTEM ON PARAMETER archive_command TO mallory"
    ],
    "mallory may change .*: REVOKE SET ON PARAMETER session_preload_libraries FROM mallory": [
        "GRANT SET ON PARAMETER session_preload_libraries TO mallory"
    ],
    "REVOKE SET ON PARAMETER pljava.libjvm_location FROM mallory": ["GRANT SET ON PARAMETER pljava.libjvm_location TO mallory"],
    "functions in the language cx run as the server": [
        "INSERT INTO pg_language SELECT 90001, 'cx', lanowner, lanispl, true, 0, 0, 0, NULL FROM pg_language WHERE lanname = 'c'"
    ],
    "mallory has a user mapping.*: DROP USER MAPPING FOR mallory SERVER loop": [
        "CREATE EXTENSION postgres_fdw SCHEMA public",
        "CREATE SERVER loop FOREIGN DATA WRAPPER postgres_fdw",
        "CREATE USER MAPPING FOR mallory SERVER loop OPTIONS (user 'relay', password_required 'false')",
    ],
    r"mallory may call .*: REVOKE EXECUTE ON FUNCTION public.f\(text\) FROM mallory": [
        "CREATE FUNCTION public.f(text) RETURNS text LANGUAGE internal AS 'pg_read_file_all'",
        "REVOKE ALL ON FUNCTION public.f(text) FROM PUBLIC",
        "GRANT EXECUTE ON FUNCTION public.f(text) TO mallory",
    ],
    "functions in the language c run as the server": ["UPDATE pg_language SET lanpltrusted = true WHERE lanname = 'c'"],
    "storage parameters: {fillfactor=50}": ["ALTER TABLE relay_uploads SET (fillfactor = 50)"],
    "relay_uploads_pkey has storage parameters": ["ALTER INDEX relay_uploads_pkey SET (fillfactor = 50)"],
    "pg_toast_.* has storage parameters": ["ALTER TABLE relay_blocks SET (toast.vacuum_truncate = false)"],
    "a column of relay_uploads has options": ["ALTER TABLE relay_uploads ALTER client SET (n_distinct = 5)"],
    "lies in another tablespace": ["ALTER TABLE relay_parts SET TABLESPACE elsewhere"],
    "relay_uploads is written to by a subscription": [
        "CREATE SUBSCRIPTION incoming CONNECTION 'dbname=none' PUBLICATION one WITH (connect = false)",
        "INSERT INTO pg_subscription_rel SELECT oid, CAST('relay_uploads' AS regclass), 'i', NULL FROM pg_subscription",
    ],
    "the constraint .*'public.relay_rounds'": [
        "CREATE TABLE public.relay_rounds (id bigint PRIMARY KEY)",
        "ALTER TABLE relay_uploads DROP CONSTRAINT relay_uploads_round_id_fkey",
        "ALTER TABLE relay_uploads ADD FOREIGN KEY (round_id) REFERENCES public.relay_rounds",
    ],
    "the constraint .*'ldpfl_relay.relay_rounds', 'id'": ["ALTER TABLE relay_uploads ADD FOREIGN KEY (round_id) REFERENCES relay_rounds"],
    "the constraint .*'relay_uploads', 'f'": [
        "ALTER TABLE relay_uploads DROP CONSTRAINT relay_uploads_round_id_fkey",
        "ALTER TABLE relay_uploads ADD FOREIGN KEY (round_id) REFERENCES relay_rounds MATCH FULL",
    ],
    "the index .*'client', True": ["CREATE UNIQUE INDEX twice ON relay_uploads (round_id, client)"],
    "including is not an ordinary index": ["CREATE UNIQUE INDEX including ON relay_uploads (round_id) INCLUDE (client)"],
    "relay_rounds_of_owner is not an ordinary index": [
        "DROP INDEX relay_rounds_of_owner",
        "CREATE INDEX relay_rounds_of_owner ON relay_rounds (owner varchar_pattern_ops, state)",
    ],
    "by_c is not an ordinary index": ['CREATE INDEX by_c ON relay_rounds (owner COLLATE "C", state)'],
    "backwards is not an ordinary index": ["CREATE INDEX backwards ON relay_rounds (owner DESC, state)"],
    "is not an ordinary index": ["CREATE INDEX lower_client ON relay_uploads (lower(client))"],
    "open is not an ordinary index": ["CREATE INDEX open ON relay_uploads (client) WHERE received > 0"],
    "the index .*'client', False": ["CREATE INDEX by_client ON relay_uploads (client)"],
    "no constraint .*'round_id', 'client'": ["ALTER TABLE relay_uploads DROP CONSTRAINT relay_uploads_round_id_client_key"],
    "the constraint .*'c'": ["ALTER TABLE relay_uploads ADD CHECK (received >= 0)"],
    "the column .*'received', 'integer', True, '7'": ["ALTER TABLE relay_uploads ALTER received SET DEFAULT 7"],
    "the column .*public.nextval": [
        "CREATE FUNCTION public.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
        "ALTER TABLE relay_uploads ALTER id SET DEFAULT public.nextval('relay_uploads_id_seq')",
    ],
    "the column .*'received', 'public": [
        "CREATE DOMAIN public.integer AS pg_catalog.int4 CHECK (VALUE >= 0)",
        'ALTER TABLE relay_uploads ALTER received TYPE public."integer"',
    ],
    "the column .*'received', 'integer', False": ["ALTER TABLE relay_uploads ALTER received DROP NOT NULL"],
    "the column .*'received', 'bigint'": ["ALTER TABLE relay_uploads ALTER received TYPE bigint"],
    "the column .*'arrived'": ["ALTER TABLE relay_uploads ADD arrived timestamptz DEFAULT clock_timestamp()"],
    "the column .*'copy'": ["ALTER TABLE relay_uploads ADD copy text GENERATED ALWAYS AS (client) STORED"],
    "the column .*'client'": ["ALTER TABLE relay_uploads ALTER client SET STATISTICS 100"],
    "the column .*'agreement'": ['ALTER TABLE relay_rounds ALTER agreement TYPE varchar(64) COLLATE "C"'],
    "no column .*'relay_parts', 'data'": ["ALTER TABLE relay_parts DROP data"],
}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_store_that_somebody_has_prepared_is_refused(postgres: Postgres) -> None:
    postgres.command("SET allow_in_place_tablespaces TO on", "CREATE TABLESPACE elsewhere LOCATION ''")
    with as_superuser(postgres) as connection:
        check_as_relay(connection)
        connection.rollback()
        for expected, commands in HOSTILE.items():
            for command in ("SET LOCAL search_path TO ldpfl_relay, pg_temp", "CREATE ROLE mallory", *commands):
                connection.execute(text(command))
            with pytest.raises(UnfitStore, match=f"the store here is not as the relay makes it: .*{expected}"):
                check_as_relay(connection)
            connection.rollback()


@contextmanager
def as_superuser(postgres: Postgres) -> Iterator[Connection]:
    """Yield a superuser's connection to a database in which the relay has made its tables."""
    database = postgres.new_database()
    open_engine(postgres.url(database)).dispose()
    engine = create_engine(postgres.url(database, user="admin").replace("postgresql", "postgresql+psycopg", 1))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def check_as_relay(connection: Connection) -> None:
    """Check the schema as a connection of the relay would; the transaction has to end afterwards."""
    for command in ("SET LOCAL SESSION AUTHORIZATION relay", "SET LOCAL search_path TO pg_catalog, pg_temp"):
        connection.execute(text(command))
    check_schema(connection, "here")


CATALOG_RIGHTS = (
    "SELECT ON pg_authid",
    "SELECT (rolname), UPDATE (rolsuper) ON pg_authid",
    "SELECT (rolname), SELECT (rolpassword) ON pg_authid",
    "SELECT (usename), SELECT (passwd) ON pg_shadow",
    "INSERT (roleid), INSERT (member), INSERT (grantor), INSERT (admin_option) ON pg_auth_members",
    "UPDATE (relacl) ON pg_class",
    "DELETE, UPDATE ON pg_class",
    "UPDATE (prosrc) ON pg_proc",
    "SELECT (stavalues1) ON pg_statistic",
    "SELECT ON pg_toast.pg_toast_2619",  # the long values of pg_statistic
    "SELECT (umoptions) ON pg_user_mapping",
    "SELECT (subconninfo) ON pg_subscription",
)


@pytest.mark.slow
@pytest.mark.parametrize("grantee", ["mallory", "PUBLIC"])
def test_rights_in_catalogs_are_refused_until_the_named_command_revokes_them(grantee: str, postgres: Postgres) -> None:
    with as_superuser(postgres) as connection:
        for rights in CATALOG_RIGHTS:
            connection.execute(text("CREATE ROLE mallory"))
            connection.execute(text(f"GRANT {rights} TO {grantee}"))
            with pytest.raises(UnfitStore, match=rf"{grantee} has rights in a table that is not for everybody: REVOKE ") as error:
                check_as_relay(connection)
            remedy = f"REVOKE {str(error.value).split('REVOKE ')[1].split('. Undo')[0]}"
            assert remedy == f"REVOKE {rights} FROM {grantee}"
            connection.execute(text("SET LOCAL SESSION AUTHORIZATION DEFAULT"))
            connection.execute(text(remedy))
            check_as_relay(connection)
            connection.rollback()


@pytest.mark.slow
def test_roles_that_reach_no_rows_are_accepted(postgres: Postgres) -> None:
    """Among them PostgreSQL's own for monitoring, and functions that only superusers and these roles may call."""
    with as_superuser(postgres) as connection:
        for command in (
            "CREATE ROLE watcher LOGIN",
            "GRANT pg_monitor, pg_signal_backend, pg_checkpoint TO watcher",
            "CREATE EXTENSION pg_buffercache SCHEMA public",
            "CREATE EXTENSION dblink SCHEMA public",
            "CREATE ROLE root SUPERUSER LOGIN",
            "GRANT EXECUTE ON FUNCTION pg_read_file(text) TO root",
            "GRANT EXECUTE ON FUNCTION pg_stat_get_activity(int) TO watcher",
            # As of an extension that lets everybody call a function, and is then kept from most.
            "UPDATE pg_init_privs SET initprivs = '{=X/admin,admin=X/admin}' WHERE objoid = 'dblink_connect_u(text)'::regprocedure",
            "GRANT EXECUTE ON FUNCTION dblink_connect_u(text) TO watcher",
            "GRANT EXECUTE ON FUNCTION pg_stat_reset() TO watcher",
            "GRANT EXECUTE ON FUNCTION pg_stat_reset_shared(text) TO PUBLIC",
            "CREATE EXTENSION pg_stat_statements SCHEMA public",
            "DO $$ BEGIN EXECUTE (SELECT 'GRANT EXECUTE ON FUNCTION ' || CAST(oid AS regprocedure) || ' TO watcher' "
            "FROM pg_proc WHERE proname = 'pg_stat_statements_reset'); END $$",  # its arguments differ between versions
            "GRANT SET ON PARAMETER log_min_messages TO watcher",
            "GRANT SELECT (subname) ON pg_subscription TO watcher",  # a column that everybody may read
            "GRANT SELECT ON pg_class, pg_stat_activity, public.pg_stat_statements, information_schema.tables TO watcher",
            "CREATE ROLE owner LOGIN CREATEDB",
        ):
            connection.execute(text(command))
        check_as_relay(connection)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_role_that_reads_the_servers_files_in_another_database_is_refused(postgres: Postgres) -> None:
    """A role has rights as PostgreSQL's manual sets them up for pg_rewind, which connects to the database postgres; or owns a function."""
    store = postgres.new_store()
    function = "FUNCTION pg_read_binary_file(text, bigint, bigint, boolean)"
    postgres.command("CREATE ROLE rewinding LOGIN")
    for command, back in (
        (f"GRANT EXECUTE ON {function} TO rewinding", f"REVOKE EXECUTE ON {function} FROM rewinding"),
        (f"ALTER {function} OWNER TO rewinding", f"ALTER {function} OWNER TO admin"),
    ):
        postgres.command(command)
        try:
            with pytest.raises(UnfitStore, match=r"rewinding may call .* in the database postgres: REVOKE EXECUTE ON FUNCTION pg_read_bin"):
                open_engine(store)
        finally:
            postgres.command(back)
        open_engine(store).dispose()
    postgres.command("GRANT EXECUTE ON FUNCTION pg_stat_reset() TO rewinding")  # which reads nothing
    open_engine(store).dispose()
    postgres.command("REVOKE EXECUTE ON FUNCTION pg_stat_reset() FROM rewinding")


@pytest.mark.slow
def test_a_role_that_may_make_members_is_refused_where_the_server_lets_it(postgres: Postgres) -> None:
    """PostgreSQL 16 took that away from CREATEROLE."""
    with as_superuser(postgres) as connection:
        connection.execute(text("CREATE ROLE mallory LOGIN CREATEROLE"))
        if int(connection.scalars(text("SHOW server_version_num")).one()) < 160_000:
            with pytest.raises(UnfitStore, match="mallory may reach the rows as mallory, which has CREATEROLE"):
                check_as_relay(connection)
        else:
            check_as_relay(connection)


@pytest.mark.slow
def test_nothing_in_the_schema_runs_before_it_has_been_checked(postgres: Postgres) -> None:
    """An operator there that fits the search for the tables better than PostgreSQL's own would run as the relay."""
    database = postgres.new_database()
    postgres.command(
        "CREATE SCHEMA ldpfl_relay AUTHORIZATION relay",
        "CREATE SEQUENCE public.calls",
        "CREATE FUNCTION public.same(name, varchar) RETURNS bool LANGUAGE sql AS $$ SELECT nextval('public.calls') = 0 $$",
        "CREATE OPERATOR ldpfl_relay.= (LEFTARG = name, RIGHTARG = varchar, FUNCTION = public.same)",
        "CREATE FUNCTION public.same(oid, regtype) RETURNS bool LANGUAGE sql AS $$ SELECT nextval('public.calls') = 0 $$",
        "CREATE OPERATOR ldpfl_relay.= (LEFTARG = oid, RIGHTARG = regtype, FUNCTION = public.same)",  # as in the driver's search for a type
        "GRANT ALL ON SEQUENCE public.calls TO PUBLIC",
        database=database,
    )
    with pytest.raises(UnfitStore, match=r"operator .* depends on schema ldpfl_relay"):
        open_engine(postgres.url(database))
    assert postgres.command("SELECT is_called FROM public.calls", database=database) == "f\n"


@pytest.mark.slow
def test_code_that_others_put_into_pg_catalog_is_refused_and_does_not_run(postgres: Postgres) -> None:
    database = postgres.new_database()
    plant = (
        "CREATE SEQUENCE public.calls",
        "GRANT ALL ON SEQUENCE public.calls TO PUBLIC",
        "CREATE FUNCTION public.same(varchar, varchar) RETURNS bool LANGUAGE sql AS $$ SELECT nextval('public.calls') = 0 $$",
    )
    operator = "OPERATOR {}.= (LEFTARG = {}, RIGHTARG = {}, FUNCTION = public.same)"
    postgres.command(*plant, f"CREATE {operator.format('public', 'varchar', 'varchar')}", database=database)
    open_engine(postgres.url(database)).dispose()  # nothing is looked up in the schema public
    for command in (
        "GRANT CREATE ON SCHEMA pg_catalog TO PUBLIC",
        f"CREATE {operator.format('pg_catalog', 'varchar', 'varchar')}",
        "CREATE FUNCTION pg_catalog.lower(varchar) RETURNS text LANGUAGE sql AS 'SELECT NULL'",
        "CREATE DOMAIN pg_catalog.lower AS text",
        "CREATE CAST (bytea AS text) WITHOUT FUNCTION AS IMPLICIT",
    ):
        postgres.command(command, database=database)
        with pytest.raises(UnfitStore, match="code of others could run as the relay") as error:
            open_engine(postgres.url(database))
        remedy = str(error.value).split(" must run ")[1].split(", or give")[0]
        assert remedy.split()[1] == command.split()[1].replace("DOMAIN", "TYPE")
        postgres.command(remedy, database=database)  # the next command would be refused for this one otherwise
    open_engine(postgres.url(database)).dispose()
    assert postgres.command("SELECT is_called FROM public.calls", database=database) == "f\n"


def test_an_event_trigger_does_not_see_the_tables_made(postgres: Postgres) -> None:
    database = postgres.new_database()
    hook = "CREATE FUNCTION public.hook() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN CREATE TABLE public.seen (); END'"
    postgres.command(
        hook, "CREATE EVENT TRIGGER hook ON ddl_command_end WHEN TAG IN ('CREATE INDEX') EXECUTE FUNCTION public.hook()", database=database
    )
    with pytest.raises(UnfitStore, match="its database has the event trigger hook"):
        open_engine(postgres.url(database))
    assert postgres.command("SELECT count(*) FROM pg_class WHERE relname = 'seen' OR relname LIKE 'relay_%'", database=database) == "0\n"


@pytest.mark.slow
def test_what_postgres_warns_of_is_logged_and_what_was_not_vacuumed_is_tried_again(
    postgres: Postgres, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    database = postgres.new_database()
    postgres.command(f"CREATE ROLE {database} LOGIN", f"GRANT CREATE ON DATABASE {database} TO {database}")
    store = Store(open_engine(postgres.url(database, user=database)), clock=clock)
    opened(store)
    put(store, "alice")
    table = "ldpfl_relay.relay_parts"
    postgres.command(f"ALTER TABLE {table} OWNER TO admin", f"GRANT ALL ON {table} TO {database}", database=database)
    store.cancel("aggregator", RUN, 1)
    logged = [json.loads(record.getMessage()) for record in caplog.records if record.levelname == "ERROR"]
    assert [entry["event"] for entry in logged] == ["store_notice", "scrub_failed"]
    assert logged[0] == {"event": "store_notice", "severity": "WARNING", "sqlstate": "01000"}
    assert store.untidy
    postgres.command(f"ALTER TABLE {table} OWNER TO {database}", database=database)
    store.tidy()
    assert not store.untidy
    store.close()


class Proxy:
    """Hands on what a server and its clients say, until it is told to stop taking anything of the server in the middle of an answer."""

    def __init__(self, port: int) -> None:
        self._to, self._left = port, float("inf")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.stalled = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        self._serving = threading.Thread(target=self._accept, daemon=True)
        self._serving.start()

    def stall_after(self, count: int) -> None:
        """Hand on so many bytes of the server yet."""
        self._left = count

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._serving.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)  # else the system would take much of an answer in
                server.connect(("127.0.0.1", self._to))
                self._sockets += [client, server]
                threading.Thread(target=self._hand_on, args=(client, server), daemon=True).start()

    def _hand_on(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                readable, _, _ = polling.select([client, server], [], [])
                for source in readable:
                    data = source.recv(2**14)
                    if source is server:
                        self._left -= len(data)
                    if self._left <= 0:
                        self.stalled.set()
                        return
                    if not data:
                        client.close()
                        server.close()
                        return
                    (client if source is server else server).sendall(data)


@contextmanager
def proxied(postgres: Postgres) -> Iterator[Proxy]:
    proxy = Proxy(postgres.port)
    try:
        yield proxy
    finally:
        proxy.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_answer_that_stops_in_the_middle_holds_neither_the_relay_nor_its_round(
    postgres: Postgres, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = postgres.new_database()
    size = terms(record_bytes=1024, records_per_upload=32 * BLOCK_BYTES // 1024, min_clients=1)
    direct = Store(open_engine(postgres.url(database)), clock=clock)
    direct.open_round("aggregator", RUN, 1, size)
    put(direct, "alice", size=size, block=BLOCK_BYTES)
    clock.now += 100
    with proxied(postgres) as proxy:
        monkeypatch.setattr(module.BoundedConnection, "answer_s", 1.0)
        monkeypatch.setattr("ldpfl.relay.queries._ROWS_AT_A_TIME", 32)  # more than the system takes in for a relay that does not read
        hanging = Store(open_engine(postgres.url(database, host="127.0.0.1", port=proxy.port)), clock=clock)
        hanging.check()
        proxy.stall_after(2 * BLOCK_BYTES)
        with pytest.raises(StoreUnavailable):
            pull(hanging)
        assert proxy.stalled.is_set()
        until(lambda: "ClientWrite" in postgres.command(f"SELECT wait_event FROM pg_stat_activity WHERE datname = '{database}'"))
        direct.end_hung_connections()  # not yet: it may only be slow
        monkeypatch.setattr(module, "HUNG_S", 0)
        direct.end_hung_connections()
        assert [json.loads(record.getMessage())["event"] for record in caplog.records if record.levelname == "ERROR"][-1:] == [
            "hung_connections_ended"
        ]
        until(lambda: "ClientWrite" not in postgres.command(f"SELECT wait_event FROM pg_stat_activity WHERE datname = '{database}'"))
        assert records(pull(direct), 1024) == records(blob("alice", size), 1024)
        hanging.close()
    direct.close()


@pytest.mark.slow
def test_the_server_gives_up_a_relay_that_takes_nothing_more(postgres: Postgres) -> None:
    engine = open_engine(postgres.url(postgres.new_database(), host="127.0.0.1"))
    with engine.connect() as connection:
        shown = [connection.scalar(text(f"SHOW tcp_{name}")) for name in ("user_timeout", "keepalives_idle", "keepalives_count")]
        assert shown == ["30000", "10", "3"]
        socket_of = socket.fromfd(connection.connection.driver_connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)  # type: ignore[union-attr]
        with socket_of:
            assert socket_of.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    engine.dispose()


@pytest.mark.slow
def test_a_silent_relay_does_not_hold_a_round(postgres: Postgres, clock: Clock) -> None:
    """Between two statements the server itself ends its transaction, after a minute: here, after 200 ms of this connection alone."""
    place = postgres.new_store()
    store = Store(open_engine(place), clock=clock)
    opened(store)
    silent = open_engine(place)
    connection = silent.connect()
    connection.execute(text("SET idle_in_transaction_session_timeout TO '200ms'"))  # in the transaction that stays open
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:what, 0))"), {"what": f"round 1 of {RUN}"})
    store.begin("alice", RUN, 1, upload_id("alice"), terms().upload_bytes)
    connection.invalidate()
    connection.close()
    silent.dispose()
    store.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_token_leaves_no_name_in_the_servers_log() -> None:
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server = Postgres(programs, logging_collector="on", log_directory="log")
    try:
        engine = open_engine(server.new_store())
        known = Tokens(engine)
        known.add("dr-who", Role.CLIENT)
        with pytest.raises(ConfigError, match="has a token already"):
            known.add("dr-who", Role.CLIENT)
        known.renew("dr-who")
        with pytest.raises(ConfigError, match="has two tokens already"):
            known.renew("dr-who")
        engine.dispose()
        logs = list((server.folder / "data" / "log").iterdir())
        assert logs
        assert not [line for file in logs for line in file.read_text().splitlines() if "dr-who" in line or "ERROR" in line]
    finally:
        server.stop()
