"""Connections to a PostgreSQL store: encrypted, with the settings that the store relies on, and bounded in time."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Sequence
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
from ldpfl.relay.session import ISOLATION, SETTINGS, prepare_session
from ldpfl.relay.telemetry import log_event

CONNECT_S = 10
STATEMENT_S = 60  # as statement_timeout in the session's settings
ANSWER_S = 75.0
"""Seconds to wait for an answer. They are more than a statement may take, so only a silent server or network exceeds them."""

VACUUM_S = 3600
HUNG_S = 60  # a statement that has waited so long for its client is one of a hung relay

_APPLICATION_NAME = "ldpfl-relay"
_CONNECTION_OPTIONS: dict[str, Any] = {
    "application_name": _APPLICATION_NAME,
    "connect_timeout": CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_VERIFY_FULL = "verify-full"
_CHECKED_PARAMETERS = frozenset({"host", "hostaddr", "port", "sslmode", "sslrootcert"})


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that waits for each answer at most ``answer_s`` seconds, and logs and counts the server's warnings.

    ``kept_rows`` counts the deleted rows that rewritten tables still have, because another transaction could see them.
    """

    answer_s = ANSWER_S
    notices = 0
    kept_rows = 0

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        """Wait for an answer.

        Raises:
            OperationalError: the answer did not come in time. The connection is closed.
        """
        return super().wait(self._with_time_limit(gen), *arguments, **options)

    def _with_time_limit(self, gen: Any) -> Generator[Any, Any, Any]:
        """Wrap psycopg's generator ``gen``, which waits for an answer: close the connection and raise after ``answer_s`` seconds."""
        deadline_s = time.monotonic() + self.answer_s
        try:
            state = next(gen)
            while True:  # psycopg resumes this generator when data comes, and otherwise ten times a second
                ready = yield state
                if time.monotonic() > deadline_s:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("PostgreSQL did not answer in time")
                state = gen.send(ready)
        except StopIteration as end:
            return end.value

    def log_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        """Log a notice by its kind: its text could repeat data. What VACUUM tells of a table is only counted."""
        if notice.severity_nonlocalized == "INFO":
            number = re.search(r"\d+", notice.message_detail or "")  # the detail begins "3 dead row versions cannot be removed yet"
            self.kept_rows += int(number[0]) if number else 0
            return
        self.notices += 1
        log_event("store_notice", severity=notice.severity_nonlocalized or "", sqlstate=notice.sqlstate or "")


def make_engine(store: str, **options: Any) -> tuple[Engine, str]:
    """Return an engine for the database at a URL, and the address for messages, which has no password.

    Raises:
        UnfitStore: the URL cannot be read, or the connection would not be encrypted and verified where it must be.
    """
    parameters = connection_parameters(store)
    check_not_readable_on_network(parameters)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(store),
        pool_pre_ping=True,
        isolation_level=ISOLATION,
        use_native_hstore=False,  # else the driver looks for a type of that name, by queries of its own
        execution_options={"schema_translate_map": {None: SCHEMA}},  # the tables' definitions name no schema, as SQLite has none
        **options,
    )
    return engine, address_without_password(parameters)


def address_without_password(parameters: dict[str, str]) -> str:
    """Return the URL of the database for messages."""
    host = parameters.get("host") or parameters.get("hostaddr") or ""
    return f"postgresql://{parameters.get('user', '')}@{host}:{parameters.get('port', '')}/{parameters.get('dbname', '')}"


def connection_parameters(store: str) -> dict[str, str]:
    """Return the parameters with which libpq would connect: from the URL, the environment, a service file, and its defaults.

    libpq reveals the parameters only of a connection that was started. So a connection is started with an invalid ``gssencmode``. libpq
    refuses it once all other parameters are known, before it looks up a name or reaches the network.

    Raises:
        UnfitStore: the URL or the service file cannot be read.
    """
    try:
        attempt = pq.PGconn.connect_start(make_conninfo(store, gssencmode="nothing").encode())
    except psycopg.Error:
        raise _invalid_url_error() from None
    parameters = {option.keyword.decode(): option.val.decode() for option in attempt.info if option.val is not None}
    attempt.finish()
    if "sslmode" not in parameters:
        raise _invalid_url_error()
    return parameters


def _invalid_url_error() -> UnfitStore:
    """Return the error for a store whose connection parameters libpq cannot read."""
    return UnfitStore(
        "the store's URL, or the service that it or PGSERVICE names, is not valid: expected a path or postgresql://user@host/database"
    )


