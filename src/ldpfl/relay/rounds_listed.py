"""List the rounds that a relay holds, for its operator, and cancel a round from the store's machine."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from ldpfl.relay.database import store_errors
from ldpfl.relay.errors import Unknown
from ldpfl.relay.protocol import State
from ldpfl.relay.queries import STATES_NOT_GONE
from ldpfl.relay.schema import READ_ONLY, rounds, uploads
from ldpfl.relay.store import Store


@dataclass(frozen=True)
class ListedRound:
    """A round that is not gone. Nothing here names a client.

    Attributes:
        aggregator: name of the aggregator that opened it.
        uploads: number of complete uploads.
        incomplete: number of uploads that have begun and are not complete.
        min_clients, max_uploads: minimum number of uploads for a release, and maximum number of uploads.
        upload_bytes: length of one upload.
        age_s: seconds since the round was opened.
        seconds_left: seconds until the deadline; negative after it.
    """

    run: str
    round: int
    aggregator: str
    state: State
    uploads: int
    incomplete: int
    min_clients: int
    max_uploads: int
    upload_bytes: int
    age_s: float
    seconds_left: float


def list_rounds(store: Store) -> list[ListedRound]:
    """Return all rounds except those in state ``gone`` (acknowledged or cancelled), sorted by run and number.

    It reveals nothing new to the operator, who holds the store with all of these data.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    upload_count = select(func.count()).where(uploads.c.round_id == rounds.c.id).scalar_subquery()
    query = (
        select(rounds, upload_count.label("upload_count")).where(rounds.c.state.in_(STATES_NOT_GONE)).order_by(rounds.c.run, rounds.c.round)
    )
    with store_errors(), store.engine.connect().execution_options(**READ_ONLY) as connection:
        rows = connection.execute(query).all()
    now = store.now()
    statuses = [(row, store.status(row.owner, row.run, row.round)) for row in rows]
    return [
        ListedRound(
            run=row.run,
            round=row.round,
            aggregator=row.owner,
            state=status.state,
            uploads=status.uploads or 0,
            # Never below 0: after a round's release, its uploads are still counted, but not stored any more.
            incomplete=max(0, row.upload_count - (status.uploads or 0)),
            min_clients=row.min_clients,
            max_uploads=row.max_uploads,
            upload_bytes=status.terms.upload_bytes,
            age_s=now - (row.closes_at - row.closes_in_s),  # the difference is the time of opening
            seconds_left=row.closes_at - now,
        )
        for row, status in statuses
        if status.state != "gone"  # it may have ended since the query
    ]


def cancel_round(store: Store, run: str, number: int) -> bool:
    """Cancel a round on behalf of its aggregator. Return False if it was acknowledged or cancelled before; then nothing changes.

    Raises:
        Unknown: there is no such round.
        StoreUnavailable, StoreFull: the store cannot be changed.
    """
    query = select(rounds.c.owner, rounds.c.state).where(rounds.c.run == run, rounds.c.round == number)
    with store_errors(), store.engine.connect().execution_options(**READ_ONLY) as connection:
        row = connection.execute(query).first()
    if row is None:
        raise Unknown(f"there is no round {number} of {run}: to see which rounds the relay has, run ldpfl relay rounds")
    store.cancel(row.owner, run, number)
    return bool(row.state != "gone")
