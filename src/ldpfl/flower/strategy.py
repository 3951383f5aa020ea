"""The server's end: a Flower Strategy that issues ranges, reads reports, keeps the ledger, and resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from math import isfinite, nan
from types import MappingProxyType
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from ldpfl.errors import AllDeclined, ConfigError, LdpflError, ProtocolError, TooFewTakePart, shown
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower.arrays import to_arrays
from ldpfl.flower.nodes_asked import Participation
from ldpfl.flower.replies import Patience, replies_as_they_come
from ldpfl.flower.report_collection import Collector, DirectCollector, Received
from ldpfl.flower.round_closing import closed, figures_said
from ldpfl.flower.round_kinds import last_round, planned_round, statistics_rounds
from ldpfl.flower.run_progress import Course, Replies
from ldpfl.flower.server_invitations import Asking, Waiting
from ldpfl.flower.starting import check_asked, protected, started
from ldpfl.flower.statistics import Scaled, edges_text, scaled_by_stages
from ldpfl.flower.terms import ARRAYS, CONFIG, RECORD, SHORTEST_REPLY_S, RoundTerms, check_sum_fits, digest_of
from ldpfl.flower.too_few import all_declined, named, too_few_came
from ldpfl.privacy import RoundEvent
from ldpfl.privacy.authors import released
from ldpfl.server import (
    Checkpoint,
    NotFiniteError,
    RoundMetrics,
    ServerRules,
    close_idle_round,
    round_event,
)
from ldpfl.util.number_format import counted
from ldpfl.util.quantities import is_number

LOGGER = logging.getLogger("flwr.ldpfl")

OnMeasured = Callable[[Scaled], tuple[Tensor, ServerRules]]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class LdpStrategy(Strategy):
    """Federated averaging of locally private reports, for ClientApps that are wrapped in ``LdpClientApp``.

    Every report counts the same. A reply that is an error, comes twice, or holds no valid report is left out; a round without any
    report keeps the model. Before a round, nodes are asked whether they would take part, which costs them nothing: only those that
    agree are told to train, and none if they are too few.

    After each round the folder holds a checkpoint; started again, the strategy goes on after it. A round
    in which the server was stopped may have released reports that are lost: it is charged and not repeated.

    Args:
        config: mechanism, ranges, noise, rounds, fraction of nodes asked and server learning rate. The ledger's channel is that of
            the ``collector``, whatever the config says.
        collector: how reports come in; by default in the replies.
        folder: where to keep checkpoints, metrics and ledger; without one, a run that is stopped is lost.
        waiting: how many nodes a round needs, how many of them have to agree to it, and how long to wait for them.
        score: judges global weights (d,) after each round.
        origin: names the data, so that a run is not resumed on others.
        reply_s: seconds after its charge at which every client replies, long enough for the slowest to train: one that has nothing
            to report by then reports no change. With 0 each replies as soon as it can, and tells how long it trained: for
            simulations; policies refuse it unless they say ``immediate_replies``.
        run_config: that of the run, ``context.run_config``: clients take part only if theirs is the same.
        kind: what the run folder says that it holds.
        on_measured: gives, once columns of nodes' tables were measured, initial weights (d,) and rules by what was measured: for the ready
            app, whose server scales its own rows in the same way.

    Raises:
        ConfigError: clients are to decide themselves whether they take part: Flower shows who answers, so that is no secret; or
            ``reply_s`` is no possible time.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        collector: Collector | None = None,
        folder: RunFolder | None = None,
        waiting: Waiting = Waiting(),  # noqa: B008  (frozen)
        score: Callable[[Tensor], float] = lambda weights: nan,
        origin: str = "",
        reply_s: float = 0.0,
        run_config: Mapping[str, object] = MappingProxyType({}),
        kind: Kind = Kind.OWN_APP,
        on_measured: OnMeasured | None = None,
    ) -> None:
        if config.clients.self_sampling != "off":
            raise ConfigError('clients.self_sampling keeps nothing secret on Flower, which shows who answers: set it to "off"')
        if config.clients.once:
            raise ConfigError("clients.once keeps no order secret on Flower, which shows who answers: leave it out")
        if not (is_number(reply_s) and isfinite(reply_s) and (reply_s == 0 or reply_s >= SHORTEST_REPLY_S)):
            raise ConfigError(f"reply_s must be 0, or a number of seconds from {SHORTEST_REPLY_S:g} on, got {shown(reply_s)}")
        self._collector = collector or DirectCollector(config.seed)
        self.config = config.model_copy(update={"shuffling": config.shuffling.model_copy(update={"channel": self._collector.channel})})
        self._folder, self._waiting, self._score, self._origin = folder, waiting, score, origin
        self._reply_s, self._run_config, self._kind = float(reply_s), digest_of(run_config), kind
        self._on_measured = on_measured
        self._course: Course | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds that are left and return the model with the figures of all rounds.

        Args:
            initial_arrays: the public initial model; a resumed run goes on from its checkpoint instead.
            num_rounds: rounds in all, those before a resume included; by default as the config says.
            timeout: seconds to wait for the replies of a round.
            evaluate_config: must be left out, because clients evaluate nothing.

        An evaluation at clients in which too few nodes take part is charged and brings no figures, and the run goes on.

        Raises:
            TooFewTakePart: fewer nodes take part than a round needs; AllDeclined, if all declined. The rounds before are kept.
            LdpflError: the model, the config or the folder does not fit; or too few nodes.
        """
        if evaluate_config is not None:
            raise ConfigError("evaluate_config is for clients that evaluate; without noise they may not: measure on the server")
        check_asked(num_rounds, timeout, self._reply_s)
        rounds, result = self.config.training.rounds if num_rounds is None else num_rounds, Result()
        with self._folder.locked() if self._folder else nullcontext():
            course = self._course = started(
                self.config, self._kind, self._folder, self._origin, self._score, self._collector_terms, initial_arrays, timeout, rounds
            )
            self.summary()
            for metrics in course.last.history:
                result.train_metrics_clientapp[metrics.round] = _figures(metrics)
            last = last_round(self.config, rounds)
            if course.participation.begun == course.done > 0:
                self._forget_again(course, last=course.done >= last)
            self._scale(course)
            while course.done < last:
                number = course.done + 1
                if course.participation.begun >= number:
                    self._mend(course)
                else:
                    self._run_round(course, number, train_config or ConfigRecord(), grid)
                if course.planned.is_training:
                    _record(result, course, evaluate_fn)
                elif course.planned.kind == "statistics":
                    self._scale(course)
        result.arrays = to_arrays(course.last.state.weights, course.layout)
        return result

    @property
    def checkpoint(self) -> Checkpoint:
        """The state after the last round.

        Raises:
            ConfigError: the run was not started.
        """
        return self._started().last

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Ask the nodes of a round whether they take part: return messages that tell those that do to train, which share one content.

        Raises:
            TooFewTakePart: too few agree; nothing was begun or charged.
        """
        course = self._started()
        asking = Asking(course, grid, self._collector, self._waiting, self.config, self._reply_s, self._terms)
        agreed, connected = asking.agreed(server_round)
        # Before anything is sent: what may have been released is charged, even if the server does not live to see it.
        self._charge_ahead(course, course.participation.ask(server_round, agreed, connected, self._collector_terms()))
        own = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({ARRAYS: arrays, CONFIG: own, RECORD: self._terms(course).to_record()})
        try:
            self._collector.open(course.round, content)
        except LdpflError:
            self._take_back(course)  # nobody was told to train
            with suppress(LdpflError):
                self._collector.give_up(course.round)
            raise
        course.began, course.asked, course.patience = time.perf_counter(), frozenset(agreed), Patience(course.timeout)
        LOGGER.info("%s: asking %d of %s", course.planned, len(agreed), counted(len(connected), "node"))
        # A list, because Flower's grids go over the messages more than once. With ttl, nobody answers when the round is over.
        return [Message(content, node, MessageType.TRAIN, ttl=course.timeout, group_id=str(server_round)) for node in agreed]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Take the round's reports and close it; returns the new model and how the round went.

        Raises:
            TooFewTakePart: so many nodes declined or failed that no report can be released: the round was ended at once.
        """
        course, needed = self._started(), self._collector.min_clients
        sorted_, ended = Replies(course), False
        for reply in replies:
            sorted_.add(reply)
            if not ended and sorted_.possible < needed:
                ended = self._collector.give_up(course.round)
                course.patience.renew(self._waiting.answer_s)  # for those that decline as well, which they say at once
            if ended and not sorted_.only_declined:
                break
        if ended and sorted_.all_declined:
            self._take_back(course)
            raise all_declined(course, sorted_.said)
        if not ended and sorted_.silent:
            LOGGER.warning("%s: no reply in time from %s", course.planned, named(sorted_.silent))
        received = Received(None) if ended else self._collector.collect(course.round, sorted_.answers, course.patience.most)
        self._close(course, replace(received, refused=(*(sorted_.refused if ended else sorted_.left_out), *received.refused)))
        if ended:
            raise too_few_came(course, needed, sorted_.said)
        figures = _figures(course.last.history[-1]) if course.last.history else MetricRecord()
        return to_arrays(course.last.state.weights, course.layout), figures

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask nobody: a client's loss or accuracy has no noise. What clients measure with noise is asked for as a round of its own."""
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, as nobody was asked."""
        return None

    def summary(self) -> None:
        """Log what each client's report protects, and against whom."""
        course = self._started()
        LOGGER.info("%s: %s; after round %d", self.config.mechanism.name, protected(course), course.last.state.round)

    def _run_round(self, course: Course, number: int, train_config: ConfigRecord, grid: Grid) -> None:
        """Run one round. If too few nodes take part, an evaluation is charged and brings no figures; any other round ends the run."""
        try:
            arrays = to_arrays(self._asked_about(course, number), course.layout)
            messages = self.configure_train(number, arrays, train_config, grid)
            with closing(replies_as_they_come(grid, messages, course.patience)) as replies:
                self.aggregate_train(number, replies)
        except AllDeclined:
            raise
        except TooFewTakePart as error:
            if planned_round(self.config, number).kind != "evaluation":
                raise
            LOGGER.warning("%s brings no figures, and the run goes on. %s", planned_round(self.config, number), error)
            if course.done < number:
                self._pass_over(course, number)

    def _pass_over(self, course: Course, number: int) -> None:
        """Close a round that no node was told to take part in. The ledger counts it as planned for all nodes, which is too much."""
        known = course.participation.rounds
        course.open_round(number, len(known), self._collector.linked)
        self._charge_ahead(course, course.participation.ask(number, known, (), self._collector_terms()))
        self._close_idle(course)

    def _terms(self, course: Course) -> RoundTerms:
        check_sum_fits(self.config, course.round.asked)
        ranges = course.last.state.ranges
        return RoundTerms(
            run=course.run,
            round=course.round.number,
            kind=course.planned.kind,
            size=course.round.ranges.dimension,
            measured=edges_text(course.stages) if course.planned.kind == "statistics" else course.measured,
            config=self.config,
            layers=course.layout.names,
            center=tuple(ranges.center.tolist()),
            radius=tuple(ranges.radius.tolist()),
            asked=course.round.asked,
            reply_s=self._reply_s,
            run_config=self._run_config,
            **self._collector.terms(),
        )

    def _asked_about(self, course: Course, number: int) -> Tensor:
        """Return the weights (d,) that nodes are sent in round ``number``: those that are trained on, or the model that is measured."""
        evaluation = planned_round(self.config, number).kind == "evaluation"
        return course.last.state.model if evaluation else course.last.state.weights

    def _scale(self, course: Course) -> None:
        """Have nodes scale their tables, and the server its rows, by what was measured of columns, once all of it is."""
        if not 0 < statistics_rounds(self.config) <= course.done:
            return
        scaled = scaled_by_stages(self.config, course.stages)
        for note in scaled.notes:
            LOGGER.warning("%s", note)
        course.measured = scaled.text
        if self._on_measured is not None:
            weights, course.rules = self._on_measured(scaled)
            if course.last.state.round == 0:
                course.last = replace(course.last, state=replace(course.last.state, weights=weights))

    def _mend(self, course: Course) -> None:
        """Close the round in which the server was stopped: with its reports if they can still be had, else as lost."""
        number = course.participation.begun
        course.open_round(number, course.participation.asked, self._collector.linked)
        course.began = time.perf_counter()
        received = self._collector.begun_on(course.participation.terms).recover(course.round)
        if received is not None:
            self._close(course, received)
            return
        LOGGER.warning("%s was interrupted: its reports are lost, and charged", course.planned)
        self._close_idle(course)

    def _close(self, course: Course, received: Received) -> None:
        if received.broken:
            self._stop(course, received.broken)
        for reason in sorted(set(received.refused)):
            LOGGER.warning("%s: left out %d: %s", course.planned, received.refused.count(reason), reason)
        if received.pool is None:
            LOGGER.warning("%s: no report came; the model stays as it is", course.planned)
            self._close_idle(course)
            return
        try:
            checkpoint = closed(course, received, received.pool, self._event(course, received.pool.clients))
        except NotFiniteError as error:  # a client that sends huge values must not end the run
            LOGGER.warning("%s: %s; the model stays as it is", course.planned, error)
            self._close_idle(course)
            return
        self._keep(course, checkpoint, received.pool.clients)

    def _stop(self, course: Course, why: str) -> NoReturn:
        """End the run in a round that cannot be opened as things are: the next one would end alike. It stays begun, and charged."""
        number = course.round.number
        if self._folder is None:  # nobody can come back for it
            self._close_idle(course)
            raise ProtocolError(f"round {number} is charged and brought nothing: {why}")
        raise ProtocolError(
            f"round {number} is charged, and what came is not read yet: {why}. The relay keeps it: start the run again to try once more, "
            f"or give the round up before that (ldpfl deploy left-open {self._folder.path} --cancel)"
        )

    def _close_idle(self, course: Course) -> None:
        """Keep the model. The round is charged all the same: reports may have left their clients, late ones for instance."""
        idle = close_idle_round(course.rules, course.last) if course.planned.is_training else course.last
        self._keep(course, replace(idle, ledger=course.last.ledger.charge(self._idle_event(course))), reports=0)

    def _idle_event(self, course: Course) -> RoundEvent:
        """Return the record of a round of which it is not known who reported."""
        return self._event(course, min(course.round.asked, self._collector.min_clients))

    def _event(self, course: Course, cohort: int) -> RoundEvent:
        """Return the ledger's record of the round. Nodes that were told to train count as having taken part, whether or not they did."""
        prototype = course.mechanism if course.planned.kind == "training" else None
        release = released(course.round.mechanism, course.round.ranges, prototype)
        # Of so few reports that all may be colluding clients', one is taken for an honest client's: it has its own noise in any case.
        colluding = min(self.config.shuffling.colluding, max(0, cohort - 1))
        counts, channel = course.participation.counts(), self._collector.channel
        event = round_event(course.round.number, release, cohort, counts, channel, colluding=colluding)
        return replace(event, linked=self._collector.linked, histograms=not course.planned.is_training)

    def _forget_again(self, course: Course, last: bool) -> None:
        """Have the records of the round before deleted, if that was interrupted; a finished run does not need the relay."""
        try:
            self._collector.done(course.run, course.done)
        except LdpflError as error:
            if not last:
                raise
            LOGGER.warning("round %d: whether its records are deleted is not known: %s", course.done, error)

    def _keep(self, course: Course, checkpoint: Checkpoint, reports: int) -> None:
        if self._folder is not None:
            self._folder.save_round(checkpoint)
        self._collector.done(course.run, course.round.number)
        course.last = checkpoint
        if not course.planned.is_training:
            LOGGER.info("%s: %s%s", course.planned, counted(reports, "report"), figures_said(course) if reports else "")
            return
        metrics = checkpoint.history[-1]
        measured = f", score {metrics.score:.4f}" if isfinite(metrics.score) else ""
        LOGGER.info("round %d: %s%s", metrics.round, counted(reports, "report"), measured)

    def _charge_ahead(self, course: Course, participation: Participation) -> None:
        """Write down who is told to train, and the round as if no report came: the ledger must not lack it if the server stops for good."""
        course.before, course.participation = course.participation, participation
        if self._folder is not None:
            participation.save(self._folder.participation_path)
            self._folder.save_ledger(course.last.ledger.charge(self._idle_event(course)))

    def _take_back(self, course: Course) -> None:
        """Undo :meth:`_charge_ahead`: it is certain that no node has charged or sent anything for the round.

        The round begins anew under another name of the run, so that nothing of it, at a relay or late, is taken for the new one. The
        ledger is written first: whoever is killed in between finds the round begun, and charges it.
        """
        course.participation = course.before.renamed()
        course.run = course.participation.run
        if self._folder is not None:
            self._folder.save_ledger(course.last.ledger)
            course.participation.save(self._folder.participation_path)

    def _collector_terms(self, begun_on: Mapping[str, str | int] = MappingProxyType({})) -> dict[str, str | int]:
        """Return how reports come in, as JSON has it; of a round that was ``begun_on`` terms, as far as they can still be met."""
        collector = self._collector.begun_on(begun_on)
        terms = {**collector.terms(), "min_clients": collector.min_clients}
        return {name: value.hex() if isinstance(value, bytes) else value for name, value in terms.items()}

    def _started(self) -> Course:
        if self._course is None:
            raise ConfigError("the strategy was not started: call start()")
        return self._course


def _record(result: Result, course: Course, evaluate_fn: EvaluateFn | None) -> None:
    metrics = course.last.history[-1]
    result.train_metrics_clientapp[metrics.round] = _figures(metrics)
    if evaluate_fn is not None:
        evaluated = evaluate_fn(metrics.round, to_arrays(course.last.state.weights, course.layout))
        if evaluated is not None:
            result.evaluate_metrics_serverapp[metrics.round] = evaluated


def _figures(metrics: RoundMetrics) -> MetricRecord:
    return MetricRecord({"reports": metrics.clients, "score": metrics.score, "seconds": metrics.seconds})
