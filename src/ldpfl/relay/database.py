"""Open the relay's store, a SQLite file or a PostgreSQL database, and turn its errors into refusals."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from ldpfl.errors import ConfigError
from ldpfl.relay.errors import Refusal, StoreFull, StoreUnavailable, UnfitStore
from ldpfl.relay.files import create_private_file
from ldpfl.relay.schema import READ_ONLY, SCHEMA, SQLITE, VERSION, is_sqlite, meta, metadata
from ldpfl.relay.schema_and_rights import INCOMPRESSIBLE, WITHOUT_SAMPLES, check_schema, check_schema_place
from ldpfl.relay.telemetry import log_event, log_fault

CONNECTIONS = 16
BUSY_S = 60
"""Seconds that a request waits for a connection. SQLite has one connection, so a request waits for all others of this process."""

_SQLITE_WAIT_S = 5
"""Seconds to wait if another process holds a SQLite store. Short, because this process's requests would all wait one after another."""

_DISK_IS_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})
_SQLITE_FULL = 13
_SQLITE_CANNOT_WRITE = 778  # SQLITE_IOERR_WRITE, which SQLite makes of a quota that is used up
_POSTGRES_DISK_FULL = "53100"
_POSTGRES_FORBIDDEN = "42501"
_POSTGRES_LOCKED = "55P03"
_ADVISORY_LOCK = 0x6C647066  # any number that no other program on the database uses

_LOG_COPIES = text(
    """SELECT current_setting('archive_mode'), coalesce(string_agg(slot_name, ', ' ORDER BY slot_name), ''),
    has_table_privilege('pg_catalog.pg_stat_replication', 'SELECT') FROM pg_replication_slots"""
)

_POSTGRES = "postgresql://"
_LOCKED_MESSAGE = "the relay's store is locked, by a round that is being mixed or by another user of its database; try again later"


def open_engine(store: str) -> Engine:
    """Open a store, and create its tables if it has none. A path is a SQLite file, ``postgresql://...`` a database.

    Raises:
        ConfigError: the store cannot be opened, or is of another version.
        UnfitStore: the store's tables are not as the relay makes them, others may use the tables, or the connection leads to another
            machine and is not encrypted and verified.
    """
    store_name = store.partition("://")[0]  # for messages: only the scheme, until _make_engine returns a name without the password
    try:
        engine, store_name = _make_engine(store)
        return _ensure_tables(engine, store_name)
    except (DBAPIError, ModuleNotFoundError, NoSuchModuleError) as error:
        if _is_locked_sqlite(error):
            raise ConfigError(f"the store {store_name} is held by another process: end that process, or try again later") from None
        sqlstate = getattr(getattr(error, "orig", None), "sqlstate", None)
        if sqlstate == _POSTGRES_LOCKED:
            raise ConfigError(
                f"the store {store_name} is locked by another connection to its database: end that connection (SELECT pid, usename FROM "
                "pg_locks JOIN pg_stat_activity USING (pid) lists those with locks), let only the relay connect "
                "(REVOKE CONNECT ON DATABASE ... FROM PUBLIC), and try again"
            ) from None
        if sqlstate == _POSTGRES_FORBIDDEN:
            raise ConfigError(
                f"the relay may not make its tables in the store {store_name}: the database's owner must run "
                f"CREATE SCHEMA {SCHEMA} AUTHORIZATION ROLE, where ROLE is the role that the relay connects as"
            ) from None
        reason = _server_reason(error)
        if reason is not None:
            raise ConfigError(f"the store {store_name} cannot be opened: PostgreSQL answers {reason!r}") from None
        if re.search("SSL|certificate", str(getattr(error, "orig", ""))):
            raise ConfigError(
                f"the store {store_name} cannot be opened, because its server cannot be reached by TLS: check that the server accepts TLS, "
                "that its certificate is valid for this host, and that sslrootcert names the certificate of its authority"
            ) from None
        # The text of the driver or of libpq can repeat the address with the password.
        raise ConfigError(
            f"the store {store_name} cannot be opened ({type(error).__name__}): check the path or URL, and that its server runs"
        ) from None


def _server_reason(error: Exception) -> str | None:
    """Return the server's reason for refusing a connection, or None if the text of ``error`` holds no such reason.

    libpq's text is ``... failed: FATAL:  reason``, with the word FATAL in the server's language. Only the server puts two blanks after a
    colon. The reason may be shown, because PostgreSQL repeats no password in it.
    """
    match = re.search(r"failed: \w+:  (.+)", str(getattr(error, "orig", "")))
    return None if match is None else match[1]


