"""How a round ends: it is marked as gone first, then all that it held is deleted, a little at a time.

So a disk that is full can be made room on: marking needs a page or two of a journal, and each of the deletions some MiB,
which a file beside a SQLite store keeps free for them. A relay that is killed in between goes on when it is started again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, delete, func, select, tuple_, union
from sqlalchemy.exc import SQLAlchemyError

from ldpfl.relay.database import store_errors
from ldpfl.relay.errors import StoreFull, StoreUnavailable, UnfitStore
from ldpfl.relay.files import Reserve
from ldpfl.relay.schema import READ_ONLY, blocks, is_sqlite, parts, rounds, uploads
from ldpfl.relay.telemetry import log_fault

_BATCH_BYTES = 2 * 2**20
_BATCH_ROWS = 250
_AT_ONCE_S, _SHARE = 3.0, 0.1

T = TypeVar("T")


class _Allowance:
    """A tenth of the time, of which three seconds may be taken at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left, self._then = clock, _AT_ONCE_S, clock()

    @property
    def spent(self) -> bool:
        """Whether nothing is left for now."""
        now = self._clock()
        self._left, self._then = min(_AT_ONCE_S, self._left + _SHARE * (now - self._then)), now
        return self._left <= 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Take what the block takes, which may be more than is left."""
        began = self._clock()
        try:
            yield
        finally:
            self._left -= self._clock() - began


class _Due:
    """Whether something is to be done, which several threads ask for and do: what one has done hides nothing that was asked for since."""

    def __init__(self) -> None:
        self._asked, self._done, self._lock = 1, 0, threading.Lock()  # nobody knows what a process before this one left

    def __bool__(self) -> bool:
        return self._done < self._asked

    def set(self) -> int:
        """Ask for it; return what to tell :meth:`clear` once it is done."""
        with self._lock:
            self._asked += 1
            return self._asked

    def clear(self, asked: int) -> None:
        """Note that all is done that was asked for up to then."""
        with self._lock:
            self._done = max(self._done, asked)


class Leftovers:
    """What rounds that are gone have left in the store behind ``engine``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._undeleted, self._unscrubbed = _Due(), _Due()
        self._scrubbing = _Allowance()
        self._reserve = Reserve(Path(f"{Path(str(engine.url.database)).resolve()}.reserve")) if is_sqlite(engine) else None

    def with_room(self, action: Callable[[], T]) -> T:
        """Do it, and where the disk is full do it once more with the room that is kept for it.

        Raises:
            StoreFull: that was not enough, or there is none.
        """
        try:
            return action()
        except StoreFull:
            if self._reserve is None or not self._reserve.give_up():
                raise
            return action()

    @property
    def waiting(self) -> bool:
        """Whether something is left that could not be deleted, or not yet, or room is to be taken for that."""
        return bool(self._undeleted or self._unscrubbed) or not (self._reserve is None or self._reserve.whole)

    def check_room(self) -> None:
        """Refuse what would take the room that ending rounds needs.

        Raises:
            StoreFull: the reserve is not whole.
        """
        if self._reserve is None or self._reserve.whole:
            return
        self._reserve.make()
        if not self._reserve.whole:
            raise StoreFull("the relay's disk is full; nothing was stored")

    def delete(self, *, at_once: bool = False) -> None:
        """Delete all of it, and then what the database keeps beside its tables, as far as it lets us; ``at_once`` whatever that takes.

        Raises:
            StoreFull: the room that is kept for it was not enough.
            StoreUnavailable: the store does not answer, or another process holds it.
        """
        mine = self._undeleted.set()
        left = self._rounds()
        for round_id in left:
            self._delete_round(round_id)
        if left or self._unscrubbed:  # else ending empty rounds, over and over, would have the whole file written as often
            self.scrub(at_once=at_once)
        self._undeleted.clear(mine)
        if self._reserve is not None:
            self._reserve.make()

    def scrub(self, *, at_once: bool = False) -> None:
        """Take deleted rows out of the database's files.

        SQLite overwrites them where they lie, and not the copies that it leaves in the unused room of pages when it moves rows
        from one to another: so all that is left is written anew. That takes as long as all rounds are large, and must not let whoever
        ends rounds of his own hold up all others: what would take more than its share of the time is left waiting, as is what fails.
        """
        mine = self._unscrubbed.set()
        if not at_once and self._scrubbing.spent:
            return
        try:
            with self._scrubbing.timed():
                self._scrub()
            self._unscrubbed.clear(mine)
        except (SQLAlchemyError, sqlite3.Error, OSError, UnfitStore, StoreUnavailable) as error:
            log_fault("scrub_failed", error)

    def _scrub(self) -> None:
        if is_sqlite(self._engine):
            folder = str(Path(str(self._engine.url.database)).resolve().parent).replace("'", "''")
            with closing(self._engine.raw_connection()) as connection:
                # What is written anew goes by way of a file beside the store, not on a disk that its operator did not choose for it.
                connection.cursor().execute(f"PRAGMA temp_store_directory = '{folder}'")
                connection.cursor().execute("VACUUM")
            return
        from ldpfl.relay.postgres import vacuum

        vacuum(self._engine, (blocks, uploads, parts))

    def _rounds(self) -> list[int]:
        held = union(select(uploads.c.round_id), select(parts.c.round_id)).subquery()  # rather than all rounds that ever were
        gone = select(rounds.c.id).join(held, held.c.round_id == rounds.c.id).where(rounds.c.state == "gone")
        with store_errors(), self._engine.connect().execution_options(**READ_ONLY) as connection:
            return list(connection.scalars(gone))

    def _delete_round(self, round_id: int) -> None:
        """Delete what a round holds, in batches that get smaller where there is no room for the journal of one.

        Raises:
            StoreFull: not even for the smallest.
        """
        size, left = _BATCH_BYTES, True
        while left:
            try:
                left = self.with_room(lambda size=size: self._delete_some(round_id, size))  # type: ignore[misc]
            except StoreFull:
                if size == 0:
                    raise
                size //= 4

    def _delete_some(self, round_id: int, size: int) -> bool:
        """Delete some rows of a round, ``size`` bytes and one row at least; return whether there were any."""
        with store_errors(), self._engine.begin() as connection:
            return (
                _delete_blocks(connection, round_id, size)
                or _delete_uploads(connection, round_id)
                or _delete_parts(connection, round_id, size)
            )


