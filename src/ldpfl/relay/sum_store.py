"""The uploads of sum rounds. They are added up as they arrive, many in one transaction, and only the envelope of each upload is kept.

An added upload can never be removed from the sum, so the signature of its envelope is checked first.

The sum is stored as the round's first parts, where the mixed records of other rounds go. Envelopes are stored as uploads of one block each.
So release, acknowledgement and deletion work as for all rounds. Relay processes that add at the same time use different partial sums: a
batch takes the first partial sum that no other process holds, and the release adds all of them up. One transaction changes both the
partial sum and the list of uploads, so if a process is killed, each upload is in both or in neither.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from typing import Any, BinaryIO, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, Row, and_, delete, insert, select, union, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from ldpfl.errors import ProtocolError
from ldpfl.relay.database import reading, store_errors, writing
from ldpfl.relay.deadlines import Deadlines
from ldpfl.relay.errors import Conflict, Forbidden, Refusal, RoundOver, WrongLength
from ldpfl.relay.protocol import SumTerms
from ldpfl.relay.queries import require_terms, round_row, take_lock, try_lock
from ldpfl.relay.round_deletion import GoneRounds
from ldpfl.relay.schema import blocks, is_sqlite, parts, rounds, uploads
from ldpfl.relay.tokens import Owner
from ldpfl.transport.sums.envelopes import ENVELOPE_BYTES, SumBinding, check_signed
from ldpfl.transport.sums.masks import fold, zeros

_IN_MEMORY_BYTES = 4 * 2**20
"""Maximum size of a body in memory; longer bodies wait in a file."""

_VACUUMED_BYTES = 64 * 2**20
"""Bytes of outdated partial sums in PostgreSQL after which the relay vacuums its tables."""

_PARTIAL_SUMS = 8
"""Number of partial sums of a round, and so of processes that add at once. A further process waits for one of them."""

_DEADLOCK = "40P01"
"""PostgreSQL's error code for a deadlock of two transactions."""


class _Raced(Exception):
    """Another process has changed the list of the round's uploads in the meantime."""


@dataclass(frozen=True, eq=False, repr=False)
class ExpectedShare:
    """An announced upload, with the key that must have signed its envelope and the round that the signature must name."""

    client: str
    run: str
    number: int
    upload_id: str
    signing_key: Ed25519PublicKey
    binding: SumBinding


@dataclass(frozen=True, eq=False, repr=False)
class Share:
    """A whole upload: the masked vector, at the beginning of ``body``, and its envelope."""

    client: str
    upload_id: str
    envelope: bytes
    body: BinaryIO


Batch = list[tuple[Share, Future[None]]]


