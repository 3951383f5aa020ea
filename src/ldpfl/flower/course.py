"""How far a run on Flower has come, and which replies answer the round that is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Message

from ldpfl.errors import AllDeclined, ConfigError, LdpflError, ProtocolError, printable
from ldpfl.flower.collecting import OpenRound
from ldpfl.flower.internals import REFUSED
from ldpfl.flower.nodes_asked import Participation
from ldpfl.flower.terms import RECORD, Answer
from ldpfl.layout import ParameterLayout
from ldpfl.mechanisms import Mechanism
from ldpfl.server import Checkpoint, ServerRules

_LONGEST = 80
"""Characters of what a node says of why it sent no report."""


def all_declined(number: int, declined: Counter[str]) -> AllDeclined:
    """Return the error for round ``number``, in which nodes said how often what."""
    said = "; ".join(f"{times} said {reason!r}" for reason, times in declined.most_common())
    return AllDeclined(
        f"round {number}: none of {declined.total()} nodes takes part: {said}. Each waits for its operator, and its log "
        "says for what; a node without policy and budget gets them by: ldpfl policy init APP"
    )


@dataclass(frozen=True)
class Waiting:
    """How patient the server is.

    Attributes:
        nodes: a round begins when so many nodes are connected.
        seconds: longest wait for them.
    """

    nodes: int = 1
    seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.nodes < 1 or not self.seconds >= 0:
            raise ConfigError(f"a round needs at least one node and a wait of 0 s or more, got {self.nodes} and {self.seconds}")


@dataclass
class Course:
    """How far a run has come.

    Attributes:
        run: names it, on this server and after a resume.
        last: the checkpoint after the last round.
        asked: nodes of the round that is under way.
        began: when it began.
    """

    run: str
    layout: ParameterLayout
    mechanism: Mechanism
    rules: ServerRules
    timeout: float
    last: Checkpoint
    participation: Participation
    asked: frozenset[int] = frozenset()
    began: float = 0.0
    _round: OpenRound | None = field(default=None, repr=False)

    def open_round(self, number: int, asked: int, linked: int) -> None:
        """Make ready for round ``number``, in which ``linked`` units of a report stay together.

        Raises:
            ConfigError: it is not the one after the last.
        """
        if number != self.last.state.round + 1:
            raise ConfigError(f"round {number} does not follow round {self.last.state.round}")
        mechanism = self.mechanism.in_round(self.last.state.public())
        self._round = OpenRound(self.run, number, mechanism, self.last.state.ranges, asked, self.timeout, linked)

    @property
    def round(self) -> OpenRound:
        """The round that is under way."""
        if self._round is None:
            raise ConfigError("no round is under way")
        return self._round


@dataclass(frozen=True, eq=False)
class Replies:
    """What nodes replied.

    Attributes:
        answers: one a node, in the order of the nodes' numbers.
        refused: why others were left out, a line each.
        declined: what those said whose operators do not allow a report.
    """

    answers: list[Answer]
    refused: list[str]
    declined: Counter[str]


def sorted_out(course: Course, replies: Iterable[Message]) -> Replies:
    """Return which of ``replies`` answer the round that is under way."""
    answers: dict[int, Answer] = {}
    refused: list[str] = []
    declined = Counter[str]()
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            if node not in course.asked:
                raise ProtocolError("a reply of a node that was not asked")
            if node in answers:
                raise ProtocolError("a second reply of one node")
            if reply.has_error() and reply.error.code == REFUSED:
                declined[printable(str(reply.error.reason))[:_LONGEST]] += 1
            answers[node] = _answer(course.round, reply)
        except LdpflError as error:
            refused.append(str(error))
    return Replies([answers[node] for node in sorted(answers)], refused, declined)


def _answer(round_: OpenRound, reply: Message) -> Answer:
    if reply.has_error():
        raise ProtocolError(f"a node answered {str(reply.error.reason)[:_LONGEST]!r}")
    answer = Answer.from_record(reply.content.config_records.get(RECORD))
    if (answer.run, answer.round) != (round_.run, round_.number):
        raise ProtocolError("a reply for another run or round")
    return answer