def _is_locked_sqlite(error: Exception) -> bool:
    """Whether ``error`` means that another process has locked the SQLite file."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_BUSY  # the higher bits tell kinds of SQLITE_BUSY apart


def _make_engine(store: str) -> tuple[Engine, str]:
    """Return an engine for ``store``, and the store's name for messages, which holds no password."""
    # Parameters of statements are reports and hashes of tokens: no error text may repeat them.
    options: dict[str, Any] = {"hide_parameters": True, "max_overflow": 0, "pool_timeout": BUSY_S}
    if store.startswith(_POSTGRES):
        from ldpfl.relay.postgres_connections import make_engine

        return make_engine(store, pool_size=CONNECTIONS, **options)
    url = _sqlite_url(store)
    create_private_file(Path(str(url.database)))
    # A file with a rollback journal allows one transaction at a time. With a pool of one connection, requests wait for it in the pool,
    # without polling the file.
    engine = create_engine(url, pool_size=1, connect_args={"timeout": _SQLITE_WAIT_S}, **options)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine, str(url.database)


def _sqlite_url(store: str) -> URL:
    """Return the URL of a SQLite store that is given as a path or a URL."""
    if "://" not in store:
        return URL.create(SQLITE, database=str(Path(store).absolute()))
    try:
        url = make_url(store)
    except (ArgumentError, ValueError):  # a port that is no number
        raise ConfigError("the store's URL is not valid: expected a path or postgresql://user@host/database") from None
    if url.drivername == SQLITE and url.database not in (None, "", ":memory:"):
        return url
    raise ConfigError(
        f"the store is given as {url.drivername}://..., expected the path of a SQLite file or postgresql://user@host/database"
    )


def _ensure_tables(engine: Engine, store_name: str) -> Engine:
    """Return ``engine`` once the store has its tables; close the engine if they cannot be made or are not the relay's."""
    try:
        _create_tables(engine, store_name)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _set_up_sqlite(connection: Any, _: ConnectionPoolEntry) -> None:
    """Set up a new SQLite connection, so that deleted data leave the file and acknowledged data stay.

    SQLAlchemy calls this, and also passes the pool's entry of the connection.
    """
    connection.isolation_level = None  # the driver begins nothing by itself: _begin_sqlite does
    connection.execute("PRAGMA secure_delete = ON")  # deleted uploads are overwritten, not only unlinked
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA trusted_schema = OFF")  # the schema of a foreign file may call no function with side effects
    # A write-ahead log would keep deleted rows as long as somebody reads. A rollback journal is gone when its transaction is over, with
    # EXTRA even after a power loss. Acknowledged data survives a power loss as well.
    connection.execute("PRAGMA synchronous = EXTRA")
    _set_journal_mode(connection)


def _set_journal_mode(connection: Any) -> None:
    """Have the SQLite file keep a rollback journal.

    Raises:
        sqlite3.OperationalError: another program has locked the file.
        UnfitStore: the mode cannot be changed.
    """
    mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    if mode != "delete":
        raise _unfit_journal_error(mode)


def _unfit_journal_error(mode: str) -> UnfitStore:
    """Return the error for a store that keeps another journal than the relay needs."""
    return UnfitStore(
        f"the store's journal mode is {mode!r} and cannot be set to 'delete': end other processes that use the store, and try again"
    )


def _begin_sqlite(connection: Connection) -> None:
    """Begin a SQLite transaction: exclusive, unless the connection has the option ``READ_ONLY``. SQLAlchemy calls this."""
    # EXCLUSIVE: a writer waits for other processes at its beginning, not in the middle or at its commit.
    begin = f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'EXCLUSIVE')}"
    connection.exec_driver_sql(begin)
    if connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal":
        # Another program has set this mode since the file was opened.
        connection.exec_driver_sql("ROLLBACK")
        try:
            _set_journal_mode(connection.connection.driver_connection)
        except (sqlite3.OperationalError, UnfitStore):
            connection.invalidate()  # another relay, too, can set the mode only while this one has no connection
            raise _unfit_journal_error("wal") from None
        connection.exec_driver_sql(begin)


def _create_tables(engine: Engine, store_name: str) -> None:
    """Create the store's tables if there are none; raise unless they are this version's."""
    with engine.connect().execution_options(**READ_ONLY) as connection:  # read-only, so that a concurrent reader does not block opening
        missing = not _has_tables(connection)
    if missing:
        with engine.begin() as connection:
            _create_missing_tables(connection, store_name)
    with engine.connect().execution_options(**READ_ONLY) as connection:
        check_schema(connection, store_name)
        versions = connection.scalars(select(meta.c.version)).all()
    if versions != [VERSION]:
        raise ConfigError(
            f"the store {store_name} has version {', '.join(map(str, versions)) or 'none'}, expected {VERSION}: "
            "use the ldpfl that made it, or an empty store"
        )


