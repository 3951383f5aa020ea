"""Tables of the relay's store, and how a SQLite file or a PostgreSQL database is opened.

No table has a column for a time of arrival, an address or a request: what is not stored cannot be linked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry

from ldpfl.errors import ConfigError

VERSION = 1
CONNECTIONS = 16
CONNECT_S = 10
BUSY_S = 60
"""How long a SQLite writer waits for another one; a release holds the lock while it mixes."""

READ_ONLY = {"sqlite_begin": "DEFERRED"}
_SQLITE, _POSTGRES = "sqlite", "postgresql"
_ADVISORY_LOCK = 0x6C647066  # any number that no other program on the database uses

_metadata = MetaData()
_Id = BigInteger().with_variant(Integer, _SQLITE)  # SQLite counts only INTEGER keys up by itself

meta = Table("relay_meta", _metadata, Column("version", Integer, nullable=False))

tokens = Table(
    "relay_tokens",
    _metadata,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
)

rounds = Table(
    "relay_rounds",
    _metadata,
    Column("id", _Id, primary_key=True),
    Column("run", String(64), nullable=False),
    Column("round", Integer, nullable=False),
    Column("owner", String(64), nullable=False),
    Column("record_bytes", Integer, nullable=False),
    Column("records_per_upload", Integer, nullable=False),
    Column("min_clients", Integer, nullable=False),
    Column("closes_in_s", Float(53), nullable=False),
    Column("max_uploads", Integer, nullable=False),
    Column("agreement", String(64), nullable=False),
    Column("closes_at", Float(53), nullable=False),
    Column("state", String(16), nullable=False),
    Column("uploads", Integer, nullable=False, default=0),
    Column("parts", Integer, nullable=False, default=0),
    UniqueConstraint("run", "round"),
)

uploads = Table(
    "relay_uploads",
    _metadata,
    Column("id", _Id, primary_key=True),
    Column("round_id", ForeignKey(rounds.c.id), nullable=False),
    Column("client", String(64), nullable=False),
    Column("upload_id", String(64), nullable=False),
    Column("received", Integer, nullable=False, default=0),
    UniqueConstraint("round_id", "client"),
    UniqueConstraint("round_id", "upload_id"),
)

blocks = Table(
    "relay_blocks",
    _metadata,
    Column("upload", ForeignKey(uploads.c.id), primary_key=True),
    Column("start", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

parts = Table(
    "relay_parts",
    _metadata,
    Column("round_id", ForeignKey(rounds.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)


def open_engine(store: str) -> Engine:
    """Open a store, creating its tables if it has none: a path is a SQLite file, ``postgresql://...`` a database.

    Raises:
        ConfigError: the place cannot be opened, or holds a store of another version.
    """
    url = _url(store)
    shown = url.render_as_string(hide_password=True)
    try:
        return _engine_with_tables(url, shown)
    except (DBAPIError, ModuleNotFoundError, NoSuchModuleError) as error:
        # A database's own text can repeat its address with the password.
        raise ConfigError(f"the store {shown} cannot be opened ({type(error).__name__}): check the path or URL and that it runs") from None


def is_sqlite(connection: Connection | Engine) -> bool:
    """Whether the store is a SQLite file."""
    return connection.dialect.name == _SQLITE


def _url(store: str) -> URL:
    if "://" not in store:
        return URL.create(_SQLITE, database=str(Path(store).absolute()))
    try:
        url = make_url(store)
    except ArgumentError:
        raise ConfigError("the store's URL cannot be read; expected a path or postgresql://user@host/database") from None
    backend = url.get_backend_name()
    if backend == _SQLITE and url.database not in (None, "", ":memory:"):
        return url
    if backend != _POSTGRES:
        raise ConfigError(f"a store is a SQLite file or a PostgreSQL database, not {backend}")
    return url.set(drivername="postgresql+psycopg")


def _engine_with_tables(url: URL, shown: str) -> Engine:
    engine = _engine(url)
    try:
        _create_tables(engine, shown)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _engine(url: URL) -> Engine:
    # Parameters are reports and hashes of tokens: no error text may repeat them.
    options: dict[str, Any] = {"hide_parameters": True, "pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": BUSY_S}
    if url.get_backend_name() == _POSTGRES:
        return create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": CONNECT_S}, **options)
    _create_private_file(Path(str(url.database)))
    engine = create_engine(url, connect_args={"timeout": BUSY_S}, **options)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _create_private_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be opened: {error.strerror}") from None


def _set_up_sqlite(connection: Any, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself: _begin_sqlite does
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",  # what was acknowledged survives a loss of power
        "secure_delete = ON",  # deleted uploads are overwritten, not only unlinked
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: two that read first and then write would deadlock, and one of them fail.
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('sqlite_begin', 'IMMEDIATE')}")


def _create_tables(engine: Engine, shown: str) -> None:
    with engine.begin() as connection:
        if not is_sqlite(connection):
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        if engine.dialect.has_table(connection, meta.name):
            found = connection.scalars(select(meta.c.version)).all()
            if found != [VERSION]:
                raise ConfigError(
                    f"the store {shown} has version {', '.join(map(str, found)) or 'none'}; this program knows version {VERSION}"
                )
            return
        _metadata.create_all(connection)
        connection.execute(insert(meta).values(version=VERSION))
        if not is_sqlite(connection):
            for table in (blocks, parts):  # sealed records do not compress: do not try
                connection.execute(text(f"ALTER TABLE {table.name} ALTER COLUMN data SET STORAGE EXTERNAL"))
