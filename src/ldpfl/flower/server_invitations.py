"""Ask nodes whether they would take part in a round, before any of them is told to train and charges its budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ldpfl.errors import ChargedBefore, ConfigError, LdpflError, shown
from ldpfl.experiments.config import RunConfig
from ldpfl.flower.invitation import QUESTION, Answers, question_of
from ldpfl.flower.replies import Deadline, is_absent, is_refusal, read_answer, reason_in, replies_as_they_come
from ldpfl.flower.report_collection import Collector, OpenRound
from ldpfl.flower.round_kinds import planned_round
from ldpfl.flower.run_progress import RunProgress
from ldpfl.flower.terms import RoundTerms, agreement_of
from ldpfl.flower.too_few import MIN_CLIENTS, notes_on_reasons, reasons_text, too_few_agree, too_few_connected
from ldpfl.server import reserves, round_cohort
from ldpfl.util.number_format import counted
from ldpfl.util.quantities import is_number

LOGGER = logging.getLogger("flwr.ldpfl")

_POLL_S = 0.5  # between two looks at the connected nodes, or two questions to nodes
_FIRST_PAUSE_S = 10.0  # between the first two log lines about a wait


@dataclass(frozen=True)
class Waiting:
    """How many nodes the server needs for a round, and how long it waits for them.

    Attributes:
        nodes: number of connected nodes at which a round begins.
        seconds: maximum wait for connected nodes, and for nodes that do not answer the question whether they take part.
        agreeing: minimum number of nodes that must agree to take part; over a relay at least as many as it mixes.
        answer_s: seconds without a further answer after which nodes that have not answered the question are left out.
    """

    nodes: int = 1
    seconds: float = 300.0
    agreeing: int = 1
    answer_s: float = 60.0

    def __post_init__(self) -> None:
        counts = ("nodes", "agreeing")
        for name, value in vars(self).items():
            if not is_number(value, whole=name in counts):
                raise ConfigError(f"{name} must be a {'whole number' if name in counts else 'number of seconds'}, got {shown(value)}")
        if self.nodes < 1 or not self.seconds >= 0:
            raise ConfigError(f"nodes must be at least 1 and seconds at least 0, got nodes = {self.nodes} and seconds = {self.seconds}")
        if self.agreeing < 1 or not self.answer_s > 0:
            got = f"agreeing = {self.agreeing} and answer_s = {self.answer_s}"
            raise ConfigError(f"agreeing must be at least 1 and answer_s above 0, got {got}")

    def required(self, min_clients: int) -> dict[str, int]:
        """Return the settings of a run that state a minimum number of nodes, with their values. ``min_clients`` is the transport's."""
        return {"ldpfl.nodes": self.nodes, "ldpfl.agreeing": self.agreeing, MIN_CLIENTS: min_clients}


@dataclass(eq=False)
class WaitingLog:
    """Writer of a log line about a wait: when the wait begins, and again after pauses that double."""

    _next_line_at: float = 0.0
    _pause_s: float = _FIRST_PAUSE_S

    def say(self, text: str, *values: object) -> None:
        """Log ``text`` with its ``values``, unless the pause since the last line is not over."""
        now = time.monotonic()
        if now >= self._next_line_at:
            LOGGER.info(text, *values)
            self._next_line_at = now + self._pause_s
            self._pause_s *= 2


def wait_for_nodes(grid: Grid, waiting: Waiting, end: float, on_look_up: Callable[[list[int]], None], log: WaitingLog) -> list[int]:
    """Wait until enough nodes are connected, or until ``end`` by the monotonic clock. Return the ids of the connected nodes in order.

    Args:
        waiting: says how many nodes are enough, ``waiting.nodes``.
        on_look_up: called with the connected nodes each time that they are looked up.
        log: writes a line about the wait.
    """
    while True:
        nodes = sorted(grid.get_node_ids())
        on_look_up(nodes)
        if len(nodes) >= waiting.nodes or time.monotonic() >= end:
            return nodes
        left_s = end - time.monotonic()
        log.say("%d of the %d nodes that a round needs are connected: waiting for more, up to %.0f s", len(nodes), waiting.nodes, left_s)
        time.sleep(min(_POLL_S, waiting.seconds))


@dataclass(eq=False)
class _Question:
    """Answers so far to one question, which is asked of more and more nodes.

    Attributes:
        agreed: nodes that have agreed. They need not be asked the same question again, because they decide from public facts alone.
        awaited: ids of messages without an answer, with the node that each went to.
    """

    agreed: set[int] = field(default_factory=set)
    awaited: dict[str, int] = field(default_factory=dict)


