"""Whether a round still takes uploads, and whether it is due, by the relay's own time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, text

from ldpfl.relay.errors import RoundOver, TooEarly
from ldpfl.relay.protocol import State
from ldpfl.relay.queries import complete_uploads


class Deadlines:
    """Deadlines by ``clock``, which gives seconds; or by that of the PostgreSQL server, where there is none."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock

    def now(self, connection: Connection) -> float:
        """Return the time that deadlines are judged by."""
        if self._clock is not None:
            return self._clock()
        return float(connection.scalars(text("SELECT extract(epoch FROM pg_catalog.clock_timestamp())")).one())

    def state(self, connection: Connection, row: Row[Any]) -> tuple[State, float]:
        """Return the state and the seconds to the deadline. A round that is due is released to all but the bookkeeping."""
        if row.state != "open":
            return row.state, 0.0
        left = min(row.closes_at - self.now(connection), row.closes_in_s)  # never longer, were the clock behind since a restart
        if left > 0:
            return "open", left
        return ("waiting" if complete_uploads(connection, row) < row.min_clients else "released"), 0.0

    def check_open(self, connection: Connection, row: Row[Any]) -> None:
        """Return if the round takes uploads.

        Raises:
            RoundOver: it does not any more.
        """
        if self.state(connection, row)[0] not in ("open", "waiting"):
            raise over(row)

    def check_due(self, connection: Connection, row: Row[Any]) -> None:
        """Return if the round may be released.

        Raises:
            TooEarly: the deadline is to come, or too few clients have uploaded.
        """
        state, left = self.state(connection, row)
        if state == "open":
            raise TooEarly(f"round {row.round} of {row.run} is open for {left:.1f} seconds more", {"Retry-After": str(math.ceil(left))})
        if state == "waiting":
            lacking = f"round {row.round} of {row.run} waits for {row.min_clients} clients: too few have uploaded"
            raise TooEarly(lacking, {"Retry-After": "1"})


def over(row: Row[Any]) -> RoundOver:
    """Return the refusal of what comes too late for a round."""
    return RoundOver(f"round {row.round} of {row.run} takes no uploads any more")
