"""Progress of a run on Flower, and the replies to its current round."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from flwr.app import Message

from ldpfl.errors import ConfigError, LdpflError, ProtocolError
from ldpfl.experiments.config import RunConfig
from ldpfl.flower.nodes_asked import Participation
from ldpfl.flower.replies import Patience, answer_in, is_absent, is_refusal, said_in
from ldpfl.flower.report_collection import OpenRound
from ldpfl.flower.round_kinds import PlannedRound, config_for, planned_round
from ldpfl.flower.sent_vectors import vectors_of
from ldpfl.flower.statistics import stages_in
from ldpfl.flower.terms import Answer, deployable_mechanism
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.hooks import in_round
from ldpfl.models.layout import ParameterLayout
from ldpfl.server import Checkpoint, ServerRules
from ldpfl.simulation.measuring import ColumnStages
from ldpfl.simulation.record_sums import APART, ranges_of


@dataclass
class Course:
    """Progress of a run.

    Attributes:
        config: settings of the run, as nodes get them.
        run: name of the run, which stays the same after a resume.
        last: the checkpoint after the last round.
        participation: rounds that each node was told to train in, including the current round.
        before: the participation before the current round, to withdraw that round.
        asked: nodes of the current round.
        began: time at which the current round began.
        patience: deadline for the current round's replies.
        measured: how nodes scale their columns, in the form of ``RoundTerms.measured``; empty if no column is measured, or not all are yet.
    """

    config: RunConfig
    run: str
    layout: ParameterLayout
    mechanism: Mechanism
    rules: ServerRules
    timeout: float
    last: Checkpoint
    participation: Participation
    before: Participation = field(default_factory=Participation)
    asked: frozenset[int] = frozenset()
    began: float = 0.0
    patience: Patience = field(default_factory=lambda: Patience(0.0))
    measured: str = ""
    _round: OpenRound | None = field(default=None, repr=False)
    _planned: PlannedRound | None = field(default=None, repr=False)

    @property
    def done(self) -> int:
        """Number of rounds, of all kinds, that are over. The ledger has one event for each."""
        return len(self.last.ledger.events)

    def open_round(self, number: int, asked: int, linked: int) -> None:
        """Make round ``number`` the current round, with ``asked`` clients and ``linked`` units of a report that stay together.

        Raises:
            ConfigError: ``number`` does not follow the last round, or the config does not allow the round.
        """
        if number != self.done + 1:
            raise ConfigError(f"round {number} does not follow round {self.done}")
        vector = 1.0
        planned, public, ranges = planned_round(self.config, number), self.last.state.public(), self.last.state.ranges
        if planned.kind == "training":
            mechanism = in_round(self.mechanism, public)
        else:
            statistics = planned.kind == "statistics"
            ranges = ranges_of(sum(self.stages.bins)) if statistics else vectors_of(self.config, planned.kind).ranges
            mechanism = in_round(deployable_mechanism(config_for(self.config, planned.kind), ranges), public)
            vector = max(APART, sqrt(ranges.dimension / 2)) if statistics else APART  # counts of a single column have points taken off
        self._round, self._planned = OpenRound(self.run, number, mechanism, ranges, asked, self.timeout, linked, vector), planned

    @property
    def round(self) -> OpenRound:
        """The round that is under way."""
        if self._round is None:
            raise ConfigError("no round is under way")
        return self._round

    @property
    def stages(self) -> ColumnStages:
        """Histograms of nodes' columns that were measured so far."""
        return stages_in(self.config, self.last.memory)

    @property
    def planned(self) -> PlannedRound:
        """What the round that is under way asks for."""
        if self._planned is None:
            raise ConfigError("no round is under way")
        return self._planned


class Replies:
    """The replies so far of the nodes that were told to train in the current round."""

    def __init__(self, course: Course) -> None:
        self._course, self._answers = course, dict[int, Answer]()
        self._heard, self._failed, self._declined = set[int](), set[int](), set[int]()
        self._absent = False
        self.refused = list[str]()
        """Reasons why replies were left out, one line each."""
        self.said = dict[int, str]()
        """By node that sends no report, the reason that it gave."""

    def add(self, reply: Message) -> None:
        """Record one reply."""
        if is_absent(reply):  # the SuperLink replies under its own id because the node has not: no node is recorded
            self._absent = True
            return
        node = reply.metadata.src_node_id
        try:
            if node not in self._course.asked:
                raise ProtocolError("a reply of a node that was not asked")
            self._heard.add(node)
            if node in self._answers or node in self._failed:
                raise ProtocolError("a second reply of one node")
            if reply.has_error():
                self._failed.add(node)
                self.said[node] = said_in(reply)
            if is_refusal(reply):
                self._declined.add(node)
            self._answers[node] = answer_in(reply, self._course.round)
        except LdpflError as error:
            self.refused.append(str(error))

    @property
    def left_out(self) -> list[str]:
        """Reasons why nodes are left out when the wait is over: the lines of :attr:`refused`, and one for each node without a reply."""
        return [*self.refused, *["a node did not reply in time"] * len(self.silent)]

    @property
    def silent(self) -> frozenset[int]:
        """Nodes that have not replied."""
        return self._course.asked - self._heard

    @property
    def answers(self) -> list[Answer]:
        """The answers to the round, one a node, in the order of the nodes' numbers."""
        return [self._answers[node] for node in sorted(self._answers)]

    @property
    def possible(self) -> int:
        """Number of nodes whose reports have arrived or can still arrive."""
        return len(self._course.asked) - len(self._failed)

    @property
    def only_declined(self) -> bool:
        """Whether all replies so far are refusals by the nodes' operators."""
        return len(self._declined) == len(self.refused) and not self._answers and not self._absent

    @property
    def all_declined(self) -> bool:
        """Whether every node that was asked has declined. Then no node has charged or sent anything."""
        return self.only_declined and self._declined == self._course.asked