class Sums:
    """Adds shares to the running sums in the database. One thread of this process adds all shares that are waiting."""

    def __init__(self, engine: Engine, deadlines: Deadlines, gone_rounds: GoneRounds) -> None:
        self._engine, self._deadlines, self._gone_rounds = engine, deadlines, gone_rounds
        self._thread = ThreadPoolExecutor(1, "folding")
        self._waiting: dict[tuple[str, int], Batch] = {}
        self._lock = threading.Lock()
        self._outdated_bytes = 0

    def check(self, client: Owner, run: str, number: int, upload_id: str, length: int) -> ExpectedShare:
        """Check that an upload of ``length`` bytes would be accepted, and return how it must be signed.

        An upload that is in the sum already is accepted again, for clients that got no answer.

        Raises:
            Forbidden: the client's token has no signing key.
            Unknown: there is no such round.
            RoundOver: it takes no uploads any more.
            WrongLength: the upload would not have the length of the round's terms.
            Conflict: it is no sum round, the client has another upload in it, the envelope is another client's, or the round is full.
            StoreFull: the relay's disk is full; nothing was stored.
        """
        self._gone_rounds.check_disk_room()
        with reading(self._engine) as connection:
            row = round_row(connection, run, number)
            terms = require_terms(row, SumTerms)
            if length != terms.upload_bytes:
                raise WrongLength(f"an upload has exactly {terms.upload_bytes} bytes in this round, not {length}")
            if client.signing_key is None:
                raise Forbidden(
                    f"this token has no signing key for sums: to add one, run ldpfl relay token renew {client.name} --signing-key KEY"
                )
            (outcome,) = self._decide_on_uploads(connection, row, [(client.name, upload_id)])
        if isinstance(outcome, Refusal):
            raise outcome
        binding = SumBinding(run, number, bytes.fromhex(terms.agreement), terms.dimension, terms.bits)
        return ExpectedShare(client.name, run, number, upload_id, client.signing_key, binding)

    def add(self, expected: ExpectedShare, body: BinaryIO) -> Future[None]:
        """Check a complete ``body`` and queue it to be added to the sum. The ``body`` must stay open until the returned future is done.

        The future is done once the sum is on disk. If the upload is refused after all, the future raises a refusal as in :meth:`check`.

        Raises:
            Refusal: the upload's id is not the digest of the body's envelope.
            Forbidden: the envelope names another node than the client, or is not signed by the client for this round.
        """
        with store_errors():
            body.seek(-ENVELOPE_BYTES, SEEK_END)
            envelope = body.read()
        if hashlib.sha256(envelope).hexdigest() != expected.upload_id:
            raise Refusal("the upload's id is not the SHA-256 of its envelope, which ends the body: send that as id. Nothing was stored")
        try:
            check_signed(envelope, expected.signing_key, expected.binding)
        except ProtocolError as error:
            raise Forbidden(f"{error}; nothing was stored") from None
        run, number = expected.run, expected.number
        added = Future[None]()
        added.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        with self._lock:
            waiting = self._waiting.setdefault((run, number), [])
            waiting.append((Share(expected.client, expected.upload_id, envelope, body), added))
        # Only the event loop's thread calls this method, so no other share is appended in between. With more shares waiting, a call of
        # _add_waiting for this round is queued already, and takes this share as well.
        if len(waiting) == 1:
            self._thread.submit(self._add_waiting, run, number)
        return added

    def close(self) -> None:
        """Add all waiting shares, and stop the thread."""
        self._thread.shutdown()

    def _add_waiting(self, run: str, number: int) -> None:
        """Add all waiting shares of a round in one transaction, and end each share's future with its outcome."""
        with self._lock:
            batch = self._waiting.pop((run, number))
        try:
            outcomes: Sequence[BaseException | bool] = self._add_shares(run, number, [share for share, _ in batch])
        except BaseException as error:  # whatever it is, every future gets an outcome
            outcomes = [error] * len(batch)
        for (_, added), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                added.set_exception(outcome)
            else:
                added.set_result(None)  # the share is in the sum now, or was before
        if not is_sqlite(self._engine) and self._outdated_bytes >= _VACUUMED_BYTES:
            self._outdated_bytes = 0
            self._gone_rounds.free_outdated_sums()

    def _add_shares(self, run: str, number: int, shares: list[Share]) -> list[Refusal | bool]:
        """Add the acceptable ``shares`` to the sum in one transaction; return the decision of :meth:`_decide_on_uploads` on each share."""
        try:
            return self._add_shares_locked(run, number, shares, lock="shared")
        except _Raced:  # with an exclusive lock, no other process can interfere again
            return self._add_shares_locked(run, number, shares, lock="exclusive")

    def _add_shares_locked(self, run: str, number: int, shares: list[Share], *, lock: str) -> list[Refusal | bool]:
        """Add the acceptable ``shares`` under the round's ``lock``, which is "shared" with other processes or "exclusive".

        Raises:
            _Raced: another process has added the same client or envelope, or filled the round; nothing was stored.
        """
        with writing(self._engine) as connection:
            row = round_row(connection, run, number, lock=lock)
            outcomes = self._decide_on_uploads(connection, row, [(share.client, share.upload_id) for share in shares])
            new = [share for share, outcome in zip(shares, outcomes, strict=True) if outcome is True]
            if new:
                _store_envelopes(connection, row, new)
                self._outdated_bytes += _add_up(connection, row, new)
                # The row may be older than another process's last change, so the UPDATE itself checks that the round does not get too full.
                add_to_count = update(rounds).where(rounds.c.id == row.id, rounds.c.uploads + len(new) <= row.max_uploads)
                if connection.execute(add_to_count.values(uploads=rounds.c.uploads + len(new))).rowcount != 1:
                    raise _Raced
        return outcomes

    def _decide_on_uploads(self, connection: Connection, row: Row[Any], requests: list[tuple[str, str]]) -> list[Refusal | bool]:
        """Decide on each request (client, upload id): True if the upload must be added, False if it is in the sum already, or a refusal.

        An upload that is in the sum is accepted again even if the round is over, so that a client that got no answer can ask again.
        """
        refusal = self._refusal_if_over(connection, row)
        upload_id_of, taken_ids = _uploads_present(connection, row, requests)
        free_places = row.max_uploads - row.uploads
        outcomes: list[Refusal | bool] = []
        for client, upload_id in requests:
            if upload_id_of.get(client) == upload_id:
                outcomes.append(False)
            elif client in upload_id_of:
                outcomes.append(Conflict("this client has another upload in this round already; it may make one in each round"))
            elif refusal is not None:
                outcomes.append(refusal)
            elif upload_id in taken_ids:
                outcomes.append(Conflict("another client has sent this envelope in this round: make a new one"))
            elif free_places <= 0:
                outcomes.append(Conflict(f"the round is full: it takes {row.max_uploads} uploads"))
            else:
                # Later requests of the same batch are compared with this one, too.
                upload_id_of[client] = upload_id
                taken_ids.add(upload_id)
                free_places -= 1
                outcomes.append(True)
        return outcomes

    def _refusal_if_over(self, connection: Connection, row: Row[Any]) -> RoundOver | None:
        """Return the refusal of an upload if the round takes none any more, else None."""
        try:
            self._deadlines.check_open(connection, row)
        except RoundOver as error:
            return error
        return None


