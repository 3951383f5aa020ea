"""Decide by the relay's clock whether a round still takes uploads, and whether it may be released."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, text

from ldpfl.relay.errors import RoundOver, TooEarly
from ldpfl.relay.protocol import State
from ldpfl.relay.queries import count_complete_uploads


class Deadlines:
    """Deadlines by ``clock``, which returns seconds; or by the PostgreSQL server's clock if ``clock`` is None.

    The argument ``row`` of the methods is the round's row in the table ``rounds``.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock

    def now(self, connection: Connection) -> float:
        """Return the current time for deadlines, in seconds."""
        if self._clock is not None:
            return self._clock()
        return float(connection.scalars(text("SELECT extract(epoch FROM pg_catalog.clock_timestamp())")).one())

    def state(self, connection: Connection, row: Row[Any]) -> tuple[State, float]:
        """Return a round's state and the seconds to its deadline: 0 after it, and for a round that is released or gone.

        The state is ``open`` until the deadline, then ``waiting`` until enough clients have uploaded, then ``released``. A round that may
        be released counts as released, although the store releases it only when its records are pulled.
        """
        if row.state != "open":
            return row.state, 0.0
        # A clock that was set back would show a deadline further away than the round's whole duration, closes_in_s.
        seconds_left = min(row.closes_at - self.now(connection), row.closes_in_s)
        if seconds_left > 0:
            return "open", seconds_left
        return ("waiting" if count_complete_uploads(connection, row) < row.min_clients else "released"), 0.0

    def check_open(self, connection: Connection, row: Row[Any]) -> None:
        """Raise a :class:`RoundOver` if the round takes no uploads any more, because it is released or gone."""
        state, _ = self.state(connection, row)
        if state not in ("open", "waiting"):
            raise round_over_refusal(row)

    def check_releasable(self, connection: Connection, row: Row[Any]) -> None:
        """Raise if the round may not be released yet.

        Raises:
            TooEarly: the deadline has not passed, or too few clients have uploaded.
        """
        state, seconds_left = self.state(connection, row)
        if state == "open":
            reason = f"round {row.round} of {row.run} is open for {seconds_left:.1f} seconds more"
            raise TooEarly(reason, {"Retry-After": str(math.ceil(seconds_left))})
        if state == "waiting":
            reason = f"round {row.round} of {row.run} waits for {row.min_clients} clients: too few have uploaded"
            raise TooEarly(reason, {"Retry-After": "1"})


def round_over_refusal(row: Row[Any]) -> RoundOver:
    """Return the refusal of a request that comes after the round has ended."""
    return RoundOver(f"round {row.round} of {row.run} takes no uploads any more")
