"""A wrapper of a Flower ClientApp that sends nothing but randomised reports to the server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from ldpfl.errors import ConfigError, Declined, LdpflError, NoRecordSums, NotReadyApp, PrivacyError, ProtocolError, shown
from ldpfl.flower import confined_process
from ldpfl.flower.app_failures import TRY_IT
from ldpfl.flower.arrays import only_arrays, to_vector
from ldpfl.flower.internals import APP_RAISED, REFUSED, message_for_app, records_to_bytes, unwrap_serialised, wrap_serialised
from ldpfl.flower.invitation import QUESTION, read_question
from ldpfl.flower.named_by_server import check_mechanism
from ldpfl.flower.operator_node import OperatorNode, operator_node
from ldpfl.flower.records import RecordGradients, Records, check_values_asked, import_named, is_import_path
from ldpfl.flower.round_request import Ask, Node, RoundRequest, read_request
from ldpfl.flower.terms import RECORD, Answer, RoundTerms, digest_of, mechanism_name_in, require_adding_up
from ldpfl.mechanisms import Perturbed, is_built_in, payload_bits
from ldpfl.mechanisms.base import is_finite, record_clip_of
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.mechanisms.reports.bits import packed_size
from ldpfl.server import client_values
from ldpfl.util.randomness import RandomSource, SecureSource

LOGGER = logging.getLogger("flwr.ldpfl")

_LDPFL_APPS = ("ldpfl.flower.apps:train", "ldpfl.flower.apps:train_for_trial")
"""Import paths of ldpfl's own apps."""

DECLINED, FAILED = Declined.public, "failed"
"""Error texts that a server receives in place of a report: the client declined, or it failed. Neither text depends on data."""

_MARGIN, _MIN_MARGIN_S, _KILLED_AFTER_S = 0.05, 1.0, 2.0
"""The report must be ready some time before the reply: 5 % of the time for a reply, but at least a second, or half of a shorter time. The
margin is for reading the report and stopping its processes, and for a container's CPU limit, which counts over short periods. The stopped
processes are killed some seconds after the reply."""

_LENGTH_BYTES = 8  # they state the report's length, before the report and the app's state

_MAX_UNTIMED_S = 3600.0
"""Maximum number of seconds for an app's work in a round that states no time for replies."""

_MAX_STATE_BYTES = 1 << 24
"""Maximum bytes of an app's state that are kept from round to round. Reading the state delays the reply, so it must be short."""

Guard = Callable[[Callable[[], bytes]], bytes]
"""Function that runs the work of an app's process, and may replace the error that the work raises by another one."""

T = TypeVar("T")


class _LastRead(NamedTuple, Generic[T]):
    """The last message, and what it asks for. Simulated clients of one process get the same content object, so it is read only once."""

    content: RecordDict
    message_type: str
    run_config: str
    asked: T

    def is_of(self, message: Message, run_config: str) -> bool:
        """Tell whether ``message`` has the same content and type, and the node the same ``run_config`` (its digest)."""
        return (self.content is message.content) and (self.message_type, self.run_config) == (message.metadata.message_type, run_config)


@dataclass(frozen=True)
class Attempt:
    """Outcome of a trial: a round's local work, done without sending anything.

    Attributes:
        report_bytes: length of the report; None if the work failed.
        trouble: reason of the failure, for the node's operator. It repeats no value. Empty if the work succeeded.
        seconds: how long the work took.
    """

    report_bytes: int | None
    trouble: str
    seconds: float


