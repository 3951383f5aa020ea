"""Tables of the relay's store.

No table has a column for a time of arrival, an address or a request: what is not stored cannot be linked.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

VERSION = 4
READ_ONLY = {"sqlite_begin": "DEFERRED"}
SQLITE = "sqlite"
SCHEMA = "ldpfl_relay"
"""Where the tables lie in a PostgreSQL database. Each statement names it."""

metadata = MetaData()
_Id = BigInteger().with_variant(Integer, SQLITE)  # SQLite counts only INTEGER keys up by itself

meta = Table("relay_meta", metadata, Column("version", Integer, nullable=False))

tokens = Table(
    "relay_tokens",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("signing_key", LargeBinary(32)),  # public half of the key that signs what a client adds to sums; without one it adds nothing
    Column("older", Boolean, nullable=False),  # one that a newer token of the same name is about to replace
    UniqueConstraint("name", "older"),
)

rounds = Table(
    "relay_rounds",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("run", String(64), nullable=False),
    Column("round", Integer, nullable=False),
    Column("owner", String(64), nullable=False),
    Column("record_bytes", Integer, nullable=False),
    Column("records_per_upload", Integer, nullable=False),
    Column("dimension", Integer),  # it and bits are those of a sum round; its records are the envelopes
    Column("bits", Integer),
    Column("min_clients", Integer, nullable=False),
    Column("closes_in_s", Float(53), nullable=False),
    Column("max_uploads", Integer, nullable=False),
    Column("agreement", String(64), nullable=False),
    Column("closes_at", Float(53), nullable=False),
    Column("state", String(16), nullable=False),
    Column("uploads", Integer, nullable=False, default=0),  # of a record round, once it is released
    Column("parts", Integer, nullable=False, default=0),
    UniqueConstraint("run", "round"),
    Index("relay_rounds_of_owner", "owner", "state"),  # those that are over are kept, and may be millions
)

uploads = Table(
    "relay_uploads",
    metadata,
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
    metadata,
    Column("upload", ForeignKey(uploads.c.id), primary_key=True),
    Column("start", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

parts = Table(
    "relay_parts",
    metadata,
    Column("round_id", ForeignKey(rounds.c.id), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)


def is_sqlite(connection: Connection | Engine) -> bool:
    """Whether the store is a SQLite file."""
    return connection.dialect.name == SQLITE