class Questions:
    """The questions of one round. A slow node is not asked the same question again: its answer counts whenever it arrives."""

    def __init__(self, grid: Grid, answer_s: float) -> None:
        self._grid, self._answer_s, self._questions = grid, answer_s, dict[str, _Question]()

    def forget_disconnected(self, connected: Collection[int]) -> None:
        """Forget answers of nodes that are not ``connected``: a node that comes back may not remember the question."""
        for question in self._questions.values():
            question.agreed.intersection_update(connected)
            question.awaited = {message_id: node for message_id, node in question.awaited.items() if node in connected}

    def ask(self, nodes: Sequence[int], content: RecordDict, round_: OpenRound) -> Answers:
        """Ask ``nodes`` whether they would take part in the round, all with the same ``content``, and return their answers.

        A node that has agreed to this content, or has not answered it yet, is not asked again. A node that has declined it is. A late
        answer counts in the call in which it arrives. The wait ends ``answer_s`` seconds after the last answer, or at the round's timeout.
        """
        # Equal contents are one question, whichever call asks it.
        question = self._questions.setdefault(agreement_of(content, QUESTION), _Question())
        asked = set(nodes)
        awaited = set(question.awaited.values())
        unasked = [node for node in nodes if node not in question.agreed | awaited]
        messages = [Message(content, node, QUESTION, ttl=round_.timeout, group_id=str(round_.number)) for node in unasked]
        # Nodes asked in earlier calls are included, so that their late answers are recorded. Only `nodes` are waited for.
        unanswered = (asked | awaited) - question.agreed
        reasons, declined = dict[int, str](), 0
        deadline = Deadline(round_.timeout)
        deadline.renew(self._answer_s)
        with closing(replies_as_they_come(self._grid, messages, deadline, question.awaited)) as replies:
            for reply in replies if unanswered & asked else ():  # if all have agreed before, there is nothing to send or wait for
                node = reply.metadata.src_node_id
                if node not in unanswered or is_absent(reply):
                    continue  # a second answer, an answer of a node that was not asked, or the SuperLink's answer for a silent node
                unanswered.discard(node)
                deadline.renew(self._answer_s)
                try:
                    read_answer(reply, round_)
                    question.agreed.add(node)
                except LdpflError:
                    if node in asked:
                        reasons[node] = reason_in(reply)
                        declined += is_refusal(reply)
                if not unanswered & asked:
                    deadline.renew(0)  # wait no longer for nodes of earlier questions, but read the replies that are already here
        agreed = tuple(node for node in nodes if node in question.agreed)
        return Answers(agreed, reasons, declined, silent=tuple(sorted(unanswered & asked)))


def ask_cohort_and_reserves(
    ask: Callable[[Sequence[int], int], Answers], cohort: Sequence[int], reserves: Sequence[int], needed: int, *, size_matters: bool
) -> Answers:
    """Ask the ``cohort`` of a round, and for each node that does not agree the next of the ``reserves``. Return all answers.

    The cohort is chosen before it is asked. So a run in which all nodes agree uses the same nodes as a run without questions.

    Args:
        ask: asks the given nodes whether they would take part in a round of the given number of nodes.
        reserves: nodes to ask in place of others, in this order.
        needed: minimum number of nodes for a round.
        size_matters: whether a node's answer may depend on the number of nodes. Then the nodes that agreed to a larger round are asked
            again about the smaller one.
    """
    size, answers = len(cohort), Answers()
    candidates, unasked_reserves = list(cohort), list(reserves)
    while candidates:
        answers = answers.joined(ask(candidates, size))
        missing = size - len(answers.agreed)  # to be filled from the reserves; with 0 missing or no reserve left, the loop ends
        candidates, unasked_reserves = unasked_reserves[:missing], unasked_reserves[missing:]
    # Fewer nodes than asked have agreed, so the round is smaller than they were told. Some may decline the smaller round.
    while size_matters and needed <= len(answers.agreed) < size:
        larger_size, size = size, len(answers.agreed)
        later = ask(answers.agreed, size)
        if len(later.agreed) + len(later.silent) < needed:  # too few, even if all silent nodes agree
            # `declined` counts nodes that decline any round. These here only decline the smaller one.
            new_reasons = dict.fromkeys(later.reasons, f"would take part in a round of {larger_size}, not of {size}")
            return Answers(later.agreed, {**answers.reasons, **new_reasons}, answers.declined, (*answers.silent, *later.silent))
        answers = answers.joined(later, asked_again=True)
    return answers


