"""SQL queries that the store's transactions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, select, text

from ldpfl.relay.errors import Conflict, Forbidden, Unknown
from ldpfl.relay.protocol import BLOCK_BYTES, SumTerms, Terms
from ldpfl.relay.schema import blocks, is_sqlite, rounds, uploads
from ldpfl.transport.sums.envelopes import ENVELOPE_BYTES

STATES_NOT_GONE = ("open", "released")
"""Stored states of rounds that are not gone. The state ``waiting`` is not stored; it follows from the deadline."""

MAX_ROUNDS_NOT_GONE = 1000
"""Maximum number of rounds of one aggregator that are not gone."""

_ROWS_AT_A_TIME = 4
_BYTES_AT_A_TIME = _ROWS_AT_A_TIME * BLOCK_BYTES
_UPLOADS_AT_A_TIME = 1000  # below the maximum number of a statement's parameters

AnyKind = TypeVar("AnyKind", Terms, SumTerms)

_DELETED_BYTES, _DELETED_UPLOADS = 64 * 2**20, 1000
"""Maximum that one statement deletes, so that it ends within PostgreSQL's time limit for a statement."""


@dataclass(frozen=True)
class Progress:
    """How many bytes of an upload are stored, and how many it must have."""

    received: int
    expected: int

    @property
    def complete(self) -> bool:
        """Whether all bytes of the upload are stored."""
        return self.received == self.expected


def has_round(connection: Connection, run: str, number: int) -> bool:
    """Whether the store has the round ``number`` of ``run``."""
    return connection.scalar(select(rounds.c.id).where(rounds.c.run == run, rounds.c.round == number)) is not None


def round_row(connection: Connection, run: str, number: int, *, lock: str | None = None) -> Row[Any]:
    """Return a round's row. With ``lock`` ("shared" or "exclusive"), the round is locked until the transaction ends.

    Raises:
        Unknown: there is no such round.
    """
    if lock is not None:
        take_lock(connection, f"round {number} of {run}", shared=lock == "shared")
    row = connection.execute(select(rounds).where(rounds.c.run == run, rounds.c.round == number)).first()
    if row is None:
        raise Unknown(f"there is no round {number} of {run}")
    return row


def require_owner(row: Row[Any], owner: str) -> Row[Any]:
    """Return ``row`` if the round belongs to ``owner``.

    Raises:
        Forbidden: the round belongs to another aggregator.
    """
    if row.owner != owner:
        raise Forbidden(f"round {row.round} of {row.run} was opened by another aggregator: use the token of that one")
    return row


def check_run_owner(connection: Connection, owner: str, run: str) -> None:
    """Raise if another aggregator has opened a round of this run. Without this check, any aggregator could open the run's next round.

    The run is locked until the transaction ends, so that no other transaction opens a round of it after the check.

    Raises:
        Forbidden: another aggregator has opened a round of the run.
    """
    take_lock(connection, f"run {run}")
    run_owner = connection.scalar(select(rounds.c.owner).where(rounds.c.run == run).limit(1))  # all rounds of a run have the same owner
    if run_owner not in (None, owner):
        raise Forbidden(f"run {run} was begun by another aggregator: choose another name for this run")


def take_lock(connection: Connection, lock_name: str, *, shared: bool = False) -> None:
    """Take the lock ``lock_name`` until the transaction ends, exclusively or shared.

    On PostgreSQL this is an advisory lock, which is granted in the order of the requests. With a row lock, new shared requests would
    overtake a waiting exclusive request, so continuous uploads would keep a round from being released. SQLite needs no lock, because its
    writers run one at a time.
    """
    if not is_sqlite(connection):
        _lock(connection, "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock", lock_name)


def try_lock(connection: Connection, lock_name: str) -> bool:
    """Take the lock ``lock_name`` exclusively until the transaction ends. Return False without waiting if another transaction has it."""
    return is_sqlite(connection) or bool(_lock(connection, "pg_try_advisory_xact_lock", lock_name))


def _lock(connection: Connection, function: str, lock_name: str) -> object:
    """Call PostgreSQL's ``function`` for advisory locks, and return its result. These locks have numbers, so the name is hashed to one."""
    key = "pg_catalog.hashtextextended(CAST(:name AS text), CAST(0 AS bigint))"
    return connection.scalar(text(f"SELECT pg_catalog.{function}({key})"), {"name": lock_name})


def check_round_limit(connection: Connection, owner: str) -> None:
    """Raise a :class:`Conflict` if an aggregator already has :data:`MAX_ROUNDS_NOT_GONE` rounds."""
    query = select(func.count()).select_from(rounds).where(rounds.c.owner == owner, rounds.c.state.in_(STATES_NOT_GONE))
    if fetch_count(connection, query) >= MAX_ROUNDS_NOT_GONE:
        raise Conflict(f"this aggregator has {MAX_ROUNDS_NOT_GONE} unfinished rounds, the maximum: acknowledge or cancel some first")


def terms_as_columns(terms: Terms | SumTerms) -> dict[str, object]:
    """Return ``terms`` as the columns of a round's row.

    A sum round adds up the masked vectors, and keeps only the envelope of each upload, which holds its encrypted seed. So its row says that
    an upload is one record of an envelope's length.
    """
    kept_records = {"record_bytes": ENVELOPE_BYTES, "records_per_upload": 1} if isinstance(terms, SumTerms) else {}
    return terms.model_dump() | kept_records