class LdpClientApp(ClientApp):
    """A locally private ClientApp that wraps another one: ``app = LdpClientApp("my_package.training:app")``.

    It can also wrap a model and records: ``app = LdpClientApp(records="my_package.training:records")``. Then ldpfl computes the gradients
    and clips them record by record, as mechanisms that protect records (``dp-sgd``) require.

    The trained weights, or their change since the broadcast, go through the mechanism that the server names and the node's policy
    allows. Anything else that the app does or returns, metrics included, stays on the node. Two kinds of message are answered: ``train``,
    and the question whether this node would take part in a round (:mod:`ldpfl.flower.invitation`).

    The node decides from public facts whether it takes part, and charges the lifetime budget, before the app is called. From then on
    exactly one report leaves. If training fails, takes too long or gives values that are not finite, the report is made from the
    broadcast itself, which means no change; only the node's log says so. If the round states ``reply_s``, the reply leaves that many
    seconds after the charge, whatever happens. The app runs in a process of its own, which is ended by then. The report is made in another
    process, in which no code of the app has run.

    Guarantee: the mechanism's guarantee for each round's report. With ``records`` it also rests on the app's model and loss, so that the
    budget has it as the author's claim. Whether a client takes part is not hidden. Assumption: the node runs this wrapper. Anyone who
    chooses the code on a node can leave the wrapper out.

    Args:
        app: the app, or any function of a message and a context; or its import path, ``package.module:name``. A path is imported in
            the app's process, so that no code of the app runs anywhere else, and it may use all of PyTorch's threads; an object gets one.
        records: in place of ``app``: a function that returns this node's :class:`~ldpfl.flower.RecordTask` for Flower's context; or its
            import path. It takes part where the terms ask for gradients.
        node: function that returns the operator's settings of this node for a context.
        persons: whether ``records`` say to whom each row belongs (``RecordTask.persons``). If not, rounds that protect persons are
            declined. This must be known here, because the budget is charged before ``records`` is called.
        mods: must be left out, because mods see values without noise: give them to the ClientApp that trains.
        source: function that returns the source of random bits, for tests; by default the operating system's secure source.

    Raises:
        ConfigError: neither ``app`` nor ``records`` is given, or both are; or ``mods`` are given.
    """

    def __init__(
        self,
        app: ClientAppCallable | str | None = None,
        *,
        records: Records | str | None = None,
        node: Callable[[Context], Node] = operator_node,
        persons: bool = False,
        mods: object = None,
        source: Callable[[Ask, Context], RandomSource] = lambda ask, context: SecureSource(),
    ) -> None:
        super().__init__()
        if mods is not None:
            self.train()  # raises: mods would see values without noise
        self._app, self._node, self._source = _app_to_wrap(app, records), node, source
        self._by_path = isinstance(app or records, str)
        self._is_ldpfl_app = _is_ldpfl_app(self._app)
        self._returns_weights = records is None
        self._returns_gradients = self._is_ldpfl_app or records is not None
        self._returns_persons = persons or records is None  # ldpfl's own app finds persons by the column that the terms name
        self._last_read: _LastRead[RoundRequest] | None = None
        self._last_question: _LastRead[Ask] | None = None

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer ``message`` with a report, or with an error that does not depend on data."""
        is_question = message.metadata.message_type == QUESTION  # logged in other words than a round, since nothing is sent or charged
        try:
            answer = self._answer(message, context)
        except Declined as refusal:
            LOGGER.warning("%s: %s", "would decline" if is_question else "declined", refusal)
            return Message(Error(REFUSED, refusal.public), reply_to=message)
        except (Exception, SystemExit) as error:
            LOGGER.error("%s: %s", "not answered" if is_question else "failed", confined_process.describe_error(error))
            return Message(Error(APP_RAISED, FAILED), reply_to=message)
        if is_question:
            LOGGER.info("would take part: the server asked about round %d of run %s; nothing was charged", answer.round, answer.run)
        else:
            LOGGER.info("sent: the report of round %d of run %s", answer.round, answer.run)
        return Message(RecordDict({RECORD: answer.to_record()}), reply_to=message)

    @property
    def wrapped(self) -> ClientAppCallable | str:
        """The wrapped app, or its import path. If ``records`` were given, the :class:`RecordGradients` that wraps them."""
        return self._app

    def attempt(self, message: Message, context: Context, guard: Guard) -> Attempt:
        """Do all the local work that a ``train`` message asks for, in the same processes as a real round, and drop the report.

        Nothing is charged or sent, and no refusal is recorded. The outcome is for this node's operator alone: how long the work took, and
        why it failed, may depend on the data.

        Args:
            guard: runs the work of the app's process.

        Raises:
            Declined: the round would be declined.
            LdpflError: the message, or the mechanism, cannot be used.
        """
        node = self._node(context)
        if isinstance(node, OperatorNode):  # before the mechanism is looked up, which could run an installed package's code
            check_mechanism(mechanism_name_in(message.content), node.policy)
        request = self._read_request(message, context)
        terms = request.ask.terms
        self._check_app_returns(terms)
        if isinstance(node, OperatorNode):
            node.would_allow(request.ask)
        began = time.monotonic()
        with confined_process.one_thread() as threads:
            self._report(request, node, context, _no_change(request))  # its time counts, since a real round needs it as well
            end = began + (terms.reply_s or _MAX_UNTIMED_S)
            outcome = self._run_app_and_encoder(request, node, message, context, self._app_threads(threads), end, guard)
        seconds = time.monotonic() - began
        if outcome.value is None:
            return Attempt(None, outcome.trouble, seconds)
        report_bytes = int.from_bytes(outcome.value[:_LENGTH_BYTES], "big")  # the value begins with the report's length, see `_encode`
        return Attempt(report_bytes, "", seconds)

    def train(self, *_: object, **__: object) -> NoReturn:
        """Refuse to register a function: functions belong to the wrapped app.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "LdpClientApp takes no functions, mods or lifespan: register them with your ClientApp, and give that app to LdpClientApp"
        )

    evaluate = query = lifespan = train

    def _answer(self, message: Message, context: Context) -> Answer:
        """Answer a question, or charge the budget for a round and send its report, in the answer or over the relay."""
        if message.metadata.message_type == QUESTION:
            return self._answer_question(message, context)
        category = message.metadata.message_type.partition(".")[0]
        if category != "train":
            raise Declined(f"a message of type {category!r} asks for values without noise: this node answers only messages of type 'train'")
        node = self._node(context)
        if isinstance(node, OperatorNode):  # before the mechanism is looked up, which could run an installed package's code
            node.check_mechanism(mechanism_name_in(message.content))
        request = self._read_request(message, context)
        ask, terms = request.ask, request.ask.terms
        self._check_app_returns(terms)
        if terms.reply_s >= message.metadata.ttl:
            raise ProtocolError(
                f"the message expires after {message.metadata.ttl:g} s, but clients reply only after {terms.reply_s:g} s: the server must "
                "raise its timeout; nothing was charged or sent"
            )
        if not is_built_in(ask.mechanism.name):  # try the report of no change: a mechanism that cannot make it must fail before the charge
            self._payload(request, context, _no_change(request))
        deliverable_s = node.admit(ask)
        admitted = time.monotonic()
        if terms.reply_s:
            report = self._forked_report(request, node, message, context, admitted + terms.reply_s)
        elif self._by_path and confined_process.CAN_FORK:  # an app given as an object is for simulations, and runs in this process
            report = self._forked_report(request, node, message, context, admitted + _MAX_UNTIMED_S, wait=False)
        else:
            report = self._unforked_report(request, node, message, context)
        if terms.transport == "direct":
            return Answer(terms.run, terms.round, report)
        try:
            node.upload(ask, report, admitted + deliverable_s - time.monotonic())
        except LdpflError as error:
            why = "if the relay takes no uploads any more, the server has ended the round, mostly because other nodes sent nothing"
            raise ProtocolError(f"round {terms.round} was charged, but its report was not delivered: {error} ({why})") from None
        return Answer(terms.run, terms.round)

    def _answer_question(self, message: Message, context: Context) -> Answer:
        """Return the answer that this node would take part in a round, or raise.

        Neither the app nor the data are touched. Nothing is charged, written or uploaded.
        """
        node, run_config = self._node(context), digest_of(context.run_config)
        if isinstance(node, OperatorNode):  # before the mechanism is looked up, which could run an installed package's code
            check_mechanism(mechanism_name_in(message.content), node.policy)
        last = self._last_question
        if last is None or not last.is_of(message, run_config):
            # One thread, because a fork may follow, and PyTorch's threads do not survive it.
            with confined_process.one_thread(), confined_process.errors_may_be_shown():
                ask = read_question(message.content, run_config)
            if not self._is_ldpfl_app:  # then a guarantee for records rests on the code of the app's author
                ask = ask.of_own_app()
            last = self._last_question = _LastRead(message.content, message.metadata.message_type, run_config, ask)
        self._check_app_returns(last.asked.terms)
        node.would_admit(last.asked)
        return Answer(last.asked.terms.run, last.asked.terms.round)

    def _check_app_returns(self, terms: RoundTerms) -> None:
        """Raise if this node's app does not return the kind of values that ``terms`` ask for."""
        if terms.kind != "training" and not self._is_ldpfl_app:
            raise NoRecordSums(
                f"the round asks for {terms.kind} sums over records. Only the app ldpfl.flower.apps computes them, and this node runs "
                "another app; nothing was charged or sent. The server should leave out evaluation.share, training.method = 'least-squares' "
                "and data.scaling = 'measured'"
            )
        check_values_asked(terms.config, weights=self._returns_weights, gradients=self._returns_gradients, persons=self._returns_persons)
        if terms.ready_app and not self._is_ldpfl_app and isinstance(terms.config.mechanism, DpSgdSettings):
            raise NotReadyApp(
                "the server's ledger says that ldpfl's own app computes the gradients, but this node runs another app; nothing was charged "
                "or sent. The app's author should write a ServerApp with LdpStrategy for it, or use the app that ldpfl init --flower "
                "writes: see docs/flower.md"
            )

    def _read_request(self, message: Message, context: Context) -> RoundRequest:
        """Return what a message asks for."""
        message_type, run_config = message.metadata.message_type, digest_of(context.run_config)
        last = self._last_read
        if last is None or not last.is_of(message, run_config):
            # One thread, because a fork may follow, and PyTorch's threads do not survive it.
            with confined_process.one_thread(), confined_process.errors_may_be_shown():
                request = read_request(message.content, message_type, run_config)
            if not self._is_ldpfl_app:  # then no guarantee for records is "proved": it rests on the code of the app's author
                request = replace(request, ask=request.ask.of_own_app())
            last = self._last_read = _LastRead(message.content, message_type, run_config, request)
        return last.asked

    def _unforked_report(self, request: RoundRequest, node: Node, message: Message, context: Context) -> bytes:
        """Make the report in this process and return it at once: for simulations, and systems that cannot fork.

        If the app fails, return a report of no change. The app's new state is dropped unless the node keeps it.
        """
        state_before = None if node.keeps_state(request.ask) else wrap_serialised(records_to_bytes(context.state))
        try:
            return self._report(request, node, context, self._run_app(request, message, context))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in a Rust library, for example, is no Exception
            _log_replaced(request, confined_process.describe_error(error))
            return self._report(request, node, context, _no_change(request))
        finally:
            if state_before is not None:
                context.state = state_before

    def _forked_report(
        self, request: RoundRequest, node: Node, message: Message, context: Context, end: float, *, wait: bool = True
    ) -> bytes:
        """Make the report in forked processes and return it at the time ``end``.

        If the processes have made no report by then, return a report of no change. Without ``wait``, return as soon as they have made the
        report or have ended.
        """
        with confined_process.one_thread() as threads:
            report = self._report(request, node, context, _no_change(request))  # made first, so that it is ready if the app fails
            try:
                outcome = self._run_app_and_encoder(request, node, message, context, self._app_threads(threads), end)
                if outcome.value is None:
                    _log_replaced(request, outcome.trouble)
                else:  # the report's length, the report and the app's state, see `_encode`
                    length = int.from_bytes(outcome.value[:_LENGTH_BYTES], "big")
                    report_view, state = outcome.value[_LENGTH_BYTES : _LENGTH_BYTES + length], outcome.value[_LENGTH_BYTES + length :]
                    report = bytes(report_view)
                    if node.keeps_state(request.ask):
                        context.state = wrap_serialised(bytes(state))
                    del report_view, state  # these views would keep the outcome's memory
                del outcome  # freeing much memory takes time, and must be over before the end
            except (Exception, SystemExit) as error:  # the app may, for example, have used up all processes or threads
                _log_replaced(request, confined_process.describe_error(error))
        if wait:
            while (left := end - time.monotonic()) > 0:
                # A second at most: if the system gives a stop signal to another thread, the main thread runs its handler only after this
                # call.
                time.sleep(min(left, 1.0))
        return report

    def _app_threads(self, threads: int) -> int:
        """Return how many of PyTorch's ``threads`` the app may use. An app given as an object gets one.

        Its code may have run parallel operations in this process before the fork, and another such operation would hang in the child.
        """
        return threads if self._by_path else 1

    def _run_app_and_encoder(
        self,
        request: RoundRequest,
        node: Node,
        message: Message,
        context: Context,
        threads: int,
        end: float,
        guard: Guard = lambda do: do(),
    ) -> confined_process.Outcome:
        """Run the app in one process and the encoder in another, and return the encoder's outcome some time before ``end``.

        The outcome's value holds what :meth:`_encode` returns: the report's length, the report, and the app's state.

        Args:
            threads: number of PyTorch's threads for the app.
            end: time at which the reply leaves, by ``time.monotonic``.
            guard: runs the work of the app's process.
        """
        reply_s = request.ask.terms.reply_s  # 0: the reply leaves as soon as it is ready, so no margin is needed
        ready_by = end - max(min(_MIN_MARGIN_S, reply_s / 2), _MARGIN * reply_s)  # the margins are explained at `_MARGIN`
        killed_at = end + _KILLED_AFTER_S if reply_s else 0.0  # 0: at once, because no reply time has to be kept
        with (
            confined_process.start_guarded(
                lambda: guard(lambda: self._app_bytes(request, message, context, threads)), killed_at
            ) as trainer,
            # The encoder is forked from this process, not from the trainer, so that it holds no code of the app. It is forked after the
            # trainer, so that the app's process holds none of the encoder's pipes.
            confined_process.start(lambda: self._encode(request, node, context, trainer.outcome()), trainer) as encoder,
        ):
            return encoder.outcome(ready_by)

    def _app_bytes(self, request: RoundRequest, message: Message, context: Context, threads: int) -> bytes:
        """Run the app, with ``threads`` threads of PyTorch. Return the trained weights, followed by the app's state, as bytes: PRIVATE."""
        torch.set_num_threads(threads)
        trained = self._run_app(request, message, context)
        return trained.to(_dtype(request)).numpy().tobytes() + records_to_bytes(context.state)

    def _encode(self, request: RoundRequest, node: Node, context: Context, trained: confined_process.Outcome) -> bytes:
        """Return the report's length, the report and the app's state, one after another, as bytes.

        ``trained`` is the outcome of the app's process: the trained weights, followed by the state, as :meth:`_app_bytes` returns them.
        """
        if trained.value is None:
            raise PrivacyError(trained.trouble)
        length = _dtype(request).itemsize * request.layout.dimension
        values, state = trained.value[:length], trained.value[length:]
        if len(state) > _MAX_STATE_BYTES:
            raise PrivacyError(f"the app's state takes more than {_MAX_STATE_BYTES:,} bytes: store large objects in a file of the node")
        weights = torch.frombuffer(bytearray(values), dtype=_dtype(request))  # a copy, because `_report` modifies the weights
        report = self._report(request, node, context, weights)
        return len(report).to_bytes(_LENGTH_BYTES, "big") + report + state

    def _report(self, request: RoundRequest, node: Node, context: Context, trained: Tensor) -> bytes:
        """Return the bytes that leave the node for ``trained`` weights (d,), which are PRIVATE and modified in place.

        These bytes are the randomised report; over a relay, they are encrypted for the aggregator.
        """
        payload = self._payload(request, context, trained)
        return payload if request.ask.terms.transport == "direct" else node.seal(request.ask, payload)

    def _payload(self, request: RoundRequest, context: Context, trained: Tensor) -> bytes:
        """Return the randomised report of ``trained`` weights (d,), which are PRIVATE and modified in place."""
        ask = request.ask
        values = client_values(trained[None], request.state, _randomised_values(ask.terms))  # (1, d), of this client alone
        if not is_finite(values):
            # The whole vector is checked before a random bit is drawn. A mechanism that samples coordinates would fail only if it hit the
            # bad ones, and so its failure would depend on the data.
            raise PrivacyError("the app's trained values have NaN or infinity: check the data, and lower the learning rate")
        source = self._source(ask, context)
        if ask.terms.transport == "sum":  # integers of 8 bytes that `Node.seal` masks, instead of a packed payload
            points: bytes = require_adding_up(ask.mechanism).points(values, ask.ranges, source)[0].astype("<i8").tobytes()
            return points
        payload: bytes = next(iter(ask.mechanism.encode(values, ask.ranges, source).payloads()))  # the only one: `values` has one row
        if len(payload) != packed_size(payload_bits(ask.mechanism, ask.ranges)):
            raise PrivacyError("the mechanism's payload must have the length that it states, else the length could depend on the data")
        return payload

    def _run_app(self, request: RoundRequest, message: Message, context: Context) -> Tensor:
        """Run the app and return its arrays (d,): PRIVATE. The app's metrics are dropped, and its state is put into ``context``."""
        # The app gets nothing by which the server could mark this client: no id that the SuperLink chooses, and sorted settings, because
        # the digest that is compared between clients does not cover their order.
        # Both zeros stand for ids, of the run and of the node.
        app_context = Context(0, 0, context.node_config, unwrap_serialised(context.state), dict(sorted(context.run_config.items())))
        reply: object = self._imported_app()(message_for_app(message), app_context)
        context.state = app_context.state
        if not isinstance(reply, Message):
            raise PrivacyError("the wrapped app returned no Message: let it return Message(RecordDict({...}), reply_to=message)")
        if reply.has_error():
            raise PrivacyError("the wrapped app replied with an error: let it return the trained arrays")
        return to_vector(only_arrays(reply.content), request.layout, _dtype(request))

    def _imported_app(self) -> ClientAppCallable:
        """Return the app, imported now if it was given as a path."""
        app: ClientAppCallable = import_named(self._app) if isinstance(self._app, str) else self._app
        return app