@dataclass(frozen=True, eq=False)
class NodeSelection:
    """Chooses a round's nodes and asks them whether they take part.

    Attributes:
        reply_s: seconds after the charge at which nodes reply.
        terms: function that returns the terms of the current round.
    """

    progress: RunProgress
    grid: Grid
    collector: Collector
    waiting: Waiting
    config: RunConfig
    reply_s: float
    terms: Callable[[RunProgress], RoundTerms]

    def nodes_that_agree(self, number: int) -> tuple[list[int], list[int], list[int]]:
        """Return the nodes that agree to round ``number``, all connected nodes, and those that say that they charged this round before.

        The round becomes the current round, with the agreeing nodes.

        Nodes that do not answer may be slow, or come back. If too few other nodes agree, the silent nodes are waited for as well. This wait
        and that for connections together take at most ``waiting.seconds``.

        Raises:
            ConfigError: the round does not fit the relay.
            TooFewTakePart: too few nodes are connected, or agree.
        """
        end = time.monotonic() + self.waiting.seconds
        needed = max(self.waiting.agreeing, self.collector.min_clients)
        required = self.waiting.required(self.collector.min_clients)
        questions, log_of_nodes, log_of_answers = Questions(self.grid, self.waiting.answer_s), WaitingLog(), WaitingLog()
        while True:
            connected = wait_for_nodes(self.grid, self.waiting, end, questions.forget_disconnected, log_of_nodes)
            if len(connected) < self.waiting.nodes:
                raise too_few_connected(self.progress, connected, self.waiting.nodes, self.waiting.seconds, required)
            answers = self._ask_nodes(questions, number, connected, needed)
            if len(answers.agreed) >= needed:
                break
            if len(answers.agreed) + len(answers.silent) < needed or time.monotonic() >= end:
                raise too_few_agree(self.progress, answers, connected, needed, _advice_on_waiting(answers, self.waiting), required)
            text = "round %d: %d of the %d nodes that it needs have agreed; waiting for %d that have not answered yet"
            log_of_answers.say(text, number, len(answers.agreed), needed, len(answers.silent))
            time.sleep(_POLL_S)
        if answers.reasons or answers.silent:
            left_out, reasons = counted(len(answers.reasons) + len(answers.silent), "node"), reasons_text(answers.reasons, answers.silent)
            notes = f"{_advice_on_waiting(answers, self.waiting)}.{notes_on_reasons(answers.reasons)}"
            LOGGER.warning("round %d: left out %s%s%s", number, left_out, reasons, notes)
            self._make_ready(number, len(answers.agreed))  # again, because it was made ready for the whole cohort
        charged_before = [node for node, reason in answers.reasons.items() if reason == ChargedBefore.public]
        return sorted(answers.agreed), connected, charged_before

    def _ask_nodes(self, questions: Questions, number: int, connected: Sequence[int], needed: int) -> Answers:
        """Draw the cohort of a round from the ``connected`` nodes and ask it, and reserves in place of nodes that do not agree.

        Return all answers. ``needed`` is the minimum number of nodes for the round.
        """
        # Evaluation and statistics rounds use all clients, as in the simulator.
        fraction = self.config.clients.fraction if planned_round(self.config, number).is_training else 1.0
        indices = round_cohort(self.config.seed, number, len(connected), fraction, self_sampling=None)  # into `connected`
        reserve_indices = reserves(self.config.seed, number, len(connected), indices)
        self._make_ready(number, len(indices))
        terms = self.terms(self.progress)

        def ask(nodes: Sequence[int], asked: int) -> Answers:
            """Ask ``nodes`` whether they would take part in a round that ``asked`` nodes are asked to join."""
            content = question_of(replace(terms, asked=asked), self.progress.layout.sizes)
            return questions.ask(nodes, content, self.progress.round)

        cohort, reserve_nodes = [connected[index] for index in indices], [connected[index] for index in reserve_indices]
        # Over a relay, a node's answer depends on the minimum number of clients, and not on how many are asked.
        return ask_cohort_and_reserves(ask, cohort, reserve_nodes, needed, size_matters=terms.transport == "direct")

    def _make_ready(self, number: int, asked: int) -> None:
        """Make round ``number`` the current round, with ``asked`` clients, and check that the transport could carry it."""
        self.progress.open_round(number, asked, self.collector.linked)
        self.collector.check_ready(self.progress.round, self.reply_s)


def _advice_on_waiting(answers: Answers, waiting: Waiting) -> str:
    """Return text for the log or an error: how long nodes were waited for, and what to set if they need longer. Empty if all answered."""
    if not answers.silent:
        return ""
    return (
        f". Some nodes did not answer within {waiting.answer_s:g} s after the last answer: check that they run, or raise answer_s "
        f"(ldpfl.answer-s). If they need more than {waiting.seconds:g} s in all, raise Waiting's seconds (ldpfl.wait-s) too"
    )
