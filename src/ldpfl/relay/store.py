"""The relay's store: rounds, uploads as they arrive, and the one release of each round. ``sum_store`` has the uploads of sum rounds.

Every method is one transaction: if the process is killed, the store is as it was before the call. Only ending a round takes several
transactions, see :mod:`ldpfl.relay.round_deletion`. Any number of threads and processes may share a store. On PostgreSQL each round has an
advisory lock: ``begin`` and the release hold it exclusively, appends share it. On SQLite transactions run one at a time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from sqlalchemy import Connection, Engine, Row, func, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError as PoolTimeout

from ldpfl.relay.database import reading, writing
from ldpfl.relay.deadlines import Deadlines, round_over_refusal
from ldpfl.relay.errors import Conflict, RoundOver, TooLong, UnfitStore, Unknown, WrongLength
from ldpfl.relay.protocol import OFFSET, RoundStatus, SumTerms, Terms
from ldpfl.relay.queries import (
    Progress,
    check_round_limit,
    check_run_owner,
    count_complete_uploads,
    delete_uploads,
    fetch_count,
    has_round,
    kept_bytes_per_upload,
    require_owner,
    require_terms,
    round_row,
    stream_complete_uploads,
    terms_as_columns,
    terms_in_row,
    upload_progress,
    upload_row,
)
from ldpfl.relay.round_deletion import GoneRounds
from ldpfl.relay.schema import blocks, is_sqlite, parts, rounds, uploads
from ldpfl.relay.sum_store import Sums, merge_partial_sums
from ldpfl.relay.telemetry import log_event, log_fault, log_round
from ldpfl.relay.uniform_order import part_count, scatter
from ldpfl.util.entropy import Words, secure_words


@dataclass(frozen=True, repr=False)
class RecordsPart:
    """One part of the mixed records, and how many parts there are."""

    data: bytes
    count: int


def steady_clock() -> Callable[[], float]:
    """Return a clock that starts at the wall clock's time and then runs steadily, so that rounds end even if the wall clock is set back."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


def _temporary_file() -> BinaryIO:
    # The file has no name, so the system deletes it when the process ends, even if the process is killed.
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="ldpfl-relay-"))


