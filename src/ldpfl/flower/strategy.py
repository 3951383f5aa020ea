"""A Flower Strategy for the server: it issues ranges, aggregates reports, keeps the ledger, and resumes stopped runs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower.arrays import to_arrays
from ldpfl.flower.replies import Deadline, replies_as_they_come
from ldpfl.flower.report_collection import Collector, DirectCollector, Received
from ldpfl.flower.round_closing import aggregate_round, evaluation_text
from ldpfl.flower.round_kinds import last_round, planned_round, statistics_rounds
from ldpfl.flower.run_progress import Replies, RunProgress
from ldpfl.flower.server_invitations import NodeSelection, Waiting
from ldpfl.flower.starting import (
    check_score,
    check_start_arguments,
    check_strategy_types,
    guarantee_text,
    start_or_resume,
    with_calibrated_noise,
)
from ldpfl.flower.statistics import ColumnScaling, column_scaling, edges_text
from ldpfl.flower.terms import ARRAYS, CONFIG, RECORD, SHORTEST_REPLY_S, RoundTerms, agreement_of, check_sum_fits, digest_of
from ldpfl.flower.too_few import all_declined, no_reports, node_ids_text, too_few_reported
from ldpfl.privacy import RoundEvent
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import without_claim
from ldpfl.server import Checkpoint, NotFiniteError, RoundMetrics, ServerRules, close_idle_round, round_event
from ldpfl.util.number_format import counted
from ldpfl.util.quantities import is_number

LOGGER = logging.getLogger("flwr.ldpfl")

OnMeasured = Callable[[ColumnScaling], tuple[Tensor, ServerRules]]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


_NO_FIGURES = "clients send no figures without noise. Remove the method, and evaluate the model on the server by start(evaluate_fn=...)"
_UNUSED_METHODS: Mapping[str, str] = {
    "aggregate_train": (
        "the next model is that of LdpStrategy, whatever the method returns. Remove the method. To look at each model use "
        "start(evaluate_fn=...), and to choose the server's step set training.server_optimiser and training.server_learning_rate"
    ),
    "configure_evaluate": _NO_FIGURES,
    "aggregate_evaluate": _NO_FIGURES,
}
"""Methods of Flower's strategies whose results ``LdpStrategy`` does not use, each with the reason and the remedy."""