def _app_to_wrap(app: ClientAppCallable | str | None, records: Records | str | None) -> ClientAppCallable | str:
    """Return the app to wrap: ``app``, or one that computes the gradients of ``records``. Exactly one of the two must be given."""
    if (app is None) == (records is None):
        raise ConfigError(
            "LdpClientApp needs either `app`, a ClientApp that trains, or `records`, whose gradients it computes: give one of them"
        )
    name, given = ("app", app) if records is None else ("records", records)
    is_usable = is_import_path(given) if isinstance(given, str) else callable(given)
    if not is_usable:
        raise ConfigError(
            f"`{name}` of LdpClientApp must be a function or its import path, got {shown(given)}: give it as in "
            f'LdpClientApp({"" if name == "app" else "records="}"package.module:name")'
        )
    return RecordGradients(records) if records is not None else app  # type: ignore[return-value]  # exactly one of them is None


def _is_ldpfl_app(app: ClientAppCallable | str) -> bool:
    """Tell whether ``app`` is one of ldpfl's own functions, or the import path of one.

    Such an app returns gradients where the terms ask for them, clipped record by record where the mechanism protects records, and sums
    over records. Arrays of any other function count as trained weights, in which the influence of a single record is not bounded.
    """
    if isinstance(app, str):
        return app in _LDPFL_APPS
    # Objects are compared, not names: a decorator may copy the name of the function that it wraps.
    return any(app is getattr(sys.modules.get(module), name, None) for module, name in (path.split(":") for path in _LDPFL_APPS))


def _dtype(request: RoundRequest) -> torch.dtype:
    """Return the dtype of values before they are randomised: int64 for sums over records, which are integers, else float32."""
    return torch.float32 if record_clip_of(request.ask.mechanism) is None else torch.int64


def _randomised_values(terms: RoundTerms) -> Perturbed:
    """Return which values the mechanism randomises in a round. Only training rounds may ask for weights or their change."""
    return terms.config.mechanism.perturbed if terms.kind == "training" else "gradient"


def _no_change(request: RoundRequest) -> Tensor:
    """Return the vector (d,) that means no change, which is public: the broadcast weights, or a gradient or sums of 0."""
    if _randomised_values(request.ask.terms) == "gradient":
        return torch.zeros(request.layout.dimension, dtype=_dtype(request))
    return request.state.weights.clone()


def _log_replaced(request: RoundRequest, trouble: str) -> None:
    """Log that this round's report means no change, because of the ``trouble``."""
    reason = trouble.replace("; nothing was sent", "")  # some errors end with this, but here a report of no change is sent
    hint = "" if TRY_IT in reason else f". To see why, run {TRY_IT} on this node"
    LOGGER.error("replaced: round %d is reported as no change, because training failed: %s%s", request.ask.terms.round, reason, hint)
