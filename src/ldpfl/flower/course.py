"""How far a run on Flower has come, and which replies answer the round that is under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Message

from ldpfl.errors import ConfigError, LdpflError, ProtocolError
from ldpfl.flower.collecting import OpenRound
from ldpfl.flower.participation import Participation
from ldpfl.flower.terms import RECORD, Answer
from ldpfl.layout import ParameterLayout
from ldpfl.mechanisms import Mechanism
from ldpfl.simulation import Checkpoint, ServerRules


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

    def open_round(self, number: int, asked: int) -> None:
        """Make ready for round ``number``.

        Raises:
            ConfigError: it is not the one after the last.
        """
        if number != self.last.state.round + 1:
            raise ConfigError(f"round {number} does not follow round {self.last.state.round}")
        mechanism = self.mechanism.in_round(self.last.state.public())
        self._round = OpenRound(self.run, number, mechanism, self.last.state.ranges, asked, self.timeout)

    @property
    def round(self) -> OpenRound:
        """The round that is under way."""
        if self._round is None:
            raise ConfigError("no round is under way")
        return self._round


def answers_to(course: Course, replies: Iterable[Message]) -> tuple[list[Answer], list[str]]:
    """Return one answer a node, in the order of the nodes' numbers, and why others were left out."""
    answers: dict[int, Answer] = {}
    refused = []
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            if node not in course.asked:
                raise ProtocolError("a reply of a node that was not asked")
            if node in answers:
                raise ProtocolError("a second reply of one node")
            answers[node] = _answer(course.round, reply)
        except LdpflError as error:
            refused.append(str(error))
    return [answers[node] for node in sorted(answers)], refused


def _answer(round_: OpenRound, reply: Message) -> Answer:
    if reply.has_error():
        raise ProtocolError(f"a node answered {str(reply.error.reason)[:80]!r}")
    answer = Answer.from_record(reply.content.config_records.get(RECORD))
    if (answer.run, answer.round) != (round_.run, round_.number):
        raise ProtocolError("a reply for another run or round")
    return answer