def terms_in_row(row: Row[Any]) -> Terms | SumTerms:
    """Return the terms that a round's ``row`` holds."""
    kind: type[Terms | SumTerms] = Terms if row.bits is None else SumTerms  # only a sum round has a number of bits
    return kind.model_validate({name: getattr(row, name) for name in kind.model_fields})


def require_terms(row: Row[Any], kind: type[AnyKind]) -> AnyKind:
    """Return the terms of a round, which must be of the given ``kind``.

    Raises:
        Conflict: the round is of the other kind.
    """
    terms = terms_in_row(row)
    if not isinstance(terms, kind):
        takes = "shares of a sum" if isinstance(terms, SumTerms) else "sealed records"
        raise Conflict(f"round {row.round} of {row.run} takes only {takes}")
    return terms


def kept_bytes_per_upload(row: Row[Any]) -> int:
    """Return how many bytes of each upload are kept until the round is released."""
    return int(row.record_bytes * row.records_per_upload)


def upload_row(connection: Connection, row: Row[Any], client: str, upload_id: str) -> Row[Any]:
    """Return an upload of ``client`` in a round.

    Raises:
        Unknown: the client has no upload with this id.
    """
    query = select(uploads).where(uploads.c.round_id == row.id, uploads.c.client == client, uploads.c.upload_id == upload_id)
    upload = connection.execute(query).first()
    if upload is None:
        raise Unknown(f"this client has no upload of that id in round {row.round} of {row.run}: begin the upload first")
    return upload


def upload_progress(connection: Connection, row: Row[Any], client: str, upload_id: str) -> Progress:
    """Return how many bytes of an upload are stored. It raises the same errors as :func:`upload_row`."""
    return Progress(upload_row(connection, row, client, upload_id).received, kept_bytes_per_upload(row))


def count_complete_uploads(connection: Connection, row: Row[Any]) -> int:
    """Return how many uploads of a round are complete."""
    if row.bits is not None:
        return int(row.uploads)  # sum rounds keep a counter, because counting up to a million rows for each batch would take long
    query = select(func.count()).select_from(uploads).where(uploads.c.round_id == row.id, uploads.c.received == kept_bytes_per_upload(row))
    return fetch_count(connection, query)


def fetch_count(connection: Connection, query: Select[int]) -> int:
    """Run a ``query`` for a single number, and return the number."""
    return connection.scalars(query).one()


def stream_complete_uploads(connection: Connection, row: Row[Any]) -> Iterator[bytes]:
    """Yield the bytes of all complete uploads of a round, one after the other, a few blocks in memory at a time."""
    upload_bytes = kept_bytes_per_upload(row)
    complete_ids = connection.scalars(select(uploads.c.id).where(uploads.c.round_id == row.id, uploads.c.received == upload_bytes)).all()
    uploads_at_once = max(1, min(_UPLOADS_AT_A_TIME, _BYTES_AT_A_TIME // upload_bytes))  # several, if they are short
    for start in range(0, len(complete_ids), uploads_at_once):
        upload_ids = complete_ids[start : start + uploads_at_once]
        if uploads_at_once > 1:
            yield from _blocks_of_short_uploads(connection, upload_ids)
        else:
            yield from _blocks_of_long_upload(connection, upload_ids[0], upload_bytes)


def _blocks_of_short_uploads(connection: Connection, upload_ids: Sequence[int]) -> Sequence[bytes]:
    """Return the blocks of several short uploads, in order."""
    query = select(blocks.c.data).where(blocks.c.upload.in_(upload_ids)).order_by(blocks.c.upload, blocks.c.start)
    return connection.scalars(query).all()


def _blocks_of_long_upload(connection: Connection, upload_id: int, upload_bytes: int) -> Iterator[bytes]:
    """Yield the blocks of one long upload, a few rows at a time."""
    yielded_bytes = 0
    while yielded_bytes < upload_bytes:
        query = select(blocks.c.data).where(blocks.c.upload == upload_id, blocks.c.start >= yielded_bytes).order_by(blocks.c.start)
        next_blocks = connection.scalars(query.limit(_ROWS_AT_A_TIME)).all()
        if not next_blocks:
            break  # blocks are missing; the caller of stream_complete_uploads counts the records and raises
        yield from next_blocks
        yielded_bytes += sum(map(len, next_blocks))


def delete_uploads(connection: Connection, row: Row[Any]) -> None:
    """Delete all uploads of a round, and with them the names of the clients that have uploaded. Blocks are deleted in batches."""
    upload_ids = connection.scalars(select(uploads.c.id).where(uploads.c.round_id == row.id)).all()
    uploads_at_once = min(_DELETED_UPLOADS, max(1, _DELETED_BYTES // kept_bytes_per_upload(row)))
    for start in range(0, len(upload_ids), uploads_at_once):
        connection.execute(delete(blocks).where(blocks.c.upload.in_(upload_ids[start : start + uploads_at_once])))
    connection.execute(delete(uploads).where(uploads.c.round_id == row.id))
