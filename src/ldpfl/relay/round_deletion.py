"""Delete rounds that have ended: a round is first marked as gone, then its data is deleted in small batches.

This works even on a full disk: marking needs a page or two of a journal, and each batch some MiB, which a reserve file beside a SQLite
store keeps free. If the relay is killed in between, it continues when it is started again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, Table, delete, func, select, tuple_, union
from sqlalchemy.exc import SQLAlchemyError

from ldpfl.relay.database import store_errors
from ldpfl.relay.errors import StoreFull, StoreUnavailable, UnfitStore
from ldpfl.relay.files import Reserve
from ldpfl.relay.schema import READ_ONLY, blocks, is_sqlite, parts, rounds, tokens, uploads
from ldpfl.relay.telemetry import log_event, log_fault

_BATCH_BYTES = 2 * 2**20
_BATCH_ROWS = 250
_REWRITTEN_BYTES = 64 * 2**20
"""Largest size of other rounds' data that PostgreSQL rewrites: it takes as much room again, and about a second, while uploads wait."""
_RETRY_S = 60.0
"""Seconds after which deleted rows that another transaction has kept in PostgreSQL are tried again."""
_MAX_SAVED_S, _SHARE_OF_TIME = 3.0, 0.1
"""Seconds of a time allowance that may be saved up, and the allowance's share of all time."""

_SCRUBBED = (blocks, uploads, parts, tokens)

T = TypeVar("T")


class _Allowance:
    """Time allowance for a task: a tenth of all time, of which up to three seconds may be saved up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left_s, self._updated_at = clock, _MAX_SAVED_S, clock()

    @property
    def is_used_up(self) -> bool:
        """Whether the task has used up its time for now. The time since the last look adds to the allowance first."""
        now = self._clock()
        self._left_s = min(_MAX_SAVED_S, self._left_s + _SHARE_OF_TIME * (now - self._updated_at))
        self._updated_at = now
        return self._left_s <= 0

    @contextmanager
    def subtract_duration(self) -> Iterator[None]:
        """Subtract the duration of the ``with`` block from the allowance, which may become negative."""
        started_at = self._clock()
        try:
            yield
        finally:
            self._left_s -= self._clock() - started_at


class _PendingWork:
    """A thread-safe flag for pending work. A request that arrives while the work runs is kept for the next run."""

    def __init__(self) -> None:
        # Numbers of the last request, and of the last one that is done. Pending at first: an earlier process may have left work.
        self._requested, self._done = 1, 0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return self._done < self._requested

    @property
    def last_request(self) -> int:
        """Number of the last request."""
        return self._requested

    def set(self) -> int:
        """Request the work. Return the request's number, for :meth:`clear` once the work is done."""
        with self._lock:
            self._requested += 1
            return self._requested

    def clear(self, request: int) -> None:
        """Record that all requests up to the number ``request`` are done."""
        with self._lock:
            self._done = max(self._done, request)


