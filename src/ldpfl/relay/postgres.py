"""Connections to a PostgreSQL store: encrypted, with the settings that the store relies on, and bounded in time."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from sqlalchemy import Engine, Table, create_engine, text

from ldpfl.relay.errors import StoreUnavailable, UnfitStore
from ldpfl.relay.requests import is_loopback
from ldpfl.relay.schema import SCHEMA
from ldpfl.relay.session import ISOLATION, SETTINGS, set_up
from ldpfl.relay.telemetry import log_event

CONNECT_S = 10
STATEMENT_S = 60
ANSWER_S = 75.0
"""How long to wait for an answer: longer than a statement may take, so that this is for a server or a network that is silent."""

VACUUM_S = 3600
HUNG_S = 60

_APPLICATION = "ldpfl-relay"
_LINK: dict[str, Any] = {
    "application_name": _APPLICATION,
    "connect_timeout": CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_VERIFIED = "verify-full"
_CHECKED = frozenset({"host", "hostaddr", "port", "sslmode", "sslrootcert"})


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that waits ``answer_s`` seconds for each answer at most, and logs and counts what the server warns of."""

    answer_s = ANSWER_S
    notices = 0

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait for an answer.

        Raises:
            OperationalError: it did not come in time; the connection is closed.
        """
        return super().wait(self._in_time(gen), *arguments, **options)

    def _in_time(self, gen: Any) -> Generator[Any, Any, Any]:
        until = time.monotonic() + self.answer_s
        try:
            state = next(gen)
            while True:  # resumed when something comes, and ten times a second otherwise
                ready = yield state
                if time.monotonic() > until:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("PostgreSQL did not answer in time")
                state = gen.send(ready)
        except StopIteration as end:
            return end.value

    def noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        """Log a notice by its kind: its text could repeat data."""
        self.notices += 1
        log_event("store_notice", severity=notice.severity_nonlocalized or "", sqlstate=notice.sqlstate or "")


def make_engine(store: str, **options: Any) -> tuple[Engine, str]:
    """Return an engine for the database at a URL, and the address for messages, which has no password.

    Raises:
        UnfitStore: the URL cannot be read, or the connection would not be encrypted and verified where it must be.
    """
    found = resolve(store)
    check_way(found)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(store),
        pool_pre_ping=True,
        isolation_level=ISOLATION,
        use_native_hstore=False,  # else the driver looks for a type of that name, by queries of its own
        execution_options={"schema_translate_map": {None: SCHEMA}},
        **options,
    )
    return engine, address_of(found)


def address_of(found: dict[str, str]) -> str:
    """Return a URL for messages."""
    host = found.get("host") or found.get("hostaddr") or ""
    return f"postgresql://{found.get('user', '')}@{host}:{found.get('port', '')}/{found.get('dbname', '')}"


def resolve(store: str) -> dict[str, str]:
    """Return the parameters with which libpq would connect: of the URL, the environment, a service file, and its defaults.

    libpq tells them only of a connection that has begun. This one ends before it reaches the network, or looks up a name: it has a
    parameter that is refused once all others are known.

    Raises:
        UnfitStore: they cannot be read.
    """
    try:
        begun = pq.PGconn.connect_start(make_conninfo(store, gssencmode="nothing").encode())
    except psycopg.Error:
        raise _unreadable() from None
    found = {option.keyword.decode(): option.val.decode() for option in begun.info if option.val is not None}
    begun.finish()
    if "sslmode" not in found:
        raise _unreadable()
    return found


def _unreadable() -> UnfitStore:
    return UnfitStore(
        "the store's URL, or the service that it or PGSERVICE names, cannot be read; expected a path or postgresql://user@host/database"
    )


def check_way(found: dict[str, str]) -> None:
    """Return if a connection would stay on this machine, or be encrypted to a server whose name is verified.

    Raises:
        UnfitStore: neither: who reads along would see who uploads which records, and with the key of the aggregator, what.
    """
    mode = found["sslmode"]
    places = zip_longest(found.get("hostaddr", "").split(","), found.get("host", "").split(","), fillvalue="")
    away = [place for place in (address or host for address, host in places) if not _is_here(place)]
    if away and mode != _VERIFIED:
        raise UnfitStore(
            f"the store {address_of(found)} is reached over the network ({', '.join(away)}) with sslmode={mode}, and there "
            f"sslmode={_VERIFIED} is needed: add ?sslmode={_VERIFIED}&sslrootcert=FILE to its URL, FILE being the database's authority"
        )


def _is_here(place: str) -> bool:
    """Whether a host is a folder or name of a Unix socket (libpq's default is one), or this machine's loopback."""
    return not place or place.startswith(("/", "@")) or is_loopback(place)


def connect(store: str) -> BoundedConnection:
    """Connect, and make the connection's settings.

    Raises:
        UnfitStore: it is not encrypted where it must be, or its settings or its role are not as they must be.
    """
    found = resolve(store)
    check_way(found)
    # What was checked is what is done: none of these is read from the environment or a file once more.
    checked = {name: value for name, value in found.items() if name in _CHECKED}
    parameters: dict[str, Any] = {**_LINK, **checked, "gssencmode": "disable"}
    connection = BoundedConnection.connect(make_conninfo(store, **parameters))
    try:
        _check_connected(connection, found)
        connection.add_notice_handler(connection.noticed)
        set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_connected(connection: BoundedConnection, found: dict[str, str]) -> None:
    """Return if the connection that there is leads to this machine, or is encrypted; a name may have led elsewhere."""
    place = connection.pgconn.hostaddr.decode() or connection.pgconn.host.decode()
    mode = {option.keyword: option.val for option in connection.pgconn.info}[b"sslmode"]
    if not _is_here(place) and not (connection.pgconn.ssl_in_use and mode == _VERIFIED.encode()):
        raise UnfitStore(
            f"the connection to the store {address_of(found)} leads to {place} and is not encrypted: sslmode={_VERIFIED} is needed"
        )


def vacuum(engine: Engine, tables: tuple[Table, ...]) -> None:
    """Vacuum tables, however long that takes.

    Raises:
        StoreUnavailable: PostgreSQL warned of something: it may have passed over a table.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection, _unhurried(connection) as driver:
        before = driver.notices
        for table in tables:
            connection.execute(text(f"VACUUM {SCHEMA}.{table.name}"))
        if driver.notices > before:
            raise StoreUnavailable("PostgreSQL warned of something while it vacuumed; its log says of what")


@contextmanager
def _unhurried(connection: Any) -> Iterator[BoundedConnection]:
    driver: BoundedConnection = connection.connection.driver_connection
    connection.execute(text(f"SET statement_timeout TO '{VACUUM_S}s'"))
    driver.answer_s = VACUUM_S + ANSWER_S - STATEMENT_S
    try:
        yield driver
    finally:
        if not driver.closed:
            connection.execute(text(f"SET statement_timeout TO '{SETTINGS['statement_timeout']}'"))
        driver.answer_s = ANSWER_S


_END_HUNG = text(
    "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity "
    "WHERE datname = pg_catalog.current_database() AND usename = current_user AND application_name = :name "
    "AND pid <> pg_catalog.pg_backend_pid() AND state = 'active' AND wait_event_type = 'Client' "
    "AND query_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :seconds)"
)


def end_hung(engine: Engine) -> int:
    """End connections of relays that have stopped in the middle of an answer or of a statement; return how many.

    The server waits for them for as long as their machine answers, and no timeout of its own ends that: each would hold its round,
    and deleted rows that VACUUM may not take.
    """
    with engine.begin() as connection:
        ended = len(connection.execute(_END_HUNG, {"name": _APPLICATION, "seconds": HUNG_S}).all())
    if ended:
        log_event("hung_connections_ended", count=ended)
    return ended
