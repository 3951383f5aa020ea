"""Replies of nodes to what the server has sent them: until when they are waited for, and what each says."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from ldpfl.errors import ProtocolError, printable
from ldpfl.flower.grid import InProcessGrid
from ldpfl.flower.internals import ABSENT, REFUSED
from ldpfl.flower.report_collection import OpenRound
from ldpfl.flower.terms import RECORD, Answer

_POLL_S = 1.0
_LONGEST = 80
"""Characters of what a node says of why it sends no report."""


class Patience:
    """Until when replies are waited for: ``seconds`` from now, or shorter from when :meth:`renew` says so."""

    def __init__(self, seconds: float) -> None:
        self._last = self._end = time.monotonic() + seconds

    def renew(self, seconds: float) -> None:
        """Wait for ``seconds`` from now, but not longer than the time that was given first."""
        self._end = min(self._last, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds left; 0 or less when the time is over."""
        return self._end - time.monotonic()

    @property
    def most(self) -> float:
        """Seconds left of the time that was given first."""
        return max(0.0, self._last - time.monotonic())


def replies_as_they_come(
    grid: Grid, messages: Sequence[Message], patience: Patience, awaited: dict[str, int] | None = None
) -> Generator[Message, None, None]:
    """Send ``messages`` and yield each reply when it is there; Flower's own grids return all of them at the end.

    Args:
        awaited: by the name of each message that was sent before and not replied to, the node that it went to. Their replies are
            yielded, too. Afterwards it holds all messages that can still be replied to.
    """
    if isinstance(grid, InProcessGrid):  # it runs one client after another, so that none is ever silent
        yield from grid.send_and_receive(messages, timeout=patience.most)
        return
    waiting = {} if awaited is None else awaited
    nodes = [message.metadata.dst_node_id for message in messages]
    waiting |= {name: node for name, node in zip(grid.push_messages(messages), nodes, strict=True) if name}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.pop(reply.metadata.reply_to_message_id, None)
            yield reply
        if not waiting or patience.left <= 0:
            return
        time.sleep(min(_POLL_S, max(0.0, patience.left)))


def answer_in(reply: Message, round_: OpenRound) -> Answer:
    """Return a node's answer for the round that is under way.

    Raises:
        ProtocolError: the reply is an error, no answer, or one for another run or round.
    """
    if reply.has_error():
        raise ProtocolError(f"a node answered {str(reply.error.reason)[:_LONGEST]!r}")
    answer = Answer.from_record(reply.content.config_records.get(RECORD))
    if (answer.run, answer.round) != (round_.run, round_.number):
        raise ProtocolError("a reply for another run or round")
    return answer


def said_in(reply: Message) -> str:
    """Return what a node says that takes no part."""
    return printable(str(reply.error.reason))[:_LONGEST] if reply.has_error() else "no answer to what it was asked"


def is_absent(reply: Message) -> bool:
    """Tell whether a node has not replied, and the SuperLink says so in its place: the node may have sent a report all the same."""
    return reply.has_error() and reply.error.code in ABSENT


def is_refusal(reply: Message) -> bool:
    """Tell whether a node says that its operator does not allow a report: it has charged nothing."""
    return reply.has_error() and reply.error.code == REFUSED