def _delete_blocks(connection: Connection, round_id: int, size: int) -> bool:
    found = select(func.length(blocks.c.data), blocks.c.upload, blocks.c.start).join(uploads).where(uploads.c.round_id == round_id)
    some = _some([tuple(row) for row in connection.execute(found.limit(_BATCH_ROWS))], size)
    connection.execute(delete(blocks).where(tuple_(blocks.c.upload, blocks.c.start).in_(some)))
    return bool(some)


def _delete_uploads(connection: Connection, round_id: int) -> bool:
    some = connection.scalars(select(uploads.c.id).where(uploads.c.round_id == round_id).limit(_BATCH_ROWS)).all()
    connection.execute(delete(uploads).where(uploads.c.id.in_(some)))
    return bool(some)


def _delete_parts(connection: Connection, round_id: int, size: int) -> bool:
    found = select(func.length(parts.c.data), parts.c.round_id, parts.c.number).where(parts.c.round_id == round_id)
    some = _some([tuple(row) for row in connection.execute(found.limit(_BATCH_ROWS))], size)
    connection.execute(delete(parts).where(tuple_(parts.c.round_id, parts.c.number).in_(some)))
    return bool(some)


def _some(rows: list[tuple[int, int, int]], most: int) -> list[tuple[int, int]]:
    """Return the keys of as many ``rows``, (bytes, key, key), as have ``most`` bytes, and one at least."""
    taken: list[tuple[int, int]] = []
    size = 0
    for length, *key in rows:
        if taken and size + length > most:
            break
        taken.append((key[0], key[1]))
        size += length
    return taken
