"""A Flower Strategy for the server: it issues ranges, aggregates reports, keeps the ledger, and resumes stopped runs."""

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
from ldpfl.flower.starting import check_asked, protected, settled_for, started
from ldpfl.flower.statistics import Scaled, edges_text, scaled_by_stages
from ldpfl.flower.terms import ARRAYS, CONFIG, RECORD, SHORTEST_REPLY_S, RoundTerms, check_sum_fits, digest_of
from ldpfl.flower.too_few import all_declined, named, too_few_came
from ldpfl.privacy import RoundEvent
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import without_claim
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

    All reports have the same weight. A reply that is an error, a second reply, or a reply without a valid report is left out. A round
    without any report keeps the model. Before a round, nodes are asked whether they would take part, which costs them nothing. Only nodes
    that agree are told to train, and none if too few agree.

    After each round the folder holds a checkpoint, from which the strategy resumes when it is started again. A round in which the server
    was stopped may have released reports that are lost: it is charged and not repeated.

    Args:
        config: mechanism, ranges, noise, rounds, fraction of nodes asked and server learning rate. The ledger's channel is that of
            the ``collector``, whatever the config says.
        collector: way in which reports reach the server; by default in the Flower replies.
        folder: folder for checkpoints, metrics and ledger; without a folder, a run that is stopped is lost.
        waiting: how many nodes a round needs, how many of them must agree to it, and how long to wait for them.
        score: function that evaluates global weights (d,) after each round.
        origin: name of the data, so that a run is not resumed on other data.
        reply_s: seconds after its charge at which every client replies, long enough for the slowest to train. A client that has nothing
            to report by then reports no change. With 0 each client replies as soon as it can, which reveals how long it trained. This is
            for simulations; policies refuse it unless they set ``immediate_replies``.
        run_config: the run's config, ``context.run_config``. Clients take part only if theirs is the same.
        kind: kind of run that the run folder states.
        on_measured: called once the columns of nodes' tables are measured; returns initial weights (d,) and rules for the new scaling. For
            the ready app, whose server scales its own rows in the same way.

    Raises:
        ConfigError: the config asks for random check-in or a secret order, which Flower cannot keep secret, because it shows who answers;
            or ``reply_s`` is not allowed.
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
        self.config = config if kind is Kind.READY_APP else settled_for(config, self._collector)
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
            num_rounds: total number of training rounds, including those before a resume; by default as the config says.
            timeout: seconds to wait for the replies of a round.
            evaluate_config: must be left out, because clients evaluate nothing.

        If too few nodes take part in an evaluation at clients, it is charged and gives no figures, and the run goes on.

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
                self._delete_last_round(course, last=course.done >= last)
            self._scale(course)
            while course.done < last:
                number = course.done + 1
                if course.participation.begun >= number:
                    self._close_interrupted(course)
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
        """Ask the nodes of a round whether they take part. Return the messages that tell the agreeing nodes to train, all with one content.

        Raises:
            TooFewTakePart: too few nodes agree; nothing was begun or charged.
        """
        course = self._started()
        asking = Asking(course, grid, self._collector, self._waiting, self.config, self._reply_s, self._terms)
        agreed, connected = asking.agreed(server_round)
        # Charged before anything is sent: if the server is killed, the ledger still counts what clients may have released.
        self._charge_ahead(course, course.participation.ask(server_round, agreed, connected, self._collector_terms()))
        app_config = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({ARRAYS: arrays, CONFIG: app_config, RECORD: self._terms(course).to_record()})
        try:
            self._collector.open(course.round, content)
        except LdpflError:
            self._take_back(course)  # nobody was told to train
            with suppress(LdpflError):
                self._collector.give_up(course.round)
            raise
        course.began, course.asked, course.patience = time.perf_counter(), frozenset(agreed), Patience(course.timeout)
        LOGGER.info("%s: asking %d of %s", course.planned, len(agreed), counted(len(connected), "node"))
        # A list, because Flower's grids iterate over the messages more than once. The ttl keeps nodes from answering after the round.
        return [Message(content, node, MessageType.TRAIN, ttl=course.timeout, group_id=str(server_round)) for node in agreed]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Collect and aggregate the round's reports. Return the new model and the round's figures.

        Raises:
            TooFewTakePart: so many nodes declined or failed that no report can be released: the round was ended at once.
        """
        course, needed = self._started(), self._collector.min_clients
        results, ended = Replies(course), False
        for reply in replies:
            results.add(reply)
            if not ended and results.possible < needed:
                ended = self._collector.give_up(course.round)
                course.patience.renew(self._waiting.answer_s)  # wait a little for further refusals, which nodes send at once
            if ended and not results.only_declined:
                break
        if ended and results.all_declined:
            self._take_back(course)
            raise all_declined(course, results.said)
        if not ended and results.silent:
            LOGGER.warning("%s: no reply in time from %s", course.planned, named(results.silent))
        received = Received(None) if ended else self._collector.collect(course.round, results.answers, course.patience.most)
        self._close(course, replace(received, refused=(*(results.refused if ended else results.left_out), *received.refused)))
        if ended:
            raise too_few_came(course, needed, results.said)
        figures = _figures(course.last.history[-1]) if course.last.history else MetricRecord()
        return to_arrays(course.last.state.weights, course.layout), figures

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask nobody: a client's plain loss or accuracy has no noise. Noisy figures are measured in evaluation rounds of their own."""
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, as nobody was asked."""
        return None

    def summary(self) -> None:
        """Log the guarantee of each client's report, and against whom it holds."""
        course = self._started()
        name, begun = self.config.mechanism.name, course.last.state.round
        LOGGER.info("%s: %s; %s", name, protected(course), f"the run goes on after round {begun}" if begun else "the run begins")

    def _run_round(self, course: Course, number: int, train_config: ConfigRecord, grid: Grid) -> None:
        """Run one round. If too few nodes take part, an evaluation is charged and brings no figures; any other round ends the run."""
        try:
            arrays = to_arrays(self._weights_to_send(course, number), course.layout)
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
        """Close a round that no node was told to take part in. The ledger overcounts: it charges the round as planned, for all nodes."""
        known = course.participation.rounds
        course.open_round(number, len(known), self._collector.linked)
        self._charge_ahead(course, course.participation.ask(number, known, (), self._collector_terms()))
        self._close_idle(course)

    def _terms(self, course: Course) -> RoundTerms:
        """Return the terms of the current round, which nodes are sent."""
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

    def _weights_to_send(self, course: Course, number: int) -> Tensor:
        """Return the weights (d,) that nodes get in round ``number``: the weights to train from, or the model to evaluate."""
        evaluation = planned_round(self.config, number).kind == "evaluation"
        return course.last.state.model if evaluation else course.last.state.weights

    def _scale(self, course: Course) -> None:
        """Once all columns are measured, set how nodes scale their tables, and let the server scale its rows in the same way."""
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

    def _close_interrupted(self, course: Course) -> None:
        """Close the round in which the server was stopped: with its reports if the collector can still recover them, else as lost."""
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
        """Aggregate the ``received`` reports and save the round; or keep the model if there are none."""
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
        except NotFiniteError as error:  # a single client that sends huge values must not end the run
            LOGGER.warning("%s: %s; the model stays as it is", course.planned, error)
            self._close_idle(course)
            return
        self._keep(course, checkpoint, received.pool.clients)

    def _stop(self, course: Course, why: str) -> NoReturn:
        """End the run, because the round's release cannot be decoded, and the next one would fail in the same way.

        The round stays begun and charged, so that the run can be resumed with it.
        """
        number = course.round.number
        if self._folder is None:  # without a folder the run cannot be resumed
            self._close_idle(course)
            raise ProtocolError(f"round {number} is charged and brought nothing: {why}")
        raise ProtocolError(
            f"round {number} is charged, and what came is not read yet: {why}. The relay keeps it: start the run again to try once more, "
            f"or give the round up before that (ldpfl deploy left-open {self._folder.path} --cancel)"
        )

    def _close_idle(self, course: Course) -> None:
        """Close the round without reports: keep the model, but charge the round, because reports may have left their clients."""
        idle = close_idle_round(course.rules, course.last) if course.planned.is_training else course.last
        self._keep(course, replace(idle, ledger=course.last.ledger.charge(self._idle_event(course))), reports=0)

    def _idle_event(self, course: Course) -> RoundEvent:
        """Return the ledger's event for a round for which it is not known which nodes reported."""
        return self._event(course, min(course.round.asked, self._collector.min_clients))

    def _event(self, course: Course, cohort: int) -> RoundEvent:
        """Return the ledger's event for the round. All nodes that were told to train count as participants, with or without a report."""
        prototype = course.mechanism if course.planned.kind == "training" else None
        release = released(course.round.mechanism, course.round.ranges, prototype)
        release = release if course.planned.is_training else without_claim(release)
        # At least one report counts as an honest client's, even if all clients could be colluding: that client's own noise protects it.
        colluding = min(self.config.shuffling.colluding, max(0, cohort - 1))
        counts, channel = course.participation.counts(), self._collector.channel
        event = round_event(course.round.number, release, cohort, counts, channel, colluding=colluding)
        return replace(event, linked=self._collector.linked, histograms=not course.planned.is_training)

    def _delete_last_round(self, course: Course, last: bool) -> None:
        """Have the relay delete the last round again, since its deletion may have been interrupted.

        If it was the run's ``last`` round, an error is only logged: a finished run must not depend on the relay.
        """
        try:
            self._collector.done(course.run, course.done)
        except LdpflError as error:
            if not last:
                raise
            LOGGER.warning("round %d: whether its records are deleted is not known: %s", course.done, error)

    def _keep(self, course: Course, checkpoint: Checkpoint, reports: int) -> None:
        """Save ``checkpoint`` as the result of the round, have the transport delete its copy, and log the round."""
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
        """Save the new participation, and a ledger with the round charged as if no report came, before the round begins.

        If the server is stopped for good, the ledger still counts the round.
        """
        course.before, course.participation = course.participation, participation
        if self._folder is not None:
            participation.save(self._folder.participation_path)
            self._folder.save_ledger(course.last.ledger.charge(self._idle_event(course)))

    def _take_back(self, course: Course) -> None:
        """Undo :meth:`_charge_ahead`, since no node has charged or sent anything for the round.

        The run gets a new name, so that no message of the withdrawn round, late or at a relay, counts for the next one. The ledger is
        written first: if the server is killed in between, it finds the round begun when it restarts, and charges it.
        """
        course.participation = course.before.renamed()
        course.run = course.participation.run
        if self._folder is not None:
            self._folder.save_ledger(course.last.ledger)
            course.participation.save(self._folder.participation_path)

    def _collector_terms(self, begun_on: Mapping[str, str | int] = MappingProxyType({})) -> dict[str, str | int]:
        """Return the transport's terms for JSON. For a round ``begun_on`` some terms, return these as far as they can still be met."""
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