def empty_body(length: int) -> BinaryIO:
    """Return an empty buffer for a body of ``length`` bytes: in memory, or for a long body in a temporary file without a name."""
    return BytesIO() if length <= _IN_MEMORY_BYTES else cast(BinaryIO, tempfile.TemporaryFile(prefix="ldpfl-relay-"))


def append_to_body(body: BinaryIO, data: bytes) -> None:
    """Append ``data`` to a body.

    Raises:
        StoreFull: the disk of the body's file is full.
    """
    with store_errors():
        body.write(data)


def _uploads_present(connection: Connection, row: Row[Any], requests: list[tuple[str, str]]) -> tuple[dict[str, str], set[str]]:
    """Find the stored uploads of a round that share a client or an id with ``requests``, which are pairs of a client and an upload id.

    Return the uploads' ids by client, and the set of these ids.
    """
    query = select(uploads.c.client, uploads.c.upload_id).where(uploads.c.round_id == row.id)
    clients, upload_ids = zip(*requests, strict=True)
    rows = connection.execute(union(query.where(uploads.c.client.in_(clients)), query.where(uploads.c.upload_id.in_(upload_ids)))).all()
    return {row.client: row.upload_id for row in rows}, {row.upload_id for row in rows}


def _store_envelopes(connection: Connection, row: Row[Any], shares: list[Share]) -> None:
    """Store the shares' envelopes as complete uploads; raise :class:`_Raced` if another process has just stored one of them.

    A row that violates a constraint is left out, and not an error, because PostgreSQL would log the client's name with the error.
    """
    shares = sorted(shares, key=lambda share: share.client)  # one order for all transactions, which avoids deadlocks
    rows = [{"round_id": row.id, "client": share.client, "upload_id": share.upload_id, "received": ENVELOPE_BYTES} for share in shares]
    insert_row = (sqlite.insert if is_sqlite(connection) else postgresql.insert)(uploads)
    statement = insert_row.on_conflict_do_nothing().returning(uploads.c.id, uploads.c.client)
    try:
        id_of = {stored.client: stored.id for stored in connection.execute(statement, rows)}
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _DEADLOCK:
            raise _Raced from None
        raise
    if len(id_of) != len(shares):
        raise _Raced
    envelopes = [{"upload": id_of[share.client], "start": 0, "data": share.envelope} for share in shares]
    connection.execute(insert(blocks), envelopes)


def _add_up(connection: Connection, row: Row[Any], shares: list[Share]) -> int:
    """Add the shares' masked vectors to a partial sum, one part at a time; return how many stored bytes were overwritten.

    A round has several partial sums, so that several processes can add at once. The parts of the partial sum k are numbered from k times
    the number of parts of one sum.
    """
    overwritten_bytes = 0
    terms = require_terms(row, SumTerms)
    slices = terms.sum_parts()
    first_number = len(slices) * _lock_partial_sum(connection, row)
    for number, part in enumerate(slices, start=first_number):
        length = part.stop - part.start
        total = zeros(length * 8 // terms.bits, terms.bits)  # one number for each `bits` bits of the part
        for share in shares:
            share.body.seek(part.start)
            fold(total, share.body.read(length))
        overwritten_bytes += _add_to_part(connection, row, number, total)
    return overwritten_bytes


def merge_partial_sums(connection: Connection, row: Row[Any]) -> None:
    """Add up all partial sums of a round into its first parts, one part at a time. The caller must hold the round exclusively."""
    terms = require_terms(row, SumTerms)
    parts_of_sum = len(terms.sum_parts())  # the parts of partial sum k are numbered from k times this
    is_in_round = parts.c.round_id == row.id
    for number in connection.scalars(select(parts.c.number).where(is_in_round, parts.c.number >= parts_of_sum)).all():
        data = connection.scalars(delete(parts).where(is_in_round, parts.c.number == number).returning(parts.c.data)).one()
        total = zeros(len(data) * 8 // terms.bits, terms.bits)
        fold(total, data)
        _add_to_part(connection, row, number % parts_of_sum, total)


def _add_to_part(connection: Connection, row: Row[Any], number: int, total: NDArray[np.unsignedinteger]) -> int:
    """Add ``total`` to a stored part of a sum, or store it as a new part. Modifies ``total``. Return the number of overwritten bytes."""
    this_part = and_(parts.c.round_id == row.id, parts.c.number == number)
    stored = connection.scalar(select(parts.c.data).where(this_part))
    if stored is None:
        connection.execute(insert(parts).values(round_id=row.id, number=number, data=total.tobytes()))
        return 0
    fold(total, stored)
    connection.execute(update(parts).where(this_part).values(data=total.tobytes()))
    return total.nbytes


def _lock_partial_sum(connection: Connection, row: Row[Any]) -> int:
    """Lock a partial sum for this transaction, and return its number. Wait for the last one if all others are locked."""
    for number in range(_PARTIAL_SUMS - 1):
        if try_lock(connection, f"partial sum {number} of round {row.round} of {row.run}"):
            return number
    take_lock(connection, f"the last partial sum of round {row.round} of {row.run}")
    return _PARTIAL_SUMS - 1