class LdpStrategy(Strategy):
    """Federated averaging of locally private reports, for ClientApps that are wrapped in ``LdpClientApp``.

    A subclass may override ``configure_train`` to change the arguments that it passes to ``super()``. It must return the messages of
    ``super()`` as they are: others are refused before any is sent. A subclass that overrides ``aggregate_train``, ``configure_evaluate``
    or ``aggregate_evaluate`` is refused when it starts, because what these methods return would have no effect.

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
        score: function that evaluates global weights (d,) after each round. It returns a number. If ``kind`` is an own app, it is also
            called before the first round, so that an error shows before any node is charged.
        origin: name of the data, so that a run is not resumed on other data.
        reply_s: seconds after its charge at which every client replies, long enough for the slowest to train. A client that has nothing
            to report by then reports no change. With 0 each client replies as soon as it can, which reveals how long it trained. This is
            for simulations; policies refuse it unless they set ``immediate_replies``.
        run_config: the run's config, ``context.run_config``. Clients take part only if theirs is the same.
        kind: kind of run that the run folder states. All but the ready app count as training a model of the app's author, on whose code
            a guarantee for records rests. Nodes with another app than the ready one decline the ready app's rounds that protect records.
        on_measured: called once the columns of nodes' tables are measured; returns initial weights (d,) and rules for the new scaling. For
            the ready app, whose server scales its own rows in the same way.

    Raises:
        ConfigError: the config asks for random check-in or a secret order, which Flower cannot keep secret, because it shows who answers;
            or an argument is not allowed.
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
        check_strategy_types(
            config=config,
            collector=collector,
            folder=folder,
            waiting=waiting,
            score=score,
            run_config=run_config,
            kind=kind,
            on_measured=on_measured,
        )
        if config.clients.self_sampling != "off":
            raise ConfigError('clients.self_sampling does not work on Flower, which shows who answers: set it to "off"')
        if config.clients.once:
            raise ConfigError("clients.once does not work on Flower, which shows who answers when: leave it out")
        if not (is_number(reply_s) and isfinite(reply_s) and (reply_s == 0 or reply_s >= SHORTEST_REPLY_S)):
            raise ConfigError(f"reply_s must be 0 (nodes reply at once) or at least {SHORTEST_REPLY_S:g} seconds, got {shown(reply_s)}")
        self._collector = collector or DirectCollector(config.seed)
        self._config = config if kind is Kind.READY_APP else with_calibrated_noise(config, self._collector)
        self._folder, self._waiting, self._score, self._origin = folder, waiting, score, origin
        self._reply_s, self._run_config, self._kind = float(reply_s), digest_of(run_config), kind
        self._on_measured = on_measured
        self._progress: RunProgress | None = None

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

        If too few nodes take part in an evaluation at clients, it is charged and gives no figures, and the run goes on. If all nodes
        decline, the run ends.

        Args:
            initial_arrays: the public initial model; a resumed run goes on from its checkpoint instead.
            num_rounds: total number of training rounds, including those before a resume; by default as the config says.
            timeout: seconds to wait for the replies of a round.
            train_config: settings that apps find in each message to train.
            evaluate_config: must be left out, because clients evaluate nothing.
            evaluate_fn: function that evaluates a model, given the number of training rounds that led to it and the model. As in Flower,
                it is called before the first round, with 0, and after each training round. It returns a MetricRecord or None. If it
                raises an error, the run ends after that round, which is saved and charged. A resumed run first evaluates the model of its
                checkpoint.

        Raises:
            TooFewTakePart: fewer nodes take part than a round needs; AllDeclined, if all declined. The rounds before are kept. Or none of
                the config's training rounds had a report.
            ConfigError: a subclass overrides a method whose result is not used.
            LdpflError: the model, the config or the folder does not fit; or too few nodes.
        """
        for name, reason in _UNUSED_METHODS.items():
            if getattr(type(self), name) is not getattr(LdpStrategy, name):
                raise ConfigError(f"{type(self).__name__} overrides {name}, which would have no effect: {reason}")
        if evaluate_config is not None:
            raise ConfigError("evaluate_config asks clients for figures without noise, which they never send: use evaluate_fn")
        check_start_arguments(initial_arrays, num_rounds, timeout, self._reply_s)
        rounds = self.config.training.rounds if num_rounds is None else num_rounds
        result = Result()
        with self._folder.locked() if self._folder else nullcontext():
            progress = self._progress = start_or_resume(
                self.config, self._kind, self._folder, self._origin, self._score, self._collector_terms, initial_arrays, timeout, rounds
            )
            self.summary()
            if self._kind is not Kind.READY_APP:
                check_score(self._score(progress.checkpoint.state.model))  # before any node is charged
            _add_evaluation(result, progress, evaluate_fn)
            for metrics in progress.checkpoint.history:
                result.train_metrics_clientapp[metrics.round] = _metric_record(metrics)
            last = last_round(self.config, rounds)
            if progress.rounds_done > 0 and progress.participation.begun == progress.rounds_done:  # resumed after a stop between rounds
                self._delete_last_round(progress, run_is_over=progress.rounds_done >= last)
            self._set_column_scaling(progress)
            while progress.rounds_done < last:
                number = progress.rounds_done + 1
                if progress.participation.begun >= number:  # the server was stopped after it told nodes to train
                    self._finish_interrupted(progress)
                else:
                    self._run_round(progress, number, train_config or ConfigRecord(), grid)
                if progress.planned.is_training:
                    metrics = progress.checkpoint.history[-1]
                    result.train_metrics_clientapp[metrics.round] = _metric_record(metrics)
                    _add_evaluation(result, progress, evaluate_fn)
                elif progress.planned.kind == "statistics":
                    self._set_column_scaling(progress)
        if rounds >= self.config.training.rounds and not any(metrics.clients for metrics in progress.checkpoint.history):
            raise no_reports(progress)
        result.arrays = to_arrays(progress.checkpoint.state.weights, progress.layout)
        return result

    @property
    def config(self) -> RunConfig:
        """The run's config, which cannot be replaced: the ledger charges what nodes are told."""
        return self._config

    @property
    def checkpoint(self) -> Checkpoint:
        """The state after the last round.

        Raises:
            ConfigError: the run was not started.
        """
        return self._current_progress().checkpoint

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Ask the nodes of a round whether they take part. Return the messages that tell the agreeing nodes to train, all with one content.

        ``arrays`` and ``config`` are the model and the settings that the app of each node gets. A subclass may change them before it calls
        this method, and must return its messages as they are.

        Raises:
            TooFewTakePart: too few nodes agree; nothing was begun or charged.
        """
        progress = self._current_progress()
        selection = NodeSelection(progress, grid, self._collector, self._waiting, self.config, self._reply_s, self._terms)
        agreeing_nodes, connected_nodes, charged_before = selection.nodes_that_agree(server_round)
        # Charged before anything is sent: if the server is killed, the ledger still counts what clients may have released.
        terms = self._collector_terms()
        participation = progress.participation.after_asking(server_round, agreeing_nodes, connected_nodes, terms, charged_before)
        self._charge_before_sending(progress, participation)
        app_config = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({ARRAYS: arrays, CONFIG: app_config, RECORD: self._terms(progress).to_record()})
        try:
            self._collector.open(progress.round, content)
        except LdpflError:
            self._withdraw_round(progress)  # nobody was told to train
            with suppress(LdpflError):
                self._collector.give_up(progress.round)
            raise
        progress.round_began = time.perf_counter()
        progress.asked_nodes, progress.asked_for = frozenset(agreeing_nodes), agreement_of(content, MessageType.TRAIN)
        progress.deadline = Deadline(progress.timeout)
        LOGGER.info("%s: asking %d of %s", progress.planned, len(agreeing_nodes), counted(len(connected_nodes), "node"))
        # A list, because Flower's grids iterate over the messages more than once. The ttl keeps nodes from answering after the round.
        return [Message(content, node, MessageType.TRAIN, ttl=progress.timeout, group_id=str(server_round)) for node in agreeing_nodes]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Collect and aggregate the round's reports. Return the new model and the round's figures.

        ``server_round``, which Flower's interface demands, is not used: the round is the current one.

        Raises:
            TooFewTakePart: so many nodes declined or failed that no report can be released: the round was ended at once.
        """
        progress, needed = self._current_progress(), self._collector.min_clients
        recorded, given_up = Replies(progress), False
        for reply in replies:
            recorded.add(reply)
            if not given_up and recorded.possible_reports < needed:
                given_up = self._collector.give_up(progress.round)
                progress.deadline.renew(self._waiting.answer_s)  # wait a little for further refusals, which nodes send at once
            if given_up and not recorded.only_declined:  # else go on: if all nodes decline, the round can be withdrawn
                break
        if given_up and recorded.all_declined:  # no node has charged or sent anything
            self._withdraw_round(progress)
            raise all_declined(progress, recorded.reasons)
        if given_up:
            received, problems = Received(None), recorded.problems
        else:
            if recorded.silent:
                LOGGER.warning("%s: no reply in time from %s", progress.planned, node_ids_text(recorded.silent))
            received = self._collector.collect(progress.round, recorded.answers, progress.deadline.max_seconds_left)
            problems = recorded.problems_at_deadline
        self._finish_round(progress, replace(received, refused=(*problems, *received.refused)))
        if given_up:
            raise too_few_reported(progress, needed, recorded.reasons, self._waiting.required(needed))
        figures = _metric_record(progress.checkpoint.history[-1]) if progress.checkpoint.history else MetricRecord()
        return to_arrays(progress.checkpoint.state.weights, progress.layout), figures

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask nobody: a client's plain loss or accuracy has no noise. Noisy figures are measured in evaluation rounds of their own."""
        return ()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None, as nobody was asked."""
        return None

    def summary(self) -> None:
        """Log the guarantee of each client's report, against whom it holds, and whether the run begins or goes on."""
        progress = self._current_progress()
        last = progress.checkpoint.state.round
        is_new = not last and not progress.participation.begun  # a run may have been stopped in its first round
        start = "the run begins" if is_new else f"the run goes on after round {last}"
        LOGGER.info("%s: %s; %s", self.config.mechanism.name, guarantee_text(progress), start)

    def _run_round(self, progress: RunProgress, number: int, train_config: ConfigRecord, grid: Grid) -> None:
        """Run round ``number``. ``train_config`` has the settings that apps find in the message.

        If too few nodes take part, an evaluation is charged and brings no figures, and the run goes on. Any other round then ends the run,
        and so does an evaluation that all nodes decline.
        """
        try:
            arrays = to_arrays(self._weights_to_send(progress, number), progress.layout)
            progress.asked_nodes = frozenset()  # until LdpStrategy.configure_train sets them for this round
            messages = self._checked_messages(self.configure_train(number, arrays, train_config, grid), progress)
            on_poll = self._collector.wait_notes(progress.round)
            with closing(replies_as_they_come(grid, messages, progress.deadline, on_poll=on_poll)) as replies:
                self.aggregate_train(number, replies)
        except AllDeclined:  # a TooFewTakePart as well
            raise
        except TooFewTakePart as error:
            if planned_round(self.config, number).kind != "evaluation":
                raise
            LOGGER.warning("%s has no result, and the run goes on. %s", planned_round(self.config, number), error)
            if progress.rounds_done < number:  # no node was told to train; otherwise aggregate_train has finished the round
                self._skip_round(progress, number)

    def _checked_messages(self, returned: object, progress: RunProgress) -> list[Message]:
        """Return the messages that ``configure_train``, perhaps a subclass's, has ``returned`` for the current round.

        Raises:
            ConfigError: they are not exactly those of ``LdpStrategy.configure_train``, which alone are what the ledger counts and what a
                relay lets nodes answer. The round stays charged, because such a method may have sent messages itself.
        """
        messages = list(returned) if isinstance(returned, Iterable) else []
        fault = _fault_of_messages(returned, messages, progress)
        if not fault:
            return messages
        if progress.asked_nodes:  # else LdpStrategy.configure_train was not called, so no round was begun
            self._finish_without_reports(progress)
        raise ConfigError(
            f"{type(self).__name__}.configure_train returned {fault}: return the messages of super().configure_train as they are, because "
            f"the ledger counts what these messages ask for. To change the model or the settings that nodes get, change {ARRAYS} or "
            f"{CONFIG} before you call super().configure_train. A round that was begun stays charged, and is over"
        )

    def _skip_round(self, progress: RunProgress, number: int) -> None:
        """Finish an evaluation for which no node was told to train, so that the run can go on with the next round.

        The ledger has one event for each round, so this round is charged for all nodes although none has sent anything.
        """
        all_nodes = progress.participation.rounds
        progress.open_round(number, len(all_nodes), self._collector.linked)
        self._charge_before_sending(progress, progress.participation.after_asking(number, all_nodes, (), self._collector_terms()))
        self._finish_without_reports(progress)

    def _terms(self, progress: RunProgress) -> RoundTerms:
        """Return the terms of the current round, which nodes are sent."""
        check_sum_fits(self.config, progress.round.asked)
        ranges = progress.checkpoint.state.ranges
        return RoundTerms(
            run=progress.run,
            round=progress.round.number,
            kind=progress.planned.kind,
            size=progress.round.ranges.dimension,
            measured=edges_text(progress.stages) if progress.planned.kind == "statistics" else progress.measured,
            config=self.config,
            layers=progress.layout.names,
            center=tuple(ranges.center.tolist()),
            radius=tuple(ranges.radius.tolist()),
            asked=progress.round.asked,
            reply_s=self._reply_s,
            run_config=self._run_config,
            ready_app=self._kind is Kind.READY_APP,
            **self._collector.terms(),
        )

    def _weights_to_send(self, progress: RunProgress, number: int) -> Tensor:
        """Return the weights (d,) that nodes get in round ``number``: the weights to train from, or the model to evaluate."""
        is_evaluation = planned_round(self.config, number).kind == "evaluation"
        return progress.checkpoint.state.model if is_evaluation else progress.checkpoint.state.weights

    def _set_column_scaling(self, progress: RunProgress) -> None:
        """Set how nodes scale their tables, and let the server scale its rows likewise. Do nothing before all columns are measured."""
        measuring_rounds = statistics_rounds(self.config)  # 0: the run measures no columns
        if measuring_rounds == 0 or progress.rounds_done < measuring_rounds:
            return
        scaled = column_scaling(self.config, progress.stages)
        for note in scaled.notes:
            LOGGER.warning("%s", note)
        progress.measured = scaled.text
        if self._on_measured is not None:
            weights, progress.rules = self._on_measured(scaled)
            if progress.checkpoint.state.round == 0:  # otherwise the run is resumed, and keeps the weights of its checkpoint
                progress.checkpoint = replace(progress.checkpoint, state=replace(progress.checkpoint.state, weights=weights))

    def _finish_interrupted(self, progress: RunProgress) -> None:
        """Finish the round in which the server was stopped: with its reports if the collector still has them, else without reports."""
        number = progress.participation.begun
        progress.open_round(number, progress.participation.asked, self._collector.linked)
        progress.round_began = time.perf_counter()
        received = self._collector.collector_for(progress.participation.terms).recover(progress.round)
        if received is not None:
            self._finish_round(progress, received)
            return
        LOGGER.warning("%s was interrupted: its reports are lost, but their privacy cost is charged", progress.planned)
        self._finish_without_reports(progress)

    def _finish_round(self, progress: RunProgress, received: Received) -> None:
        """Aggregate the ``received`` reports and save the round. The model stays if no report came, or if their aggregate is not finite."""
        if received.decoding_error:
            self._stop_run(progress, received.decoding_error)  # raises
        for reason in sorted(set(received.refused)):
            LOGGER.warning("%s: left out %d: %s", progress.planned, received.refused.count(reason), reason)
        if received.pool is None:
            LOGGER.warning("%s: no report was received; the model stays as it is", progress.planned)
            self._finish_without_reports(progress)
            return
        try:
            checkpoint = aggregate_round(progress, received, received.pool, self._round_event(progress, received.pool.clients))
        except NotFiniteError as error:  # a single client that sends huge values must not end the run
            LOGGER.warning("%s: %s; the model stays as it is", progress.planned, error)
            self._finish_without_reports(progress)
            return
        self._save_round(progress, checkpoint, received.pool.clients)

    def _stop_run(self, progress: RunProgress, reason: str) -> NoReturn:
        """Raise the :class:`ProtocolError` that ends the run: the release cannot be decoded, and the next one would fail in the same way.

        The round stays begun and charged, so that the run can be resumed with it. Without a folder, no run can be resumed.
        """
        fault = f"the privacy budget of round {progress.round.number} is spent, but its reports cannot be read: {reason}"
        if self._folder is None:
            self._finish_without_reports(progress)
            raise ProtocolError(f"{fault}. The run has no folder, so it cannot be resumed: remove the cause, and start another run")
        raise ProtocolError(
            f"{fault}. The relay still has the reports. To read them again, resume the run: submit the same app. To give them up, first "
            f"run ldpfl deploy left-open {self._folder.path} --cancel"
        )

    def _finish_without_reports(self, progress: RunProgress) -> None:
        """Finish the round without reports: keep the model, but charge the round, because reports may have left their clients."""
        before = progress.checkpoint
        after = close_idle_round(progress.rules, before) if progress.planned.is_training else before
        self._save_round(progress, replace(after, ledger=before.ledger.charge(self._event_without_reports(progress))), reports=0)

    def _event_without_reports(self, progress: RunProgress) -> RoundEvent:
        """Return the ledger's event for a round without known reports. Its cohort is assumed to be as small as the collector allows."""
        return self._round_event(progress, min(progress.round.asked, self._collector.min_clients))

    def _round_event(self, progress: RunProgress, cohort: int) -> RoundEvent:
        """Return the ledger's event for the current round, in which each report hides among those of ``cohort`` clients.

        All nodes that were told to train count as participants, with or without a report.
        """
        # The release says on whose code its guarantee rests: on ldpfl's only if the round's mechanism is ldpfl's own. In training, the
        # run's mechanism makes the round's, so both must be.
        chosen_by = progress.mechanism if progress.planned.kind == "training" else None
        release = released(progress.round.mechanism, progress.round.ranges, chosen_by=chosen_by)
        if not progress.planned.is_training:
            release = without_claim(release)  # the mechanism's paper claims nothing about sums over records
        # At least one report counts as an honest client's, even if all clients could be colluding: that client's own noise protects it.
        colluding = min(self.config.shuffling.colluding, max(0, cohort - 1))
        counts, channel = progress.participation.counts(), self._collector.channel
        event = round_event(progress.round.number, release, cohort, counts, channel, colluding=colluding)
        # `histograms` marks a round that released counts or figures instead of a model update.
        return replace(event, linked=self._collector.linked, histograms=not progress.planned.is_training)

    def _delete_last_round(self, progress: RunProgress, run_is_over: bool) -> None:
        """Have the relay delete the last round again, since its deletion may have been interrupted.

        If the run is over, an error is only logged: a finished run must not depend on the relay.
        """
        try:
            self._collector.delete_round(progress.run, progress.rounds_done)
        except LdpflError as error:
            if not run_is_over:
                raise
            LOGGER.warning("round %d: the relay may still hold this round's records: %s", progress.rounds_done, error)

    def _save_round(self, progress: RunProgress, checkpoint: Checkpoint, reports: int) -> None:
        """Save ``checkpoint`` as the result of the round, have the transport delete its copy, and log the round."""
        if self._folder is not None:
            self._folder.save_round(checkpoint)  # before the transport's copy is deleted, so that a crash in between loses nothing
        self._collector.delete_round(progress.run, progress.round.number)
        progress.checkpoint = checkpoint
        if not progress.planned.is_training:
            LOGGER.info("%s: %s%s", progress.planned, counted(reports, "report"), evaluation_text(progress) if reports else "")
            return
        metrics = checkpoint.history[-1]
        score = f", score {metrics.score:.4f}" if isfinite(metrics.score) else ""
        LOGGER.info("round %d: %s%s", metrics.round, counted(reports, "report"), score)

    def _charge_before_sending(self, progress: RunProgress, participation: Participation) -> None:
        """Save the new participation, and a ledger with the round charged as if no report came, before the round begins.

        If the server is stopped for good, the ledger still counts the round.
        """
        progress.participation_before, progress.participation = progress.participation, participation
        if self._folder is not None:  # ledger first: whenever a reader comes, it counts at least the rounds that were begun
            self._folder.save_ledger(progress.checkpoint.ledger.charge(self._event_without_reports(progress)))
            participation.save(self._folder.participation_path)

    def _withdraw_round(self, progress: RunProgress) -> None:
        """Undo :meth:`_charge_before_sending`, since no node has charged or sent anything for the round.

        The run gets a new name, so that no message of the withdrawn round, late or at a relay, counts for the next one. The ledger is
        written last: if the server is killed in between, it counts one round too many until the next round.
        """
        progress.participation = progress.participation_before.under_new_name()
        progress.run = progress.participation.run
        if self._folder is not None:
            progress.participation.save(self._folder.participation_path)
            self._folder.save_ledger(progress.checkpoint.ledger)

    def _collector_terms(self, earlier: Mapping[str, str | int] = MappingProxyType({})) -> dict[str, str | int]:
        """Return the transport's terms, as values for JSON.

        ``earlier`` are the terms of a round that was begun. If they name the aggregator's previous key, the returned terms name it, too.
        """
        collector = self._collector.collector_for(earlier)
        return {name: value.hex() if isinstance(value, bytes) else value for name, value in collector.terms().items()}

    def _current_progress(self) -> RunProgress:
        """Return the progress of the run that :meth:`start` began."""
        if self._progress is None:
            raise ConfigError("the strategy was not started: call start()")
        return self._progress


