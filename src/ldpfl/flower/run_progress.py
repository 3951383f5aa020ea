"""Progress of a run on Flower, and the replies to its current round."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from flwr.app import Message

from ldpfl.errors import ConfigError, LdpflError, ProtocolError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.flower.replies import Deadline, is_absent, is_refusal, read_answer, reason_in
from ldpfl.flower.report_collection import OpenRound
from ldpfl.flower.round_kinds import PlannedRound, config_for_kind, planned_round
from ldpfl.flower.sent_vectors import summed_vectors
from ldpfl.flower.statistics import stages_from_memory
from ldpfl.flower.terms import Answer, deployable_mechanism
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import in_round
from ldpfl.models.layout import ParameterLayout
from ldpfl.server import Checkpoint, ServerRules
from ldpfl.simulation.measuring import ColumnStages
from ldpfl.simulation.record_sums import APART, ranges_of


@dataclass
class RunProgress:
    """Progress of a run.

    Attributes:
        config: settings of the run, as nodes get them.
        run: name of the run, which stays the same after a resume.
        timeout: seconds to wait for the replies of a round.
        checkpoint: state after the last round.
        participation: rounds that each node was told to train in, including the current round.
        participation_before: the participation before the current round, to withdraw that round.
        asked_nodes: nodes that were told to train in the current round.
        asked_for: digest of what each of these nodes is asked for, by :func:`ldpfl.flower.terms.agreement_of`.
        round_began: time at which the current round began, by ``time.perf_counter``.
        deadline: deadline for the current round's replies.
        measured: how nodes scale their columns, in the form of ``RoundTerms.measured``; empty if no column is measured, or not all are yet.
    """

    config: RunConfig
    run: str
    layout: ParameterLayout
    mechanism: Mechanism
    rules: ServerRules
    timeout: float
    checkpoint: Checkpoint
    participation: Participation
    participation_before: Participation = field(default_factory=Participation)
    asked_nodes: frozenset[int] = frozenset()
    asked_for: str = ""
    round_began: float = 0.0
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))
    measured: str = ""
    _round: OpenRound | None = field(default=None, repr=False)
    _planned: PlannedRound | None = field(default=None, repr=False)

    @property
    def rounds_done(self) -> int:
        """Number of rounds, of all kinds, that are over. The ledger has one event for each."""
        return len(self.checkpoint.ledger.events)

    def open_round(self, number: int, asked: int, linked: int) -> None:
        """Make round ``number`` the current round, with ``asked`` clients and ``linked`` units of a report that stay together.

        Raises:
            ConfigError: ``number`` does not follow the last round, or the config does not allow the round.
        """
        if number != self.rounds_done + 1:
            raise ConfigError(f"round {number} cannot start now: the next round is {self.rounds_done + 1}; let start() run the rounds")
        planned = planned_round(self.config, number)
        public, ranges = self.checkpoint.state.public(), self.checkpoint.state.ranges
        max_length = 1.0  # of each vector in a sum, a client's or a record's, as a multiple of the clipping norm
        if planned.kind == "training":
            mechanism = in_round(self.mechanism, public)
        else:
            is_statistics = planned.kind == "statistics"
            ranges = ranges_of(sum(self.stages.bins)) if is_statistics else summed_vectors(self.config, planned.kind).ranges
            mechanism = in_round(deployable_mechanism(config_for_kind(self.config, planned.kind), ranges), public)
            max_length = APART  # the bound for vectors of single records
            if is_statistics:
                # With a single column, a record counts sqrt(2) clipping norms at most, and clients subtract half of that for each record
                # from each of D bins (`count_offset`). So a bin is at most sqrt(2) / 2 up or down, and the vector sqrt(D) sqrt(2) / 2 long.
                max_length = max(APART, sqrt(ranges.dimension / 2))
        self._planned = planned
        self._round = OpenRound(self.run, number, mechanism, ranges, asked, self.timeout, linked, max_length)

    @property
    def round(self) -> OpenRound:
        """The round that is under way."""
        if self._round is None:
            raise ConfigError("no round is open: open one with open_round first")
        return self._round

    @property
    def stages(self) -> ColumnStages:
        """Stages of measurement of nodes' columns, with the histograms measured so far."""
        return stages_from_memory(self.config, self.checkpoint.memory)

    @property
    def planned(self) -> PlannedRound:
        """Number and kind of the round that is under way."""
        if self._planned is None:
            raise ConfigError("no round is open: open one with open_round first")
        return self._planned


class Replies:
    """The replies so far of the nodes that were told to train in the current round."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress, self._answers = progress, dict[int, Answer]()
        self._replied, self._failed, self._declined = set[int](), set[int](), set[int]()  # nodes: all, with an error, with a refusal
        self._any_absent = False
        self.problems = list[str]()
        """Reasons why replies were left out, one line each."""
        self.reasons = dict[int, str]()
        """Reasons that nodes gave for sending no report, by node."""

    def add(self, reply: Message) -> None:
        """Record one reply: the node's answer, or why the reply is left out.

        A reply with an error is left out, and the node's reason is recorded as well.
        """
        if is_absent(reply):  # the SuperLink replies under its own id because the node has not: no node is recorded
            self._any_absent = True
            return
        node = reply.metadata.src_node_id
        try:
            if node not in self._progress.asked_nodes:
                raise ProtocolError(f"node {node} replied, but was not asked: its reply is left out")
            self._replied.add(node)
            if node in self._answers or node in self._failed:
                raise ProtocolError(f"node {node} replied a second time: only its first reply counts")
            if reply.has_error():
                self._failed.add(node)
                self.reasons[node] = reason_in(reply)
            if is_refusal(reply):
                self._declined.add(node)
            self._answers[node] = read_answer(reply, self._progress.round)  # raises if the reply is an error
        except LdpflError as error:
            self.problems.append(str(error))

    @property
    def problems_at_deadline(self) -> list[str]:
        """Reasons why nodes are left out when the wait is over: :attr:`problems`, and one line for each node without a reply."""
        return self.problems + ["a node did not reply in time"] * len(self.silent)

    @property
    def silent(self) -> frozenset[int]:
        """Nodes that have not replied."""
        return self._progress.asked_nodes - self._replied

    @property
    def answers(self) -> list[Answer]:
        """The nodes' answers to the round, one for each node, in the order of the nodes' ids."""
        return [self._answers[node] for node in sorted(self._answers)]

    @property
    def possible_reports(self) -> int:
        """Number of nodes whose reports have arrived or can still arrive."""
        return len(self._progress.asked_nodes) - len(self._failed)

    @property
    def only_declined(self) -> bool:
        """Whether all replies so far come from nodes whose operators do not allow a report."""
        no_other_problem = len(self._declined) == len(self.problems)  # each refusal has added one problem
        return no_other_problem and not self._answers and not self._any_absent

    @property
    def all_declined(self) -> bool:
        """Whether every node that was asked has declined. Then no node has charged or sent anything."""
        return self.only_declined and self._declined == self._progress.asked_nodes