class GoneRounds:
    """Deletes the data of rounds that are gone, which means acknowledged or cancelled, from the store behind ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending_deletion, self._pending_scrub = _PendingWork(), _PendingWork()
        self._scrub_time = _Allowance()
        self._next_rewrite_s = 0.0  # time before which rows that another transaction has kept are not tried again
        # Number of a scrub's request, and the tables that were too large for it to rewrite.
        self._too_large: tuple[int, tuple[Table, ...]] = (0, ())
        self._reserve = Reserve(Path(f"{Path(str(engine.url.database)).resolve()}.reserve")) if is_sqlite(engine) else None

    def retry_without_reserve(self, action: Callable[[], T]) -> T:
        """Do ``action``. If the disk is full, delete the reserve file and try once more.

        Raises:
            StoreFull: the room of the reserve was not enough, or there is no reserve.
        """
        try:
            return action()
        except StoreFull:
            if self._reserve is None or not self._reserve.delete():
                raise
            return action()

    @property
    def has_pending_work(self) -> bool:
        """Whether data must still be deleted or scrubbed, or the reserve enlarged."""
        is_reserve_small = self._reserve is not None and not self._reserve.is_full_size
        return bool(self._pending_deletion or self._pending_scrub) or is_reserve_small

    def check_disk_room(self) -> None:
        """Raise if the disk has too little room to store more data and still delete ended rounds later.

        Raises:
            StoreFull: the reserve does not have its full size, and cannot be enlarged to it.
        """
        if self._reserve is None or self._reserve.is_full_size:
            return
        self._reserve.enlarge()
        if not self._reserve.is_full_size:
            raise StoreFull("the relay's disk is full; nothing was stored")

    def delete(self, *, at_once: bool = False) -> None:
        """Delete the data of all rounds that are gone (acknowledged or cancelled), then scrub deleted rows from the database's files.

        Args:
            at_once: whether to scrub regardless of how long it takes.

        Raises:
            StoreFull: the reserve was not enough.
            StoreUnavailable: the store does not answer, or another process holds it.
        """
        request = self._pending_deletion.set()
        round_ids = self._round_ids_with_data()
        for round_id in round_ids:
            self._delete_round(round_id)
        # Not if nothing was deleted, because a scrub rewrites the whole file.
        if round_ids or (self._pending_scrub and not self._must_wait(at_once=at_once)):
            self.scrub(at_once=at_once)
        self._pending_deletion.clear(request)  # if another thread has requested a deletion since, it stays pending
        if self._reserve is not None:
            self._reserve.enlarge()

    def scrub(self, *, at_once: bool = False) -> None:
        """Remove deleted rows from the database's files, by rewriting the remaining data.

        SQLite overwrites deleted rows in place, but not the copies that it leaves in unused parts of pages when it moves rows. PostgreSQL
        overwrites nothing. Rewriting takes time in proportion to all rounds. An aggregator that ends many rounds must not delay the
        others, so without ``at_once`` scrubbing takes a tenth of the time at most, and in PostgreSQL tables of more than
        :data:`_REWRITTEN_BYTES` wait until rounds have ended. Until all is rewritten, and after an error, the scrub stays pending for a
        later call.
        """
        request = self._pending_scrub.set()
        if not at_once and self._scrub_time.is_used_up:
            return
        try:
            with self._scrub_time.subtract_duration():
                is_complete = self._scrub(request)
            if is_complete:
                self._pending_scrub.clear(request)
        except (SQLAlchemyError, sqlite3.Error, OSError, UnfitStore, StoreUnavailable) as error:
            log_fault("scrub_failed", error)

    def free_outdated_sums(self) -> None:
        """Let PostgreSQL use the room of outdated partial sums again, while their round goes on. An error is only logged."""
        from ldpfl.relay.postgres_connections import vacuum

        try:
            vacuum(self._engine, (parts,))
        except (SQLAlchemyError, StoreUnavailable) as error:
            log_fault("scrub_failed", error)

    def _scrub(self, request: int) -> bool:
        """Rewrite the remaining data now, as the work ``request``. Return whether all deleted rows are gone."""
        if is_sqlite(self._engine):
            folder = str(Path(str(self._engine.url.database)).resolve().parent).replace("'", "''")  # as SQL writes a quote in a text
            with closing(self._engine.raw_connection()) as connection:
                # VACUUM's temporary file goes beside the store, not to a disk that the operator did not choose for its data.
                connection.cursor().execute(f"PRAGMA temp_store_directory = '{folder}'")
                connection.cursor().execute("VACUUM")
            return True
        from ldpfl.relay.postgres_connections import vacuum

        large = self._large_tables()
        is_complete = vacuum(self._engine, _SCRUBBED, rewritten=[table for table in _SCRUBBED if table not in large])
        if is_complete:
            self._too_large = request, large
        else:  # a transaction may take long, and each rewrite leaves some room unused in PostgreSQL's catalogs
            self._next_rewrite_s = time.monotonic() + _RETRY_S
            log_event("scrub_incomplete")
        return is_complete and not large

    def _must_wait(self, *, at_once: bool) -> bool:
        """Return whether it is too early to rewrite again, or the last scrub has left only tables that are still too large for that."""
        if not at_once and time.monotonic() < self._next_rewrite_s:
            return True
        request, too_large = self._too_large
        return request == self._pending_scrub.last_request and set(too_large) <= set(self._large_tables())

    def _large_tables(self) -> tuple[Table, ...]:
        """Return the tables of PostgreSQL that hold more than :data:`_REWRITTEN_BYTES` of rounds that have not ended."""
        with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
            uploaded = connection.scalar(select(func.sum(uploads.c.received))) or 0
            mixed = connection.scalar(select(func.sum(func.length(parts.c.data)))) or 0
        return (*((blocks, uploads) if uploaded > _REWRITTEN_BYTES else ()), *((parts,) if mixed > _REWRITTEN_BYTES else ()))

    def _round_ids_with_data(self) -> list[int]:
        """Return the ids of rounds that are gone (acknowledged or cancelled) and still have data."""
        # The query starts from the data, because few rounds have data and millions may be gone.
        with_data = union(select(uploads.c.round_id), select(parts.c.round_id)).subquery()
        query = select(rounds.c.id).join(with_data, with_data.c.round_id == rounds.c.id).where(rounds.c.state == "gone")
        with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
            return list(connection.scalars(query))

    def _delete_round(self, round_id: int) -> None:
        """Delete a round's data in batches, which get smaller if the disk has no room for a batch's journal.

        Raises:
            StoreFull: the disk has no room even for the smallest batch.
        """
        batch_bytes, has_more = _BATCH_BYTES, True
        while has_more:
            try:
                has_more = self.retry_without_reserve(partial(self._delete_batch, round_id, batch_bytes))
            except StoreFull:
                if batch_bytes == 0:  # a batch of a single row
                    raise
                batch_bytes //= 4

    def _delete_batch(self, round_id: int, batch_bytes: int) -> bool:
        """Delete rows of a round, about ``batch_bytes`` bytes and at least one row. Return False once no row was left to delete."""
        with store_errors(), self._engine.begin() as connection:
            return (  # only the first that finds rows; blocks before uploads, since each block refers to its upload
                _delete_blocks(connection, round_id, batch_bytes)
                or _delete_uploads(connection, round_id)
                or _delete_parts(connection, round_id, batch_bytes)
            )


def _delete_blocks(connection: Connection, round_id: int, batch_bytes: int) -> bool:
    """Delete up to ``batch_bytes`` bytes of the blocks of a round's uploads. Return False once no block was left."""
    query = select(func.length(blocks.c.data), blocks.c.upload, blocks.c.start).join(uploads).where(uploads.c.round_id == round_id)
    keys = _batch_keys([tuple(row) for row in connection.execute(query.limit(_BATCH_ROWS))], batch_bytes)
    connection.execute(delete(blocks).where(tuple_(blocks.c.upload, blocks.c.start).in_(keys)))
    return bool(keys)