class Store:
    """Rounds, uploads and mixed records in the database behind ``engine``.

    Args:
        engine: engine of the database, from :func:`ldpfl.relay.database.open_engine`.
        words: source of the random words that decide the mixed order; only a test may give another source than the default.
        clock: returns seconds. By default it is this machine's clock for a SQLite store (see :func:`steady_clock`), and the server's clock
            for PostgreSQL, which all workers share. Deadlines are wall times, so they survive restarts.
        spool: opens the temporary file that records are mixed in.

    Attributes:
        is_available: whether a PostgreSQL store answered when :meth:`end_hung_connections` last asked it. True for SQLite.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        words: Words = secure_words,
        clock: Callable[[], float] | None = None,
        spool: Callable[[], BinaryIO] = _temporary_file,
    ) -> None:
        self.engine = engine
        self.is_available = True
        self._words = words
        self._deadlines = Deadlines(clock or (steady_clock() if is_sqlite(engine) else None))
        self._open_spool = spool
        self._gone_rounds = GoneRounds(engine)
        self.sums = Sums(engine, self._deadlines, self._gone_rounds)

    def check(self) -> None:
        """Raise a :class:`~ldpfl.relay.errors.StoreUnavailable` unless the store answers."""
        with reading(self.engine) as connection:
            connection.execute(select(rounds.c.id).limit(1))

    def open_round(self, owner: str, run: str, number: int, terms: Terms | SumTerms) -> RoundStatus:
        """Open a round for the aggregator ``owner``. A repeated call with equal terms changes nothing.

        Raises:
            Conflict: the round has other terms, or the aggregator has too many rounds.
            Forbidden: the round, or another one of its run, belongs to another aggregator.
        """
        with writing(self.engine) as connection:
            check_run_owner(connection, owner, run)
            is_new = not has_round(connection, run, number)
            if is_new:
                check_round_limit(connection, owner)
                closes_at = self._deadlines.now(connection) + terms.closes_in_s
                values = {"run": run, "round": number, "owner": owner, "state": "open", "closes_at": closes_at, **terms_as_columns(terms)}
                connection.execute(insert(rounds).values(values))
            row = require_owner(round_row(connection, run, number), owner)
            if terms_in_row(row) != terms:
                raise Conflict(
                    f"round {number} of {run} was opened before with other terms (settings): use the same ones, or another round number"
                )
            status = self._status(connection, row, owner)
        if is_new:
            log_round("round_opened", run, number, **terms.model_dump())
        return status

    def status(self, owner: str, run: str, number: int) -> RoundStatus:
        """Return the state of a round. ``owner`` is who asks: only the round's aggregator learns how many uploads are complete.

        Raises:
            Unknown: there is no such round.
        """
        with reading(self.engine) as connection:
            return self._status(connection, round_row(connection, run, number), owner)

    def begin(self, client: str, run: str, number: int, upload_id: str, length: int) -> Progress:
        """Begin the only upload of ``client`` in this round, or return the progress of an upload that was begun before.

        ``upload_id`` is the id that the client has chosen, and ``length`` the number of bytes that it announces.

        Raises:
            Unknown: there is no such round.
            RoundOver: it takes no uploads any more.
            WrongLength: the upload would not have the length of the round's terms.
            Conflict: the round is a sum round or full, the client has another upload in it, or another client's upload has this id.
            StoreFull: the relay's disk is full; nothing was stored.
        """
        self._gone_rounds.check_disk_room()
        with writing(self.engine) as connection:
            row = round_row(connection, run, number, lock="exclusive")
            expected = require_terms(row, Terms).upload_bytes
            if length != expected:
                raise WrongLength(f"an upload has exactly {expected} bytes in this round, not {length}")
            upload = connection.execute(select(uploads).where(uploads.c.round_id == row.id, uploads.c.client == client)).first()
            if upload is None:
                self._deadlines.check_open(connection, row)
                _create_upload(connection, row, client, upload_id)
                return Progress(0, expected)
            if upload.upload_id != upload_id:
                raise Conflict("this client has another upload in this round already; it may make one in each round")
            return self._require_open_or_complete(connection, row, Progress(upload.received, expected))

    def progress(self, client: str, run: str, number: int, upload_id: str) -> Progress:
        """Return how many bytes of an upload of ``client`` are stored.

        Raises:
            Unknown: there is no such round, or the client has no such upload in it.
            RoundOver: it takes no uploads any more.
        """
        with reading(self.engine) as connection:
            row = round_row(connection, run, number)
            if row.state != "open":
                raise round_over_refusal(row)
            require_terms(row, Terms)
            return self._require_open_or_complete(connection, row, upload_progress(connection, row, client, upload_id))

    def append(self, client: str, run: str, number: int, upload_id: str, offset: int, data: bytes) -> Progress:
        """Store ``data``, the bytes of an upload that follow its first ``offset`` bytes. They are on disk when this returns.

        Raises:
            Unknown: there is no such round, or the client has no such upload in it.
            RoundOver: it takes no uploads any more.
            Conflict: another offset is next; the refusal's header says which.
            TooLong: the upload would get more bytes than the round's terms say.
            StoreFull: the relay's disk is full; nothing was stored.
        """
        self._gone_rounds.check_disk_room()
        with writing(self.engine) as connection:
            row = round_row(connection, run, number, lock="shared")
            self._deadlines.check_open(connection, row)
            upload = upload_row(connection, row, client, upload_id)
            expected = require_terms(row, Terms).upload_bytes
            if offset + len(data) > expected:
                raise TooLong(f"the upload would have {offset + len(data)} bytes, but in this round an upload has exactly {expected} bytes")
            # The offset is compared inside the UPDATE. So of two concurrent requests that send the same bytes, only one changes the row.
            advance = update(uploads).where(uploads.c.id == upload.id, uploads.c.received == offset).values(received=offset + len(data))
            if connection.execute(advance).rowcount != 1:
                raise wrong_offset_refusal(upload_progress(connection, row, client, upload_id))
            if data:
                connection.execute(insert(blocks).values(upload=upload.id, start=offset, data=data))
            return Progress(offset + len(data), expected)

    def part(self, owner: str, run: str, number: int, index: int) -> RecordsPart:
        """Return the part ``index``, from 0, of the mixed records or the sum: the same bytes each time.

        The first call after the deadline mixes the round. ``owner`` is the aggregator that asks.

        Raises:
            Unknown: there is no such round or part.
            Forbidden: the round belongs to another aggregator.
            TooEarly: the deadline has not passed, or too few clients have uploaded.
            RoundOver: the records were acknowledged and deleted.
            StoreFull: the disk has no room for mixing; the round is unchanged.
        """
        with reading(self.engine) as connection:
            row = require_owner(round_row(connection, run, number), owner)
        if row.state == "open":
            self._release(owner, run, number, index)
        with reading(self.engine) as connection:
            row = round_row(connection, run, number)
            if row.state == "gone":
                raise RoundOver(f"the records of round {number} of {run} were deleted when it was acknowledged or cancelled")
            if index >= row.parts:  # compared here, because an index may be too large for the database's column
                raise _no_such_part(row, row.parts)
            data = connection.scalar(select(parts.c.data).where(parts.c.round_id == row.id, parts.c.number == index))
        if data is None:  # the round has been deleted since its row was read
            raise _no_such_part(row, row.parts)
        return RecordsPart(data, row.parts)

    def acknowledge(self, owner: str, run: str, number: int) -> None:
        """Delete the round's mixed records or sum. Its row stays, marked as gone, so a repeated call changes nothing.

        Raises:
            Unknown: there is no such round.
            Forbidden: the round belongs to another aggregator.
            Conflict: the records were not handed out yet.
        """
        self._end_round(owner, run, number, "round_acknowledged", only_released=True)

    def cancel(self, owner: str, run: str, number: int) -> None:
        """Delete a round's data, whatever its state. Its row stays, marked as gone, so a repeated call changes nothing.

        Raises:
            Unknown: there is no such round.
            Forbidden: the round belongs to another aggregator.
        """
        self._end_round(owner, run, number, "round_cancelled", only_released=False)

    @property
    def untidy(self) -> bool:
        """Whether :meth:`tidy` still has work to do."""
        return self._gone_rounds.has_pending_work

    def tidy(self, *, at_once: bool = True) -> None:
        """Delete data that is left of acknowledged or cancelled rounds. An error is logged, and the next call tries again.

        A killed process leaves such data, and so does a full disk.

        Args:
            at_once: whether to finish regardless of how long it takes, and to shorten deadlines that a change of the clock has moved away.
                Otherwise only a share of the time is used.
        """
        try:
            if at_once:
                self._shorten_late_deadlines()
            self._gone_rounds.delete(at_once=at_once)
        except Exception as error:  # any error: the caller's loop must live to try again
            log_fault("tidy_failed", error)

    def _shorten_late_deadlines(self) -> None:
        """Shorten each open round that would stay open for longer than its whole duration, because the clock was set back meanwhile."""
        with writing(self.engine) as connection:
            latest_deadline = self._deadlines.now(connection) + rounds.c.closes_in_s
            is_too_late = rounds.c.closes_at > latest_deadline
            connection.execute(update(rounds).where(rounds.c.state == "open", is_too_late).values(closes_at=latest_deadline))

    def now(self) -> float:
        """Return the current time for deadlines, in seconds."""
        with reading(self.engine) as connection:
            return self._deadlines.now(connection)

    def end_hung_connections(self) -> None:
        """End the database connections of hung relay processes, which would keep their rounds locked for ever. SQLite has no such locks.

        The relay calls this every few seconds. So it also logs once that PostgreSQL has become unavailable, and once that it is back.
        """
        if is_sqlite(self.engine):
            return
        from ldpfl.relay.postgres_connections import end_hung_connections

        try:
            end_hung_connections(self.engine)
        except (OperationalError, UnfitStore) as error:
            if self.is_available:
                log_fault("store_unavailable", error)
            self.is_available = False
        except (DBAPIError, PoolTimeout) as error:  # the store may answer: requests may hold all connections
            log_fault("hung_not_ended", error)
        else:
            if not self.is_available:
                log_event("store_available")
            self.is_available = True

    def close(self) -> None:
        """Add the shares that are waiting to their sums, and close the connections to the store."""
        self.sums.close()
        self.engine.dispose()

    def _release(self, owner: str, run: str, number: int, index: int) -> None:
        """Release the round: replace its uploads by mixed parts, in one transaction. If several workers try at once, one of them does it.

        ``index`` is the part that the caller will read. An index that is too large raises before the round is changed.
        """
        started_at_s = time.monotonic()
        with writing(self.engine) as connection:
            row = require_owner(round_row(connection, run, number, lock="exclusive"), owner)
            if row.state != "open":
                return  # another worker was first
            self._deadlines.check_releasable(connection, row)
            upload_count = fetch_count(connection, select(func.count()).select_from(uploads).where(uploads.c.round_id == row.id))
            complete = count_complete_uploads(connection, row)
            first_part = _first_records_part(row)  # 0, unless this is a sum round, whose first parts hold the sum
            part_total = first_part + part_count(complete * kept_bytes_per_upload(row))
            if index >= part_total:
                raise _no_such_part(row, part_total)
            if first_part:
                merge_partial_sums(connection, row)
            self._store_mixed(connection, row, complete, range(first_part, part_total))
            connection.execute(update(rounds).where(rounds.c.id == row.id).values(state="released", uploads=complete, parts=part_total))
        self._gone_rounds.scrub()  # removes traces of the deleted uploads, which show who sent which record
        seconds = round(time.monotonic() - started_at_s, 3)
        log_round("round_released", run, number, uploads=complete, incomplete=upload_count - complete, parts=part_total, seconds=seconds)

    def _store_mixed(self, connection: Connection, row: Row[Any], complete: int, part_numbers: range) -> None:
        """Replace the round's uploads by their records in mixed order, stored as parts with the numbers ``part_numbers``.

        ``complete`` is the number of complete uploads. Records of incomplete uploads are deleted with them.
        """
        with self._open_spool() as spool:
            scattered = scatter(stream_complete_uploads(connection, row), row.record_bytes, len(part_numbers), self._words, spool)
            if scattered.records != complete * row.records_per_upload:
                raise RuntimeError("the number of records in the store differs from what the uploads state")
            delete_uploads(connection, row)
            for index, number in enumerate(part_numbers):
                connection.execute(insert(parts).values(round_id=row.id, number=number, data=scattered.part(index)))

    def _end_round(self, owner: str, run: str, number: int, event: str, *, only_released: bool) -> None:
        """Mark the round as gone, log the ``event``, and delete the round's data; see :meth:`_mark_gone` for ``only_released``."""
        if self._gone_rounds.retry_without_reserve(lambda: self._mark_gone(owner, run, number, only_released=only_released)):
            log_round(event, run, number)
        self._gone_rounds.delete()

    def _mark_gone(self, owner: str, run: str, number: int, *, only_released: bool) -> bool:
        """Mark the round as gone, after which its data may be deleted. Return False if it was marked already.

        With ``only_released``, raise a :class:`Conflict` if the round was not released yet.
        """
        with writing(self.engine) as connection:
            row = require_owner(round_row(connection, run, number, lock="exclusive"), owner)
            if row.state == "gone":
                return False
            if only_released and row.state != "released":
                raise Conflict(f"the records of round {number} of {run} were not handed out yet; there is nothing to acknowledge")
            connection.execute(update(rounds).where(rounds.c.id == row.id).values(state="gone"))
            return True

    def _status(self, connection: Connection, row: Row[Any], asker: str) -> RoundStatus:
        """Return the round's status as ``asker`` may see it: only the round's owner learns how many uploads are complete."""
        state, seconds_left = self._deadlines.state(connection, row)
        complete = None
        if asker == row.owner:
            # The release deletes the uploads, and keeps their number in the row.
            complete = count_complete_uploads(connection, row) if row.state == "open" else row.uploads
        return RoundStatus(run=row.run, round=row.round, state=state, seconds_left=seconds_left, terms=terms_in_row(row), uploads=complete)

    def _require_open_or_complete(self, connection: Connection, row: Row[Any], progress: Progress) -> Progress:
        """Return ``progress``, or raise if the upload is incomplete and the round takes no uploads any more."""
        if not progress.complete:
            self._deadlines.check_open(connection, row)
        return progress