def check_not_readable_on_network(parameters: dict[str, str]) -> None:
    """Raise unless a connection would stay on this machine, or be encrypted to a server whose name is verified.

    Raises:
        UnfitStore: others could read the connection on the network. They would see who uploads which record, and could decrypt the record
            if they had the aggregator's key.
    """
    mode = parameters["sslmode"]
    # Both parameters may be lists. Where an address is given, libpq connects to it and not to the name.
    addresses, names = parameters.get("hostaddr", "").split(","), parameters.get("host", "").split(",")
    hosts = [address or name for address, name in zip_longest(addresses, names, fillvalue="")]
    remote_hosts = [host for host in hosts if not _is_this_machine(host)]
    if remote_hosts and mode != _VERIFY_FULL:
        raise UnfitStore(
            f"the store {address_without_password(parameters)} is reached over the network ({', '.join(remote_hosts)}) "
            f"with sslmode={mode}, where sslmode={_VERIFY_FULL} is needed: add ?sslmode={_VERIFY_FULL}&sslrootcert=FILE to its URL, "
            "where FILE is the certificate of the database's authority"
        )


def _is_this_machine(host: str) -> bool:
    """Whether ``host`` is a Unix socket (a folder, an abstract name, or "" for libpq's default) or this machine's loopback address."""
    return not host or host.startswith(("/", "@")) or is_loopback(host)


def connect(store: str) -> BoundedConnection:
    """Connect to the store, and set up the connection.

    Raises:
        UnfitStore: the connection is not encrypted and verified where it must be, or its settings or its role are not as they must be.
    """
    parameters = connection_parameters(store)
    check_not_readable_on_network(parameters)
    # Passing the checked parameters keeps libpq from reading them again, from an environment or a file that has changed since the check.
    checked = {name: value for name, value in parameters.items() if name in _CHECKED_PARAMETERS}
    options: dict[str, Any] = {**_CONNECTION_OPTIONS, **checked, "gssencmode": "disable"}  # with GSS encryption, libpq uses no TLS
    connection = BoundedConnection.connect(make_conninfo(store, **options))
    try:
        _check_local_or_verified(connection, parameters)
        connection.add_notice_handler(connection.log_notice)
        prepare_session(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_local_or_verified(connection: BoundedConnection, parameters: dict[str, str]) -> None:
    """Raise unless the open connection leads to this machine, or is encrypted to a server whose certificate and name were verified.

    :func:`check_not_readable_on_network` has accepted the host's name, but the name may lead to another machine.
    """
    host = connection.pgconn.hostaddr.decode() or connection.pgconn.host.decode()
    mode = ({option.keyword: option.val for option in connection.pgconn.info}[b"sslmode"] or b"").decode()
    if not _is_this_machine(host) and not (connection.pgconn.ssl_in_use and mode == _VERIFY_FULL):
        raise UnfitStore(
            f"the connection to the store {address_without_password(parameters)} leads to {host} and is not both encrypted and "
            f"verified (sslmode={mode}): add ?sslmode={_VERIFY_FULL}&sslrootcert=FILE to its URL, where FILE is the certificate of the "
            "database's authority"
        )


def vacuum(engine: Engine, tables: Sequence[Table], *, rewritten: Sequence[Table] = ()) -> bool:
    """Free the room of deleted rows in ``tables``, however long that takes. Return whether ``rewritten`` tables have none any more.

    Args:
        rewritten: tables to write to new files, with their indexes, because deleted rows stay readable in freed room. Nobody else can use
            a table meanwhile. Deleted rows stay if another transaction of the database is under way, even one that uses no such table.

    Raises:
        StoreUnavailable: PostgreSQL warned of something, so it may have skipped a table.
    """
    # First, room is freed, since a full disk has none for new files. VERBOSE tells how many deleted rows stay.
    steps = (("VACUUM", tables), ("VACUUM (FULL, VERBOSE)", rewritten))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection, _long_time_limit(connection) as driver:
        notices_before, driver.kept_rows = driver.notices, 0
        for command, its_tables in steps:
            for table in its_tables:
                connection.execute(text(f"{command} {SCHEMA}.{table.name}"))
            if driver.notices > notices_before:
                raise StoreUnavailable("PostgreSQL warned of something while it vacuumed; its log says of what")
        return driver.kept_rows == 0


@contextmanager
def _long_time_limit(connection: Any) -> Iterator[BoundedConnection]:
    """Allow statements of ``connection`` to take :data:`VACUUM_S` seconds within the block; yield the driver's connection."""
    driver: BoundedConnection = connection.connection.driver_connection
    connection.execute(text(f"SET statement_timeout TO '{VACUUM_S}s'"))
    driver.answer_s = VACUUM_S + ANSWER_S - STATEMENT_S  # as much longer than the statement's limit as usual
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


def end_hung_connections(engine: Engine) -> int:
    """End the connections of relays that no longer read the server's answers; return how many.

    The server has no timeout for such a connection as long as the relay's machine responds. The connection would keep its round locked,
    and keep VACUUM from removing deleted rows.
    """
    with engine.begin() as connection:
        ended = len(connection.execute(_END_HUNG, {"name": _APPLICATION_NAME, "seconds": HUNG_S}).all())
    if ended:
        log_event("hung_connections_ended", count=ended)
    return ended