def _delete_uploads(connection: Connection, round_id: int) -> bool:
    """Delete up to :data:`_BATCH_ROWS` uploads of a round, whose blocks the caller has deleted. Return False once no upload was left."""
    ids = connection.scalars(select(uploads.c.id).where(uploads.c.round_id == round_id).limit(_BATCH_ROWS)).all()
    connection.execute(delete(uploads).where(uploads.c.id.in_(ids)))
    return bool(ids)


def _delete_parts(connection: Connection, round_id: int, batch_bytes: int) -> bool:
    """Delete up to ``batch_bytes`` bytes of a round's mixed parts. Return False once no part was left."""
    query = select(func.length(parts.c.data), parts.c.round_id, parts.c.number).where(parts.c.round_id == round_id)
    keys = _batch_keys([tuple(row) for row in connection.execute(query.limit(_BATCH_ROWS))], batch_bytes)
    connection.execute(delete(parts).where(tuple_(parts.c.round_id, parts.c.number).in_(keys)))
    return bool(keys)


def _batch_keys(rows: list[tuple[int, int, int]], max_bytes: int) -> list[tuple[int, int]]:
    """Return the primary keys of the first rows that have at most ``max_bytes`` bytes together, and of one row at least.

    ``rows`` holds the length of each row's data in bytes, and then the two columns of its primary key.
    """
    keys: list[tuple[int, int]] = []
    total_bytes = 0
    for row_bytes, first_key, second_key in rows:
        if keys and total_bytes + row_bytes > max_bytes:
            break
        keys.append((first_key, second_key))
        total_bytes += row_bytes
    return keys