def _create_missing_tables(connection: Connection, store_name: str) -> None:
    """Create the tables unless another process has just done so. On PostgreSQL, a lock makes other processes wait meanwhile."""
    if not is_sqlite(connection):
        connection.execute(text("SELECT pg_catalog.pg_advisory_xact_lock(CAST(:key AS bigint))"), {"key": _ADVISORY_LOCK})
        if connection.scalar(text(f"SELECT pg_catalog.to_regnamespace('{SCHEMA}')")) is None:
            connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        check_schema_place(connection, store_name)
    if _has_tables(connection):
        return  # another process was first
    metadata.create_all(connection)
    connection.execute(insert(meta).values(version=VERSION))
    if not is_sqlite(connection):
        for column in INCOMPRESSIBLE:  # encrypted records do not compress
            connection.execute(text(f"ALTER TABLE {SCHEMA}.{column.table.name} ALTER COLUMN {column.name} SET STORAGE EXTERNAL"))
        for table in WITHOUT_SAMPLES:  # planner statistics would keep samples of deleted rows
            for column in table.columns:
                connection.execute(text(f"ALTER TABLE {SCHEMA}.{table.name} ALTER COLUMN {column.name} SET STATISTICS 0"))


def _has_tables(connection: Connection) -> bool:
    """Whether the store has the relay's tables. One table stands for all, since one transaction makes them."""
    return connection.dialect.has_table(connection, meta.name, schema=None if is_sqlite(connection) else SCHEMA)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn errors of the database or the disk in the ``with`` block into refusals. Their text is dropped, because it may hold data.

    Raises:
        Refusal: the database cannot hold a value of the request, so trying again would not help.
        StoreFull: there is no room on the disk.
        StoreUnavailable: the database reports any other error.
    """
    try:
        yield
    except DataError:
        raise Refusal("the request holds a number or text that the relay's store cannot hold; nothing was stored") from None
    except DBAPIError as error:
        if _is_disk_full(error):
            raise StoreFull("the relay's disk is full; nothing was stored") from None
        if getattr(error.orig, "sqlstate", None) == _POSTGRES_LOCKED:
            raise StoreUnavailable(_LOCKED_MESSAGE, {"Retry-After": "1"}) from None
        raise StoreUnavailable("the relay's store does not answer; try again later", {"Retry-After": "1"}) from None
    except UnfitStore as error:  # the store was changed after it was opened
        log_fault("store_unfit", error)
        raise StoreUnavailable("the relay's store does not answer; try again later", {"Retry-After": "1"}) from None
    except PoolTimeout:
        raise busy_refusal() from None
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        raise StoreFull("the relay's disk is full; nothing was stored") from None


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that writes. Errors become refusals as in :func:`store_errors`."""
    with store_errors(), engine.begin() as connection:
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that only reads. Errors become refusals as in :func:`store_errors`."""
    with store_errors(), engine.connect().execution_options(**READ_ONLY) as connection:
        yield connection


def warn_of_log_copies(engine: Engine) -> None:
    """Log an event if others get or keep PostgreSQL's write-ahead log, in which deleted rows can still be read.

    The event tells whether the server archives the log, its replication slots, and how many programs receive the log now. Managed servers
    have some of these as a rule, so the relay runs nevertheless. Logical slots of its own database are refused at each connection.
    """
    if is_sqlite(engine):
        return
    with reading(engine) as connection:
        archive_mode, slots, sees_receivers = connection.execute(_LOG_COPIES).one()
        receivers = connection.scalar(text("SELECT count(*) FROM pg_stat_replication")) if sees_receivers else "unknown"
    if archive_mode != "off" or slots or receivers:
        log_event("store_log_is_copied", archive_mode=archive_mode, slots=slots, receivers=receivers)


def busy_refusal() -> StoreUnavailable:
    """Return the refusal of a request that has waited too long for a connection or a thread."""
    return StoreUnavailable("the relay is busy; try again later", {"Retry-After": "1"})


def _is_disk_full(error: DBAPIError) -> bool:
    """Whether ``error`` means that the disk is full. SQLite reports a quota that is used up as a failed write."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code in (_SQLITE_FULL, _SQLITE_CANNOT_WRITE) or getattr(error.orig, "sqlstate", None) == _POSTGRES_DISK_FULL
