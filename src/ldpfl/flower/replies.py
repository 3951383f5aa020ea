"""Wait for the replies of nodes to the server's messages, and read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from ldpfl.errors import ChargedBefore, ProtocolError, printable
from ldpfl.flower.grid import InProcessGrid
from ldpfl.flower.internals import ABSENT, REFUSED
from ldpfl.flower.report_collection import OpenRound
from ldpfl.flower.terms import RECORD, Answer

_POLL_S = 1.0  # between two requests to the SuperLink for replies
_MAX_REASON = 80
"""Maximum number of characters of a node's reason for sending no report."""


class Deadline:
    """Deadline for replies: ``seconds`` from now, or an earlier time that :meth:`renew` sets."""

    def __init__(self, seconds: float) -> None:
        self._latest_end = self._end = time.monotonic() + seconds

    def renew(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now, but not later than the first deadline."""
        self._end = min(self._latest_end, time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 or less when it has passed."""
        return self._end - time.monotonic()

    @property
    def max_seconds_left(self) -> float:
        """Seconds until the first deadline; 0 when it has passed."""
        return max(0.0, self._latest_end - time.monotonic())


def replies_as_they_come(
    grid: Grid,
    messages: Sequence[Message],
    deadline: Deadline,
    awaited: dict[str, int] | None = None,
    on_poll: Callable[[float], None] = lambda left_s: None,
) -> Generator[Message, None, None]:
    """Send ``messages`` and yield each reply as soon as it arrives. Flower's own grids return all replies at the end.

    Args:
        deadline: time at which the wait ends. The caller may move it between two replies.
        awaited: ids of messages that were sent before and have no reply yet, with the node that each went to. Their replies are yielded,
            too. The dict is updated: afterwards it holds all messages that can still be replied to.
        on_poll: called with the seconds left, each time that replies are still missing.
    """
    if isinstance(grid, InProcessGrid):  # it runs the clients itself, so none can be silent
        yield from grid.send_and_receive(messages, timeout=deadline.max_seconds_left)
        return
    waiting = {} if awaited is None else awaited
    nodes = [message.metadata.dst_node_id for message in messages]
    message_ids = grid.push_messages(messages)  # None for a message that Flower could not send
    waiting |= {message_id: node for message_id, node in zip(message_ids, nodes, strict=True) if message_id}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.pop(reply.metadata.reply_to_message_id, None)
            yield reply
        if not waiting or deadline.seconds_left <= 0:
            return
        on_poll(deadline.seconds_left)
        time.sleep(min(_POLL_S, max(0.0, deadline.seconds_left)))


def read_answer(reply: Message, round_: OpenRound) -> Answer:
    """Return a node's answer for the current round.

    Raises:
        ProtocolError: the reply is an error, holds no answer, or holds an answer for another run or round.
    """
    if reply.has_error():
        raise ProtocolError(f"a node replied with the error {str(reply.error.reason)[:_MAX_REASON]!r}: see its log")
    answer = Answer.from_record(reply.content.config_records.get(RECORD))
    if (answer.run, answer.round) != (round_.run, round_.number):
        got, expected = f"round {answer.round} of run {answer.run[:32]!r}", f"round {round_.number} of run {round_.run!r}"
        raise ProtocolError(f"node {reply.metadata.src_node_id} replied for {got}, expected {expected}: its reply is left out")
    return answer


def reason_in(reply: Message) -> str:
    """Return the reason that a node gives for not taking part, shortened and without control characters."""
    return printable(str(reply.error.reason))[:_MAX_REASON] if reply.has_error() else "its reply does not answer the question"


def is_absent(reply: Message) -> bool:
    """Tell whether the SuperLink itself replies, because the node has not. The node may still have uploaded a report."""
    return reply.has_error() and reply.error.code in ABSENT


def is_refusal(reply: Message) -> bool:
    """Tell whether the node replies that its operator does not allow a report, so that it has charged nothing for the round.

    A node that refuses because it has charged the round before does not count.
    """
    return reply.has_error() and reply.error.code == REFUSED and reply.error.reason != ChargedBefore.public