def wrong_offset_refusal(progress: Progress) -> Conflict:
    """Return the refusal of bytes that are not the next ones of their upload. The refusal's header says which byte is next."""
    return Conflict(f"the next byte of this upload must be number {progress.received}, counted from 0", {OFFSET: str(progress.received)})


def _first_records_part(row: Row[Any]) -> int:
    """Return the number of the first part that holds mixed records. In a sum round, the parts of the sum come before it."""
    terms = terms_in_row(row)
    return len(terms.sum_parts()) if isinstance(terms, SumTerms) else 0


def _no_such_part(row: Row[Any], count: int) -> Unknown:
    """Return the refusal of a part's number that is not below ``count``."""
    return Unknown(f"round {row.round} of {row.run} has no such part: it has {count} parts, counted from 0")


def _create_upload(connection: Connection, row: Row[Any], client: str, upload_id: str) -> None:
    """Add an upload without bytes to the round; raise a :class:`Conflict` if its id is taken or the round is full."""
    in_round = uploads.c.round_id == row.id
    if connection.scalar(select(uploads.c.id).where(in_round, uploads.c.upload_id == upload_id)) is not None:
        raise Conflict("this upload id is taken in this round; choose another one")
    if fetch_count(connection, select(func.count()).select_from(uploads).where(in_round)) >= row.max_uploads:
        raise Conflict(f"the round is full: it takes {row.max_uploads} uploads")
    connection.execute(insert(uploads).values(round_id=row.id, client=client, upload_id=upload_id))