def _fault_of_messages(returned: object, messages: Sequence[Message], progress: RunProgress) -> str:
    """Return how the ``messages`` differ from those that ``LdpStrategy.configure_train`` made for the current round; "" if they do not.

    Args:
        returned: the object from which ``messages`` were taken.
    """
    if not isinstance(returned, Iterable) or not all(isinstance(message, Message) for message in messages):
        return f"{shown(returned)}, not a list of messages"
    if not progress.asked_nodes:
        return f"{counted(len(messages), 'message')} without a call of super().configure_train, which asks the nodes and opens the round"
    told = Counter(message.metadata.dst_node_id for message in messages)
    if unasked := told.keys() - progress.asked_nodes:
        return f"messages to {node_ids_text(unasked)}, which did not agree to the round"
    if missing := progress.asked_nodes - told.keys():
        return f"no message to {node_ids_text(missing)}, which agreed to the round"
    if told.total() > len(told):
        return "several messages to one node"
    # By identity, because the digest of a content takes time, and messages that were not changed share one content.
    kinds_and_contents = {(message.metadata.message_type, id(message.content)): message.content for message in messages}
    if any(agreement_of(content, kind) != progress.asked_for for (kind, _), content in kinds_and_contents.items()):
        return "messages whose type or content is changed"
    return ""


def _add_evaluation(result: Result, progress: RunProgress, evaluate_fn: EvaluateFn | None) -> None:
    """Add the figures of ``evaluate_fn`` on the current model, if there are any, to Flower's ``result``."""
    if evaluate_fn is None:
        return
    number = progress.checkpoint.state.round
    evaluated = evaluate_fn(number, to_arrays(progress.checkpoint.state.weights, progress.layout))
    if not isinstance(evaluated, MetricRecord | None):
        raise ConfigError(f"evaluate_fn must return a MetricRecord of flwr.app, or None, got {shown(evaluated)}")
    if evaluated is not None:
        result.evaluate_metrics_serverapp[number] = evaluated


def _metric_record(metrics: RoundMetrics) -> MetricRecord:
    """Return the figures of a training round that Flower's result shows."""
    return MetricRecord({"reports": metrics.clients, "score": metrics.score, "seconds": metrics.seconds})
